"""Numbers: what settings are refused, powers that cannot overflow, and how numbers are shown."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright._checks import as_number, as_whole
from batchwright.errors import ArgumentError
from batchwright.size.policy import LARGEST, as_size, grow, show


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_whole_numbers_become_plain_ones(value):
    assert type(as_whole("n", value, least=1)) is int


@pytest.mark.parametrize("value", [0, 3.0, True, None, "3", np.float64(3)])
def test_what_is_not_whole_or_too_small_is_refused(value):
    with pytest.raises(ArgumentError, match="n must be a whole number of 1 or more, got"):
        as_whole("n", value, least=1)


@pytest.mark.parametrize("value", [3, 3.0, np.float32(3), np.int8(3), Fraction(3)])
def test_real_numbers_become_plain_floats(value):
    assert type(as_number("x", value)) is float
    assert as_number("x", value) == 3


@pytest.mark.parametrize("value", [math.nan, math.inf, 10**400, True, None, "3", 1j, [3]])
def test_what_is_no_finite_number_is_refused(value):
    with pytest.raises(ArgumentError, match="x must be a number, got"):
        as_number("x", value)


def test_a_limit_may_be_reached_or_not():
    assert as_number("x", 1, least=1) == 1
    with pytest.raises(ArgumentError, match="above 1, got 1"):
        as_number("x", 1, above=1)


@pytest.mark.parametrize(
    ("answer", "size"),
    [(64, 64), (-math.inf, -LARGEST), (10**400, LARGEST), (-(10**400), -LARGEST), (np.float32(2), 2)],
)
def test_an_answer_is_kept_finite(answer, size):
    assert as_size(answer) == size


@pytest.mark.parametrize("answer", [None, "64", b"64", True, 1j, [1, 2], math.nan])
def test_an_answer_that_is_no_number_is_nan(answer):
    assert math.isnan(as_size(answer))


@given(
    base=st.floats(1, 1e300),
    factor=st.floats(1e-300, 1e300, allow_subnormal=False),
    exponent=st.integers(-(10**30), 10**30),
)
def test_a_power_is_never_infinite_nor_nan(base, factor, exponent):
    assert 0 <= grow(base, factor, exponent) <= LARGEST


@given(base=st.floats(1, 1e6), factor=st.floats(0.5, 2), exponent=st.integers(0, 30))
def test_a_power_within_range_is_the_plain_one(base, factor, exponent):
    assert grow(base, factor, exponent) == base * factor**exponent


@pytest.mark.parametrize(
    ("value", "text"),
    [(64.0, "64"), (0.1, "0.1"), (1 / 3, "0.3333"), (123456.789, "123456.8"), (1e6, "1000000"), (math.nan, "nan")],
)
def test_numbers_are_shown_short(value, text):
    assert show(value) == text
