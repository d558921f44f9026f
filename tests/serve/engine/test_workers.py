"""Many loops and threads, loops that die, forks, and the end of the interpreter."""

import asyncio
import gc
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest

from batchwright.errors import ArgumentError
from batchwright.serve import Batcher, Closed, RunInterrupted
from batchwright.serve._engine import core, policies

from ..tools import Recorder, run_script, wait_until


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 30))


async def double_slowly(items):
    await asyncio.sleep(0.001)
    return [2 * item for item in items]


@pytest.mark.parametrize("function", [lambda items: [2 * item for item in items], double_slowly])
def test_threads_and_loops_share_one_batcher(function):
    async def from_a_loop(batcher, start):
        return await asyncio.gather(*(batcher.submit(start + item) for item in range(50)))

    with Batcher(function) as batcher, ThreadPoolExecutor(8) as pool:
        loops = [pool.submit(lambda start=start: run(from_a_loop(batcher, start))) for start in (0, 1000, 2000)]
        threads = [pool.submit(batcher.submit_sync, item) for item in range(5000, 5050)]
        for start, loop in zip((0, 1000, 2000), loops, strict=True):
            assert loop.result(30) == [2 * (start + item) for item in range(50)]
        assert [thread.result(30) for thread in threads] == [2 * item for item in range(5000, 5050)]


def test_a_coroutine_function_needs_no_loop_of_the_caller():
    with Batcher(double_slowly) as batcher:
        assert [batcher.submit_sync(item) for item in range(3)] == [0, 2, 4]


def test_a_batcher_outlives_the_loop_that_used_it_first():
    batcher = Batcher(double_slowly)
    assert run(batcher.submit(1)) == 2
    assert run(batcher.submit(2)) == 4
    assert batcher.submit_sync(3) == 6
    batcher.close_sync()


def test_a_caller_whose_loop_is_closed_does_not_disturb_the_others():
    recorder = Recorder(held=True)
    with Batcher(recorder) as batcher:
        loop = asyncio.new_event_loop()
        task = loop.create_task(batcher.submit(1))
        loop.run_until_complete(asyncio.sleep(0.01))
        recorder.started.wait(30)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(batcher.submit_sync, 2)
            loop.close()
            recorder.gate.set()
            assert other.result(30) == 4
    assert not task.done()
    task._log_destroy_pending = False  # that a task was left behind is the point of this test


class Lost:
    """A coroutine function that never returns in one loop, and works in every other."""

    def __init__(self):
        self.loop, self.gate, self.entered = asyncio.new_event_loop(), threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

    async def __call__(self, items):
        if items == [0]:
            self.gate.wait(30)  # in the worker's own loop: 0 comes from a thread
        if asyncio.get_running_loop() is self.loop:
            self.entered.set()
            await asyncio.sleep(3600)
        return [2 * item for item in items]

    def submit_two_in_one_batch(self, batcher, pool):
        """Have 1 of the doomed loop and 2 of a thread share a batch, which then runs in that loop."""
        first = pool.submit(batcher.submit_sync, 0)
        while not batcher.stats().num_running:
            time.sleep(0.001)
        asyncio.run_coroutine_threadsafe(batcher.submit(1), self.loop)
        second = pool.submit(batcher.submit_sync, 2)
        while batcher.stats().num_waiting < 2:
            time.sleep(0.001)
        self.gate.set()
        assert first.result(30) == 0
        assert self.entered.wait(30)
        return second

    def close(self):
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(30)
        for task in asyncio.all_tasks(self.loop):
            task._log_destroy_pending = False  # that tasks are left behind is the point of the test
        self.loop.close()


def test_a_batch_whose_loop_is_closed_under_it_is_answered_in_another():
    lost = Lost()
    with Batcher(lost) as batcher, ThreadPoolExecutor(2) as pool:
        second = lost.submit_two_in_one_batch(batcher, pool)
        lost.close()
        assert second.result(30) == 4


def test_a_batch_whose_loop_is_closed_under_it_ends_with_a_clear_error_if_nothing_may_run_twice():
    lost = Lost()
    with Batcher(lost, on_error="raise") as batcher, ThreadPoolExecutor(2) as pool:
        second = lost.submit_two_in_one_batch(batcher, pool)
        lost.close()
        with pytest.raises(Closed, match="the event loop that ran the batch has stopped"):
            second.result(30)


def test_a_coroutine_function_that_cancels_itself_ends_its_requests():
    async def main():
        async def cancelled(items):
            raise asyncio.CancelledError

        async with Batcher(cancelled) as batcher:
            with pytest.raises(RunInterrupted, match="CancelledError"):
                await batcher.submit(1)

    run(main())


def test_waiting_in_the_loop_that_would_have_to_run_the_function_is_refused():
    async def main():
        async with Batcher(double_slowly) as batcher:
            with pytest.raises(ArgumentError, match="await submit"):
                batcher.submit_sync(1)

    run(main())


def test_a_function_that_submits_to_its_own_batcher_is_refused():
    def nested(items):
        return [batcher.submit_sync(item) for item in items]

    batcher = Batcher(nested)
    with pytest.raises(ArgumentError, match="its own batcher"):
        batcher.submit_sync(1)
    batcher.close_sync()


def test_a_function_that_reaches_its_own_batcher_through_another_is_refused():
    with Batcher(lambda items: [outer.submit_sync(item) for item in items]) as inner:
        with Batcher(lambda items: [inner.submit_sync(item) for item in items]) as outer:
            with pytest.raises(ArgumentError, match="its own batcher"):
                outer.submit_sync(1)


def test_a_function_may_submit_to_another_batcher():
    with Batcher(lambda items: [item + 1 for item in items]) as inner:
        with Batcher(lambda items: [2 * inner.submit_sync(item) for item in items]) as outer:
            assert outer.submit_sync(3) == 8


def test_a_forgotten_batcher_ends_its_threads():
    batcher = Batcher(list)
    batcher.submit_sync(1)
    [thread] = [worker.thread for worker in batcher._workers._workers]
    gone = weakref.ref(batcher)
    del batcher
    gc.collect()
    assert gone() is None
    thread.join(30)
    assert not thread.is_alive()


def test_the_threads_end_with_a_drain():
    batcher = Batcher(list, num_workers=3)
    batcher.submit_sync(1)
    batcher.close_sync()
    for worker in batcher._workers._workers:
        thread = worker.thread
        thread.join(30)
        assert not thread.is_alive()


def test_the_interpreter_ends_with_work_pending():
    done = run_script("""
        import threading, time
        from batchwright.serve import Batcher

        def slow(items):
            time.sleep(0.2)
            return items

        batcher = Batcher(slow, max_items=1)
        for item in range(200):
            threading.Thread(target=lambda: batcher.submit_sync(0), daemon=True).start()
        while batcher.stats().num_waiting < 100:
            time.sleep(0.01)
        print("end")
    """)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr


def test_a_thread_that_waits_at_the_end_of_the_program_still_gets_its_answer():
    done = run_script("""
        import threading, time
        from batchwright.serve import Batcher

        def slow(items):
            time.sleep(0.2)
            return items

        batcher = Batcher(slow)
        threading.Thread(target=lambda: print(batcher.submit_sync(7))).start()
    """)
    assert (done.returncode, done.stdout) == (0, "7\n"), done.stderr


def test_a_batch_that_runs_at_the_end_of_the_program_is_finished_and_what_waits_is_not_run():
    done = run_script("""
        import threading, time
        from batchwright.serve import Batcher

        def slow(items):
            started.set()
            time.sleep(0.3)
            print("ran", *items)
            return items

        started = threading.Event()
        batcher = Batcher(slow, max_items=1)
        for item in range(3):
            threading.Thread(target=lambda: batcher.submit_sync(0), daemon=True).start()
        started.wait()
    """)
    assert (done.returncode, done.stdout) == (0, "ran 0\n"), done.stderr


def test_a_program_that_leaves_a_loop_with_requests_in_it_ends():
    done = run_script("""
        import asyncio, time
        from batchwright.serve import Batcher

        def slow(items):
            time.sleep(0.2)
            return items

        batcher = Batcher(slow, max_items=1)

        async def main():
            tasks = [asyncio.create_task(batcher.submit(item)) for item in range(50)]
            await tasks[0]

        asyncio.run(main())
        print(batcher.stats().num_cancelled)
    """)
    assert (done.returncode, done.stdout) == (0, "49\n"), done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_after_a_fork_the_child_is_told_and_does_not_hang():
    done = run_script("""
        import os
        from batchwright.serve import Batcher, Closed, RunInterrupted

        batcher, unused = Batcher(list), Batcher(list)
        batcher.submit_sync(1)
        child = os.fork()
        if child == 0:
            try:
                batcher.submit_sync(2)
            except Closed as error:
                assert "before a fork" in str(error)
                assert unused.submit_sync(3) == 3
                os._exit(7)
            os._exit(1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), batcher.submit_sync(4))
    """)
    assert (done.returncode, done.stdout) == (0, "7 4\n"), done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_after_a_fork_the_child_may_leave_a_loop_that_the_parent_goes_on_with():
    done = run_script("""
        import os
        from batchwright.serve import Batcher

        with Batcher(list, max_items=1) as batcher:
            loop = iter(batcher.map(range(50), max_in_flight=8))
            next(loop)
            with batcher._workers._changed:  # so that some still wait
                child = os.fork()
            if child == 0:
                loop.close()
                os._exit(7)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), sum(loop) == sum(range(50)))
    """)
    assert (done.returncode, done.stdout) == (0, "7 True\n"), done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_in_a_bad_moment_leaves_figures_and_close_usable():
    done = run_script("""
        import os, sys, threading, time
        from batchwright.serve import Batcher, Closed, Device

        def slow(items):
            time.sleep(0.5)
            return items

        device = Device()
        batcher = Batcher(slow, device=device)
        answer = []
        thread = threading.Thread(target=lambda: answer.append(batcher.submit_sync(5)))
        thread.start()
        while not batcher.stats().num_running:
            time.sleep(0.001)
        with batcher._workers._changed, device._turns._changed:  # as another thread would hold them
            child = os.fork()
        if child == 0:
            with Batcher(list, device=device) as other:
                assert other.submit_sync(1) == 1
            assert batcher.stats().num_running == 0
            assert not batcher.is_open
            try:
                batcher.submit_sync(2)
            except Closed as error:
                assert "before a fork" in str(error)
            batcher.close_sync()
            sys.exit(7)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        thread.join()
        print(code, answer, batcher.submit_sync(6))
    """)
    assert (done.returncode, done.stdout) == (0, "7 [5] 6\n"), done.stderr


def test_a_worker_that_dies_is_said_to_have(monkeypatch):
    def broken(*arguments):
        raise MemoryError("no room for a decision")

    batcher = Batcher(list)
    monkeypatch.setattr(batcher._workers._core, "take", broken)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    with pytest.raises(Closed, match="no room for a decision"):
        batcher.submit_sync(1)
    assert "no room for a decision" in batcher.stats().failure
    assert not batcher.is_open
    batcher.close_sync()


async def _leave_one_of_three(batcher, function, leave):
    """Ask for 0 and 1 while the function is held; ``leave`` gets the second caller, and nothing else keeps it."""
    first = asyncio.ensure_future(batcher.submit(0))
    assert await asyncio.to_thread(function.started.wait, 30)
    second = batcher.submit(1)
    second.send(None)  # it waits for its answer from here on
    callers = [second]
    del second
    leave(callers)
    function.gate.set()
    return await asyncio.wait_for(first, 30), await asyncio.wait_for(batcher.submit(2), 30)


def test_a_caller_that_is_collected_as_garbage_in_the_middle_of_a_decision_hurts_nobody(monkeypatch):
    function = Recorder(held=True)

    def leave(callers):
        def pick_and_collect(*arguments):
            decision = policies.pick(*arguments)
            callers.clear()
            return decision

        monkeypatch.setattr(core, "pick", pick_and_collect)

    batcher = Batcher(function, max_items=1)
    assert asyncio.run(_leave_one_of_three(batcher, function, leave)) == (0, 4)
    batcher.close_sync()
    stats = batcher.stats()
    assert (stats.num_answered, stats.num_cancelled, stats.failure) == (2, 1, None)


def test_a_caller_that_leaves_while_others_have_the_lock_waits_for_none_and_is_not_run():
    function = Recorder(held=True)

    def leave(callers):
        with batcher._workers._changed:
            leaving = threading.Thread(target=callers.clear, daemon=True)
            leaving.start()
            leaving.join(30)
            assert not leaving.is_alive()

    batcher = Batcher(function, max_items=1)
    assert asyncio.run(_leave_one_of_three(batcher, function, leave)) == (0, 4)
    batcher.close_sync()
    assert function.items_run == [0, 2]
    assert batcher.stats().num_cancelled == 1


class Image:
    """Something that takes memory."""


def test_a_worker_that_waits_keeps_no_item_and_no_result():
    with Batcher(lambda items: [Image() for _ in items], length_of=None) as batcher:
        item = Image()
        result = batcher.submit_sync(item)
        gone = [weakref.ref(item), weakref.ref(result)]
        del item, result
        wait_until(lambda: [reference() for reference in gone] == [None, None])


def test_serving_imports_no_torch():
    done = run_script("import sys, batchwright.serve; print('torch' in sys.modules)")
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
