"""The line of those that wait: in order at any time, and no slower when it is long."""

import random

from hypothesis import given
from hypothesis import strategies as st

from batchwright.serve import LatencyModel, Settings
from batchwright.serve._engine.calls import Outcome
from batchwright.serve._engine.core import Core
from batchwright.serve._engine.request import Request
from batchwright.serve._engine.waiting import Line

from ..tools import items_of


class Counted(float):
    """A number that counts how often it is compared."""

    num = 0

    def __lt__(self, other):
        Counted.num += 1
        return float.__lt__(self, other)

    def __gt__(self, other):
        Counted.num += 1
        return float.__gt__(self, other)

    def __eq__(self, other):
        Counted.num += 1
        return float.__eq__(self, other)

    __hash__ = float.__hash__


def draw(rng, number):
    arrival = rng.random()
    return Request(
        number, rng.randint(1, 99), arrival, arrival + rng.choice([0.1, 0.5, float("inf")]), rng.randint(-2, 2)
    )


@given(st.lists(st.sampled_from(["add", "remove", "look"]), max_size=300), st.integers(0, 2**31))
def test_it_is_what_sorting_would_give(moves, seed):
    rng, line, waiting = random.Random(seed), Line(), []
    for number, move in enumerate(moves):
        if move == "add":
            waiting.append(draw(rng, number))
            line.add(waiting[-1])
        elif move == "remove":
            leaving = rng.sample(waiting, rng.randint(0, len(waiting)))
            line.remove(leaving)
            waiting = [request for request in waiting if request not in leaving]
        ordered = sorted(waiting, key=lambda request: (request.urgency, request.arrival))
        num = rng.randint(1, 20)
        if move == "look":
            assert items_of(line.most_urgent(num)) == items_of(ordered[:num])
            now = rng.random()
            assert set(line.expired(now)) == {request for request in waiting if request.deadline <= now}
        new = draw(rng, "new")
        before = sum((request.urgency, request.arrival) < (new.urgency, new.arrival) for request in waiting)
        assert line.share_before(new) == (before / len(waiting) if waiting else 0.0)
        assert len(line) == len(waiting)
        assert set(line) == set(waiting)


@given(st.integers(1, 700), st.integers(0, 2**31))
def test_batches_leave_from_anywhere_in_a_long_line(num_leaving, seed):
    rng, waiting = random.Random(seed), [Request(number, 1, number * 1e-3) for number in range(700)]
    line = Line(waiting)
    leaving = rng.sample(waiting, num_leaving)
    line.remove(leaving)
    gone = set(leaving)
    assert items_of(line.most_urgent(700)) == [request.item for request in waiting if request not in gone]
    assert len(line) == 700 - num_leaving


def comparisons_per_request(num_waiting, num_decisions=50):
    """Serve with a queue that keeps its length; count the comparisons of urgencies per request."""
    rng, core = random.Random(0), Core(Settings(max_queue=10**6, max_items=16), LatencyModel.fixed(0.004, 4e-6))

    def arrive(number):
        request = Request(number, rng.randint(1, 99), number * 1e-5)
        request.urgency = Counted(request.urgency + 0.1 * rng.random())
        core.add(request)

    for number in range(num_waiting):
        arrive(number)
    Counted.num, num_served = 0, 0
    for decision in range(num_decisions):
        call = core.take(1.0).call
        num_served += len(call.requests)
        for _ in call.requests:
            num_waiting += 1
            arrive(num_waiting)
        core.complete(call, Outcome(values=call.items), 1.0 + decision * 1e-3, 0.001)
    return Counted.num / num_served


def test_a_queue_of_40_000_takes_hardly_more_comparisons_than_one_of_1_000():
    short, long = comparisons_per_request(1000), comparisons_per_request(40_000)
    assert long < 1.5 * short
