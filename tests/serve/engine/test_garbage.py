"""What is collected between the calls of a batch that ran out of memory."""

import asyncio
import gc
import threading
import weakref
from contextlib import contextmanager

import pytest

from batchwright.errors import DoesNotFitError
from batchwright.serve import Batcher

from ..tools import Recorder


class Block:
    """Memory that only the garbage collector frees."""

    def __init__(self):
        self.itself = self


@pytest.fixture
def no_collector():
    """Only collections that somebody asks for."""
    gc.disable()
    yield
    gc.enable()


@contextmanager
def full_collections():
    """Yield the names of the threads that run a full collection."""
    names = []

    def note(phase, info):
        if phase == "start" and info["generation"] == 2:
            names.append(threading.current_thread().name)

    gc.callbacks.append(note)
    try:
        yield names
    finally:
        gc.callbacks.remove(note)


def ends_of_a_batch(function, items):
    """Run the items in one batch, which forms while a first item holds the worker."""
    recorder = Recorder(held=True)

    def run(batch):
        return recorder(batch) if batch == [-1] else function(batch)

    async def main():
        async with Batcher(run, length_of=None) as batcher:
            first = asyncio.create_task(batcher.submit(-1))
            await asyncio.to_thread(recorder.started.wait, 30)
            tasks = [asyncio.create_task(batcher.submit(item)) for item in items]
            await asyncio.sleep(0)
            recorder.gate.set()
            await first
            return await asyncio.gather(*tasks, return_exceptions=True)

    return asyncio.run(asyncio.wait_for(main(), 30))


def test_one_item_that_never_fits_costs_one_full_collection(no_collector):
    def never_fits(items):
        if 5 in items:
            raise MemoryError("full")
        return items

    with full_collections() as names:
        ends = ends_of_a_batch(never_fits, range(16))
    assert isinstance(ends.pop(5), DoesNotFitError)
    assert ends == [item for item in range(16) if item != 5]
    assert len([name for name in names if name.startswith("batchwright-serve")]) == 1


def test_old_garbage_is_collected_before_an_item_runs_alone(no_collector):
    block = Block()
    gc.collect()  # now it belongs to the oldest generation
    alive = weakref.ref(block)
    del block

    def needs_the_memory(items):
        if alive() is not None:
            raise MemoryError("full")
        return items

    assert ends_of_a_batch(needs_the_memory, range(8)) == list(range(8))


def test_what_a_failed_call_leaves_is_collected_before_the_next_one(no_collector):
    blocks, sizes = weakref.WeakSet(), []

    def leaves_garbage(items):
        sizes.append(len(items))
        if blocks:
            raise MemoryError("full")
        if len(items) > 4:
            blocks.add(Block())
            raise MemoryError("full")
        return items

    assert ends_of_a_batch(leaves_garbage, range(8)) == list(range(8))
    assert sizes == [8, 4, 4]
