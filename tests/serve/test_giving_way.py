"""Offline work that gives way: requests run in the middle of it, and nothing of either is lost."""

import asyncio
import contextvars
import functools
import os
import sys
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from random import Random

import pytest

from batchwright.errors import ArgumentError, Closed, DeadlineExceeded, RunTimeout
from batchwright.serve import Background, Batcher, Device, give_way

from ..thorough import num_cases
from .tools import run_script, wait_until

LIMIT_SECONDS = 30


class Steps:
    """A function whose offline items take steps until they are told to end; a request is answered twice its number."""

    def __init__(self, *, wait_seconds=0.001):
        self.wait_seconds = wait_seconds
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.threads, self.calls = set(), []

    def __call__(self, items):
        self.threads.add(threading.get_ident())
        self.calls.append(list(items))
        if "offline" in items:
            self.has_begun.set()
            end = time.monotonic() + LIMIT_SECONDS
            while not self.may_end.is_set() and time.monotonic() < end:
                time.sleep(self.wait_seconds)
                give_way()
        return [item if item == "offline" else 2 * item for item in items]


def first_of(batches):
    return next(iter(batches))


def test_a_request_that_comes_during_offline_work_is_answered_before_that_ends():
    steps = Steps()
    with Batcher(steps, background=[["offline"]]) as batcher:
        assert steps.has_begun.wait(LIMIT_SECONDS)
        assert [batcher.submit_sync(number) for number in (1, 2)] == [2, 4]
        assert batcher.background.num_batches == 0
        steps.may_end.set()
        assert first_of(batcher.background).results == ["offline"]
    assert len(steps.threads) == 1


def test_requests_that_wait_together_run_as_one_batch_in_the_middle():
    steps = Steps(wait_seconds=0.2)
    with Batcher(steps, background=[["offline"]]) as batcher:
        assert steps.has_begun.wait(LIMIT_SECONDS)
        assert sorted(batcher.map([1, 2, 3])) == [2, 4, 6]
        steps.may_end.set()
        first_of(batcher.background)
    assert len(steps.calls) < 4


def test_outside_of_offline_work_it_does_nothing():
    give_way()
    calls = []

    def run(items):
        calls.append(len(items))
        give_way()
        return items

    with Batcher(run) as batcher:
        assert list(batcher.map(range(20))) == list(range(20))
    assert sum(calls) == 20


def test_requests_in_the_middle_do_not_give_way_to_others():
    depth, deepest = [0], []

    def run(items):
        depth[0] += 1
        deepest.append(depth[0])
        if items[0] == "offline":
            begun.set()
        for _ in range(20):
            time.sleep(0.001)
            give_way()
        depth[0] -= 1
        return items

    begun = threading.Event()
    with Batcher(run, background=[["offline"]], max_items=1) as batcher:
        assert begun.wait(LIMIT_SECONDS)
        assert list(batcher.map(range(10))) == list(range(10))
        assert first_of(batcher.background).results == ["offline"]
    assert max(deepest) == 2


def test_a_request_that_fails_in_the_middle_fails_alone():
    steps = Steps()
    with Batcher(steps, background=[["offline"]]) as batcher:
        assert steps.has_begun.wait(LIMIT_SECONDS)
        with pytest.raises(TypeError):
            batcher.submit_sync(None)
        assert batcher.submit_sync(5) == 10
        steps.may_end.set()
        assert first_of(batcher.background).results == ["offline"]


def test_offline_work_that_fails_after_it_gave_way_fails_alone():
    steps = Steps()

    def run(items):
        results = steps(items)
        if "offline" in items:
            raise ValueError("a bad text")
        return results

    with Batcher(run, background=[["offline"], [3]]) as batcher:
        assert steps.has_begun.wait(LIMIT_SECONDS)
        assert batcher.submit_sync(1) == 2
        steps.may_end.set()
        batches = iter(batcher.background)
        assert str(next(batches).error) == "a bad text"
        assert next(batches).results == [6]
        assert batcher.submit_sync(4) == 8


def test_the_time_that_requests_took_is_not_that_of_the_offline_work():
    def run(items):
        for item in items:
            give_way()
            time.sleep(0.2 if item == "request" else 0.002)
        return items

    work = Background([["offline"] * 8] * 40)
    with Batcher(run, background=work, max_items=8) as batcher:
        ended = threading.Thread(target=lambda: list(work))
        ended.start()
        for _ in range(3):
            batcher.submit_sync("request")
        ended.join(LIMIT_SECONDS)
        assert batcher.time_model.predict(8, 1) < 0.15


def test_an_item_longer_than_the_deadline_runs_if_it_gives_way_often_enough():
    def run(items):
        for length in items:
            for _ in range(length):
                time.sleep(0.001)
                give_way()
        return items

    learned = [[length] for length in (2, 3, 4, 5, 6, 8, 10, 12) * 3]
    with Batcher(run, background=[*learned, [300]], deadline_ms=150, length_of=int) as batcher:
        results = [batch.results for batch in batcher.background]
    assert results == [*learned, [300]]


def test_a_request_that_hangs_in_the_middle_leaves_the_offline_work_to_another_thread():
    steps, hangs = Steps(), threading.Event()

    def run(items):
        if items == ["hang"]:
            hangs.wait(LIMIT_SECONDS)
        return steps(items)

    with Batcher(run, background=[["offline"]], run_timeout_ms=1000) as batcher:
        assert steps.has_begun.wait(LIMIT_SECONDS)
        with pytest.raises(RunTimeout):
            batcher.submit_sync("hang")
        steps.may_end.set()
        assert first_of(batcher.background).results == ["offline"]
        assert batcher.submit_sync(2) == 4
        hangs.set()
        assert batcher.stats().num_abandoned == 1


def test_offline_work_that_gives_way_for_long_is_not_given_up_for_the_time_of_requests():
    steps = Steps()

    def run(items):
        if "offline" not in items:
            time.sleep(0.15)
        return steps(items)

    with Batcher(run, background=[["offline"]], run_timeout_ms=600, max_items=1) as batcher:
        assert steps.has_begun.wait(LIMIT_SECONDS)
        assert sum(batcher.map([1] * 8)) == 16  # 1.2 seconds
        steps.may_end.set()
        assert first_of(batcher.background).results == ["offline"]


def test_requests_of_another_batcher_on_the_device_run_in_the_middle():
    device, steps = Device(), Steps()
    with Batcher(steps, background=[["offline"]], device=device) as offline, Batcher(list, device=device) as other:
        assert steps.has_begun.wait(LIMIT_SECONDS)
        assert other.submit_sync("theirs") == "theirs"
        assert offline.submit_sync(1) == 2
        assert other.submit_sync("again") == "again"
        steps.may_end.set()
        assert first_of(offline.background).results == ["offline"]


def test_a_batcher_closes_while_offline_work_gives_way():
    steps = Steps()
    batcher = Batcher(steps, background=[["offline"]])
    assert batcher.submit_sync(1) == 2
    assert steps.has_begun.wait(LIMIT_SECONDS)
    closing = threading.Thread(target=batcher.close_sync)
    closing.start()
    steps.may_end.set()
    closing.join(LIMIT_SECONDS)
    assert not closing.is_alive()


def test_the_function_may_ask_another_batcher_in_the_middle_and_after_it():
    with Batcher(lambda items: [item + 1 for item in items]) as inner:
        steps = Steps()

        def run(items):
            results = steps(items)
            return [inner.submit_sync(result) if result != "offline" else result for result in results]

        with Batcher(run, background=[["offline"]]) as batcher:
            assert steps.has_begun.wait(LIMIT_SECONDS)
            assert batcher.submit_sync(1) == 3
            steps.may_end.set()
            assert first_of(batcher.background).results == ["offline"]


async def double(items):
    for _ in items:
        give_way()
        await asyncio.sleep(0.001)
    return [2 * item for item in items]


def test_coroutines_are_not_interrupted_and_nothing_is_lost():
    async def main():
        work = Background([[1, 2]] * 3)
        async with Batcher(double, background=work, max_items=4) as batcher:
            answers = await asyncio.gather(*map(batcher.submit, range(10)))
            return answers, [batch.results async for batch in work]

    assert asyncio.run(main()) == ([2 * number for number in range(10)], [[2, 4]] * 3)


def test_coroutines_in_the_thread_of_a_worker_are_not_interrupted():
    work = Background([[1] * 20] * 5)
    with Batcher(double, background=work, max_items=4) as batcher:
        assert sorted(batcher.map(range(20))) == list(range(0, 40, 2))
        assert [batch.results for batch in work] == [[2] * 20] * 5


def test_thousands_of_requests_among_offline_work_get_each_its_own_answer():
    def run(items):
        results = []
        for item in items:
            give_way()
            results.append((item, len(items)))
        return [item for item, _ in results]

    batches = [list(range(start, start + 32)) for start in range(0, 3200, 32)]
    work = Background(batches)
    found, errors = {}, []
    with Batcher(run, background=work, num_workers=2) as batcher:

        def ask(first):
            for number in range(first, first + 500):
                if batcher.submit_sync(-number) != -number:
                    errors.append(number)

        def loop():
            found.update({batch.index: batch.results for batch in work})

        threads = [threading.Thread(target=ask, args=(1000 * place + 1,)) for place in range(4)]
        threads.append(threading.Thread(target=loop))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_SECONDS)
    assert not errors
    assert found == dict(enumerate(batches))


class Asleep:
    """Requests take a time of their own; everything else is for ``Steps``."""

    def __init__(self, steps, seconds):
        self.steps, self.seconds = steps, seconds

    def __call__(self, items):
        if "offline" not in items:
            time.sleep(self.seconds)
        return self.steps(items)


def test_a_part_that_waits_for_the_device_is_not_taken_to_hang():
    device, steps = Device(), Steps()
    slow = Batcher(Asleep(Steps(), 1.2), device=device)
    with slow, Batcher(steps, background=[["offline"]], device=device, run_timeout_ms=800) as offline:
        assert steps.has_begun.wait(LIMIT_SECONDS)
        assert slow.submit_sync(1) == 2
        assert offline.submit_sync(2) == 4
        steps.may_end.set()
        assert first_of(offline.background).results == ["offline"]
        assert offline.stats().num_abandoned == 0


def test_a_part_that_hangs_after_the_batcher_was_closed_is_still_given_up():
    device, steps, hangs, has_waited = Device(), Steps(), threading.Event(), threading.Event()

    def run(items):
        results = steps(items)
        has_waited.set()
        hangs.wait(LIMIT_SECONDS)
        return results

    with Batcher(Asleep(Steps(), 1.0), device=device) as slow:
        offline = Batcher(run, background=[["offline"]], device=device, run_timeout_ms=600)
        assert steps.has_begun.wait(LIMIT_SECONDS)
        closing = threading.Thread(target=offline.close_sync)
        asking = threading.Thread(target=slow.submit_sync, args=(1,))
        asking.start()
        closing.start()
        asking.join(LIMIT_SECONDS)
        steps.may_end.set()
        assert has_waited.wait(LIMIT_SECONDS)
        closing.join(LIMIT_SECONDS / 2)
        assert not closing.is_alive()
        hangs.set()


@pytest.mark.parametrize(("on_error", "num_runs"), [("bisect", 2), ("raise", 1)])
def test_what_gave_way_to_requests_that_hang_runs_again_unless_no_item_may_run_twice(on_error, num_runs):
    steps, hangs, seen = Steps(), threading.Event(), []

    def run(items):
        if items == ["hang"]:
            hangs.wait(LIMIT_SECONDS)
        try:
            return steps(items)
        except BaseException as error:
            seen.append(error)
            raise

    with Batcher(run, background=[["offline"], [3]], run_timeout_ms=500, on_error=on_error) as batcher:
        assert steps.has_begun.wait(LIMIT_SECONDS)
        with pytest.raises(RunTimeout):
            batcher.submit_sync("hang")
        steps.may_end.set()
        first, second = batcher.background
        hangs.set()
        if on_error == "bisect":
            assert first.results == ["offline"]
        else:
            assert str(first.error) == (
                'requests that ran in the middle of this part hang, and with on_error="raise" no item runs twice'
            )
        assert second.results == [6]
        assert batcher.submit_sync(2) == 4
    assert steps.calls.count(["offline"]) == num_runs
    wait_until(lambda: seen)
    assert [type(error) for error in seen] == [Closed]


def test_a_function_that_hides_the_end_of_its_call_gives_nothing_twice():
    hangs, has_begun, may_end, hidden, calls = threading.Event(), threading.Event(), threading.Event(), [], []

    def run(items):
        calls.append(items)
        if items == ["hang"]:
            hangs.wait(LIMIT_SECONDS)
        is_first = items == ["offline"] and calls.count(items) == 1
        while is_first and len(hidden) < 3:
            has_begun.set()
            time.sleep(0.001)
            try:
                give_way()
            except Closed as error:
                hidden.append(error)
        if is_first:
            may_end.set()
            return ["first"]
        return [f"again {item}" for item in items]

    with Batcher(run, background=[["offline"]], run_timeout_ms=500) as batcher:
        assert has_begun.wait(LIMIT_SECONDS)
        with pytest.raises(RunTimeout):
            batcher.submit_sync("hang")
        assert first_of(batcher.background).results == ["again offline"]
        hangs.set()
        assert may_end.wait(LIMIT_SECONDS)
        assert batcher.submit_sync(1) == "again 1"
        assert batcher.background.num_batches == 1
    assert len(hidden) == 3


class Memory:
    """Has no room for requests while an offline item is in the middle, on any batcher that runs it."""

    def __init__(self):
        self.holders, self.num_short = set(), 0

    def run_as(self, steps):
        def run(items):
            me = object()
            if "offline" in items:
                self.holders.add(me)
            elif self.holders:
                self.num_short += 1
                raise MemoryError
            try:
                return steps(items)
            finally:
                self.holders.discard(me)

        return run


@pytest.mark.parametrize("num_items", [1, 4])
def test_requests_for_which_a_part_leaves_no_memory_run_after_it(num_items):
    memory, steps = Memory(), Steps()
    with Batcher(memory.run_as(steps), background=[["offline"]]) as batcher:
        assert steps.has_begun.wait(LIMIT_SECONDS)
        with ThreadPoolExecutor(num_items) as pool:
            answers = pool.map(batcher.submit_sync, range(num_items))
            wait_until(lambda: memory.num_short)
            steps.may_end.set()
            assert list(answers) == [2 * number for number in range(num_items)]
        assert first_of(batcher.background).results == ["offline"]
        stats = batcher.stats()
        assert (stats.max_tokens, stats.num_ooms) == (None, memory.num_short)


def test_where_nothing_runs_twice_memory_that_a_part_holds_is_an_error():
    memory, steps = Memory(), Steps()
    with Batcher(memory.run_as(steps), background=[["offline"]], on_oom="raise") as batcher:
        assert steps.has_begun.wait(LIMIT_SECONDS)
        with pytest.raises(MemoryError):
            batcher.submit_sync(1)
        steps.may_end.set()
        assert first_of(batcher.background).results == ["offline"]


def test_memory_that_a_part_of_another_batcher_of_the_device_holds_is_waited_for():
    device, memory, steps = Device(), Memory(), Steps()
    with (
        Batcher(memory.run_as(steps), background=[["offline"]], device=device) as offline,
        Batcher(memory.run_as(Steps()), device=device) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        assert steps.has_begun.wait(LIMIT_SECONDS)
        answer = pool.submit(other.submit_sync, 1)
        wait_until(lambda: memory.num_short)
        steps.may_end.set()
        assert answer.result(LIMIT_SECONDS) == 2
        assert first_of(offline.background).results == ["offline"]


@contextmanager
def busy(batcher):
    """Keep requests waiting in a batcher, more than it can run at once."""
    is_over = threading.Event()

    def ask():
        while not is_over.is_set():
            batcher.submit_sync("small")

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask) for _ in range(4)]
        try:
            yield
        finally:
            is_over.set()
        for one in asked:
            one.result(LIMIT_SECONDS)


@pytest.mark.parametrize(
    ("offline", "flooded"),
    [(0, None), (0, 0), (0, 1), (1, 0), (1, 1)],
    ids=["one batcher", "one on a device", "another is busy", "the part is of another", "that one is busy too"],
)
def test_requests_that_need_the_memory_of_a_part_run_also_if_others_never_stop_coming(offline, flooded):
    steps, holders, num_short = Steps(), set(), []

    def run(items):
        if "offline" in items:
            holders.add(1)
            results = steps(items)
            for _ in range(5):
                give_way()
            holders.clear()
            return results
        if "big" in items and holders:
            num_short.append(1)
            raise MemoryError
        time.sleep(0.002)  # as long as a call of a model, so that the next request waits when it ends
        return items

    device = None if flooded is None else Device()
    works = [[["offline"]] if index == offline else None for index in range(2)]
    batchers = [Batcher(run, background=work, device=device, max_items=1) for work in works]
    with batchers[0], batchers[1], ThreadPoolExecutor(1) as pool:
        assert steps.has_begun.wait(LIMIT_SECONDS)
        answer = pool.submit(batchers[0].submit_sync, "big")
        wait_until(lambda: num_short)
        with busy(batchers[flooded or 0]):
            steps.may_end.set()
            assert answer.result(LIMIT_SECONDS) == "big"
        assert first_of(batchers[offline].background).results == ["offline"]


def _nested(depth, run):
    return run() if depth == 0 else _nested(depth - 1, run)


@pytest.mark.parametrize("left", range(8, 36, 4))
def test_a_part_deep_in_calls_of_its_own_hurts_no_request(left):
    may_end, looks = [], []

    def look():  # only calls that need no room of their own
        end = time.monotonic() + LIMIT_SECONDS
        while not may_end and time.monotonic() < end:
            looks.append(1)
            give_way()
            time.sleep(0.001)

    def run(items):
        if "offline" in items:
            depth, frame = 0, sys._getframe()
            while frame is not None:
                depth, frame = depth + 1, frame.f_back
            _nested(sys.getrecursionlimit() - depth - left, look)
        return items

    with Batcher(run, background=[["offline"]]) as batcher, ThreadPoolExecutor(1) as pool:
        wait_until(lambda: looks or batcher.background.num_batches)
        answer = pool.submit(batcher.submit_sync, 1)
        wait_until(lambda: batcher.stats().num_submitted)
        num_looks = len(looks)
        wait_until(lambda: len(looks) > num_looks + 2 or batcher.background.num_batches)
        may_end.append(1)
        assert answer.result(LIMIT_SECONDS) == 1
        assert first_of(batcher.background).index == 0
        assert batcher.stats().is_healthy


def test_a_request_too_deep_for_what_a_part_leaves_runs_after_it():
    steps, depths = Steps(), []

    def run(items):
        if "offline" in items:
            return _nested(sys.getrecursionlimit() * 4 // 10, lambda: steps(items))
        depths.append(items)
        _nested(sys.getrecursionlimit() * 6 // 10, list)
        return items

    with Batcher(run, background=[["offline"]]) as batcher, ThreadPoolExecutor(1) as pool:
        assert steps.has_begun.wait(LIMIT_SECONDS)
        answer = pool.submit(batcher.submit_sync, 1)
        wait_until(lambda: depths)
        steps.may_end.set()
        assert answer.result(LIMIT_SECONDS) == 1
        assert first_of(batcher.background).results == ["offline"]
    assert depths == [[1], [1]]


def test_a_part_that_runs_out_of_memory_after_it_gave_way_runs_in_halves():
    steps = Steps()

    def run(items):
        results = steps(items)
        if len(items) > 1 and "offline" in items:
            raise MemoryError
        return results

    with Batcher(run, background=[["offline"] * 2] * 3) as batcher:
        assert steps.has_begun.wait(LIMIT_SECONDS)
        assert batcher.submit_sync(1) == 2
        steps.may_end.set()
        assert [batch.results for batch in batcher.background] == [["offline"] * 2] * 3
        assert batcher.submit_sync(3) == 6


ENDINGS = (SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit, StopIteration)


@pytest.mark.parametrize("ending", ENDINGS)
def test_what_would_end_a_thread_ends_only_the_request_or_the_part_that_raised_it(ending):
    steps = Steps()

    def run(items):
        results = steps(items)
        if "bad" in items or ("offline" in items and steps.calls.count(["offline"]) == 1):
            raise ending
        return results

    with Batcher(run, background=[["offline"], ["offline"]]) as batcher:
        assert steps.has_begun.wait(LIMIT_SECONDS)
        with pytest.raises(RuntimeError):
            batcher.submit_sync("bad")
        assert batcher.submit_sync(1) == 2
        steps.may_end.set()
        first, second = batcher.background
        assert (type(first.error).__name__, second.results) == (
            ending.__name__ if issubclass(ending, Exception) else "RunInterrupted",
            ["offline"],
        )
        assert batcher.submit_sync(2) == 4


def test_what_a_part_sets_in_its_context_is_its_own():
    name = contextvars.ContextVar("name", default="nobody")
    steps, seen = Steps(), []

    def run(items):
        seen.append(name.get())
        name.set(items[0])
        results = steps(items)
        return [(name.get(), result) for result in results]

    with Batcher(run, background=[["offline"]]) as batcher:
        assert steps.has_begun.wait(LIMIT_SECONDS)
        assert batcher.submit_sync(1) == (1, 2)
        assert batcher.submit_sync(2) == (2, 4)
        steps.may_end.set()
        assert first_of(batcher.background).results == [("offline", "offline")]
    assert seen[:2] == ["nobody", "nobody"]


def test_requests_that_wait_on_purpose_run_in_the_middle_when_their_window_ends():
    steps = Steps()
    with Batcher(steps, policy="window", max_wait_ms=200, background=[["offline"]]) as batcher:
        assert steps.has_begun.wait(LIMIT_SECONDS)
        assert sorted(batcher.map([1, 2, 3])) == [2, 4, 6]
        steps.may_end.set()
        assert first_of(batcher.background).results == ["offline"]
        stats = batcher.stats()
    assert stats.num_batches == 1
    assert [call for call in steps.calls if call != ["offline"]] == [[1, 2, 3]]


def test_while_requests_wait_on_purpose_those_of_another_batcher_do_not_wait_for_them():
    device, steps = Device(), Steps()
    with (
        Batcher(steps, policy="window", max_wait_ms=60_000, background=[["offline"]], device=device) as offline,
        Batcher(list, device=device) as other,
        ThreadPoolExecutor(1) as pool,
    ):
        assert steps.has_begun.wait(LIMIT_SECONDS)
        answer = pool.submit(offline.submit_sync, 1, priority=10)
        wait_until(lambda: offline.stats().num_waiting)
        assert [other.submit_sync(number, priority=-10) for number in range(3)] == [0, 1, 2]
        offline.configure(max_wait_ms=0)  # from the next look on
        assert answer.result(LIMIT_SECONDS) == 2
        steps.may_end.set()
        assert first_of(offline.background).results == ["offline"]


def test_figures_in_the_middle_tell_of_requests_alone():
    steps, found = Steps(), []

    def run(items):
        results = steps(items)
        if items == [1]:
            found.append(batcher.stats())
        return results

    with Batcher(run, background=[["offline"]]) as batcher:
        assert steps.has_begun.wait(LIMIT_SECONDS)
        assert batcher.submit_sync(1) == 2
        found.append(batcher.stats())
        steps.may_end.set()
        first_of(batcher.background)
    assert [(stats.num_running, stats.num_waiting, stats.num_answered) for stats in found] == [(1, 0, 0), (0, 0, 1)]


def test_an_item_longer_than_the_deadline_runs_also_if_only_requests_told_how_often_the_function_gives_way():
    def run(items):
        for length in items:
            for _ in range(length):
                time.sleep(0.001)
                give_way()
        return items

    late_batches = LateBatches([[400]])
    work = Background(late_batches)
    with Batcher(run, background=work, deadline_ms=300, length_of=int) as batcher:
        for length in (1, 2, 3, 4, 5, 6, 8, 10) * 3:
            assert batcher.submit_sync(length, deadline_ms=60_000) == length
        late_batches.may_come.set()
        assert first_of(work).results == [400]


class LateBatches:
    """Batches that come only once they are told to."""

    def __init__(self, batches):
        self.batches, self.may_come = batches, threading.Event()

    def __iter__(self):
        assert self.may_come.wait(LIMIT_SECONDS)
        yield from self.batches


def results_of(work):
    return [batch.results for batch in work]


def test_of_two_batchers_that_give_way_on_a_device_one_part_at_most_has_begun():
    device, num_begun, most = Device(), [0], [0]

    def run(items):
        is_part = isinstance(items[0], str)
        num_begun[0] += is_part
        most[0] = max(most[0], num_begun[0])
        for _ in range(5):
            time.sleep(0.0005)
            give_way()
        num_begun[0] -= is_part
        return [2 * item for item in items]

    batches = [[f"{number}"] for number in range(25)]
    wanted = [[2 * name for name in names] for names in batches]
    with (
        Batcher(run, background=batches, device=device) as one,
        Batcher(run, background=batches, device=device) as two,
        Batcher(run, device=device) as three,
        ThreadPoolExecutor(5) as pool,
    ):
        numbers = range(60)
        answers = [pool.submit(list, batcher.map(numbers, max_in_flight=2)) for batcher in (one, two, three)]
        found = [pool.submit(results_of, batcher.background) for batcher in (one, two)]
        assert [answer.result(LIMIT_SECONDS) for answer in answers] == [[2 * number for number in numbers]] * 3
        assert [batches.result(LIMIT_SECONDS) for batches in found] == [wanted] * 2
    assert most == [1]


def test_only_the_thread_of_the_call_gives_way_and_rows_may_do_so_while_they_are_read():
    threads, has_begun, may_end = set(), threading.Event(), threading.Event()

    def run(items):
        if items != ["offline"]:
            threads.add(threading.get_ident())
            return items
        return rows(items)

    def rows(items):
        with ThreadPoolExecutor(1) as pool:
            while not may_end.is_set():
                has_begun.set()
                pool.submit(give_way).result()
                time.sleep(0.001)
                give_way()
        threads.add(threading.get_ident())
        yield from items

    with Batcher(run, background=[["offline"]]) as batcher:
        assert has_begun.wait(LIMIT_SECONDS)
        assert [batcher.submit_sync(number) for number in (1, 2)] == [1, 2]
        may_end.set()
        assert first_of(batcher.background).results == ["offline"]
    assert len(threads) == 1


def test_a_function_that_asks_its_own_batcher_is_refused_in_the_middle_and_after_it():
    steps, refused = Steps(), []

    def run(items):
        results = steps(items)
        with pytest.raises(ArgumentError, match="submits to its own batcher"):
            batcher.submit_sync(0)
        refused.append(items)
        return results

    with Batcher(run, background=[["offline"]]) as batcher:
        assert steps.has_begun.wait(LIMIT_SECONDS)
        assert batcher.submit_sync(1) == 2
        steps.may_end.set()
        assert first_of(batcher.background).results == ["offline"]
    assert refused == [[1], ["offline"]]


class Gate:
    """A part that stands still until the gate opens, gives way once, and ends; every call is remembered."""

    def __init__(self):
        self.has_begun, self.gate, self.calls = threading.Event(), threading.Event(), []

    def __call__(self, items):
        self.calls.append(items)
        if items == ["offline"]:
            self.has_begun.set()
            assert self.gate.wait(LIMIT_SECONDS)
            give_way()
        return items


def test_requests_that_leave_in_the_middle_are_not_run():
    gate = Gate()

    async def main():
        async with Batcher(gate, background=[["offline"]]) as batcher:
            assert await asyncio.to_thread(gate.has_begun.wait, LIMIT_SECONDS)
            tasks = [asyncio.create_task(batcher.submit(number)) for number in range(6)]
            await asyncio.sleep(0)
            for task in tasks[::2]:
                task.cancel()
            await asyncio.sleep(0)
            gate.gate.set()
            answers = await asyncio.gather(*tasks, return_exceptions=True)
            return answers, [batch.results async for batch in batcher.background]

    answers, results = asyncio.run(main())
    assert (answers[1::2], results) == ([1, 3, 5], [["offline"]])
    assert all(isinstance(answer, asyncio.CancelledError) for answer in answers[::2])
    assert gate.calls == [["offline"], [1, 3, 5]]


def test_a_request_that_is_too_late_for_the_next_look_is_not_run():
    gate = Gate()
    with Batcher(gate, background=[["offline"]]) as batcher:
        assert gate.has_begun.wait(LIMIT_SECONDS)
        with pytest.raises(DeadlineExceeded):
            batcher.submit_sync(1, deadline_ms=20)
        gate.gate.set()
        assert first_of(batcher.background).results == ["offline"]
        assert batcher.submit_sync(2) == 2
    assert gate.calls == [["offline"], [2]]


def test_more_urgent_requests_go_first_in_the_middle():
    gate = Gate()
    with Batcher(gate, background=[["offline"]], max_items=1) as batcher, ThreadPoolExecutor(3) as pool:
        assert gate.has_begun.wait(LIMIT_SECONDS)
        answers = []
        for number, priority in ((1, -5), (2, 0), (3, 5)):
            answers.append(pool.submit(batcher.submit_sync, number, priority=priority))
            wait_until(lambda number=number: batcher.stats().num_waiting == number)
        gate.gate.set()
        assert [answer.result(LIMIT_SECONDS) for answer in answers] == [1, 2, 3]
    assert gate.calls == [["offline"], [3], [2], [1]]


def test_answers_in_the_middle_may_be_awaited_and_need_no_loop_of_the_part():
    steps = Steps()

    def run(items):
        return double(items) if "offline" not in items else steps(items)

    async def main():
        async with Batcher(run, background=[["offline"]]) as batcher:
            assert await asyncio.to_thread(steps.has_begun.wait, LIMIT_SECONDS)
            answers = [await batcher.submit(1), await asyncio.to_thread(batcher.submit_sync, 2)]
            steps.may_end.set()
            return answers, [batch.results async for batch in batcher.background]

    assert asyncio.run(main()) == ([2, 4], [["offline"]])


def test_requests_compute_in_the_modes_in_which_the_part_began():
    torch = pytest.importorskip("torch")
    steps = Steps()

    def run(items):
        square = torch.ones(2, 2)
        outside = (square @ square).dtype, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            results = steps(items)
            inside = (square @ square).dtype, torch.is_inference_mode_enabled()
        return [(*outside, *inside) for _ in results]

    with Batcher(run, background=[["offline"]]) as batcher:
        assert steps.has_begun.wait(LIMIT_SECONDS)
        in_the_middle = [batcher.submit_sync(number) for number in (1, 2)]
        steps.may_end.set()
        assert first_of(batcher.background).results == [(torch.float32, True, False, torch.bfloat16, True)]
        assert in_the_middle == [(torch.float32, True, False, torch.bfloat16, True)] * 2


def test_modes_that_a_request_leaves_behind_are_not_those_of_the_part():
    torch = pytest.importorskip("torch")
    steps = Steps()

    def run(items):
        if "offline" not in items:
            torch.set_grad_enabled(False)
            torch.set_autocast_enabled("cpu", True)
            return items
        results = steps(items)
        square = torch.ones(2, 2)
        return [(torch.is_grad_enabled(), (square @ square).dtype) for _ in results]

    with Batcher(run, background=[["offline"]]) as batcher:
        assert steps.has_begun.wait(LIMIT_SECONDS)
        assert [batcher.submit_sync(number) for number in (1, 2)] == [1, 2]
        steps.may_end.set()
        assert first_of(batcher.background).results == [(True, torch.float32)]


def test_what_stands_in_the_place_of_torch_ends_nothing(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    steps = Steps()
    with Batcher(steps, background=[["offline"]]) as batcher:
        assert steps.has_begun.wait(LIMIT_SECONDS)
        assert batcher.submit_sync(1) == 2
        steps.may_end.set()
        assert first_of(batcher.background).results == ["offline"]


def test_a_part_that_records_a_graph_gives_way_once_it_has(monkeypatch):
    torch = pytest.importorskip("torch")
    asked, is_recording = [], [True]

    def is_capturing():
        asked.append(1)
        return is_recording[0]

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", is_capturing)
    steps = Steps()
    with Batcher(steps, background=[["offline"]]) as batcher, ThreadPoolExecutor(1) as pool:
        assert steps.has_begun.wait(LIMIT_SECONDS)
        answer = pool.submit(batcher.submit_sync, 1)
        wait_until(lambda: len(asked) > 3)
        assert steps.calls == [["offline"]]
        is_recording[0] = False
        assert answer.result(LIMIT_SECONDS) == 2
        steps.may_end.set()
        assert first_of(batcher.background).results == ["offline"]


def test_compiled_code_gives_way_whenever_it_runs():
    torch = pytest.importorskip("torch")
    has_begun, may_end = threading.Event(), threading.Event()

    @torch.compile(backend="eager")
    def compute(tensor):
        give_way()
        return tensor + 1

    compute(torch.ones(2))  # compiled where there is nothing to give way from

    def run(items):
        end = time.monotonic() + LIMIT_SECONDS / 3
        while items == ["offline"] and not may_end.is_set() and time.monotonic() < end:
            has_begun.set()
            assert compute(torch.ones(2)).tolist() == [2, 2]
            time.sleep(0.001)
        return items

    with Batcher(run, background=[["offline"]]) as batcher:
        assert has_begun.wait(LIMIT_SECONDS)
        assert batcher.submit_sync(1) == 1
        assert batcher.background.num_batches == 0
        may_end.set()
        assert first_of(batcher.background).results == ["offline"]


def test_a_batcher_that_drops_what_waits_lets_the_part_end():
    steps = Steps()
    batcher = Batcher(steps, policy="window", max_wait_ms=60_000, background=[["offline"], ["offline"]])
    with ThreadPoolExecutor(2) as pool:
        assert steps.has_begun.wait(LIMIT_SECONDS)
        answer = pool.submit(batcher.submit_sync, 1)
        wait_until(lambda: batcher.stats().num_waiting)
        closing = pool.submit(batcher.close_sync, drain=False)
        with pytest.raises(Closed):
            answer.result(LIMIT_SECONDS)
        steps.may_end.set()
        closing.result(LIMIT_SECONDS)
    batches = iter(batcher.background)
    assert next(batches).results == ["offline"]
    with pytest.raises(Closed):
        next(batches)
    assert steps.calls == [["offline"]]


def test_a_program_ends_in_the_middle_of_a_part():
    result = run_script(
        """
        import time
        from batchwright.serve import Batcher, give_way

        def run(items):
            while items == ["offline"]:
                give_way()
                time.sleep(0.001)
            return [2 * item for item in items]

        batcher = Batcher(run, background=[["offline"]])
        print(batcher.submit_sync(1))
        import batchwright.serve._engine.lifetimes as lifetimes
        lifetimes.EXIT_SECONDS = 0.2
        """
    )
    assert (result.stdout, result.stderr, result.returncode) == ("2\n", "", 0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_in_the_middle_gives_way_to_nobody():
    result = run_script(
        """
        import os, threading, time, warnings
        from batchwright.serve import Batcher, Device, give_way

        warnings.simplefilter("ignore", DeprecationWarning)
        device, has_begun, may_end = Device(), threading.Event(), threading.Event()

        def child():
            give_way()
            with Batcher(lambda items: [item + 1 for item in items], device=device) as batcher:
                return batcher.submit_sync(6)

        def forked():
            pid = os.fork()
            if not pid:
                os._exit(child())
            return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

        def run(items):
            while items == ["offline"] and not may_end.is_set():
                has_begun.set()
                give_way()
                time.sleep(0.001)
            return [forked() for _ in items]

        with Batcher(run, background=[["offline"]], device=device) as batcher:
            has_begun.wait(30)
            print(batcher.submit_sync(1))
            may_end.set()
            print([batch.results for batch in batcher.background])
        """
    )
    assert (result.stdout, result.stderr, result.returncode) == ("7\n[[7]]\n", "", 0)


def _stressed(seed):
    """Return what went wrong among requests of every kind and offline work of every kind; nothing, if all is right."""
    random = Random(seed)
    device = Device() if random.random() < 0.5 else None
    depths, wrong = threading.local(), []

    def run(items):
        depths.now = getattr(depths, "now", 0) + 1
        if depths.now > 2 or (depths.now == 2 and "offline" in items[0]):
            wrong.append(f"depth {depths.now}: {items}")
        try:
            results = []
            for kind, number in items:
                for _ in range(number % 4):
                    give_way()
                    if number % 5 == 0:
                        time.sleep(0.0002)
                if number % 11 == 0:
                    raise ERRORS[number % len(ERRORS)](number)
                results.append((kind, -number))
            if len(items) > 6 and sum(number for _, number in items) % 3 == 0:
                raise MemoryError
            return results
        finally:
            depths.now -= 1

    def check(kind, number, ask):
        try:
            answer = ask()
        except Exception as error:
            if number % 11:
                wrong.append(f"{kind} {number}: {error!r}")
            return
        if answer != (kind, -number) or number % 11 == 0:
            wrong.append(f"{kind} {number}: {answer!r}")

    def make():
        batches = [[("offline", random.randrange(1, 400)) for _ in range(random.randrange(9))] for _ in range(30)]
        return batches, Batcher(
            run,
            policy=random.choice(["adaptive", "greedy", "window"]),
            max_items=random.choice([1, 3, 16]),
            max_wait_ms=20,
            num_workers=random.choice([1, 1, 2, 4]),
            device=device,
            background=batches,
            run_timeout_ms=random.choice([None, 20_000]),
        )

    def ask_all(batcher, seed):
        random = Random(seed)
        for _ in range(30):
            number, priority = random.randrange(1, 400), random.randrange(-3, 4)
            deadline = random.choice([None, 30_000])
            ask = functools.partial(batcher.submit_sync, ("ask", number), deadline_ms=deadline, priority=priority)
            check("ask", number, ask)
            if random.random() < 0.03:
                batcher.configure(max_items=random.randrange(1, 20))
            batcher.stats()

    async def ask_and_leave(batcher, seed):
        random = Random(seed)
        numbers = [random.randrange(1, 400) for _ in range(60)]
        tasks = [asyncio.create_task(batcher.submit(("ask", number))) for number in numbers]
        for task in tasks:
            if random.random() < 0.2:
                await asyncio.sleep(0.001)
                task.cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        for number, answer in zip(numbers, answers, strict=True):
            if not isinstance(answer, BaseException):
                check("ask", number, lambda answer=answer: answer)
            elif number % 11 and not isinstance(answer, asyncio.CancelledError):
                wrong.append(f"left {number}: {answer!r}")

    def read(batcher, batches):
        found = list(batcher.background)
        if [batch.items for batch in found] != batches:
            wrong.append("other batches")
        for batch in found:
            is_bad = any(number % 11 == 0 for _, number in batch.items)
            wanted = [] if is_bad else [(kind, -number) for kind, number in batch.items]
            if (batch.results, batch.error is not None) != (wanted, is_bad):
                wrong.append(f"batch {batch}")

    made = [make() for _ in range(random.choice([1, 2, 3]) if device else 1)]
    targets = []
    for batches, batcher in made:
        targets.append(functools.partial(read, batcher, batches))
        targets += [functools.partial(ask_all, batcher, random.random()) for _ in range(2)]
        targets.append(functools.partial(lambda batcher, seed: asyncio.run(ask_and_leave(batcher, seed)), batcher, 1))
    threads = [threading.Thread(target=target, daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_SECONDS)
        if thread.is_alive():
            wrong.append("somebody still waits")
            return wrong
    for _, batcher in made:
        stats = batcher.stats()
        if stats.failure or stats.num_running or stats.num_waiting or stats.num_abandoned:
            wrong.append(f"{stats}")
        batcher.close_sync(timeout_seconds=LIMIT_SECONDS)
        if not batcher._workers._work.is_idle:
            wrong.append("not idle")
    return wrong


ERRORS = (ValueError, SystemExit, KeyboardInterrupt, asyncio.CancelledError, GeneratorExit, StopIteration, KeyError)


@pytest.mark.parametrize("seed", range(num_cases(4, thorough=100)))
def test_whatever_comes_in_the_middle_everything_ends_once_with_its_own_answer_or_error(seed):
    assert _stressed(seed) == []
