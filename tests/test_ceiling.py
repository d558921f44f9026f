"""Ceiling: the rule under every limit that learns what fits."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright._ceiling import Ceiling


def test_a_failure_lowers_the_limit_at_once_and_never_raises_it():
    assert Ceiling().fall(32, failed_at=64) == Ceiling(32, 64, 0)
    assert Ceiling(16, 40, 9).fall(32, failed_at=64) == Ceiling(16, 64, 0)


def test_growth_stops_below_the_failure_that_is_remembered():
    ceiling = Ceiling(32, 64)
    assert ceiling.rise(100).limit == 64
    assert ceiling.rise(100, share=0.95).limit == 60.8
    assert ceiling.rise(100, share=math.inf).limit == 100
    assert Ceiling(61, 64).rise(100, share=0.95).limit == 61  # it never falls


def test_a_failure_is_forgotten_after_enough_successes():
    ceiling = Ceiling(32, 64)
    for _ in range(2):
        ceiling = ceiling.count(forget_after=3)
    assert ceiling == Ceiling(32, 64, 2)
    assert ceiling.count(forget_after=3) == Ceiling(32)


def test_a_success_that_is_not_clean_starts_the_count_anew():
    ceiling = Ceiling(32, 64, 2)
    assert ceiling.count(forget_after=3, clean=False) == Ceiling(32, 64, 0)
    assert Ceiling(32).count(forget_after=3, clean=False) == Ceiling(32)


def test_a_limit_that_could_not_fall_below_the_failure_is_not_held_by_it():
    ceiling = Ceiling(8).fall(8, failed_at=8)
    assert not ceiling.blocks(16)
    assert ceiling.rise(16).limit == 16


def test_what_reaches_the_failure_is_blocked():
    ceiling = Ceiling(32, 64)
    assert [ceiling.blocks(cost) for cost in (33, 63, 64, 100)] == [False, False, True, True]


@pytest.mark.parametrize(("recount", "num_clean"), [(False, 5), (True, 0)])
def test_successes_are_counted_anew_where_that_is_wanted(recount, num_clean):
    assert Ceiling(32, 64, 5).rise(40, recount=recount).num_clean == num_clean
    assert Ceiling(32, 64, 5).rise(30, recount=recount).num_clean == 5


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 1000)), max_size=50))
def test_whatever_happens_the_limit_stays_below_the_failure(events):
    ceiling = Ceiling(500)
    for failed, cost in events:
        if failed:
            ceiling = ceiling.fall(min(cost, ceiling.limit) / 2, failed_at=cost)
        else:
            ceiling = ceiling.count(forget_after=10).rise(cost, share=0.95)
        assert ceiling.limit < ceiling.failed_at
