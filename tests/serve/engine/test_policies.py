"""pick: what each policy runs, gives up and waits for; and the cheapest cut, as good as trying all."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.serve import LatencyModel
from batchwright.serve._engine.policies import MAX_CUTS, MAX_PASSED_OVER, pick, split
from batchwright.serve._engine.request import Request
from batchwright.serve.settings import POLICIES, Settings

from ..tools import items_of, make_requests

# 4 ms a call and 4 us a padded token; a single item of 250 tokens takes 5 ms.
MODEL = LatencyModel.fixed(0.004, 4e-6)


def test_the_window_waits_from_the_first_request_on():
    queue = make_requests([5, 5], gap_seconds=0.003)
    decision = pick(queue, 0.004, MODEL, Settings(policy="window", max_wait_ms=10))
    assert decision.batch == []
    assert decision.wake_seconds == pytest.approx(0.006)


def test_the_window_closes_after_its_time_with_all_that_came():
    queue = make_requests([5, 500, 5], gap_seconds=0.003)
    decision = pick(queue, 0.010, MODEL, Settings(policy="window", max_wait_ms=10))
    assert items_of(decision.batch) == [0, 1, 2]
    assert decision.reason == "window"


def test_a_full_window_has_nothing_to_wait_for():
    queue = make_requests([5] * 5)
    decision = pick(queue, 0.005, MODEL, Settings(policy="window", max_items=4))
    assert items_of(decision.batch) == [0, 1, 2, 3]
    assert decision.reason == "full"


def test_greedy_sends_what_waits_in_order():
    queue = make_requests([9, 300, 7])
    decision = pick(queue, 0.003, MODEL, Settings(policy="greedy"))
    assert items_of(decision.batch) == [0, 1, 2]


def test_greedy_stops_before_the_first_that_does_not_fit_and_passes_nothing_over():
    queue = make_requests([10, 10, 100, 10])
    decision = pick(queue, 0.005, MODEL, Settings(policy="greedy", max_tokens=200))
    assert items_of(decision.batch) == [0, 1]  # three of 100 are 300 tokens


def test_adaptive_never_waits():
    decision = pick(make_requests([5]), 0.0, MODEL, Settings(max_wait_ms=10))
    assert items_of(decision.batch) == [0]


def test_adaptive_keeps_long_and_short_apart_where_that_is_cheaper():
    # Together 20 × 500 × 4 us = 40 ms and 4 ms; apart 19 × 10 × 4 us and 1 × 500 × 4 us, and twice 4 ms.
    queue = make_requests([10] * 10 + [500] + [10] * 9)
    decision = pick(queue, 0.02, MODEL, Settings())
    assert sorted(items_of(decision.batch)) == [*range(10), *range(11, 20)]


def test_adaptive_keeps_them_together_where_the_call_costs_more():
    queue = make_requests([10, 60])
    # Together 4 ms + 2 × 60 × 4 us; apart twice 4 ms.
    assert len(pick(queue, 0.002, MODEL, Settings()).batch) == 2


def test_adaptive_sends_the_batch_of_the_most_urgent_request():
    queue = make_requests([500] + [10] * 19)
    assert items_of(pick(queue, 0.02, MODEL, Settings()).batch) == [0]


def test_a_request_that_could_not_finish_alone_is_given_up():
    queue = make_requests([250, 250], gap_seconds=0.040, deadline_seconds=0.050)
    # At 46 ms the first has 4 ms left and would take 5; the second has 44.
    decision = pick(queue, 0.046, MODEL, Settings())
    assert (items_of(decision.shed), items_of(decision.batch)) == ([0], [1])


def test_a_request_that_could_finish_alone_is_not_given_up():
    queue = make_requests([250], deadline_seconds=0.050)
    assert pick(queue, 0.0449, MODEL, Settings()).shed == []


def test_a_model_that_has_seen_nothing_gives_up_only_what_is_past_its_deadline():
    queue = make_requests([250, 250], gap_seconds=0.010, deadline_seconds=0.050)
    decision = pick(queue, 0.0505, LatencyModel(), Settings())
    assert (items_of(decision.shed), items_of(decision.batch)) == ([0], [1])


@pytest.mark.parametrize("policy", ["greedy", "window"])
def test_every_policy_gives_up_what_is_past_its_deadline(policy):
    queue = make_requests([5, 5], gap_seconds=0.020, deadline_seconds=0.050)
    decision = pick(queue, 0.060, MODEL, Settings(policy=policy))
    assert (items_of(decision.shed), items_of(decision.batch)) == ([0], [1])


def test_a_batch_takes_at_most_half_of_what_its_urgent_request_is_allowed():
    # 25 ms of 50: 4 ms for the call, 21 ms for items of 1 ms each.
    queue = make_requests([250] * 40, gap_seconds=0.0, deadline_seconds=0.050)
    assert len(pick(queue, 0.0, MODEL, Settings()).batch) <= 21
    assert len(pick(make_requests([250] * 40), 0.0, MODEL, Settings()).batch) == 40


def test_a_deadline_below_the_cost_of_a_call_does_not_end_batching():
    # Half of 6 ms is less than one call takes; then a batch may take two calls' time: 4 items of 1 ms.
    queue = make_requests([250] * 40, gap_seconds=0.0, deadline_seconds=0.006)
    assert len(pick(queue, 0.0, MODEL, Settings()).batch) == 4


def rescue_case():
    """One long request that takes 14 ms of the 16 it has, and 20 short ones with 20 ms left: not both in time."""
    long = Request("long", 2500, 0.0, 0.016)
    return long, [long, *(Request(index, 10, 0.0, 0.017) for index in range(20))]


def test_another_batch_goes_first_if_more_requests_are_then_in_time():
    long, queue = rescue_case()
    decision = pick(queue, 0.0, MODEL, Settings())
    assert (decision.reason, decision.passed) == ("rescue", long)
    assert "long" not in items_of(decision.batch)


def test_the_same_request_is_not_passed_over_for_ever():
    long, queue = rescue_case()
    long.passed_over = MAX_PASSED_OVER
    decision = pick(queue, 0.0, MODEL, Settings())
    assert items_of(decision.batch) == ["long"]


def test_the_most_urgent_goes_first_if_that_costs_nobody_the_deadline():
    queue = [Request("long", 2500, 0.0, 0.1), *(Request(index, 10, 0.0, 0.2) for index in range(20))]
    assert items_of(pick(queue, 0.0, MODEL, Settings()).batch) == ["long"]


def test_a_higher_priority_goes_before_an_earlier_request():
    queue = [Request("early", 10, 0.0), Request("urgent", 500, 0.1, priority=3)]
    # 1 s of patience, and 0.1 + 1 / 8 s.
    settings = Settings(max_items=1)
    assert items_of(pick(queue, 0.2, MODEL, settings).batch) == ["urgent"]


def test_a_request_of_low_priority_is_overtaken_only_by_what_comes_within_its_patience():
    low = Request("low", 10, 0.0, priority=-1)  # 2 s of patience
    settings = Settings(max_items=1)
    assert items_of(pick([low, Request("soon", 10, 0.9)], 3.0, MODEL, settings).batch) == ["soon"]
    assert items_of(pick([low, Request("late", 10, 1.1)], 3.0, MODEL, settings).batch) == ["low"]


lengths = st.lists(st.integers(1, 600), min_size=1, max_size=80)


@given(lengths, st.sampled_from(POLICIES), st.integers(1, 64), st.one_of(st.none(), st.integers(600, 5000)))
def test_a_batch_keeps_the_limits_and_nothing_is_in_two_places(values, policy, max_items, max_tokens):
    queue = make_requests(values, deadline_seconds=0.060)
    decision = pick(queue, 0.07, MODEL, Settings(policy=policy, max_items=max_items, max_tokens=max_tokens))
    batch, shed = set(items_of(decision.batch)), set(items_of(decision.shed))
    assert not batch & shed
    assert len(batch) == len(decision.batch) <= max_items
    assert batch or len(shed) == len(queue) or decision.wake_seconds > 0
    if batch and max_tokens is not None:
        assert len(batch) * max(values[item] for item in batch) <= max_tokens


@given(lengths, st.randoms())
def test_the_order_of_the_queue_does_not_matter(values, rng):
    queue = make_requests(values, deadline_seconds=0.060)
    shuffled = rng.sample(queue, len(queue))
    first, second = (pick(order, 0.05, MODEL, Settings()) for order in (queue, shuffled))
    assert items_of(first.batch) == items_of(second.batch)
    assert set(items_of(first.shed)) == set(items_of(second.shed))


@given(lengths)
def test_without_deadlines_the_most_urgent_request_is_in_every_batch(values):
    queue = make_requests(values)
    for _ in itertools.count():
        batch = pick(queue, 1.0, MODEL, Settings(max_items=8)).batch
        assert queue[0] in batch
        queue = [request for request in queue if request not in batch]
        if not queue:
            break


def total(constant, per_item, batches):
    return sum(constant + (stop - start) * per_item[stop - 1] for start, stop in batches)


def all_cuts(count, limits):
    for cuts in itertools.product([False, True], repeat=count - 1):
        places = [0, *(index for index, cut in enumerate(cuts, start=1) if cut), count]
        batches = list(itertools.pairwise(places))
        if all(stop - start <= limits[stop - 1] for start, stop in batches):
            yield batches


sorted_lengths = st.lists(st.integers(1, 50), min_size=1, max_size=9).map(sorted)


@given(sorted_lengths, st.integers(0, 60), st.integers(1, 100))
def test_no_other_cut_is_cheaper(per_item, constant, tokens):
    limits = [max(1, min(4, tokens // each)) for each in per_item]
    found = split(float(constant), per_item, limits)
    assert all(stop - start <= limits[stop - 1] for start, stop in found)
    best = min(total(constant, per_item, cut) for cut in all_cuts(len(per_item), limits))
    assert total(constant, per_item, found) == pytest.approx(best)


@given(st.lists(st.integers(1, 500), min_size=1, max_size=300).map(sorted), st.integers(1, 2000))
def test_many_requests_are_all_in_one_batch_each_within_the_limits(per_item, tokens):
    limits = [max(1, min(64, tokens // each)) for each in per_item]
    found = split(100.0, per_item, limits)
    assert [start for start, _ in found] == [0, *(stop for _, stop in found[:-1])]
    assert found[-1][1] == len(per_item)
    assert all(0 < stop - start <= limits[stop - 1] for start, stop in found)


def test_a_call_that_seems_to_cost_nothing_is_still_made_once_for_as_many_as_fit():
    assert split(0.0, [5.0] * 8, [4] * 8) == [(0, 4), (4, 8)]
    assert split(0.0, [5.0] * 9, [4] * 9) == [(0, 4), (4, 8), (8, 9)]


def test_many_requests_of_which_only_one_fits_a_batch_go_alone():
    found = split(1.0, [5.0] * 100, [1] * 100)
    assert found == [(index, index + 1) for index in range(100)]


def test_a_coarse_cut_of_many_costs_little_more_than_an_exact_one(monkeypatch):
    per_item = [0.1 * 1.02**index for index in range(256)]
    coarse = split(10.0, per_item, [64] * 256)
    monkeypatch.setattr("batchwright.serve._engine.policies.MAX_CUTS", 256)
    exact = split(10.0, per_item, [64] * 256)
    assert MAX_CUTS < 256
    assert total(10.0, per_item, coarse) <= 1.03 * total(10.0, per_item, exact)


def test_of_equal_cuts_the_one_whose_first_batches_are_full_is_taken():
    # 20 items of one length in batches of 8: the rest of 4 is left for those who come last, and may still be joined.
    assert split(4.0, [1.0] * 20, [8] * 20) == [(0, 8), (8, 16), (16, 20)]
