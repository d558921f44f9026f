"""Decoding by replays, with graphs that run on a CPU: the tokens of eager generation, in every order of ends."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode

import batchwright as bw
from batchwright.errors import ArgumentError, DoesNotFitError, LengthsError
from batchwright.step.inference import _ranges
from batchwright.step.inference._decoding import Decoder
from batchwright.step.inference._options import read_options
from batchwright.step.inference._ranges import attend_plainly
from batchwright.step.inference._replaying import Replaying
from batchwright.step.inference._rounds import Rounds, _Looks
from batchwright.step.inference.generation import generate
from batchwright.testing import EagerGraphs
from tests.step.graphs.tape import TapeGraphs
from tests.thorough import num_cases

from . import shapes

ODD_END = [59]  # seldom the best token, so that rows end by their limits


@pytest.fixture(autouse=True)
def nothing_runs_eagerly():
    """Fail where graphs give up, unless a test expects it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="generate runs eagerly")
        yield


def both(model, examples, **options):
    """Return results by replays and by ``model.generate``, and the graphs."""
    graphs = TapeGraphs()
    found = generate(model, examples, graphs=graphs, **options)
    return shapes.as_lists(found), shapes.as_lists(generate(model, examples, graphs=False, **options)), graphs


# The tokens of eager generation


@pytest.mark.parametrize("name", shapes.NAMES)
def test_tokens_are_those_of_eager_generation(name):
    found, expected, graphs = both(shapes.make(name), shapes.prompts(), budget=bw.MaxItems(9), max_new_tokens=40)
    assert found == expected
    assert graphs.num_replays > 10
    assert name == "t5" or len({len(row) for row in expected}) > 2  # none of its rows ends before the limit


@pytest.mark.parametrize("name", shapes.NAMES)
@pytest.mark.parametrize("graphs", [TapeGraphs, EagerGraphs], ids=lambda one: one.__name__)
def test_many_prompts_give_the_tokens_of_eager_generation(name, graphs):
    model, examples = shapes.make(name), shapes.prompts(num_cases(40, thorough=500), longest=60)
    options = {"max_new_tokens": 40, "budget": bw.MaxItems(128)}
    found = generate(model, examples, graphs=graphs(), **options)
    assert shapes.as_lists(found) == shapes.as_lists(generate(model, examples, graphs=False, **options))


@pytest.mark.parametrize("name", shapes.NAMES)
@pytest.mark.parametrize("graphs", [TapeGraphs, EagerGraphs, lambda: False], ids=["tape", "plain", "eager"])
def test_many_prompts_with_limits_of_their_own_give_what_transformers_gives_one_by_one(name, graphs):
    model, num = shapes.make(name), num_cases(40, thorough=500)
    examples, limits = shapes.prompts(num, longest=60, seed=11), np.random.default_rng(5).integers(1, 41, num).tolist()
    found = generate(model, examples, graphs=graphs(), max_new_tokens=limits, budget=bw.MaxItems(64))
    is_decoder_only = not model.config.is_encoder_decoder
    for ids, limit, row in zip(examples, limits, found, strict=True):
        alone = torch.tensor([ids])
        wanted = model.generate(input_ids=alone, attention_mask=torch.ones_like(alone), max_new_tokens=limit)[0]
        assert row.tolist() == wanted[len(ids) * is_decoder_only :].tolist()


@pytest.mark.parametrize("name", shapes.NAMES)
def test_memory_that_runs_out_anywhere_loses_nothing(name):
    """At prompts, measurements, captures and replays, before and after the work, with the same seed for each case."""
    model = shapes.make(name)
    num_failures = 0
    for seed in range(num_cases(4, thorough=60)):
        rng = np.random.default_rng(seed)
        examples = shapes.prompts(24, longest=20, seed=seed)
        graphs = Flaky(rng)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            try:
                found = generate(model, examples, graphs=graphs, max_new_tokens=9, budget=bw.MaxItems(24))
            except DoesNotFitError:  # an example failed on its own too
                continue
        num_failures += graphs.num_failures
        assert shapes.as_lists(found) == shapes.as_lists(generate(model, examples, graphs=False, max_new_tokens=9))
    assert num_failures


class Flaky(TapeGraphs):
    """Runs out of memory now and then."""

    def __init__(self, rng):
        super().__init__()
        self._rng, self.num_failures = rng, 0

    def fail(self):
        if self._rng.random() < 0.03:
            self.num_failures += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def capture(self, function, *, writes=()):
        self.fail()
        replay = super().capture(function, writes=writes)
        self.fail()

        def flaky():
            self.fail()
            replay()
            self.fail()

        return flaky

    def measure(self, function):
        self.fail()
        found = super().measure(function)
        self.fail()
        return found


@pytest.mark.parametrize("name", shapes.NAMES)
@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 9, "min_new_tokens": 5},
        {"max_new_tokens": 9, "repetition_penalty": 1.7},
        {"max_new_tokens": 9, "suppress_tokens": [20, 21, 22, 23], "begin_suppress_tokens": list(range(24, 50))},
        {"max_new_tokens": 9, "eos_token_id": 7, "pad_token_id": 7},
        {"max_length": 45},
        {"generation_config": transformers.GenerationConfig(max_length=40, eos_token_id=[5, 6], pad_token_id=0)},
    ],
    ids=["min_new_tokens", "repetition_penalty", "suppress_tokens", "pad is end", "max_length", "configuration"],
)
def test_settings_mean_the_same(name, options):
    found, expected, graphs = both(shapes.make(name), shapes.prompts(7), **options)
    assert found == expected
    assert graphs.num_replays


@pytest.mark.parametrize("name", ["m2m100", "t5"])
@pytest.mark.parametrize("options", [{"forced_bos_token_id": 33}, {"min_length": 6}], ids=lambda one: next(iter(one)))
def test_settings_of_an_encoder_decoder_mean_the_same(name, options):
    options = {**options, "max_new_tokens": 8, "begin_suppress_tokens": list(range(20, 40))}
    found, expected, _ = both(shapes.make(name), shapes.prompts(7), **options)
    assert found == expected
    if "forced_bos_token_id" in options:
        assert {row[1] for row in found} == {33}


@pytest.mark.parametrize("name", ["m2m100", "t5"])
def test_a_prompt_of_the_decoder_is_continued(name):
    start = 2 if name == "m2m100" else 0
    examples = [
        {"input_ids": ids, "decoder_input_ids": [start, 20 + place]} for place, ids in enumerate(shapes.prompts(5))
    ]
    found, expected, graphs = both(shapes.make(name), examples, max_new_tokens=8)
    assert found == expected
    assert graphs.num_replays


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_mask_with_holes_counts(name):
    examples = [
        {"input_ids": ids, "attention_mask": [int(place % 3 != 1) for place in range(len(ids))][::-1]}
        for ids in shapes.prompts(6)
    ]
    examples = [{**one, "attention_mask": [*one["attention_mask"][:-1], 1]} for one in examples]
    found, expected, _ = both(shapes.make(name), examples, max_new_tokens=8)
    assert found == expected


@pytest.mark.parametrize("name", shapes.NAMES)
def test_every_example_has_its_own_limit(name):
    limits = [1 + place * 5 % 23 for place in range(14)]
    options = {"max_new_tokens": limits, "eos_token_id": ODD_END}
    found, expected, _ = both(shapes.make(name), shapes.prompts(14), budget=bw.MaxItems(14), **options)
    assert found == expected
    model = shapes.make(name)
    for row, example, limit in zip(found, shapes.prompts(14), limits, strict=True):
        (alone,) = generate(model, [example], graphs=False, max_new_tokens=limit, eos_token_id=ODD_END)
        assert row == alone.tolist()


@pytest.mark.parametrize("order", ["up", "down", "mixed", "together"])
def test_rows_may_end_in_any_order(order):
    limits = {"up": range(1, 41), "down": range(40, 0, -1), "together": [40] * 40}
    limits["mixed"] = np.random.default_rng(0).permutation(40) + 1
    options = {"max_new_tokens": list(limits[order]), "eos_token_id": ODD_END, "budget": bw.MaxItems(40)}
    # One length of input, so that the order of the examples is that of the slots.
    examples = [[12 + place, 13, 14] for place in range(40)]
    found, expected, graphs = both(shapes.make("llama"), examples, **options)
    assert found == expected
    # 8 rows to compare; 40, 24, 16 and 8 rows and a width of 32, then 48: ends make room, unless all come at once.
    assert (graphs.num_captures > 3) == (order != "together")


@pytest.mark.parametrize(("ends", "captures"), [(4, True), (12, False)])
def test_rows_move_together_where_that_can_pay_for_a_capture(ends, captures, monkeypatch):
    """From 40 rows to 16 with 16 or with 8 steps left: 24 x 16 rows are more than 8 x 40, and 24 x 8 are not."""
    replayed, graph_of = set(), Rounds._graph

    def noted(self, num_rows, width):
        replayed.add(num_rows)
        return graph_of(self, num_rows, width)

    monkeypatch.setattr(Rounds, "_graph", noted)
    graphs, model = TapeGraphs(), shapes.make("llama")
    examples = [[12 + place, 13, 14] for place in range(40)]
    options = {"max_new_tokens": [ends] * 24 + [20] * 16, "eos_token_id": [], "budget": bw.MaxItems(40)}
    runner = replaying(model, {"max_new_tokens": 20, "eos_token_id": []}, graphs)
    with torch.inference_mode():
        found = runner.run(examples, list(range(40)), np.array(options["max_new_tokens"]))
    assert shapes.as_lists(found) == shapes.as_lists(generate(model, examples, graphs=False, **options))
    assert replayed == ({8, 40, 16} if captures else {8, 40})


class Quiet(TapeGraphs):
    """Says whether it captures or replays; what else happens is launched by the host."""

    is_busy = False

    def busy(self, function):
        self.is_busy = True
        try:
            return function()
        finally:
            self.is_busy = False

    def capture(self, function, *, writes=()):
        replay = self.busy(lambda: super(Quiet, self).capture(function, writes=writes))
        return lambda: self.busy(replay)


WAITING = {"item", "tolist", "cpu", "cuda", "nonzero", "unique", "masked_select", "__bool__", "__int__", "__float__"}
SENDING = {"to", "copy_", "tensor", "as_tensor"}


class Calls(TorchFunctionMode):
    """Counts what makes a host wait for CUDA, and what is sent without waiting."""

    def __init__(self, graphs):
        super().__init__()
        self._graphs, self.waits, self.sent = graphs, [], []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if not self._graphs.is_busy:
            has_list = name in ("__getitem__", "__setitem__") and isinstance(args[1], list | np.ndarray)
            if name in WAITING or has_list or (name in SENDING and not kwargs.get("non_blocking")):
                self.waits.append(name)
            elif name in SENDING or name == "index_copy_":
                self.sent.append(name)
        return function(*args, **kwargs)


@pytest.mark.parametrize("name", shapes.NAMES)
@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_between_replays_the_host_waits_for_looks_alone(name, penalty, monkeypatch):
    model, graphs, run, read = shapes.make(name), Quiet(), Rounds.run, _Looks.read
    calls, looks = Calls(graphs), []

    def noted(self, *args, **options):
        with calls:
            run(self, *args, **options)

    monkeypatch.setattr(Rounds, "run", noted)
    monkeypatch.setattr(_Looks, "read", lambda self: looks.append(read(self)) or looks[-1])
    examples = shapes.prompts(64, longest=60)
    options = {"max_new_tokens": 60, "eos_token_id": [*range(4, 24)], "repetition_penalty": penalty}
    runner = replaying(model, options, graphs, attends=False)
    runner.learn(examples, None)  # its first step runs eagerly
    calls.waits.clear()
    num_before = graphs.num_replays
    found = runner.run(examples, list(range(64)), None)
    assert shapes.as_lists(found) == shapes.as_lists(generate(model, examples, graphs=False, **options))
    assert "index_copy_" in calls.sent  # rows were moved
    assert not calls.waits
    assert sum(look is not None for look in looks) <= (graphs.num_replays - num_before) / 2


@pytest.mark.parametrize("name", ["m2m100", "llama"])
def test_one_example_and_a_very_long_prompt(name):
    found, expected, _ = both(shapes.make(name), [shapes.prompts(1, 200)[0] * 2], max_new_tokens=8)
    assert found == expected
    found, expected, _ = both(shapes.make(name), [[12], [13] * 200, [14] * 3], max_new_tokens=4)
    assert found == expected


def test_one_new_token_needs_no_graph():
    found, expected, graphs = both(shapes.make("llama"), shapes.prompts(3), max_new_tokens=1)
    assert found == expected
    assert graphs.num_captures == 0


def test_graphs_are_used_again_for_batches_of_the_same_room():
    graphs = TapeGraphs()
    examples = [[12 + place % 40, 13, 14] for place in range(32)]
    options = {"max_new_tokens": 12, "eos_token_id": ODD_END, "budget": bw.MaxItems(8)}
    generate(shapes.make("llama"), examples, graphs=graphs, **options)
    # One graph for the rows that are compared: 3 steps, the very first of which runs eagerly. Then 11 in each batch.
    assert graphs.num_captures == 2
    assert graphs.num_replays == 2 + 4 * 11


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_types_are_decoded_too(dtype):
    found, expected, _ = both(shapes.make("m2m100", dtype), shapes.prompts(6), max_new_tokens=6)
    assert [len(row) for row in found] == [len(row) for row in expected] or dtype is torch.bfloat16
    assert found == expected or dtype is torch.bfloat16  # near ties


def test_the_model_stays_in_its_mode_and_results_can_be_trained_on():
    model = shapes.make("t5", dropout_rate=0.5).train()
    found, expected, _ = both(model, shapes.prompts(4), max_new_tokens=6)
    assert found == expected
    assert model.training
    (row,) = generate(model, [[12]], graphs=TapeGraphs(), max_new_tokens=3)
    assert not row.is_inference()


# Attention over ranges of keys


def replaying(model, options, graphs, *, attends=True):
    decoder = Decoder(model, options, None, None, 1)
    read = read_options(decoder.base, decoder.model, decoder.kwargs)
    return Replaying(
        decoder, read, lambda: graphs, seed=0, give_up=pytest.fail, attend=attend_plainly if attends else None
    )


@pytest.fixture
def small_heads(monkeypatch):
    """Let heads as small as those of the models here be attended over ranges."""
    monkeypatch.setattr(_ranges, "_SIZES", (4, 8))


def test_models_of_these_tests_have_heads_of_these_sizes(small_heads):
    for name in ("m2m100", "gpt2", "llama"):
        runner = replaying(shapes.make(name), {"max_new_tokens": 4}, TapeGraphs())
        runner.run([[12], [13, 14]], [0, 1], None)
        assert runner._attend.was_called, name


@pytest.mark.parametrize("name", shapes.NAMES)
@pytest.mark.usefixtures("small_heads")
def test_attention_over_ranges_gives_the_same_tokens(name):
    model, examples = shapes.make(name), shapes.prompts(20)
    runner = replaying(model, {"max_new_tokens": 30}, TapeGraphs())
    with torch.inference_mode():
        found = shapes.as_lists(runner.run(examples, list(range(20)), None))
    assert found == shapes.as_lists(generate(model, examples, graphs=False, max_new_tokens=30))
    assert {width for _, width in runner._space.rounds[0]._graphs} == {runner._space.layout.width}
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("name", "num_captures"), [("m2m100", 2), ("gpt2", 2), ("llama", 2), ("t5", 4)])
@pytest.mark.usefixtures("small_heads")
def test_with_ranges_shorter_batches_use_the_graphs_of_longer_ones(name, num_captures):
    """Those of T5 do not: it adds a bias of positions to all of a cache, however little of it is filled."""
    model, graphs = shapes.make(name), TapeGraphs()
    runner = replaying(model, {"max_new_tokens": 12, "eos_token_id": ODD_END}, graphs)
    batches = [shapes.prompts(16, longest=longest, seed=longest) for longest in (60, 30, 8)]
    with torch.inference_mode():
        found = [shapes.as_lists(runner.run(batch, list(range(16)), None)) for batch in batches]
    for batch, rows in zip(batches, found, strict=True):
        options = {"max_new_tokens": 12, "eos_token_id": ODD_END, "budget": bw.MaxItems(16)}
        assert rows == shapes.as_lists(generate(model, batch, graphs=False, **options))
    # One graph for the rows that are compared, one for all batches of 16; no row ends before the last step.
    assert graphs.num_captures == num_captures


# Draws


def test_draws_depend_on_the_seed_and_not_on_the_batch():
    model, examples = shapes.make("llama", torch.float64), shapes.prompts(12)
    runs = []
    for seed, size in ((7, 12), (7, 5), (8, 12)):
        torch.manual_seed(seed)
        options = {"max_new_tokens": 8, "do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 2.0}
        runs.append(
            shapes.as_lists(generate(model, examples, graphs=TapeGraphs(), budget=bw.MaxItems(size), **options))
        )
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


@pytest.mark.parametrize("options", [{"top_k": 0}, {"top_k": 5, "temperature": 3.0}, {"top_k": 0, "top_p": 0.8}])
def test_draws_have_the_distribution_of_eager_ones(options):
    """The second token is drawn by a graph; its counts over many draws are compared by chi-square."""
    model = shapes.make("gpt2", torch.float64)
    model.lm_head.weight.data *= 0.1  # flat enough for all tokens to come
    options = {**options, "do_sample": True, "max_new_tokens": 2, "eos_token_id": ODD_END, "min_new_tokens": 2}
    counts = []
    for graphs in (TapeGraphs(), False):
        torch.manual_seed(3)
        rows = generate(model, [[12, 13]] * 3000, graphs=graphs, budget=bw.MaxItems(1000), **options)
        counts.append(np.bincount([int(row[1]) for row in rows], minlength=shapes.NUM_TOKENS))
    one, other = (count[(counts[0] + counts[1]) > 10].astype(float) for count in counts)
    distance = float(((one - other) ** 2 / (one + other)).sum())
    free = len(one) - 1
    assert free >= 3
    assert distance < free + 4 * (2 * free) ** 0.5


# Memory


@pytest.mark.parametrize("when", ["capture", "replay"])
def test_running_out_of_memory_splits_the_batch_and_changes_no_result(when):
    class Fails(TapeGraphs):
        num_failures = 0

        def capture(self, function, *, writes=()):
            replay = super().capture(function, writes=writes)
            if when == "capture":
                self.fail_once()
                return replay

            def failing():
                self.fail_once()
                replay()

            return failing

        def fail_once(self):
            if Fails.num_failures == 0:
                Fails.num_failures += 1
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    model, examples = shapes.make("m2m100"), shapes.prompts(16)
    options = {"max_new_tokens": 12, "budget": bw.MaxItems(16)}
    found = shapes.as_lists(generate(model, examples, graphs=Fails(), **options))
    assert Fails.num_failures == 1
    assert found == shapes.as_lists(generate(model, examples, graphs=False, **options))


class Small(transformers.LlamaForCausalLM):
    """A model that cannot read more than so many tokens of a prompt at once."""

    most = 40

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **kwargs):
        if input_ids.numel() > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, **kwargs)


def make_small(most):
    model = shapes.make("llama")
    model.__class__ = Small
    model.most = most
    return model


def test_running_out_of_memory_at_the_prompt_splits_the_batch():
    examples = shapes.prompts(12, longest=9)
    found = generate(make_small(40), examples, graphs=TapeGraphs(), max_new_tokens=6, budget=bw.MaxItems(12))
    expected = generate(shapes.make("llama"), examples, graphs=False, max_new_tokens=6)
    assert shapes.as_lists(found) == shapes.as_lists(expected)


def test_an_example_that_does_not_fit_alone_is_named():
    with pytest.raises(DoesNotFitError, match=r"example 1 of length \[9, 3\] does not fit on its own"):
        generate(make_small(5), [[11], [12] * 9], graphs=TapeGraphs(), max_new_tokens=3)


def test_an_example_without_a_token_is_refused():
    with pytest.raises(LengthsError, match="example 1"):
        generate(shapes.make("llama"), [[11], []], graphs=TapeGraphs(), max_new_tokens=2)


# What graphs cannot follow


def runs_eagerly(model, reason, examples=None, **options):
    """Say that a call gives the results of ``model.generate``, warns once, and is refused where graphs are a must."""
    examples, options = examples or shapes.prompts(6), {"max_new_tokens": 5, **options}
    graphs = TapeGraphs()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.manual_seed(0)
        found = generate(model, examples, graphs=graphs, budget=bw.MaxItems(3), **options)
    said = [str(one.message) for one in caught if "runs eagerly" in str(one.message)]
    assert len(said) == 1
    assert reason in said[0]
    torch.manual_seed(0)
    expected = generate(model, examples, graphs=False, budget=bw.MaxItems(3), **options)
    assert shapes.as_lists(found) == shapes.as_lists(expected)


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"no_repeat_ngram_size": 2},
        {"bad_words_ids": [[20]]},
        {"renormalize_logits": True},
        {"forced_eos_token_id": 4},
        {"remove_invalid_values": True},
        {"exponential_decay_length_penalty": (2, 1.5)},
        {"sequence_bias": [[[20], -5.0]]},
        {"guidance_scale": 1.5},
        {"typical_p": 0.5, "do_sample": True},
        {"epsilon_cutoff": 0.01, "do_sample": True},
        {"max_time": 100.0},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"prompt_lookup_num_tokens": 2},
        {"logits_processor": transformers.LogitsProcessorList([transformers.TemperatureLogitsWarper(2.0)])},
        {"stopping_criteria": transformers.StoppingCriteriaList([transformers.MaxLengthCriteria(100)])},
        {"prefix_allowed_tokens_fn": lambda batch, ids: list(range(10, 30))},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_setting_that_graphs_do_not_honour_runs_eagerly(options):
    name = next(iter(options))
    examples = shapes.prompts(1) if name == "prompt_lookup_num_tokens" else None  # which takes one example at a time
    runs_eagerly(shapes.make("llama"), name, examples, **options)


def test_a_setting_of_the_models_own_configuration_counts_too():
    model = shapes.make("m2m100")
    model.generation_config.no_repeat_ngram_size = 2
    runs_eagerly(model, "no_repeat_ngram_size=2")
    model = shapes.make("m2m100")
    model.generation_config.a_setting_of_tomorrow = 3
    runs_eagerly(model, "a_setting_of_tomorrow=3")


def test_a_model_with_a_sliding_window_runs_eagerly():
    torch.manual_seed(0)
    sizes = {**shapes.LLAMA, "sliding_window": 4}
    model = transformers.MistralForCausalLM(transformers.MistralConfig(**sizes)).eval()
    runs_eagerly(model, "sliding window")


def test_a_model_with_a_state_of_another_kind_runs_eagerly():
    torch.manual_seed(0)
    sizes = {"vocab_size": shapes.NUM_TOKENS, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)).eval()
    runs_eagerly(model, "Mamba")


def test_a_model_with_hooks_runs_eagerly():
    model = shapes.make("llama")
    handle = model.model.layers[0].register_forward_hook(lambda *_: None)
    runs_eagerly(model, "hooks")
    handle.remove()
    assert both(model, shapes.prompts(4), max_new_tokens=4)[0]


def test_a_model_with_a_generate_of_its_own_runs_eagerly():
    class Own(transformers.LlamaForCausalLM):
        def generate(self, *args, **kwargs):
            return super().generate(*args, **kwargs)

    model = shapes.make("llama")
    model.__class__ = Own
    runs_eagerly(model, "Own has a generate of its own")


def test_a_model_that_reads_values_runs_eagerly():
    class Reading(transformers.LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            found = super().forward(*args, **kwargs)
            assert float(found.logits.sum()) is not None
            return found

    model = shapes.make("llama")
    model.__class__ = Reading
    runs_eagerly(model, "a value of the device was read")


def test_a_model_whose_replays_differ_runs_eagerly():
    class Counting(transformers.LlamaForCausalLM):
        num_calls = 0

        def forward(self, *args, **kwargs):
            found = super().forward(*args, **kwargs)
            Counting.num_calls += 1
            found.logits[..., Counting.num_calls % 7] += 50.0  # a replay counts no calls
            return found

    model = shapes.make("llama")
    model.__class__ = Counting
    with pytest.warns(UserWarning, match="of new token .*(differ|not the one)"):
        generate(model, shapes.prompts(6), graphs=TapeGraphs(), max_new_tokens=9)


def test_fields_that_graphs_do_not_know_run_eagerly():
    examples = [{"input_ids": ids, "token_type_ids": [20] * len(ids)} for ids in shapes.prompts(6)]
    runs_eagerly(shapes.make("gpt2"), "token_type_ids", examples)


def test_graphs_that_are_a_must_are_refused_with_the_reason():
    with pytest.raises(ArgumentError, match="needs a model on a CUDA device"):
        generate(shapes.make("llama"), [[11]], graphs=True, max_new_tokens=2)
    with pytest.raises(ArgumentError, match="graphs must be False, 'auto' or True"):
        generate(shapes.make("llama"), [[11]], graphs="always", max_new_tokens=2)


def test_auto_on_a_cpu_says_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(shapes.make("llama"), [[11]], graphs="auto", max_new_tokens=2, num_beams=2)


@pytest.mark.parametrize(
    "wrap", [partial(torch.compile, backend="eager"), nn.DataParallel], ids=["compiled", "parallel"]
)
def test_a_wrapped_model_is_decoded_by_graphs(wrap):
    model = shapes.make("llama")
    examples, options = shapes.prompts(5), {"max_new_tokens": 6}
    graphs = TapeGraphs()
    found = generate(wrap(model), examples, graphs=graphs, **options)
    assert graphs.num_replays
    assert shapes.as_lists(found) == shapes.as_lists(generate(model, examples, graphs=False, **options))


# Limits of each example


@pytest.mark.parametrize(
    ("limits", "options", "match"),
    [
        ([1, 2], {}, "one per example, 3; got an array of shape"),
        ([1, 0, 2], {}, "from 1"),
        ([1.0, 2.0, 3.0], {}, "float64"),
        ([1, 2, 3], {"num_beams": 2}, "neither beams nor a forced end"),
    ],
)
def test_limits_that_make_no_sense_are_refused(limits, options, match):
    with pytest.raises(ArgumentError, match=match):
        generate(shapes.make("llama"), [[11], [12], [13]], max_new_tokens=limits, **options)
