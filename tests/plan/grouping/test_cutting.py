"""Cutting a sequence into batches, against a loop that tries one example more at a time."""

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


def test_falling_lengths_are_cut_by_the_first_of_each_batch():
    starts = []
    # Sizes 2 at length 5, 3 at length 4, 4 at length 1: the batches are 5 5 | 4 4 1, then 1 1 is not full.
    rest = cut_falling(np.array([5, 5, 4, 4, 1, 1, 1], dtype=np.int32), 0, 7, {5: 2, 4: 3, 1: 4}, starts)
    assert starts == [0, 2]
    assert rest == 5


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
