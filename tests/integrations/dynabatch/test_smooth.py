"""Growth by steps: never frozen, never over what fits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.integrations.dynabatch._smooth import Sizes, growth_step
from batchwright.plan.grouping.base import SizeRounding

ROUNDINGS = [SizeRounding(), SizeRounding(2), SizeRounding(ladder="pow2x3"), SizeRounding(2, "pow2x3")]


@pytest.mark.parametrize(
    ("batch_size", "share", "rounding", "step"),
    [(32, 0.2, ROUNDINGS[0], 6), (4, 0.2, ROUNDINGS[0], 1), (4, 0.2, ROUNDINGS[1], 2), (4, 0.2, ROUNDINGS[3], 1)],
)
def test_the_step_is_a_share_of_the_batch_size_and_never_nothing(batch_size, share, rounding, step):
    assert growth_step(batch_size, share, rounding) == step


def test_without_a_step_a_batch_grows_at_once():
    sizes = Sizes(4, None, SizeRounding())
    assert [sizes.next(most) for most in (9, 3, 100)] == [9, 3, 100]


@pytest.mark.parametrize("rounding", ROUNDINGS[:2])
@given(st.integers(1, 60), st.floats(0, 1), st.lists(st.integers(1, 200), max_size=30))
def test_a_batch_is_at_most_a_step_larger_than_the_last(rounding, first, share, mosts):
    step = growth_step(first, share, rounding)
    sizes, last = Sizes(first, step, rounding), first
    for most in mosts:
        size = sizes.next(most)
        assert 1 <= size <= min(most, last + step)
        last = size


@pytest.mark.parametrize("rounding", ROUNDINGS)
@given(st.integers(1, 40), st.integers(1, 8), st.floats(0, 1))
def test_what_fits_is_reached_in_the_end(rounding, first, times, share):
    most = first * times
    sizes = Sizes(first, growth_step(first, share, rounding), rounding)
    assert [sizes.next(most) for _ in range(most + 1)][-1] == rounding.round_one(most)
