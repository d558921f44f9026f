"""A Generator: call after call the tokens of ``generate``, without captures of what was captured before."""

import copy
import gc
import os
import pickle
import signal
import threading
import warnings
import weakref
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import batchwright as bw
from batchwright.errors import ArgumentError, DoesNotFitError
from batchwright.step import Generator, MemoryMonitor
from batchwright.step.graphs._watch import Watch
from batchwright.step.inference import _ranges, generation
from batchwright.step.inference._keeping import Block, Kept
from batchwright.step.inference._ranges import attend_plainly
from batchwright.step.inference._replaying import Replaying
from batchwright.step.inference.generation import generate
from batchwright.testing import EagerGraphs, FakeMemory
from tests.step.graphs.tape import TapeGraphs
from tests.thorough import num_cases

from . import shapes
from .ledger import CountedGraphs
from .test_replaying import Flaky

BUDGET = bw.MaxItems(16)


@pytest.fixture(autouse=True)
def nothing_runs_eagerly():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="generate runs eagerly")
        yield


def make(model, graphs=None, **options):
    return Generator(model, graphs=EagerGraphs() if graphs is None else graphs, **{"budget": BUDGET, **options})


def expected(model, examples, **options):
    return shapes.as_lists(generate(model, examples, graphs=False, **{"budget": BUDGET, **options}))


# The tokens of generate, call after call


@pytest.mark.parametrize("name", shapes.NAMES)
@pytest.mark.parametrize("graphs", [TapeGraphs, EagerGraphs], ids=lambda one: one.__name__)
def test_every_call_gives_the_tokens_of_generate(name, graphs):
    """Of other lengths, numbers of prompts, budgets and limits; transformers alone gives one of them."""
    model, rng = shapes.make(name), np.random.default_rng(3)
    with make(model, graphs()) as generator:
        for call in range(num_cases(6, thorough=60)):
            examples = shapes.prompts(int(rng.integers(1, 40)), longest=int(rng.integers(2, 60)), seed=call)
            limits = rng.integers(1, 30, len(examples)).tolist() if call % 3 == 1 else int(rng.integers(1, 30))
            budget = [None, bw.MaxItems(5), bw.MaxTokens(400)][call % 3]
            options = {"max_new_tokens": limits, "budget": budget, "repetition_penalty": 1.3 if call == 4 else 1.0}
            found = shapes.as_lists(generator(examples, **options))
            assert found == expected(model, examples, **options)
        ids = torch.tensor(examples[:1])
        alone = model.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=np.ravel(limits)[0].item(),
            repetition_penalty=options["repetition_penalty"],
        )  # fmt: skip
        assert found[0] == alone[0, 0 if model.config.is_encoder_decoder else len(examples[0]) :].tolist()


@pytest.mark.parametrize("name", ["m2m100", "llama"])
def test_draws_are_those_of_generate_with_the_same_seed(name):
    model, examples = shapes.make(name, torch.float64), shapes.prompts(20)
    options = {"max_new_tokens": 9, "do_sample": True, "temperature": 2.0, "budget": BUDGET}
    generator = make(model, **options)
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        found, after = shapes.as_lists(generator(examples)), torch.get_rng_state()
        torch.manual_seed(seed)
        assert found == shapes.as_lists(generate(model, examples, graphs=EagerGraphs(), **options))
        assert torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize("name", shapes.NAMES)
@pytest.mark.parametrize("has_memory", [False, True])
def test_a_second_call_captures_nothing(name, has_memory):
    model, graphs, examples = shapes.make(name), EagerGraphs(), shapes.prompts(60, longest=60)
    memory = MemoryMonitor(source=FakeMemory(10**9)) if has_memory else None
    with make(model, graphs, memory=memory, max_new_tokens=30) as generator:
        first = shapes.as_lists(generator(examples))
        num_captured, num_replayed = graphs.num_captured, graphs.num_replayed
        assert num_captured > 3  # of several layouts
        for _ in range(2):
            assert shapes.as_lists(generator(examples)) == first
        assert graphs.num_captured == num_captured
        assert graphs.num_replayed > 2 * num_replayed
    assert first == expected(model, examples, max_new_tokens=30)


def test_shapes_that_are_new_are_captured_beside_those_that_are_there():
    graphs, few, many = EagerGraphs(), [[12, 13]] * 8, [[12, 13, 14]] * 16
    generator = make(shapes.make("llama"), graphs, max_new_tokens=8, eos_token_id=[59])
    generator(many)
    captured = [graphs.num_captured]
    for examples in (few, many, few):
        generator(examples)
        captured.append(graphs.num_captured)
    assert captured[1] == captured[2] == captured[3]  # the room of many holds few, which has rows of its own there
    generator(many * 3)  # in batches of 16
    assert graphs.num_captured == captured[3]


def test_attention_over_ranges_keeps_its_graphs_too(monkeypatch):
    monkeypatch.setattr(_ranges, "_SIZES", (4, 8))
    model, graphs, examples = shapes.make("m2m100"), TapeGraphs(), shapes.prompts(40, longest=60)
    wanted = expected(model, examples, max_new_tokens=20)
    monkeypatch.setattr(_ranges, "make_attend", lambda base, device: attend_plainly)
    generator = make(model, graphs, max_new_tokens=20)
    assert shapes.as_lists(generator(examples)) == wanted
    num_captures = graphs.num_captures
    assert shapes.as_lists(generator(examples[::-1])) == wanted[::-1]
    assert graphs.num_captures == num_captures
    assert generator._kept.attend.was_called


def test_no_graph_lives_longer_than_generate(monkeypatch):
    made = []
    monkeypatch.setattr(generation, "Kept", lambda **options: made.append(Kept(**options)) or made[-1])
    graphs = EagerGraphs()
    generate(shapes.make("llama"), shapes.prompts(20), graphs=graphs, max_new_tokens=5)
    assert made[0].num_bytes == 0
    assert graphs.pool_bytes() == 0 == graphs._num_held


# A model that changes


def change_parameter(model):
    model.lm_head.weight = nn.Parameter(-model.lm_head.weight.detach())


def change_data(model):
    model.lm_head.weight.data = -model.lm_head.weight.data


def change_part(model):
    model.lm_head = nn.Linear(16, shapes.NUM_TOKENS, bias=False)


def change_type(model):
    model.double()


def change_buffer(model):
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 0.5


def change_value(model):
    model.model.layers[1].self_attn.scaling *= 2


def change_attention(model):
    model.set_attn_implementation("eager")


def change_ends(model):
    model.generation_config.eos_token_id = list(range(4, 40))


def change_size(model):
    model.resize_token_embeddings(shapes.NUM_TOKENS + 3)
    with torch.no_grad():
        model.lm_head.weight[-1] = 40.0
        model.get_input_embeddings().weight[-3:] = 2.0


def change_config(model):
    model.config.rms_norm_eps = 0.5
    for layer in model.model.layers:
        layer.input_layernorm.variance_epsilon = 0.5


def change_precision(model):
    torch.set_float32_matmul_precision("high")


def change_precision_by_its_new_name(model):
    if not hasattr(torch.backends, "fp32_precision"):
        pytest.skip("torch below 2.9 has one name for it")
    torch.backends.cuda.matmul.fp32_precision = "tf32"  # after which torch refuses to tell by the old name


CHANGES = [change_parameter, change_data, change_part, change_type, change_buffer, change_value, change_attention,
           change_ends, change_size, change_config, change_precision, change_precision_by_its_new_name]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed_is_captured_anew(change):
    """With graphs that are as blind as those of CUDA: a replay would not know of the change."""
    model, graphs, examples = shapes.make("llama"), TapeGraphs(), shapes.prompts(12)
    generator = make(model, graphs, max_new_tokens=8)
    generator(examples)
    num_captures = graphs.num_captures
    try:
        change(model)
        assert shapes.as_lists(generator(examples)) == expected(model, examples, max_new_tokens=8)
        assert graphs.num_captures > num_captures
        num_captures = graphs.num_captures
        assert shapes.as_lists(generator(examples)) == expected(model, examples, max_new_tokens=8)
        assert graphs.num_captures == num_captures
    finally:
        if hasattr(torch.backends, "fp32_precision"):
            torch.backends.cuda.matmul.fp32_precision = "none"
        torch.set_float32_matmul_precision("highest")


def test_weights_that_training_changes_count_without_a_capture():
    model, graphs, examples = shapes.make("llama"), TapeGraphs(), shapes.prompts(12)
    generator, optimizer = make(model, graphs, max_new_tokens=8), torch.optim.AdamW(model.parameters(), lr=0.1)
    seen, captures = set(), []
    for _ in range(3):
        found = shapes.as_lists(generator(examples))
        assert found == expected(model, examples, max_new_tokens=8)
        seen.add(str(found))
        captures.append(graphs.num_captures)
        model.train()
        ids = torch.tensor([[12, 13, 14, 15]])
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert len(seen) == 3
    assert len(set(captures)) == 1
    assert model.training


@pytest.mark.parametrize("change", ["set_adapter", "disable_adapter_layers", "merge_adapter", "scaling"])
def test_adapters_that_were_changed_count(change):
    """Adapters of transformers' own integration, which leaves the model its ``generate``."""
    base, peft = shapes.make("llama"), pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are two
        base.add_adapter(config, adapter_name="one")
        base.add_adapter(config, adapter_name="other")
    base.set_adapter("one")
    examples, graphs = shapes.prompts(12), TapeGraphs()
    generator = make(base.eval(), graphs, max_new_tokens=8)
    before = shapes.as_lists(generator(examples))
    assert before == expected(base, examples, max_new_tokens=8)
    layers = [part for part in base.modules() if isinstance(part, peft.tuners.lora.LoraLayer)]
    if change == "set_adapter":
        base.set_adapter("other")
    elif change == "disable_adapter_layers":
        base.disable_adapters()
    elif change == "merge_adapter":
        for layer in layers:
            layer.merge()
            layer.lora_B["one"].weight.data.mul_(5)  # no longer looked at
    else:
        for layer in layers:
            layer.scaling["one"] = 9.0
    after = shapes.as_lists(generator(examples))
    assert after == expected(base, examples, max_new_tokens=8)
    assert (after != before) == (change != "merge_adapter")


def test_what_graphs_cannot_follow_for_a_while_runs_eagerly_and_gives_the_memory_back():
    model, examples = shapes.make("llama"), shapes.prompts(12)
    generator = make(model, max_new_tokens=8)
    generator(examples)
    handle = model.lm_head.register_forward_hook(lambda part, args, output: -output)
    with pytest.warns(UserWarning, match="hooks"):
        found = generator(examples)
    assert generator._kept.num_bytes == 0
    assert shapes.as_lists(found) == expected(model, examples, max_new_tokens=8)
    handle.remove()
    assert shapes.as_lists(generator(examples)) == expected(model, examples, max_new_tokens=8)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.warns(UserWarning, match="autocast"):
        generator(examples)
    with torch.inference_mode():
        assert shapes.as_lists(generator(examples)) == expected(model, examples, max_new_tokens=8)
    assert shapes.as_lists(generator(examples)) == expected(model, examples, max_new_tokens=8)


@pytest.mark.parametrize("kind", [shapes.make_long, partial(shapes.make, "m2m100", max_position_embeddings=20)])
def test_positions_that_a_long_prompt_has_changed_are_not_replayed(kind):
    """A long prompt runs eagerly at other frequencies, or lets the table of positions grow: it lies elsewhere then."""
    model, graphs = kind(), TapeGraphs()
    short = [ids for ids in shapes.prompts(30, longest=4) if len(ids) > 1]
    generator = make(model, graphs, max_new_tokens=4)
    generator(short)
    for examples in (short, [[12] * 40, *short], short, [[13] * 50, *short], short):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = shapes.as_lists(generator(examples))
            assert found == expected(model, examples, max_new_tokens=4)


class Growing(transformers.LlamaForCausalLM):
    """Makes a table anew where a prompt is longer than it was made for, and leaves nothing of the one before."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **kwargs):
        if input_ids.shape[1] > 30:
            before, self.table = self.table, self.table.clone()
            before.fill_(torch.nan)
        found = super().forward(input_ids, attention_mask, position_ids, past_key_values, **kwargs)
        found.logits = found.logits * self.table
        return found


def test_a_prompt_that_lets_a_table_move_voids_the_graphs_of_the_same_call():
    model, graphs = shapes.make("llama"), TapeGraphs()
    model.__class__ = Growing
    model.register_buffer("table", torch.ones(1))
    generator = make(model, graphs, max_new_tokens=8)
    short = shapes.prompts(30, longest=12)
    generator([[12] * 29, *short])
    num_captures = graphs.num_captures
    for examples in ([[12] * 29, *short], [[12] * 31, *short], short):
        assert shapes.as_lists(generator(examples)) == expected(model, examples, max_new_tokens=8)
        num_captures = graphs.num_captures if len(examples[0]) == 29 else num_captures
    assert graphs.num_captures > num_captures


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.5},
        {"eos_token_id": list(range(4, 40))},
        {"min_new_tokens": 7},
        {"suppress_tokens": list(range(20, 60))},
        {"do_sample": True, "top_k": 3},
        {"max_new_tokens": [1 + place % 8 for place in range(12)]},
    ],
    ids=lambda one: next(iter(one)),
)
def test_other_settings_are_followed_at_once(options):
    model, examples = shapes.make("llama"), shapes.prompts(12)
    generator = make(model, TapeGraphs(), max_new_tokens=8)
    found = []
    for one in ({}, options, {}, options):
        torch.manual_seed(5)
        found.append(shapes.as_lists(generator(examples, **one)))
        torch.manual_seed(5)
        alone = generate(model, examples, graphs=EagerGraphs(), **{"max_new_tokens": 8, "budget": BUDGET, **one})
        assert found[-1] == shapes.as_lists(alone)
    assert found[0] == found[2] != found[1] == found[3]


class Overflowing(transformers.LlamaForCausalLM):
    """Computes no numbers for a prompt with a token, as half precision does where it overflows."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **kwargs):
        embeds = self.model.embed_tokens(input_ids)
        embeds = torch.where((input_ids == 11)[..., None], torch.nan, embeds)
        return super().forward(
            inputs_embeds=embeds, attention_mask=attention_mask, position_ids=position_ids,
            past_key_values=past_key_values, **kwargs,
        )  # fmt: skip


def test_what_is_no_number_does_not_spoil_the_next_batch():
    model = shapes.make("llama")
    model.__class__ = Overflowing
    options = {"max_new_tokens": 9, "eos_token_id": [59]}
    generator, good = make(model, **options), [[12, 13], [14, 15, 16]] * 6
    wanted = expected(model, good, **options)
    assert shapes.as_lists(generator(good)) == wanted
    generator([[11] * 3, *good, [11] * 2])
    assert shapes.as_lists(generator(good)) == wanted
    # Within a call too.
    both = generate(model, [[11] * 3] * 16 + good, graphs=EagerGraphs(), budget=BUDGET, **options)
    assert shapes.as_lists(both[16:]) == wanted


# Memory


class Full(TapeGraphs):
    """Runs out of memory at the captures and replays that are counted off."""

    def __init__(self):
        super().__init__()
        self.num_left, self.num_failures = None, 0

    def fail(self):
        if self.num_left is not None:
            self.num_left -= 1
            if self.num_left < 0:
                self.num_left, self.num_failures = None, self.num_failures + 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def capture(self, function, *, writes=()):
        self.fail()
        replay = super().capture(function, writes=writes)

        def failing():
            self.fail()
            replay()

        return failing


@pytest.mark.parametrize("name", shapes.NAMES)
@pytest.mark.parametrize("num_left", [0, 1, 7])
def test_memory_that_runs_out_in_a_later_call_takes_what_was_kept_and_splits_nothing(name, num_left, monkeypatch):
    model, graphs, examples = shapes.make(name), Full(), shapes.prompts(40)
    generator, seen = make(model, graphs, max_new_tokens=12), []
    first = shapes.as_lists(generator(examples))
    run = Replaying.run
    monkeypatch.setattr(Replaying, "run", lambda self, *args: seen.append(len(args[0])) or run(self, *args))
    graphs.num_left = num_left
    assert shapes.as_lists(generator(examples)) == first == expected(model, examples, max_new_tokens=12)
    assert graphs.num_failures == 1
    assert sorted(seen) in ([8, 16, 16, 16], [8, 8, 16, 16])  # one batch again, none in pieces
    # Memory that runs out once more in the same call splits the batch, as in generate.
    assert shapes.as_lists(generator(examples)) == first


def test_memory_that_runs_out_in_an_eager_call_takes_what_was_kept():
    model, examples = shapes.make("llama"), shapes.prompts(12)
    generator = make(model, max_new_tokens=6)
    generator(examples)
    kept = generator._kept

    class Greedy(type(model)):
        def forward(self, *args, **kwargs):
            if kept.num_bytes:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return super().forward(*args, **kwargs)

    model.__class__ = Greedy
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = generator(examples, num_beams=2)
    assert kept.num_bytes == 0
    model.__class__ = type(shapes.make("llama"))
    assert shapes.as_lists(found) == expected(model, examples, max_new_tokens=6, num_beams=2)


@pytest.mark.parametrize("name", shapes.NAMES)
def test_memory_that_runs_out_anywhere_in_any_call_loses_nothing(name):
    model, num_failures = shapes.make(name), 0
    for seed in range(num_cases(3, thorough=40)):
        graphs = Flaky(np.random.default_rng(seed))
        generator = make(model, graphs, max_new_tokens=9)
        for call in range(3):
            examples = shapes.prompts(20, longest=20, seed=call)
            try:
                found = generator(examples)
            except DoesNotFitError:
                continue
            assert shapes.as_lists(found) == expected(model, examples, max_new_tokens=9)
        num_failures += graphs.num_failures
    assert num_failures


def test_a_budget_in_bytes_of_a_later_call_is_kept(counted):
    """What was kept goes if it does not leave enough, and the peak stays below the bytes of that call."""
    model, ledger, _ = counted("m2m100", 10**9)
    sizes = [(b, source, new) for b in (1, 4, 16) for source in (8, 32) for new in (4, 16)]
    fitted = bw.MemoryModel.fit(sizes, [1000 + 40 * b * (source + new) for b, source, new in sizes])  # far too few
    examples, options = shapes.prompts(200, 60), {"max_new_tokens": 24, "eos_token_id": [59]}
    generator = Generator(
        model, graphs=CountedGraphs(ledger), memory=MemoryMonitor(source=ledger), count_output=True, **options
    )
    wanted = None
    for most in (3 * 10**6, 10**6, 3 * 10**6):
        found = shapes.as_lists(generator(examples, budget=fitted.budget(most)))
        wanted = wanted or found
        assert found == wanted
        assert ledger.num_ooms == 0
        assert 0.3 * most < ledger.used_bytes <= most
    generator.close()
    assert ledger.used_bytes == 0


def test_less_memory_beside_other_work_gives_what_was_kept_back(counted):
    model, ledger, _ = counted("llama", 3 * 10**6)
    examples, options = shapes.prompts(200, 60), {"max_new_tokens": 24, "eos_token_id": [59]}
    generator = Generator(model, graphs=CountedGraphs(ledger), memory=MemoryMonitor(source=ledger), **options)
    first = shapes.as_lists(generator(examples))
    held = ledger.used_bytes
    others = ledger.total_bytes - held - 10**5
    ledger.take(others)  # batches may fill 0.8 of all, so that what is held is too much
    assert shapes.as_lists(generator(examples)) == first
    assert ledger.num_ooms == 0
    assert ledger.used_bytes - others < held
    generator.close()
    assert ledger.used_bytes == others


def test_a_block_holds_one_layout_after_the_other():
    block = Block(256, torch.device("cpu"))
    cut = block.cutter()
    first, second = cut((4, 4), torch.float32), cut((3, 3), torch.float32)
    assert first.data_ptr() % 16 == second.data_ptr() % 16 == 0
    first.fill_(1)
    assert not second.any()
    assert cut((64,), torch.float32) is None
    assert block.cutter()((2, 2), torch.float32).tolist() == [[0, 0], [0, 0]]


def test_rooms_of_many_shapes_do_not_pile_up():
    graphs = EagerGraphs()
    generator = make(shapes.make("gpt2"), graphs)
    for most in range(8, 8 * 24, 8):
        generator([[12, 13]] * 16, max_new_tokens=most, eos_token_id=[*range(4, 50)])
        assert len(generator._kept._spaces) <= 16


# Its life


def test_close_gives_memory_back_and_a_later_call_takes_it_again():
    model, graphs, examples = shapes.make("llama"), EagerGraphs(bytes_per_capture=10), shapes.prompts(20)
    with make(model, graphs, max_new_tokens=8) as generator:
        first = shapes.as_lists(generator(examples))
        assert graphs.pool_bytes() > 0
        assert generator._kept.num_bytes > 0
        generator.close()
        assert graphs.pool_bytes() == generator._kept.num_bytes == 0
        assert shapes.as_lists(generator(examples)) == first
    assert graphs.pool_bytes() == 0


def test_a_generator_that_nobody_holds_goes_with_its_memory_and_the_model():
    generator = make(shapes.make("llama"), TapeGraphs(), max_new_tokens=8)
    generator(shapes.prompts(12))
    found = weakref.ref(generator), weakref.ref(generator._model), weakref.ref(generator._kept._block)
    del generator
    gc.collect()
    assert [one() for one in found] == [None] * 3


def test_an_error_of_the_user_leaves_nothing_half_done():
    model, examples = shapes.make("llama"), shapes.prompts(20)
    generator = make(model, max_new_tokens=8)
    first = shapes.as_lists(generator(examples))
    forward = type(model).forward

    class Stopped(type(model)):
        def forward(self, *args, **kwargs):
            raise KeyboardInterrupt

    model.__class__ = Stopped
    with pytest.raises(KeyboardInterrupt):
        generator(examples)
    model.__class__ = type(shapes.make("llama"))
    assert type(model).forward is forward
    with pytest.raises(ArgumentError, match="token ids must be from 0"):
        generator([[10**6]] * 20)
    assert shapes.as_lists(generator(examples)) == first


def test_threads_take_turns():
    model, graphs = shapes.make("llama"), EagerGraphs()
    generator, found = make(model, graphs, max_new_tokens=8), {}
    lists = [shapes.prompts(12, seed=seed) for seed in range(4)]
    wanted = [expected(model, examples, max_new_tokens=8) for examples in lists]
    start = threading.Barrier(4)

    def call(place):
        start.wait()
        found[place] = [shapes.as_lists(generator(lists[place])) for _ in range(3)]

    threads = [threading.Thread(target=call, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[place] for place in range(4)] == [[one] * 3 for one in wanted]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_process_that_was_forked_within_a_call_of_another_thread_does_not_wait_for_it():
    model, examples, inside, go_on = shapes.make("llama"), shapes.prompts(12), threading.Event(), threading.Event()
    wanted = expected(model, examples, max_new_tokens=8)

    def lengths(example):
        inside.set()
        assert go_on.wait(60)
        return len(example)

    generator = make(model, max_new_tokens=8)
    thread = threading.Thread(target=lambda: generator(examples, lengths=lengths))
    thread.start()
    assert inside.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(60)
        os._exit(0 if shapes.as_lists(generator(examples)) == wanted else 3)
    _, status = os.waitpid(child, 0)
    go_on.set()
    thread.join()
    assert os.waitstatus_to_exitcode(status) == 0
    assert shapes.as_lists(generator(examples)) == wanted


def test_a_call_inside_a_call_is_refused():
    model = shapes.make("llama")
    generator = Generator(model, collate=lambda examples: generator(examples), lengths=None, max_new_tokens=4)
    generator._kwargs.pop("lengths")
    with pytest.raises(ArgumentError, match="used inside its own call"):
        generator(shapes.prompts(4))


def test_settings_of_a_generator_are_given_to_it_and_not_to_a_call():
    generator = make(shapes.make("llama"), max_new_tokens=4)
    with pytest.raises(ArgumentError, match=r"graphs belongs to all calls: give it to Generator\(model, graphs="):
        generator([[12]], graphs=False)
    with pytest.raises(ArgumentError, match="graphs must be False, 'auto' or True"):
        Generator(shapes.make("llama"), graphs="always")
    with pytest.raises(ArgumentError, match="budget"):
        Generator(shapes.make("llama"), budget=8)
    assert [len(row) for row in generator([[12]], max_new_tokens=2, eos_token_id=[59])] == [2]
    assert generator([]) == []


def test_a_generator_is_neither_copied_nor_pickled():
    generator = make(shapes.make("llama"))
    for function in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="belongs to its process"):
            function(generator)


def test_a_generator_without_graphs_keeps_nothing():
    model, examples = shapes.make("t5"), shapes.prompts(12)
    generator = make(model, False, max_new_tokens=6)
    for _ in range(2):
        assert shapes.as_lists(generator(examples)) == expected(model, examples, max_new_tokens=6)
        assert generator._kept.num_bytes == 0


@pytest.mark.parametrize("most", [10**6, 2 * 10**6])
def test_batches_that_fill_the_memory_keep_their_graphs_beside_each_other(most, counted, monkeypatch):
    """Several layouts share one block of it, and a later call plans the same batches although the block is in use."""
    monkeypatch.setattr(Watch, "has_changed", False)  # the counts of this test change with every pass
    model, ledger, _ = counted("llama", 10**9)
    lengths = np.clip(np.exp(np.random.default_rng(0).normal(np.log(12), 1.0, 300)), 1, 120).astype(int)
    graphs, examples = CountedGraphs(ledger), [[12 + place % 40] * length for place, length in enumerate(lengths)]
    sizes = [(b, source, new) for b in (1, 4, 16) for source in (8, 32) for new in (4, 16)]
    fitted = bw.MemoryModel.fit(sizes, [1000 + 40 * b * (source + new) for b, source, new in sizes])  # far too few
    generator = Generator(
        model, budget=fitted.budget(most), graphs=graphs, memory=MemoryMonitor(source=ledger), count_output=True,
        max_new_tokens=24, eos_token_id=[*range(4, 14)],
    )  # fmt: skip
    first, num_captures = shapes.as_lists(generator(examples)), graphs.num_captures
    assert num_captures > 4
    assert len(generator._kept._spaces) > 1
    for _ in range(2):
        assert shapes.as_lists(generator(examples)) == first
    assert graphs.num_captures == num_captures
    assert 0.5 * most < ledger.peak_bytes <= most
