"""The checks every array of lengths or shapes passes; what as_lengths refuses is in plan/test_bad_input.py."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchwright._lengths import as_lengths, as_shapes, pad_up
from batchwright.errors import ArgumentError, LengthsError

pd, pa = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([np.int64(3), np.uint64(5)], [[3], [5]]),
        ([(np.uint64(3), 5), (np.int8(1), np.int64(2))], [[3, 5], [1, 2]]),
        ([np.array([3], dtype=np.int64), np.array([5], dtype=np.uint64)], [[3], [5]]),
    ],
    ids=["numbers", "pairs", "arrays"],
)
def test_whole_numbers_of_mixed_kinds_are_lengths(lengths, expected):
    assert as_lengths(lengths).tolist() == expected


def test_a_float_among_whole_numbers_is_no_length():
    with pytest.raises(LengthsError, match="lengths must be integers, got float64"):
        as_lengths([np.int64(3), np.uint64(5), np.float32(2)])


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
def test_any_integer_type_becomes_32_bits(dtype):
    lengths = as_lengths(np.array([3, 100], dtype=dtype))
    assert lengths.dtype == np.int32
    assert lengths.tolist() == [[3], [100]]


def test_several_axes_stay_columns_and_become_contiguous():
    pairs = np.array([[1, 2, 3], [4, 5, 6]]).T
    assert as_lengths(pairs).tolist() == [[1, 4], [2, 5], [3, 6]]
    assert as_lengths(pairs).flags.c_contiguous


def test_the_longest_allowed_length_is_kept():
    assert as_lengths([2**31 - 1]).tolist() == [[2**31 - 1]]


@pytest.mark.parametrize(
    "lengths",
    [
        np.array([3, 100], dtype=object),
        np.ma.array([3, 100], mask=[0, 0]),
        pd.Series([3, 100], dtype="Int64"),
        pa.chunked_array([[3], [100]]),
        torch.tensor([3, 100]),
        [torch.tensor(3), torch.tensor(100)],
    ],
    ids=["objects", "nothing masked", "pandas", "pyarrow", "tensor", "tensors"],
)
def test_lengths_come_in_many_kinds(lengths):
    assert as_lengths(lengths).tolist() == [[3], [100]]
    assert as_lengths(lengths).dtype == np.int32


@pytest.mark.needs_cuda
def test_a_tensor_is_copied_from_its_device():
    assert as_lengths(torch.tensor([3, 100], device="cuda")).tolist() == [[3], [100]]


@given(st.integers(1, 10_000), st.integers(1, 300))
def test_padding_up_gives_the_next_multiple(length, multiple):
    padded = int(pad_up(np.array([length]), multiple)[0])
    assert padded % multiple == 0
    assert length <= padded < length + multiple


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.uint64])
def test_shapes_of_any_integer_type_become_64_bits(dtype):
    shapes = as_shapes(np.array([[8, 128], [200, 1]], dtype=dtype))
    assert shapes.dtype == np.int64
    assert shapes.tolist() == [[8, 128], [200, 1]]


def test_shapes_are_a_copy_and_may_be_none_at_all():
    given = np.array([[8, 128]])
    as_shapes(given)[0, 0] = 1
    assert given.tolist() == [[8, 128]]
    assert as_shapes(np.empty((0, 3), dtype=np.int64), num_axes=2).shape == (0, 3)


@pytest.mark.parametrize(
    ("shapes", "options", "words"),
    [
        ([[8, 128], [8]], {}, r"must form an array of shape \(M, 1 \+ axes\)"),
        ([8, 128], {}, r"must have shape \(M, 1 \+ axes\), got \(2,\); give one row"),
        ([[8], [4]], {}, r"got \(2, 1\)"),
        ([[8, 128]], {"num_axes": 2}, "the model has 2 length axes, got shapes with 1"),
        ([[8, 128.0]], {}, "must be integers, got float64"),
        ([["8", "128"]], {}, "must be integers, got texts; convert them"),
        ([[True, True]], {}, "must be integers, got bool"),
        (np.array([[8, 128]], dtype="timedelta64[s]"), {}, r"got timedelta64\[s\]; choose a unit"),
        (np.ma.array([[8, 128]], mask=[[0, 1]]), {}, "shapes is masked in 1 of 1 examples, first in example 0"),
        ([[8, 128], [4, 0]], {}, r"must be 1 or more, got \[4, 0\] in row 1"),
    ],
)
def test_what_is_not_a_shape_is_refused(shapes, options, words):
    with pytest.raises(ArgumentError, match=words):
        as_shapes(shapes, **options)
