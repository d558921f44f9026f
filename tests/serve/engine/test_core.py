"""The state machine by hand: every move, and what follows from it."""

import pytest

from batchwright.errors import Closed, DeadlineExceeded, QueueFull, TooLarge
from batchwright.serve import LatencyModel
from batchwright.serve._engine.calls import Outcome
from batchwright.serve._engine.core import MAX_SHED_IN_A_ROW, PROBE_EVERY, Core
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


def is_taken_in(core, request):
    try:
        core.add(request)
    except DeadlineExceeded:
        return False
    return True


def test_a_request_that_cannot_make_its_deadline_is_refused_at_arrival_with_the_prediction():
    core = make_core(model=LatencyModel.fixed(0.004, 4e-6))
    with pytest.raises(
        DeadlineExceeded, match=r"not taken in: it would have finished after 5\.0 ms, and 4\.5 ms"
    ) as caught:
        core.add(Request("hurried", 250, 1.0, 1.0045))
    # 4 ms + 250 × 4 us alone, and nothing waits.
    assert caught.value.predicted_seconds == pytest.approx(0.005)
    assert caught.value.deadline_seconds == pytest.approx(0.0045)
    assert core.stats().num_refused == {"deadline": 1}
    core.add(Request("patient", 250, 1.0, 1.0055))


def test_what_runs_and_what_waits_is_in_the_prediction():
    core = make_core(make_requests([250], gap_seconds=0.0), model=LatencyModel.fixed(0.004, 4e-6), max_items=1)
    core.take(0.0)
    core.add(Request("second", 250, 0.0, 0.0125))
    # 5 ms for what runs, 5 ms for what waits, and 5 ms of its own.
    assert not is_taken_in(core, Request("third", 250, 0.0, 0.0149))
    assert is_taken_in(core, Request("third", 250, 0.0, 0.0151))


def test_an_urgent_request_is_taken_in_although_many_patient_ones_wait():
    core = make_core(make_requests([50] * 500, gap_seconds=0.0), model=LatencyModel.fixed(0.004, 4e-6))
    assert is_taken_in(core, Request("hurried", 50, 0.0, 0.05))
    assert core.take(0.0).call.items.count("hurried") == 1


@pytest.mark.parametrize("options", [{"policy": "greedy"}, {"policy": "window"}])
def test_policies_without_predictions_refuse_nothing_by_prediction(options):
    core = make_core(model=LatencyModel.fixed(10.0), **options)
    assert is_taken_in(core, Request("hurried", 5, 0.0, 0.05))


def test_a_prediction_that_refuses_everything_is_tested_now_and_then():
    core = make_core(model=LatencyModel.fixed(10.0))
    taken = [is_taken_in(core, Request(number, 5, float(number), number + 0.05)) for number in range(MAX_SHED_IN_A_ROW)]
    assert taken == [False] * (MAX_SHED_IN_A_ROW - 1) + [True]
    assert core.take(float(MAX_SHED_IN_A_ROW - 1)).call.items == [MAX_SHED_IN_A_ROW - 1]
    assert core.stats().reasons == {"probe": 1}


def test_while_a_batch_runs_one_in_32_is_taken_in_against_the_prediction():
    core = make_core(make_requests([5]), model=LatencyModel.fixed(10.0))
    core.take(0.0)
    taken = [is_taken_in(core, Request(number, 5, 0.0, 0.05)) for number in range(4 * PROBE_EVERY)]
    assert sum(taken) == 4


def test_a_model_that_is_far_too_slow_at_first_does_not_refuse_for_ever():
    core, now, answered = make_core(), 0.0, []
    for _ in range(20):
        core.model.observe(1, 32, 1.0)  # a second, as long as the device was cold
    for number in range(2000):
        now += 0.01
        if is_taken_in(core, Request(number, 32, now, now + 0.05)):
            call = core.take(now).call
            if call is not None:
                core.complete(call, answer(call), now + 0.005, 0.005)
                answered.append(number)
    assert len(answered) > 1000
    assert set(range(1900, 2000)) <= set(answered)


def test_running_out_of_memory_lowers_the_limit_and_splits_the_batch():
    requests = make_requests([10] * 8)
    core = make_core(requests)
    turn = core.take(0.0)
    turn = core.complete(turn.call, Outcome(error=MemoryError(), is_oom=True), 0.1, 0.1)
    assert len(turn.call.requests) == 4
    assert core.stats().max_tokens is None  # not known yet: one item may be too large by itself
    while turn.call is not None:
        turn = core.complete(turn.call, answer(turn.call), 0.2, 0.1)
    assert all(request.state is State.ANSWERED for request in requests)
    assert core.stats().max_tokens == 40
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


def serve(core, requests, outcome_of, *, now=0.0):
    """Run everything; a call takes a millisecond. Return the number of calls."""
    for request in requests:
        core.add(request)
    num_calls = 0
    while core.num_waiting:
        turn = core.take(now)
        while turn.call is not None:
            now += 0.001
            num_calls += 1
            turn = core.complete(turn.call, outcome_of(turn.call), now, 0.001)
    return num_calls


def out_of_memory_with(item, *, alone=True):
    def outcome_of(call):
        is_out = item in call.items and (alone or len(call.items) > 1)
        return Outcome(error=MemoryError(), is_oom=True) if is_out else answer(call)

    return outcome_of


def test_an_item_that_runs_out_of_memory_by_itself_leaves_the_limit_of_the_others():
    core = make_core(max_tokens=32_768)
    for _ in range(5):
        serve(core, make_requests([40] * 64), out_of_memory_with(7))
        assert core.stats().max_tokens == 32_768


def test_an_item_that_runs_out_of_memory_in_company_leaves_the_limit_where_large_batches_fit_again():
    core = make_core(max_tokens=32_768)
    serve(core, make_requests([40] * 64), answer)
    for _ in range(5):
        serve(core, make_requests([40] * 64), out_of_memory_with(7, alone=False))
        assert core.stats().max_tokens == 32_768


def test_memory_that_became_short_lowers_the_limit_after_two_batches_that_were_too_large():
    core = make_core()
    serve(core, make_requests([10] * 64), answer)

    def outcome_of(call):
        return Outcome(error=MemoryError(), is_oom=True) if len(call.items) > 16 else answer(call)

    serve(core, make_requests([10] * 64), outcome_of)
    assert core.stats().max_tokens == 160
    num_ooms = core.stats().num_ooms
    serve(core, make_requests([10] * 64), outcome_of)
    assert core.stats().num_ooms == num_ooms


def test_those_past_their_deadline_leave_a_batch_that_is_run_again():
    hurried, patient = make_requests([5], deadline_seconds=0.01), make_requests([5] * 3)
    core = make_core(hurried + patient)
    turn = core.complete(core.take(0.0).call, Outcome(error=ValueError("one of them")), 0.02, 0.02)
    assert turn.ended == hurried
    assert (hurried[0].state, type(hurried[0].error)) == (State.SHED, DeadlineExceeded)
    assert "its batch failed" in str(hurried[0].error)
    assert set(turn.call.requests) <= set(patient)


def test_a_result_that_lies_about_its_class_is_handed_over_as_it_is():
    class Proxy:
        @property
        def __class__(self):
            raise RuntimeError("no object behind this proxy")

    [request] = make_requests([5])
    core = make_core([request])
    proxy = Proxy()
    core.complete(core.take(0.0).call, Outcome(values=[proxy]), 0.1, 0.1)
    assert request.result is proxy


def test_a_crash_is_said_in_the_figures():
    class Mute(Exception):
        def __str__(self):
            raise ValueError("no text")

        __repr__ = __str__

    core = make_core()
    assert core.stats().is_healthy
    core.crash(Mute(), 0.0)
    assert (core.stats().is_healthy, core.stats().failure) == (False, "Mute: an error whose text cannot be read")


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
