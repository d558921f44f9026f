"""Sizes from falling lengths: what fits, growth by steps, rounding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.integrations.dynabatch._choose import SizeRule, choose_sizes
from batchwright.integrations.dynabatch._prior import relative_memory
from batchwright.plan.grouping.base import SizeRounding


def sizes_of(lengths, batch_size=4, max_batch_size=8, threshold=0.9, max_diff=None, task="train", **rounding):
    falling = np.sort(np.asarray(lengths, dtype=np.int32))[::-1].reshape(-1, 1)
    rule = SizeRule(batch_size, max_batch_size, threshold, max_diff, task)
    return choose_sizes(np.ascontiguousarray(falling), rule, SizeRounding(**rounding)).tolist()


def test_a_batch_takes_the_most_that_the_threshold_allows():
    # In training memory goes with the tokens: of 4 × 100, 7 × 50 are 0.875 and 8 × 50 are all.
    assert sizes_of([100] * 4 + [50] * 14) == [4, 7, 7]


def test_no_candidate_under_the_threshold_leaves_the_batch_size():
    assert sizes_of([100] * 12, threshold=0.5) == [4, 4, 4]


def test_a_threshold_above_one_lets_the_longest_grow_too():
    # 4 × 1.6 = 6.4 items of the same length.
    assert sizes_of([100] * 16, threshold=1.6) == [4, 6, 6]


def test_the_range_caps_the_size():
    assert sizes_of([100] * 4 + [1] * 20, max_batch_size=5) == [4, 5, 5, 5, 5]


def test_growth_is_limited_to_a_share_of_the_batch_size():
    # int(10 × 0.2) = 2 items more in every batch, up to the 20 of the range; the last takes what is left.
    lengths = [500] * 10 + [1] * 100
    assert sizes_of(lengths, 10, 20, max_diff=0.2) == [10, 12, 14, 16, 18, 20, 20]


def test_even_sizes_grow_by_two_where_the_share_is_less():
    assert sizes_of([500] * 4 + [1] * 26, 4, 8, max_diff=0.2, multiple_of=2) == [4, 6, 8, 8, 4]


def test_friendly_sizes_climb_to_the_next_rung():
    # From 8 in steps of int(8 × 0.2) = 1: 9, 10, 11 round to 8 and 12 is a rung.
    sizes = sizes_of([500] * 8 + [1] * 60, 8, 16, max_diff=0.2, ladder="pow2x3")
    assert sizes == [8, 8, 8, 8, 12, 12, 12]


def test_several_axes_pad_separately():
    # Each pair sums to 20, but a batch of (19, 1) and (1, 19) pads to 38: with 2 × 38 tokens it is over 2 × 20.
    rule = SizeRule(2, 4, 0.9, None, "train")
    pairs = np.array([[10, 10], [10, 10], [19, 1], [1, 19]], dtype=np.int32)
    assert choose_sizes(pairs, rule, SizeRounding()).tolist() == [2, 1, 1]


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=200),
    st.integers(1, 12),
    st.floats(1, 6),
    st.sampled_from([None, 0.0, 0.2, 1.0]),
    st.sampled_from(["train", "generate"]),
    st.sampled_from([{}, {"multiple_of": 2}, {"ladder": "pow2x3"}, {"multiple_of": 2, "ladder": "pow2x3"}]),
    st.floats(0, 1.5),
)
def test_every_example_is_taken_and_every_grown_batch_is_within_the_threshold(
    lengths, batch_size, range_, max_diff, task, rounding, threshold
):
    max_size = int(batch_size * range_)
    sizes = sizes_of(lengths, batch_size, max_size, threshold, max_diff, task, **rounding)
    falling = sorted(lengths, reverse=True)
    assert sum(sizes) == len(lengths)
    assert sizes[0] == min(batch_size, len(lengths))
    assert max(sizes) <= max(batch_size, max_size)
    place = sizes[0]
    for size in sizes[1:]:
        predicted = relative_memory(size, falling[place], batch_size, falling[0], task=task)
        assert predicted <= (threshold if size > batch_size else max(1.0, threshold))
        place += size


@pytest.mark.parametrize("max_size", [1, 2, 7])
def test_a_batch_size_of_one_works(max_size):
    assert sum(sizes_of(range(1, 30), 1, max_size, max_diff=0.2)) == 29
