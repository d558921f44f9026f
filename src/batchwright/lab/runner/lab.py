"""Lab: a folder in which a plan is run, by several processes, and continued where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

from ..._checks import as_flag, as_whole
from ..._files import make_folder, write_atomic
from ..._machine import num_cores
from ..._progress import ProgressBar
from ...errors import ArgumentError, StateMismatchError, StoreError
from .._records import RunStore, hardware, read_records, versions
from ..datasets.dataset import Dataset
from ..presets import Cell, LabPlan
from ..presets import get as get_preset
from ..strategies.strategy import BASE_SIZES, MIN_BATCHES
from ._choice import Choice
from ._jobs import Arm, Job, arms_of, plan_jobs
from ._training import load_data
from ._tuning import num_tuning_runs, tune
from ._workers import Workers
from .forecast import Forecast, forecast

VERSION = 2
RUNS, TUNING, PLAN = "runs.jsonl", "tuning.jsonl", "lab.json"


@final
class Lab:
    """Runs a plan in a folder.

    First every strategy gets its learning rate, all of them by the same number of runs; then strategies are compared.
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
        if found is None:
            return None
        try:
            return LabPlan.from_dict(found["plan"])
        except (ArgumentError, AttributeError, KeyError, TypeError, ValueError) as error:
            raise StoreError(
                f"{self.folder / PLAN} is damaged: its plan cannot be read ({error!r}); put it back as it was, or "
                "choose another folder"
            ) from None

    def records(self) -> list[dict[str, Any]]:
        """Return the records so far."""
        return list(read_records(self.folder / "runs.jsonl"))

    def forecast(
        self, plan: LabPlan | str | None = None, *, num_workers: int | None = None, retry_failed: bool = False
    ) -> Forecast:
        """Return how many runs are left and about how long they take, by a short trial of every cell.

        Nothing is written.

        Args:
            plan: a plan or the name of a preset; None is the plan of the folder.
            num_workers: how many processes ``run`` will use; None for one per processor.
            retry_failed: whether ``run`` will repeat runs that failed.

        Raises:
            StateMismatchError: the folder has another plan, or the data changed since its first runs.
        """
        plan, _ = self._find(plan)
        datasets = self._load(plan)
        done = partial(_num_recorded, without_failed=as_flag("retry_failed", retry_failed))
        num_tuning = num_tuning_runs(plan, datasets) - done(self.folder / TUNING)
        num_runs = len(plan.seeds) * len(arms_of(plan, datasets)) - done(self.folder / RUNS)
        return forecast(plan, datasets, max(0, num_tuning), max(0, num_runs), _workers(num_workers))

    def run(
        self,
        plan: LabPlan | str | None = None,
        *,
        num_workers: int | None = None,
        progress: bool = True,
        retry_failed: bool = False,
    ) -> list[dict[str, Any]]:
        """Run what is not recorded yet, and return the records of the plan's runs in its order.

        Args:
            plan: a plan or the name of a preset; None continues the plan of the folder.
            num_workers: how many processes to use; None for one per processor, 0 to run everything in this process. A
                script with workers must call this under ``if __name__ == "__main__":``.
            progress: whether to show a bar with the time left.
            retry_failed: whether to repeat runs that failed.

        Raises:
            StateMismatchError: the folder has another plan or was written by another version, or the data changed
                since its first runs.
            StoreError: the folder cannot be written or is damaged, or the disk is full; what was recorded is kept.
        """
        workers = _workers(num_workers)
        progress, retry_failed = as_flag("progress", progress), as_flag("retry_failed", retry_failed)
        plan, is_new = self._find(plan)
        # Before anything is written: data that are missing must not leave a folder with a plan that cannot run.
        datasets = self._load(plan)
        if is_new:
            make_folder(self.folder)
            self._write_lab(plan, datasets, tuning=[])
        # Leaving ends the processes, even if a record cannot be written.
        with Workers(workers) as pool:
            choices = self._tune(plan, datasets, pool, progress, retry_failed)
            jobs = plan_jobs(plan, datasets, choices)
            with RunStore(self.folder / RUNS) as store:
                if retry_failed:
                    store.drop_failed()
                num_missing = sum(job.id not in store.records for job in jobs)
                with ProgressBar(label="lab", total=num_missing, enabled=progress and num_missing > 0) as bar:
                    return _run_all(store, jobs, pool, bar)

    def _find(self, plan: LabPlan | str | None) -> tuple[LabPlan, bool]:
        """Return the plan to run, and whether it is new in the folder."""
        mine = self.plan
        if plan is None:
            if mine is None:
                raise ArgumentError(f"{self.folder} has no plan to continue; give one, e.g. run('quick')")
            return mine, False
        plan = get_preset(plan) if isinstance(plan, str) else plan
        if mine is None:
            self._refuse_runs_without_plan()
        elif mine.to_dict() != plan.to_dict():
            raise StateMismatchError(
                f"{self.folder} holds the plan {mine.name!r}, which differs from the given plan {plan.name!r}; "
                "choose another folder, or run without a plan to continue that one"
            )
        return plan, mine is None

    def _load(self, plan: LabPlan) -> list[Dataset]:
        """Return the data of each cell; refuse data that changed since the first runs of the folder."""
        datasets = [load_data(cell.dataset, cell.data) for cell in plan.cells]
        for cell, dataset in zip(plan.cells, datasets, strict=True):
            _check_sizes(cell, dataset)
        found = self._read_lab()
        if found is None:
            return datasets
        known = found.get("data")
        if not isinstance(known, list) or len(known) != len(datasets):
            raise StoreError(
                f"{self.folder / PLAN} does not say which data its runs were made on; put it back as it was, or choose "
                "another folder"
            )
        for cell, dataset, digest in zip(plan.cells, datasets, known, strict=True):
            if dataset.digest != digest:
                raise StateMismatchError(
                    f"{_source(cell)} gives other numbers than when the lab in {self.folder} began: the data changed, "
                    "or the versions of Python and NumPy did; put the data back as they were, or choose another folder"
                )
        return datasets

    def _refuse_runs_without_plan(self) -> None:
        """Refuse a folder whose runs belong to nobody knows which plan: reports would mix them with those to come."""
        for name in (RUNS, TUNING):
            if _num_recorded(self.folder / name):
                raise StoreError(
                    f"{self.folder / name} holds runs, but {PLAN} beside it, which says what they belong to, is "
                    "missing; put it back, or choose another folder"
                )

    def _tune(
        self, plan: LabPlan, datasets: Sequence[Dataset], pool: Workers, progress: bool, retry_failed: bool
    ) -> Mapping[Arm, Choice]:
        """Return the learning rate of each arm, and write down how it was chosen."""
        total = num_tuning_runs(plan, datasets)
        if not total:  # the folder gets no file for such runs
            return tune(plan, datasets, lambda jobs: [])
        with RunStore(self.folder / TUNING) as store:
            if retry_failed:
                store.drop_failed()
            num_missing = max(0, total - len(store.records))
            with ProgressBar(label="tuning", total=num_missing, enabled=progress and num_missing > 0) as bar:
                choices = tune(plan, datasets, lambda jobs: _run_all(store, jobs, pool, bar))
                # A replay of a strategy without a rate has no runs.
                bar.update(max(0, num_missing - bar.done))
        self._write_lab(plan, datasets, tuning=[_note(plan, arm, choice) for arm, choice in choices.items()])
        return choices

    def _read_lab(self) -> dict[str, Any] | None:
        path = self.folder / PLAN
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise StoreError(f"{self.folder} is not a folder; choose another") from None
        except (OSError, ValueError) as error:
            raise StoreError(f"cannot read {path}: {error}; put it back as it was, or choose another folder") from None
        if not isinstance(found, dict) or not isinstance(found.get("plan"), dict):
            raise StoreError(f"{path} is damaged: it holds no plan; put it back as it was, or choose another folder")
        if found.get("version") != VERSION:
            raise StateMismatchError(
                f"{self.folder} was written by another version of the lab ({found.get('version')}, this is {VERSION}), "
                "which chose learning rates in another way; its runs cannot be compared with new ones: choose "
                f"another folder. Its report can still be made: batchwright lab report {self.folder}"
            )
        return found

    def _write_lab(self, plan: LabPlan, datasets: Sequence[Dataset], *, tuning: list[dict[str, Any]]) -> None:
        content = {
            "version": VERSION,
            "preset": plan.name,
            "plan": plan.to_dict(),
            "data": [dataset.digest for dataset in datasets],
            "tuning": tuning,
            "versions": versions(),
            "hardware": hardware(),
        }
        write_atomic(self.folder / PLAN, json.dumps(content, indent=1) + "\n")


def _workers(num_workers: int | None) -> int:
    return num_cores() if num_workers is None else as_whole("num_workers", num_workers, least=0)


def _check_sizes(cell: Cell, dataset: Dataset) -> None:
    """Refuse data too small for batches that grow, before every run fails of it."""
    least = MIN_BATCHES * BASE_SIZES[0]
    if len(dataset.train) < least and not {"base_size", "max_size"} & cell.options.keys():
        raise ArgumentError(
            f"{_source(cell)} gives {dataset.num_examples} rows, of which {len(dataset.train)} are to train on; a lab "
            f"needs at least {least} of those, about {least * 5 // 4} rows in all, so that an epoch has "
            f"{MIN_BATCHES} batches of {BASE_SIZES[0]}: give more rows"
        )
    cell.settings(dataset).check_size_of(len(dataset.train))


def _source(cell: Cell) -> str:
    path = cell.data.get("path")
    return f"the data set {cell.dataset}" if path is None else str(path)


def _num_recorded(path: Path, *, without_failed: bool = False) -> int:
    """Return how many runs a file holds, each counted once."""
    status = {record["id"]: record["status"] for record in read_records(path)}
    return sum(one == "ok" for one in status.values()) if without_failed else len(status)


def _run_all(store: RunStore, jobs: Sequence[Job], pool: Workers, bar: ProgressBar) -> list[dict[str, Any]]:
    """Run the jobs that have no record in a file, and return the records of all jobs."""
    missing = [job for job in jobs if job.id not in store.records]
    for record in pool.run(missing, finished=store.records):
        store.append(record)
        bar.update()
        bar.doing(f"{record['dataset']} · {record['model']}, {record['strategy']}")
    return [store.records[job.id] for job in jobs]


def _note(plan: LabPlan, arm: Arm, choice: Choice) -> dict[str, Any]:
    """Return how the rate of an arm was chosen, for ``lab.json``."""
    cell = plan.cells[arm.cell]
    return {
        "dataset": cell.dataset,
        "model": cell.model,
        "strategy": arm.strategy,
        "optimizer": cell.optimizer,
        "lr": choice.lr,
        "best_tried": choice.best_tried,
        "is_at_edge": choice.is_at_edge,
        "num_runs": choice.num_runs,
        "seeds": list(choice.seeds),
        "scores": [{"lr": rate, "validation_loss": choice.losses[rate]} for rate in sorted(choice.losses)],
        "problem": choice.problem,
    }
