"""The plan as an object, its options, and its values frozen for ever."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright as bw
from batchwright._lengths import as_lengths
from batchwright.plan.plan import PlanSettings, plan_epoch

from .strategies import cases

GROUPINGS = [bw.InOrder(), bw.Sorted(), bw.WindowSort(1), bw.Buckets(3), bw.Packed(12)]
LENGTHS = [7, 3, 9, 1, 4, 12, 6, 3, 8, 2, 5, 10]


class Series:
    """What a column of a data frame offers."""

    def __init__(self, values):
        self._values = values

    def __array__(self, dtype=None, copy=None):
        return np.array(self._values, dtype=dtype)


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize(
    "convert",
    [
        tuple,
        torch.tensor,
        Series,
        lambda values: np.array(values, dtype=np.uint8),
        lambda values: np.array(values, dtype=np.uint16),
        lambda values: np.array(values, dtype=np.int64),
        lambda values: np.array(values, dtype=np.int32)[:, None],
        lambda values: np.repeat(values, 2)[::2],
        lambda values: torch.tensor(values, dtype=torch.uint8),
    ],
)
def test_lengths_of_any_kind_give_the_same_plan(grouping, convert):
    expected = bw.plan_batches(LENGTHS, bw.MaxTokens(24), grouping=grouping)
    plan = bw.plan_batches(convert(LENGTHS), bw.MaxTokens(24), grouping=grouping)
    assert list(plan) == list(expected)
    assert plan.shapes.tolist() == expected.shapes.tolist()


def test_numbers_of_numpy_give_the_same_plan():
    options = {"seed": 3, "epoch": 1, "world_size": 2, "keep_first": 1, "pad_multiple_of": 2, "size_multiple_of": 2}
    expected = bw.plan_batches(LENGTHS, bw.MaxTokens(24), **options)
    plan = bw.plan_batches(LENGTHS, bw.MaxTokens(24), **{name: np.int64(value) for name, value in options.items()})
    assert list(plan) == list(expected)
    assert plan.settings == expected.settings
    assert repr(plan.settings) == repr(expected.settings)  # a saved state holds plain numbers


def test_a_plan_is_a_sequence_of_batches():
    plan = bw.plan_batches([3, 5, 2, 9], bw.MaxTokens(10), grouping=bw.InOrder())
    assert len(plan) == 3
    assert [plan[0], plan[-1], plan[np.int64(1)]] == [[0, 1], [3], [2]]
    assert list(plan) == [[0, 1], [2], [3]]
    with pytest.raises(IndexError, match="there is no batch 3: the plan has 3 batches"):
        plan[3]


@pytest.mark.parametrize("grouping", GROUPINGS)
@given(st.builds(slice, *[st.none() | st.integers(-9, 9)] * 2, st.none() | st.integers(-4, 4).filter(bool)))
def test_a_slice_gives_the_batches_that_a_list_would(grouping, part):
    plan = bw.plan_batches(LENGTHS, bw.MaxTokens(24), grouping=grouping)
    assert plan[part] == list(plan)[part]


def test_a_slice_takes_numbers_of_numpy_and_no_step_of_zero():
    plan = bw.plan_batches(LENGTHS, bw.MaxItems(2), grouping=bw.InOrder())
    assert plan[np.int64(1) : np.uint8(3)] == [[2, 3], [4, 5]]
    with pytest.raises(ValueError, match="step"):
        plan[::0]


@pytest.mark.parametrize("index", ["1", 1.0, None, (0, 1), [0], np.array([0, 1])], ids=repr)
def test_anything_else_is_no_number_of_a_batch(index):
    plan = bw.plan_batches(LENGTHS, bw.MaxItems(2))
    with pytest.raises(TypeError, match="takes the number of a batch or a slice, got"):
        plan[index]


def test_a_packed_plan_is_a_sequence_of_lists_of_rows():
    plan = bw.plan_batches([5, 5, 4, 6], bw.MaxItems(2), grouping=bw.Packed(10), shuffle=False)
    # 6 takes 4 in the end, and the two fives share a row.
    assert list(plan) == [[[2, 3], [0, 1]]]
    assert plan.row_offsets.tolist() == [0, 2, 4]
    assert plan.shapes.tolist() == [[2, 10]]


def test_the_arrays_are_as_small_as_promised():
    plan = bw.plan_batches(LENGTHS, bw.MaxTokens(24))
    assert (plan.indices.dtype, plan.shapes.dtype, plan.offsets.dtype) == (np.int32, np.int32, np.int64)
    assert plan.offsets[0] == 0
    assert plan.offsets[-1] == len(plan.indices)


def test_the_repr_says_what_was_planned():
    plan = bw.plan_batches([3, 5], bw.MaxTokens(10), grouping=bw.Sorted())
    assert repr(plan) == "Plan(1 batches of 2 examples, Sorted(), MaxTokens(10))"


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_drop_last_leaves_out_the_incomplete_batch_and_nothing_else(grouping):
    lengths = [12] * 10  # every grouping makes two batches of four and one of two
    plan = bw.plan_batches(lengths, bw.MaxItems(4), grouping=grouping, drop_last=True)
    assert plan.shapes[:, 0].tolist() == [4, 4]
    assert plan.num_dropped == plan.report().dropped == 2
    assert len(set(plan.indices.tolist())) == 8


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_remainder_drop_leaves_out_what_fills_no_step_and_nothing_else(grouping):
    options = {"grouping": grouping, "balance_over": 1}
    whole = bw.plan_batches([12] * 20, bw.MaxItems(2), **options)
    plan = bw.plan_batches([12] * 20, bw.MaxItems(2), world_size=4, remainder="drop", **options)
    # Ten batches, so two steps of four; two batches of two examples are left out.
    assert list(plan) == list(whole)[:8]
    assert (plan.num_dropped, plan.num_repeated) == (4, 0)


@settings(max_examples=100)
@given(cases(), st.integers(1, 5), st.sampled_from(["spread", "drop"]))
def test_what_is_dropped_is_counted(case, world_size, remainder):
    plan = case.plan(drop_last=True, world_size=world_size, remainder=remainder)
    given_out = plan.indices.tolist()
    assert len(set(given_out)) + plan.num_dropped == len(case.lengths)
    assert len(given_out) - len(set(given_out)) == plan.num_repeated
    assert len(plan) % world_size == 0


@settings(max_examples=100)
@given(cases().filter(lambda case: not isinstance(case.options["grouping"], bw.Buckets)))
def test_drop_last_only_leaves_out_batches(case):
    whole, kept = ({str(batch) for batch in case.plan(drop_last=drop)} for drop in (False, True))
    assert kept <= whole


def test_a_cost_for_balancing_is_asked_once_for_all_batches():
    calls = []

    def cost(num_items, padded):
        calls.append((num_items.dtype, padded.dtype, len(num_items)))
        return padded[:, 0] ** 2

    plan = bw.plan_batches(LENGTHS, bw.MaxItems(3), cost=cost)
    assert calls == [(np.int64, np.int64, len(plan))]


# A resumed epoch is planned again, perhaps on another machine and with another NumPy: these values never change. If
# they must, the rules of the grouping have to change with them, and the earlier ones stay. These are plans of rules 1
# with balance_over=64.
FROZEN = [
    (bw.InOrder(), 0, [[0, 1], [2, 3], [4, 5], [6, 7, 8], [9, 10], [11]]),
    (bw.InOrder(), 1, [[0, 1], [2, 3], [4, 5], [6, 7, 8], [9, 10], [11]]),
    (bw.Sorted(), 0, [[4, 1, 7, 9, 3], [0, 6, 10], [5, 11], [2, 8]]),
    (bw.Sorted(), 1, [[5, 11], [4, 1, 7, 9, 3], [2, 8], [0, 6, 10]]),
    (bw.WindowSort(batches_per_window=1), 0, [[8, 4, 7], [5, 11], [0, 6, 10], [2, 9], [1, 3]]),
    (bw.WindowSort(batches_per_window=1), 1, [[3], [2, 8], [6, 4, 7, 1], [0, 10, 9], [5, 11]]),
    (bw.Packed(capacity=12), 0, [[[4, 8], [3, 6, 7]], [[9, 11], [0, 10]], [[5], [1, 2]]]),
    (bw.Packed(capacity=12), 1, [[[2, 7], [0, 10]], [[4, 8], [5]], [[1, 3, 6], [9, 11]]]),
]
FROZEN_PAIRS = [
    (bw.Sorted(), 0, [[11, 5], [1, 7, 4, 10], [6, 0], [2, 8], [9, 3]]),
    (bw.WindowSort(batches_per_window=1), 0, [[10, 5], [11], [7, 9], [3, 6], [8, 2, 4], [0, 1]]),
    (bw.WindowSort(batches_per_window=1), 1, [[3, 7], [1, 0], [11, 5], [6, 9], [2, 8, 10, 4]]),
]


# The same under the rules of today, on one rank and on two.
FROZEN_TODAY = [
    (bw.Sorted(), 0, 1, [[4, 1, 7, 9, 3], [2, 8], [0, 6, 10], [5, 11]]),
    (bw.Sorted(), 0, 2, [[5, 11], [0, 6, 10], [4, 1, 7, 9, 3], [2, 8]]),
    (bw.Sorted(), 1, 1, [[4, 1, 7, 9, 3], [2, 8], [0, 6, 10], [5, 11]]),
    (bw.Sorted(), 1, 2, [[5, 11], [0, 6, 10], [4, 1, 7, 9, 3], [2, 8]]),
    (bw.WindowSort(batches_per_window=1), 0, 1, [[1, 3], [8, 4, 7], [5, 11], [0, 6, 10], [2, 9]]),
    (bw.WindowSort(batches_per_window=1), 0, 2, [[5, 11], [8, 4, 7], [1, 3], [2, 9], [0, 6], [10]]),
    (bw.WindowSort(batches_per_window=1), 1, 1, [[0, 10, 9], [2, 8], [3], [6, 4, 7, 1], [5, 11]]),
    (bw.WindowSort(batches_per_window=1), 1, 2, [[3], [2, 8], [0, 10, 9], [6, 4, 7, 1], [5], [11]]),
    (bw.Buckets(count=3), 0, 1, [[5, 8], [2, 11], [0, 6, 3], [4, 7], [1, 10, 9]]),
    (bw.Buckets(count=3), 0, 2, [[5, 8], [2, 11], [1, 10, 9], [0, 6, 3], [4], [7]]),
    (bw.Buckets(count=3), 1, 1, [[11, 2], [10, 4, 0], [8, 5], [7, 1], [6, 3, 9]]),
    (bw.Buckets(count=3), 1, 2, [[6, 3, 9], [10, 4, 0], [7, 1], [8, 5], [11], [2]]),
    (bw.Packed(capacity=12), 0, 1, [[[11]], [[0, 4], [5]], [[6, 10], [2, 3, 9]], [[7, 8], [1]]]),
    (bw.Packed(capacity=12), 0, 2, [[[0, 4], [5]], [[6, 10], [2, 3, 9]], [[7, 8], [1]], [[11]]]),
    (bw.Packed(capacity=12), 1, 1, [[[2, 7], [4, 8]], [[1, 3, 6], [5]], [[0, 10], [9, 11]]]),
    (bw.Packed(capacity=12), 1, 2, [[[0, 10], [9, 11]], [[2, 7], [4, 8]], [[1, 3, 6]], [[5]]]),
]
FROZEN_PAIRS_TODAY = [
    (bw.Sorted(), 0, 1, [[2, 8], [1, 7, 4, 10], [9, 3], [11, 5], [6, 0]]),
    (bw.Sorted(), 0, 2, [[1, 7, 4, 10], [11, 5], [9, 3], [2, 8], [6], [0]]),
    (bw.WindowSort(batches_per_window=1), 0, 1, [[10, 5], [0, 1], [11], [8, 2, 4], [3, 6], [7, 9]]),
    (bw.WindowSort(batches_per_window=1), 0, 2, [[7, 9], [11], [0, 1], [8, 2, 4], [10, 5], [3, 6]]),
    (bw.WindowSort(batches_per_window=1), 1, 1, [[2, 8, 10, 4], [6, 9], [1, 0], [3, 7], [11, 5]]),
    (bw.WindowSort(batches_per_window=1), 1, 2, [[3, 7], [1, 0], [6, 9], [11, 5], [2, 8], [10, 4]]),
    (bw.Buckets(count=3), 0, 1, [[5, 8], [6, 11], [3, 4, 7], [2, 0], [1, 10, 9]]),
    (bw.Buckets(count=3), 0, 2, [[5, 8], [6, 11], [1, 10, 9], [3, 4, 7], [2], [0]]),
    (bw.Buckets(count=3), 1, 1, [[2, 8], [4, 7, 1], [0, 5], [6, 11], [3, 9, 10]]),
    (bw.Buckets(count=3), 1, 2, [[3, 9, 10], [4, 7, 1], [6, 11], [0, 5], [2], [8]]),
]
PAIRS = list(zip(LENGTHS, reversed(LENGTHS), strict=True))


@pytest.mark.parametrize(("grouping", "epoch", "expected"), FROZEN)
def test_a_plan_of_the_earlier_rules_is_what_it_was(grouping, epoch, expected):
    assert list(earlier_plan(LENGTHS, bw.MaxTokens(24), grouping, epoch)) == expected


@pytest.mark.parametrize(("grouping", "epoch", "expected"), FROZEN_PAIRS)
def test_a_plan_of_pairs_of_the_earlier_rules_is_what_it_was(grouping, epoch, expected):
    assert list(earlier_plan(PAIRS, bw.MaxTokens(48), grouping, epoch)) == expected


def earlier_plan(lengths, budget, grouping, epoch):
    settings = PlanSettings(grouping=grouping, seed=7, balance_over=64, rules=1)
    return plan_epoch(as_lengths(lengths), budget, settings, epoch)


@pytest.mark.parametrize(("grouping", "epoch", "world_size", "expected"), FROZEN_TODAY)
def test_a_plan_is_the_same_on_every_machine(grouping, epoch, world_size, expected):
    options = {"grouping": grouping, "epoch": epoch, "world_size": world_size}
    assert list(bw.plan_batches(LENGTHS, bw.MaxTokens(24), seed=7, **options)) == expected


@pytest.mark.parametrize(("grouping", "epoch", "world_size", "expected"), FROZEN_PAIRS_TODAY)
def test_a_plan_of_pairs_is_the_same_on_every_machine(grouping, epoch, world_size, expected):
    options = {"grouping": grouping, "epoch": epoch, "world_size": world_size}
    assert list(bw.plan_batches(PAIRS, bw.MaxTokens(48), seed=7, **options)) == expected
