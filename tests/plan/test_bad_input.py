"""What a user may get wrong: refused before any work, in words that help."""

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

import batchwright as bw
from batchwright.errors import ArgumentError, BudgetError, LengthsError

BUDGET = bw.MaxTokens(100)


class Untouched(bw.Budget):
    """A budget that must not be asked: options are checked first."""

    def fraction(self, num_items, lengths):
        raise AssertionError("the budget was asked before the options were checked")

    max_items = None


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "lengths is empty; there is nothing to batch"),
        (np.empty((0, 2), dtype=int), "lengths is empty"),
        ([3, 0, 2], "lengths must be 1 or more, got 0 at example 1; drop empty examples or count their padding"),
        ([[3, 1], [2, -4]], r"got \[2, -4\] at example 1"),
        ([-1], "lengths must be 1 or more, got -1 at example 0"),
        ([1.5], "lengths must be integers, got float64; count tokens"),
        ([1.0, float("nan")], "lengths must be integers, got float64"),
        ([True, False], "lengths must be integers, got bool"),
        (["one", "two"], "lengths must be integers, got texts; measure_lengths"),
        ([1, None], "lengths must be integers, got object"),
        ([[1, 2], [3]], "with as many lengths for every example; of lists of token ids pass the lengths"),
        ([[[1]]], r"shape \(N,\) or \(N, axes\), got \(1, 1, 1\)"),
        (np.empty((3, 0), dtype=int), r"got \(3, 0\)"),
        ("some text", r"got \(\); give one row of lengths per example"),
        (7, r"got \(\)"),
        (None, r"got \(\)"),
        (iter([1, 2]), r"got \(\)"),
        ([5, 2**31], "lengths must be at most 2147483647, got 2147483648; use a coarser unit"),
        (np.array([2**63], dtype=np.uint64), "lengths must be at most 2147483647"),
        (torch.tensor([1.0], requires_grad=True), "lengths must be integers, got torch.float32; count tokens"),
        (torch.tensor([1.0], dtype=torch.bfloat16), "lengths must be integers, got torch.bfloat16; count tokens"),
        (torch.empty(2, device="meta", dtype=torch.int64), "lengths must form an array .* meta tensor"),
        (
            np.array([3, 5], dtype="timedelta64[s]"),
            r"got timedelta64\[s\]; choose a unit, e.g. lengths // np",
        ),
        (pd.Series(pd.to_timedelta([3], "s")), r"got timedelta64\[\ws\]; choose a unit"),
        (np.array(["2026-01-01"], dtype="datetime64[D]"), r"got datetime64\[D\]"),
        (
            np.ma.array([3, 5, 7, 9], mask=[0, 1, 0, 1]),
            "lengths is masked in 2 of 4 examples, first in example 1",
        ),
        (np.ma.array([[3, 5], [7, 9]], mask=[[0, 0], [0, 1]]), "masked in 1 of 2 examples, first in example 1"),
        ([np.ma.array([3, 5]), np.ma.array([7, 9], mask=[1, 0])], "masked in 1 of 2 examples, first in example 1"),
        (np.array([3 + 0j]), "lengths must be integers, got complex128"),
        (np.array([3, "x", None], dtype=object), "got object with 1 missing, first at example 2"),
        (np.array([3, 4.5], dtype=object), "got object with 4.5 at place 1"),
        (np.array([2**70], dtype=object), "lengths must fit in 64 bits, got 1180591620717411303424"),
        (np.array([3, 0], dtype=object), "lengths must be 1 or more, got 0 at example 1"),
        (
            np.array([(1, 2)], dtype=[("a", int), ("b", int)]),
            r"np.stack\(\[array\['a'\], array\['b'\]\], axis=1\)",
        ),
        (["12", " 7"], r"got texts; convert them, e\.g\. np\.asarray\(lengths\)\.astype\(int\)"),
        ([3.0, 4.0], r"got float64; convert them, e\.g\. np\.asarray\(lengths\)\.astype\(int\)"),
        (pd.Series(["a b", "c"], dtype=object), r"with 'a b' at place 0; measure_lengths\(texts, tokenizer\) counts"),
        ([{"input_ids": [1, 2]}], r"count tokens, e\.g\. \[len\(row\['input_ids'\]\) for row in data\]"),
        ([torch.ones(2), torch.ones(1)], r"of lists of token ids pass the lengths, \[len\(x\) for x in data\]"),
        (torch.ones(5, 128).long(), "128 numbers per example, over the 16 axes .* if these are token ids"),
        (7, "in a list or an array, not one number"),
        (np.array(["abc"]), r"got texts; measure_lengths\(texts, tokenizer\) counts the tokens of texts"),
        (pd.Series([3, None, 5], dtype="Int64"), "with 1 missing, first at example 1; fill them in or leave"),
        (pd.DataFrame({"a": [3.0, None], "b": [1.0, 2.0]}), "got float64 with 1 missing, first at example 1"),
        (pa.array([3, None]), "got float64 with 1 missing, first at example 1"),
        ({"a": [1, 2]}, r"got \(\); give one row of lengths per example, in a list or an array, not in a dict"),
        ({1, 2}, "in a list or an array, not in a set"),
    ],
)
def test_lengths_that_cannot_be_planned_are_refused(lengths, message):
    with pytest.raises(LengthsError, match=message):
        bw.plan_batches(lengths, BUDGET)


@pytest.mark.parametrize(
    "limit", [0, -5, float("nan"), float("inf"), pytest.param(10**400, id="huge"), True, "9", None]
)
@pytest.mark.parametrize("make", [bw.MaxItems, bw.MaxTokens, lambda limit: bw.MaxCost(np.multiply, limit)])
def test_a_limit_must_be_a_finite_number_above_zero(make, limit):
    with pytest.raises(BudgetError, match=rf"needs a (whole number|finite limit above 0), got {limit!r}"):
        make(limit)


def test_a_count_must_be_whole():
    with pytest.raises(BudgetError, match=r"MaxItems needs a whole number, got 8.0"):
        bw.MaxItems(8.0)


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        (64, r"got 64; write MaxItems\(64\) or MaxTokens\(64\)"),
        (64.5, r"budget must be a Budget such as MaxTokens\(8192\), got 64.5$"),
        (True, "got True$"),
        (None, "got None$"),
        (bw.MaxTokens, "got <class"),
        ("64", "got '64'"),
    ],
)
def test_a_budget_must_be_a_budget(budget, message):
    with pytest.raises(ArgumentError, match=message):
        bw.plan_batches([1, 2], budget)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grouping": bw.Sorted}, r"grouping must be an object, got the class; write Sorted\(\)"),
        ({"grouping": "sorted"}, r"grouping must be one of InOrder\(\), .* got 'sorted'"),
        ({"grouping": None}, "grouping must be one of"),
        ({"seed": -1}, "seed must be a whole number of 0 or more, got -1"),
        ({"seed": 1.0}, "seed must be a whole number of 0 or more, got 1.0"),
        ({"epoch": -1}, "epoch must be a whole number of 0 or more, got -1"),
        ({"world_size": 0}, "world_size must be a whole number of 1 or more, got 0"),
        ({"world_size": "2"}, "world_size must be a whole number of 1 or more, got '2'"),
        ({"keep_first": -1}, "keep_first must be a whole number of 0 or more, got -1"),
        ({"balance_over": 0}, "balance_over must be a whole number of 1 or more, got 0"),
        ({"pad_multiple_of": 0}, "pad_multiple_of must be a whole number of 1 or more, got 0"),
        ({"size_multiple_of": 2.5}, "size_multiple_of must be a whole number of 1 or more, got 2.5"),
        ({"size_ladder": "pow3"}, "size_ladder must be one of None, 'pow2', 'pow2x3', got 'pow3'"),
        ({"size_ladder": "pow2", "size_multiple_of": 6}, "no size on the ladder 'pow2' is a multiple of 6"),
        ({"oversize": "skip"}, "oversize must be one of 'error', 'alone', 'drop', 'truncate', got 'skip'"),
        ({"remainder": "pad"}, "remainder must be one of 'spread', 'drop', got 'pad'"),
        ({"shuffle": 1}, "shuffle must be True or False, got 1"),
        ({"drop_last": None}, "drop_last must be True or False, got None"),
        ({"cost": 5}, r"cost must be None or a function of \(num_items, padded_lengths\), got 5"),
    ],
)
def test_options_are_checked_before_any_work(options, message):
    with pytest.raises(ArgumentError, match=message):
        bw.plan_batches([1, 2], Untouched(), **options)


def test_an_unknown_option_is_a_type_error():
    with pytest.raises(TypeError, match="batch_size"):
        bw.plan_batches([1, 2], BUDGET, batch_size=4)


def test_options_are_keyword_only():
    with pytest.raises(TypeError, match="positional"):
        bw.plan_batches([1, 2], BUDGET, bw.Sorted())


@pytest.mark.parametrize(
    ("lengths", "grouping", "message"),
    [
        (
            [[1, 2, 3]],
            bw.Buckets((2, 3)),
            r"Buckets\(count=\(2, 3\)\) bounds two axes, got lengths with 3; give one number",
        ),
        ([[1, 2]], bw.Packed(2), "Packed rows have one length, got lengths with 2 axes; pack their sum"),
        ([[5, 6]], bw.Packed(2), "Packed rows have one length"),  # not: over the capacity
    ],
)
def test_more_axes_than_a_grouping_knows_are_refused_before_any_work(lengths, grouping, message):
    with pytest.raises(ArgumentError, match=message):
        bw.plan_batches(lengths, Untouched(), grouping=grouping)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bw.WindowSort(0), "WindowSort: batches_per_window must be a whole number of 1 or more, got 0"),
        (lambda: bw.Buckets(2.5), "Buckets: count must be a whole number of 1 or more, got 2.5"),
        (lambda: bw.Buckets((4, 0)), "Buckets: count must be a whole number of 1 or more, got 0"),
        (lambda: bw.Buckets((4,)), r"Buckets: count must be one number, or a pair with one per axis, got \(4,\)"),
        (lambda: bw.Packed(True), "Packed: capacity must be a whole number of 1 or more, got True"),
        (lambda: bw.Packed(2**31), "Packed: capacity must be at most 2147483647, got 2147483648"),
    ],
)
def test_a_grouping_checks_its_settings(make, message):
    with pytest.raises(ArgumentError, match=message):
        make()


@pytest.mark.parametrize(
    ("rank", "world_size", "message"),
    [
        (2, 2, "rank must be below world_size, got rank 2 of 2; ranks count from 0"),
        (-1, 2, "rank must be a whole number of 0 or more, got -1"),
        (0, 0, "world_size must be a whole number of 1 or more, got 0"),
        (0.0, 1, "rank must be a whole number"),
    ],
)
def test_ranks_lie_within_the_world(rank, world_size, message):
    with pytest.raises(ArgumentError, match=message):
        bw.BatchSampler([1, 2], BUDGET, rank=rank, world_size=world_size)


@pytest.mark.parametrize("pad", [8, 2**40])
def test_lengths_that_padding_takes_beyond_32_bits_are_refused(pad):
    with pytest.raises(LengthsError, match=f"length 2147483647 padded to a multiple of {pad} is over 2147483647"):
        bw.plan_batches([2**31 - 1], bw.MaxTokens(2**60), pad_multiple_of=pad)


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        (lambda num_items, padded: num_items * np.nan, "cost is NaN"),
        (lambda num_items, padded: 1.0, "cost must return one number per shape"),
    ],
)
def test_a_cost_for_balancing_must_return_one_number_a_batch(cost, message):
    with pytest.raises(BudgetError, match=message):
        bw.plan_batches([1, 2, 3], BUDGET, cost=cost)


@pytest.mark.parametrize("world_size", [2**20 + 1, 10**9, 10**400], ids=["one more", "a billion", "beyond floats"])
def test_more_ranks_than_any_cluster_has_are_refused(world_size):
    with pytest.raises(ArgumentError, match=r"world_size must be at most 1,048,576 ranks, got \d+"):
        bw.plan_batches([3, 5], bw.MaxItems(1), world_size=world_size)
    with pytest.raises(ArgumentError, match=r"world_size must be at most 1,048,576 ranks, got \d+"):
        bw.BatchSampler([3, 5], bw.MaxItems(1), world_size=world_size)
    with pytest.raises(ArgumentError, match=r"world_size must be at most 1,048,576 ranks, got \d+"):
        bw.plan_batches([3, 5], bw.MaxItems(1)).report(world_size=world_size)
