"""Cutting a sequence into batches, against a loop that tries one example more at a time."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright as bw
from batchwright.plan.grouping._cutting import cut_falling, cut_rest
from batchwright.plan.grouping.base import SizeRounding

from ..strategies import cases


def greedy(lengths, budget, pad, rounding):
    """Where batches start if each takes examples as long as the budget holds, then rounds its size down."""
    padded = -(-np.asarray(lengths).reshape(len(lengths), -1) // pad) * pad
    starts, place = [], 0
    while place < len(padded):
        count, top = 1, padded[place]
        while place + count < len(padded):
            taller = np.maximum(top, padded[place + count])
            if budget.fraction(np.array([count + 1]), taller[None])[0] > 1:
                break
            count, top = count + 1, taller
        starts.append(place)
        place += rounding.round_one(count)
    return [*starts, len(padded)]


@settings(max_examples=200)
@given(cases(grouping=bw.InOrder(), keep_first=0))
def test_batches_in_order_take_what_the_budget_allows(case):
    options = case.options
    rounding = SizeRounding(options["size_multiple_of"], options["size_ladder"])
    expected = greedy(case.lengths, case.budget, options["pad_multiple_of"], rounding)
    assert case.plan().offsets.tolist() == expected


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("ladder", [None, "pow2"])
def test_small_and_large_batches_take_turns(axes, ladder):
    # Blocks of 1,500 examples as long as 90 or as short as 1: batches of 5 to 1,000, found in different ways.
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, np.repeat([3, 90, 2, 40], 1500)[:, None] + 1, (6000, axes))
    budget = bw.MaxTokens(axes * 500)
    plan = bw.plan_batches(lengths, budget, grouping=bw.InOrder(), size_ladder=ladder)
    assert plan.offsets.tolist() == greedy(lengths, budget, 1, SizeRounding(1, ladder))
    assert plan.shapes[:, 0].max() > 127


@pytest.mark.parametrize("axes", [1, 2, 3])
def test_padded_lengths_are_those_of_the_longest_on_each_axis(axes):
    lengths = np.random.default_rng(0).integers(1, 50, (500, axes))
    plan = bw.plan_batches(lengths, bw.MaxTokens(600), grouping=bw.InOrder(), pad_multiple_of=8)
    longest = [lengths[batch].max(axis=0) for batch in plan]
    assert plan.shapes[:, 1:].tolist() == (-(-np.array(longest) // 8) * 8).tolist()


def one_by_one(sizes, offsets):
    """Where batches of falling lengths start, and what is left of each window, one batch at a time."""
    starts, rests = [], []
    for place, stop in pairwise(offsets):
        while place < stop and place + sizes[place] <= stop:
            starts.append(place)
            place += sizes[place]
        rests.append(place)
    return starts, rests


def test_falling_lengths_are_cut_by_the_first_of_each_batch():
    # Sizes 2, 3 and 4 as lengths fall: the first two batches hold 2 and 3, then two are left where 4 would fit.
    starts, rests = cut_falling(np.array([2, 2, 3, 3, 4, 4, 4]), np.array([0, 7]))
    assert starts.tolist() == [0, 2]
    assert rests == [5]


@settings(max_examples=200)
@given(st.lists(st.lists(st.integers(1, 5), max_size=40), min_size=1, max_size=5), st.booleans())
def test_equal_sizes_are_cut_as_one_by_one(windows, rising):
    windows = [sorted(window) if rising else window for window in windows]
    sizes = np.array([size for window in windows for size in window], dtype=np.int64)
    offsets = np.cumsum([0, *map(len, windows)])
    starts, rests = cut_falling(sizes, offsets)
    assert (starts.tolist(), rests) == one_by_one(sizes.tolist(), offsets.tolist())


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("most", [1, 1.3, 4, 40, 90, 140, 400])
def test_batches_of_any_size_are_those_of_one_example_more_at_a_time(axes, most):
    # 9,000 examples are more than the two chunks in which small batches are counted.
    lengths = np.random.default_rng(1).integers(1, 21, (9000, axes))
    budget = bw.MaxTokens(int(axes * 20 * most))
    plan = bw.plan_batches(lengths, budget, grouping=bw.InOrder())
    assert plan.offsets.tolist() == greedy(lengths, budget, 1, SizeRounding())


@given(st.integers(0, 300), st.integers(1, 64), st.sampled_from([(1, None), (8, None), (1, "pow2"), (2, "pow2x3")]))
def test_a_rest_is_split_into_allowed_sizes(num_items, limit, rounding):
    rounding = SizeRounding(*rounding)
    sizes = cut_rest(num_items, limit, rounding)
    assert sum(sizes) == num_items
    assert all(rounding.round_one(size) == size <= limit for size in sizes)
    assert sizes == sorted(sizes, reverse=True)


def test_a_multiple_above_every_size_changes_nothing():
    plans = [bw.plan_batches([3] * 20, bw.MaxItems(7), size_multiple_of=multiple) for multiple in (1, 10**400)]
    assert list(plans[0]) == list(plans[1])


@pytest.mark.parametrize("axes", [1, 2, 3])
@pytest.mark.parametrize("num_examples", [3, 7, 13, 77])
def test_what_is_left_at_the_end_keeps_to_the_ladder(num_examples, axes):
    lengths = np.ones((num_examples, axes), dtype=int)
    plan = bw.plan_batches(lengths, bw.MaxItems(64), grouping=bw.InOrder(), size_ladder="pow2")
    # The binary digits of the number: 77 = 64 + 8 + 4 + 1.
    assert plan.shapes[:, 0].tolist() == [1 << bit for bit in range(6, -1, -1) if num_examples >> bit & 1]


def dropped(num_examples, axes, **options):
    lengths = np.ones((num_examples, axes), dtype=int)
    return bw.plan_batches(lengths, bw.MaxItems(8), drop_last=True, **options).num_dropped


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize("grouping", [bw.InOrder(), bw.Sorted(), bw.WindowSort(1), bw.Buckets(1)])
def test_batches_are_dropped_only_if_the_end_of_the_data_cut_them_short(grouping, axes):
    assert dropped(16, axes, grouping=grouping) == 0
    assert dropped(21, axes, grouping=grouping) == 5
    # By powers of two the last 5 are 4 and 1, and both end because the data end.
    assert dropped(21, axes, grouping=grouping, size_ladder="pow2") == 5


def test_a_batch_that_the_budget_ended_is_not_dropped():
    # 9 does not fit beside 2 and 2, so the first batch ends there; 9 and 9 would be 18 of 18, so the last is full.
    plan = bw.plan_batches([2, 2, 9, 9], bw.MaxTokens(18), grouping=bw.InOrder(), drop_last=True)
    assert list(plan) == [[0, 1], [2, 3]]
