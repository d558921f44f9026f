"""Workers: processes that make runs; one that dies costs only its run."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import final

from ...errors import BatchwrightError
from .._records import RunRecord
from ._jobs import Job
from ._training import execute, failed

_READY = "ready"
_SECONDS_TO_END = 5.0


@final
class Workers:
    """Processes that make runs, a context; they start with the first run and end with the context.

    Args:
        num_workers: how many processes to use at most; 0 makes every run in this process.
    """

    def __init__(self, num_workers: int) -> None:
        self._num = num_workers
        self._workers: list[_Worker] = []

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self._workers:
            worker.stop()
        self._workers = []

    def run(self, jobs: Sequence[Job], *, finished: Mapping[str, RunRecord]) -> Iterator[RunRecord]:
        """Run jobs and yield each record when it is there; a replay waits for the run that it repeats.

        Args:
            jobs: the runs to make.
            finished: records of earlier runs, which replays may need.
        """
        backlog = _Backlog(jobs, finished)
        if self._num == 0:
            while (task := backlog.take()) is not None:
                yield backlog.finish(execute(*task))
            return
        while len(self._workers) < min(self._num, len(jobs)):
            self._workers.append(_Worker.start())
        yield from _work_off(backlog, self._workers)


def _work_off(backlog: _Backlog, workers: list[_Worker]) -> Iterator[RunRecord]:
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
    """Jobs that wait, in order; a replay is ready when the run that it repeats has ended."""

    def __init__(self, jobs: Sequence[Job], finished: Mapping[str, RunRecord]) -> None:
        self._waiting = list(jobs)
        # Only runs that a replay repeats are kept: records are large, and there may be thousands.
        self._needed = {job.after for job in jobs if job.after is not None}
        self._sources = {name: record for name, record in finished.items() if name in self._needed}

    def take(self) -> tuple[Job, RunRecord | None] | None:
        """Return the first job that is ready and the run that it repeats, None if no job is ready."""
        for place, job in enumerate(self._waiting):
            if job.after is None or job.after in self._sources:
                del self._waiting[place]
                return job, None if job.after is None else self._sources[job.after]
        return None

    def finish(self, record: RunRecord) -> RunRecord:
        """Note a run that has ended, and return it."""
        if record["id"] in self._needed:
            self._sources[record["id"]] = record
        return record


@final
@dataclass
class _Worker:
    """A process, the connection to it, and its job."""

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
        theirs.close()  # else the connection would not end when the process dies
        return cls(process, mine)

    def give(self, job: Job, source: RunRecord | None) -> None:
        """Hand over a job."""
        self.job = job
        try:
            self.connection.send((job, source))
        except OSError:
            pass  # the process is dead, as receive() will find

    def receive(self) -> RunRecord | None:
        """Return the record of the job, None if the process only says that it is ready.

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

    def _mourn(self, job: Job) -> RunRecord:
        self.stop()
        self.is_dead, code = True, self.process.exitcode
        if not self.is_ready:
            raise BatchwrightError(
                f"a worker process ended with exit code {code} before it could begin; a script must run a lab "
                "under if __name__ == '__main__':, or with num_workers=0"
            )
        return failed(job, f"its process ended with exit code {code}, perhaps for lack of memory")

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
