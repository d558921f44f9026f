"""Best-fit decreasing: rows that hold, the same by both ways, as few as the textbook's."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright as bw
from batchwright._optional import is_installed
from batchwright.errors import ArgumentError, BudgetError
from batchwright.plan.grouping import packed as _packing
from batchwright.plan.grouping.packed import pack_rows

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
