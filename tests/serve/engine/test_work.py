"""Which job comes next, by hand: requests first, background work only where it ends in time."""

import math

import pytest

from batchwright.errors import TooLarge
from batchwright.serve import Background, Device, LatencyModel, Settings
from batchwright.serve._engine.calls import Call, Outcome
from batchwright.serve._engine.core import Core
from batchwright.serve._engine.request import Request
from batchwright.serve._engine.work import Work

# A millisecond per call and one per token, nearly: sums of such a power of two are exact.
MODEL = {"constant": 2**-10, "per_token": 2**-10}


class Driver:
    """A work without threads: the batches are there at once, and the clock stands still."""

    def __init__(self, batches, *, device=None, length=1, **settings):
        self.background = Background(batches)
        units = self.background._units
        units.read(length if callable(length) else lambda item: length, lambda: None)
        self.core = Core(Settings(**settings), LatencyModel.fixed(**MODEL))
        self.work = Work(self.core, device=device and device._turns, background=units)

    def take(self, now=0.0):
        turn, part = self.work.take(now)
        return [request.item for request in turn.call.requests] if turn.call else part and part.items

    def run(self, now=0.0):
        """Run everything that can run now; return the jobs in order."""
        jobs = []
        while True:
            turn, part = self.work.take(now)
            job = turn.call or part
            if job is None:
                return jobs
            items = job.items
            jobs.append(items)
            self.work.complete(job, Outcome(values=[f"{item}!" for item in items]), now, 0.001)

    def results(self):
        return [(batch.results, batch.error) for batch in self.background]


def test_a_batch_runs_in_parts_that_take_a_third_of_the_deadline():
    # 10 ms of 30: a call of 1 ms and nine items.
    driver = Driver([range(20)], deadline_ms=30)
    assert driver.run() == [[*range(9)], [*range(9, 18)], [18, 19]]
    assert driver.results() == [([f"{item}!" for item in range(20)], None)]


def test_without_deadlines_a_part_takes_what_a_window_does():
    assert Driver([range(9)], max_wait_ms=5).run() == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]


def test_the_shortest_deadline_of_a_request_counts_too():
    driver = Driver([range(9)], deadline_ms=300)
    driver.work.add(Request("live", 1, 0.0, 0.012))
    assert driver.take() == ["live"]
    assert driver.take() == [0, 1, 2]


def test_a_part_keeps_the_limits_of_a_batch():
    assert Driver([range(5)], deadline_ms=3000, max_items=2).run() == [[0, 1], [2, 3], [4]]
    assert Driver([range(5)], deadline_ms=3000, max_tokens=30, length=10).run() == [[0, 1, 2], [3, 4]]


def test_requests_come_first_whatever_their_deadline():
    driver = Driver([["offline"]], deadline_ms=1000)
    driver.work.add(Request("live", 1, 0.0))
    assert driver.run() == [["live"], ["offline"]]


def test_while_a_window_is_open_only_what_ends_before_it_closes_runs():
    driver = Driver([range(5)], policy="window", max_wait_ms=10, deadline_ms=300)
    driver.work.add(Request("live", 1, 0.0, 0.3))
    assert driver.take(now=0.0065) == [0, 1]  # 3.5 ms are left
    assert driver.take(now=0.0092) is None  # 0.8 ms: not even one
    assert driver.background.num_failed == 0  # but that is no fault of it
    assert driver.take(now=0.0101) == ["live"]
    assert driver.take(now=0.0101) == [2, 3, 4]


def test_an_item_that_never_fits_ends_its_batch_with_the_reason():
    driver = Driver([range(2), range(1)], deadline_ms=20, length=20)
    assert driver.run() == []
    batches = driver.results()
    assert [type(error) for _, error in batches] == [TooLarge] * 2
    assert "takes about 20.5 ms, and background work must take less than 20.0 ms" in str(batches[0][1])
    assert driver.background.num_failed == 2


def answer(driver, *, arrival, now, allowed):
    """Let a request come and have its answer."""
    driver.work.add(Request("live", 1, arrival, arrival + allowed))
    turn, _ = driver.work.take(arrival)
    driver.work.complete(turn.call, Outcome(values=["live!"]), now, 2**-9)


def test_while_requests_have_no_deadline_an_item_that_takes_long_runs_once_a_second():
    driver = Driver([range(4)], max_wait_ms=8, length=10)  # 10.7 ms
    assert driver.take(now=5.0) == [0]
    turn, part = driver.work.take(5.25)
    assert (part, turn.wake_seconds) == (None, 1.0)
    assert driver.work.background_stats()["waiting"] == (
        "an item takes about 10.7 ms; one that takes so long runs every second"
    )
    assert driver.take(now=6.0) == [1]
    assert driver.take(now=6.5) is None
    driver.core.model = LatencyModel.fixed(2**-10, 2**-12)  # the machine is fast again
    assert driver.take(now=6.6) == [2, 3]
    assert driver.work.background_stats()["waiting"] is None


def test_while_no_request_comes_an_item_that_takes_long_runs_at_once():
    driver = Driver([range(4)], deadline_ms=20, length=10)  # 10.7 ms, of which 6.7 are free
    assert [driver.take(now=5.0) for _ in range(4)] == [[0], [1], [2], [3]]


def test_an_item_that_would_make_requests_late_waits_until_enough_of_them_have_come():
    driver = Driver([range(4)], deadline_ms=20, length=10)
    for second in range(20):  # each could have waited for 8 ms, and the item takes 10.7
        answer(driver, arrival=float(second), now=second + 0.012, allowed=0.020)
    # One per second, and of each 2.7 ms are the time in which it is late if the item begins: 0.0028 requests.
    driver.work.gaps.may_spend(driver.work.gaps.saved)
    assert driver.take(now=19.1) is None
    why = driver.work.background_stats()["waiting"]
    assert why == "an item takes about 10.7 ms and is expected to make 0.0029 requests late; 0 are saved up for it"
    assert driver.work.background_stats()["part_ms"] == pytest.approx(20 / 3)
    for second in range(20, 28):
        answer(driver, arrival=float(second), now=second + 0.012, allowed=0.020)
    assert driver.take(now=27.1) is None  # eight requests save 0.0027
    answer(driver, arrival=28.0, now=28.012, allowed=0.020)
    assert driver.take(now=28.1) == [0]  # nine save 0.0030
    assert driver.take(now=28.1) is None


def test_where_a_call_itself_takes_long_items_still_run_together():
    driver = Driver([range(9)], deadline_ms=30)
    driver.core.model = LatencyModel.fixed(8 * 2**-10, 2**-10)
    for second in range(2):  # parts may take 5 ms: not even a call
        answer(driver, arrival=float(second), now=second + 0.028 - second / 1000, allowed=0.030)
    for _ in range(400):
        driver.work.gaps.note_arrival(2.0)
    assert driver.take(now=200.0) == [*range(8)]  # twice the 8 ms of a call


def test_a_batch_whose_items_take_long_does_not_hold_up_the_next_one():
    driver = Driver([[10, 10], [1, 1]], deadline_ms=20, length=lambda item: item)
    for second in range(20):
        answer(driver, arrival=float(second), now=second + 0.012, allowed=0.020)
    driver.work.gaps.may_spend(driver.work.gaps.saved)
    assert driver.take(now=19.1) == [1, 1]
    assert driver.take(now=19.1) is None


def test_requests_that_came_near_their_deadline_make_parts_shorter():
    driver = Driver([range(90)], deadline_ms=30)
    for second in range(2):  # 2 and 3 ms were left: parts may take 5 ms, a call of 1 ms and four items
        answer(driver, arrival=float(second), now=second + 0.028 - second / 1000, allowed=0.030)
    assert len(driver.take(now=3.0)) == 4
    assert driver.work.background_stats()["part_ms"] == pytest.approx(5.0)


def test_a_request_that_a_part_made_late_is_told_from_one_that_was_late_by_itself():
    driver = Driver([range(90)], deadline_ms=30)
    answer(driver, arrival=0.0, now=0.040, allowed=0.030)  # nothing ran before it
    assert driver.work.background_stats()["num_late"] == 0
    assert driver.work.background_stats()["boldness"] == 1.0
    _, part = driver.work.take(1.0)
    driver.work.add(Request("live", 1, 1.001, 1.031))
    driver.work.complete(part, Outcome(values=part.items), 1.021, 0.021)  # held up by 20 ms
    turn, _ = driver.work.take(1.021)
    driver.work.complete(turn.call, Outcome(values=["live!"]), 1.032, 0.011)
    assert driver.work.background_stats()["num_late"] == 1
    assert driver.work.background_stats()["boldness"] < 0.8


def test_without_background_work_there_are_no_figures_of_it():
    assert Work(Core(Settings(), LatencyModel()), device=None, background=None).background_stats() == {}


def test_the_deadlines_of_other_batchers_on_the_device_count():
    device = Device()
    other = Work(Core(Settings(deadline_ms=12), LatencyModel()), device=device._turns, background=None)
    driver = Driver([range(9)], deadline_ms=300, device=device)
    assert driver.take() == [0, 1, 2]
    other.core.stop()
    assert driver.take() == [3, 4, 5, 6, 7, 8]


def test_a_part_that_runs_out_of_memory_is_run_in_halves():
    driver = Driver([range(4)], deadline_ms=300)
    _, part = driver.work.take(0.0)
    driver.work.complete(part, Outcome(error=MemoryError(), is_oom=True), 0.0, 0.001)
    assert driver.run() == [[0, 1], [2, 3]]
    assert driver.results() == [(["0!", "1!", "2!", "3!"], None)]


def test_an_error_ends_only_its_batch():
    driver = Driver([range(20), "ab", ["c"]], deadline_ms=20)
    _, part = driver.work.take(0.0)
    driver.work.complete(part, Outcome(error=KeyError("bad")), 0.0, 0.001)
    assert driver.run() == [["c"]]
    first, second, third = driver.results()
    assert (first[0], type(first[1])) == ([], KeyError)
    assert "must be a list of items, got str" in str(second[1])
    assert third == (["c!"], None)
    assert (driver.background.num_batches, driver.background.num_failed, driver.background.num_items) == (3, 2, 1)


def test_an_exception_object_among_the_results_fails_the_batch():
    driver = Driver([range(2)], deadline_ms=20)
    _, part = driver.work.take(0.0)
    driver.work.complete(part, Outcome(values=[1, ValueError("bad")]), 0.0, 0.001)
    [(results, error)] = driver.results()
    assert (results, str(error)) == ([], "bad")


def test_the_time_model_learns_from_parts_that_grow_until_it_is_ready():
    driver = Driver([range(1000)], deadline_ms=1e6)
    driver.core.model = LatencyModel()
    sizes = []
    for _ in range(20):
        _, part = driver.work.take(0.0)
        sizes.append(len(part.items))
        driver.work.complete(part, Outcome(values=part.items), 0.0, 0.004 + 0.001 * sizes[-1])
    assert driver.core.model.is_ready
    assert sizes[0] == 1
    assert sizes == sorted(sizes)
    assert driver.core.model.predict(32, 1) == pytest.approx(0.036)


def test_hiccups_do_not_make_parts_ever_smaller():
    driver = Driver([range(100_000)], deadline_ms=300)
    driver.core.model = LatencyModel()
    for count in range(300):
        _, part = driver.work.take(0.0)
        seconds = 0.004 + 0.001 * len(part.items) + (0.1 if count % 10 == 9 else 0.0)
        driver.work.complete(part, Outcome(values=part.items), 0.0, seconds)
    assert driver.core.model.margin > 1.5
    assert len(part.items) > 30  # 64, the most in a batch, fit without hiccups


def test_a_work_is_idle_only_if_no_part_runs():
    driver = Driver([range(2)], deadline_ms=300)
    assert driver.work.is_idle
    _, part = driver.work.take(0.0)
    assert not driver.work.is_idle
    driver.work.complete(part, Outcome(values=part.items), 0.0, 0.001)
    assert driver.work.is_idle


def test_after_a_stop_only_requests_run():
    driver = Driver([range(2)], deadline_ms=300)
    driver.work.add(Request("live", 1, 0.0))
    driver.core.stop()
    turn, part = driver.work.take(0.0)
    assert isinstance(turn.call, Call)
    assert part is None
    assert driver.work.take(0.0)[1] is None
    assert driver.work.is_over
    assert driver.work.allowance() == math.inf


def test_a_part_looks_for_requests_that_wait_on_purpose_only_when_they_may_run():
    driver = Driver([range(5)], policy="window", max_wait_ms=10)
    work = driver.work
    assert not work.is_wanted(0.0)
    work.add(Request("live", 1, 0.0))
    assert work.is_wanted(0.001)
    assert work.take_between(0.001).call is None
    assert not work.is_wanted(0.009)
    assert work.is_wanted(0.0101)
    work.add(Request("another", 1, 0.002))
    assert work.is_wanted(0.002)  # a batch may be full by now
    assert work.take_between(0.002).call is None
    assert not work.is_wanted(0.003)
    work.configure(Settings(policy="window", max_wait_ms=2), 0.003)
    assert work.is_wanted(0.003)
    work.configure(Settings(policy="window", max_wait_ms=20), 0.003)
    assert work.take_between(0.003).call is None
    assert not work.is_wanted(0.004)
    driver.core.stop()
    assert work.is_wanted(0.004)
    assert [request.item for request in work.take_between(0.004).call.requests] == ["live", "another"]


def test_requests_that_ran_out_of_memory_beside_a_part_run_again_after_it():
    driver = Driver([["offline"], ["next"]], max_wait_ms=5)
    work = driver.work
    _, part = work.take(0.0)
    work.pause(part)
    for item in range(2):
        work.add(Request(item, 1, 0.0))
    call = work.take_between(0.0).call
    assert work.complete(call, Outcome(error=MemoryError(), is_oom=True), 0.0, 0.001) == (None, [])
    turn, other = work.take(0.0)  # by another worker
    assert (turn.call, turn.wake_seconds, other) == (None, 0.02, None)
    assert work.take_between(0.0).call is None
    work.resume(part)
    work.complete(part, Outcome(values=["offline!"]), 0.0, 0.001)
    assert work.take(0.0)[0].call is call
    assert len(work.complete(call, Outcome(values=[1, 2]), 0.0, 0.001)[1]) == 2
    assert driver.take() == ["next"]
    assert driver.core.stats().max_tokens is None
