"""What could make decoding by replays wrong: calls in every odd form give the tokens of eager generation."""

import threading
import warnings

import numpy as np
import pytest
import torch
import transformers

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.step import MemoryMonitor
from batchwright.step.inference import _sizing, generation
from batchwright.step.inference.generation import generate
from batchwright.testing import EagerGraphs, FakeMemory
from tests.step.graphs.tape import TapeGraphs

from . import shapes


@pytest.fixture(autouse=True)
def nothing_runs_eagerly():
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="generate runs eagerly")
        yield


def replayed(model, examples, **options):
    graphs = TapeGraphs()
    found = shapes.as_lists(generate(model, examples, graphs=graphs, **options))
    assert graphs.num_replays
    return found


def eager(model, examples, **options):
    return shapes.as_lists(generate(model, examples, graphs=False, **options))


@pytest.fixture
def small_pieces(monkeypatch):
    """Let at most 64 tokens of prompts be read at once."""
    monkeypatch.setattr(_sizing, "_MOST_TOKENS", 64)


@pytest.mark.parametrize("name", shapes.NAMES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"repetition_penalty": 1.7},
        {"max_new_tokens": [1 + place % 9 for place in range(30)]},
        {"pad_multiple_of": 8},
        {"min_new_tokens": 4, "eos_token_id": [5, 6, 7, 20]},
    ],
    ids=["plain", "penalty", "limits", "multiples", "ends"],
)
@pytest.mark.usefixtures("small_pieces")
def test_prompts_in_many_pieces(name, options):
    model, examples = shapes.make(name), shapes.prompts(30)
    options = {"max_new_tokens": 9, "budget": bw.MaxItems(30), **options}
    assert replayed(model, examples, **options) == eager(model, examples, **options)


@pytest.mark.parametrize("name", shapes.NAMES)
@pytest.mark.usefixtures("small_pieces")
def test_a_comparison_that_is_remembered_serves_every_form(name):
    model = shapes.make(name)
    for examples in (shapes.prompts(20), [[12]], [[13] * 40] * 9, [[14, 15]] * 3, shapes.prompts(20)):
        options = {"max_new_tokens": 12, "budget": bw.MaxItems(16)}
        assert replayed(model, examples, **options) == eager(model, examples, **options)


def test_equal_prompts_give_equal_results():
    model, example = shapes.make("m2m100"), shapes.prompts(1)[0]
    found = replayed(model, [example] * 20, max_new_tokens=9)
    assert found == [found[0]] * 20


@pytest.mark.parametrize("name", ["m2m100", "llama"])
@pytest.mark.usefixtures("small_pieces")
def test_draws_are_the_same_in_pieces_and_after_a_comparison(name):
    model, examples = shapes.make(name, torch.float64), shapes.prompts(20)
    runs = []
    for memory in (None, None, MemoryMonitor(source=FakeMemory(10**7))):
        torch.manual_seed(5)
        options = {"max_new_tokens": 8, "do_sample": True, "memory": memory, "budget": bw.MaxItems(20)}
        runs.append(replayed(model, examples, **options))
    assert runs[0] == runs[1] == runs[2]


def test_a_row_that_has_ended_takes_no_more_positions():
    """30 positions: alone, the long prompt needs 28 of them, and in a batch it waits for a row of 20 new tokens."""
    model = shapes.make("gpt2", n_positions=30)
    found = replayed(model, [[12] * 26, [13, 14]], max_new_tokens=[2, 20], eos_token_id=[59], budget=bw.MaxItems(2))
    for row, example, limit in zip(found, [[12] * 26, [13, 14]], [2, 20], strict=True):
        assert [row] == eager(model, [example], max_new_tokens=limit, eos_token_id=[59])


def test_a_prompt_beyond_the_positions_of_a_model_is_an_error_as_elsewhere():
    model = shapes.make("gpt2", n_positions=30)
    options = {"max_new_tokens": 9, "min_new_tokens": 9}
    for graphs in (False, TapeGraphs()):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(IndexError):
                generate(model, [[12] * 27, [13]], graphs=graphs, **options)


@pytest.mark.parametrize("num_new", [0, -1, 2.5, "3", [1, 0], True])
def test_numbers_of_new_tokens_that_make_no_sense_are_refused(num_new):
    with pytest.raises(ArgumentError, match="max_new_tokens must be one whole number from 1"):
        generate(shapes.make("llama"), [[11], [12]], max_new_tokens=num_new)


@pytest.mark.parametrize(
    "limits", [np.array([3, 1, 5]), torch.tensor([3, 1, 5]), (3, 1, 5)], ids=lambda one: str(type(one))
)
def test_limits_may_be_any_numbers(limits):
    model, examples = shapes.make("llama"), shapes.prompts(3)
    found = replayed(model, examples, max_new_tokens=limits, eos_token_id=[59])
    assert [len(row) for row in found] == [3, 1, 5]


def test_hidden_states_of_an_encoder_run_eagerly():
    model = shapes.make("m2m100")
    examples = shapes.prompts(3)

    def collate(rows):
        batch = {"input_ids": torch.tensor([row[:1] for row in rows])}
        batch["encoder_outputs"] = model.get_encoder()(**batch)
        return batch

    options = {"max_new_tokens": 4, "collate": collate}
    with pytest.warns(UserWarning, match="batches hold encoder_outputs"):
        found = generate(model, examples, graphs=TapeGraphs(), **options)
    assert shapes.as_lists(found) == eager(model, examples, **options)


@pytest.mark.parametrize("name", ["m2m100", "gpt2"])
def test_inside_of_inference_mode(name):
    model, examples = shapes.make(name), shapes.prompts(12)
    with torch.inference_mode():
        found = replayed(model, examples, max_new_tokens=6)
    assert found == replayed(model, examples, max_new_tokens=6) == eager(model, examples, max_new_tokens=6)


def test_a_model_that_was_made_in_inference_mode():
    with torch.inference_mode():
        model = shapes.make("llama")
    assert replayed(model, shapes.prompts(12), max_new_tokens=6) == eager(model, shapes.prompts(12), max_new_tokens=6)


def test_autocast_runs_eagerly():
    model, examples = shapes.make("llama"), shapes.prompts(4)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.warns(UserWarning, match="autocast is on"):
        generate(model, examples, graphs=TapeGraphs(), max_new_tokens=4)


def test_a_model_in_training_mode_stays_there_and_is_not_compared_again():
    model = shapes.make("t5", dropout_rate=0.5)
    expected = eager(model, shapes.prompts(12), max_new_tokens=8)
    for is_training in (False, True, False):
        model.train(is_training)
        assert replayed(model, shapes.prompts(12), max_new_tokens=8) == expected
        assert model.training == is_training


def test_weights_that_lie_elsewhere_count():
    model = shapes.make("llama")
    replayed(model, shapes.prompts(12), max_new_tokens=8)
    model.lm_head.weight = torch.nn.Parameter(-model.lm_head.weight.detach().clone())
    assert replayed(model, shapes.prompts(12), max_new_tokens=8) == eager(model, shapes.prompts(12), max_new_tokens=8)


@pytest.mark.parametrize("num", [0, 1, 2, 3])
def test_a_backend_that_runs_out_of_captures(num):
    class Few(TapeGraphs):
        def capture(self, function, *, writes=()):
            if self.num_captures >= num:
                raise RuntimeError("CUDA error: too many graphs")
            return super().capture(function, writes=writes)

    model, examples = shapes.make("llama"), shapes.prompts(40)
    options = {"max_new_tokens": [1 + place for place in range(40)], "eos_token_id": [59], "budget": bw.MaxItems(40)}
    with pytest.warns(UserWarning, match="too many graphs"):
        found = generate(model, examples, graphs=Few(), **options)
    assert shapes.as_lists(found) == eager(model, examples, **options)


def test_several_threads_share_a_model():
    model = shapes.make("llama")
    expected = {seed: eager(model, shapes.prompts(12, seed=seed), max_new_tokens=8) for seed in range(4)}
    found = {}

    def run(seed):
        found[seed] = shapes.as_lists(
            generate(model, shapes.prompts(12, seed=seed), graphs=TapeGraphs(), max_new_tokens=8)
        )

    threads = [threading.Thread(target=run, args=(seed,)) for seed in expected]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def make_local(window=64):
    """A model whose second layer sees the last 64 tokens only, which nothing but its code says."""
    torch.manual_seed(0)
    sizes = {"vocab_size": shapes.NUM_TOKENS, "hidden_size": 16, "num_layers": 2, "num_heads": 2}
    config = transformers.GPTNeoConfig(
        **sizes, attention_types=[[["global", "local"], 1]], window_size=window, max_position_embeddings=512
    )
    model = transformers.GPTNeoForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.5)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = [59], 1
    return model


def test_local_attention_that_begins_beyond_the_tokens_that_were_compared():
    """A cache of 49 tokens is within the window, one of 149 is not: what was found of the first says nothing of it."""
    model, examples = make_local(), shapes.prompts(9)
    assert replayed(model, examples, max_new_tokens=20) == eager(model, examples, max_new_tokens=20)
    with pytest.warns(UserWarning, match="the logits of new token 2 differ"):
        found = generate(model, examples, graphs=TapeGraphs(), max_new_tokens=120)
    assert shapes.as_lists(found) == eager(model, examples, max_new_tokens=120)


@pytest.mark.parametrize("least", [0, 2, None])
@pytest.mark.parametrize("own", [None, 7])
def test_min_new_tokens_takes_precedence_over_min_length(least, own):
    model = shapes.make("m2m100")
    model.generation_config.min_length = own
    options = {"max_new_tokens": 12, "min_new_tokens": least, **({} if own else {"min_length": 7})}
    assert replayed(model, shapes.prompts(12), **options) == eager(model, shapes.prompts(12), **options)


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("llama", "repetition_penalty", 2.0),
        ("llama", "eos_token_id", shapes.ENDS),
        ("m2m100", "forced_bos_token_id", 33),
        ("m2m100", "min_length", 6),
        ("t5", "suppress_tokens", [20, 21, 22]),
    ],
)
def test_none_switches_a_setting_of_the_model_off(name, setting, value):
    model = shapes.make(name)
    setattr(model.generation_config, setting, value)
    options = {"max_new_tokens": 9, setting: None}
    found = replayed(model, shapes.prompts(12), **options)
    assert found == eager(model, shapes.prompts(12), **options)
    if setting == "eos_token_id":
        assert {len(row) for row in found} == {9}


@pytest.mark.parametrize("name", shapes.NAMES)
def test_a_cache_that_is_neither_on_nor_off_is_on(name):
    model, examples = shapes.make(name), shapes.prompts(12)
    expected = [eager(model, [example], max_new_tokens=9)[0] for example in examples]
    assert replayed(model, examples, max_new_tokens=9, use_cache=None) == expected
    assert eager(model, examples, max_new_tokens=9, use_cache=None, budget=bw.MaxItems(12)) == expected


@pytest.mark.parametrize("name", shapes.NAMES)
@pytest.mark.parametrize("options", [{}, {"repetition_penalty": 1.5}, {"max_new_tokens": list(range(1, 15))}], ids=str)
def test_the_stand_in_for_graphs_decodes_too(name, options):
    model, examples, graphs = shapes.make(name), shapes.prompts(14), EagerGraphs()
    options = {"max_new_tokens": 20, **options}
    found = generate(model, examples, graphs=graphs, **options)
    assert shapes.as_lists(found) == eager(model, examples, **options)
    assert graphs.num_replayed > graphs.num_captured > 0


def test_a_penalty_where_a_mask_leaves_out_first_tokens_runs_eagerly():
    """Whether tokens that the mask leaves out count depends on the release of transformers."""
    model = shapes.make("llama")
    examples = [{"input_ids": [20, 21, 22 + place], "attention_mask": [0, 1, 1]} for place in range(9)]
    options = {"max_new_tokens": 9, "repetition_penalty": 1.5}
    with pytest.warns(UserWarning, match="a mask leaves out tokens in front"):
        found = generate(model, examples, graphs=TapeGraphs(), **options)
    assert shapes.as_lists(found) == eager(model, examples, **options)
    assert replayed(model, examples, max_new_tokens=9) == eager(model, examples, max_new_tokens=9)


def test_softcapped_attention_and_logits():
    torch.manual_seed(0)
    sizes = {**shapes.LLAMA, "head_dim": 4, "final_logit_softcapping": 5.0, "attn_logit_softcapping": 2.0}
    config = transformers.Gemma2Config(**sizes, layer_types=["full_attention"] * 2, attn_implementation="eager")
    model = transformers.Gemma2ForCausalLM(config).eval()
    options = {"max_new_tokens": 9, "eos_token_id": [59], "cache_implementation": None}
    model.generation_config.cache_implementation = None
    assert replayed(model, shapes.prompts(12), **options) == eager(model, shapes.prompts(12), **options)


def test_with_auto_a_reason_is_said_once(monkeypatch):
    monkeypatch.setattr(generation, "_SAID", set())
    with pytest.warns(UserWarning, match="generate runs eagerly: it is so"):
        generation.give_up("auto", "it is so")
    generation.give_up("auto", "it is so")
    with pytest.warns(UserWarning, match="another"):
        generation.give_up("auto", "another")


@pytest.mark.parametrize(
    ("num", "most", "captures"), [(10, 25, True), (10, 24, False), (2049, 13, True), (1, 2, False)]
)
def test_auto_captures_where_there_are_steps_enough(num, most, captures, monkeypatch):
    """24 steps at the least: of one batch, or of several."""
    monkeypatch.setattr(generation, "make_backend", lambda graphs, device: TapeGraphs())
    model = shapes.make("llama")
    decoder = generation.Decoder(model, {"max_new_tokens": most}, None, None, 1)
    runner = generation.make_runner(decoder, "auto", num, most, has_limits=False, room=lambda held: None)
    assert isinstance(runner, generation.Eager) != captures


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "replayed"])
def test_a_penalty_on_repetition_does_not_count_a_padding_token(graphs):
    """Token 1 pads shorter rows, and would be the best one again and again."""
    model = shapes.make("llama")
    with torch.no_grad():
        model.lm_head.weight[1] = 3 * model.lm_head.weight[20]
    options = {"max_new_tokens": 6, "repetition_penalty": 1.5, "eos_token_id": [59]}
    examples = shapes.prompts(12)
    found = (replayed if graphs else eager)(model, examples, **options)
    assert found == [eager(model, [example], **options)[0] for example in examples]
    assert any(1 in row for row in found)
