"""Workers in processes: they die, hang and are killed, and the service lives."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial

import numpy as np
import pytest

from batchwright.errors import ArgumentError, DoesNotFitError, ResultError
from batchwright.serve import Batcher, DeadlineExceeded, RunInterrupted, RunTimeout, WorkerDied
from batchwright.serve._engine import processes
from batchwright.serve._engine.calls import Outcome
from batchwright.serve._engine.child import dumps, pack_error, pack_function, unpack_value
from batchwright.serve._engine.runners import Runner

from .. import in_processes
from ..tools import ROOT, run_script

pytestmark = pytest.mark.usefixtures("importable")


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


@pytest.fixture(scope="module")
def shared():
    """One batcher for the tests that leave its process alive."""
    with Batcher(in_processes.obey, worker="process", policy="window", max_wait_ms=30) as batcher:
        yield batcher


def ends_of(batcher, items):
    async def main():
        return await asyncio.gather(*map(batcher.submit, items), return_exceptions=True)

    return run(main())


def lives(pid):
    """Say whether a thread of a process runs; one that has ended may wait to be reaped by whoever inherited it."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            is_zombie = file.read().rsplit(")", 1)[1].split()[0] == "Z"
        return not is_zombie or len(os.listdir(f"/proc/{pid}/task")) > 1  # the main thread may end before the others
    except FileNotFoundError:
        return False


def wait_for_end(pid):
    end = time.monotonic() + 20
    while lives(pid) and time.monotonic() < end:
        time.sleep(0.02)
    assert not lives(pid)


def test_a_function_runs_in_another_process_that_imports_no_torch(shared):
    pid = shared.submit_sync("pid")
    assert pid not in (os.getpid(), None)
    assert shared.submit_sync("pid") == pid
    assert shared.submit_sync("torch") is False


@pytest.mark.parametrize(
    ("order", "kind", "text"),
    [
        ("raise", ValueError, "bad"),
        ("sys.exit", RunInterrupted, "SystemExit: 4"),
        ("mute", RuntimeError, "Mute: one"),
        ("memory", DoesNotFitError, "ran out of memory by itself: full"),
        ("lambda", ResultError, "the result, a function, cannot be pickled"),
        (in_processes.LoadsNowhere(), ArgumentError, "cannot be unpickled in the process of the worker .OSError: no"),
        (threading.Lock(), ArgumentError, "the item, a lock, cannot be pickled"),
    ],
)
def test_what_is_wrong_with_an_item_is_told_to_its_caller_only(shared, order, kind, text):
    pid = shared.submit_sync("pid")
    *mates, end = ends_of(shared, [1, 2, 3, order])
    assert mates == [2, 4, 6]
    assert type(end) is kind
    with pytest.raises(kind, match=text):
        raise end
    assert shared.submit_sync("pid") == pid  # it still lives


def test_an_error_shows_where_it_was_raised_in_the_process(shared):
    with pytest.raises(ValueError, match="bad") as caught:
        shared.submit_sync("raise")
    assert "in_processes.py" in str(caught.value.__cause__)
    assert 'raise ValueError("bad")' in str(caught.value.__cause__)


@pytest.mark.parametrize(("order", "how"), [("exit", "exit code 3"), ("kill", "SIGKILL"), ("crash", "SIGSEGV")])
def test_an_item_that_ends_the_process_fails_alone_and_another_process_takes_over(order, how):
    with Batcher(in_processes.obey, worker="process", policy="window", max_wait_ms=30) as batcher:
        pid = batcher.submit_sync("pid")
        ends = ends_of(batcher, [1, 2, order, 3])
        assert [*ends[:2], ends[3]] == [2, 4, 6]
        with pytest.raises(WorkerDied, match=how):
            raise ends[2]
        assert batcher.submit_sync("pid") != pid
        stats = batcher.stats()
        assert (stats.num_answered, stats.num_failed) == (5, 1)
        assert stats.num_restarts > 0
        assert stats.failure is None


def test_with_on_error_raise_a_batch_whose_process_ends_is_not_run_again():
    options = {"worker": "process", "policy": "window", "max_wait_ms": 30, "on_error": "raise"}
    with Batcher(in_processes.obey, **options) as batcher:
        assert [type(end) for end in ends_of(batcher, [1, "exit", 2])] == [WorkerDied] * 3
        assert batcher.submit_sync(1) == 2
        assert batcher.stats().num_restarts == 1


def test_a_process_that_is_killed_while_it_is_idle_is_replaced():
    with Batcher(in_processes.obey, worker="process") as batcher:
        pid = batcher.submit_sync("pid")
        os.kill(pid, signal.SIGKILL)
        wait_for_end(pid)
        assert batcher.submit_sync("pid") != pid
        assert batcher.stats().num_failed == 0


def test_a_call_that_hangs_is_killed_and_its_mates_are_answered():
    options = {"worker": "process", "policy": "window", "max_wait_ms": 30, "run_timeout_ms": 300}
    with Batcher(in_processes.obey, **options) as batcher:
        pid = batcher.submit_sync("pid")
        ends = ends_of(batcher, [1, "hang"])
        assert ends[0] == 2
        with pytest.raises(RunTimeout, match="300 ms"):
            raise ends[1]
        assert not lives(pid)
        assert batcher.submit_sync(4) == 8


def test_a_caller_has_its_error_at_its_deadline_while_the_process_hangs():
    with Batcher(in_processes.obey, worker="process", run_timeout_ms=60_000) as batcher:
        assert batcher.submit_sync(1) == 2
        with pytest.raises(DeadlineExceeded, match="still running"):
            batcher.submit_sync("hang", deadline_ms=50)
        batcher._workers.join(0)  # kills the process


def test_coroutine_functions_and_several_processes():
    async def main():
        async with Batcher(in_processes.obey_later, worker="process", num_workers=2, max_items=1) as batcher:
            assert await batcher.map(range(8)) == [0, 2, 4, 6, 8, 10, 12, 14]
            await asyncio.gather(*(batcher.submit("pid") for _ in range(20)))

    before = multiprocessing.active_children()
    run(main())
    assert multiprocessing.active_children() == before


def test_a_decorated_function_is_found_behind_its_decorator():
    pid, item = in_processes.decorated.sync(7)
    assert item == 7
    assert pid != os.getpid()
    in_processes.decorated.batcher.close_sync()
    assert not lives(pid)


@pytest.mark.parametrize(
    "function", [lambda items: items, partial(sorted, key=lambda item: item)], ids=["lambda", "partial"]
)
def test_a_function_that_cannot_be_sent_is_refused_at_once(function):
    with pytest.raises(ArgumentError, match="define it with def at the top of a module"):
        Batcher(function, worker="process")


def test_a_function_that_cannot_be_loaded_fails_every_request_with_the_reason():
    before = multiprocessing.active_children()
    with Batcher(in_processes.Unloadable(), worker="process") as batcher:
        for _ in range(2):
            with pytest.raises(WorkerDied, match="could not start: OSError: no such model"):
                batcher.submit_sync(1)
    assert multiprocessing.active_children() == before


def test_a_kind_of_worker_that_does_not_exist_is_refused():
    with pytest.raises(ArgumentError, match="'thread', 'process'"):
        Batcher(list, worker="greenlet")


def test_rows_of_one_tensor_travel_without_the_others():
    torch = pytest.importorskip("torch")
    rows = in_processes.rows_of_one_tensor(range(50))
    assert len(dumps(rows[7])) < 2 * 8 * 1000
    assert torch.equal(unpack_value(dumps(rows[7])), torch.arange(7000, 8000))
    array = np.arange(50_000).reshape(50, 1000)[7]
    assert unpack_value(dumps(array)).tolist() == list(range(7000, 8000))


def test_an_error_that_cannot_be_made_again_arrives_as_its_text():
    error = unpack_value(pack_error(in_processes.Mute("one", "two")))
    assert (type(error), str(error)) == (RuntimeError, "Mute: one")


def test_a_function_is_sent_by_its_name():
    assert unpack_value(pack_function(in_processes.obey)) is in_processes.obey


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now, self.slept = 0.0, 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.slept += seconds


def test_processes_that_end_at_once_are_started_after_pauses_that_double(monkeypatch):
    clock, pauses = FakeTime(), []
    monkeypatch.setattr(processes, "time", clock)
    runner = processes.ProcessRunner(b"")
    monkeypatch.setattr(runner, "_start", lambda: WorkerDied("it ended at once"))
    for _ in range(10):
        clock.slept = 0.0
        assert not runner.prepare()
        pauses.append(round(clock.slept, 6))
    assert pauses == [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]
    assert str(runner([1]).error) == "it ended at once"


def test_nobody_waits_for_a_process_once_nothing_is_left_to_run(monkeypatch):
    clock = FakeTime()
    monkeypatch.setattr(processes, "time", clock)
    runner = processes.ProcessRunner(b"", is_over=lambda: True)
    runner._num_deaths = 10
    assert not runner.prepare()
    assert clock.slept == 0.0
    assert "the batcher was closed" in str(runner([1]).error)


class Doomed(Runner):
    """A runner whose process ends in every call."""

    num_calls = 0

    def __call__(self, items, requests=()):
        Doomed.num_calls += 1
        return Outcome(error=WorkerDied("it ended"))

    def close(self):
        pass


def test_a_batch_that_ends_every_process_is_given_up_after_so_many():
    async def main(batcher):
        return await asyncio.gather(*map(batcher.submit, range(64)), return_exceptions=True)

    batcher = Batcher(list, policy="window", max_wait_ms=30)
    batcher._workers._make_runner = lambda is_over: Doomed()
    assert [type(end) for end in run(main(batcher))] == [WorkerDied] * 64
    batcher.close_sync()
    # 14 that end one process each, then one more for each group that the search has left, at most.
    assert 14 < Doomed.num_calls < 32


def test_a_process_that_is_killed_once_while_it_starts_fails_no_request(tmp_path):
    with Batcher(in_processes.KilledOnce(str(tmp_path / "killed")), worker="process") as batcher:
        assert ends_of(batcher, [1, 2]) == [1, 2]
        assert batcher.stats().num_restarts == 1


class Restarting(Runner):
    """A runner whose process ends in the call of a batch, and starts again only once it may."""

    def __init__(self):
        self.may_start, self.has_ended, self.calls = threading.Event(), False, []

    @property
    def needs_start(self):
        return self.has_ended

    def prepare(self):
        if self.has_ended:
            assert self.may_start.wait(30)
            self.has_ended = False
        return True

    def __call__(self, items, requests=()):
        self.calls.append(list(items))
        self.has_ended = len(items) > 1
        return Outcome(error=WorkerDied("it ended")) if self.has_ended else Outcome(values=items)

    def close(self):
        pass


@pytest.mark.parametrize("is_next", [False, True])
def test_a_request_ends_at_its_deadline_while_a_process_starts_in_the_middle_of_its_batch(is_next):
    runner, deadlines = Restarting(), {"patient": None, "hurried": 1000}

    async def main(batcher):
        items = sorted(deadlines, reverse=not is_next)  # the first one is run first
        submitted = {item: asyncio.ensure_future(batcher.submit(item, deadline_ms=deadlines[item])) for item in items}
        with pytest.raises(DeadlineExceeded, match="its batch failed"):
            await submitted["hurried"]
        runner.may_start.set()
        return await submitted["patient"]

    with Batcher(list, policy="window", max_wait_ms=30) as batcher:
        batcher._workers._make_runner = lambda is_over: runner
        assert run(main(batcher)) == "patient"
        stats = batcher.stats()
        assert (stats.num_running, stats.num_shed, stats.num_answered) == (0, 1, 1)
    assert runner.calls[1:] == [["patient"]]


SCRIPT = """
    import sys
    from batchwright.serve import Batcher
    from batchwright.serve._engine import lifetimes
    from tests.serve.in_processes import obey

    lifetimes.EXIT_SECONDS = 0.2
    batcher = Batcher(obey, worker="process")
    print(batcher.submit_sync("pid"), flush=True)
"""


def test_a_program_that_ends_leaves_no_process():
    done = run_script(SCRIPT)
    assert done.returncode == 0, done.stderr
    wait_for_end(int(done.stdout))


def test_a_program_that_ends_while_a_call_hangs_leaves_no_process():
    done = run_script(
        SCRIPT
        + """
    import threading, time
    threading.Thread(target=lambda: batcher.submit_sync("hang"), daemon=True).start()
    while not batcher.stats().num_running:
        time.sleep(0.01)
    """
    )
    assert done.returncode == 0, done.stderr
    wait_for_end(int(done.stdout))


@pytest.mark.parametrize("order", ["1", "hang"])
def test_a_program_that_is_killed_leaves_no_process(order):
    script = SCRIPT + f"\n    print(batcher.submit_sync({order!r}) and 'answered', flush=True)\n    sys.stdin.read()\n"
    code = "\n".join(line[4:] for line in script.splitlines())
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, cwd=ROOT
    )
    with process:
        pid = int(process.stdout.readline())
        assert lives(pid)
        if order != "hang":
            process.stdout.readline()
        process.kill()
    wait_for_end(pid)


def test_a_script_without_a_guard_is_told_what_to_do(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import math\nfrom batchwright.serve import Batcher\n"
        "def run(items):\n    return items\n"
        "try:\n    Batcher(run, worker='process').submit_sync(1)\n"
        "except RuntimeError as error:\n    raise SystemExit(f'told: {error}')\n",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert "told: the process of the worker could not start" in done.stderr
    assert "under if __name__ == '__main__'" in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="needs waitpid")
def test_a_process_whose_end_another_thread_has_seen_is_replaced():
    runner = processes.ProcessRunner(pack_function(in_processes.obey))
    assert runner.prepare()
    pid = runner._process.pid
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)  # as multiprocessing does for all children whenever a process is started
    assert isinstance(runner([1]).error, WorkerDied)
    assert runner.prepare()
    assert runner([1]).values == [2]
    runner.close()


def test_a_fork_while_the_parent_closes_its_pipe_can_be_forgotten():
    runner = processes.ProcessRunner(pack_function(in_processes.obey), is_over=lambda: False)
    assert runner.prepare()
    process, connection = runner._process, runner._connection
    os.close(connection.fileno())  # the descriptor is closed already, and the object does not know it yet
    runner.forget()
    assert (runner._process, runner._connection, connection.closed) == (None, None, True)
    process.join(30)  # it sees that the pipe is closed
    assert process.exitcode == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_fork_leaves_the_process_to_its_parent():
    done = run_script(
        SCRIPT
        + """
    import os
    child = os.fork()
    if child == 0:
        batcher.close_sync()
        sys.exit(7)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(code, batcher.submit_sync("pid"), batcher.stats().num_restarts)
    """
    )
    pid, *rest = done.stdout.split()
    assert rest == ["7", pid, "0"], done.stderr
