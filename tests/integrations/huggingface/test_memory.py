"""Out of memory in an adaptive trainer: exact in pieces, or an error; nothing is left out unless that was asked for."""

import copy

import numpy as np
import pytest
import torch
from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback

import batchwright as bw
from batchwright.errors import DoesNotFitError
from batchwright.integrations._inputs import Sequences, Whole
from batchwright.step.packing.rows import PackedRow, is_packed

from ...processes import run_ranks
from ..dynabatch.failing import fail_above, raise_error
from .trainers import (
    TOLERANCE,
    check,
    collate,
    counts_after_shift,
    exact,
    flat_gradient,
    make_model,
    make_trainer,
    numbered,
    relative_error,
    windows,
)

ERROR = torch.OutOfMemoryError("out of memory")


def fail_above_tokens(model, most, *, always=False):
    """Let a model take at most this many tokens at once; in training only, unless always."""
    sizes = []

    def before(module, args, kwargs):
        if always or torch.is_grad_enabled():
            sizes.append(kwargs["input_ids"].numel())
            if sizes[-1] > most:
                raise ERROR

    model.register_forward_pre_hook(before, with_kwargs=True)
    return sizes


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_example_that_does_not_fit_by_itself_is_an_error(where, tmp_path):
    """Training ended without an error, with loss 0 and no update."""
    model = make_model("t5")
    fail_above(model, 0, where)
    trainer, *_ = make_trainer("t5", tmp_path, model=model)
    with pytest.raises(DoesNotFitError, match=r"example 0 of \d+ of a micro-batch does not fit on its own; tensors"):
        trainer.train()


def test_skipping_has_to_be_asked_for(tmp_path):
    model = make_model("t5")
    fail_above(model, 0, "backward")
    trainer, *_ = make_trainer("t5", tmp_path, model=model, on_oom="skip")
    trainer.train()
    assert trainer._batching.updates.figures.num_ooms > 0


@pytest.mark.parametrize("with_kwargs", [False, True])
@pytest.mark.parametrize("window", [1, 2])
def test_a_flattened_batch_is_cut_between_its_sequences(window, with_kwargs, tmp_path):
    """One failure dropped the whole micro-batch."""
    model = make_model("llama")
    sizes = fail_above_tokens(model, 24)
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=with_kwargs, return_seq_idx=with_kwargs)
    trainer, seen, gradients = make_trainer(
        "llama", tmp_path, model=model, budget=bw.MaxItems(5), gradient_accumulation_steps=window
    )
    recording = trainer.data_collator
    trainer.data_collator = lambda examples: recording(examples) and collator(examples)
    trainer.train()
    assert max(sizes) > 24
    assert trainer._batching.updates.figures.num_ooms > 0
    check("llama", trainer, gradients, windows(seen, window))


def packed_batch(**more):
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)(
        [{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}, {"input_ids": [3, 4, 5, 6]}]
    )
    return {**batch, **more}


def test_some_sequences_of_a_row_make_a_row_with_their_own_bounds():
    batch = packed_batch(scale=torch.tensor(2.0), name="a")
    cut = Sequences(batch)
    assert (cut.num, PackedRow(batch).lengths) == (3, [3, 2, 4])
    found = cut.take([0, 2])
    assert found["input_ids"].tolist() == [[5, 6, 7, 3, 4, 5, 6]]
    assert found["labels"].tolist() == [[-100, 6, 7, -100, 4, 5, 6]]
    assert found["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3]]
    assert found["cu_seq_lens_q"].tolist() == found["cu_seq_lens_k"].tolist() == [0, 3, 7]
    assert found["cu_seq_lens_q"].dtype == torch.int32
    assert (found["max_length_q"], found["max_length_k"]) == (4, 4)
    assert found["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 1, 1]]
    assert (float(found["scale"]), found["name"]) == (2.0, "a")


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"labels": torch.arange(9)[None]}, "a cut would drop it"),
        ({"cu_seq_lens_q": torch.tensor([0, 5, 9])}, "disagree about where"),
        ({"position_ids": torch.arange(9).repeat(2, 1)}, "not a single row"),
        ({"patches": torch.zeros(4, 2)}, r"'patches' of shape \(4, 2\) does not run along the 9 tokens"),
    ],
)
def test_a_packed_row_that_cannot_be_cut_exactly_is_not_cut(more, message):
    with pytest.raises(ValueError, match=message):
        Sequences(packed_batch(**more)).take([0])


def test_what_is_packed_is_told_by_bounds_or_positions():
    assert is_packed(packed_batch())
    assert not is_packed(collate(numbered(3)))
    assert not is_packed({"input_ids": torch.ones(2, 3), "position_ids": torch.arange(3).repeat(2, 1)})


class Leaking(torch.nn.Module):
    """Sequences of a row see each other."""

    def __init__(self, model):
        super().__init__()
        self.model, self.config = model, model.config

    def forward(self, input_ids, labels, position_ids, **kwargs):
        return self.model(input_ids=input_ids, labels=labels)


def test_sequences_that_see_each_other_are_weighed_but_not_cut(tmp_path):
    options = {"data_collator": DataCollatorWithFlattening(), "budget": bw.MaxItems(5)}
    trainer, *_ = make_trainer("llama", tmp_path, model=Leaking(make_model("llama")), **options)
    trainer.train()
    model = Leaking(make_model("llama"))
    fail_above_tokens(model, 24)
    trainer, *_ = make_trainer("llama", tmp_path, model=model, **options)
    with pytest.raises(DoesNotFitError, match="packed row, and its sequences were not found to be independent"):
        trainer.train()
    assert isinstance(trainer._batching.weights.cut(packed_batch()), Whole)


def test_packed_rows_are_not_weighed_by_example_nor_measured(tmp_path):
    options = {"data_collator": DataCollatorWithFlattening(), "budget": bw.MaxItems(5)}
    trainer, *_ = make_trainer("llama", tmp_path, weighting="examples", **options)
    with pytest.raises(ValueError, match="weighting='examples' needs a row per example"):
        trainer.train()
    controller = bw.BatchSizeController(bw.size.constant(8), min_size=8, max_size=8)
    trainer, *_ = make_trainer("llama", tmp_path, controller=controller, measure_noise=True, **options)
    with pytest.raises(ValueError, match="measure_noise needs a row per example, but 8 examples came in 2 rows"):
        trainer.train()


@pytest.mark.parametrize("pieces", ["micro-batches", "after out of memory"])
def test_half_precision_gradients_are_rounded_once(pieces, tmp_path):
    """Rounded after each of many pieces, they were 3.6 times further from the truth than those of an unsplit step."""
    examples, found = numbered(24, causal=True) * 5, {}
    truth = exact("llama", range(24))[0]
    for kind in ("whole", "pieces"):
        model = make_model("llama").bfloat16()
        options = {"budget": bw.MaxItems(120), "train_sampling_strategy": "sequential"}
        if kind == "pieces" and pieces == "micro-batches":
            options |= {"budget": bw.MaxItems(1), "gradient_accumulation_steps": 120}
        elif kind == "pieces":
            fail_above(model, 1, "backward")
        trainer, _, gradients = make_trainer("llama", tmp_path, model=model, examples=examples, **options)
        trainer.train()
        found[kind] = relative_error(gradients.seen[0].double(), truth)
    # Single rows round in their own way, but the sum of their gradients does not.
    assert found["pieces"] < 1.2 * found["whole"], found


def test_parameters_unfrozen_during_training_are_exact_after_out_of_memory(tmp_path):
    class Unfreeze(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            model.lm_head.requires_grad_(True)

    model = make_model("llama")
    model.lm_head.requires_grad_(False)
    fail_above(model, 2, "backward")
    trainer, seen, gradients = make_trainer("llama", tmp_path, model=model, callbacks=[Unfreeze()])
    trainer.create_optimizer = lambda *args: (
        setattr(trainer, "optimizer", torch.optim.SGD(model.parameters(), lr=0.0)) or trainer.optimizer
    )
    trainer.train()
    for found, numbers in list(zip(gradients.seen, seen, strict=True))[1:]:
        assert relative_error(found, exact("llama", numbers)[0]) < TOLERANCE


@pytest.mark.parametrize("options", [{"gradient_accumulation_steps": 2}, {}, {"budget": bw.MaxTokens(24)}])
@pytest.mark.parametrize("name", ["llama", "t5"])
def test_the_first_look_at_a_loss_takes_one_row_where_two_do_not_fit(name, options, tmp_path):
    """Also of a model that makes the inputs of its decoder from labels, and where the first batch is a single row."""
    model = make_model(name)

    def before(module, args, kwargs):
        if len(kwargs["input_ids"]) > 1:
            raise ERROR

    model.register_forward_pre_hook(before, with_kwargs=True)
    trainer, seen, gradients = make_trainer(name, tmp_path, model=model, **options)
    trainer.train()
    check(name, trainer, gradients, windows(seen, options.get("gradient_accumulation_steps", 1)))


def test_a_first_look_that_does_not_fit_at_all_is_an_error(tmp_path):
    model = make_model("llama")
    model.register_forward_pre_hook(lambda *args, **kwargs: raise_error(ERROR), with_kwargs=True)
    trainer, *_ = make_trainer("llama", tmp_path, model=model)
    with pytest.raises(DoesNotFitError, match="without gradients, that shows what the loss is a mean over"):
        trainer.train()


@pytest.mark.parametrize(
    ("name", "eval_budget"),
    [
        ("llama", bw.MaxItems(8)),
        pytest.param("llama", None, marks=counts_after_shift),
        ("t5", bw.MaxItems(8)),
        ("t5", None),
    ],
)
def test_evaluation_that_runs_out_of_memory_gives_the_same_results(name, eval_budget, tmp_path):
    examples = numbered(21, causal=name == "llama")
    options = {"eval_dataset": examples, "eval_budget": eval_budget, "per_device_eval_batch_size": 8}
    expected, *_ = make_trainer(name, tmp_path, **options)
    model = make_model(name)
    model.register_forward_pre_hook(
        lambda module, args, kwargs: raise_error(ERROR) if len(kwargs["input_ids"]) > 3 else None, with_kwargs=True
    )
    trainer, *_ = make_trainer(name, tmp_path, model=model, **options)
    found, whole = trainer.predict(examples), expected.predict(examples)
    assert found.metrics["test_loss"] == pytest.approx(whole.metrics["test_loss"], rel=1e-6)
    assert np.array_equal(found.label_ids, whole.label_ids)
    mine, theirs = (np.asarray(r.predictions[0] if name == "t5" else r.predictions) for r in (found, whole))
    np.testing.assert_allclose(mine, theirs, atol=1e-6)


def test_evaluation_of_an_example_that_does_not_fit_is_an_error(tmp_path):
    model = make_model("t5")
    trainer, *_ = make_trainer("t5", tmp_path, model=model, eval_dataset=numbered(5))
    broken = copy.deepcopy(trainer.model)
    broken.register_forward_pre_hook(
        lambda module, args, kwargs: raise_error(ERROR) if not torch.is_grad_enabled() else None, with_kwargs=True
    )
    trainer._batching.weights.learn(trainer._trainer_loss(), [collate(numbered(3))])
    trainer.model = trainer.model_wrapped = broken
    with pytest.raises(DoesNotFitError, match="does not fit on its own"):
        trainer.evaluate()


@pytest.mark.parametrize("num_failures", [1, 2])
def test_a_collator_that_runs_out_of_memory_is_tried_once_more(num_failures, tmp_path):
    trainer, seen, gradients = make_trainer("t5", tmp_path)
    recording, left = trainer.data_collator, [0, num_failures]

    def failing(examples):
        left[0] += 1
        if left[0] > 2 and left[1]:
            left[1] -= 1
            raise MemoryError
        return recording(examples)

    trainer.data_collator = failing
    if num_failures == 2:
        with pytest.raises(MemoryError):
            trainer.train()
        return
    trainer.train()
    check("t5", trainer, gradients, windows(seen, 1))


def test_plain_trainers_lose_nothing_of_this(tmp_path):
    # The reference of the tests above is also the update of the plain trainer, in a single batch.
    trainer, _, gradients = make_trainer("llama", tmp_path, budget=bw.MaxItems(24))
    trainer.train()
    plain = Trainer(make_model("llama"), trainer.args, collate, train_dataset=numbered(causal=True))
    batch = collate(numbered(causal=True))
    plain.model(**batch).loss.backward()
    assert relative_error(gradients.seen[0], flat_gradient(plain.model)) < TOLERANCE


def test_what_fails_on_one_of_two_ranks_is_raised_on_both(tmp_path):
    """The other rank waited in a collective for ever."""
    run_ranks("tests.integrations.huggingface.failing_ranks", 2, tmp_path, python=("-W", "error"))
