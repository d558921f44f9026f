"""Functions that hang: their callers are told, their threads are given up, and others take their place."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from batchwright.errors import ArgumentError
from batchwright.serve import Batcher, Closed, DeadlineExceeded, Device, RunTimeout, WorkerDied
from batchwright.serve._engine import workers
from batchwright.serve._engine.runners import ThreadRunner, Worker
from batchwright.serve._engine.turns import Claim

from ..tools import wait_until


class Hanging:
    """Doubles numbers; a call with a negative one hangs until the gate opens."""

    def __init__(self):
        self.gate = threading.Event()

    def __call__(self, items):
        if min(items) < 0:
            self.gate.wait(60)
        return [2 * item for item in items]


@pytest.fixture
def hanging():
    function = Hanging()
    yield function
    function.gate.set()


def test_a_thread_that_hangs_is_given_up_and_another_takes_its_place(hanging):
    with Batcher(hanging, run_timeout_ms=50) as batcher:
        with pytest.raises(RunTimeout, match="ran for 50 ms"):
            batcher.submit_sync(-1)
        assert batcher.submit_sync(4) == 8
        stats = batcher.stats()
        assert (stats.num_abandoned, stats.num_failed, stats.num_answered, stats.num_running) == (1, 1, 1, 0)
        hanging.gate.set()
        wait_until(lambda: not batcher._workers._hung)


def test_what_a_thread_returns_after_it_was_given_up_goes_to_nobody(hanging):
    with Batcher(hanging, run_timeout_ms=50) as batcher:
        with pytest.raises(RunTimeout):
            batcher.submit_sync(-1)
        hanging.gate.set()
        wait_until(lambda: not batcher._workers._hung)
        assert batcher.stats().num_answered == 0
        assert batcher.submit_sync(1) == 2


def test_a_caller_has_its_error_at_its_deadline_while_the_function_hangs(hanging):
    async def main():
        async with Batcher(hanging, run_timeout_ms=500) as batcher:
            with pytest.raises(DeadlineExceeded, match="still running"):
                await batcher.submit(-1, deadline_ms=200)  # a busy machine has begun by then
            assert batcher.stats().num_abandoned == 0  # it still hangs, and may
            assert batcher.stats().num_shed == 1
            assert await batcher.submit(3) == 6

    asyncio.run(asyncio.wait_for(main(), 30))


def test_without_a_time_out_a_late_answer_is_still_an_answer(hanging):
    async def main():
        async with Batcher(hanging) as batcher:
            task = asyncio.create_task(batcher.submit(-1, deadline_ms=200))
            await asyncio.sleep(0.3)
            hanging.gate.set()
            assert await task == -2
            assert batcher.stats().num_missed == 1

    asyncio.run(asyncio.wait_for(main(), 30))


def test_after_many_threads_that_hang_the_batcher_says_that_it_has_failed(hanging, monkeypatch):
    monkeypatch.setattr(workers, "MAX_HUNG", 2)
    batcher = Batcher(hanging, run_timeout_ms=30)
    for _ in range(2):
        with pytest.raises(RunTimeout):
            batcher.submit_sync(-1)
    wait_until(lambda: not batcher.is_open)
    assert "2 threads hang in the batched function" in batcher.stats().failure
    with pytest.raises(Closed):
        batcher.submit_sync(1)
    batcher.close_sync(timeout_seconds=30)


def test_threads_that_came_back_are_not_counted_against_the_limit(monkeypatch):
    monkeypatch.setattr(workers, "MAX_HUNG", 2)
    pause = threading.Event()

    def slow(items):
        pause.wait(0.3)
        return items

    with Batcher(slow, run_timeout_ms=20) as batcher:
        for number in range(1, 4):
            with pytest.raises(RunTimeout):
                batcher.submit_sync(1)
            wait_until(lambda: not batcher._workers._hung)
            assert batcher.stats().num_abandoned == number
        assert batcher.is_open


@pytest.mark.parametrize("from_a_loop", [True, False])
def test_a_coroutine_that_takes_too_long_is_cancelled_and_fails_alone(from_a_loop):
    cancelled = []

    async def double(items):
        try:
            await asyncio.sleep(3600 if -1 in items else 0)
        except asyncio.CancelledError:
            cancelled.append(items)
            raise
        return [2 * item for item in items]

    async def main(batcher):
        return await asyncio.gather(*map(batcher.submit, (1, -1, 2, 3)), return_exceptions=True)

    with Batcher(double, run_timeout_ms=100, policy="window", max_wait_ms=50) as batcher:
        if from_a_loop:
            ends = asyncio.run(asyncio.wait_for(main(batcher), 30))
        else:
            with ThreadPoolExecutor(4) as pool:
                futures = [pool.submit(batcher.submit_sync, item) for item in (1, -1, 2, 3)]
                ends = [future.exception(30) or future.result() for future in futures]
        assert [ends[0], *ends[2:]] == [2, 4, 6]
        assert isinstance(ends[1], RunTimeout)
        assert batcher.stats().num_abandoned == 0
    assert cancelled


@pytest.mark.parametrize("kind", [RunTimeout, WorkerDied])
def test_an_item_that_another_batcher_timed_out_or_lost_fails_alone_however_many_there_are(kind):
    def ask_another(items):
        for item in items:
            if item % 4 == 0:
                raise kind(f"of {item}")
        return items

    async def main():
        async with Batcher(ask_another, policy="greedy") as batcher:
            return await asyncio.gather(*map(batcher.submit, range(64)), return_exceptions=True)

    ends = asyncio.run(asyncio.wait_for(main(), 30))
    assert [str(end) for end in ends] == [str(item) if item % 4 else f"of {item}" for item in range(64)]


def test_a_call_that_hangs_gives_its_device_back(hanging):
    device = Device()
    with Batcher(hanging, run_timeout_ms=50, device=device) as one, Batcher(hanging, device=device) as two:
        with pytest.raises(RunTimeout):
            one.submit_sync(-1)
        assert two.submit_sync(1) == 2
        assert one.submit_sync(2) == 4


@pytest.mark.parametrize("timeout", [0, -1, "1"])
def test_a_time_out_that_is_none_is_refused(timeout):
    with pytest.raises(ArgumentError, match="run_timeout_ms"):
        Batcher(list, run_timeout_ms=timeout)


def test_the_timers_of_a_map_end_with_its_items():
    async def main():
        async with Batcher(list) as batcher:
            assert await batcher.map(range(100), deadline_ms=3_600_000) == list(range(100))
            await asyncio.sleep(0)
            return [timer for timer in asyncio.get_running_loop()._scheduled if not timer.cancelled()]

    assert asyncio.run(main()) == []


async def hang_below_zero(items):
    if min(items) < 0:
        await asyncio.sleep(3600)
    return [2 * item for item in items]


def test_a_coroutine_that_was_cancelled_in_time_is_not_taken_to_hang():
    runner = ThreadRunner(hang_below_zero, timeout_seconds=0.05)
    worker = Worker(runner, Claim(lambda: 0.0), current=("a call", time.monotonic()))
    assert isinstance(runner([-1]).error, RunTimeout)
    assert not worker.is_late(0.05)  # its worker has yet to note that the call is over
    runner.close()


def test_mates_of_a_coroutine_that_hangs_are_answered_however_long_the_lock_is_busy():
    with Batcher(hang_below_zero, run_timeout_ms=100) as batcher, ThreadPoolExecutor(9) as pool:
        first = pool.submit(batcher.submit_sync, -1)
        mates = [pool.submit(batcher.submit_sync, item) for item in (1, 2, 3, -2, 4, 5, 6)]
        for _ in range(20):  # whoever wants to note the end of a call has to wait past its time
            with batcher._workers._changed:
                time.sleep(0.15)
            time.sleep(0.001)
        assert isinstance(first.exception(30), RunTimeout)
        assert isinstance(mates.pop(3).exception(30), RunTimeout)
        assert [mate.result(30) for mate in mates] == [2, 4, 6, 8, 10, 12]
        assert batcher.stats().num_abandoned == 0


def test_a_worker_that_cannot_be_replaced_fails_its_batcher_and_its_callers_hear_of_it(monkeypatch):
    def hang(items):
        monkeypatch.setattr(threading.Thread, "start", no_thread)
        gate.wait(30)
        return items

    def no_thread(thread):
        raise RuntimeError("can't start new thread")

    gate = threading.Event()
    batcher = Batcher(hang, run_timeout_ms=100)
    with pytest.raises(RunTimeout):
        batcher.submit_sync(1)
    while batcher.is_open:
        time.sleep(0.001)
    monkeypatch.undo()
    gate.set()
    assert batcher.stats().failure == "RuntimeError: can't start new thread"
    with pytest.raises(Closed):
        batcher.submit_sync(2)
