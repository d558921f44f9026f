"""Admission: who cannot be in time is told at once, and nobody else is."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import DeadlineExceeded
from batchwright.serve import LatencyModel, Settings
from batchwright.serve._engine.calls import Outcome
from batchwright.serve._engine.core import Core
from batchwright.serve._engine.request import Request, State
from batchwright.serve._engine.waiting import NUM_CLASSES, Backlog, Sums, length_class
from batchwright.serve.settings import MAX_LENGTH

ALLOWED = 0.05


def device_seconds(num, length):
    return 0.004 + 0.00025 * num * length / 64


def serve(rate, *, num_requests=6000, seed=0, model=None, vary=lambda rng: rng.uniform(1, 1.04), constant=False):
    """Serve random requests with one worker; return the share in time, and how long the others waited to hear."""
    rng, core = random.Random(seed), Core(Settings(deadline_ms=50), model or LatencyModel())
    for length in (8, 16, 32, 64, 128) * 2:
        core.model.observe(1, length, device_seconds(1, length))
    requests, at = [], 0.0
    for number in range(num_requests):
        at += rng.expovariate(rate)
        length = 43 if constant else max(1, min(512, int(rng.lognormvariate(3.47, 0.8))))
        requests.append(Request(number, length, at, at + ALLOWED))
    upcoming, ends, now = iter([*requests, None]), {}, 0.0
    following = next(upcoming)

    def arrive(until):
        nonlocal following
        while following is not None and following.arrival <= until:
            try:
                core.add(following)
            except DeadlineExceeded:
                ends[following] = following.arrival
            following = next(upcoming)

    while following is not None or core.num_waiting:
        arrive(now)
        turn = core.take(now)
        ends |= dict.fromkeys(turn.ended, now)
        if turn.call is None:
            now = now if core.num_waiting else max(now, following.arrival if following else now)
            continue
        batch = turn.call.requests
        seconds = device_seconds(len(batch), max(request.length for request in batch)) * vary(rng)
        now += seconds
        arrive(now)
        ends |= dict.fromkeys(core.complete(turn.call, Outcome(values=batch), now, seconds).ended, now)
    counted = requests[len(requests) // 5 :]
    in_time = [one for one in counted if one.state is State.ANSWERED and ends[one] <= one.deadline]
    refused = [ends[one] - one.arrival for one in counted if one.state is not State.ANSWERED]
    return len(in_time) / len(counted), refused


@pytest.mark.parametrize(("rate", "least"), [(200, 1.0), (1000, 0.998), (2000, 0.97), (3000, 0.87), (5000, 0.68)])
def test_as_many_are_in_time_as_the_device_can_serve(rate, least):
    assert serve(rate)[0] >= least


@pytest.mark.parametrize("rate", [2000, 2500, 3000, 5000, 10_000])
def test_those_refused_hear_of_it_in_a_fifth_of_the_deadline(rate):
    _, refused = serve(rate, num_requests=8000)
    assert statistics.median(refused) <= ALLOWED / 5


@pytest.mark.parametrize(("rate", "least"), [(2000, 0.92), (3000, 0.82), (5000, 0.65)])
def test_a_device_whose_times_vary_by_a_quarter_changes_little(rate, least):
    share, refused = serve(rate, vary=lambda rng: rng.lognormvariate(0.1, 0.25))
    assert share >= least
    assert statistics.median(refused) <= ALLOWED / 5


@pytest.mark.parametrize(("rate", "least"), [(3000, 1.0), (5000, 0.78), (10_000, 0.39)])
def test_items_of_one_length_are_served_at_nine_tenths_of_what_full_batches_allow(rate, least):
    # 64 items of length 43 take 14.75 ms, with 2 % for the device: 4,250 per second.
    share, refused = serve(rate, constant=True, num_requests=8000)
    assert share >= least
    assert not refused or statistics.median(refused) <= ALLOWED / 5


@pytest.mark.parametrize("factor", [0.7, 1.3])
def test_a_model_that_is_wrong_and_does_not_learn_costs_little(factor):
    share, refused = serve(3000, model=LatencyModel.fixed(factor * 0.004, factor * 0.00025 / 64))
    assert share >= 0.85
    assert statistics.median(refused) <= ALLOWED / 5


def test_a_length_has_one_class_and_longer_ones_no_lower_one():
    classes = [length_class(length) for length in range(1, 5000)]
    assert classes == sorted(classes)
    assert 0 <= length_class(1) < length_class(MAX_LENGTH) < NUM_CLASSES


@given(st.lists(st.integers(1, 10_000), max_size=50), st.integers(1, 10_000))
def test_sums_below_a_class_are_those_of_the_shorter_requests(lengths, length):
    sums = Sums()
    for one in [*lengths, *lengths]:
        sums.add(one)
    for one in lengths:
        sums.remove([one])
    shorter = [one for one in lengths if length_class(one) < length_class(length)]
    assert sums.below(length_class(length)) == (len(shorter), sum(shorter), sum(one * one for one in shorter))
    assert (sums.num, sums.tokens, sums.squares) == (len(lengths), sum(lengths), sum(one * one for one in lengths))


def test_several_workers_share_what_waits():
    model, settings = LatencyModel.fixed(0.01), Settings(max_items=1)
    waits = []
    for num_workers in (1, 2):
        backlog = Backlog(model, num_workers)
        for _ in range(4):
            backlog.enter(Request("waits", 1, 0.0))
        waits.append(backlog.predict(Request("new", 1, 0.0, 1.0), 1.0, 0.0, settings))
    # 40 ms or 20 ms, and 10 ms of its own.
    assert waits == pytest.approx([0.05, 0.03])


def test_a_request_that_no_strictness_decides_about_changes_nothing():
    model, settings = LatencyModel.fixed(0.01), Settings(max_items=1)
    backlog = Backlog(model)
    for _ in range(4):
        backlog.enter(Request("waits", 1, 0.0))
    # 40 ms wait: nobody is answered within 20 ms, everybody within a second.
    for deadline in (0.02, 1.0):
        request = Request("new", 1, 0.0, deadline)
        before = backlog.predict(request, 1.0, 0.0, settings)
        backlog.refuse(request)
        backlog.give_up(request)
        assert backlog.predict(request, 1.0, 0.0, settings) == before


def test_those_given_up_make_admission_stricter_and_those_refused_milder():
    model, settings = LatencyModel.fixed(0.01), Settings(max_items=1)
    backlog = Backlog(model)
    for _ in range(4):
        backlog.enter(Request("waits", 1, 0.0))
    request = Request("new", 1, 0.0, 0.06)
    first = backlog.predict(request, 1.0, 0.0, settings)
    backlog.give_up(request)
    stricter = backlog.predict(request, 1.0, 0.0, settings)
    for _ in range(3):
        backlog.refuse(request)
    assert backlog.predict(request, 1.0, 0.0, settings) < first < stricter
