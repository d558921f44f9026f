"""Memory that others hold for a time: requests that need it wait for it, neither blamed nor longer than they may."""

import asyncio
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from batchwright.errors import Closed, DeadlineExceeded, DoesNotFitError
from batchwright.serve import Batcher, give_way

from .tools import wait_until

LIMIT_SECONDS = 30


class Memory:
    """A function that holds memory for ``"holder"`` until it may end; ``"big"`` has none meanwhile, alone or not."""

    def __init__(self, *, gives_way=False):
        self.gives_way = gives_way
        self.has_begun, self.may_end = threading.Event(), threading.Event()
        self.num_short = 0

    def __call__(self, items):
        if "holder" in items:
            self.has_begun.set()
            while not self.may_end.wait(0.001):
                if self.gives_way:
                    give_way()
            self.has_begun.clear()
        elif "big" in items and self.has_begun.is_set():
            self.num_short += 1
            raise MemoryError
        elif "huge" in items:
            raise MemoryError
        return items


@pytest.fixture(params=[False, True], ids=["runs through", "gives way"])
def memory(request):
    memory = Memory(gives_way=request.param)
    yield memory
    memory.may_end.set()


def test_a_request_runs_again_after_a_part_that_ran_in_another_worker(memory):
    with Batcher(memory, background=[["holder"]], num_workers=2) as batcher, ThreadPoolExecutor(1) as pool:
        assert memory.has_begun.wait(LIMIT_SECONDS)
        answer = pool.submit(batcher.submit_sync, "big")
        wait_until(lambda: memory.num_short or answer.done())
        assert batcher.submit_sync("small") == "small"
        memory.may_end.set()
        assert answer.result(LIMIT_SECONDS) == "big"
        assert batcher.stats().max_tokens is None


def test_a_request_runs_again_after_a_batch_that_ran_in_another_worker():
    memory = Memory()
    with Batcher(memory, num_workers=2) as batcher, ThreadPoolExecutor(2) as pool:
        holder = pool.submit(batcher.submit_sync, "holder")
        assert memory.has_begun.wait(LIMIT_SECONDS)
        answer = pool.submit(batcher.submit_sync, "big")
        wait_until(lambda: memory.num_short or answer.done())
        assert batcher.submit_sync("small") == "small"  # the batch that holds the memory may hang
        memory.may_end.set()
        assert (holder.result(LIMIT_SECONDS), answer.result(LIMIT_SECONDS)) == ("holder", "big")


def test_an_item_that_does_not_fit_without_neighbours_either_says_so():
    memory = Memory()
    with Batcher(memory, num_workers=2) as batcher, ThreadPoolExecutor(2) as pool:
        holder = pool.submit(batcher.submit_sync, "holder")
        assert memory.has_begun.wait(LIMIT_SECONDS)
        answer = pool.submit(batcher.submit_sync, "huge")
        wait_until(lambda: batcher.stats().num_ooms)
        assert not answer.done()
        memory.may_end.set()
        assert isinstance(answer.exception(LIMIT_SECONDS), DoesNotFitError)
        assert holder.result(LIMIT_SECONDS) == "holder"


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_request_that_waits_for_the_memory_of_a_part_ends_at_its_deadline(num_workers):
    memory = Memory(gives_way=True)
    with Batcher(memory, background=[["holder"]], num_workers=num_workers) as batcher:
        assert memory.has_begun.wait(LIMIT_SECONDS)
        for submit in (batcher.submit_sync, lambda *one, **options: asyncio.run(batcher.submit(*one, **options))):
            with pytest.raises(DeadlineExceeded, match="not answered"):
                submit("big", deadline_ms=1000)
        assert memory.num_short
        stats = batcher.stats()
        assert (stats.num_shed, stats.num_running, stats.num_waiting) == (2, 0, 0)
        assert batcher._workers._work.again_urgency == float("inf")
        assert batcher.submit_sync("small") == "small"
        memory.may_end.set()


def test_a_request_whose_batch_failed_ends_at_its_deadline_while_another_part_of_the_batch_runs():
    started, gate = threading.Event(), threading.Event()

    def run(items):
        if len(items) > 1:
            raise MemoryError
        started.set()
        assert gate.wait(LIMIT_SECONDS)
        return items

    async def ask(batcher):
        patient = asyncio.ensure_future(batcher.submit("patient", deadline_ms=60_000, priority=10))
        hurried = asyncio.ensure_future(batcher.submit("hurried", deadline_ms=1000))
        with pytest.raises(DeadlineExceeded, match="not answered"):
            await asyncio.wait_for(hurried, LIMIT_SECONDS)
        assert await asyncio.to_thread(started.wait, LIMIT_SECONDS)
        assert not patient.done()
        gate.set()
        return await patient

    with Batcher(run, policy="window", max_wait_ms=20) as batcher:
        try:
            assert asyncio.run(ask(batcher)) == "patient"
        finally:
            gate.set()
        assert batcher.stats().num_shed == 1


def test_closing_without_a_drain_ends_requests_that_wait_for_memory():
    memory = Memory(gives_way=True)
    batcher = Batcher(memory, background=[["holder"]])
    with ThreadPoolExecutor(1) as pool:
        assert memory.has_begun.wait(LIMIT_SECONDS)
        answer = pool.submit(batcher.submit_sync, "big")
        wait_until(lambda: memory.num_short)
        batcher.close_sync(drain=False, timeout_seconds=0.01)
        with pytest.raises(Closed, match="before this request ran"):
            answer.result(LIMIT_SECONDS)
        memory.may_end.set()
    batcher.close_sync()
    assert batcher.stats().num_closed == 1


def test_an_offline_item_that_has_no_memory_beside_a_batch_of_another_worker_runs_again():
    memory, offline = Memory(), threading.Event()

    def batches():
        assert offline.wait(LIMIT_SECONDS)
        yield ["big", "small"]
        yield ["huge"]

    with Batcher(memory, background=batches(), num_workers=2) as batcher, ThreadPoolExecutor(1) as pool:
        holder = pool.submit(batcher.submit_sync, "holder")
        assert memory.has_begun.wait(LIMIT_SECONDS)
        offline.set()
        wait_until(lambda: memory.num_short or batcher.background.num_batches)
        memory.may_end.set()
        assert holder.result(LIMIT_SECONDS) == "holder"
        big, huge = batcher.background
        assert (big.results, big.error) == (["big", "small"], None)
        assert isinstance(huge.error, MemoryError)


def test_an_offline_item_that_never_fits_fails_though_requests_run_in_its_middle():
    has_begun, may_end = threading.Event(), threading.Event()

    def run(items):
        if "huge" in items:
            has_begun.set()
            while not may_end.wait(0.001):
                give_way()
            raise MemoryError
        return items

    with Batcher(run, background=[["huge"]]) as batcher:
        assert has_begun.wait(LIMIT_SECONDS)
        assert batcher.submit_sync("small") == "small"
        may_end.set()
        assert [type(batch.error) for batch in batcher.background] == [MemoryError]
        assert batcher.stats().num_answered == 1


def test_an_item_that_needs_all_memory_runs_though_other_batches_never_stop_coming():
    lock, is_over, used, num_short = threading.Lock(), threading.Event(), [], []

    def run(items):
        with lock:
            if used and ("all" in items or "all" in used):
                num_short.append(items)
                raise MemoryError
            used.append(items[0])
        time.sleep(0.002)
        with lock:
            used.remove(items[0])
        return items

    with Batcher(run, num_workers=3, max_items=1) as batcher, ThreadPoolExecutor(9) as pool:

        def flood(number):
            while not is_over.is_set():
                batcher.submit_sync(number)

        floods = [pool.submit(flood, number) for number in range(8)]
        try:
            for _ in range(10):
                assert pool.submit(batcher.submit_sync, "all").result(LIMIT_SECONDS) == "all"
        finally:
            is_over.set()
        for one in floods:
            one.result(LIMIT_SECONDS)
        neighbours = batcher._workers._work.neighbours
        assert [neighbours.keeps_parts_out, neighbours.is_awaited, neighbours.is_busy] == [False] * 3
    assert num_short
