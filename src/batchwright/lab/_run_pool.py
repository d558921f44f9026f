"""Jobs over several processes: each has one job at a time, and one that dies costs that job alone."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import final

from ..errors import BatchwrightError
from ._matrix import Job
from ._run_job import execute, failed
from ._run_record import Record

_READY = "ready"
_SECONDS_TO_END = 5.0


def run_jobs(jobs: Sequence[Job], *, finished: Mapping[str, Record], num_workers: int) -> Generator[Record, None, None]:
    """Run jobs and yield their records as they come; a replay waits for the run it replays. Closed, it ends all runs.

    Args:
        jobs: the runs to make.
        finished: records of earlier runs, which replays may need.
        num_workers: processes; 0 runs all in this one.
    """
    backlog = _Backlog(jobs, finished)
    if num_workers == 0:
        while (task := backlog.take()) is not None:
            yield backlog.finish(execute(*task))
        return
    workers = [_Worker.start() for _ in range(min(num_workers, len(jobs)))]
    try:
        yield from _work_off(backlog, workers)
    finally:
        for worker in workers:
            worker.stop()


def _work_off(backlog: _Backlog, workers: list[_Worker]) -> Iterator[Record]:
    while True:
        for worker in workers:
            if worker.job is None and (task := backlog.take()) is not None:
                worker.give(*task)
        busy = {worker.connection: worker for worker in workers if worker.job is not None}
        if not busy:
            return
        for connection in wait(list(busy)):
            worker = busy[connection]  # type: ignore[index]
            record = worker.receive()
            if worker.is_dead:
                workers[workers.index(worker)] = _Worker.start()
            if record is not None:
                yield backlog.finish(record)


@final
class _Backlog:
    """Jobs that wait, in order; a job is ready when the run that it replays has ended."""

    def __init__(self, jobs: Sequence[Job], finished: Mapping[str, Record]) -> None:
        self._waiting = list(jobs)
        # Only runs that are replayed are kept: records are large and there may be thousands.
        self._needed = {job.after for job in jobs if job.after is not None}
        self._sources = {name: record for name, record in finished.items() if name in self._needed}

    def take(self) -> tuple[Job, Record | None] | None:
        """Return the first job that is ready and what it replays, None where none is ready."""
        for place, job in enumerate(self._waiting):
            if job.after is None or job.after in self._sources:
                del self._waiting[place]
                return job, None if job.after is None else self._sources[job.after]
        return None

    def finish(self, record: Record) -> Record:
        """Take note of a run that has ended, and return it."""
        if record["id"] in self._needed:
            self._sources[record["id"]] = record
        return record


@final
@dataclass
class _Worker:
    """A process, its connection, and the job it has."""

    process: BaseProcess
    connection: Connection
    job: Job | None = None
    is_ready: bool = False
    is_dead: bool = False

    @classmethod
    def start(cls) -> _Worker:
        """Start a fresh interpreter: a forked one would inherit the state of torch's threads."""
        context = multiprocessing.get_context("spawn")
        mine, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()  # so that the death of the process is seen as an end of the connection
        return cls(process, mine)

    def give(self, job: Job, source: Record | None) -> None:
        """Hand over a job."""
        self.job = job
        try:
            self.connection.send((job, source))
        except OSError:
            pass  # it is dead, as receive() will find

    def receive(self) -> Record | None:
        """Return the record of the job, None for the word that the process is ready.

        Raises:
            BatchwrightError: the process could not start.
        """
        assert self.job is not None
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            return self._mourn(self.job)
        if message == _READY:
            self.is_ready = True
            return None
        self.job = None
        return dict(message)

    def _mourn(self, job: Job) -> Record:
        self.stop()
        self.is_dead, code = True, self.process.exitcode
        if not self.is_ready:
            raise BatchwrightError(
                f"a process for runs ended with exit code {code} before it could begin; a script that runs a lab needs "
                "its calls under if __name__ == '__main__':, or num_workers=0"
            )
        return failed(job, f"its process ended with exit code {code}, e.g. for want of memory")

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        self.connection.close()
        self.process.join(0.0 if self.job is not None else _SECONDS_TO_END)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join()


def _serve(connection: Connection) -> None:
    """Run jobs until the connection ends; Ctrl-C is for the parent to handle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        connection.send(_READY)
        while True:
            connection.send(execute(*connection.recv()))
    except (EOFError, OSError):
        return
