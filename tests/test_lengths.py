"""The checks every length array passes; what is refused is in test_bad_input.py."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright._checks import as_whole
from batchwright._lengths import as_lengths, pad_up
from batchwright.errors import ArgumentError


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


@given(st.integers(1, 10_000), st.integers(1, 300))
def test_padding_up_gives_the_next_multiple(length, multiple):
    padded = int(pad_up(np.array([length]), multiple)[0])
    assert padded % multiple == 0
    assert length <= padded < length + multiple


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), np.array(3)])
def test_a_whole_number_may_come_from_numpy(value):
    whole = as_whole("seed", value, least=0)
    assert whole == 3
    assert type(whole) is int  # a state holds it as JSON


@pytest.mark.parametrize("value", [-1, True, 3.0, "3", None, np.float64(3), np.array([3])])
def test_anything_else_is_no_whole_number(value):
    with pytest.raises(ArgumentError, match="seed must be a whole number of 0 or more, got"):
        as_whole("seed", value, least=0)
