"""Offline work beside live requests, with real threads: results in order, errors told, nobody waits forever."""

import asyncio
import contextlib
import gc
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from batchwright.errors import ArgumentError
from batchwright.serve import Background, Batcher, Closed, DeadlineExceeded, TooLarge

from . import in_processes
from .tools import ROOT, Recorder, wait_until


def double(items):
    return [2 * item for item in items]


async def double_later(items):
    await asyncio.sleep(0)
    return double(items)


BATCHES = [[1, 2, 3], [4], [], [5, 6]]


@pytest.mark.parametrize("function", [double, double_later])
def test_the_results_come_in_order(function):
    with Batcher(function, background=BATCHES) as batcher:
        batches = list(batcher.background)
    assert [(batch.index, batch.items, batch.results, batch.error) for batch in batches] == [
        (0, [1, 2, 3], [2, 4, 6], None),
        (1, [4], [8], None),
        (2, [], [], None),
        (3, [5, 6], [10, 12], None),
    ]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_a_loop_reads_while_requests_are_answered(num_workers):
    async def main():
        work = Background([[item, item + 1] for item in range(200)])
        async with Batcher(double, background=work, num_workers=num_workers) as batcher:
            answers = asyncio.create_task(collect(batcher.map(range(100))))
            results = [batch.results async for batch in work]
            assert await answers == [2 * item for item in range(100)]
        assert results == [[2 * item, 2 * item + 2] for item in range(200)]
        assert batcher.stats().num_answered == 100  # background work is not counted as requests
        assert (work.num_batches, work.num_items, work.num_failed) == (200, 400, 0)

    async def collect(mapped):
        return await mapped

    asyncio.run(asyncio.wait_for(main(), 60))


def test_a_request_that_waits_goes_before_the_next_part():
    recorder = Recorder(held=True)
    with Batcher(recorder, background=[[1], [2], [3]]) as batcher, ThreadPoolExecutor(1) as pool:
        assert recorder.started.wait(30)
        answer = pool.submit(batcher.submit_sync, 50)
        while not batcher.stats().num_waiting:
            threading.Event().wait(0.001)
        recorder.gate.set()
        assert answer.result(30) == 100
        assert len(list(batcher.background)) == 3
    assert recorder.calls[:2] == [[1], [50]]


def test_an_error_is_part_of_what_it_gives_and_the_service_goes_on():
    recorder = Recorder(bad=[2])
    with Batcher(recorder, background=[[1], [2, 3], [4]]) as batcher:
        batches = list(batcher.background)
        assert batcher.submit_sync(5) == 10
    assert [batch.results for batch in batches] == [[2], [], [8]]
    assert str(batches[1].error) == "bad item 2"


def test_an_error_of_the_batches_themselves_reaches_the_reader_after_the_results():
    def broken():
        yield [1]
        raise OSError("the disk is gone")

    with Batcher(double, background=broken()) as batcher:
        reader = iter(batcher.background)
        assert next(reader).results == [2]
        with pytest.raises(OSError, match="the disk is gone"):
            next(reader)
        assert batcher.submit_sync(5) == 10


def test_a_length_that_cannot_be_measured_is_an_error_of_its_batch():
    with Batcher(list, length_of=len, background=[["a"], [None], ["b"]]) as batcher:
        first, second, third = batcher.background
    assert (first.results, third.results) == (["a"], ["b"])
    assert isinstance(second.error, TypeError)


def test_a_length_that_would_end_the_program_is_an_error_of_its_batch():
    def length_of(item):
        if item == 2:
            raise SystemExit(3)
        return 1

    with Batcher(list, length_of=length_of, background=[[1], [2], [3]]) as batcher:
        first, second, third = batcher.background
    assert (first.results, third.results) == ([1], [3])
    assert isinstance(second.error, SystemExit)


class Absent:
    """A proxy of nothing: whoever asks for its class gets an error."""

    @property
    def __class__(self):
        raise RuntimeError("outside of its context")


def test_a_result_that_raises_when_it_is_asked_for_its_class_hurts_nobody():
    absent = Absent()
    with Batcher(lambda items: [absent for _ in items], background=[[1, 2]]) as batcher:
        (batch,) = batcher.background
        assert [result is absent for result in batch.results] == [True, True]
        assert batcher.submit_sync(3) is absent


def test_a_worker_that_dies_in_offline_work_keeps_nobody_from_closing(monkeypatch):
    def broken(*arguments, **options):
        raise MemoryError("no room for the results")

    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    recorder = Recorder(held=True)
    batcher = Batcher(recorder, background=[[1]])
    monkeypatch.setattr(batcher.background._units, "finish", broken)
    recorder.gate.set()
    wait_until(lambda: not batcher.is_open)
    closing = threading.Thread(target=batcher.close_sync, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive()
    assert "no room for the results" in batcher.stats().failure


@pytest.mark.parametrize("is_async", [False, True])
def test_closing_before_the_end_tells_the_reader(is_async):
    def endless():
        while True:
            yield [1]

    batcher = Batcher(double, background=endless())
    work = batcher.background

    async def read():
        return [batch async for batch in work]

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(asyncio.run, read()) if is_async else pool.submit(list, work)
        while work.num_batches < 50:
            threading.Event().wait(0.001)
        batcher.close_sync()
        with pytest.raises(Closed, match="before all background batches had run"):
            reading.result(30)


def test_closing_waits_for_the_part_that_runs():
    recorder = Recorder(held=True)
    batcher = Batcher(recorder, background=[[1], [2]])
    assert recorder.started.wait(30)
    with ThreadPoolExecutor(1) as pool:
        closing = pool.submit(batcher.close_sync)
        threading.Event().wait(0.02)
        assert not closing.done()
        recorder.gate.set()
        closing.result(30)
    assert recorder.calls == [[1]]


def test_batches_are_read_only_as_fast_as_they_are_handed_out():
    read = []

    def batches():
        for index in range(100):
            read.append(index)
            yield [index]

    with Batcher(double, background=Background(batches(), max_ahead=4)) as batcher:
        while batcher.background.num_batches < 4:
            threading.Event().wait(0.001)
        assert len(read) <= 5  # one is read and waits for room
        assert [batch.results for batch in batcher.background] == [[2 * index] for index in range(100)]


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_a_forgotten_batcher_ends_its_background_work(worker):
    work = Background([[index] for index in range(10_000)])
    Batcher(double, worker=worker, background=work)
    gc.collect()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(list, work)
        try:
            assert isinstance(reading.exception(30), Closed)
        finally:
            work._units.stop()


def test_background_work_in_a_process(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    with Batcher(in_processes.obey, worker="process", background=[[1, "raise"], ["exit"], [2, 3]]) as batcher:
        batches = list(batcher.background)
        assert batcher.submit_sync(4) == 8
    assert str(batches[0].error) == "bad"
    assert "exit code 3" in str(batches[1].error)
    assert batches[2].results == [4, 6]
    assert str(ROOT) in sys.path


@pytest.mark.parametrize("batches", ["text", 7])
def test_what_holds_no_batches_is_refused(batches):
    with pytest.raises(ArgumentError, match="an iterable of lists of items"):
        Batcher(double, background=batches)


def test_an_item_in_place_of_a_batch_is_told_what_a_batch_is():
    with Batcher(double, background=[1, [2], None]) as batcher:
        first, second, third = batcher.background
    assert "must be a list of items, got int" in str(first.error)
    assert second.results == [4]
    assert "must be a list of items, got NoneType" in str(third.error)


def test_background_work_belongs_to_one_batcher():
    work = Background([[1]])
    with Batcher(double, background=work):
        with pytest.raises(ArgumentError, match="belongs to another batcher"):
            Batcher(double, background=work)
        assert [batch.results for batch in work] == [[2]]


def test_an_estimate_over_the_limit_runs_alone_and_is_not_refused():
    def note(texts):
        calls.append(texts)
        return [text.upper() for text in texts]

    calls = []
    with Batcher(note, max_tokens=5, background=[["ab", "beyond the limit", "cd"]]) as batcher:
        (batch,) = batcher.background
    assert batch.results == ["AB", "BEYOND THE LIMIT", "CD"]
    assert batch.error is None
    assert ["beyond the limit"] in calls


def test_a_length_that_is_certain_and_over_the_limit_is_refused():
    with Batcher(list, max_tokens=5, length_of=len, background=[["beyond the limit"], ["ab"]]) as batcher:
        first, second = batcher.background
    assert isinstance(first.error, TooLarge)
    assert second.results == ["ab"]


def test_a_deadline_that_nobody_could_meet_does_not_end_offline_work():
    def slow(items):
        time.sleep(0.002)
        return items

    with Batcher(slow, policy="greedy", length_of=None, background=Background([[1]] * 30, max_ahead=2)) as batcher:
        batches = iter(batcher.background)
        for _ in range(12):
            next(batches)
        with contextlib.suppress(DeadlineExceeded):  # it is answered late if a worker is free
            batcher.submit_sync(1, deadline_ms=0.01)
        assert [batch.error for batch in batches] == [None] * 18


def test_offline_work_goes_on_when_the_event_loop_of_a_caller_ends():
    async def late(items):
        started.set()
        await asyncio.sleep(0.2)
        return items

    async def main():
        await batcher.submit(0)
        started.clear()
        ready.set()
        while not started.is_set():
            await asyncio.sleep(0.01)

    def batches():
        ready.wait(30)
        yield [1, 2]

    started, ready = threading.Event(), threading.Event()
    with Batcher(late, deadline_ms=60_000, background=batches()) as batcher:
        asyncio.run(main())
        (batch,) = batcher.background
    assert batch.results == [1, 2]
    assert batch.error is None


def test_a_for_loop_that_would_block_the_loop_of_the_function_is_refused():
    async def main():
        with pytest.raises(ArgumentError, match="async for"):
            list(batcher.background)
        return [batch.results async for batch in batcher.background]

    gate = threading.Event()

    def batches():
        yield [1]
        gate.wait(0.2)
        yield [2]

    with Batcher(double_later, background=batches()) as batcher:
        first = next(iter(batcher.background))
        assert [first.results, *asyncio.run(main())] == [[2], [4]]


def test_a_decorated_function_in_a_process_runs_offline_work_once_somebody_loops(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    batcher = in_processes.decorated_with_background.batcher
    assert batcher.background.num_batches == 0  # importing the module, here or in the process, begins nothing
    assert [batch.results for batch in batcher.background] == [[10, 20], [30]]
    assert in_processes.decorated_with_background.sync(4) == 40
    assert batcher.stats().num_restarts == 0
    batcher.close_sync()
    with pytest.raises(Closed):
        in_processes.decorated_with_background.sync(5)


def test_offline_work_in_a_process_begins_with_the_first_request_too(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    with Batcher(in_processes.obey, worker="process", background=[[1]]) as batcher:
        assert batcher.submit_sync(3) == 6
        end = time.monotonic() + 30
        while batcher.background.num_batches == 0 and time.monotonic() < end:
            time.sleep(0.01)
        assert batcher.background.num_batches == 1
