"""Cutting a batch: as many micro-batches as asked for, none over its budget."""

import pytest
import torch

from batchwright.errors import ArgumentError
from batchwright.plan import MaxItems, MaxTokens
from batchwright.step._settings import wrap_batch
from batchwright.step.splitting import split, split_by_budget


@pytest.mark.parametrize("num", range(1, 12))
@pytest.mark.parametrize("least_parts", [1, 2, 3, 5])
def test_there_are_as_many_micro_batches_as_asked_for(num, least_parts):
    parts = split_by_budget([4] * num, MaxItems(100), least_parts=least_parts)
    assert len(parts) >= min(least_parts, num)
    assert sorted(index for part in parts for index in part) == list(range(num))


def test_micro_batches_keep_the_budget_but_for_an_example_that_is_over_it_alone():
    lengths = [3, 50, 7, 12, 1, 9]
    parts = split_by_budget(lengths, MaxTokens(24))
    assert parts == [[1], [3, 5], [2, 0, 4]]  # 50, 2 × 12, 3 × 7
    assert split_by_budget(lengths, MaxTokens(24), order=range(6)) == [[0], [1], [2, 3], [4, 5]]


def wrapped(batch, **options):
    return wrap_batch(batch, **{"collate": None, "lengths": None, "trim": None, "split": None, **options})


def test_a_batch_that_only_runs_whole_is_refused_when_it_has_to_be_cut():
    batch = wrapped({"patches": torch.zeros(9, 3), "input_ids": torch.zeros(4, 5)})
    assert split(batch, budget=None, limit=float("inf")) == [range(4)]
    for options in ({"limit": 2.0}, {"limit": float("inf"), "least_parts": 2}):
        with pytest.raises(ArgumentError, match=r"has to be cut .*batch\['patches'\] has 9.* give split="):
            split(batch, budget=None, **options)


def test_a_batch_with_a_split_of_its_own_is_cut_by_its_lengths():
    def take(batch, indices):
        return len(batch) if indices is None else [batch[index] for index in indices]

    batch = wrapped([3, 50, 7, 12, 1, 9], split=take, lengths=lambda batch: batch)
    parts = split(batch, budget=MaxTokens(24), limit=1.0)
    assert parts == [[1], [3, 5], [2, 0, 4]]  # 50, 2 × 12, 3 × 7
    assert list(batch.take_all(parts)) == [[50], [12, 9], [7, 3, 1]]
