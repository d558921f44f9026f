"""Lab: a folder in which a plan is run, over all processors, and taken up again where it stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

from .._checks import as_whole
from .._progress import ProgressBar
from ..errors import ArgumentError, StateMismatchError
from . import presets
from ._matrix import Cell as Cell
from ._matrix import Job, LabPlan, plan_jobs, tuning_jobs
from ._records import Dataset
from ._run_job import load_data
from ._run_pool import run_jobs
from ._run_record import Record, hardware, num_cpus, versions
from ._run_tuning import best_rate, score_rates
from ._store import RunStore, StoreError, make_folder, read_records, write_atomic

__all__ = ["Cell", "Lab", "LabPlan", "StoreError"]

VERSION = 1


@final
class Lab:
    """Runs a plan in a folder.

    ``lab.json`` holds the plan and how learning rates were chosen, ``runs.jsonl`` one record a line, ``tuning.jsonl``
    the runs that chose the rates. Each run is written as it ends. Run again, a lab goes on where it stopped: a run that
    was recorded is not repeated. One that failed is recorded with its error, and the rest go on.

    Args:
        folder: made where it is missing.

    >>> import tempfile
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
        """Return the plan of the folder, None where it has none yet."""
        found = self._read_lab()
        return None if found is None else LabPlan.from_dict(found["plan"])

    def records(self) -> list[Record]:
        """Return the records so far."""
        return list(read_records(self.folder / "runs.jsonl"))

    def run(
        self,
        plan: LabPlan | str | None = None,
        *,
        num_workers: int | None = None,
        progress: bool = True,
        retry_failed: bool = False,
    ) -> list[Record]:
        """Run what is not recorded yet, and return all records in the order of the plan.

        Args:
            plan: a plan or the name of a preset; None goes on with the folder's own.
            num_workers: processes; None takes one a processor, 0 runs all in this one. A script that has workers keeps
                its calls under ``if __name__ == "__main__":``.
            progress: whether to show a bar with the time that is left.
            retry_failed: whether runs that failed are made again.

        Raises:
            StateMismatchError: the folder has another plan.
            StoreError: the folder cannot be written, or the disk is full; what was recorded is kept.
        """
        plan = self._settle(plan)
        workers = num_cpus() if num_workers is None else as_whole("num_workers", num_workers, least=0)
        datasets = [load_data(cell.dataset, cell.data) for cell in plan.cells]
        rates = self._tune(plan, datasets, workers, progress)
        jobs = plan_jobs(plan, datasets, rates)
        return self._run_all("runs.jsonl", "lab", jobs, workers, progress, retry_failed=retry_failed)

    def _settle(self, plan: LabPlan | str | None) -> LabPlan:
        """Return the plan to run, written down if it is new."""
        mine = self.plan
        if plan is None:
            if mine is None:
                raise ArgumentError(f"{self.folder} has no plan to go on with; give one, e.g. run('quick')")
            return mine
        plan = presets.get(plan) if isinstance(plan, str) else plan
        if mine is None:
            make_folder(self.folder)
            self._write_lab(plan, tuning=[])
        elif mine.to_dict() != plan.to_dict():
            raise StateMismatchError(
                f"{self.folder} holds the plan {mine.name!r}, which differs from {plan.name!r} here; "
                "choose another folder, or run without a plan to go on with that one"
            )
        return plan

    def _tune(self, plan: LabPlan, datasets: Sequence[Dataset], num_workers: int, progress: bool) -> list[float]:
        """Return the learning rate of each cell, and keep how it was chosen."""
        by_cell = [tuning_jobs(plan, cell, dataset) for cell, dataset in zip(plan.cells, datasets, strict=True)]
        jobs = [job for jobs in by_cell for job in jobs]
        records = (
            {}
            if not jobs
            else {
                record["id"]: record
                for record in self._run_all("tuning.jsonl", "lab: learning rates", jobs, num_workers, progress)
            }
        )
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
    ) -> list[Record]:
        """Run the jobs that a file has no record of, and return the records of all."""
        with RunStore(self.folder / file) as store:
            if retry_failed:
                store.drop_failed()
            missing = [job for job in jobs if job.id not in store.records]
            if missing:
                runs = run_jobs(missing, finished=store.records, num_workers=num_workers)
                # Closing ends the processes, also where a record cannot be written.
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
            raise StoreError(f"{self.folder} is no folder; choose another") from None
        except (OSError, ValueError) as error:
            raise StoreError(f"cannot read {path}: {error}; remove it to begin anew, the runs are kept") from None
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
