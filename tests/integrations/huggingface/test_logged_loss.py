"""Logged losses leave out what is not finite, as the trainer does it, and no update waits for the device to know."""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainerCallback

from batchwright.integrations.huggingface import adaptive

from .trainers import make_trainer, numbered


class Settings(TrainerCallback):
    """Notes what callbacks see of the setting."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, **kwargs):
        self.seen.append(args.logging_nan_inf_filter)

    on_evaluate = on_save = on_train_end = on_log


def make(folder, broken, **options):
    """Return a trainer whose loss is not finite in some updates, and that notes what its ``training_step`` sees."""

    class Broken(Trainer):
        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs) + broken.get(self.state.global_step, 0.0)
            self.noted = [*getattr(self, "noted", []), float(loss)]
            return loss

    options = {"logging_steps": 3, "max_steps": 9, "eval_strategy": "no", **options}
    return make_trainer("llama", folder, trainer_cls=Broken, examples=numbered(24, causal=True), **options)[0]


def logged_by_hand(losses, every):
    """Return what the trainer logs: an update whose loss is not finite counts as the mean of those before it."""
    means, total, since = [], 0.0, 0
    for step, loss in enumerate(losses):
        total += loss if math.isfinite(loss) else total / (1 + step - since)
        if (step + 1) % every == 0:
            means.append(total / every)
            total, since = 0.0, step + 1
    return means


@pytest.mark.parametrize(
    "broken", [{}, {1: math.nan, 2: math.inf, 3: -math.inf, 7: math.nan}, dict.fromkeys(range(9), math.nan)]
)
def test_a_loss_that_is_not_finite_counts_as_the_mean_of_those_before(broken, tmp_path):
    trainer = make(tmp_path, broken)
    trainer.train()
    assert len(trainer.noted) == 9
    assert sum(not math.isfinite(loss) for loss in trainer.noted) == len(broken)
    found = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert found == pytest.approx(logged_by_hand(trainer.noted, 3), abs=1e-4)  # the trainer rounds what it logs


def broken_step(trainer, model, inputs, num_items_in_batch=None):
    loss = trainer.compute_loss(model.train(), trainer._prepare_inputs(dict(inputs)))
    trainer.accelerator.backward(loss)
    return loss.detach() + (math.nan if trainer.state.global_step == 1 else 0.0)


OVERRIDES = {"a step": {"training_step": broken_step}, "operations": {"floating_point_ops": lambda trainer, inputs: 0}}


@pytest.mark.parametrize("methods", OVERRIDES.values(), ids=OVERRIDES)
@pytest.mark.parametrize("on_class", [True, False])
def test_what_stands_above_the_adaptive_trainer_leaves_the_filter_to_the_trainer(methods, on_class, tmp_path):
    class Broken(Trainer):
        def training_step(self, *args, **kwargs):
            return super().training_step(*args, **kwargs) + (math.nan if self.state.global_step == 1 else 0.0)

    base = adaptive(Broken)
    trainer_cls = type("Above", (base,), methods) if on_class else base
    options = {"logging_steps": 3, "max_steps": 6, "eval_strategy": "no", "trainer_cls": trainer_cls}
    trainer = make_trainer("llama", tmp_path, examples=numbered(24, causal=True), **options)[0]
    for name, method in methods.items() if not on_class else ():
        setattr(trainer, name, method.__get__(trainer))
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 2
    assert all(map(math.isfinite, losses))


def test_a_filter_that_was_switched_off_stays_off(tmp_path):
    trainer = make(tmp_path, {1: math.nan}, logging_nan_inf_filter=False)
    trainer.train()
    assert math.isnan(next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry))
    assert trainer.args.logging_nan_inf_filter is False


def test_callbacks_evaluation_and_checkpoints_see_the_setting_as_it_was_given(tmp_path):
    settings = Settings()
    options = {"eval_strategy": "steps", "eval_steps": 3, "save_strategy": "steps", "save_steps": 3}
    trainer = make(tmp_path, {}, callbacks=[settings], eval_dataset=numbered(4, causal=True), **options)
    trainer.train()
    assert settings.seen
    assert all(settings.seen)
    saved = torch.load(Path(tmp_path) / "checkpoint-3" / "training_args.bin", weights_only=False)
    assert saved.logging_nan_inf_filter
    assert trainer.args.logging_nan_inf_filter


def test_after_an_error_the_setting_is_as_it_was_given(tmp_path):
    trainer = make(tmp_path, {})

    def fail(*args, **kwargs):
        raise RuntimeError("broken")

    trainer.training_step = fail
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train()
    assert trainer.args.logging_nan_inf_filter is True


class Waits(TorchDispatchMode):
    """Counts how often a function of the trainer itself reads a number from the device."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            frame = sys._getframe(1)
            while "/torch/" in frame.f_code.co_filename:
                frame = frame.f_back
            self.names.append(frame.f_code.co_name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("waits", [False, True])
def test_the_loop_of_the_trainer_waits_for_no_loss(waits, tmp_path, monkeypatch):
    trainer = make(tmp_path, {})
    if waits:  # as the trainer does it by itself
        monkeypatch.setattr(type(trainer._batching.losses), "instead_of", lambda self, trainer: torch.enable_grad())
    with Waits() as seen:
        trainer.train()
    assert ("_run_epoch" in seen.names) is waits
