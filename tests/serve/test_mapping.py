"""map: in order, bounded, and clean when it stops early."""

import asyncio
import itertools
import threading

import pytest

from batchwright.errors import ArgumentError
from batchwright.serve import Batcher

from .tools import Recorder


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


def test_answers_come_in_the_order_of_the_items():
    async def main():
        async with Batcher(Recorder(), max_items=7, length_of=lambda item: item % 13) as batcher:
            assert await batcher.map(range(500)) == [2 * item for item in range(500)]

    run(main())


def test_it_works_from_a_thread():
    with Batcher(Recorder(), max_items=7) as batcher:
        assert list(batcher.map(range(100))) == [2 * item for item in range(100)]


def test_it_reads_an_async_iterable():
    async def main():
        async def numbers():
            for item in range(20):
                await asyncio.sleep(0)
                yield item

        async with Batcher(Recorder()) as batcher:
            assert [result async for result in batcher.map(numbers())] == [2 * item for item in range(20)]
            with pytest.raises(ArgumentError, match="async for"):
                list(batcher.map(numbers()))

    run(main())


def test_no_more_than_the_bound_are_in_flight():
    async def main():
        most = 0

        def read(batcher):
            nonlocal most
            for item in range(200):
                stats = batcher.stats()
                most = max(most, stats.num_waiting + stats.num_running)
                yield item

        async with Batcher(Recorder()) as batcher:
            await batcher.map(read(batcher), max_in_flight=5)
        # Counted before each item is submitted, when the bound is reached: the item itself comes on top.
        assert 1 <= most <= 5

    run(main())


def test_endless_items_are_read_only_as_far_as_needed():
    async def main():
        count = itertools.count()
        async with Batcher(Recorder()) as batcher:
            results = []
            async for result in batcher.map(count, max_in_flight=4):
                results.append(result)
                if len(results) == 10:
                    break
            assert results == [2 * item for item in range(10)]
        assert next(count) <= 15

    run(main())


class FailThenHold:
    """Fails on 3, and holds everything after it until the gate opens."""

    def __init__(self):
        self.gate, self.run = threading.Event(), []

    def __call__(self, items):
        self.run += items
        if items == [3]:
            raise ValueError("bad item 3")
        assert items < [3] or self.gate.wait(30)
        return items


def test_the_first_error_ends_it_and_what_waits_after_it_is_not_run():
    async def main():
        function = FailThenHold()
        async with Batcher(function, max_items=1) as batcher:
            with pytest.raises(ValueError, match="bad item 3"):
                await batcher.map(range(100), max_in_flight=8)
            function.gate.set()
        assert set(function.run) <= {0, 1, 2, 3, 4}
        assert batcher.stats().num_cancelled >= 6

    run(main())


def test_the_first_error_ends_it_in_a_thread_as_well():
    function = FailThenHold()
    with Batcher(function, max_items=1) as batcher:
        with pytest.raises(ValueError, match="bad item 3"):
            list(batcher.map(range(100), max_in_flight=8))
        function.gate.set()
    assert set(function.run) <= {0, 1, 2, 3, 4}


def test_a_full_queue_makes_it_wait():
    async def main():
        async with Batcher(Recorder(), max_queue=2, max_items=1) as batcher:
            first, second = await asyncio.gather(batcher.map(range(50)), batcher.map(range(50), max_in_flight=10))
            assert first == second == [2 * item for item in range(50)]

    run(main())


def test_its_items_have_no_deadline_unless_one_is_given():
    with Batcher(Recorder(), max_items=1, deadline_ms=0.001) as batcher:
        assert list(batcher.map(range(20))) == [2 * item for item in range(20)]


def test_a_bound_of_zero_is_refused():
    with Batcher(list) as batcher, pytest.raises(ArgumentError, match="max_in_flight"):
        batcher.map([1], max_in_flight=0)
