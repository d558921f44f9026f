"""The catalogue: shapes of a plan, a sampler or a list, and how often each is planned."""

import numpy as np
import pytest

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.step.graphs._catalogue import matches, read_shapes

LENGTHS = [3, 3, 3, 3, 5, 5]


def plan():
    return bw.BatchSampler(LENGTHS, bw.MaxItems(2), shuffle=False).plan


@pytest.mark.parametrize(
    "make",
    [
        lambda: plan().shapes,
        plan,
        lambda: bw.BatchSampler(LENGTHS, bw.MaxItems(2), shuffle=False),
        lambda: [(2, 3), (2, 3), (2, 5)],
        lambda: np.array([[2, 3], [2, 3], [2, 5]], dtype=np.uint16),
    ],
    ids=["shapes", "plan", "sampler", "list", "array"],
)
def test_shapes_come_from_a_plan_a_sampler_or_rows(make):
    found = read_shapes(make())
    assert found == {(2, 3): 2, (2, 5): 1}
    assert {type(number) for shape in found for number in shape} == {int}


def test_static_shapes_are_a_catalogue_by_themselves():
    sampler = bw.BatchSampler(LENGTHS, bw.MaxItems(2), grouping=bw.Buckets(2), shuffle=False)
    assert set(read_shapes(sampler.pad_to)) >= set(read_shapes(sampler))


def test_a_sampler_gives_the_full_shapes_of_its_catalogue_whatever_its_epoch_has():
    # What is left over differs by epoch, and with it which of the shapes are filled: (2, 3, 3) is not in epoch 0.
    lengths = [[2, 1], [2, 2], [3, 1], [1, 1], [3, 1], [3, 1], [1, 1], [1, 1], [1, 3], [2, 2]]
    sampler = bw.BatchSampler(lengths, bw.MaxTokens(12), grouping=bw.Buckets(5), seed=311, drop_last=True)
    assert read_shapes(sampler.plan) == {(2, 2, 3): 2, (3, 3, 1): 2}
    found = read_shapes(sampler)
    assert found == {(2, 2, 3): 2, (3, 3, 1): 2, (2, 3, 3): 2}  # none is rare
    sampler.set_epoch(1)
    assert (2, 3, 3) in read_shapes(sampler.plan)
    assert read_shapes(sampler).keys() == found.keys()


def test_short_shapes_of_a_sampler_count_as_often_as_they_are_planned():
    sampler = bw.BatchSampler([3] * 8 + [5] * 9, bw.MaxItems(4), grouping=bw.Buckets(3))
    assert read_shapes(sampler) == {(4, 3): 2, (4, 5): 2, (1, 5): 1}
    assert read_shapes(sampler.plan) == read_shapes(sampler)


@pytest.mark.parametrize(
    "shapes",
    [7, "abc", [4, 6], [(4, 6.5)], [(4, 6), (4,)], [(0, 6)], [(4, -1)], [("a", "b")], np.zeros((2, 2)), [[[1]]], {}],
    ids=repr,
)
def test_anything_else_is_refused(shapes):
    with pytest.raises(ArgumentError, match=r"shapes must be plan\.shapes, rows of \(num_items, padded lengths\)"):
        read_shapes(shapes)


def test_no_shapes_are_refused():
    with pytest.raises(ArgumentError, match=r"shapes is empty; give plan\.shapes of a plan with batches, or None"):
        read_shapes(np.empty((0, 2), dtype=int))


def test_padding_without_static_shapes_is_no_catalogue():
    with pytest.raises(ArgumentError, match=r"a PadTo without static shapes .* grouping=bw\.Buckets"):
        read_shapes(bw.PadTo(multiple_of=8))


@pytest.mark.parametrize(
    ("sizes", "shape", "expected"),
    [
        ([(8, 20), (8, 30), (8,), ()], (8, 20, 30), True),
        ([(8, 30), (8, 20)], (8, 20, 30), True),  # in any order
        ([(8, 20, 16)], (8, 20), True),
        ([(8, 20)], (8, 21), False),
        ([(8, 20)], (4, 20), False),
        ([(8, 20), (4, 20)], (8, 20), False),
        ([()], (8,), True),
    ],
)
def test_tensors_match_a_shape_by_rows_and_widths(sizes, shape, expected):
    assert matches(sizes, shape) is expected
