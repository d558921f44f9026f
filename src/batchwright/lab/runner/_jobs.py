"""The runs of a plan as jobs, and the processes that work them off; a process that dies costs only its job."""

from __future__ import annotations

import json
import multiprocessing
import signal
import traceback
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, final

from ...errors import ArgumentError, BatchwrightError
from .._records import RunRecord, make_record, run_id
from ..datasets.dataset import Dataset
from ..datasets.loading import load
from ..presets import Cell, LabPlan
from ..strategies.catalogue import get
from ..strategies.strategy import BASELINE, RunSettings
from ._training import run_one

_READY = "ready"
_SECONDS_TO_END = 5.0


@final
@dataclass(frozen=True, kw_only=True)
class Job:
    """One run to make.

    Args:
        dataset: a name for ``datasets.load``.
        data: further options of ``load``.
        model: the name of the model.
        strategy: the name of the strategy.
        seed: the seed of the run.
        settings: the settings of the run.
        notes: further settings for the record.
        after: for a replay, the id of the run that it repeats.
    """

    dataset: str
    data: Mapping[str, Any]
    model: str
    strategy: str
    seed: int
    settings: RunSettings
    notes: Mapping[str, Any]
    after: str | None = None

    @property
    def id(self) -> str:
        """Return the id of its record."""
        return run_id(self.dataset, self.model, self.strategy, self.seed, self.all_settings)

    @property
    def all_settings(self) -> dict[str, Any]:
        """Return the settings and the notes, as the record holds them."""
        return {**self.settings.to_dict(), **self.notes}


def tuning_jobs(plan: LabPlan, cell: Cell, dataset: Dataset) -> list[Job]:
    """Return the runs of the baseline that choose the learning rate of a cell; empty if the cell has one."""
    if cell.lr is not None:
        return []
    settings = cell.settings(dataset)
    return [
        _job(cell, BASELINE, seed, settings.with_lr(rate), {})
        for rate in plan.grids[cell.optimizer]
        for seed in plan.tuning_seeds
    ]


def plan_jobs(plan: LabPlan, datasets: Sequence[Dataset], rates: Sequence[float]) -> list[Job]:
    """Return all runs of a plan, one seed after another; the cells take turns, so that progress is even.

    Args:
        plan: the plan.
        datasets: the data set of each cell.
        rates: the learning rate of each cell.
    """
    cells = [
        (cell, dataset.num_classes, cell.settings(dataset).with_lr(rate), _grid_note(plan, cell))
        for cell, dataset, rate in zip(plan.cells, datasets, rates, strict=True)
    ]
    return [
        job
        for place in range(len(plan.seeds))
        for name in plan.strategies
        for cell, num_classes, settings, note in cells
        if get(name).fits(num_classes)
        for job in _jobs_of_strategy(plan, place, name, cell, settings, note)
    ]


def _jobs_of_strategy(
    plan: LabPlan, place: int, name: str, cell: Cell, settings: RunSettings, note: Mapping[str, Any]
) -> list[Job]:
    seed, source = plan.seeds[place], get(name).replays
    if source is None:
        return [_job(cell, name, seed, settings, note)]
    if len(plan.seeds) == 1:
        return []
    # Its own sizes would give the very same run; those of another seed tell whether adapting to this one mattered.
    other = _job(cell, source, plan.seeds[(place + 1) % len(plan.seeds)], settings, note)
    replays = {"strategy": source, "seed": other.seed, "id": other.id}
    return [_job(cell, name, seed, settings, {**note, "replays": replays}, after=other.id)]


def _job(
    cell: Cell, strategy: str, seed: int, settings: RunSettings, note: Mapping[str, Any], after: str | None = None
) -> Job:
    notes = {**note, "data": dict(cell.data)}
    return Job(
        dataset=cell.dataset,
        data=cell.data,
        model=cell.model,
        strategy=strategy,
        seed=seed,
        settings=settings,
        notes=notes,
        after=after,
    )


def _grid_note(plan: LabPlan, cell: Cell) -> dict[str, Any]:
    return {"lr_grid": None if cell.lr is not None else list(plan.grids[cell.optimizer])}


def execute(job: Job, source: RunRecord | None) -> RunRecord:
    """Make a run and return its record; an exception becomes a record with status ``failed``.

    Args:
        job: the run.
        source: for a replay, the record of the run that it repeats.
    """
    try:
        if source is not None and source["status"] != "ok":
            raise ArgumentError(f"it repeats the run of {source['strategy']} with seed {source['seed']}, which failed")
        dataset = load_data(job.dataset, job.data)
        return run_one(dataset, job.model, job.strategy, job.seed, job.settings, replay_of=source, notes=job.notes)
    except Exception as error:
        return failed(job, f"{type(error).__name__}: {error}", trace=traceback.format_exc())


def failed(job: Job, error: str, *, trace: str | None = None) -> RunRecord:
    """Return the record of a run that did not reach its end."""
    return make_record(
        dataset=job.dataset,
        model=job.model,
        strategy=job.strategy,
        group=get(job.strategy).group,
        seed=job.seed,
        settings=job.all_settings,
        status="failed",
        error=error,
        traceback=trace,
    )


def load_data(name: str, options: Mapping[str, Any]) -> Dataset:
    """Load a data set once per process."""
    return _load(name, json.dumps(dict(options), sort_keys=True))


@lru_cache(maxsize=8)
def _load(name: str, options: str) -> Dataset:
    return load(name, **json.loads(options))


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
