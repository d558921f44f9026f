"""Batcher from the outside: answers, errors, cancellation, drain, settings."""

import asyncio
import math
import threading

import pytest

from batchwright.errors import ArgumentError, DoesNotFitError
from batchwright.serve import Batcher, Closed, DeadlineExceeded, QueueFull, ResultError, TooLarge

from .tools import Recorder


def run(coroutine):
    """Run a coroutine; a hang is a failure after 30 seconds."""
    return asyncio.run(asyncio.wait_for(coroutine, 30))


async def submit_while_busy(batcher, recorder, items, **options):
    """Submit items while a first request, -1, keeps the worker busy: they all wait, and share a batch later."""
    first = asyncio.create_task(batcher.submit(-1))
    await asyncio.to_thread(recorder.started.wait, 30)
    tasks = [asyncio.create_task(batcher.submit(item, **options)) for item in items]
    while batcher.stats().num_waiting < len(items):
        await asyncio.sleep(0.001)
    return first, tasks


async def ends_of(tasks):
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_every_caller_gets_its_own_answer_and_they_share_batches():
    async def main():
        recorder = Recorder(held=True)
        async with Batcher(recorder) as batcher:
            first, tasks = await submit_while_busy(batcher, recorder, range(50))
            recorder.gate.set()
            assert await ends_of([first, *tasks]) == [-2, *(2 * item for item in range(50))]
        assert [len(call) for call in recorder.calls] == [1, 50]

    run(main())


def test_a_coroutine_function_is_awaited_in_the_loop_of_its_callers():
    async def main():
        loops = []

        async def double(items):
            loops.append(asyncio.get_running_loop())
            await asyncio.sleep(0)
            return [2 * item for item in items]

        async with Batcher(double) as batcher:
            assert await asyncio.gather(*map(batcher.submit, range(20))) == [2 * item for item in range(20)]
        assert set(loops) == {asyncio.get_running_loop()}

    run(main())


def test_one_bad_item_of_four_fails_alone_with_at_most_four_more_calls():
    async def main():
        recorder = Recorder(held=True, bad=[2])
        async with Batcher(recorder) as batcher:
            _, tasks = await submit_while_busy(batcher, recorder, [1, 2, 3, 4])
            recorder.gate.set()
            ends = await ends_of(tasks)
        assert [ends[index] for index in (0, 2, 3)] == [2, 6, 8]
        assert isinstance(ends[1], ValueError)
        assert str(ends[1]) == "bad item 2"
        assert len(recorder.calls) - 2 <= 4  # one for -1, one for the four, and log2(4) + 2

    run(main())


def test_of_eight_the_two_cancelled_are_not_run_and_the_other_six_are_right():
    async def main():
        recorder = Recorder(held=True)
        async with Batcher(recorder) as batcher:
            _, tasks = await submit_while_busy(batcher, recorder, range(8))
            tasks[2].cancel()
            tasks[5].cancel()
            await asyncio.sleep(0)
            recorder.gate.set()
            ends = await ends_of(tasks)
        assert [end for end in ends if not isinstance(end, asyncio.CancelledError)] == [0, 2, 6, 8, 12, 14]
        assert not {2, 5} & set(recorder.items_run)
        assert batcher.stats().num_cancelled == 2

    run(main())


def test_cancelling_what_runs_leaves_its_mates_alone():
    async def main():
        recorder = Recorder(held=True)
        async with Batcher(recorder) as batcher:
            first, tasks = await submit_while_busy(batcher, recorder, [1])
            first.cancel()
            recorder.gate.set()
            assert await ends_of(tasks) == [2]
            assert first.cancelled()

    run(main())


def test_a_drain_finishes_all_twenty_and_then_the_batcher_is_closed():
    async def main():
        recorder = Recorder(held=True)
        batcher = Batcher(recorder, max_items=4)
        first, tasks = await submit_while_busy(batcher, recorder, range(20))
        assert batcher.is_open
        drained = asyncio.create_task(batcher.drain())
        await asyncio.sleep(0)
        assert not batcher.is_open
        with pytest.raises(Closed):
            await batcher.submit(99)
        recorder.gate.set()
        await drained
        assert (batcher.stats().num_waiting, batcher.stats().num_running, batcher.stats().num_answered) == (0, 0, 21)
        assert await ends_of(tasks) == [2 * item for item in range(20)]
        assert await first == -2
        with pytest.raises(Closed, match="closed"):
            await batcher.submit(99)

    run(main())


def test_closing_without_a_drain_ends_what_waits_and_finishes_what_runs():
    async def main():
        recorder = Recorder(held=True)
        batcher = Batcher(recorder)
        first, tasks = await submit_while_busy(batcher, recorder, range(5))
        closing = asyncio.create_task(batcher.close(drain=False))
        ends = await ends_of(tasks)
        assert {type(end) for end in ends} == {Closed}
        recorder.gate.set()
        await closing
        assert await first == -2
        assert recorder.items_run == [-1]

    run(main())


def test_a_close_that_runs_out_of_time_ends_what_still_waits():
    async def main():
        recorder = Recorder(held=True)
        batcher = Batcher(recorder)
        first, tasks = await submit_while_busy(batcher, recorder, range(3))
        await batcher.close(timeout_seconds=0.01)
        assert {type(end) for end in await ends_of(tasks)} == {Closed}
        recorder.gate.set()
        assert await first == -2

    run(main())


def test_a_function_that_closes_its_own_batcher_and_would_wait_for_itself_is_refused():
    def run(items):
        batcher.close_sync()
        return items

    batcher = Batcher(run)
    with pytest.raises(ArgumentError, match="wait for itself"):
        batcher.submit_sync(1)
    assert batcher.is_open
    batcher.close_sync()


def test_a_raising_length_of_fails_only_its_request():
    async def main():
        async with Batcher(lambda texts: [text.upper() for text in texts], length_of=len) as batcher:
            ends = await ends_of([batcher.submit("a"), batcher.submit(None), batcher.submit("b")])
            assert (ends[0], ends[2]) == ("A", "B")
            assert isinstance(ends[1], TypeError)
            assert await batcher.submit("later") == "LATER"

    run(main())


@pytest.mark.parametrize(("length", "message"), [(1.5, "whole number of 0 or more, got 1.5"), (-1, "or more, got -1")])
def test_a_length_that_is_none_is_refused(length, message):
    async def main():
        async with Batcher(list, length_of=lambda item: length) as batcher:
            with pytest.raises(ArgumentError, match=message):
                await batcher.submit("x")

    run(main())


def test_an_empty_item_is_served():
    async def main():
        async with Batcher(list, length_of=len, max_tokens=10) as batcher:
            assert await batcher.submit("") == ""

    run(main())


def test_a_result_of_the_wrong_length_fails_only_the_item_that_has_none():
    async def main():
        recorder = Recorder(held=True)

        def drop_odd(items):
            recorder(items)
            return [item for item in items if item % 2 == 0 or item < 0]

        async with Batcher(drop_odd) as batcher:
            _, tasks = await submit_while_busy(batcher, recorder, [2, 3, 4])
            recorder.gate.set()
            ends = await ends_of(tasks)
        assert (ends[0], ends[2]) == (2, 4)
        assert isinstance(ends[1], ResultError)
        assert "returned 0 results for 1 items" in str(ends[1])

    run(main())


@pytest.mark.parametrize("wrong", [None, "ab", {1: 2}, 7])
def test_a_result_that_is_no_list_is_said_to_be_none(wrong):
    async def main():
        async with Batcher(lambda items: wrong) as batcher:
            with pytest.raises(ResultError, match="must return a list"):
                await batcher.submit(1)

    run(main())


def test_an_exception_object_in_the_result_is_raised_for_its_item():
    async def main():
        async with Batcher(lambda items: [KeyError(item) if item == 2 else item for item in items]) as batcher:
            ends = await ends_of(map(batcher.submit, [1, 2, 3]))
        assert (ends[0], ends[2]) == (1, 3)
        assert isinstance(ends[1], KeyError)
        assert batcher.stats().num_calls == batcher.stats().num_batches

    run(main())


@pytest.mark.parametrize("error", [StopIteration("done"), SystemExit(3), KeyboardInterrupt()])
def test_an_error_that_would_end_more_than_the_request_arrives_wrapped(error):
    async def main():
        def fail(items):
            raise error

        async with Batcher(fail) as batcher:
            with pytest.raises(RuntimeError, match=type(error).__name__) as caught:
                await batcher.submit(1)
            assert caught.value.__cause__ is error
            with pytest.raises(RuntimeError):
                await batcher.submit(2)

    run(main())


def test_running_out_of_memory_splits_and_answers_all():
    async def main():
        recorder = Recorder(held=True)

        def small_memory(items):
            recorder(items)
            if len(items) > 4:
                raise MemoryError("full")
            return items

        async with Batcher(small_memory) as batcher:
            _, tasks = await submit_while_busy(batcher, recorder, range(16))
            recorder.gate.set()
            assert await ends_of(tasks) == list(range(16))
            assert batcher.stats().num_ooms > 0
            assert batcher.stats().max_tokens <= 8  # sixteen and eight items of length 1 did not fit

    run(main())


def test_an_item_that_never_fits_has_its_own_error():
    def no_memory(items):
        raise MemoryError("full")

    with Batcher(no_memory) as batcher, pytest.raises(DoesNotFitError, match="ran out of memory by itself: full"):
        batcher.submit_sync(1)


def test_a_full_queue_refuses_one_more():
    async def main():
        recorder = Recorder(held=True)
        async with Batcher(recorder, max_queue=3) as batcher:
            _, tasks = await submit_while_busy(batcher, recorder, range(3))
            with pytest.raises(QueueFull):
                await batcher.submit(4)
            recorder.gate.set()
            assert await ends_of(tasks) == [0, 2, 4]
            assert await batcher.submit(4) == 8

    run(main())


def test_an_item_too_large_alone_is_refused():
    async def main():
        async with Batcher(list, length_of=len, max_tokens=4) as batcher:
            with pytest.raises(TooLarge, match="length 5 alone is over max_tokens=4"):
                await batcher.submit("12345")

    run(main())


def test_a_request_that_waits_at_its_deadline_is_told_so_though_the_worker_is_busy():
    async def main():
        recorder = Recorder(held=True)
        async with Batcher(recorder) as batcher:
            first, tasks = await submit_while_busy(batcher, recorder, [1], deadline_ms=20)
            with pytest.raises(DeadlineExceeded, match=r"of the 20\.0 ms allowed"):
                await tasks[0]
            recorder.gate.set()
            assert await first == -2
            assert recorder.items_run == [-1]

    run(main())


def test_a_deadline_is_a_timeout_error():
    assert issubclass(DeadlineExceeded, TimeoutError)


def test_an_infinite_deadline_lifts_the_one_of_the_batcher():
    async def main():
        recorder = Recorder(held=True)
        async with Batcher(recorder, deadline_ms=20) as batcher:
            _, tasks = await submit_while_busy(batcher, recorder, [1], deadline_ms=math.inf)
            await asyncio.sleep(0.05)
            recorder.gate.set()
            assert await ends_of(tasks) == [2]

    run(main())


@pytest.mark.parametrize(("options", "message"), [({"deadline_ms": -1}, "deadline_ms"), ({"priority": 11}, "priority")])
def test_impossible_options_of_a_request_are_refused(options, message):
    with Batcher(list) as batcher, pytest.raises(ArgumentError, match=message):
        batcher.submit_sync(1, **options)


def test_a_higher_priority_goes_first():
    async def main():
        recorder = Recorder(held=True)
        async with Batcher(recorder, max_items=1) as batcher:
            _, low = await submit_while_busy(batcher, recorder, [1])
            high = asyncio.create_task(batcher.submit(2, priority=2))
            while batcher.stats().num_waiting < 2:
                await asyncio.sleep(0.001)
            recorder.gate.set()
            await ends_of([*low, high])
        assert recorder.items_run == [-1, 2, 1]

    run(main())


def test_settings_change_while_it_runs():
    async def main():
        recorder = Recorder(held=True)
        async with Batcher(recorder) as batcher:
            _, tasks = await submit_while_busy(batcher, recorder, range(6))
            batcher.configure(max_items=2)
            recorder.gate.set()
            await ends_of(tasks)
        assert [len(call) for call in recorder.calls] == [1, 2, 2, 2]

    run(main())


def test_shortening_a_window_wakes_who_waits_for_it():
    async def main():
        async with Batcher(list, policy="window", max_wait_ms=60_000) as batcher:
            task = asyncio.create_task(batcher.submit(1))
            while batcher.stats().num_waiting == 0:
                await asyncio.sleep(0.001)
            batcher.configure(max_wait_ms=0)
            assert await task == 1

    run(main())


def test_with_two_workers_two_batches_run_at_once():
    async def main():
        meeting = threading.Barrier(2, timeout=30)

        def meet(items):
            meeting.wait()
            return items

        async with Batcher(meet, max_items=1, num_workers=2) as batcher:
            assert await asyncio.gather(batcher.submit(1), batcher.submit(2)) == [1, 2]

    run(main())


def test_a_function_that_raises_for_its_whole_batch_on_request():
    async def main():
        recorder = Recorder(held=True, bad=[2])
        async with Batcher(recorder, on_error="raise") as batcher:
            _, tasks = await submit_while_busy(batcher, recorder, [1, 2, 3])
            recorder.gate.set()
            ends = await ends_of(tasks)
        assert {type(end) for end in ends} == {ValueError}
        assert len(recorder.calls) == 2

    run(main())


def test_what_was_learned_can_be_taken_to_the_next_batcher():
    with Batcher(list) as batcher:
        for item in range(20):
            batcher.submit_sync(item)
        learned = batcher.time_model
    assert learned.is_ready
    with Batcher(list, time_model=type(learned).from_json(learned.to_json())) as later:
        assert later.stats().time_model["num_observed"] == learned.num_observed
