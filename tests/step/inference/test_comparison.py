"""What is remembered of a model between calls: nothing that a change could make wrong."""

import gc
import weakref

import pytest
import torch
import transformers
from torch import nn

import batchwright as bw
from batchwright.step.inference import _replaying
from batchwright.step.inference.generation import generate
from tests.step.graphs.tape import TapeGraphs

from . import shapes


@pytest.fixture
def compared(monkeypatch):
    """Count the comparisons with eager steps."""
    seen = []
    difference = _replaying.Comparison.difference

    def counted(self, *args):
        seen.append(self)
        return difference(self, *args)

    monkeypatch.setattr(_replaying.Comparison, "difference", counted)
    return seen


def run(model, examples=None, **options):
    examples = shapes.prompts(12) if examples is None else examples
    return generate(model, examples, graphs=TapeGraphs(), budget=bw.MaxItems(12), **{"max_new_tokens": 8, **options})


@pytest.mark.parametrize("name", shapes.NAMES)
def test_a_model_is_compared_once(name, compared):
    model = shapes.make(name)
    first = run(model, max_new_tokens=30)
    assert len(compared) == 1
    assert shapes.as_lists(run(model, max_new_tokens=30)) == shapes.as_lists(first)
    run(model)
    run(model, shapes.prompts(3))
    run(model, [[12] * 5] * 20)
    assert len(compared) == 1


def test_longer_results_than_were_compared_are_compared_too(compared):
    """A decoder of 29 + 8 tokens has a cache of 40, one of 29 + 30 tokens of 64, and then it serves 32 more of 5."""
    model = shapes.make("llama")
    run(model)
    run(model, max_new_tokens=30)
    assert len(compared) == 2
    run(model, [[12] * 5, [13] * 4] * 6, max_new_tokens=32)
    assert len(compared) == 2


def test_another_model_is_compared_for_itself(compared):
    run(shapes.make("llama"))
    run(shapes.make("llama"))
    assert len(compared) == 2


def change_config(model):
    model.config.rms_norm_eps = 0.1


def change_class(model):
    class Other(type(model)):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **kwargs):
            return super().forward(input_ids, attention_mask, position_ids, past_key_values, **kwargs)

    model.__class__ = Other


def change_part(model):
    model.model.layers[0].mlp.act_fn = nn.GELU()


def change_value(model):
    model.model.layers[1].self_attn.scaling *= 2


def change_shape(model):
    mlp = model.model.layers[0].mlp
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(8, 16)


def change_type(model):
    model.double()


def change_attention(model):
    model.set_attn_implementation("eager")


def change_precision(model):
    torch.set_float32_matmul_precision("high")


@pytest.mark.parametrize(
    "change",
    [change_config, change_class, change_part, change_value, change_shape, change_type, change_attention,
     change_precision],
)  # fmt: skip
def test_a_model_that_was_changed_is_compared_again(change, compared):
    model = shapes.make("llama")
    run(model)
    try:
        change(model)
        found = run(model)
        assert len(compared) == 2
        assert shapes.as_lists(found) == shapes.as_lists(
            generate(model, shapes.prompts(12), graphs=False, max_new_tokens=8, budget=bw.MaxItems(12))
        )
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize(
    "options",
    [{"repetition_penalty": 2.0}, {"do_sample": True}, {"eos_token_id": 7}, {"min_new_tokens": 3}],
    ids=lambda one: next(iter(one)),
)
def test_other_settings_are_compared_for_themselves(options, compared):
    model = shapes.make("m2m100")
    run(model)
    run(model, **options)
    assert len(compared) == 2
    run(model, **options)
    assert len(compared) == 2


def test_weights_that_were_changed_in_place_need_no_comparison(compared):
    model = shapes.make("llama")
    run(model)
    with torch.no_grad():
        model.lm_head.weight.neg_()
    found = run(model)
    assert len(compared) == 1
    expected = generate(model, shapes.prompts(12), graphs=False, max_new_tokens=8, budget=bw.MaxItems(12))
    assert shapes.as_lists(found) == shapes.as_lists(expected)


def test_prompts_without_padding_say_nothing_about_others(compared):
    model = shapes.make("llama")
    run(model, [[12 + place, 13] for place in range(9)])
    run(model, [[12 + place, 13] for place in range(3)])
    assert len(compared) == 1
    run(model)
    assert len(compared) == 2


def test_rows_that_end_at_once_are_no_comparison(compared):
    model = shapes.make("llama")
    options = {"eos_token_id": list(range(shapes.NUM_TOKENS))}
    assert {len(row) for row in run(model, **options)} == {1}
    before = len(compared)
    run(model, **options)
    assert len(compared) > before


def test_what_failed_is_tried_again(compared):
    class Counting(transformers.LlamaForCausalLM):
        num_calls = 0

        def forward(self, *args, **kwargs):
            found = super().forward(*args, **kwargs)
            Counting.num_calls += 1
            found.logits[..., Counting.num_calls % 7] += 50.0
            return found

    model = shapes.make("llama")
    model.__class__ = Counting
    for _ in range(2):
        with pytest.warns(UserWarning, match="of new token .*(differ|not the one)"):
            run(model)
    assert len(compared) == 2


def test_nothing_keeps_a_model_alive():
    model = shapes.make("llama")
    run(model)
    found = weakref.ref(model)
    del model
    gc.collect()
    assert found() is None
