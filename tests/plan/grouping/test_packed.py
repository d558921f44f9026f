"""Best-fit decreasing: rows that hold, the same by both ways, as few as the textbook's."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright as bw
from batchwright._optional import is_installed
from batchwright.errors import ArgumentError, BudgetError, StateMismatchError
from batchwright.plan.grouping import packed as _packing
from batchwright.plan.grouping.packed import pack_rows
from batchwright.plan.plan import plan_epoch

needs_numba = pytest.mark.skipif(not is_installed("numba"), reason="compares with compiled code")


def log_normal(num, longest, seed=0):
    draws = np.random.default_rng(seed).lognormal(4, 1, num)
    return np.clip(draws, 1, longest).astype(np.int32)


def in_windows(lengths, num_windows):
    windows = np.array_split(np.asarray(lengths, dtype=np.int32), num_windows)
    return np.concatenate([np.sort(window)[::-1] for window in windows])


def num_rows_of_the_textbook(lengths, capacity):
    """Best-fit decreasing, one example at a time over all rows."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        holding = [place for place, room in enumerate(rooms) if room >= length]
        if holding:
            rooms[min(holding, key=rooms.__getitem__)] -= length
        else:
            rooms.append(capacity - length)
    return len(rooms)


lists = st.integers(1, 300).flatmap(
    lambda capacity: st.tuples(st.just(capacity), st.lists(st.integers(1, capacity), min_size=1, max_size=60))
)


@needs_numba
@settings(max_examples=200)
@given(lists, st.integers(1, 4))
def test_compiled_and_plain_give_the_same_rows(problem, num_windows):
    capacity, lengths = problem
    lengths = in_windows(lengths, num_windows)
    plain = pack_rows(lengths, capacity, compiled=False)
    assert plain.tolist() == pack_rows(lengths, capacity, compiled=True).tolist()
    assert np.bincount(plain, weights=lengths).max() <= capacity


@needs_numba
@pytest.mark.parametrize("capacity", [1000, 4096, 70_000])
def test_compiled_and_plain_give_the_same_rows_for_many_examples(capacity):
    lengths = in_windows(log_normal(200_000, min(capacity, 2000)), 50)
    plain = pack_rows(lengths, capacity, compiled=False)
    assert (plain == pack_rows(lengths, capacity, compiled=True)).all()
    assert np.bincount(plain, weights=lengths).max() <= capacity


@settings(max_examples=200)
@given(lists)
def test_one_window_takes_as_many_rows_as_the_textbook(problem):
    capacity, lengths = problem
    rows = pack_rows(in_windows(lengths, 1), capacity, compiled=False)
    assert int(rows.max()) + 1 == num_rows_of_the_textbook(lengths, capacity)
    assert sorted(set(rows.tolist())) == list(range(int(rows.max()) + 1))


def test_rows_are_chosen_by_hand():
    # 7 opens row 0 and 5 row 1; 4 fits beside 5 only; 3 fills row 0, where the room is 3; 1 fills row 1.
    assert pack_rows(np.array([7, 5, 4, 3, 1], dtype=np.int32), 10).tolist() == [0, 1, 1, 0, 1]


def test_a_huge_capacity_needs_no_table_of_that_size(monkeypatch):
    def refuse():
        raise AssertionError("the table would have 2**31 entries")

    monkeypatch.setattr(_packing, "_compiled", refuse)
    rows = pack_rows(np.full(100_000, 2**30, dtype=np.int32), 2**31 - 1)
    assert (np.bincount(rows) == 1).all()


def test_rows_come_near_the_floor():
    lengths = log_normal(50_000, 2048)
    plan = bw.plan_batches(lengths, bw.MaxTokens(16_384), grouping=bw.Packed(2048))
    num_rows = len(plan.row_offsets) - 1
    assert -(-int(lengths.sum()) // 2048) <= num_rows <= 1.005 * lengths.sum() / 2048 + 1


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("world_size", [1, 3])
def test_rows_of_a_plan_are_never_over_capacity(shuffle, world_size):
    lengths = log_normal(3000, 256)
    plan = bw.plan_batches(lengths, bw.MaxTokens(2048), grouping=bw.Packed(256), shuffle=shuffle, world_size=world_size)
    rows = [row for batch in plan for row in batch]
    assert all(lengths[row].sum() <= 256 for row in rows)
    assert sorted(index for row in rows for index in row) == list(range(3000))
    assert max(len(batch) for batch in plan) == 8  # 2048 // 256 rows


def test_rows_of_the_next_epoch_hold_other_examples():
    plans = [
        bw.plan_batches(log_normal(20_000, 256), bw.MaxTokens(2048), grouping=bw.Packed(256), epoch=epoch)
        for epoch in (0, 1)
    ]
    first, second = ({frozenset(row) for batch in plan for row in batch if len(row) > 1} for plan in plans)
    assert len(first & second) < 0.05 * len(first)


def rows_of(lengths, capacity, epoch=0, **options):
    """The row of each example in a plan."""
    plan = bw.plan_batches(lengths, bw.MaxTokens(capacity), grouping=bw.Packed(capacity), epoch=epoch, **options)
    row_of = np.empty(len(lengths), dtype=np.int64)
    row_of[plan.indices] = np.repeat(np.arange(len(plan.row_offsets) - 1), np.diff(plan.row_offsets))
    return row_of


def pairs(counts):
    return int((counts * (counts - 1) // 2).sum())


def share_met_again(lengths, capacity):
    """The share of pairs in a row that are in one row in the next epoch too."""
    first, second = rows_of(lengths, capacity), rows_of(lengths, capacity, epoch=1)
    both = np.unique(first << 32 | second, return_counts=True)[1]
    return pairs(both) / pairs(np.bincount(first))


@pytest.mark.parametrize(
    ("num", "capacity", "most"), [(20_000, 4096, 0.1), (20_000, 8192, 0.1), (5000, 4096, 0.1), (1000, 4096, 0.1)]
)
def test_neighbours_of_few_examples_are_new_too(num, capacity, most):
    lengths = log_normal(num, 2048)
    assert share_met_again(lengths, capacity) < most


@pytest.mark.parametrize("capacity", [2048, 4096, 8192])
@pytest.mark.parametrize("num", [1000, 5000, 20_000])
def test_more_windows_leave_rows_as_full_within_a_hundredth(num, capacity):
    # Half a row is the hardest to fill, and there are no small examples.
    lengths = np.random.default_rng(0).integers(100, 2001, num).astype(np.int32)
    sampler = bw.BatchSampler(lengths, bw.MaxTokens(capacity), grouping=bw.Packed(capacity), balance_over=1)
    old = plan_epoch(sampler._lengths, sampler.budget, replace(sampler.settings, rules=1), 0)
    assert len(sampler) <= 1.01 * len(old) + 1


def test_without_shuffling_all_is_packed_as_before():
    lengths = log_normal(3000, 256)
    # 3,000 examples are worth 1,400 rows of 256: 11 windows in the order of the data.
    num_windows = round(lengths.sum() / 256 / 128)
    edges = np.searchsorted(np.arange(3000) * num_windows // 3000, np.arange(num_windows + 1))
    parts = [lengths[start:stop] for start, stop in pairwise(edges)]
    expected = pack_rows(np.concatenate([np.sort(part)[::-1] for part in parts]), 256)
    assert int(rows_of(lengths, 256, shuffle=False).max()) == int(expected.max())


def test_fewer_rows_than_windows_have_a_window_each():
    # 30 examples of 10 in rows of 100 are 3 rows; in 3 windows, drawn by chance, they are still 3 rows.
    plan = bw.plan_batches([10] * 30, bw.MaxItems(1), grouping=bw.Packed(100))
    assert len(plan) == 3


def old_state(sampler, epoch, position):
    return {**sampler.state_dict(), "version": 1, "epoch": epoch, "position": position}


def test_an_epoch_that_began_with_the_old_windows_ends_with_them():
    lengths = log_normal(2000, 256)
    sampler = bw.BatchSampler(lengths, bw.MaxTokens(4096), grouping=bw.Packed(1024), balance_over=1)
    settings = replace(sampler.settings, rules=1)
    old = plan_epoch(sampler._lengths, sampler.budget, settings, 2)
    sampler.load_state_dict(old_state(sampler, 2, int(old.offsets[3])))
    assert list(sampler) == list(old)[3:]
    assert list(sampler) == list(
        bw.plan_batches(lengths, bw.MaxTokens(4096), grouping=bw.Packed(1024), balance_over=1, epoch=3)
    )
    assert list(old) != list(
        bw.plan_batches(lengths, bw.MaxTokens(4096), grouping=bw.Packed(1024), balance_over=1, epoch=2)
    )


def test_a_pass_of_a_stream_that_began_with_the_old_windows_ends_with_them():
    lengths = log_normal(2000, 256).tolist()
    options = {"length_of": int, "budget": bw.MaxTokens(4096), "grouping": bw.Packed(1024), "buffer_size": 1000}
    stream, new = (bw.StreamBatcher(lengths, **options) for _ in range(2))
    settings = replace(stream.settings, rules=1)
    buffers = [np.array(lengths[:1000])[:, None], np.array(lengths[1000:])[:, None]]
    old = [
        [[int(buffer[index, 0]) for index in row] for row in batch]
        for number, buffer in enumerate(buffers)
        for batch in plan_epoch(buffer.astype(np.int32), stream.budget, settings, number)
    ]
    stream.load_state_dict({**stream.state_dict(), "version": 1, "num_given": 2})
    assert stream.state_dict()["version"] == 1
    assert list(stream) == old[2:]
    assert list(new) != old
    assert stream.state_dict()["version"] == 2
    assert list(stream) == list(new)


@pytest.mark.parametrize("version", [0, 3])
def test_a_stream_refuses_a_state_of_unknown_rules(version):
    stream = bw.StreamBatcher([1], length_of=int, budget=bw.MaxTokens(4))
    with pytest.raises(StateMismatchError, match=rf"version.*{version}"):
        stream.load_state_dict({**stream.state_dict(), "version": version})


def test_leftover_rows_keep_to_the_ladder():
    # 13 rows of one example: 8 fit a batch, the other 5 are 4 and 1.
    plan = bw.plan_batches([10] * 13, bw.MaxItems(8), grouping=bw.Packed(10), size_ladder="pow2")
    assert sorted(plan.shapes[:, 0].tolist()) == [1, 4, 8]
    dropped = bw.plan_batches([10] * 13, bw.MaxItems(8), grouping=bw.Packed(10), size_ladder="pow2", drop_last=True)
    assert dropped.num_dropped == 5


def test_the_multiple_must_divide_the_capacity():
    with pytest.raises(ArgumentError, match=r"Packed\(capacity=100\) is not a multiple of pad_multiple_of=8"):
        bw.plan_batches([5], bw.MaxTokens(200), grouping=bw.Packed(100), pad_multiple_of=8)


def test_a_row_over_the_budget_is_refused():
    with pytest.raises(BudgetError, match=r"a row of Packed\(capacity=100\) does not fit MaxTokens\(99\)"):
        bw.plan_batches([5], bw.MaxTokens(99), grouping=bw.Packed(100))
