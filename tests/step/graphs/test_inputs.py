"""Inputs of graphs: which micro-batches are alike, their static buffers, and inputs of other planned shapes."""

from __future__ import annotations

import math
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchwright.step.graphs._catalogue import matches
from batchwright.step.graphs._inputs import Axes, StaticInputs, elements_of, resized, signature_of

Pair = namedtuple("Pair", ["x", "y"])
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Fields:
    x: torch.Tensor
    scale: float = 1.0


class Named(UserDict):
    """A mapping that takes attributes, as BatchEncoding does."""


class Listed(list):
    """A list that takes attributes."""


def with_attribute(value, **attributes):
    for name, attribute in attributes.items():
        setattr(value, name, attribute)
    return value


def ones(*size, **options):
    return torch.ones(size, **options)


# Signatures

# Each row: two micro-batches, and whether one graph may run both.
_PAIRS = {
    "values": ({"x": ones(2, 3)}, {"x": 5 * ones(2, 3)}, True),
    "strides": ({"x": ones(2, 3)}, {"x": ones(3, 2).T}, True),
    "expanded": ({"x": ones(2, 3)}, {"x": ones(1, 3).expand(2, 3)}, True),
    "sizes": ({"x": ones(2, 3)}, {"x": ones(2, 4)}, False),
    "axes": ({"x": ones(2, 3)}, {"x": ones(2, 3, 1)}, False),
    "types": ({"x": ones(2, 3)}, {"x": ones(2, 3, dtype=torch.float64)}, False),
    "bool": ({"x": ones(2, dtype=torch.bool)}, {"x": ones(2, dtype=torch.uint8)}, False),
    "complex": ({"x": ones(2, dtype=torch.complex64)}, {"x": 1j * ones(2)}, True),
    "names": ({"x": ones(2)}, {"y": ones(2)}, False),
    "order": ({"x": ones(2), "y": ones(2)}, {"y": ones(2), "x": ones(2)}, False),
    "more": ({"x": ones(2)}, {"x": ones(2), "y": ones(2)}, False),
    "container": ({"x": ones(2)}, OrderedDict(x=ones(2)), False),
    "proxies": (MappingProxyType({"x": ones(2)}), MappingProxyType({"x": 2 * ones(2)}), True),
    "tuples": ((ones(2), ones(3)), [ones(2), ones(3)], False),
    "named-tuples": (Pair(ones(2), ones(3)), Pair(2 * ones(2), ones(3)), True),
    "nesting": ({"x": (ones(2), ones(2))}, {"x": (ones(2),), "y": ones(2)}, False),
    "dataclasses": (Fields(ones(2)), Fields(2 * ones(2)), True),
    "fields": (Fields(ones(2)), Fields(ones(2), scale=2.0), False),
    "numbers": ({"x": ones(2), "n": 1}, {"x": ones(2), "n": 2}, False),
    "one-and-true": ({"x": ones(2), "n": 1}, {"x": ones(2), "n": True}, False),
    "one-and-one": ({"x": ones(2), "n": 1}, {"x": ones(2), "n": 1.0}, False),
    "texts": ({"x": ones(2), "n": "a"}, {"x": ones(2), "n": "b"}, False),
    "no-number": ({"x": ones(2), "n": math.nan}, {"x": ones(2), "n": float("nan")}, True),
    "signs-of-zero": ({"x": ones(2), "n": 0.0}, {"x": ones(2), "n": -0.0}, False),
    "none": ({"x": ones(2), "n": None}, {"x": ones(2), "n": None}, True),
    "attributes": (with_attribute(Named(x=ones(2)), n=1), with_attribute(Named(x=ones(2)), n=2), False),
    "same-attributes": (with_attribute(Named(x=ones(2)), n=1), with_attribute(Named(x=ones(2)), n=1), True),
}


@pytest.mark.parametrize("case", _PAIRS)
def test_a_signature_is_equal_exactly_when_structure_kinds_and_single_values_are(case):
    first, second, is_alike = _PAIRS[case]
    signatures = signature_of(first), signature_of(second)
    assert None not in signatures
    assert (signatures[0] == signatures[1]) is is_alike
    assert not is_alike or hash(signatures[0]) == hash(signatures[1])


@pytest.mark.parametrize(
    "batch",
    [
        {"x": np.ones(2)},
        {"x": ones(2), "n": np.float64(1.0)},
        {"x": ones(2).requires_grad_()},
        {"x": ones(2, 2).to_sparse()},
        {"x": torch.nested.nested_tensor([ones(2), ones(3)], layout=torch.jagged)},
        {"x": ones(2), "n": object()},
        {"x": ones(2), "n": {1, 2}},
        {"x": with_attribute(ones(2), lengths=[1])},
        with_attribute(Named(x=ones(2)), more=[1]),
        with_attribute(Listed([ones(2)]), scale=2.0),
    ],
    ids=lambda batch: None,
)
def test_what_no_buffer_can_hold_has_no_signature(batch):
    assert signature_of(batch) is None


_SIZES = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=3)


@given(_SIZES, _SIZES)
def test_signatures_of_random_sizes_are_equal_exactly_when_the_sizes_are(first, second):
    def make(sizes):
        return {str(place): torch.zeros(size) for place, size in enumerate(sizes)}

    assert (signature_of(make(first)) == signature_of(make(second))) is (first == second)
    assert elements_of(signature_of(make(first))) == sum(rows * width for rows, width in first)


def test_elements_of_a_number_and_of_nothing_are_one_and_none():
    assert elements_of(signature_of({"x": torch.tensor(2.0), "y": ones(3, 0), "n": 7})) == 1


# Static inputs


@pytest.mark.parametrize(
    "make",
    [
        lambda x: {"x": x, "n": 3},
        lambda x: (x, [x + 1]),
        lambda x: Pair(x, x + 1),
        lambda x: Fields(x),
        lambda x: MappingProxyType({"x": x}),
        lambda x: with_attribute(Named(x=x), scale=2.0),
    ],
    ids=["dict", "tuple", "named-tuple", "dataclass", "proxy", "attributes"],
)
def test_static_inputs_take_every_value_and_keep_their_memory(make):
    x = torch.arange(6.0).reshape(2, 3)
    inputs = StaticInputs(make(x), CPU)
    place = leaf(inputs.batch).data_ptr()
    assert place != x.data_ptr()
    inputs.fill(make(10 * x))
    assert leaf(inputs.batch).data_ptr() == place
    assert leaf(inputs.batch).tolist() == (10 * x).tolist()
    assert type(inputs.batch) is type(make(x))
    assert getattr(inputs.batch, "scale", None) == getattr(make(x), "scale", None)


def leaf(batch):
    return batch.x if isinstance(batch, Pair | Fields) else batch[0] if isinstance(batch, tuple) else batch["x"]


@pytest.mark.parametrize(
    "make",
    [
        lambda x: x[:1].expand(4, 3),
        lambda x: x.reshape(3, 4).T,
        lambda x: x[:, ::2],
        lambda x: x[:0],
        lambda x: x.to(torch.complex64) * 1j,
        lambda x: torch.conj(x * (1 + 1j)),
        lambda x: x > 2,
        lambda x: x[0, 0],
    ],
    ids=["expanded", "transposed", "strided", "empty", "complex", "conjugate", "bool", "number"],
)
def test_static_inputs_are_right_for_every_layout(make):
    first, second = make(torch.arange(12.0).reshape(4, 3)), make(torch.arange(12.0).reshape(4, 3) + 5)
    inputs = StaticInputs({"x": first}, CPU)
    assert torch.equal(inputs.batch["x"], first)
    inputs.fill({"x": second})
    assert torch.equal(inputs.batch["x"], second)


def test_static_inputs_do_not_write_to_the_batch_they_were_made_of():
    x = ones(2, 3)
    StaticInputs({"x": x}, CPU).fill({"x": 7 * ones(2, 3)})
    assert x.tolist() == ones(2, 3).tolist()


# Axes


def test_one_batch_tells_the_sizes_of_another_shape_if_all_widths_differ():
    axes = Axes()
    axes.see([(8, 20), (8, 30), (8,), ()], [(8, 20, 30)])
    # Each width may follow its axis, or be fixed: 20 and 30 stay as they are only if the shape has them.
    assert axes.sizes_at((4, 20, 30), [(8, 20), (8, 30), (8,), ()]) == [(4, 20), (4, 30), (4,), ()]
    assert axes.sizes_at((4, 7, 30), [(8, 20), (8, 30), (8,), ()]) is None
    axes.see([(4, 7), (4, 9), (4,), ()], [(4, 7, 9)])
    assert axes.sizes_at((2, 5, 6), [(8, 20), (8, 30), (8,), ()]) == [(2, 5), (2, 6), (2,), ()]


def test_a_width_that_stays_is_fixed():
    axes = Axes()
    for shape in ((8, 20), (4, 7)):
        axes.see([(shape[0], shape[1], 16), (shape[0], 3)], [shape])
    assert axes.sizes_at((2, 16), [(8, 20, 16), (8, 3)]) == [(2, 16, 16), (2, 3)]


def test_two_shapes_that_fit_teach_nothing():
    axes = Axes()
    axes.see([(8, 20), (8, 30)], [(8, 20, 30), (8, 30, 20)])
    assert axes.sizes_at((4, 20, 30), [(8, 20), (8, 30)]) is None


def test_batches_with_other_fields_neither_teach_nor_ask():
    axes = Axes()
    axes.see([(8, 20)], [(8, 20)])
    axes.see([(4, 7), (4, 7)], [(4, 7)])
    assert axes.sizes_at((4, 20), [(8, 20), (8, 20)]) is None
    assert axes.sizes_at((4, 20), [(8, 20)]) == [(4, 20)]


# How each dimension of each tensor comes about: an axis of the shape, or a fixed width.
_DIMENSION = st.one_of(st.sampled_from([0, 1, 2]), st.sampled_from([("fixed", width) for width in (1, 2, 3, 4)]))
_LAYOUT = st.lists(st.lists(_DIMENSION, max_size=3), min_size=1, max_size=4)
_SHAPE = st.tuples(*[st.integers(1, 4)] * 4)


def sizes_of(layout, shape):
    return [
        (shape[0], *[one[1] if isinstance(one, tuple) else shape[one + 1] for one in dimensions])
        for dimensions in layout
    ]


@given(_LAYOUT, st.lists(_SHAPE, min_size=1, max_size=6, unique=True), _SHAPE)
def test_sizes_of_an_unseen_shape_are_right_or_not_given(layout, planned, asked):
    """A shape is told from the sizes alone, as in training: a batch teaches only where one planned shape fits it."""
    axes = Axes()
    for shape in planned:
        sizes = sizes_of(layout, shape)
        fitting = [one for one in {*planned, asked} if matches(sizes, one)]
        axes.see(sizes, fitting if shape in fitting else [])
    found = axes.sizes_at(asked, sizes_of(layout, planned[0]))
    assert found in (None, sizes_of(layout, asked))


@given(_LAYOUT, _SHAPE, _SHAPE)
def test_a_batch_of_other_sizes_is_made_of_rows_and_columns_of_the_first(layout, shape, asked):
    first = [torch.arange(math.prod(size)).reshape(size) for size in sizes_of(layout, shape)]
    made = resized(first, sizes_of(layout, asked))
    assert [tuple(one.shape) for one in made] == sizes_of(layout, asked)
    for one, source in zip(made, first, strict=True):
        for place in np.ndindex(*one.shape):
            origin = tuple(index % size for index, size in zip(place, source.shape, strict=True))
            assert one[place] == source[origin]


def test_a_batch_of_its_own_sizes_keeps_everything_else():
    batch = {"x": ones(2, 3), "n": 7}
    made = resized(batch, [(4, 3)])
    assert (made["x"].shape, made["n"]) == ((4, 3), 7)
