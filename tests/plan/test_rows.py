"""Rows: packed batches through a real loader."""

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

import batchwright as bw
from batchwright.errors import LengthsError

LENGTHS = np.random.default_rng(0).integers(1, 30, size=80)


class Plain(Dataset):
    """One example a call: its number, as often as it is long."""

    def __len__(self):
        return len(LENGTHS)

    def __getitem__(self, index):
        return [index] * int(LENGTHS[index])


class AtOnce(Plain):
    """All examples of a batch in one call."""

    def __getitem__(self, index):
        raise AssertionError("asked for one example though several can be had at once")

    def __getitems__(self, indices):
        return [[index] * int(LENGTHS[index]) for index in indices]


def as_it_is(rows):
    return rows


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("data", [Plain(), AtOnce()], ids=["one by one", "at once"])
def test_collate_receives_a_list_of_rows(data, num_workers):
    sampler = bw.BatchSampler(LENGTHS, bw.MaxTokens(128), grouping=bw.Packed(64))
    planned = list(sampler.plan)
    loader = DataLoader(bw.Rows(data), batch_sampler=sampler, collate_fn=as_it_is, num_workers=num_workers)
    batches = list(sampler.track(loader))
    assert [[[example[0] for example in row] for row in rows] for rows in batches] == planned
    for rows in batches:
        assert len(rows) <= 2  # two rows of 64 fill the budget of 128
        assert all(sum(map(len, row)) <= 64 for row in rows)


def test_a_packed_epoch_resumes_in_the_middle():
    def make():
        return bw.BatchSampler(LENGTHS, bw.MaxTokens(128), grouping=bw.Packed(64))

    sampler, resumed = make(), make()
    loader = DataLoader(bw.Rows(Plain()), batch_sampler=sampler, collate_fn=as_it_is, num_workers=2)
    tracked = sampler.track(loader)
    received = [next(tracked) for _ in range(3)]
    resumed.load_state_dict(sampler.state_dict())
    rows = bw.Rows(Plain())
    assert received + [rows.__getitems__(batch) for batch in resumed] == [rows.__getitems__(b) for b in make()]


def test_one_row_can_be_taken_by_its_indices():
    rows = bw.Rows("abcd")
    assert rows[[3, 0]] == ["d", "a"]
    assert rows[[]] == []
    assert bw.Rows(AtOnce())[[3, 0]] == [Plain()[3], Plain()[0]]
    assert rows.__getitems__([[1], [2, 3]]) == [["b"], ["c", "d"]]


def test_rows_are_as_many_as_the_examples_so_that_the_lengths_can_be_checked():
    assert len(bw.Rows(Plain())) == 80
    with pytest.raises(LengthsError, match="80 examples but there are 79 lengths"):
        bw.BatchSampler(LENGTHS[1:], bw.MaxTokens(64), grouping=bw.Packed(64), dataset=bw.Rows(Plain()))


class Short(Plain):
    def __getitems__(self, indices):
        return [[index] for index in indices[1:]]


def test_a_data_set_that_gives_fewer_examples_than_asked_for_is_refused():
    # Otherwise a loader would take the missing example for the end of the epoch.
    loader = DataLoader(bw.Rows(Short()), batch_sampler=[[[0, 1], [2]]], collate_fn=as_it_is)
    with pytest.raises(LengthsError, match="one example per index, 3, got 2"):
        list(loader)
