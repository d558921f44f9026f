"""Lab: a folder in which a plan is run, by several processes; one that dies costs only its run."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, final

from ..._checks import as_flag, as_whole
from ..._files import make_folder, write_atomic
from ..._machine import num_cores
from ..._progress import ProgressBar
from ...errors import ArgumentError, BatchwrightError, StateMismatchError, StoreError
from .._records import RunRecord, RunStore, hardware, read_records, versions
from ..datasets.dataset import Dataset
from ..presets import Job, LabPlan, best_rate, plan_jobs, score_rates, tuning_jobs
from ..presets import get as get_preset
from ._training import execute, failed, load_data

VERSION = 1
_READY = "ready"
_SECONDS_TO_END = 5.0


@final
class Lab:
    """Runs a plan in a folder.

    ``lab.json`` holds the plan and how the learning rates were chosen, ``runs.jsonl`` one record per line,
    ``tuning.jsonl`` the runs that chose the rates. Each run is written when it ends. A lab that is run again continues
    where it stopped: recorded runs are not repeated. A run that fails is recorded with its error, and the others
    continue.

    Args:
        folder: the folder; made if it does not exist.

    >>> import tempfile
    >>> from batchwright.lab import Cell
    >>> cell = Cell(dataset="wine", model="logistic", num_epochs=2, lr=0.01)
    >>> plan = LabPlan(name="tiny", cells=(cell,), strategies=("constant", "linear"), seeds=(0,))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     [record["strategy"] for record in Lab(folder).run(plan, num_workers=0, progress=False)]
    ['constant', 'linear']
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    @property
    def plan(self) -> LabPlan | None:
        """Return the plan of the folder, None if it has none yet."""
        found = self._read_lab()
        return None if found is None else LabPlan.from_dict(found["plan"])

    def records(self) -> list[dict[str, Any]]:
        """Return the records so far."""
        return list(read_records(self.folder / "runs.jsonl"))

    def run(
        self,
        plan: LabPlan | str | None = None,
        *,
        num_workers: int | None = None,
        progress: bool = True,
        retry_failed: bool = False,
    ) -> list[dict[str, Any]]:
        """Run what is not recorded yet, and return all records in the order of the plan.

        Args:
            plan: a plan or the name of a preset; None continues the plan of the folder.
            num_workers: how many processes to use; None for one per processor, 0 to run everything in this process. A
                script with workers must call this under ``if __name__ == "__main__":``.
            progress: whether to show a bar with the time left.
            retry_failed: whether to repeat runs that failed.

        Raises:
            StateMismatchError: the folder has another plan.
            StoreError: the folder cannot be written, or the disk is full; what was recorded is kept.
        """
        workers = num_cores() if num_workers is None else as_whole("num_workers", num_workers, least=0)
        progress, retry_failed = as_flag("progress", progress), as_flag("retry_failed", retry_failed)
        plan = self._settle(plan)
        datasets = [load_data(cell.dataset, cell.data) for cell in plan.cells]
        rates = self._tune(plan, datasets, workers, progress)
        jobs = plan_jobs(plan, datasets, rates)
        return self._run_all("runs.jsonl", "lab", jobs, workers, progress, retry_failed=retry_failed)

    def _settle(self, plan: LabPlan | str | None) -> LabPlan:
        """Return the plan to run, and write it down if it is new."""
        mine = self.plan
        if plan is None:
            if mine is None:
                raise ArgumentError(f"{self.folder} has no plan to continue; give one, e.g. run('quick')")
            return mine
        plan = get_preset(plan) if isinstance(plan, str) else plan
        if mine is None:
            make_folder(self.folder)
            self._write_lab(plan, tuning=[])
        elif mine.to_dict() != plan.to_dict():
            raise StateMismatchError(
                f"{self.folder} holds the plan {mine.name!r}, which differs from the given plan {plan.name!r}; "
                "choose another folder, or run without a plan to continue that one"
            )
        return plan

    def _tune(self, plan: LabPlan, datasets: Sequence[Dataset], num_workers: int, progress: bool) -> list[float]:
        """Return the learning rate of each cell, and write down how it was chosen."""
        by_cell = [tuning_jobs(plan, cell, dataset) for cell, dataset in zip(plan.cells, datasets, strict=True)]
        jobs = [job for jobs in by_cell for job in jobs]
        # Without jobs the folder gets no file for them.
        runs = self._run_all("tuning.jsonl", "lab: learning rates", jobs, num_workers, progress) if jobs else []
        records = {record["id"]: record for record in runs}
        rates, notes = [], []
        for cell, mine in zip(plan.cells, by_cell, strict=True):
            scores = score_rates(records[job.id] for job in mine)
            rates.append(best_rate(scores) if cell.lr is None else cell.lr)
            notes.append(
                {
                    "dataset": cell.dataset,
                    "model": cell.model,
                    "optimizer": cell.optimizer,
                    "lr": rates[-1],
                    "is_at_edge": len(scores) > 1 and rates[-1] in (scores[0].lr, scores[-1].lr),
                    "seeds": list(plan.tuning_seeds),
                    "scores": [asdict(score) for score in scores],
                }
            )
        self._write_lab(plan, tuning=notes)
        return rates

    def _run_all(
        self,
        file: str,
        label: str,
        jobs: Sequence[Job],
        num_workers: int,
        progress: bool,
        *,
        retry_failed: bool = False,
    ) -> list[dict[str, Any]]:
        """Run the jobs that have no record in a file, and return the records of all jobs."""
        with RunStore(self.folder / file) as store:
            if retry_failed:
                store.drop_failed()
            missing = [job for job in jobs if job.id not in store.records]
            if missing:
                runs = run_jobs(missing, finished=store.records, num_workers=num_workers)
                # Closing ends the processes, even if a record cannot be written.
                with closing(runs), ProgressBar(label=label, total=len(missing), enabled=progress) as bar:
                    for record in runs:
                        store.append(record)
                        bar.update()
            return [store.records[job.id] for job in jobs]

    def _read_lab(self) -> dict[str, Any] | None:
        path = self.folder / "lab.json"
        try:
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise StoreError(f"{self.folder} is not a folder; choose another") from None
        except (OSError, ValueError) as error:
            raise StoreError(f"cannot read {path}: {error}; remove it to start over, the runs are kept") from None
        return found

    def _write_lab(self, plan: LabPlan, *, tuning: list[dict[str, Any]]) -> None:
        content = {
            "version": VERSION,
            "preset": plan.name,
            "plan": plan.to_dict(),
            "tuning": tuning,
            "versions": versions(),
            "hardware": hardware(),
        }
        write_atomic(self.folder / "lab.json", json.dumps(content, indent=1) + "\n")


def run_jobs(
    jobs: Sequence[Job], *, finished: Mapping[str, RunRecord], num_workers: int
) -> Generator[RunRecord, None, None]:
    """Run jobs and yield each record when it is there; a replay waits for the run that it repeats.

    Closing the generator ends the processes.

    Args:
        jobs: the runs to make.
        finished: records of earlier runs, which replays may need.
        num_workers: how many processes to use; 0 runs everything in this process.
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
