"""The update of an adaptive trainer is exact for any micro-batches, any loss of the model and any memory."""

from functools import partial

import numpy as np
import pytest
import torch

import batchwright as bw
from batchwright import size
from batchwright.errors import ArgumentError
from batchwright.size.noise import estimate_noise

from ...thorough import crossed
from ..dynabatch.failing import fail_above
from .trainers import (
    MODELS,
    TOLERANCE,
    check,
    collate,
    exact,
    flat,
    make_controller,
    make_model,
    make_trainer,
    numbered,
    relative_error,
    windows,
)

WEIGHTINGS = ("tokens", "examples")


@pytest.mark.parametrize(("name", "weighting", "window"), crossed(MODELS, WEIGHTINGS, [1, 2, 8]))
def test_uneven_micro_batches_give_the_exact_gradient_and_loss(name, weighting, window, tmp_path):
    options = {"gradient_accumulation_steps": window, "weighting": weighting}
    trainer, seen, gradients = make_trainer(name, tmp_path, **options)
    trainer.train()
    assert len(set(map(len, seen))) > 1  # or the test would show nothing
    check(name, trainer, gradients, windows(seen, window), weighting)


def test_an_update_of_an_example_without_labels_trains_nothing(tmp_path):
    examples = [{**example, "labels": []} if place == 5 else example for place, example in enumerate(numbered(8))]
    trainer, seen, gradients = make_trainer("t5", tmp_path, examples=examples, budget=bw.MaxItems(1))
    trainer.train()
    assert sorted(flat(seen)) == list(range(8))
    assert [bool(gradient.any()) for gradient in gradients.seen] == [places != [5] for places in seen]


@pytest.mark.parametrize("name", ["t5", "llama"])
def test_the_two_weightings_differ(name, tmp_path):
    found = [make_trainer(name, tmp_path, weighting=weighting) for weighting in WEIGHTINGS]
    for trainer, _, _ in found:
        trainer.train()
    assert found[0][1] == found[1][1]  # the same batches
    pairs = zip(found[1][2].seen, found[0][2].seen, strict=True)
    assert max(relative_error(*pair) for pair in pairs) > 1e-3  # where lengths are unequal


@pytest.mark.parametrize(
    ("where", "weighting", "window"),
    [
        ("forward", "tokens", 2),
        ("backward", "tokens", 1),
        ("backward", "tokens", 8),
        ("backward", "examples", 1),
        ("backward", "examples", 8),
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_running_out_of_memory_leaves_the_gradient_exact(name, where, weighting, window, tmp_path):
    model = make_model(name)
    fail_above(model, 2, where)
    options = {"gradient_accumulation_steps": window, "weighting": weighting}
    trainer, seen, gradients = make_trainer(name, tmp_path, model=model, **options)
    trainer.train()
    check(name, trainer, gradients, windows(seen, window), weighting)
    assert trainer.state.log_history[-2]["ooms"] > 0


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_a_controller_changes_the_size_and_every_update_is_exact(name, weighting, fails, tmp_path):
    model = make_model(name)
    if fails:
        fail_above(model, 2, "backward")
    controller = make_controller(3, 7, 10)
    trainer, seen, gradients = make_trainer(name, tmp_path, model=model, controller=controller, weighting=weighting)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["batch_size"] for entry in logged] == [3, 7, 10, 4]  # 24 examples: 4 are left
    assert [entry["batch_size_wanted"] for entry in logged] == [7, 10, 10, 10]
    assert max(entry["num_micro_batches"] for entry in logged) > 1
    updates, left = [], iter(seen)
    for entry in logged:  # what was collated for an update; out of memory may have cut it further
        updates.append([])
        while len(updates[-1]) < entry["batch_size"]:
            updates[-1] += next(left)
    assert sorted(flat(updates)) == list(range(24))
    check(name, trainer, gradients, updates, weighting)


def test_micro_batches_keep_the_budget(tmp_path):
    for options in ({}, {"controller": make_controller(9, 15)}):
        trainer, seen, _ = make_trainer("t5", tmp_path, **options)
        trainer.train()
        for numbers in seen:
            batch = collate([trainer.train_dataset[number] for number in numbers])
            assert batch["input_ids"].numel() + batch["labels"].numel() <= 80
        assert sorted(flat(seen)) == list(range(24))


def test_without_a_budget_a_controller_runs_as_many_examples_as_the_trainer_says(tmp_path):
    options = {"controller": make_controller(8), "budget": None, "per_device_train_batch_size": 3}
    trainer, seen, _ = make_trainer("t5", tmp_path, **options)
    trainer.train()
    assert [len(part) for part in seen] == [3, 3, 2] * 3


def test_raise_hands_the_error_on(tmp_path):
    for options in ({}, {"controller": make_controller(9)}):
        model = make_model("t5")
        fail_above(model, 2, "backward")
        with pytest.raises(torch.OutOfMemoryError):
            make_trainer("t5", tmp_path, model=model, on_oom="raise", **options)[0].train()


@pytest.mark.parametrize("controller", [None, make_controller(9)])
def test_skip_leaves_no_trace_of_what_did_not_fit(controller, tmp_path):
    model = make_model("t5")
    fail_above(model, 0, "backward")
    trainer, _, gradients = make_trainer("t5", tmp_path, model=model, on_oom="skip", controller=controller)
    trainer.train()
    assert all(not gradient.any() for gradient in gradients.seen)


def test_label_smoothing_is_weighted_by_labels(tmp_path):
    options = {"gradient_accumulation_steps": 9, "label_smoothing_factor": 0.1}
    apart, _, first = make_trainer("llama", tmp_path, **options)
    together, _, second = make_trainer("llama", tmp_path, budget=bw.MaxItems(24), **options)
    apart.train()
    together.train()
    assert relative_error(first.seen[0], second.seen[0]) < TOLERANCE


def test_examples_are_weighed_from_plain_cross_entropy_alone(tmp_path):
    trainer, *_ = make_trainer("llama", tmp_path, weighting="examples", label_smoothing_factor=0.1)
    with pytest.raises(ArgumentError, match="takes the cross entropy of the logits"):
        trainer.train()


class Regressor(torch.nn.Module):
    """A model without tokens, whose loss is a mean over examples."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1, dtype=torch.float64)

    def forward(self, pixel_values, targets):
        return {"loss": (self.layer(pixel_values)[:, 0] - targets).square().mean()}


def test_other_modalities_are_weighted_by_their_examples_where_that_is_said(tmp_path):
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    examples, model = [{"pixel_values": draw(2), "targets": draw(())} for _ in range(7)], Regressor()

    def stack(chosen):
        return {key: torch.stack([example[key] for example in chosen]) for key in chosen[0]}

    options = {"lengths": [9, 8, 7, 6, 5, 4, 3], "budget": bw.MaxTokens(16), "data_collator": stack}
    options |= {"gradient_accumulation_steps": 7, "weighting": "examples", "label_names": ["targets"]}
    trainer, _, gradients = make_trainer("t5", tmp_path, model=model, examples=examples, **options)
    trainer.train()
    reference = Regressor()
    reference.load_state_dict(model.state_dict())
    reference(**stack(examples))["loss"].backward()
    expected = torch.cat([p.grad.flatten() for p in reference.parameters()])
    assert relative_error(gradients.seen[0], expected) < 1e-12


@pytest.mark.parametrize("failures", [(), (1,), (1, 3)])
@pytest.mark.parametrize("name", ["t5", "llama"])
def test_noise_is_that_of_the_parts_of_a_batch(name, failures, tmp_path):
    model, observed, ran = make_model(name), [], []
    controller = bw.BatchSizeController(size.track(lambda o: observed.append(o) or 12), min_size=12, max_size=12)
    options = {"controller": controller, "measure_noise": True, "budget": bw.MaxItems(6)}
    trainer, seen, _ = make_trainer(name, tmp_path, model=model, **options)
    model.register_forward_pre_hook(partial(fail_at, failures, ran), with_kwargs=True)
    trainer.train()
    # Six rows fail, then the second half of them: what was measured of the first half is forgotten.
    cuts = np.cumsum(ran[max(failures, default=0) :])
    parts = np.split(flat(seen[:2]), cuts[cuts < 12])
    labels = [sum(len(trainer.train_dataset[n]["labels"]) - MODELS[name][3] for n in part) for part in parts]
    gradients = [exact(name, part)[0] for part in parts]
    # The mean over labels as a mean over examples: each part's gradient times its share of the labels a share of rows.
    shares = [num / sum(labels) * 12 / len(part) for num, part in zip(labels, parts, strict=True)]
    means = [share * gradient for share, gradient in zip(shares, gradients, strict=True)]
    q = sum(len(part) * float(mean.square().sum()) for part, mean in zip(parts, means, strict=True))
    whole = sum(len(part) / 12 * mean for part, mean in zip(parts, means, strict=True))
    s, g2 = estimate_noise(q, float(whole.square().sum()), num_examples=12, num_parts=len(parts))
    assert observed[0].noise_parts == len(parts)
    assert (observed[0].noise_s, observed[0].noise_g2) == pytest.approx((s, g2), rel=1e-5)


def fail_at(failures, ran, module, args, kwargs):
    """Run out of memory in some calls, counted from 1; note how many rows each has."""
    if torch.is_grad_enabled():
        ran.append(len(kwargs["input_ids"]))
        if len(ran) in failures:
            raise torch.OutOfMemoryError("out of memory")


def test_parts_are_random_when_noise_is_measured(tmp_path):
    options = {"budget": bw.MaxItems(6)}
    spread = []
    for measure_noise in (False, True):
        controller = make_controller(24)
        trainer, seen, _ = make_trainer("t5", tmp_path, controller=controller, measure_noise=measure_noise, **options)
        trainer.train()
        lengths = [[len(trainer.train_dataset[n]["input_ids"]) for n in part] for part in seen]
        spread.append(np.std([np.mean(part) for part in lengths]))
    assert spread[1] < spread[0] / 2


def test_a_single_part_is_cut_in_two_for_noise(tmp_path):
    trainer, seen, _ = make_trainer(
        "t5", tmp_path, controller=make_controller(6), measure_noise=True, budget=bw.MaxItems(24)
    )
    trainer.train()
    assert [len(part) for part in seen] == [3, 3] * 4


def test_figures_of_several_updates_are_logged_together(tmp_path):
    trainer, seen, _ = make_trainer("t5", tmp_path, logging_steps=2, budget=bw.MaxItems(4))
    trainer.train()
    first = trainer.state.log_history[0]
    assert first["batch_size"] == 4
    assert first["num_micro_batches"] == 1
    tokens = padded = 0
    for numbers in seen[:2]:
        for key in ("input_ids", "labels"):
            lengths = [len(trainer.train_dataset[number][key]) for number in numbers]
            tokens, padded = tokens + sum(lengths), padded + len(lengths) * max(lengths)
    assert first["padding"] == pytest.approx(1 - tokens / padded)
    assert first["ooms"] == 0
