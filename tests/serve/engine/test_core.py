"""The state machine by hand: every move, and what follows from it."""

import pytest

from batchwright.errors import Closed, DeadlineExceeded, QueueFull, TooLarge
from batchwright.serve import LatencyModel
from batchwright.serve._engine.calls import Outcome
from batchwright.serve._engine.core import MAX_SHED_IN_A_ROW, Core
from batchwright.serve._engine.request import Request, State
from batchwright.serve.settings import Settings

from ..tools import items_of, make_requests


def make_core(requests=(), *, model=None, **settings):
    core = Core(Settings(**settings), model or LatencyModel())
    for request in requests:
        core.add(request)
    return core


def answer(call):
    return Outcome(values=[("answer", item) for item in call.items])


def run_to_the_end(core, *, now=0.0, seconds_of=lambda call: 0.001):
    """Serve with one worker until nothing waits; return the order in which requests ended, and the time."""
    order = []
    while core.num_waiting:
        turn = core.take(now)
        order += turn.ended
        call = turn.call
        while call is not None:
            now += seconds_of(call)
            turn = core.complete(call, answer(call), now, seconds_of(call))
            order += turn.ended
            call = turn.call
    return order, now


def test_a_request_waits_runs_and_is_answered():
    [request] = requests = make_requests([5])
    core = make_core(requests)
    call = core.take(0.0).call
    assert (request.state, call.items, core.is_idle) == (State.RUNNING, [0], False)
    turn = core.complete(call, answer(call), 0.005, 0.005)
    assert (turn.call, turn.ended) == (None, [request])
    assert (request.state, request.result, core.is_idle) == (State.ANSWERED, ("answer", 0), True)


def test_a_cancelled_request_is_not_run():
    requests = make_requests([5, 5])
    core = make_core(requests)
    core.cancel(requests[0], 0.0)
    assert core.take(0.0).call.items == [1]


def test_cancelling_what_runs_lets_its_mates_be_answered():
    requests = make_requests([5, 5])
    core = make_core(requests)
    call = core.take(0.0).call
    core.cancel(requests[0], 0.0)
    assert core.complete(call, answer(call), 0.1, 0.1).ended == [requests[1]]
    assert (requests[0].state, requests[0].result) == (State.CANCELLED, None)


def test_cancelling_what_has_ended_changes_nothing():
    [request] = requests = make_requests([5])
    core = make_core(requests)
    run_to_the_end(core)
    core.cancel(request, 1.0)
    assert request.state is State.ANSWERED


def test_one_request_over_the_limit_is_refused():
    core = make_core(make_requests([5, 5]), max_queue=2)
    with pytest.raises(QueueFull, match="2 requests wait, max_queue is 2"):
        core.add(Request("third", 5, 0.0))
    assert core.num_waiting == 2


def test_an_item_over_max_tokens_alone_is_refused():
    core = make_core(max_tokens=100)
    with pytest.raises(TooLarge, match="length 101 alone is over max_tokens=100"):
        core.add(Request("long", 101, 0.0))
    core.add(Request("just", 100, 0.0))


def test_a_request_that_waits_at_its_deadline_is_given_up():
    [request] = requests = make_requests([5], deadline_seconds=0.05)
    core = make_core(requests)
    assert core.expire(request, 0.05) == [request]
    assert isinstance(request.error, DeadlineExceeded)
    assert core.take(0.06).call is None


def test_a_request_that_runs_at_its_deadline_is_left_to_finish():
    [request] = requests = make_requests([5], deadline_seconds=0.05)
    core = make_core(requests)
    call = core.take(0.0).call
    assert core.expire(request, 0.05) == []
    core.complete(call, answer(call), 0.06, 0.06)
    assert request.state is State.ANSWERED
    assert core.stats().num_missed == 1


def test_the_refusal_says_when_it_would_have_finished():
    [request] = requests = make_requests([250], deadline_seconds=0.05)
    core = make_core(requests, model=LatencyModel.fixed(0.004, 4e-6))
    core.take(0.046)
    # 46 ms waited, and 4 ms + 250 × 4 us alone: 51 ms.
    assert request.error.predicted_seconds == pytest.approx(0.051)
    assert request.error.deadline_seconds == pytest.approx(0.050)
    assert "would have finished after 51.0 ms" in str(request.error)


def test_a_prediction_that_gives_everything_up_is_tested_now_and_then():
    core = make_core(model=LatencyModel.fixed(10.0))
    calls = []
    for number in range(MAX_SHED_IN_A_ROW):
        core.add(Request(number, 5, float(number), number + 0.05))
        calls.append(core.take(float(number)).call)
    assert [call is not None for call in calls] == [False] * (MAX_SHED_IN_A_ROW - 1) + [True]
    assert core.stats().reasons == {"probe": 1}


def test_a_batch_that_runs_puts_off_the_next_test_of_the_prediction():
    core = make_core(model=LatencyModel.fixed(10.0))
    for number in range(2 * MAX_SHED_IN_A_ROW - 2):
        if number == MAX_SHED_IN_A_ROW - 1:
            core.add(Request("patient", 5, float(number)))
            run_to_the_end(core, now=float(number))
        core.add(Request(number, 5, float(number), number + 0.05))
        core.take(float(number))
    assert core.stats().reasons == {"all": 1}


def test_running_out_of_memory_lowers_the_limit_and_splits_the_batch():
    requests = make_requests([10] * 8)
    core = make_core(requests)
    turn = core.take(0.0)
    turn = core.complete(turn.call, Outcome(error=MemoryError(), is_oom=True), 0.1, 0.1)
    assert len(turn.call.requests) == 4
    assert core.stats().max_tokens == 40
    while turn.call is not None:
        turn = core.complete(turn.call, answer(turn.call), 0.2, 0.1)
    assert all(request.state is State.ANSWERED for request in requests)
    for request in make_requests([10] * 8):
        core.add(request)
    assert len(core.take(0.3).call.requests) == 4


def test_the_lowered_limit_grows_back():
    core = make_core(make_requests([10] * 8))
    turn = core.complete(core.take(0.0).call, Outcome(error=MemoryError(), is_oom=True), 0.1, 0.1)
    while turn.call is not None:
        turn = core.complete(turn.call, answer(turn.call), 0.2, 0.1)
    for _ in range(100):
        for request in make_requests([10] * 8):
            core.add(request)
        run_to_the_end(core)
    assert core.stats().max_tokens >= 70  # from 40; batches of 7 fit again, 8 are what failed


def test_an_exception_object_among_the_results_fails_that_item_alone():
    requests = make_requests([5, 5])
    core = make_core(requests)
    call = core.take(0.0).call
    core.complete(call, Outcome(values=[KeyError("own"), "fine"]), 0.1, 0.1)
    assert isinstance(requests[0].error, KeyError)
    assert requests[1].result == "fine"


def test_new_settings_hold_from_the_next_decision_on():
    core = make_core(make_requests([5] * 6))
    core.configure(Settings(max_items=2), 0.0)
    assert core.take(0.0).call.items == [0, 1]


def test_what_no_longer_fits_the_new_settings_ends_with_a_clear_error():
    requests = make_requests([5, 500])
    core = make_core(requests)
    assert core.configure(Settings(max_tokens=100), 0.0) == [requests[1]]
    assert isinstance(requests[1].error, TooLarge)
    assert core.take(0.0).call.items == [0]


def test_a_stopped_core_takes_nothing_in_and_does_not_wait_for_a_window():
    core = make_core(make_requests([5]), policy="window", max_wait_ms=1000)
    assert core.take(0.0).wake_seconds == pytest.approx(1.0)
    core.stop()
    with pytest.raises(Closed):
        core.add(Request("late", 5, 0.0))
    assert core.take(0.0).call.items == [0]


def test_dropping_ends_what_waits_and_leaves_what_runs():
    requests = make_requests([5, 5])
    core = make_core(requests, max_items=1)
    call = core.take(0.0).call
    assert core.drop(0.0) == [requests[1]]
    assert isinstance(requests[1].error, Closed)
    core.complete(call, answer(call), 0.1, 0.1)
    assert requests[0].state is State.ANSWERED


def test_a_crash_ends_everything_with_the_reason():
    requests = make_requests([5, 5])
    core = make_core(requests, max_items=1)
    core.take(0.0)
    assert len(core.crash(OSError("no more threads"), 0.0)) == 2
    assert "no more threads" in str(requests[0].error)
    assert core.is_idle


def test_the_long_item_eleventh_of_211_is_served_before_any_that_came_a_deadline_later():
    # One request a millisecond; the device takes 4 ms a call and 4 us a padded token, so it is busy but keeps up.
    lengths = [30] * 10 + [500] + [30] * 200
    core = Core(Settings(max_tokens=4096, deadline_ms=50), LatencyModel())
    waiting = make_requests(lengths, deadline_seconds=0.05)
    long, now, ends, call = waiting[10], 0.0, {}, None
    while waiting or core.num_waiting or call is not None:
        while waiting and waiting[0].arrival <= now:
            core.add(waiting.pop(0))
        if call is None:
            call = core.take(now).call
        if call is None:
            now = waiting[0].arrival
            continue
        seconds = 0.004 + 4e-6 * len(call.requests) * max(request.length for request in call.requests)
        now += seconds
        turn = core.complete(call, answer(call), now, seconds)
        ends |= {request: now for request in turn.ended}
        call = turn.call
    assert long.state is State.ANSWERED
    later = [end for request, end in ends.items() if request.arrival > long.arrival + 0.05]
    assert len(later) == 150  # the 200 after it, less those of the first 50 ms
    assert ends[long] < min(later)


def test_a_long_item_that_came_first_is_in_the_first_batch():
    core = make_core(make_requests([400]), model=LatencyModel.fixed(0.004, 4e-6), max_items=4)
    for number in range(1, 100):
        core.add(Request(number, 5, 0.0001 * number))
    order, _ = run_to_the_end(core)
    assert 0 in items_of(order)[:4]


def test_the_figures_add_up():
    requests = make_requests([10, 10, 20, 10, 10], deadline_seconds=0.05)
    core = make_core(requests[:3])
    core.cancel(requests[0], 0.0)
    run_to_the_end(core, now=0.01)
    core.add(requests[3])
    core.expire(requests[3], 0.06)
    core.add(requests[4])
    stats = core.stats()
    ended = (stats.num_answered, stats.num_shed, stats.num_cancelled, stats.num_failed, stats.num_closed)
    assert ended == (2, 1, 1, 0, 0)
    assert stats.num_submitted == sum(ended) + stats.num_waiting + stats.num_running == 5
    assert (stats.num_batches, stats.mean_items, stats.padding) == (1, 2.0, pytest.approx(10 / 40))
    assert stats.to_dict()["reasons"] == {"all": 1}
