"""controller="auto" in a Trainer: a user who gives no batch size gets a good one, and reads why."""

import json
import logging

import pytest
import torch
from transformers import Adafactor, TrainerCallback

import batchwright as bw
from batchwright import size
from batchwright.errors import ArgumentError
from batchwright.integrations.huggingface import BatchSizeCallback
from batchwright.integrations.huggingface._figures import TOKENS, TrainingFigures
from batchwright.step.losses import whole_batch

from ...processes import run_ranks
from .trainers import flat, flat_parameters, make_args, make_model, make_trainer, numbered

NUM = 480
BASE = 4
LAUNCH = 0.05
AUTO = {
    "controller": "auto",
    "budget": None,
    "per_device_train_batch_size": BASE,
    "learning_rate": 1e-3,
    "optim": "adamw_torch",
}


@pytest.fixture
def launch_bound(monkeypatch):
    """Plant a clock on which an update takes 50 ms, whatever it holds."""
    monkeypatch.setattr(TrainingFigures, "seconds", property(lambda self: LAUNCH))


@pytest.fixture
def compute_bound(monkeypatch):
    """Plant a clock on which an update takes 5 ms per token."""
    monkeypatch.setattr(TrainingFigures, "seconds", property(lambda self: LAUNCH / 10 * float(self._sums[TOKENS])))


class Watch(TrainerCallback):
    """Notes the rate of the schedule after every update; may end the training."""

    def __init__(self, stop_at=None):
        self.stop_at = stop_at
        self.rates = []

    def on_step_end(self, args, state, control, lr_scheduler=None, **kwargs):
        self.rates.append(lr_scheduler.get_last_lr()[0])
        if state.global_step == self.stop_at:
            control.should_training_stop = True
        return control


def train(folder, *, num=NUM, callbacks=(), checkpoint=None, **options):
    trainer, seen, _ = make_trainer("t5", folder, examples=numbered(num), callbacks=callbacks, **{**AUTO, **options})
    trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
    return trainer, seen


def sizes_of(trainer):
    return [round(entry["batch_size"]) for entry in trainer.state.log_history if "loss" in entry]


def reasons_of(trainer):
    return [entry["batch_size_reason"] for entry in trainer.state.log_history if "batch_size_reason" in entry]


def test_a_launch_bound_training_grows_and_logs_why(tmp_path, launch_bound):
    trainer, seen = train(tmp_path)
    sizes = sizes_of(trainer)
    assert sizes[0] == BASE
    assert 5 * BASE <= max(sizes) <= NUM // 20  # the most that leaves twenty updates per epoch, or within 5 % of it
    assert sorted(flat(seen)) == list(range(NUM))  # every example once
    assert "timing 8" in reasons_of(trainer)[0]
    assert "times the examples per second of" in reasons_of(trainer)[-1]
    assert len(sizes) < NUM / BASE / 2


def test_a_compute_bound_training_stays_at_the_base_after_a_look_around(tmp_path, compute_bound):
    sizes = sizes_of(train(tmp_path)[0])
    assert {BASE, 2 * BASE} <= set(sizes) <= {BASE, 2 * BASE, 4 * BASE}
    assert sizes[-40:] == [BASE] * 40


def test_a_real_clock_will_do(tmp_path):
    trainer, seen = train(tmp_path, num=240)
    assert sorted(flat(seen)) == list(range(240))
    assert set(sizes_of(trainer)) <= set(range(1, 13))


def test_nothing_is_printed_unless_history_is_wanted(tmp_path, launch_bound):
    lines = []
    trainer, _ = train(tmp_path, history=lines.append)
    assert [line.split("(")[1].rstrip(")") for line in lines] == reasons_of(trainer)


def test_the_base_size_counts_accumulation_and_the_arguments_of_the_user_stay(tmp_path):
    args = make_args(tmp_path, per_device_train_batch_size=3, gradient_accumulation_steps=2)
    trainer, *_ = make_trainer("t5", tmp_path, examples=numbered(NUM), controller="auto", budget=None)
    assert trainer._batching.settings.base_size == 3
    kind = type(trainer)
    trainer = kind(model=make_model("t5"), args=args, train_dataset=numbered(NUM), controller="auto")
    settings = trainer._batching.settings
    assert (settings.base_size, settings.controller.min_size, settings.controller.max_size) == (6, 6, 24)
    # Accumulated gradients say that no more than this fits at once.
    assert settings.budget == bw.MaxItems(3)
    assert (args.gradient_accumulation_steps, trainer.args.gradient_accumulation_steps) == (2, 1)


def test_an_accumulated_update_is_one_of_the_base_size(tmp_path, compute_bound):
    trainer, seen = train(tmp_path, gradient_accumulation_steps=2, num=240)
    assert sizes_of(trainer)[0] == 2 * BASE
    assert max(map(len, seen)) <= BASE
    assert sorted(flat(seen)) == list(range(240))


def noted(kind, inside):
    """Return a class of optimizers that note the rate and beta2 with which a step runs."""

    class Noted(kind):
        def step(self, *given, **options):
            group = self.param_groups[0]
            inside.append((float(group["lr"]), group.get("betas", (None, None))[1]))
            return super().step(*given, **options)

    return Noted


@pytest.mark.parametrize(
    ("kind", "power", "beta2"),
    [(torch.optim.AdamW, 0.5, 0.999), (torch.optim.SGD, 1.0, None), (Adafactor, 0.5, None)],
    ids=["AdamW", "SGD", "Adafactor"],
)
def test_rate_and_beta2_follow_the_size_as_the_optimizer_needs(kind, power, beta2, tmp_path, launch_bound):
    inside, model = [], make_model("t5")
    options = {"relative_step": False} if kind is Adafactor else {}
    optimizer = noted(kind, inside)(model.parameters(), lr=1e-4, **options)
    trainer, _ = train(tmp_path, model=model, optimizers=(optimizer, None), lr_scheduler_type="constant")
    sizes = sizes_of(trainer)
    assert len(set(sizes)) > 3
    for (rate, found), used in zip(inside, sizes, strict=True):
        assert rate == pytest.approx(1e-4 * (used / BASE) ** power)
        assert found == (None if beta2 is None else pytest.approx(beta2 ** (used / BASE)))
    assert optimizer.param_groups[0].get("betas", (None, None))[1] == beta2
    # The averages of squared gradients are made for the beta2 of the last step, as its bias correction needs.
    made_for = optimizer.param_groups[0].get("exp_avg_sq_beta2")
    assert made_for == (None if beta2 is None else pytest.approx(beta2 ** (sizes[-1] / BASE)))


def test_a_schedule_over_epochs_follows_the_examples(tmp_path, launch_bound):
    watch = Watch()
    trainer, _ = train(tmp_path, callbacks=[watch], num_train_epochs=2, lr_scheduler_type="linear")
    done, total = 0, 2 * NUM
    sizes = sizes_of(trainer)
    for used, rate in zip(sizes, watch.rates, strict=True):
        done += used
        # The schedule has one step per update of the base size, so it is at most one step late.
        assert rate == pytest.approx(1e-3 * (1 - done / total), abs=1e-3 * BASE / total * 1.01)
    assert watch.rates[-1] == pytest.approx(0.0, abs=1e-12)
    assert done == total
    assert trainer.state.global_step == trainer.state.max_steps == len(sizes)


def test_a_schedule_over_max_steps_counts_updates(tmp_path, launch_bound):
    watch = Watch()
    trainer, _ = train(tmp_path, callbacks=[watch], max_steps=60, lr_scheduler_type="linear")
    assert trainer.state.global_step == 60
    assert watch.rates == pytest.approx([1e-3 * (1 - step / 60) for step in range(1, 61)], abs=1e-12)


@pytest.mark.parametrize("stop_at", [9, 30, 41])
def test_a_resumed_training_is_the_one_without_a_break(stop_at, tmp_path, launch_bound):
    options = {"num_train_epochs": 2, "lr_scheduler_type": "linear", "save_strategy": "steps", "save_steps": stop_at}
    straight, whole = train(tmp_path / "whole", **options)
    _, before = train(tmp_path / "part", callbacks=[Watch(stop_at)], **options)
    resumed, after = train(tmp_path / "part", checkpoint=tmp_path / "part" / f"checkpoint-{stop_at}", **options)
    assert before + after == whole
    assert torch.equal(flat_parameters(resumed.model), flat_parameters(straight.model))
    assert sizes_of(resumed) == sizes_of(straight)
    saved = json.loads((tmp_path / "part" / f"checkpoint-{stop_at}" / "trainer_state.json").read_text())
    assert saved["stateful_callbacks"]["batchwright"]["controller"]["policy"].startswith("OnlineGoodput")


def test_noise_is_measured_on_some_updates_only(tmp_path, compute_bound):
    trainer, _ = train(tmp_path, num=960)
    parts = [entry["num_micro_batches"] for entry in trainer.state.log_history if "loss" in entry]
    # A batch of the base runs whole, or in two random parts.
    assert set(parts) == {1.0, 2.0}
    assert parts[-80:].count(2.0) == 10


def test_measured_updates_every_so_often_can_be_asked_for_with_any_controller(tmp_path):
    controller = bw.BatchSizeController(size.constant(6), min_size=6, max_size=6)
    trainer, _ = train(tmp_path, controller=controller, measure_noise=4, num=96, budget=bw.MaxItems(6))
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["num_micro_batches"] for entry in logs] == [2, 1, 1, 1] * 4


def test_an_explicit_rule_is_kept(tmp_path, launch_bound):
    trainer, _ = train(tmp_path, lr_rule="none", beta2_rule=lambda batch_size, base_size, beta2: beta2)
    assert {entry["lr_factor"] for entry in trainer.state.log_history if "lr_factor" in entry} <= {1.0}


def test_a_small_data_set_keeps_the_base_size_and_says_so(tmp_path, caplog, launch_bound):
    with caplog.at_level(logging.WARNING, logger="batchwright"):
        trainer, _ = train(tmp_path, num=40)
    assert "keeps the size near 4" in caplog.text
    assert set(sizes_of(trainer)) == {BASE}


def test_evaluation_is_that_of_the_trainer(tmp_path):
    trainer, *_ = make_trainer("t5", tmp_path, examples=numbered(NUM), **AUTO)
    assert trainer._batching.settings.evaluation_budget is None


# What cannot be


def test_an_optimizer_without_a_rate_is_refused(tmp_path):
    model = make_model("t5")
    optimizer = Adafactor(model.parameters())  # finds its own rate
    schedule = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(model.parameters(), 0.1), lambda step: 1.0)
    options = {**AUTO, "model": model, "optimizers": (optimizer, schedule)}
    trainer, *_ = make_trainer("t5", tmp_path, examples=numbered(NUM), **options)
    with pytest.raises(ArgumentError, match="scales the learning rate with the size, but a group of Adafactor"):
        trainer.train()


def test_examples_that_may_be_left_out_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="controller='auto' measures gradient noise, which needs every example"):
        make_trainer("t5", tmp_path, examples=numbered(NUM), on_oom="skip", **AUTO)


def test_a_loss_that_needs_the_whole_batch_is_refused(tmp_path):
    @whole_batch
    def compute_loss(outputs, labels, num_items_in_batch=None):
        return outputs.logits.std()

    with pytest.raises(ArgumentError, match="its loss was declared to need the whole batch"):
        train(tmp_path, compute_loss_func=compute_loss)


def test_a_callback_of_a_plain_trainer_refuses_it():
    with pytest.raises(ArgumentError, match="needs batches whose size it can change, and their gradient noise"):
        BatchSizeCallback("auto")


def test_another_word_is_no_controller(tmp_path):
    with pytest.raises(ArgumentError, match=r"got str; write BatchSizeController\(size\.goodput\(\), min_size=…"):
        make_trainer("t5", tmp_path, controller="automatic")


def test_beta2_of_an_optimizer_without_betas_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="no group of SGD has betas"):
        train(tmp_path, optim="sgd", beta2_rule="half_life")


def test_a_rule_of_beta2_needs_a_base_size(tmp_path):
    controller = bw.BatchSizeController(size.constant(6), min_size=6, max_size=6)
    with pytest.raises(ArgumentError, match="beta2_rule needs base_size"):
        make_trainer("t5", tmp_path, controller=controller, beta2_rule="half_life")


def test_two_ranks_choose_the_same_sizes(tmp_path):
    run_ranks("tests.integrations.huggingface.auto_ranks", 2, tmp_path)
