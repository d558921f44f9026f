"""Sizes the hardware likes and bounds of least padding, both against brute force."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.plan.grouping._boxes import least_padding_bounds
from batchwright.plan.grouping.base import SizeRounding

from ..strategies import cases

POWERS = {2**k for k in range(20)}
LADDERS = {None: set(range(1, 5001)), "pow2": POWERS, "pow2x3": POWERS | {3 * power for power in POWERS}}


def largest_allowed(num_items, multiple_of, ladder):
    """The definition, read literally."""
    rungs = [size for size in LADDERS[ladder] if size <= num_items]
    multiples = [size for size in rungs if size % multiple_of == 0]
    return max(multiples or rungs)


@settings(max_examples=300)
@given(
    st.one_of(st.integers(1, 70), st.integers(1, 5000)),
    st.sampled_from([1, 2, 3, 6, 8, 24, 64]),
    st.sampled_from(list(LADDERS)),
)
def test_rounding_gives_the_largest_allowed_size(num_items, multiple_of, ladder):
    if ladder == "pow2" and multiple_of % 3 == 0:
        multiple_of = 4  # no power of two is a multiple of 3; that is refused, see below
    rounding = SizeRounding(multiple_of, ladder)
    expected = largest_allowed(num_items, multiple_of, ladder)
    assert 1 <= expected <= num_items
    assert rounding.round_one(num_items) == expected
    assert rounding.round(np.array([num_items, 0])).tolist() == [expected, 0]


def test_a_ladder_without_any_multiple_is_refused():
    with pytest.raises(ArgumentError, match="no size on the ladder 'pow2' is a multiple of 24"):
        SizeRounding(24, "pow2")


@settings(max_examples=150)
@given(cases(), st.sampled_from([1, 2, 8]), st.sampled_from(list(LADDERS)))
def test_plans_hold_allowed_sizes_only_and_lose_nothing(case, multiple_of, ladder):
    plan = case.plan(size_multiple_of=multiple_of, size_ladder=ladder)
    num_items, padded = plan.shapes[:, 0], plan.shapes[:, 1:]
    # A leftover below the multiple stays as it is: largest_allowed(5, 8, None) is 5.
    assert [largest_allowed(size, multiple_of, ladder) for size in num_items.tolist()] == num_items.tolist()
    assert (case.budget.fraction(num_items, padded) <= 1 + 1e-12).all()
    assert sorted(plan.indices.tolist()) == list(range(len(case.lengths)))


def padded_tokens(values, counts, bounds):
    return int((np.array(bounds)[np.searchsorted(bounds, values)] * counts).sum())


@given(
    st.dictionaries(st.integers(1, 60), st.integers(1, 30), min_size=1, max_size=8),
    st.integers(1, 9),
)
def test_bounds_are_as_good_as_the_best_of_all_subsets(histogram, num_bounds):
    values = np.array(sorted(histogram))
    counts = np.array([histogram[value] for value in values])
    bounds = least_padding_bounds(values, counts, num_bounds).tolist()
    assert bounds == sorted(set(bounds))
    assert bounds[-1] == values[-1]
    assert set(bounds) <= set(values.tolist())
    assert len(bounds) <= num_bounds
    subsets = [
        [*inner, int(values[-1])]
        for size in range(min(num_bounds, len(values)))
        for inner in combinations(values[:-1].tolist(), size)
    ]
    best = min(padded_tokens(values, counts, subset) for subset in subsets)
    assert padded_tokens(values, counts, bounds) == best


def exact_optimum(values, counts, num_bounds):
    """The plain dynamic programme over every length: cost[i] of the lengths up to i, bucket after bucket."""
    values = values.astype(float)
    totals = np.cumsum(counts).astype(float)
    cost = values * totals
    for _ in range(num_bounds - 1):
        before = cost
        cost = before.copy()
        for i in range(1, len(values)):
            cost[i] = min(before[i], (before[:i] + values[i] * (totals[i] - totals[:i])).min())
    return cost[-1]


def many_lengths(kind):
    rng = np.random.default_rng(0)
    if kind == "lognormal":
        return np.clip(rng.lognormal(5.5, 1.2, 9_000), 1, 4000).astype(int)
    if kind == "clusters":
        return np.concatenate([start + rng.integers(0, 300, 2_000) for start in (1, 1000, 5000, 20_000)])
    # Short examples hold fewer tokens than a 512th, yet padding them to the next length would double the batch.
    return np.concatenate([np.ones(90_000, dtype=int), rng.integers(500, 1500, 50_000)])


@pytest.mark.parametrize("kind", ["lognormal", "clusters", "a few very short ones"])
@pytest.mark.parametrize("num_bounds", [3, 16])
def test_with_many_lengths_bounds_are_within_one_per_cent_of_the_optimum(kind, num_bounds):
    values, counts = np.unique(many_lengths(kind), return_counts=True)
    assert len(values) > 512
    bounds = least_padding_bounds(values, counts, num_bounds)
    assert bounds[-1] == values[-1]
    assert len(bounds) <= num_bounds
    assert padded_tokens(values, counts, bounds) <= 1.01 * exact_optimum(values, counts, num_bounds)


def test_more_bounds_than_candidates_are_cut_down_not_refused():
    values = np.arange(1, 3001)
    bounds = least_padding_bounds(values, np.ones_like(values), 1000)
    assert bounds[-1] == 3000
    assert 400 <= len(bounds) <= 1000


@given(cases(grouping=bw.Buckets(3), pad_multiple_of=4, oversize="alone"))
def test_bucket_bounds_are_multiples_and_the_last_is_the_longest(case):
    lengths = np.asarray(case.lengths).reshape(len(case.lengths), -1)[:, 0]
    plan = bw.plan_batches(lengths, case.budget, **case.options)
    assert (plan.shapes[:, 1] % 4 == 0).all()
    assert plan.shapes[:, 1].max() == -(-lengths.max() // 4) * 4
