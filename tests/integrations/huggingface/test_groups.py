"""Examples that stay together, through ``plan_options`` of an adaptive trainer."""

import pytest

import batchwright as bw
from batchwright import size
from batchwright.errors import ArgumentError
from batchwright.integrations.huggingface import _probing
from batchwright.integrations.huggingface._batches import PlannedBatches
from batchwright.step.calibration.found import FoundBudget

from .trainers import make_trainer, quick

PAIRS = [f"pair {place % 12}" for place in range(24)]  # example i and i + 12


def test_a_trainer_keeps_the_pairs_of_its_plan_options(tmp_path):
    with quick():
        trainer, seen, _ = make_trainer("llama", tmp_path, plan_options={"groups": PAIRS}, num_train_epochs=2)
        trainer.train()
    assert sorted(place for batch in seen for place in batch) == sorted([*range(24)] * 2)
    for batch in seen:
        assert {(place + 12) % 24 for place in batch} == set(batch)


def test_a_found_budget_parts_no_group_for_throughput(tmp_path, monkeypatch):
    """One example at a time is fastest here, and no memory is short: batches are the groups."""
    slow = FoundBudget(None, bw.TimeModel.fit([(1, 8), (4, 8), (2, 16), (8, 16)], [1.0, 4.0, 4.0, 16.0]))
    assert slow.max_items([[8]]).tolist() == [1]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(_probing, "find_budget", lambda *args, **kwargs: slow)
    with quick():
        trainer, seen, _ = make_trainer("llama", tmp_path, plan_options={"groups": PAIRS}, budget="auto")
        trainer.train()
    assert sorted(place for batch in seen for place in batch) == [*range(24)]
    for batch in seen:
        assert {(place + 12) % 24 for place in batch} == set(batch)


def test_a_controller_refuses_groups(tmp_path):
    controller = bw.BatchSizeController(size.constant(4), min_size=4, max_size=4)
    with quick(), pytest.raises(ArgumentError, match="plan_options belongs to planned batches"):
        make_trainer("llama", tmp_path, plan_options={"groups": PAIRS}, controller=controller)


def test_only_ranks_that_repeat_a_group_count_nothing():
    # Two pairs for three ranks: the last repeats the first pair, so 2 examples are repeated, by one rank.
    lengths, groups = [3, 3, 5, 5], [0, 0, 1, 1]
    counted = []
    for rank in range(3):
        sampler = bw.BatchSampler(lengths, bw.MaxItems(4), groups=groups, rank=rank, world_size=3)
        batches = PlannedBatches(sampler, lengths, 1)
        assert batches.begin_epoch(0) == 1
        list(batches.track(batches))
        counted.append(batches.take_received().counted.examples)
    assert counted == [2, 2, 0]
