"""Every arm in a process of its own, all alive at once, timed in turn: what slows the machine slows them all alike."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, final

from _arms import ARMS
from _measure import Session, Task

Row = dict[str, Any]


@final
class Worker:
    """The process of one arm, and how it fares."""

    def __init__(self, task: Task, timeout_seconds: float) -> None:
        self.task = task
        self.error: str | None = None
        self.seconds = 0.0
        self._timeout = timeout_seconds
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(task, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._receive()  # the arm is loaded, and has planned once

    def take_turn(self) -> None:
        """Let the arm plan one epoch."""
        seconds = self._ask("turn")
        self.seconds += seconds or 0.0

    def row(self) -> Row:
        """Return the figures of the arm, or the reason there are none, and end its process."""
        arm = ARMS[self.task.arm]
        row = {"arm": self.task.arm, "title": arm.title, "distribution": self.task.distribution}
        row["requested"] = self.task.num_examples
        figures = self._ask("row") or {"error": self.error}
        self._stop()
        return {**row, **figures}

    def _ask(self, what: str) -> Any:
        if self.error is not None:
            return None
        self._pipe.send(what)
        return self._receive()

    def _receive(self) -> Any:
        """Return the answer; without one, note why and stop the process."""
        try:
            if not self._pipe.poll(self._timeout):
                self.error = f"stopped after {self._timeout:g} s"
            else:
                answer, self.error = self._pipe.recv()
        except EOFError:
            self._process.join()
            self.error = f"its process ended with status {self._process.exitcode}"
        if self.error is not None:
            self._stop()
            return None
        return answer

    def _stop(self) -> None:
        self._process.kill()
        self._process.join()


def run_in_turn(
    tasks: list[Task], *, repeats: int, max_seconds: float, timeout_seconds: float, say: Callable[[str], None]
) -> Iterator[Row]:
    """Time the arms of one distribution in turn, ``repeats`` times around, and yield their rows.

    Args:
        tasks: one per arm.
        repeats: turns of each arm.
        max_seconds: an arm whose turns took so long together gets no further one.
        timeout_seconds: an answer that takes longer is given up.
        say: receives a line for each thing done.
    """
    workers = []
    for task in tasks:
        say(f"{task.distribution}: load {task.arm}")
        workers.append(Worker(task, timeout_seconds))
    for turn in range(1, repeats + 1):
        say(f"{tasks[0].distribution}: turn {turn} of {repeats}, {len(tasks)} arms")
        for worker in workers:
            if turn == 1 or worker.seconds < max_seconds:
                worker.take_turn()
    for worker in workers:
        yield worker.row()


def _serve(task: Task, pipe: Connection) -> None:
    """Answer ``turn`` and ``row`` in the process of an arm, with a pair of answer and error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno() if sys.__stdout__ else 1)  # peers print
    session: Session | None = None
    while True:
        try:
            if session is None:
                session = Session(task)
                answer: Any = True
            else:
                answer = session.take_turn() if pipe.recv() == "turn" else session.row()
            pipe.send((answer, None))
        except ModuleNotFoundError as error:
            pipe.send((None, f"{error.name} is not installed"))
            return
        except EOFError:
            return
        except Exception as error:
            pipe.send((None, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"))
            return
