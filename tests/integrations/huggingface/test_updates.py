"""The update of an adaptive trainer is exact, whatever its micro-batches, the model's loss and the memory."""

import math
import subprocess
import sys
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Seq2SeqTrainer, Trainer, TrainerCallback

import batchwright as bw
from batchwright import size
from batchwright.errors import ArgumentError, MissingDependencyError
from batchwright.integrations import huggingface
from batchwright.integrations.huggingface import AdaptiveTrainerMixin, adaptive
from batchwright.integrations.huggingface._settings import check_trainer, check_trainer_class
from batchwright.size.noise import NoiseAverage, estimate_noise
from batchwright.step import MemoryMonitor
from batchwright.testing import FakeMemory

from ..dynabatch.failing import fail_above
from .trainers import (
    MODELS,
    collate,
    exact,
    flat,
    flat_parameters,
    make_model,
    make_trainer,
    numbered,
    quick,
    relative_error,
    windows,
)

TOLERANCE = 1e-6  # norms of T5 and Llama, and the loss of causal models, round to float32 whatever runs
WEIGHTINGS = ("tokens", "examples")


@pytest.fixture(autouse=True, scope="module")
def _quick():
    with quick():
        yield


def make_controller(*sizes):
    """Return a controller that goes through sizes, one an update."""
    policy = size.milestones(dict(enumerate(sizes)), per="step")
    return bw.BatchSizeController(policy, min_size=1, max_size=24)


def check(name, trainer, gradients, updates, weighting="tokens"):
    assert len(gradients.seen) == len(updates)
    losses = []
    for found, numbers in zip(gradients.seen, updates, strict=True):
        expected, loss = exact(name, numbers, weighting)
        assert relative_error(found, expected) < TOLERANCE
        losses.append(loss)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(losses, rel=1e-5)


@pytest.mark.parametrize("window", [1, 2, 8])
@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("name", MODELS)
def test_uneven_micro_batches_give_the_exact_gradient_and_loss(name, weighting, window, tmp_path):
    options = {"gradient_accumulation_steps": window, "weighting": weighting}
    trainer, seen, gradients = make_trainer(name, tmp_path, **options)
    trainer.train()
    assert len(set(map(len, seen))) > 1  # or the test would show nothing
    check(name, trainer, gradients, windows(seen, window), weighting)


@pytest.mark.parametrize("name", ["t5", "llama"])
def test_the_two_weightings_differ(name, tmp_path):
    found = [make_trainer(name, tmp_path, weighting=weighting) for weighting in WEIGHTINGS]
    for trainer, _, _ in found:
        trainer.train()
    assert found[0][1] == found[1][1]  # the same batches
    assert relative_error(found[1][2].seen[1], found[0][2].seen[1]) > 1e-3  # of unequal lengths


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
    for entry in logged:
        updates.append(flat(next(left) for _ in range(int(entry["num_micro_batches"]))))
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


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_other_modalities_are_weighted_by_their_examples(weighting, tmp_path):
    generator = torch.Generator().manual_seed(0)
    draw = partial(torch.randn, generator=generator, dtype=torch.float64)
    examples, model = [{"pixel_values": draw(2), "targets": draw(())} for _ in range(7)], Regressor()

    def stack(chosen):
        return {key: torch.stack([example[key] for example in chosen]) for key in chosen[0]}

    options = {"lengths": [9, 8, 7, 6, 5, 4, 3], "budget": bw.MaxTokens(16), "data_collator": stack}
    options |= {"gradient_accumulation_steps": 7, "weighting": weighting, "label_names": ["targets"]}
    trainer, _, gradients = make_trainer("t5", tmp_path, model=model, examples=examples, **options)
    trainer.train()
    reference = Regressor()
    reference.load_state_dict(model.state_dict())
    reference(**stack(examples))["loss"].backward()
    expected = torch.cat([p.grad.flatten() for p in reference.parameters()])
    assert relative_error(gradients.seen[0], expected) < 1e-12


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 2.5), ("sqrt", math.sqrt(2.5))])
def test_the_rate_follows_the_batch_in_the_step_of_the_optimizer_alone(rule, factor, tmp_path):
    model = make_model("t5")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    # Such a schedule goes on from the rate it finds: what the rule left behind would be in all later rates.
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    options = {"optimizers": (optimizer, schedule), "max_steps": 2, "lr_rule": rule, "base_size": 4}
    trainer, _, gradients = make_trainer("t5", tmp_path, model=model, controller=make_controller(10), **options)
    before = flat_parameters(trainer.model)
    moved = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            moved.append(flat_parameters(trainer.model))

    trainer.add_callback(Watch())
    trainer.train()
    # SGD: 10 examples are 2.5 times 4. The schedule halves the rate after every update.
    assert relative_error(before - moved[0], 0.5 * factor * gradients.seen[0]) < 1e-12
    assert relative_error(moved[0] - moved[1], 0.25 * factor * gradients.seen[1]) < 1e-12
    assert [entry["learning_rate"] for entry in trainer.state.log_history[:2]] == [0.5, 0.25]
    if rule != "none":
        assert trainer.state.log_history[0]["lr_factor"] == pytest.approx(factor)


def test_an_error_in_the_step_of_the_optimizer_leaves_the_rate_as_it_was(tmp_path):
    options = {"learning_rate": 0.5, "lr_scheduler_type": "constant", "lr_rule": "linear", "base_size": 1}
    trainer, *_ = make_trainer("t5", tmp_path, **options)
    trainer.create_optimizer()
    trainer.optimizer.register_step_post_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5


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


def test_a_policy_sees_the_course_of_training(tmp_path):
    observed = []
    controller = bw.BatchSizeController(size.track(lambda o: observed.append(o) or 10), min_size=10, max_size=10)
    trainer, _, gradients = make_trainer(
        "t5", tmp_path, controller=controller, num_train_epochs=2, learning_rate=0.1, lr_scheduler_type="constant",
        lr_rule="linear", base_size=5,
    )  # fmt: skip
    trainer.train()
    counts = [(o.epoch, o.step, o.examples, o.batch_size) for o in observed]
    assert counts == [(0, 1, 10, 10), (0, 2, 20, 10), (1, 3, 24, 4), (1, 4, 34, 10), (1, 5, 44, 10), (2, 6, 48, 4)]
    tokens = sum(len(example["input_ids"]) + len(example["labels"]) for example in trainer.train_dataset)
    assert observed[-1].tokens == 2 * tokens
    assert observed[0].lr == pytest.approx(0.1 * 10 / 5)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [o.loss for o in observed] == pytest.approx(logged, rel=1e-5)
    assert len(gradients.seen) == 6


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


def test_the_class_is_made_once_and_named_after_its_trainer():
    made = adaptive(Seq2SeqTrainer)
    assert made is adaptive(Seq2SeqTrainer)
    assert adaptive(made) is made
    assert made.__name__ == "AdaptiveSeq2SeqTrainer"
    assert issubclass(made, AdaptiveTrainerMixin)
    assert issubclass(made, Seq2SeqTrainer)
    with pytest.raises(ArgumentError, match="takes a transformers Trainer class"):
        adaptive(dict)


def test_the_mixin_can_be_inherited_from_and_losses_of_ones_own_are_weighed(tmp_path):
    class OwnLoss(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
            outputs = model(**inputs)
            return (outputs.loss, outputs) if return_outputs else outputs.loss

    trainer, seen, gradients = make_trainer("llama", tmp_path, trainer_cls=OwnLoss, gradient_accumulation_steps=2)
    trainer.train()
    check("llama", trainer, gradients, windows(seen, 2))


def test_the_trainer_counts_the_tokens_of_all_micro_batches(tmp_path):
    options = {"controller": make_controller(12), "include_num_input_tokens_seen": "non_padding"}
    trainer, *_ = make_trainer("t5", tmp_path, **options)
    trainer.train()
    assert trainer.state.num_input_tokens_seen == sum(len(e["input_ids"]) for e in trainer.train_dataset)
    assert trainer.state.total_flos > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": None}, "needs a budget"),
        ({"budget": 8192}, "MaxTokens"),
        ({"controller": 32}, "controller needs observe"),
        ({"weighting": "rows"}, "'tokens', 'examples'"),
        ({"on_oom": "retry"}, "'split', 'skip', 'raise'"),
        ({"lr_rule": "cubic"}, "lr_rule must be"),
        ({"lr_rule": "sqrt"}, "needs base_size"),
        ({"lr_rule": "adascale", "base_size": 4}, "needs measure_noise"),
        ({"measure_noise": True}, "needs a controller"),
        ({"measure_noise": True, "controller": make_controller(4), "on_oom": "skip"}, "every example"),
        ({"grouping": bw.Packed(capacity=64)}, "Packed"),
        ({"grouping": bw.Sorted(), "controller": make_controller(4)}, "grouping belongs to planned"),
        ({"plan_options": {"seed": 3}}, "plan_options takes"),
        ({"plan_options": {"oversize": "truncate"}}, "truncate when tokenizing"),
        ({"eval_budget": 3}, "MaxTokens"),
        ({"controller": make_controller(4), "gradient_accumulation_steps": 2}, "leave it at 1"),
        ({"controller": make_controller(4), "dataloader_drop_last": True}, "leave out dataloader_drop_last"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
        ({"dataloader_in_order": False}, "dataloader_in_order"),
        ({"accelerator_config": {"split_batches": True}}, "split_batches"),
    ],
)
def test_what_cannot_be_done_is_refused_when_the_trainer_is_made(options, message, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        make_trainer("t5", tmp_path, **options)


def pretend(settings, **options):
    """Check settings against a trainer on devices that are not here."""
    args = {"n_gpu": 1, "world_size": 2, "average_tokens_across_devices": True, **options.pop("args", {})}
    check_trainer(settings, SimpleNamespace(args=SimpleNamespace(**args), **options))


@pytest.mark.parametrize(
    ("options", "devices", "message"),
    [
        ({}, {"is_fsdp_enabled": True}, "pass on_oom='raise'"),
        ({}, {"is_deepspeed_enabled": True}, "pass on_oom='raise'"),
        ({}, {"get_tp_size": lambda: 2}, "pass on_oom='raise'"),
        ({"on_oom": "raise", "controller": make_controller(4)}, {"is_fsdp_enabled": True}, "a controller needs"),
        ({"on_oom": "raise", "lr_rule": "sqrt", "base_size": 1}, {"is_deepspeed_enabled": True}, "lr_rule needs"),
        ({}, {"args": {"n_gpu": 2}}, "torchrun"),
        (
            {"measure_noise": True, "controller": make_controller(4)},
            {"args": {"average_tokens_across_devices": False}},
            "needs average_tokens_across_devices",
        ),
    ],
)
def test_what_cannot_be_done_on_several_devices_is_refused(options, devices, message, tmp_path):
    trainer, *_ = make_trainer("t5", tmp_path, **options)
    with pytest.raises(ArgumentError, match=message):
        pretend(trainer._batching.settings, **devices)


def test_memory_is_read_for_policies_that_follow_it(tmp_path):
    observed, memory = [], FakeMemory(1000, used_bytes=200)

    def collate_in_memory(examples):
        memory.run_batch(len(examples), 50)
        return collate(examples)

    controller = bw.BatchSizeController(size.track(lambda o: observed.append(o) or 4), min_size=4, max_size=4)
    options = {"memory": MemoryMonitor(source=memory), "data_collator": collate_in_memory}
    make_trainer("t5", tmp_path, controller=controller, **options)[0].train()
    assert observed[0].memory_fraction == 0.2  # the batch was loaded before the update began
    assert observed[0].seconds > 0


def test_adascale_waits_for_a_reliable_average(tmp_path):
    options = {"controller": make_controller(8), "measure_noise": True, "lr_rule": "adascale", "base_size": 4}
    trainer, *_ = make_trainer("t5", tmp_path, **options)
    trainer.train()
    assert [entry["lr_factor"] for entry in trainer.state.log_history[:3]] == [1, 1, 1]
    average = NoiseAverage()
    for _ in range(10):
        average = average.update(40.0, 10.0, num_examples=8)
    trainer._batching.updates.noise.average = average
    # (S / 4 + G2) / (S / 8 + G2) = (10 + 10) / (5 + 10)
    assert trainer._batching.callback.lr_factor() == pytest.approx(20 / 15)


def test_a_trainer_goes_as_soon_as_nobody_holds_it(tmp_path):
    trainer, *_ = make_trainer("t5", tmp_path, eval_strategy="epoch", eval_dataset=numbered(5))
    trainer.train()
    reference = weakref.ref(trainer)
    del trainer
    assert reference() is None  # garbage need not be collected: worker processes end at once


def test_seq2seq_trainers_train_too(tmp_path):
    trainer, seen, gradients = make_trainer("t5", tmp_path, trainer_cls=Seq2SeqTrainer)
    trainer.train()
    check("t5", trainer, gradients, windows(seen, 1))


def test_an_older_trainer_is_refused_with_the_version_it_takes():
    with pytest.raises(MissingDependencyError, match=r"need transformers 5\.3 or newer, but 5\.0\.0 has no"):
        check_trainer_class(object, "5.0.0")


def test_without_transformers_the_extra_is_named():
    code = "import sys; sys.modules['transformers'] = None; import batchwright.integrations.huggingface"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "transformers is not installed; run: pip install 'batchwright[hf]'" in found.stderr


def test_public_names():
    assert huggingface.__all__ == sorted(huggingface.__all__)
