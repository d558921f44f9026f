"""Sorting by packed keys: the same as a lexical sort, by either of the two ways, with ties in random order."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchwright as bw
from batchwright._random import Purpose, bit_stream
from batchwright.plan.grouping import _sort_keys as _keys
from batchwright.plan.grouping._sort_keys import sort_examples

GROUPINGS = [bw.InOrder(), bw.Sorted(), bw.WindowSort(1), bw.Buckets(3)]
ALWAYS_WIDE = 65  # random bits wanted of a key that has 64 in all


def sort(groups, values, *, num_groups, max_value, stream=None):
    group, value = (np.array(part, dtype=np.uint64) for part in (groups, values))
    return sort_examples(
        len(groups),
        lambda start, stop, chance: (group[start:stop], value[start:stop]),
        num_groups=num_groups,
        max_value=max_value,
        stream=stream,
    )


pairs = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), min_size=1, max_size=50)
# With 2**20 groups and values of 31 bits, 33 examples leave fewer than 8 random bits: three arrays are sorted instead.
sizes = st.sampled_from([(7, 9), (7, 2**31 - 1), (2**20, 2**31 - 1)])


@given(pairs, sizes)
def test_the_order_is_that_of_a_lexical_sort(examples, size):
    num_groups, max_value = size
    groups, values = zip(*examples, strict=True)
    keys = sort(groups, values, num_groups=num_groups, max_value=max_value)
    order = np.lexsort((values, groups))  # stable: ties stay in the order of the data
    assert keys.indices.tolist() == order.tolist()
    assert keys.values.tolist() == np.array(values)[order].tolist()
    assert np.diff(keys.group_offsets)[:7].tolist() == np.bincount(groups, minlength=7).tolist()
    assert len(keys.group_offsets) == num_groups + 1


@given(pairs, sizes, st.integers(0, 5))
def test_with_chance_groups_and_values_stay_in_order(examples, size, seed):
    num_groups, max_value = size
    groups, values = zip(*examples, strict=True)
    stream = bit_stream(seed, 0, Purpose.GROUP)
    keys = sort(groups, values, num_groups=num_groups, max_value=max_value, stream=stream)
    assert sorted(keys.indices.tolist()) == list(range(len(examples)))
    assert [examples[index] for index in keys.indices] == sorted(examples)


@pytest.mark.parametrize("min_random_bits", [8, ALWAYS_WIDE])
def test_every_order_of_ties_occurs(monkeypatch, min_random_bits):
    monkeypatch.setattr(_keys, "_MIN_RANDOM_BITS", min_random_bits)
    orders = Counter()
    for seed in range(120):
        stream = bit_stream(seed, 0, Purpose.GROUP)
        keys = sort([0, 0, 0], [4, 4, 4], num_groups=1, max_value=4, stream=stream)
        orders[tuple(keys.indices.tolist())] += 1
    # 20 of each are expected; chi-square with 5 degrees of freedom is below 20.5 in 999 of 1000 cases.
    assert len(orders) == 6
    assert sum((count - 20) ** 2 / 20 for count in orders.values()) < 20.5


def test_examples_beyond_one_chunk_are_sorted_together():
    rng = np.random.default_rng(0)
    groups, values = rng.integers(0, 5, 150_000), rng.integers(0, 1000, 150_000)
    keys = sort(groups, values, num_groups=5, max_value=1000)
    assert (keys.indices == np.lexsort((values, groups))).all()


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("grouping", "axes"), [*product(GROUPINGS, [1, 2]), (bw.Packed(64), 1)])
def test_both_ways_of_sorting_give_the_same_plan(monkeypatch, grouping, axes, shuffle):
    lengths = np.random.default_rng(1).integers(1, 30, (300, axes))
    options = {"grouping": grouping, "shuffle": shuffle, "epoch": 2}
    narrow = bw.plan_batches(lengths, bw.MaxTokens(200), **options)
    monkeypatch.setattr(_keys, "_MIN_RANDOM_BITS", ALWAYS_WIDE)
    wide = bw.plan_batches(lengths, bw.MaxTokens(200), **options)
    assert list(wide) == list(narrow)


@pytest.mark.parametrize("grouping", [*GROUPINGS, bw.Packed(2**31 - 1)])
def test_lengths_near_the_largest_are_planned(grouping):
    # 70,000 windows and examples take 17 bits each, the length 31: one bit more than a key has.
    lengths = 2**31 - 1 - np.random.default_rng(2).integers(0, 1000, 70_000)
    plan = bw.plan_batches(lengths, bw.MaxItems(1), grouping=grouping)
    assert (np.bincount(plan.indices) == 1).all()
    assert len(plan) == 70_000
    assert (plan.shapes[:, 0] == 1).all()
    longest = np.maximum.reduceat(lengths[plan.indices], plan.offsets[:-1])
    assert (plan.shapes[:, 1] >= longest).all()


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_pairs_near_the_largest_are_planned(grouping):
    lengths = 2**31 - 1 - np.random.default_rng(3).integers(0, 5, (2000, 2))
    plan = bw.plan_batches(lengths, bw.MaxTokens(2**33), grouping=grouping)
    assert sorted(plan.indices.tolist()) == list(range(2000))
    assert plan.report().largest <= 1
    assert (plan.shapes[:, 0] <= 2).all()  # 2 × 2 × (2**31 − 1) is below 2**33, 3 × 2 × (2**31 − 5) above
