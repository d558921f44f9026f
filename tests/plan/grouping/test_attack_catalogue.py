"""Catalogues of Buckets under data that are hard for them."""

import tracemalloc
import warnings

import numpy as np
import pytest

import batchwright as bw
from batchwright.errors import ArgumentError, BatchwrightError
from batchwright.plan import PadTo


def shapes_of(plan):
    return {tuple(row) for row in plan.shapes.tolist()}


def test_pairs_that_share_a_context_are_planned_in_little_memory():
    # Prompt and completion fill a context together, so no pair holds another one, and the common box does not fit.
    # Expected: memory that grows with the data, 6,000 pairs are 48 kB.
    # Found: about 300 MB here, 7.5 GB and 65 s for 31,238 distinct pairs (a context of 32,768), as the square of the
    # pairs: every kept row of _maximal is a view that keeps the whole array of its round alive.
    prompt = np.arange(1, 6001)
    lengths = np.stack([prompt, 6001 - prompt], axis=1)
    tracemalloc.start()
    try:
        bw.plan_batches(lengths, bw.MaxTokens(7200), grouping=bw.Buckets(16))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 64 * 2**20


def test_twenty_axes_are_planned_in_little_memory():
    # "on any number of axes". The grid of candidates has _MAX_GRID = 4,096 places "over all axes".
    # Found: 2 per axis at the least, so 2**20 places here; with 24 axes 24 s and 6.7 GB for 2,000 examples.
    lengths = np.random.default_rng(0).integers(1, 100, size=(500, 20))
    tracemalloc.start()
    try:
        bw.plan_batches(lengths, bw.MaxTokens(16_000), grouping=bw.Buckets(16))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 100 * 2**20


def test_a_plan_has_the_same_shapes_in_every_epoch():
    # docs/planning.md: "at most 16 shapes in all, on any number of axes and in every epoch the same".
    # Found: the shapes of epoch 0 are (3, 2, 1), (4, 1, 2), (4, 2, 1), those of epoch 1 have (3, 2, 2) instead of
    # (3, 2, 1): what is left differs by epoch, and the rule of PadTo looks at it.
    lengths = [[2, 1]] * 3 + [[1, 2]] * 3 + [[1, 1]] + [[2, 1]] * 3 + [[1, 1]]
    budget = bw.MaxTokens(18) & bw.MaxItems(4)
    epochs = [
        shapes_of(bw.plan_batches(lengths, budget, grouping=bw.Buckets(4), seed=548, epoch=epoch)) for epoch in range(4)
    ]
    assert all(shapes == epochs[0] for shapes in epochs)


def test_full_batches_have_the_same_shapes_in_every_epoch():
    # Found: a full shape, with drop_last=True too, is there in some epochs only. A Stepper that was given the sampler in
    # epoch 0 does not know it, and runs it eagerly.
    rng = np.random.default_rng(311)
    axes, num, longest = int(rng.integers(1, 4)), int(rng.integers(2, 60)), int(rng.integers(2, 9))
    lengths = rng.integers(1, longest + 1, size=(num, axes))
    if rng.random() < 0.6:
        lengths[:, 1] = np.maximum(1, longest + 1 - lengths[:, 0] - rng.integers(0, 3, size=num))
    options = {"grouping": bw.Buckets(5), "seed": 311, "drop_last": True}
    epochs = [shapes_of(bw.plan_batches(lengths, bw.MaxTokens(12), epoch=epoch, **options)) for epoch in range(4)]
    assert all(shapes == epochs[0] for shapes in epochs)


@pytest.mark.parametrize("num_axes", [1, 2])
def test_a_cost_that_is_infinite_somewhere_is_refused_or_planned_well(num_axes):
    # NaN is refused; infinity, which says that a shape must not be, is not.
    # Expected: a refusal, or shapes of finite cost for the examples that have one.
    # Found: warnings of numpy from inside, and on one axis a single shape for everything, the longest.
    lengths = np.random.default_rng(0).integers(1, 100, size=(500, num_axes))

    def cost(num_items, padded):
        return np.where(padded[:, 0] > 50, np.inf, num_items * padded.sum(axis=1))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            plan = bw.plan_batches(lengths, bw.MaxTokens(400 * num_axes), grouping=bw.Buckets(8), cost=cost)
        except BatchwrightError:
            return
    short = lengths[:, 0] <= 50
    widths = np.repeat(plan.shapes[:, 1], np.diff(plan.offsets))
    assert np.mean(widths[short[plan.indices]] <= 50) > 0.9


def test_one_shape_keeps_a_multiple_of_the_size_or_is_refused():
    # 8 items fit and size_multiple_of=8; 500 is no multiple of 8.
    # Expected: batches of 8, or a refusal that names the two options. Found: all 100 batches have 5 items.
    lengths = np.random.default_rng(0).integers(1, 100, size=500)
    try:
        plan = bw.plan_batches(lengths, bw.MaxTokens(800), grouping=bw.Buckets(1), size_multiple_of=8)
    except BatchwrightError:
        return
    assert (plan.shapes[:-1, 0] % 8 == 0).all()


@pytest.mark.parametrize("given", [{"shapes": (10, 20), "sizes": (8, 4)}, {"shapes": ((10,),), "sizes": 4}])
def test_lengths_that_are_not_tuples_are_refused_with_a_sentence(given):
    # Expected: ArgumentError that says how shapes and sizes are written.
    # Found: TypeError: 'int' object is not iterable.
    with pytest.raises(ArgumentError):
        PadTo(**given)
