"""How long offline work may take between requests: by hand, and what holds for all."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.serve._engine.gaps import (
    LEAST_BOLDNESS,
    Gaps,
    GapSettings,
    Sample,
    Slacks,
    expected_late,
    longest_part,
    next_boldness,
    slacks_of,
)

ONE = GapSettings(late_share=0.0, share_of_late=0.0)  # one late request, however many there are


def filled(slacks, **settings):
    gaps = Gaps(GapSettings(**settings))
    for place, slack in enumerate(slacks):
        gaps.note_arrival(float(place))
        gaps.note_request(allowance=1.0, slack=slack, now=float(place))
    return gaps


def test_a_part_is_as_long_as_makes_one_request_late_by_expectation():
    # Of a part of 0.6 s, the first 0.4 and 0.2 s make the two late that have 0.2 and 0.4 s left: 2/3 + 1/3 = 1.
    assert longest_part(0.9, Slacks.of([0.2, 0.4, 0.8]), ONE) == pytest.approx(0.6)


def test_half_the_boldness_allows_half_of_that():
    # 1 - 0.2/0.4 = 0.5: the second, with 0.4 s left, is just not late.
    assert longest_part(0.9, Slacks.of([0.2, 0.4, 0.8]), ONE, boldness=0.5) == pytest.approx(0.4)


def test_more_requests_allow_more_to_be_late():
    settings = GapSettings(late_share=0.01, share_of_late=0.0)
    slacks = [0.1, 0.2, 0.3] + [0.9] * 197  # two of 200: t = (0.1 + 0.2 + 0.3) / (3 - 2)
    assert longest_part(0.8, Slacks.of(slacks), settings) == pytest.approx(0.6)


def test_those_that_are_late_in_any_case_do_not_make_parts_shorter():
    assert longest_part(0.9, Slacks.of([-1.0] * 9 + [0.0]), ONE) == 0.9
    # And a tenth as many more may be late: two, of twenty.
    settings = GapSettings(late_share=0.0, share_of_late=0.1)
    assert longest_part(0.9, Slacks.of([-1.0] * 20 + [0.1, 0.2, 0.3]), settings) == pytest.approx(0.6)


def test_without_requests_a_part_takes_all_that_it_may():
    assert Gaps().longest_part(0.25) == 0.25
    assert Gaps().expected_late(0.25, now=1.0) == 0.0


def test_a_long_item_makes_late_who_arrives_early_in_it_and_who_queues_behind():
    # 0.8 and 0.6 s of one second, of four requests, at two per second; half of the time is taken: twice as many.
    slacks = Slacks.of([0.2, 0.4, 3.0, math.inf])
    assert expected_late(1.0, slacks, rate=2.0, busy=0.0) == pytest.approx(0.7)
    assert expected_late(1.0, slacks, rate=2.0, busy=0.5) == pytest.approx(1.4)
    assert expected_late(1.0, slacks, rate=2.0, busy=7.0) == pytest.approx(7.0)  # no more than ten times


def test_a_long_item_waits_until_enough_is_saved_and_then_the_next_one():
    gaps = Gaps(GapSettings(long_share=0.25))
    assert gaps.may_spend(0.0)  # what makes nobody late never waits
    for _ in range(3):
        gaps.note_arrival(0.0)
    assert not gaps.may_spend(1.0)
    gaps.note_arrival(0.0)
    assert gaps.may_spend(1.0)
    assert not gaps.may_spend(0.25)


def test_a_quiet_hour_pays_for_one_costly_item_and_not_for_many():
    gaps = Gaps(GapSettings(long_share=0.25))
    for _ in range(400):
        gaps.note_arrival(0.0)
    assert gaps.may_spend(50.0)
    assert gaps.saved == 1.0


def test_a_silence_makes_long_items_free():
    gaps = filled([0.1] * 64)
    busy, silent = (gaps.expected_late(0.9, now) for now in (63.0, 6_300.0))
    assert silent == pytest.approx(busy / 100)


def test_one_outlier_does_not_decide_and_two_are_forgotten():
    gaps = filled([0.5] * 400 + [0.001], num_requests=500)
    assert gaps.longest_part(0.3) == 0.3
    for _ in range(40):
        gaps.note_request(1.0, 0.001, now=401.0)
    assert gaps.longest_part(0.3) < 0.002
    for _ in range(500):
        gaps.note_request(1.0, 0.5, now=402.0)
    assert gaps.longest_part(0.3) == 0.3


def test_what_ended_long_ago_no_longer_counts():
    gaps = filled([0.001] * 40)
    assert gaps.longest_part(0.3) < 0.002
    for place in range(40):
        gaps.note_request(1.0, 0.5, now=2_000.0 + place)
    assert gaps.longest_part(0.3) == 0.3


def test_a_part_that_took_longer_leaves_less_for_the_next():
    # Twice as long as expected: a request that had 0.2 s left could have waited for 0.1 predicted ones.
    gaps = Gaps(GapSettings(late_share=0.0))
    gaps.note_part(2.0)
    gaps.note_request(1.0, 0.2, now=0.0)
    gaps.note_request(1.0, 0.4, now=0.0)
    gaps._slowness = 1.0  # the machine is fast again
    assert gaps.longest_part(0.9) == pytest.approx(0.3)


def test_while_the_machine_is_slow_parts_are_shorter_and_then_as_before():
    gaps = filled([0.6] * 8)
    before = gaps.longest_part(0.9)
    for _ in range(8):
        gaps.note_batch(0.1, ratio=2.0)
    # Twice as slow: 1 s allowed is 0.5 s of work, of which these requests need 0.4.
    assert gaps.longest_part(0.9) < 0.3 * before
    for _ in range(16):
        gaps.note_batch(0.1, ratio=1.0)
    assert gaps.longest_part(0.9) == pytest.approx(before, rel=0.3)


def test_boldness_rests_where_as_many_are_late_as_may_be():
    settings = GapSettings(found_share=0.01)
    boldness = 0.5
    for place in range(501):  # one in a hundred
        boldness = next_boldness(boldness, settings, is_late=False)
        if place % 100 == 99:
            boldness = next_boldness(boldness, settings, is_late=True)
    assert boldness == pytest.approx(0.5, rel=0.01)


def test_boldness_never_ends_and_comes_back():
    boldness = 1.0
    for _ in range(100):
        boldness = next_boldness(boldness, GapSettings(), is_late=True)
    assert boldness == LEAST_BOLDNESS
    for _ in range(40_000):
        boldness = next_boldness(boldness, GapSettings(), is_late=False)
    assert boldness == 1.0


seconds = st.floats(1e-4, 10.0)
slack_lists = st.lists(st.floats(-5.0, 10.0), max_size=60)


@given(seconds, slack_lists, st.floats(LEAST_BOLDNESS, 1.0), st.floats(0.0, 0.2))
def test_the_longest_part_makes_few_enough_late_and_a_longer_one_too_many(most, values, boldness, share):
    settings, slacks = GapSettings(late_share=share), Slacks.of(values)
    found = longest_part(most, slacks, settings, boldness=boldness)
    allowed = boldness * settings.allowed(slacks.num, slacks.num_late)

    def num_late(part):
        return sum(max(0.0, 1 - slack / part) for slack in values if slack > 0)

    assert 0 <= found <= most
    assert found == 0 or num_late(found) <= allowed + 1e-6
    assert found == most or num_late(1.001 * found) >= allowed - 1e-6


@given(seconds, slack_lists, st.floats(LEAST_BOLDNESS, 1.0), st.floats(0.0, 1.0))
def test_more_slack_and_more_boldness_never_make_parts_shorter(most, values, boldness, more):
    slacks = Slacks.of(values)
    found = longest_part(most, slacks, ONE, boldness=boldness)
    assert longest_part(most, slacks, ONE, boldness=min(1.0, boldness + more)) >= found * (1 - 1e-9)
    roomier = Slacks.of([value + more if value > 0 else value for value in values])
    assert longest_part(most, roomier, ONE, boldness=boldness) >= found * (1 - 1e-9)


@given(seconds, seconds, slack_lists, st.floats(0.0, 1.0))
def test_a_longer_item_never_costs_less(first, second, values, busy):
    short, long = sorted((first, second))
    slacks = Slacks.of(values)
    costs = [expected_late(item, slacks, rate=5.0, busy=busy) for item in (short, long)]
    assert 0 <= costs[0] <= costs[1] + 1e-9


@given(st.floats(0.01, 10.0), st.floats(0.0, 20.0), st.floats(1.0, 3.0), st.floats(1.0, 3.0), st.floats(1.0, 3.0))
def test_a_slower_machine_never_leaves_more_slack(allowance, need, ratio, first, second):
    slow, slower = (
        slacks_of([Sample(0.0, allowance, need, ratio)], slowness, GapSettings()).ordered.sum()
        for slowness in sorted((first, second))
    )
    assert slower <= slow
