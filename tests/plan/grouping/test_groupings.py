"""Which examples share a batch: what each grouping promises."""

from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright as bw

GROUPINGS = [bw.InOrder(), bw.Sorted(), bw.WindowSort(2), bw.Buckets(4), bw.Packed(128)]


def log_normal(num, axes=1, seed=0):
    draws = np.random.default_rng(seed).lognormal(3.5, 0.8, (num, axes))
    return np.clip(draws, 1, 128).astype(int)[:, 0 if axes == 1 else slice(None)]


@pytest.mark.parametrize("grouping", GROUPINGS)
def test_every_index_appears_once(grouping):
    plan = bw.plan_batches(log_normal(3000), bw.MaxTokens(512), grouping=grouping)
    assert np.bincount(plan.indices).tolist() == [1] * 3000


@pytest.mark.parametrize("grouping", GROUPINGS)
@pytest.mark.parametrize("axes", [1, 2])
def test_without_shuffling_every_epoch_is_the_same(grouping, axes):
    lengths = log_normal(500, 1 if isinstance(grouping, bw.Packed) else axes)
    plans = [bw.plan_batches(lengths, bw.MaxTokens(512), grouping=grouping, shuffle=False, epoch=e) for e in (0, 7)]
    other_seed = bw.plan_batches(lengths, bw.MaxTokens(512), grouping=grouping, shuffle=False, seed=5)
    assert list(plans[0]) == list(plans[1]) == list(other_seed)


@pytest.mark.parametrize("grouping", GROUPINGS[1:])
def test_with_shuffling_the_order_of_batches_changes_with_epoch_and_seed(grouping):
    lengths = log_normal(2000)
    plans = [
        list(bw.plan_batches(lengths, bw.MaxTokens(512), grouping=grouping, seed=seed, epoch=epoch))
        for seed, epoch in ((0, 0), (0, 1), (1, 0))
    ]
    assert plans[0] != plans[1]
    assert plans[0] != plans[2]
    assert plans[1] != plans[2]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("axes", [1, 2])
def test_in_order_keeps_the_order_of_the_data(shuffle, axes):
    plan = bw.plan_batches(log_normal(700, axes), bw.MaxTokens(512), grouping=bw.InOrder(), shuffle=shuffle)
    assert plan.indices.tolist() == list(range(700))


def test_sorted_pads_least_and_keeps_its_neighbours_for_ever():
    lengths = log_normal(20_000)
    by_length, windows = (
        bw.plan_batches(lengths, bw.MaxTokens(2048), grouping=grouping).report()
        for grouping in (bw.Sorted(), bw.WindowSort())
    )
    assert by_length.recurrence == 1
    assert by_length.padding < windows.padding


def test_window_sort_changes_neighbours_and_pads_little():
    report = bw.plan_batches(log_normal(20_000), bw.MaxTokens(2048)).report()
    # A batch of about 45 among 20,000 examples, with four windows: drawn at random it would be 45 / 20,000.
    assert report.recurrence < 0.2
    assert report.padding < 0.05


def test_smaller_windows_change_more_neighbours_and_pad_more():
    lengths = log_normal(20_000)
    reports = [bw.plan_batches(lengths, bw.MaxTokens(512), grouping=bw.WindowSort(m)).report() for m in (4, 32, 256)]
    recurrences, paddings = zip(*((report.recurrence, report.padding) for report in reports), strict=True)
    assert list(recurrences) == sorted(recurrences)
    assert list(paddings) == sorted(paddings, reverse=True)


def test_sorted_batches_hold_neighbours_in_length():
    lengths = log_normal(3000)
    plan = bw.plan_batches(lengths, bw.MaxTokens(512), grouping=bw.Sorted(), shuffle=False)
    assert lengths[plan.indices].tolist() == sorted(lengths.tolist(), reverse=True)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=200), st.integers(1, 12), st.sampled_from([1, 8]))
def test_buckets_pad_to_few_lengths_and_promote_leftovers(lengths, count, pad):
    plan = bw.plan_batches(lengths, bw.MaxTokens(520), grouping=bw.Buckets(count), pad_multiple_of=pad)
    num_items, padded = plan.shapes.T
    bounds = sorted(set(padded.tolist()))
    assert len(np.unique(plan.shapes, axis=0)) <= count
    assert set(bounds) <= {-(-length // pad) * pad for length in lengths}
    # Only one batch is not full: the leftovers of all moved up to the longest bucket.
    short = num_items < 520 // padded
    assert short.sum() <= 1 or count == 1


@pytest.mark.parametrize("count", [1, 3, 7, 30])
def test_buckets_use_as_many_shapes_as_allowed_where_the_data_are_worth_it(count):
    plan = bw.plan_batches(log_normal(20_000), bw.MaxTokens(2048), grouping=bw.Buckets(count))
    assert len(np.unique(plan.shapes, axis=0)) == count


def test_leftovers_move_up_to_the_next_bucket_with_room():
    # Four fit at length 5, two at length 10. The fifth short one joins a long one; the last is alone.
    plan = bw.plan_batches(
        [5, 5, 5, 5, 5, 10, 10], bw.MaxTokens(20), grouping=bw.Buckets(3), shuffle=False, balance_over=1
    )
    assert list(plan) == [[0, 1, 2, 3], [4, 5], [6]]
    assert plan.shapes.tolist() == [[4, 5], [2, 10], [1, 10]]


def test_on_two_axes_the_second_is_bounded_within_each_bucket_of_the_first():
    plan = bw.plan_batches(log_normal(20_000, axes=2), bw.MaxTokens(4096), grouping=bw.Buckets((5, 3)))
    second_of = defaultdict(set)
    for _, first, second in plan.shapes.tolist():
        second_of[first].add(second)
    assert len(second_of) == 5
    assert all(len(bounds) <= 3 for bounds in second_of.values())
    # Bounds of the second axis follow the bucket, so they are not the same in all.
    assert len({frozenset(bounds) for bounds in second_of.values()}) > 1


def test_on_two_axes_full_batches_but_for_one_in_a_bucket_of_the_first():
    plan = bw.plan_batches(log_normal(5000, axes=2), bw.MaxTokens(2048), grouping=bw.Buckets((4, 6)))
    num_items, first, second = plan.shapes.T
    is_short = num_items < 2048 // (first + second)
    assert max(Counter(first[is_short].tolist()).values()) == 1


@pytest.mark.parametrize("grouping", [bw.Buckets((1, 1)), bw.Buckets(2)], ids=repr)
def test_two_examples_that_fit_alone_but_not_their_common_box(grouping):
    # One bucket an axis would be a box of 9 + 9 = 18 tokens; each example has 10.
    plan = bw.plan_batches([[9, 1], [1, 9]], bw.MaxTokens(10), grouping=grouping)
    assert sorted(plan.shapes.tolist()) == [[1, 1, 9], [1, 9, 1]]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=80), st.integers(1, 4))
def test_misfits_keep_the_budget_and_are_not_lost(pairs, count):
    budget = bw.MaxTokens(max(sum(pair) for pair in pairs))  # the largest example just fits
    plan = bw.plan_batches(pairs, budget, grouping=bw.Buckets((count, count)))
    lengths = np.array(pairs)
    assert plan.report().largest <= 1
    assert sorted(plan.indices.tolist()) == list(range(len(pairs)))
    for batch, shape in zip(plan, plan.shapes, strict=True):
        assert (lengths[batch] <= shape[1:]).all()


def test_equal_misfits_share_a_batch():
    # Shapes (4, 16) and (16, 4) have 20 tokens, two of them fit; the box of 32 does not fit even once beside 31.
    pairs = [[4, 16], [16, 4], [4, 16], [31, 1], [4, 16], [1, 31]]
    plan = bw.plan_batches(pairs, bw.MaxTokens(40), grouping=bw.Buckets((1, 1)))
    assert [1, 31, 1] in plan.shapes.tolist()
    assert sorted(len(batch) for batch in plan) == [1, 1, 1, 1, 2]


def test_strata_keep_neighbours_close_on_both_axes():
    lengths = log_normal(20_000, axes=2)
    padding = {
        grouping: bw.plan_batches(lengths, bw.MaxTokens(4096), grouping=grouping).report().padding
        for grouping in (bw.InOrder(), bw.Sorted(), bw.WindowSort())
    }
    # Sorted on the first axis alone, the second would still be padded as in the order of the data.
    assert padding[bw.Sorted()] < 0.3 * padding[bw.InOrder()]
    assert padding[bw.WindowSort()] < 0.5 * padding[bw.InOrder()]


def test_settings_written_with_numbers_of_numpy_are_equal():
    assert bw.Packed(np.int64(64)) == bw.Packed(64)
    assert repr(bw.WindowSort(np.int32(8))) == "WindowSort(batches_per_window=8)"
    assert repr(bw.Buckets((np.int64(2), 3))) == "Buckets(count=(2, 3))"
