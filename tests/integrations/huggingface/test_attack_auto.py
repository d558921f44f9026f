"""controller="auto" in a Trainer, attacked: what is given stays, bounds hold, and refusals are sentences."""

import logging
from itertools import pairwise

import pytest

import batchwright as bw
from batchwright import size
from batchwright.errors import BatchwrightError
from batchwright.integrations.huggingface._figures import TrainingFigures

from .trainers import make_model, make_trainer, numbered

AUTO = {
    "controller": "auto",
    "budget": None,
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "optim": "adamw_torch",
}


@pytest.fixture(autouse=True)
def launch_bound(monkeypatch):
    """Plant a clock on which an update takes 50 ms, whatever it holds."""
    monkeypatch.setattr(TrainingFigures, "seconds", property(lambda self: 0.05))


def measured_updates(trainer):
    """Return the numbers of the updates that were cut in two for the noise."""
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return [place for place, entry in enumerate(logs) if entry["num_micro_batches"] > 1], len(logs)


def test_an_interval_of_noise_that_is_given_stays_with_auto(tmp_path):
    # docs/trainers.md: "Options that you give stay". Expected: every 8th update is measured, about 11 of 88.
    # Found: 43 of 88, every second one, to the end of the training; measure_noise=3 likewise.
    trainer, *_ = make_trainer("t5", tmp_path, examples=numbered(2400), measure_noise=8, **AUTO)
    trainer.train()
    places, num = measured_updates(trainer)
    assert len(places) <= num / 8 + 6, (len(places), num)


def test_only_of_the_first_32_updates_every_second_one_is_measured(tmp_path):
    # docs/trainers.md: "every 8th batch; of the first 32 every second one". Expected: 16 + 56 / 8, about 23 of 88.
    # Found: 43: the 32 is compared with the place in the epoch divided by the size, which stays small as sizes grow.
    trainer, *_ = make_trainer("t5", tmp_path, examples=numbered(2400), **AUTO)
    trainer.train()
    places, num = measured_updates(trainer)
    later = [place for place in places if place >= 32]
    assert len(later) <= (num - 32) / 8 + 4, (later, num)


def test_every_nth_update_is_measured_also_if_sizes_change_and_epochs_end(tmp_path):
    # Docstring of measure_noise: "measures only every n-th update". Expected: 4 updates from one to the next.
    # Found: distances of 2 to 7: the place in the epoch divided by the size is counted, not updates.
    policy = size.milestones({0: 4, 3: 6, 7: 10, 12: 5, 20: 7}, per="step")
    controller = bw.BatchSizeController(policy, min_size=1, max_size=24)
    options = {"controller": controller, "measure_noise": 4, "budget": bw.MaxItems(100), "num_train_epochs": 3}
    trainer, *_ = make_trainer("t5", tmp_path, examples=numbered(150), **options)
    trainer.train()
    places, _ = measured_updates(trainer)
    assert {after - before for before, after in pairwise(places)} == {4}


def test_data_that_is_given_after_the_trainer_was_made_bounds_the_size(tmp_path):
    # docs/trainers.md: the largest size is "at most a twentieth of the data". Expected: 8 of 160 examples.
    # Found: 16 and on, up to 64 times the base, if train_dataset is set between the constructor and train().
    options = {**AUTO, "per_device_train_batch_size": 4}
    trainer, *_ = make_trainer("t5", tmp_path, examples=numbered(160), **options)
    later = type(trainer)(
        model=make_model("t5"), args=trainer.args, data_collator=trainer.data_collator, controller="auto"
    )
    later.train_dataset = numbered(160)
    later.train()
    sizes = [round(entry["batch_size"]) for entry in later.state.log_history if "loss" in entry]
    assert max(sizes) <= 8


def test_the_warning_about_small_data_is_true(tmp_path, caplog):
    # Expected: a sentence that holds for 9 examples and a base of 4, of which an epoch has 3 updates.
    # Found: "an epoch of 9 examples has room for 20 updates of at most 4".
    with caplog.at_level(logging.WARNING, logger="batchwright"):
        make_trainer("t5", tmp_path, examples=numbered(9), **{**AUTO, "per_device_train_batch_size": 4})
    assert "keeps the size near 4" in caplog.text
    assert "9 examples has room for 20 updates of at most 4" not in caplog.text


def test_a_model_of_which_nothing_is_trained_is_refused_with_a_sentence(tmp_path):
    # Expected: a refusal of ours that says that no parameter is trained.
    # Found: ValueError: max() arg is an empty sequence.
    model = make_model("t5").requires_grad_(False)
    with pytest.raises((BatchwrightError, RuntimeError)):
        make_trainer("t5", tmp_path, model=model, examples=numbered(160), **AUTO)[0].train()
