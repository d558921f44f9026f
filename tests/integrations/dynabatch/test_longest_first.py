"""The grouping of the sampler: relative memory, growth by steps, and sizes from falling lengths."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import batchwright as bw
from batchwright.integrations.dynabatch._longest_first import (
    SizeRule,
    Sizes,
    choose_sizes,
    growth_step,
    relative_memory,
)
from batchwright.plan.grouping.base import SizeRounding

ROUNDINGS = [SizeRounding(), SizeRounding(2), SizeRounding(ladder="pow2x3"), SizeRounding(2, "pow2x3")]
tasks = st.sampled_from(["train", "generate"])
counts = st.integers(1, 500)
PLENTY = 10_000  # examples left


# The memory of a batch relative to the first one.


@given(st.integers(1, 10_000), st.integers(1, 100_000), tasks)
def test_the_first_batch_costs_exactly_one(items, length, task):
    assert relative_memory(items, length, items, length, task=task) == 1.0


@given(counts, counts, counts, counts, tasks)
def test_it_grows_with_the_items_and_with_the_length(items, length, first, longest, task):
    here = relative_memory(items, length, first, longest, task=task)
    assert here < relative_memory(items + 1, length, first, longest, task=task)
    assert here < relative_memory(items, length + 1, first, longest, task=task)


@given(counts, counts, st.integers(1, 490), st.integers(1, 490))
def test_a_grown_batch_that_is_safe_for_generation_is_safe_for_training(first, more, length, longest):
    shape = (first + more, min(length, longest), first, longest)
    # Within a percent: what a batch takes whatever its size is fitted to each task on its own.
    assert relative_memory(*shape, task="train") <= 1.01 * relative_memory(*shape, task="generate")


def test_it_is_the_pretrained_model_with_half_the_input_of_each_batch_as_output():
    prior = bw.MemoryModel.pretrained("generate")

    def tokens(items, length):  # the formula of the prior, with an output of its own for each batch
        return prior.fixed + items * (prior.per_item + length + length / 2 + prior.square * length**2)

    expected = tokens(16, 64) / tokens(8, 512)
    assert relative_memory(16, 64, 8, 512, task="generate") == pytest.approx(expected)


def test_a_given_output_is_the_same_in_every_batch():
    prior = bw.MemoryModel.pretrained("generate")
    given = prior.relative([[16, 64]], reference=(8, 512), new_tokens=20)
    assert relative_memory(16, 64, 8, 512, task="generate", new_tokens=20) == pytest.approx(given[0])


def test_many_batches_are_predicted_at_once():
    predicted = relative_memory(np.arange(1, 4)[:, None], [10, 20], 1, 20, task="train")
    assert predicted.shape == (3, 2)
    assert predicted[2, 0] == relative_memory(3, 10, 1, 20, task="train")


# Growth by steps: never frozen, never over what fits.


@pytest.mark.parametrize(
    ("batch_size", "share", "rounding", "step"),
    [(32, 0.2, ROUNDINGS[0], 6), (4, 0.2, ROUNDINGS[0], 1), (4, 0.2, ROUNDINGS[1], 2), (4, 0.2, ROUNDINGS[3], 1)],
)
def test_the_step_is_a_share_of_the_batch_size_and_never_nothing(batch_size, share, rounding, step):
    assert growth_step(batch_size, share, rounding) == step


def test_without_a_step_a_batch_grows_at_once():
    sizes = Sizes(4, None, SizeRounding())
    assert [sizes.next(most, PLENTY) for most in (9, 3, 100)] == [9, 3, 100]


@pytest.mark.parametrize("rounding", ROUNDINGS[:2])
@given(st.integers(1, 60), st.floats(0, 1), st.lists(st.integers(1, 200), max_size=30))
def test_a_batch_is_at_most_a_step_larger_than_the_last_before_rounding(rounding, first, share, mosts):
    step = growth_step(first, share, rounding)
    sizes, last = Sizes(first, step, rounding), first
    for most in mosts:
        size = sizes.next(most, PLENTY)
        # Rounding took at most one item from the last; what is at most the batch size needs no step.
        assert 1 <= size <= min(most, max(first, last + step + rounding.multiple_of - 1))
        last = size


@pytest.mark.parametrize("rounding", ROUNDINGS)
@given(st.integers(1, 40), st.integers(1, 8), st.floats(0, 1))
def test_what_fits_is_reached_in_the_end(rounding, first, times, share):
    most = first * times
    sizes = Sizes(first, growth_step(first, share, rounding), rounding)
    assert [sizes.next(most, PLENTY) for _ in range(most + 1)][-1] == max(first, rounding.round_one(most))


def test_rounding_does_not_slow_growth_down():
    # int(16 × 0.2) = 3 items: 19, 22, 25, 28, 31 before rounding.
    sizes = Sizes(16, 3, SizeRounding(2))
    assert [sizes.next(32, PLENTY) for _ in range(6)] == [18, 22, 24, 28, 30, 32]


@pytest.mark.parametrize("rounding", ROUNDINGS)
@given(st.integers(1, 60), st.one_of(st.none(), st.integers(1, 20)), st.lists(st.integers(1, 200), max_size=30))
def test_no_size_is_rounded_below_the_batch_size_unless_fewer_fit(rounding, first, step, mosts):
    sizes = Sizes(first, step, rounding)
    assert all(sizes.next(most, PLENTY) >= min(first, most) for most in mosts)


def test_the_last_batch_takes_the_rest_unrounded():
    sizes = Sizes(4, 3, SizeRounding(2))
    assert sizes.next(9, left=7) == 7
    assert sizes.next(9, left=20) == 8


# Sizes from falling lengths: what fits, growth by steps, rounding.


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


roundings = st.sampled_from([{}, {"multiple_of": 2}, {"ladder": "pow2x3"}, {"multiple_of": 2, "ladder": "pow2x3"}])
settings = st.fixed_dictionaries(
    {
        "batch_size": st.integers(1, 40),
        "max_diff": st.sampled_from([None, 0.0, 0.2, 1.0]),
        "task": tasks,
        "rounding": roundings,
    }
)
corpora = st.lists(st.integers(1, 300), min_size=1, max_size=300)


def num_batches(lengths, batch_size, max_diff, task, rounding, *, range_=2.0, threshold=0.9):
    return len(sizes_of(lengths, batch_size, int(batch_size * range_), threshold, max_diff, task, **rounding))


@example([50] * 60, {"batch_size": 3, "max_diff": 0.2, "task": "train", "rounding": {"multiple_of": 2}}, 2.0, 0.9)
@given(corpora, settings, st.floats(1, 10), st.floats(0, 2))
def test_there_are_never_more_batches_than_of_a_fixed_size(lengths, options, range_, threshold):
    static = -(-len(lengths) // options["batch_size"])
    assert num_batches(lengths, **options, range_=range_, threshold=threshold) <= static


@given(corpora, settings, st.tuples(st.floats(0, 2), st.floats(0, 2)).map(sorted))
def test_a_higher_threshold_never_gives_more_batches(lengths, options, thresholds):
    low, high = (num_batches(lengths, **options, threshold=threshold) for threshold in thresholds)
    assert high <= low


@given(corpora, settings, st.tuples(st.floats(1, 10), st.floats(1, 10)).map(sorted))
def test_a_wider_range_never_gives_more_batches(lengths, options, ranges):
    low, high = (num_batches(lengths, **options, range_=range_) for range_ in ranges)
    assert high <= low


@pytest.mark.parametrize("max_size", [1, 2, 7])
def test_a_batch_size_of_one_works(max_size):
    assert sum(sizes_of(range(1, 30), 1, max_size, max_diff=0.2)) == 29
