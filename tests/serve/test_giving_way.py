"""Offline work that gives way: requests run in the middle of it, and nothing of either is lost."""

import asyncio
import threading
import time

import pytest

from batchwright.errors import RunTimeout
from batchwright.serve import Background, Batcher, Device, give_way

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

    with Batcher(run, background=[["offline"]], run_timeout_ms=2000) as batcher:
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
