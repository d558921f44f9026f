"""What items, results and functions do to the process of a worker, and to its pipe: nobody else may notice."""

import asyncio
import os
import subprocess
import sys
import threading
import time

import pytest

from batchwright.errors import ArgumentError, ResultError
from batchwright.serve import Batcher, Closed, Device, RunTimeout, WorkerDied
from batchwright.serve._engine import processes
from batchwright.serve._engine.child import Message, dumps, pack_value, unpack_message, unpack_value

from .. import in_processes
from ..tools import ROOT

pytestmark = pytest.mark.usefixtures("importable")

# A program that is killed while its worker holds the interpreter of its process.
KILLED = """
import multiprocessing, os, signal, threading, time
from batchwright.serve import Batcher
from tests.serve import in_processes

if __name__ == "__main__":
    batcher = Batcher(in_processes.hold_the_interpreter, worker="process")
    threading.Thread(target=batcher.submit_sync, args=(1,), daemon=True).start()
    while not batcher.stats().num_running:
        time.sleep(0.01)
    print(multiprocessing.active_children()[0].pid, flush=True)
    time.sleep(1.0)  # the call has begun by then
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError()])
def test_an_item_whose_class_raises_while_it_is_pickled_fails_alone(error):
    with Batcher(in_processes.obey, worker="process") as batcher:
        with pytest.raises(ArgumentError, match="cannot be pickled"):
            batcher.submit_sync(in_processes.Raises(error))
        assert batcher.submit_sync(4) == 8
        assert batcher.stats().is_healthy


def test_a_result_that_ends_the_program_while_it_is_read_fails_alone():
    with Batcher(in_processes.obey, worker="process") as batcher:
        with pytest.raises(ResultError, match="cannot be unpickled \\(SystemExit"):
            batcher.submit_sync("only there")
        assert batcher.submit_sync(4) == 8
        assert batcher.stats().is_healthy


class Absent:
    """A proxy of nothing: whoever asks for its class gets an error."""

    @property
    def __class__(self):
        raise RuntimeError("outside of its context")


def test_a_result_that_raises_when_it_is_asked_for_its_class_does_not_end_the_process():
    with pytest.raises(ResultError, match="outside of its context"):
        raise unpack_value(pack_value(Absent()))


class Shut(Exception):
    """An error that allows no attributes."""

    def __setattr__(self, name, value):
        raise AttributeError(name)


def test_an_error_that_allows_no_attributes_arrives_without_its_trace():
    outcome = unpack_message(Message(error=dumps(Shut("shut")), trace="line 1"))
    assert isinstance(outcome.error, Shut)


def test_a_fork_that_comes_back_from_the_function_answers_nobody():
    with Batcher(in_processes.leave_a_fork, worker="process") as batcher:
        assert batcher.submit_sync("fork") == "fork"
        assert batcher.submit_sync("fork and raise") == "fork and raise"
        assert [batcher.submit_sync(number) for number in range(5)] == [0, 1, 2, 3, 4]
        assert batcher.stats().num_restarts == 0


def test_a_process_that_stops_before_it_has_read_its_batch_is_killed_in_time():
    with Batcher(in_processes.stop_afterwards, worker="process", run_timeout_ms=1000) as batcher:
        assert batcher.submit_sync("stop") == 4
        time.sleep(0.5)
        with pytest.raises(RunTimeout):
            batcher.submit_sync("x" * 10_000_000)
        assert batcher.submit_sync("one") == 3


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a function that holds the GIL outlives the program")
def test_a_function_that_holds_the_interpreter_ends_with_a_program_that_is_killed(tmp_path):
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths}
    with (tmp_path / "pid").open("w+") as out:  # a pipe would stay open with the process
        subprocess.run([sys.executable, str(script)], stdout=out, timeout=60, env=environment, check=False)
        out.seek(0)
        pid = int(out.read())
    end = time.monotonic() + 20
    while _runs(pid):
        assert time.monotonic() < end, "the process of the worker outlived its program"
        time.sleep(0.05)


def _runs(pid):
    """Say whether a process runs; one that has ended may not have been collected yet."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_process_that_starts_again_does_not_keep_the_device_from_others(monkeypatch):
    monkeypatch.setattr(processes, "FIRST_PAUSE_SECONDS", 60.0)  # between the second death and the third start
    device, errors = Device(), []
    bad = Batcher(in_processes.end_the_process, worker="process", device=device)
    good = Batcher(list, device=device)

    def ask():
        try:
            bad.submit_sync(1)
        except (WorkerDied, Closed) as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    while bad.stats().num_restarts < 1:
        time.sleep(0.01)
    end = time.monotonic() + 3.0
    while time.monotonic() < end:
        assert good.submit_sync(1, deadline_ms=2500) == 1
        time.sleep(0.02)
    assert any(thread.is_alive() for thread in threads)
    bad.close_sync(drain=False)
    for thread in threads:
        thread.join()
    assert len(errors) == 4
    good.close_sync()


def test_a_batcher_closes_while_another_one_has_the_device():
    device, gate = Device(), threading.Event()
    hog = Batcher(lambda items: [gate.wait(30) for _ in items], device=device)
    waiting = Batcher(in_processes.obey, worker="process", device=device)
    assert waiting.submit_sync(2) == 4
    thread = threading.Thread(target=hog.submit_sync, args=(1,))
    thread.start()
    while not hog.stats().num_running:
        time.sleep(0.01)
    with pytest.raises(TimeoutError):
        waiting.submit_sync(3, deadline_ms=100)
    waiting.close_sync(timeout_seconds=20)
    assert not waiting._workers._workers[0].thread.is_alive()
    gate.set()
    thread.join()
    hog.close_sync()


@pytest.mark.parametrize("order", ["kill", "exit", "sys.exit", "raise"])
def test_a_function_whose_process_cannot_start_says_why_without_a_guess(order):
    with Batcher(in_processes.Obeying(order), worker="process") as batcher:
        with pytest.raises(WorkerDied, match="could not start") as caught:
            batcher.submit_sync(1)
        assert "__main__" not in str(caught.value)
        assert not batcher.stats().is_healthy
        assert "could not start" in batcher.stats().failure


def test_a_batched_method_that_cannot_be_sent_is_not_told_to_become_a_function():
    with pytest.raises(ArgumentError, match="pass the method of an object that can be pickled"):
        in_processes.Encoder().encode.sync(1)

    def inner(items):
        return items

    with pytest.raises(ArgumentError, match="define it with def at the top of a module"):
        Batcher(inner, worker="process")


def test_a_batcher_is_healthy_again_once_a_process_can_start(tmp_path):
    with Batcher(in_processes.Model(str(tmp_path / "model")), worker="process") as batcher:
        assert batcher.stats().is_healthy
        with pytest.raises(WorkerDied, match="no model"):
            batcher.submit_sync(1)
        assert not batcher.stats().is_healthy
        (tmp_path / "model").touch()
        end = time.monotonic() + 30
        while not batcher.stats().is_healthy and time.monotonic() < end:
            time.sleep(0.05)
        assert batcher.submit_sync(1) == 1
