"""Several batchers on one device: one batch at a time, the most urgent first, nobody waits for itself."""

import asyncio
import math
import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from batchwright.errors import ArgumentError
from batchwright.serve import Batcher, Device
from batchwright.serve._engine.turns import Claim, Turns

from .tools import Recorder


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


class Exclusive:
    """Functions of which only one may run at a time."""

    def __init__(self):
        self.lock, self.order = threading.Lock(), []

    def named(self, name):
        def function(items):
            assert self.lock.acquire(blocking=False), "two functions ran at once"
            threading.Event().wait(0.001)
            self.order.append(name)
            self.lock.release()
            return items

        return function


def test_the_most_urgent_claim_has_the_device_next_and_equals_in_order():
    device, order = Turns("device"), []
    holder = Claim(lambda: 0.0)
    device.acquire(holder)
    due = {"late": 3.0, "early": 1.0, "background": math.inf, "also early": 1.0}

    def use(name):
        claim = Claim(lambda: due[name])
        device.acquire(claim)
        order.append(name)
        device.release(claim)

    with ThreadPoolExecutor(4) as pool:
        futures = []
        for count, name in enumerate(due, start=1):
            futures.append(pool.submit(use, name))
            while len(device._claims) < count:
                threading.Event().wait(0.001)
        due["late"] = 0.5  # a request that is more urgent has come since
        device.release(Claim(lambda: 0.0))  # of one that does not have it, nothing
        assert order == []
        device.release(holder)
        for future in futures:
            future.result(30)
    assert order == ["late", "early", "also early", "background"]


def test_batches_of_one_device_never_run_at_once():
    async def main():
        device, exclusive = Device(), Exclusive()
        batchers = [Batcher(exclusive.named(name), device=device, max_items=2, num_workers=2) for name in "abc"]
        answers = await asyncio.gather(*(batcher.map(range(30)) for batcher in batchers))
        assert answers == [list(range(30))] * 3
        assert {*exclusive.order} == {"a", "b", "c"}
        for batcher in batchers:
            await batcher.close()

    run(main())


def test_the_request_that_is_due_first_goes_first_whichever_batcher_it_waits_in():
    async def main():
        device, first, order = Device(), Recorder(held=True), []
        busy = Batcher(first, device=device)
        batchers = {name: Batcher(lambda items, name=name: order.append(name) or items, device=device) for name in "ab"}
        tasks = [asyncio.create_task(busy.submit(0))]
        await asyncio.to_thread(first.started.wait, 30)
        tasks += [asyncio.create_task(batchers["a"].submit(1, deadline_ms=20_000))]
        await asyncio.sleep(0.01)
        tasks += [asyncio.create_task(batchers["b"].submit(2, deadline_ms=10_000))]
        while len(device._turns._claims) < 2:
            await asyncio.sleep(0.001)
        first.gate.set()
        await asyncio.gather(*tasks)
        assert order == ["b", "a"]
        for batcher in (busy, *batchers.values()):
            await batcher.close()

    run(main())


def test_requests_that_come_while_the_device_is_taken_share_a_batch():
    async def main():
        device, first, second = Device(), Recorder(held=True), Recorder()
        async with Batcher(first, device=device) as one, Batcher(second, device=device) as two:
            tasks = [asyncio.create_task(one.submit(0))]
            await asyncio.to_thread(first.started.wait, 30)
            for item in range(5):
                tasks.append(asyncio.create_task(two.submit(item)))
                await asyncio.sleep(0.005)
            first.gate.set()
            await asyncio.gather(*tasks)
        assert second.calls == [[0, 1, 2, 3, 4]]

    run(main())


def test_the_time_model_does_not_learn_the_wait_for_the_device():
    class Clock:
        seconds = 0.0

    def takes(seconds):
        def function(items):
            Clock.seconds += seconds
            return items

        return function

    async def main():
        device = Device()
        options = {"device": device, "max_items": 1, "clock": lambda: Clock.seconds}
        async with Batcher(takes(1.0), **options) as slow, Batcher(takes(0.25), **options) as fast:
            await asyncio.gather(slow.map(range(20)), fast.map(range(20)))
            assert slow.time_model.predict(1, 1) == pytest.approx(1.0)
            assert fast.time_model.predict(1, 1) == pytest.approx(0.25)

    run(main())


def test_closing_one_batcher_leaves_the_others_working():
    device, held = Device(), Recorder(held=True)
    one, two = Batcher(held, device=device), Batcher(list, device=device)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(one.submit_sync, 1)
        assert held.started.wait(30)
        second = pool.submit(two.submit_sync, 2)
        closing = pool.submit(one.close_sync)
        held.gate.set()
        assert (first.result(30), second.result(30)) == (2, 2)
        closing.result(30)
    assert two.submit_sync(3) == 3
    two.close_sync()


@pytest.mark.parametrize("is_async", [False, True])
def test_a_function_that_submits_to_its_own_device_is_refused(is_async):
    device = Device("GPU 0")
    with Batcher(list, device=device) as inner:

        def nested(items):
            return [inner.submit_sync(item) for item in items]

        async def nested_later(items):
            return [await inner.submit(item) for item in items]

        with Batcher(nested_later if is_async else nested, device=device) as outer:
            with pytest.raises(ArgumentError, match=r"runs on Device\('GPU 0'\) submits to a batcher of the same"):
                outer.submit_sync(1)
            assert inner.submit_sync(2) == 2


def test_a_function_that_reaches_its_own_device_through_another_batcher_is_refused():
    device = Device()
    with (
        Batcher(list, device=device) as last,
        Batcher(lambda items: [last.submit_sync(item) for item in items]) as between,
        Batcher(lambda items: [between.submit_sync(item) for item in items], device=device) as first,
    ):
        assert between.submit_sync(1) == 1
        with pytest.raises(ArgumentError, match="same device"):
            first.submit_sync(1)
        assert between.submit_sync(2) == 2


def test_two_devices_may_be_used_one_inside_the_other_in_the_order_they_were_made():
    first, second = Device("first"), Device("second")
    with Batcher(list, device=second) as inner:
        with Batcher(lambda items: [inner.submit_sync(item) for item in items], device=first) as outer:
            assert outer.submit_sync(1) == 1
    with Batcher(list, device=first) as inner:
        with Batcher(lambda items: [inner.submit_sync(item) for item in items], device=second) as outer:
            with pytest.raises(ArgumentError, match=r"make Device\('first'\) after Device\('second'\)"):
                outer.submit_sync(1)


def test_a_device_that_is_none_is_refused():
    with pytest.raises(ArgumentError, match="device must be a Device"):
        Batcher(list, device="cuda:0")


def test_a_closed_batcher_no_longer_bounds_the_background_work_of_others():
    device = Device()
    one = Batcher(list, device=device, deadline_ms=10)
    with Batcher(list, device=device, deadline_ms=50):
        assert sorted(member.allowance() for member in device._turns.members()) == pytest.approx([0.01, 0.05])
        one.close_sync()
        assert sorted(member.allowance() for member in device._turns.members()) == pytest.approx([0.05, math.inf])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_fork_inside_a_function_inherits_nothing_that_is_busy():
    device = Device("shared")
    context = multiprocessing.get_context("fork")

    def ask(batcher, answers):
        try:
            answers.put(batcher.submit_sync(1))
        except Exception as error:
            answers.put(type(error).__name__)

    def in_fork(batcher):
        answers = context.SimpleQueue()
        process = context.Process(target=ask, args=(batcher, answers))
        process.start()
        process.join(30)
        return answers.get()

    def run(items):
        with_device = Batcher(lambda numbers: [number + 1 for number in numbers], device=device)
        return [(in_fork(with_device), in_fork(outer))] * len(items)

    with Batcher(run, device=device) as outer:
        # A new batcher runs on the device of the fork, where nobody has it; the one in use belongs to the parent.
        assert outer.submit_sync(0) == (2, "Closed")
