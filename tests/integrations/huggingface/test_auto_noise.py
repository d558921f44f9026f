"""controller="auto" in a Trainer: which updates measure noise, which data bounds the size, and what is refused."""

import logging
from itertools import pairwise

import pytest

import batchwright as bw
from batchwright import size
from batchwright.errors import ArgumentError
from batchwright.integrations.huggingface._figures import TrainingFigures

from .trainers import make_model, make_trainer, numbered

AUTO = {
    "controller": "auto",
    "budget": None,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "optim": "adamw_torch",
}
STEPS = {0: 4, 3: 6, 7: 10, 12: 5, 20: 7}


@pytest.fixture(autouse=True)
def launch_bound(monkeypatch):
    """Plant a clock on which an update takes 50 ms, whatever it holds."""
    monkeypatch.setattr(TrainingFigures, "seconds", property(lambda self: 0.05))


def measured_updates(trainer):
    """Return the numbers of the updates that were cut in two for the noise, and how many updates there were."""
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [place for place, entry in enumerate(logs) if entry["num_micro_batches"] > 1], len(logs)


def make_stepping(folder, **options):
    """Return a trainer whose sizes change by the number of updates, over three epochs."""
    controller = bw.BatchSizeController(size.milestones(STEPS, per="step"), min_size=1, max_size=24)
    options = {"measure_noise": 4, "budget": bw.MaxItems(100), "num_train_epochs": 3, **options}
    return make_trainer("t5", folder, examples=numbered(150), controller=controller, **options)[0]


def test_an_interval_of_noise_that_is_given_stays_with_auto(tmp_path):
    trainer, *_ = make_trainer("t5", tmp_path, examples=numbered(2400), measure_noise=8, **AUTO)
    trainer.train()
    places, num = measured_updates(trainer)
    assert places == list(range(0, num, 8))


def test_of_the_first_32_updates_every_second_one_is_measured_and_then_every_8th(tmp_path):
    trainer, *_ = make_trainer("t5", tmp_path, examples=numbered(2400), **AUTO)
    trainer.train()
    places, num = measured_updates(trainer)
    assert num > 64
    assert places == [*range(0, 32, 2), *range(32, num, 8)]


def test_every_nth_update_is_measured_also_if_sizes_change_and_epochs_end(tmp_path):
    trainer = make_stepping(tmp_path)
    trainer.train()
    places, _ = measured_updates(trainer)
    assert {after - before for before, after in pairwise(places)} == {4}


def test_a_resumed_training_goes_on_to_count_the_updates_that_are_measured(tmp_path):
    trainer = make_stepping(tmp_path / "whole", save_strategy="steps", save_steps=31)
    trainer.train()
    resumed = make_stepping(tmp_path / "rest")
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-31"))
    assert measured_updates(resumed) == measured_updates(trainer)


def test_data_that_is_given_after_the_trainer_was_made_bounds_the_size(tmp_path):
    options = {**AUTO, "per_device_train_batch_size": 4}
    trainer, *_ = make_trainer("t5", tmp_path, examples=numbered(160), **options)
    later = type(trainer)(
        model=make_model("t5"), args=trainer.args, data_collator=trainer.data_collator, controller="auto"
    )
    later.train_dataset = numbered(160)
    later.train()
    sizes = [round(entry["batch_size"]) for entry in later.state.log_history if "loss" in entry]
    assert max(sizes) == 8


def test_the_warning_about_small_data_says_what_bounds_the_size(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="batchwright"):
        make_trainer("t5", tmp_path, examples=numbered(9), **{**AUTO, "per_device_train_batch_size": 4})
    assert (
        "keeps the size near 4: a larger one may be at most a twentieth of the data, which is 0.45 of 9" in caplog.text
    )


@pytest.mark.parametrize("options", [AUTO, {}], ids=["auto", "planned batches"])
def test_a_model_of_which_nothing_is_trained_is_refused_with_a_sentence(options, tmp_path):
    model = make_model("t5").requires_grad_(False)
    with pytest.raises(ArgumentError, match="no parameter is trained; set requires_grad"):
        make_trainer("t5", tmp_path, model=model, examples=numbered(160), **options)[0].train()
