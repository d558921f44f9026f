"""Logged losses leave out what is not finite, as the trainer does it, and no update waits for the device to know."""

import math
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Trainer, TrainerCallback, TrainingArguments

import batchwright as bw
from batchwright.integrations.huggingface import adaptive

from ...thorough import crossed
from .trainers import collate, make_args, make_model, make_trainer, numbered


class Settings(TrainerCallback):
    """Notes what callbacks see of the setting."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, **kwargs):
        self.seen.append(args.logging_nan_inf_filter)

    on_evaluate = on_save = on_train_end = on_log
    on_train_begin = on_epoch_begin = on_epoch_end = on_log
    on_step_begin = on_substep_end = on_step_end = on_pre_optimizer_step = on_optimizer_step = on_log


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


@pytest.mark.parametrize("event", ["on_step_end", "on_epoch_end", "on_pre_optimizer_step"])
def test_evaluation_by_a_callback_leaves_out_what_is_not_finite(event, tmp_path):
    found = []

    class Evaluates(TrainerCallback):
        pass

    def evaluate(self, args, state, control, **kwargs):
        found.append(trainer.evaluate()["eval_loss"])

    class Broken(Trainer):
        def prediction_step(self, model, inputs, *args, **kwargs):
            loss, *others = super().prediction_step(model, inputs, *args, **kwargs)
            self.num_predicted = getattr(self, "num_predicted", -1) + 1
            return (loss * math.nan if self.num_predicted % 4 == 0 else loss, *others)

    setattr(Evaluates, event, evaluate)
    options = {"max_steps": 2, "eval_strategy": "no", "callbacks": [Evaluates()], "per_device_eval_batch_size": 1}
    data = {"eval_dataset": numbered(4, causal=True), "eval_budget": None}
    trainer = make_trainer("llama", tmp_path, trainer_cls=Broken, **data, **options)[0]
    trainer.train()
    assert found
    assert all(map(math.isfinite, found))


def test_a_callback_may_switch_the_filter_off(tmp_path):
    class Off(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            args.logging_nan_inf_filter = False

    trainer = make(tmp_path, {1: math.nan}, callbacks=[Off()])
    trainer.train()
    assert math.isnan(next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry))
    assert trainer.args.logging_nan_inf_filter is False


NAN, INF = math.nan, math.inf
BROKEN = {
    "nothing": {},
    "the first": {0: NAN},
    "the first two": {0: INF, 1: NAN},
    "some": {1: NAN, 2: INF, 3: -INF, 7: NAN, 10: NAN, 11: NAN},
    "all": dict.fromkeys(range(99), NAN),
}
CASES = {
    "every update": {"logging_steps": 1},
    "the first update too": {"logging_steps": 5, "logging_first_step": True},
    "intervals": {"logging_steps": 4},
    "a part of the updates": {"logging_steps": 0.4},
    "epochs": {"logging_strategy": "epoch"},
    "never": {"logging_strategy": "no"},
    "accumulation": {"logging_steps": 2, "gradient_accumulation_steps": 3},
    "accumulation with a rest": {"logging_steps": 1, "gradient_accumulation_steps": 4},
    "no filter": {"logging_steps": 2, "logging_nan_inf_filter": False},
    "evaluation": {"logging_steps": 4, "eval_strategy": "steps", "eval_steps": 3},
    "smoothed labels": {"logging_steps": 3, "label_smoothing_factor": 0.1},
    "updates that are counted": {"logging_steps": 3, "max_steps": 7},
}


class Stops(TrainerCallback):
    """Ends an epoch, and later the training, between two logs."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step == 4
        control.should_training_stop = state.global_step == 9

    def on_substep_end(self, args, state, control, **kwargs):
        pass


def logged(folder, broken, is_adaptive, *, dtype=torch.float32, callbacks=(), resumes=None, fails_at=None, **options):
    """Return what a trainer logs whose micro-batches have losses 1, 2, 3, … and some that are not finite."""

    class Scripted(Trainer):
        num_steps = 0 if resumes is None else resumes

        def training_step(self, *args, **kwargs):
            super().training_step(*args, **kwargs)
            number, self.num_steps = self.num_steps, self.num_steps + 1
            if number == fails_at:
                raise RuntimeError("broken")
            return torch.tensor(broken.get(number, 1.0 + number), dtype=dtype)

    options = {"num_train_epochs": 2, "eval_strategy": "no", "save_strategy": "no", **options}
    options |= {"eval_dataset": numbered(4, causal=True), "callbacks": list(callbacks)}
    examples = numbered(24, causal=True)
    if is_adaptive:
        options |= {"budget": bw.MaxItems(4), "trainer_cls": Scripted}
        trainer = make_trainer("llama", folder, examples=examples, **options)[0]
    else:
        data = {name: options.pop(name) for name in ("eval_dataset", "callbacks")}
        args = make_args(folder, TrainingArguments, remove_unused_columns=False, **options)
        args.per_device_train_batch_size = 4
        model = make_model("llama")
        trainer = Scripted(model=model, args=args, train_dataset=examples, data_collator=collate, **data)
    if fails_at is not None:
        with pytest.raises(RuntimeError, match="broken"):
            trainer.train()
        trainer.num_steps, trainer.state.log_history = fails_at + 1, []
    trainer.train(resume_from_checkpoint=None if resumes is None else f"{folder}/checkpoint-{resumes}")
    names = ("loss", "train_loss", "step")
    entries = [{name: entry.get(name) for name in names} for entry in trainer.state.log_history]
    return [entry for entry in entries if entry["loss"] is not None or entry["train_loss"] is not None]


def check_logs(folder, *args, **options):
    mine, theirs = (logged(f"{folder}/{is_adaptive}", *args, is_adaptive, **options) for is_adaptive in (True, False))
    assert len(theirs) >= 1
    assert [entry["step"] for entry in mine] == [entry["step"] for entry in theirs]
    for name in ("loss", "train_loss"):
        numbers = [[entry[name] for entry in entries if entry[name] is not None] for entries in (mine, theirs)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0, abs=0, nan_ok=True)


@pytest.mark.parametrize(("case", "broken"), crossed(CASES, BROKEN))
def test_what_is_logged_is_what_the_trainer_logs(case, broken, tmp_path):
    check_logs(tmp_path, BROKEN[broken], **CASES[case])


def test_what_is_logged_is_what_the_trainer_logs_of_losses_in_half_precision(tmp_path):
    check_logs(tmp_path, BROKEN["some"], dtype=torch.bfloat16, logging_steps=3)


def test_what_is_logged_is_what_the_trainer_logs_where_a_callback_stops_it(tmp_path):
    check_logs(tmp_path, BROKEN["some"], callbacks=[Stops()], logging_steps=3, num_train_epochs=3)


def test_what_is_logged_is_what_the_trainer_logs_after_a_step_that_failed(tmp_path):
    check_logs(tmp_path, BROKEN["some"], fails_at=2, logging_steps=2)


def test_what_is_logged_is_what_the_trainer_logs_after_a_checkpoint(tmp_path):
    options = {"logging_steps": 3, "save_strategy": "steps", "save_steps": 5}
    check_logs(tmp_path, BROKEN["some"], **options)
    check_logs(tmp_path, BROKEN["some"], resumes=5, **options)


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
