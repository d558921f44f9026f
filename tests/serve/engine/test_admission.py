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


def serve(rate, *, num_requests=6000, seed=0, model=None):
    """Serve random requests with one worker; return the share in time, and how long the others waited to hear."""
    rng, core = random.Random(seed), Core(Settings(deadline_ms=50), model or LatencyModel())
    for length in (8, 16, 32, 64, 128) * 2:
        core.model.observe(1, length, device_seconds(1, length))
    requests, at = [], 0.0
    for number in range(num_requests):
        at += rng.expovariate(rate)
        requests.append(Request(number, max(1, min(512, int(rng.lognormvariate(3.47, 0.8)))), at, at + ALLOWED))
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
        seconds = device_seconds(len(batch), max(request.length for request in batch)) * rng.uniform(1, 1.04)
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


@pytest.mark.parametrize("rate", [3000, 5000, 10_000])
def test_under_overload_those_refused_hear_of_it_in_a_fifth_of_the_deadline(rate):
    _, refused = serve(rate)
    assert statistics.median(refused) <= ALLOWED / 5


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
