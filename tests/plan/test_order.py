"""The order of batches and their division over ranks."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import batchwright as bw
from batchwright._random import Purpose, bit_stream
from batchwright.plan._order import gather, order_batches, step_cost, sum_work
from batchwright.plan._ranks import split_evenly, spread_tail


def order_of(cost, *, seed=0, run_length=64, keep_first=0, demand=None):
    cost = np.asarray(cost, dtype=float)
    demand = cost if demand is None else np.asarray(demand, dtype=float)
    stream = bit_stream(seed, 0, Purpose.ORDER)
    return order_batches(cost, demand, stream, run_length=run_length, keep_first=keep_first)


@given(st.lists(st.integers(1, 20), max_size=200), st.sampled_from([1, 6, 64]), st.integers(0, 30), st.integers(0, 3))
def test_the_order_holds_every_batch_once(cost, run_length, keep_first, seed):
    order = order_of(cost, seed=seed, run_length=run_length, keep_first=keep_first)
    assert sorted(order.tolist()) == list(range(len(cost)))


@pytest.mark.parametrize("world_size", [2, 4, 8, 16, 32, 64])
def test_the_batches_of_a_step_are_neighbours_in_cost(world_size):
    # 2,048 batches are 32 full runs of 64; the cost of a batch is its rank in the sorted order.
    cost = np.random.default_rng(0).permutation(2048)
    steps = cost[order_of(cost)].reshape(-1, world_size)
    assert (steps.max(axis=1) - steps.min(axis=1) == world_size - 1).all()


@pytest.mark.parametrize("world_size", [2, 8, 64])
@pytest.mark.parametrize("keep_first", [0, 5])
def test_steps_stay_balanced_with_a_rest_and_batches_kept_first(world_size, keep_first):
    cost = np.random.default_rng(0).permutation(2048 + 37)
    costs = cost[order_of(cost, keep_first=keep_first)]
    start = 64 if keep_first else 0
    steps = costs[start : start + 30 * 64].reshape(-1, world_size)
    # What was taken out of the sorted order for the ends widens a step by at most two runs.
    assert (steps.max(axis=1) - steps.min(axis=1) < world_size + 128).all()


@pytest.mark.parametrize("grouping", [bw.WindowSort(), bw.Buckets(8), bw.Packed(128)])
def test_the_order_of_a_number_is_the_same_for_every_world_size(grouping):
    lengths = np.random.default_rng(0).integers(1, 129, 4000)
    options = {"grouping": grouping, "epoch": 3, "balance_over": 64}
    alone = bw.plan_batches(lengths, bw.MaxTokens(512), **options)
    for world_size in (2, 8, 64):
        plan = bw.plan_batches(lengths, bw.MaxTokens(512), world_size=world_size, **options)
        assert plan.indices[:4000].tolist() == alone.indices.tolist()


# Lognormal lengths as those of short texts: 300,000 examples are about 1,250 batches.
TEXTS = np.clip(np.random.default_rng(1).lognormal(np.log(24), 0.8, 300_000), 1, 512).astype(int)


@pytest.mark.parametrize("grouping", [bw.WindowSort(), bw.Sorted(), bw.Buckets(32), bw.Packed(512)])
def test_on_one_device_a_step_tells_nothing_of_the_next(grouping):
    # Before, with runs of 64 batches: +0.95 to +0.98 for all but packed rows, which are alike.
    report = bw.plan_batches(TEXTS, bw.MaxTokens(8192), grouping=grouping).report()
    assert report.balance_over == 1
    assert abs(report.order_correlation) < 0.1


@pytest.mark.parametrize("world_size", [3, 8, 24])
def test_on_several_devices_a_step_tells_nothing_of_the_next_either(world_size):
    # 2,100 steps and more: chance alone stays below 0.1 by more than four standard deviations.
    lengths = np.resize(TEXTS, 2100 * world_size)
    plan = bw.plan_batches(lengths, bw.MaxItems(1), grouping=bw.Sorted(), world_size=world_size)
    assert plan.report().balance_over == world_size
    assert abs(plan.report().order_correlation) < 0.1


@pytest.mark.parametrize("world_size", [1, 3, 6, 8, 12, 24, 48, 64])
@pytest.mark.parametrize("num", [30_000, 300_000])
def test_ranks_wait_no_longer_than_under_the_best_number(world_size, num):
    # Before, the default of 64 lost 7.2 % at 24 ranks, where runs of 24 lose 1.0 %. The last step, which is cut into
    # pieces, differs by chance from one order to another: of 30,000 examples it is one of two to forty steps.
    lengths, budget = TEXTS[:num], bw.MaxTokens(8192)
    waste = {
        number: bw.plan_batches(lengths, budget, world_size=world_size, balance_over=number).report().straggler_waste
        for number in (None, 64, world_size)
    }
    assert waste[None] == waste[world_size]
    assert waste[None] <= waste[64] * 1.02 + 1e-4


def test_a_run_may_be_longer_than_the_epoch():
    lengths = np.arange(1, 40)
    for number in (10**6, 10**30):
        plan = bw.plan_batches(lengths, bw.MaxItems(4), balance_over=number, keep_first=2)
        assert sorted(index for batch in plan for index in batch) == list(range(39))


def test_ranks_wait_less_for_each_other_than_in_random_order():
    lengths = np.clip(np.random.default_rng(0).lognormal(4, 1, 30_000), 1, 1024).astype(int)
    balanced, random = (
        bw.plan_batches(lengths, bw.MaxTokens(2048), balance_over=run).report(world_size=8).straggler_waste
        for run in (64, 1)
    )
    assert balanced < 0.1 * random


def test_the_most_demanding_batches_come_first():
    demand = [3, 9, 1, 9, 7, 2] * 20
    order = order_of(np.ones(120), demand=demand, keep_first=50).tolist()
    # All twenty pairs of nines, then ten of the sevens; ties in the order of the data.
    assert order[:40] == [place for place, value in enumerate(demand) if value == 9]
    assert order[40:50] == [place for place, value in enumerate(demand) if value == 7][:10]


@pytest.mark.parametrize("grouping", [bw.InOrder(), bw.Sorted(), bw.WindowSort()])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_plan_begins_with_its_most_demanding_batches(grouping, shuffle):
    lengths = np.random.default_rng(0).integers(1, 200, 900)
    plan = bw.plan_batches(lengths, bw.MaxItems(8), grouping=grouping, shuffle=shuffle, keep_first=4)
    tokens = plan.shapes[:, 0] * plan.shapes[:, 1].astype(float) ** 2
    full = plan.shapes[:, 0] == 8
    assert full[:4].all()
    assert tokens[:4].min() >= tokens[4:].max()


@pytest.mark.parametrize("keep_first", [7, 8, 9])
def test_more_may_be_kept_first_than_there_are(keep_first):
    plan = bw.plan_batches(np.arange(1, 9), bw.MaxItems(1), keep_first=keep_first)
    assert plan.shapes[:, 1].tolist() == [8, 7, 6, 5, 4, 3, 2, 1]


def test_every_batch_stands_first_in_some_epoch():
    # With 200 seeds one of ten is missed with a chance of 10 × 0.9**200, below 1e-8.
    assert {int(order_of(np.arange(10), seed=seed)[0]) for seed in range(200)} == set(range(10))


@pytest.mark.parametrize("num_batches", [10, 64, 1024])
def test_the_most_costly_batch_stands_anywhere(num_batches):
    # 1,000 seeds in ten bins: chi-square with 9 degrees of freedom is below 27.9 in 999 of 1000 cases.
    cost = np.arange(num_batches)
    places = [int(np.argmax(order_of(cost, seed=seed))) for seed in range(1000)]
    bins = np.bincount(np.array(places) * 10 // num_batches, minlength=10)
    expected = 1000 * np.bincount(np.arange(num_batches) * 10 // num_batches) / num_batches
    assert ((bins - expected) ** 2 / expected).sum() < 27.9


def test_a_run_of_one_is_a_wholly_random_order():
    # Among 1,024 batches neighbours in the order differ by a third of the range on average.
    order = order_of(np.arange(1024), run_length=1)
    assert abs(np.abs(np.diff(order)).mean() - 1024 / 3) < 40


@pytest.mark.parametrize(
    ("sizes", "parts", "expected"),
    [
        ([7], 3, [[3, 2, 2]]),
        ([5, 2], 4, [[2, 2, 1], [2]]),
        ([1, 9], 3, [[1], [5, 4]]),
        ([4, 4], 8, [[1, 1, 1, 1], [1, 1, 1, 1]]),
    ],
)
def test_groups_are_split_evenly(sizes, parts, expected):
    assert split_evenly(sizes, parts) == expected


@given(st.lists(st.integers(1, 40), min_size=1, max_size=8), st.data())
def test_an_even_split_has_no_empty_piece_and_the_least_largest_one(sizes, data):
    parts = data.draw(st.integers(len(sizes), sum(sizes)))
    pieces = split_evenly(sizes, parts)
    assert [sum(group) for group in pieces] == sizes
    assert sum(len(group) for group in pieces) == parts
    assert min(min(group) for group in pieces) >= 1
    # With pieces of at most m, a group of s needs ceil(s / m) of them.
    least = next(m for m in range(1, 41) if sum(-(-size // m) for size in sizes) <= parts)
    assert max(max(group) for group in pieces) == least


@given(st.lists(st.integers(1, 10), min_size=1, max_size=7), st.integers(1, 20))
def test_the_tail_gives_every_rank_a_piece_or_says_how_many_lack_one(counts, more_ranks):
    world_size = len(counts) + more_ranks
    pieces, repeated = spread_tail(counts, world_size)
    assert sum(pieces) == sum(counts)
    assert min(pieces) >= 1
    assert len(pieces) + repeated == world_size
    assert repeated == max(0, world_size - sum(counts))


def test_the_tail_by_hand():
    assert spread_tail([6], 4) == ([2, 2, 1, 1], 0)
    assert spread_tail([2, 1], 5) == ([1, 1, 1], 2)


def test_the_work_of_a_batch_grows_with_the_square_of_the_length():
    # 2 × 512 × 1.5 and, with axes of 256 + 768 = 1024 tokens, 3 × 1024 × 2.
    assert step_cost(np.array([2]), np.array([[512]])).tolist() == [1536.0]
    assert step_cost(np.array([3]), np.array([[256, 768]])).tolist() == [6144.0]


@given(st.lists(st.tuples(st.integers(0, 80), st.integers(1, 20)), max_size=30))
def test_slices_are_copied_one_behind_the_other(slices):
    source = np.arange(100, 200, dtype=np.int32)
    starts = np.array([start for start, _ in slices], dtype=np.int64)
    sizes = np.array([size for _, size in slices], dtype=np.int64)
    copied, offsets = gather(source, starts, sizes)
    expected = [source[start : start + size].tolist() for start, size in slices]
    assert [copied[a:b].tolist() for a, b in pairwise(offsets)] == expected


def test_copying_and_summing_work_over_many_slices():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 4000, 300)  # 600,000 positions, several pieces of 65,536
    starts = rng.integers(0, 10_000, 300)
    source, lengths = rng.permutation(14_000).astype(np.int32), rng.integers(1, 99, (14_000, 1))
    parts = [source[start : start + size] for start, size in zip(starts, sizes, strict=True)]
    assert gather(source, starts, sizes)[0].tolist() == np.concatenate(parts).tolist()
    work = [(lengths[part] * (1 + lengths[part] / 1024)).sum() for part in parts]
    np.testing.assert_allclose(sum_work(source, starts, sizes, lengths), work)
