"""Cutting a batch into static shapes: every example once, few micro-batches, and only the last ones short."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright as bw
from batchwright.errors import ArgumentError, LengthsError
from batchwright.step import split_by_budget, split_by_shapes
from batchwright.step._settings import wrap_batch
from batchwright.step.splitting import split

torch.set_num_threads(1)

LADDER = bw.PadTo(shapes=((10,), (20,), (40,)), sizes=(8, 4, 2))


@st.composite
def cases(draw, num_axes=(1, 2, 3), most_examples=40, most_shapes=6):
    """Lengths, and a catalogue whose sizes keep a budget; an example may be held by no shape."""
    axes = draw(st.sampled_from(num_axes))
    length = st.integers(1, 12)
    rows = st.lists(st.tuples(*[length] * axes), min_size=1, max_size=most_examples)
    shapes = draw(st.lists(st.tuples(*[length] * axes), min_size=1, max_size=most_shapes, unique=True))
    tokens = draw(st.integers(36, 80))
    sizes = tuple(tokens // sum(shape) for shape in shapes)
    return np.array(draw(rows)), bw.PadTo(tuple(shapes), sizes, draw(st.sampled_from([1, 1, 4])))


def padded_rows(lengths, pad_to):
    """Return the rows as the catalogue sees them, one at a time."""
    return [tuple(-(-int(length) // pad_to.multiple_of) * pad_to.multiple_of for length in row) for row in lengths]


def is_held(rows, pad_to):
    """Say whether some static shape holds rows together."""
    longest = np.max(rows, axis=0)
    catalogue = zip(pad_to.shapes, pad_to.sizes, strict=True)
    return any(len(rows) <= size and (longest <= shape).all() for shape, size in catalogue)


@given(case=cases())
def test_every_example_comes_once_and_every_micro_batch_has_a_static_shape(case):
    lengths, pad_to = case
    rows = padded_rows(lengths, pad_to)
    parts = split_by_shapes(lengths, pad_to)
    assert sorted(index for part in parts for index in part) == list(range(len(lengths)))
    assert all(type(index) is int for part in parts for index in part)
    for part in parts:
        if is_held([rows[index] for index in part], pad_to):
            assert pad_to(lengths[part]) in pad_to.shapes
        else:
            assert len(part) == 1
            assert not is_held([rows[part[0]]], pad_to)


@given(case=cases())
def test_no_two_short_micro_batches_could_be_one(case):
    lengths, pad_to = case
    rows = padded_rows(lengths, pad_to)
    parts = split_by_shapes(lengths, pad_to)
    # Once a shape holds two of them together, they are joined; that a third shape is full does not matter.
    short = [part for part in parts if len(part) not in pad_to.sizes and is_held([rows[i] for i in part], pad_to)]
    for place, part in enumerate(short):
        for other in short[:place]:
            assert not is_held([rows[index] for index in part + other], pad_to)


@given(case=cases())
def test_the_same_lengths_are_always_cut_alike(case):
    lengths, pad_to = case
    assert split_by_shapes(lengths, pad_to) == split_by_shapes(lengths.tolist(), pad_to)


def fewest_parts(lengths, pad_to):
    """Return the fewest micro-batches of all ways to divide examples among shapes, by trying them out."""
    bounds = sorted(zip((shape[0] for shape in pad_to.shapes), pad_to.sizes, strict=True))

    @cache
    def fewest(left):
        if not left:
            return 0
        # The first of those left shares a micro-batch with some others; which ones only matters by their length.
        return 1 + min(
            fewest(rest) for bound, size in bounds if left[0] <= bound for rest in rests(left[1:], bound, size - 1)
        )

    def rests(others, bound, room):
        found = {others}
        for _ in range(room):
            found |= {rest[:i] + rest[i + 1 :] for rest in found for i in range(len(rest)) if rest[i] <= bound}
        return found

    return fewest(tuple(sorted(lengths)))


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=7),
    bounds=st.lists(st.integers(1, 11), max_size=3, unique=True),
    tokens=st.integers(12, 40),
)
def test_on_one_axis_no_cut_has_fewer_micro_batches(lengths, bounds, tokens):
    bounds = [*sorted(bounds), 12]
    pad_to = bw.PadTo(tuple((bound,) for bound in bounds), tuple(tokens // bound for bound in bounds))
    parts = split_by_shapes(lengths, pad_to)
    assert len(parts) == fewest_parts(lengths, pad_to)


def test_examples_fill_the_cheapest_shape_that_holds_them_and_a_rest_is_filled_from_below():
    # 40: two of 30 and 25. 20: 15, and the three longest of the nine that are left. 10: six of eight.
    lengths = [30, 25, 15, 9, 8, 7, 6, 5, 4, 3, 2, 1]
    assert split_by_shapes(lengths, LADDER) == [[0, 1], [2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]


def test_a_rest_that_would_be_short_is_moved_up_as_a_whole_before_a_full_micro_batch_is_broken():
    # The one of 30 has room for one more: the ninth of length 5, not one of the four of length 15.
    lengths = [30, *[15] * 4, *[5] * 9]
    assert sorted(map(len, split_by_shapes(lengths, LADDER))) == [2, 4, 8]


def test_short_micro_batches_of_two_shapes_are_joined_in_a_third():
    wide_or_tall = bw.PadTo(shapes=((2, 9), (9, 2), (9, 9)), sizes=(8, 8, 4))
    assert split_by_shapes([(1, 8), (8, 1), (2, 9)], wide_or_tall) == [[1, 2, 0]]
    assert len(split_by_shapes([(1, 8)] * 3 + [(8, 1)] * 2, wide_or_tall)) == 2  # 5 are too many for the third


def test_an_example_that_no_shape_holds_is_cut_off_alone():
    assert split_by_shapes([41, 5, 90, 6], LADDER) == [[0], [2], [3, 1]]


@pytest.mark.parametrize("num_axes", [1, 2])
@pytest.mark.parametrize("num", [32, 256, 1024])
def test_few_static_shapes_cost_few_micro_batches_more_than_shapes_of_any_kind(num, num_axes):
    generator = np.random.default_rng(num)
    lengths = np.minimum(generator.lognormal(4, 0.7, size=(20_000, num_axes)).astype(int) + 1, 512)
    budget = bw.MaxTokens(4096)
    pad_to = bw.BatchSampler(lengths, budget, grouping=bw.Buckets(16 if num_axes == 1 else 5)).pad_to
    chosen = lengths[generator.permutation(len(lengths))[:num]]
    free, static = split_by_budget(chosen, budget), split_by_shapes(chosen, pad_to)
    assert len(static) <= 1.2 * len(free) + 1
    catalogue = set(zip(pad_to.shapes, pad_to.sizes, strict=True))
    full = [part for part in static if (pad_to(chosen[part]), len(part)) in catalogue]
    assert len(full) >= len(static) - 1


@pytest.mark.parametrize("pad_to", [bw.PadTo(), bw.PadTo(multiple_of=8), None], ids=["none", "rounded", "no PadTo"])
def test_a_catalogue_without_static_shapes_is_refused(pad_to):
    with pytest.raises(ArgumentError, match=r"needs a pad_to with static shapes, got .*grouping=Buckets\(count\)"):
        split_by_shapes([3, 4], pad_to)


def test_lengths_of_another_number_of_axes_are_refused():
    with pytest.raises(LengthsError, match="lengths must have 1 axes, as those of the plan have, got 2"):
        split_by_shapes([(3, 4)], LADDER)


# As Stepper cuts.


EXAMPLES = [[0] * length for length in (30, 25, 15, 9, 8, 7, 6, 5, 4, 3, 2, 1)]
STATIC = split_by_shapes([len(example) for example in EXAMPLES], LADDER)
BUDGET = bw.MaxTokens(80)


def examples(lengths=len):
    return wrap_batch(EXAMPLES, collate=list, lengths=lengths, trim=None, split=None)


@pytest.mark.parametrize(
    ("budget", "limit"),
    [(BUDGET, 1.0), (None, float("inf")), (None, 80.0), (bw.MaxItems(1), 8), (bw.MaxTokens(800), 0.1)],
    ids=["the budget", "no limit", "tokens", "items", "a share"],
)
def test_a_list_of_examples_is_cut_into_static_shapes_where_all_are_within_the_limit(budget, limit):
    assert split(examples(), budget=budget, limit=limit, pad_to=LADDER) == STATIC


@pytest.mark.parametrize(
    "options",
    [
        {"budget": BUDGET, "limit": 0.99},
        {"budget": bw.MaxTokens(79), "limit": 1.0},
        {"budget": None, "limit": 79.0},
        {"budget": bw.MaxItems(1), "limit": 7},
        {"budget": BUDGET, "limit": 1.0, "order": np.arange(12)[::-1]},
        {"budget": BUDGET, "limit": 1.0, "least_parts": 5},
    ],
    ids=["memory", "another budget", "tokens", "items", "an order", "least parts"],
)
def test_a_tighter_limit_an_order_and_more_parts_are_cut_as_without_shapes(options):
    parts = split(examples(), **options, pad_to=LADDER)
    assert parts == split(examples(), **options)
    assert parts != STATIC


def test_a_micro_batch_of_one_example_may_cost_more():
    pad_to = bw.PadTo(shapes=((10,), (100,)), sizes=(8, 1))
    assert split(examples(), budget=BUDGET, limit=1.0, pad_to=pad_to) == [[0], [1], [2], [*range(3, 11)], [11]]


def test_batches_whose_width_is_settled_or_whose_lengths_are_unknown_are_cut_as_without_shapes():
    tensors = wrap_batch({"x": torch.zeros(6, 20)}, collate=None, lengths=lambda b: [20] * 6, trim=None, split=None)
    for batch in (tensors, examples(lengths=None)):
        assert split(batch, budget=None, limit=80.0, pad_to=LADDER) == split(batch, budget=None, limit=80.0)
    assert split(examples(), budget=BUDGET, limit=1.0, pad_to=bw.PadTo()) == split(examples(), budget=BUDGET, limit=1.0)
