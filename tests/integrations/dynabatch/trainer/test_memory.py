"""Out of memory in training: exact in pieces, without a trace when skipped."""

import logging

import pytest
import torch
from torch import nn

from batchwright.errors import ArgumentError
from batchwright.integrations._safe_steps import SafeSteps

from ....thorough import crossed
from ..failing import fail_above
from ..models import MODELS, collate, make_examples, make_model
from .training import exact_gradient, flat_gradient, make_sampler, make_trainer, relative_error, windows

TOLERANCE = 1e-6


def expected_gradients(name, examples, window):
    model = make_model(name)
    return [exact_gradient(name, model, part, examples)[0] for part in windows(make_sampler(examples), window)]


def run(name, folder, most, where="backward", window=2, **options):
    """Train an epoch on a model that takes at most this many rows at once."""
    examples, model = make_examples(causal=MODELS[name][3]), make_model(name)
    shapes = fail_above(model, most, where)
    options = {"oom_fallback": "split_retry", "gradient_accumulation_steps": window, **options}
    trainer, gradients = make_trainer(name, folder, model=model, examples=examples, **options)
    trainer.train()
    return trainer, gradients.seen, shapes


@pytest.mark.parametrize(("name", "where", "window"), crossed(MODELS, ["forward", "backward"], [1, 2, 8]))
def test_split_retry_gives_the_exact_gradient(name, where, window, tmp_path):
    trainer, found, _ = run(name, tmp_path, 2, where, window)
    assert trainer._oom_failed_count > 0
    expected = expected_gradients(name, trainer.train_dataset, window)
    for mine, gradient in zip(found, expected, strict=True):
        assert relative_error(mine, gradient) < TOLERANCE


@pytest.mark.parametrize(
    "error", [RuntimeError("CUBLAS_STATUS_ALLOC_FAILED"), RuntimeError("MPS backend out of memory")]
)
def test_errors_of_other_libraries_are_handled_too(error, tmp_path):
    examples, model = make_examples(causal=False), make_model("t5")
    fail_above(model, 2, "backward", error)
    trainer, gradients = make_trainer("t5", tmp_path, model=model, examples=examples, oom_fallback="split_retry")
    trainer.train()
    assert relative_error(gradients.seen[0], expected_gradients("t5", examples, 1)[0]) < TOLERANCE


def test_every_failure_is_counted_and_logged(tmp_path):
    trainer, *_ = run("t5", tmp_path, 2)
    logged = [entry["oom_failed"] for entry in trainer.state.log_history if "oom_failed" in entry]
    assert logged == list(range(1, trainer._oom_failed_count + 1))


@pytest.mark.parametrize("name", ["t5", "llama"])
def test_skip_leaves_no_gradient_at_all(name, tmp_path):
    trainer, found, _ = run(name, tmp_path, 0, oom_fallback="skip", learning_rate=0.1, optim="adamw_torch")
    assert all(not gradient.any() for gradient in found)
    # AdamW with weight decay would move parameters even on a gradient of zeros.
    for mine, first in zip(trainer.model.parameters(), make_model(name).parameters(), strict=True):
        assert torch.equal(mine, first)


@pytest.mark.parametrize("name", ["t5", "llama"])
def test_skip_leaves_the_other_micro_batches_of_an_update_as_they_are(name, tmp_path):
    trainer, found, _ = run(name, tmp_path, 4, oom_fallback="skip", window=9)
    examples = trainer.train_dataset
    (batches,) = windows(make_sampler(examples), 9)
    kept = [batch for batch in batches if len(batch) <= 4]
    assert 0 < len(kept) < len(batches)

    def labels(chosen):
        return sum(len(examples[i]["labels"]) - MODELS[name][3] for batch in chosen for i in batch)

    gradient, _ = exact_gradient(name, make_model(name), kept, examples)
    # The labels that were skipped still count in the mean.
    assert relative_error(found[0], gradient * labels(kept) / labels(batches)) < TOLERANCE


def test_without_a_fallback_the_error_is_raised_at_once(tmp_path):
    with pytest.raises(torch.OutOfMemoryError):
        run("t5", tmp_path, 2, oom_fallback=None)


@pytest.mark.parametrize("options", [{"oom_fallback": "bogus"}, {"oom_fallback": "skip", "oom_min_batch_size": 0}])
def test_a_bogus_fallback_is_refused_by_the_constructor(options, tmp_path):
    with pytest.raises(ArgumentError, match="oom_"):
        make_trainer("t5", tmp_path, **options)


def test_other_errors_are_raised_and_leave_the_gradients_before_them(tmp_path):
    model = nn.Linear(1, 1, dtype=torch.float64)
    model.weight.grad = torch.ones_like(model.weight)
    steps = SafeSteps("split_retry", 2, "x", on_oom=lambda: None)

    def step(module, part):
        module(part["x"]).sum().backward()
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        steps.run(model, {"x": torch.ones(3, 1, dtype=torch.float64)}, step, is_last=True)
    assert model.weight.grad.item() == 1
    assert model.bias.grad is None


def make_batch(num=6):
    return collate(make_examples(num, causal=False))


def step_of(failures=0):
    """Return a step that fails this many times, after its backward pass, and the sizes it was given."""
    sizes, left = [], [failures]

    def step(module, part):
        sizes.append(len(part["input_ids"]))
        loss = module(**part).loss * sizes[-1]
        loss.backward()
        if left[0]:
            left[0] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return loss.detach()

    return step, sizes


def test_the_random_state_of_a_failed_attempt_is_put_back():
    gradients = []
    for failures in (1, 0):
        model = make_model("t5", dropout=0.3).train()
        steps = SafeSteps("split_retry", 3, "input_ids", on_oom=lambda: None)
        step, sizes = step_of(failures)
        torch.manual_seed(5)
        if not failures:  # cut beforehand into the pieces that the retry uses
            steps._limit = steps._limit.after_failure(6 * sum(t.numel() for t in make_batch().values()) / 6)
        steps.run(model, make_batch(), step, is_last=True)
        assert sizes[-2:] == [3, 3]
        gradients.append(flat_gradient(model))
    assert torch.equal(*gradients)


def test_pieces_begin_at_the_smallest_batch_and_are_halved_until_they_fit():
    steps, model = SafeSteps("split_retry", 4, "input_ids", on_oom=lambda: None), make_model("t5").train()
    step, sizes = step_of(failures=3)
    steps.run(model, make_batch(12), step, is_last=True)
    # 12 fails, then the first of three pieces of 4, then the first of six of 2; twelve of 1 run.
    assert sizes == [12, 4, 2, *[1] * 12]


def test_what_did_not_fit_is_remembered():
    steps, model = SafeSteps("split_retry", 3, "input_ids", on_oom=lambda: None), make_model("t5").train()
    steps.run(model, make_batch(), step_of(failures=1)[0], is_last=True)
    step, sizes = step_of()
    steps.run(model, make_batch(), step, is_last=True)
    assert sizes == [3, 3]


def test_an_example_that_does_not_fit_alone_is_left_out_with_a_warning(tmp_path, caplog):
    examples, model = make_examples(causal=False), make_model("t5")
    batch = make_sampler(examples).batches[0]
    fail_above(model, 9, "backward", rows=examples[batch[1]]["input_ids"])
    trainer, gradients = make_trainer("t5", tmp_path, model=model, examples=examples, oom_fallback="split_retry")
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert "Example 1 of 3 does not fit by itself" in caplog.text
    kept = [batch[0], batch[2]]
    gradient, _ = exact_gradient("t5", make_model("t5"), [kept], examples)
    num = [len(examples[index]["labels"]) for index in batch]
    assert relative_error(gradients.seen[0], gradient * (num[0] + num[2]) / sum(num)) < TOLERANCE


def test_pieces_keep_their_padding():
    """A model without a mask sees it."""
    model, widths = make_model("t5").train(), []
    batch = make_batch(4)
    batch["attention_mask"][2:, 5:] = 0  # the second half is short
    batch["labels"][:2, 4:] = -100

    def step(module, part):
        widths.append((part["input_ids"].shape[1], part["labels"].shape[1]))
        if len(part["input_ids"]) == 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return torch.zeros(())

    SafeSteps("split_retry", 2, "input_ids", on_oom=lambda: None).run(model, batch, step, is_last=True)
    whole = (batch["input_ids"].shape[1], batch["labels"].shape[1])
    assert widths == [whole] * 3


def test_a_grad_scaler_skips_an_update_of_which_nothing_is_left():
    model = nn.Linear(1, 1)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1.0), torch.amp.GradScaler("cpu")
    before = model.weight.detach().clone()

    def step(module, part):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    steps = SafeSteps("skip", 1, "x", on_oom=lambda: None)
    steps.run(model, {"x": torch.ones(2, 1)}, step, is_last=True, has_scaler=True)
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(model.weight, before)
