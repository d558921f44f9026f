"""pad_to: the widths a collator pads to are those the plan counted on."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright as bw
from batchwright.errors import ArgumentError, LengthsError
from batchwright.plan.collating import pad_batches

from ..thorough import num_cases
from .strategies import Case, cases


@st.composite
def bucketed(draw, axes):
    """Lengths, a budget that the most demanding example may just fill, and buckets."""
    longest = draw(st.sampled_from([1, 6, 40]))
    # Drawn by seed: shapes of equal size meet in data sets larger than hypothesis makes one by one.
    random = np.random.default_rng(draw(st.integers(0, 10**6)))
    lengths = random.integers(1, longest + 1, size=(draw(st.integers(1, 200)), axes))
    if axes == 2 and draw(st.booleans()):
        # Long on one axis and short on the other: cells that no batch fits, so that examples get shapes of their own.
        lengths[:, 1] = np.maximum(1, longest - lengths[:, 0] - lengths[:, 1] // 3)
    pad = draw(st.sampled_from([1, 1, 4]))
    alone = int((-(-lengths // pad) * pad).sum(axis=1).max())
    budget = bw.MaxTokens(int(alone * draw(st.sampled_from([1, 1.2, 2, 5]))))
    if draw(st.booleans()):
        budget &= bw.MaxItems(draw(st.integers(1, 9)))
    # Where the longest lengths do not fit together, as many shapes as there are lengths are enough.
    fits = budget.max_items(-(-lengths.max(axis=0, keepdims=True) // pad) * pad)[0] > 0
    options = {
        "grouping": bw.Buckets(draw(st.sampled_from([1, 2, 3, 64] if fits else [64, (1, 1), (3, 2)]))),
        "pad_multiple_of": pad,
        "seed": draw(st.integers(0, 3)),
        "size_ladder": draw(st.sampled_from([None, "pow2"])),
    }
    return lengths[:, 0] if axes == 1 else lengths, budget, options


either = st.sampled_from([1, 2]).flatmap(bucketed)


def rows_of(lengths, batch):
    """The lengths that a collator sees: of the examples, or of the rows they are packed into."""
    if isinstance(batch[0], list):
        return [int(lengths[row].sum()) for row in batch]
    return lengths[batch]


def tight(case):
    """The case with a budget that about half of its examples keep, and buckets enough for any of them."""
    lengths = np.asarray(case.lengths).reshape(len(case.lengths), -1)
    pad, grouping = case.options["pad_multiple_of"], case.options["grouping"]
    padded = -(-lengths // pad) * pad
    limit = max(int(np.median(padded.sum(axis=1))), pad * padded.shape[1])
    if isinstance(grouping, bw.Buckets) and not isinstance(grouping.count, tuple):
        grouping = bw.Buckets(80)
    return Case(case.lengths, bw.MaxTokens(limit) & bw.MaxItems(9), {**case.options, "grouping": grouping})


@settings(max_examples=num_cases(150, thorough=1500))
@given(cases(), st.integers(1, 5), st.booleans(), st.sampled_from(["error", "alone", "truncate"]))
def test_a_collator_builds_the_shapes_of_the_plan_whatever_the_grouping(case, world_size, drop_last, oversize):
    if oversize != "error" and not isinstance(case.options["grouping"], bw.Packed):
        case = tight(case)
    sampler = case.sampler(world_size=world_size, oversize=oversize, drop_last=drop_last)
    for epoch in (0, 2):
        sampler.set_epoch(epoch)
        plan = sampler.plan
        collated = [(len(batch), *sampler.pad_to(rows_of(plan.lengths, batch))) for batch in plan]
        assert collated == [tuple(shape) for shape in plan.shapes.tolist()]


@given(either, st.integers(1, 9))
def test_tensors_padded_by_pad_to_keep_the_budget_on_any_number_of_ranks(case, world_size):
    lengths, budget, options = case
    sampler = bw.BatchSampler(lengths, budget, world_size=world_size, **options)
    for batch in sampler.plan:
        padded = sampler.pad_to(lengths[batch])
        assert (lengths[batch].reshape(len(batch), -1) <= padded).all()
        assert all(width % options["pad_multiple_of"] == 0 for width in padded)
        assert budget.fraction(np.array([len(batch)]), np.array([padded]))[0] <= 1


@pytest.mark.parametrize("axes", [1, 2])
@given(data=st.data())
def test_a_batch_is_padded_to_the_shape_of_the_plan(axes, data):
    lengths, budget, options = data.draw(bucketed(axes))
    sampler = bw.BatchSampler(lengths, budget, **options)
    full_sizes = dict(zip(sampler.pad_to.shapes, sampler.pad_to.sizes, strict=True))
    for batch, (num_items, *planned) in zip(sampler.plan, sampler.plan.shapes.tolist(), strict=True):
        assert num_items <= full_sizes[tuple(planned)]
        assert sampler.pad_to(lengths[batch]) == tuple(planned)


@given(either)
def test_a_batch_short_of_examples_is_padded_to_one_of_the_shapes(case):
    lengths, budget, options = case
    sampler = bw.BatchSampler(lengths, budget, **options)
    assert {sampler.pad_to(lengths[batch]) for batch in sampler.plan} <= set(sampler.pad_to.shapes)


def test_of_two_shapes_of_equal_size_the_one_with_fewer_tokens_is_taken():
    pad_to = bw.PadTo(shapes=((10, 100), (20, 60)), sizes=(2, 2))
    assert pad_to([(9, 50), (10, 60)]) == (20, 60)
    assert pad_to([(9, 50), (10, 61)]) == (10, 100)


def test_a_shape_that_is_exactly_full_comes_before_one_with_fewer_tokens():
    pad_to = bw.PadTo(shapes=((10, 20), (30, 40), (9, 35)), sizes=(5, 1, 1))
    assert pad_to([(9, 20)]) == (9, 35)
    assert pad_to([(9, 36)]) == (30, 40)
    assert pad_to([(9, 20), (1, 1)]) == (10, 20)


def test_a_short_batch_takes_the_shape_of_the_fewest_tokens_that_holds_it():
    pad_to = bw.PadTo(shapes=((10,), (20,), (40,)), sizes=(8, 4, 2))
    assert pad_to([3, 9, 7]) == (10,)
    assert pad_to([3, 11, 7]) == (20,)


def test_a_batch_that_no_shape_holds_is_padded_to_its_longest():
    pad_to = bw.PadTo(shapes=((8,), (16,)), sizes=(8, 4), multiple_of=8)
    assert pad_to([17]) == (24,)
    assert bw.PadTo(shapes=((10,), (20,)), sizes=(8, 4))([15] * 5) == (15,)  # five are too many for 20


@pytest.mark.parametrize("grouping", [bw.WindowSort(), bw.Sorted(), bw.InOrder()])
def test_without_static_shapes_a_batch_is_padded_to_its_longest_rounded_up(grouping):
    sampler = bw.BatchSampler([3, 9, 5], bw.MaxTokens(64), grouping=grouping, pad_multiple_of=8)
    assert sampler.pad_to([3, 9, 5]) == (16,)
    assert sampler.plan.shapes.tolist() == [[3, 16]]
    assert bw.BatchSampler([(3, 9), (4, 1)], bw.MaxTokens(64)).pad_to([(3, 9), (4, 1)]) == (4, 9)


def test_packed_rows_are_padded_to_the_capacity():
    lengths = [30, 20, 10, 40]
    sampler = bw.BatchSampler(lengths, bw.MaxTokens(128), grouping=bw.Packed(64))
    for rows, planned in zip(sampler.plan, sampler.plan.shapes[:, 1:].tolist(), strict=True):
        assert sampler.pad_to([sum(lengths[index] for index in row) for row in rows]) == tuple(planned) == (64,)


def test_an_oversize_example_alone_is_padded_to_its_own_length():
    lengths = [3, 50, 4, 4, 3]
    sampler = bw.BatchSampler(lengths, bw.MaxTokens(8), grouping=bw.Buckets(2), oversize="alone", pad_multiple_of=4)
    assert sampler.pad_to([50]) == (52,)
    assert [1, 52] in sampler.plan.shapes.tolist()


def test_pad_to_is_the_same_in_every_epoch_and_pickles_small():
    lengths = np.random.default_rng(0).integers(1, 500, size=20_000)
    sampler = bw.BatchSampler(lengths, bw.MaxTokens(4096), grouping=bw.Buckets(16))
    before = sampler.pad_to
    sampler.set_epoch(3)
    shapes = {tuple(shape) for shape in sampler.plan.shapes[:, 1:].tolist()}
    assert shapes <= set(before.shapes)
    assert len(pickle.dumps(before)) < 1_000
    assert pickle.loads(pickle.dumps(before)) == before


def test_lengths_with_another_number_of_axes_are_refused():
    sampler = bw.BatchSampler([(3, 9), (4, 1)], bw.MaxTokens(64), grouping=bw.Buckets(2))
    with pytest.raises(LengthsError, match="lengths must have 2 axes, as those of the plan have, got 1"):
        sampler.pad_to([3, 4])


def test_shapes_of_different_numbers_of_axes_are_refused():
    with pytest.raises(ArgumentError, match="shapes must all have the same number of lengths"):
        bw.PadTo(shapes=((8,), (8, 4)), sizes=(1, 1))


@pytest.mark.parametrize(
    "given",
    [{"shapes": (10, 20), "sizes": (8, 4)}, {"shapes": ((10,),), "sizes": 4}, {"shapes": 10, "sizes": (4,)}],
    ids=["plain lengths", "a plain size", "one length"],
)
def test_shapes_that_are_no_tuples_are_refused_with_an_example(given):
    with pytest.raises(
        ArgumentError, match=r"PadTo takes a tuple of lengths per shape .* as in PadTo\(\(\(10,\), \(20,"
    ):
        bw.PadTo(**given)


def test_many_batches_are_padded_by_the_rule_of_one():
    random = np.random.default_rng(0)
    shapes = random.integers(1, 60, size=(64, 2))
    pad_to = bw.PadTo(tuple(map(tuple, shapes.tolist())), tuple(random.integers(1, 9, 64).tolist()), multiple_of=2)
    num_items, longest = random.integers(1, 10, 100_000), random.integers(1, 60, size=(100_000, 2))
    together = pad_batches(pad_to, num_items, longest)
    for row in range(0, 100_000, 500):
        batch = np.concatenate([longest[row : row + 1], np.ones((num_items[row] - 1, 2), dtype=int)])
        assert pad_to(batch) == tuple(together[row].tolist())


def test_an_empty_batch_has_no_width():
    with pytest.raises(LengthsError, match="lengths is empty"):
        bw.PadTo()([])
