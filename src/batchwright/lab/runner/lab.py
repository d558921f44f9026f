"""Lab: a folder in which a plan is run; the learning rate of each cell is chosen first."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

from ..._checks import as_whole
from ..._files import make_folder, write_atomic
from ..._machine import num_cores
from ..._progress import ProgressBar
from ...errors import ArgumentError, BatchwrightError, StateMismatchError, StoreError
from .._records import RunRecord, RunStore, hardware, read_records, versions
from ..datasets.dataset import Dataset
from ..presets import LabPlan
from ..presets import get as get_preset
from ._jobs import Job, load_data, plan_jobs, run_jobs, tuning_jobs

VERSION = 1


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
        plan = self._settle(plan)
        workers = num_cores() if num_workers is None else as_whole("num_workers", num_workers, least=0)
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


@final
@dataclass(frozen=True)
class Score:
    """How the baseline did at one learning rate: means over the tuning seeds, None if a run failed or diverged."""

    lr: float
    metric: float | None
    validation_loss: float | None

    @property
    def rank(self) -> tuple[float, float]:
        """Return what decides: the metric, and for equal metrics the loss; the larger, the better."""
        metric, loss = self.metric, self.validation_loss
        return -math.inf if metric is None else metric, -math.inf if loss is None else -loss


def score_rates(records: Iterable[RunRecord]) -> list[Score]:
    """Return the scores of the learning rates that runs of the baseline were made with."""
    by_rate: dict[float, list[dict[str, Any]]] = {}
    for record in records:
        by_rate.setdefault(record["settings"]["lr"], []).append(record["final"] or {})
    return [Score(rate, _mean(finals, "metric"), _mean(finals, "validation_loss")) for rate, finals in by_rate.items()]


def best_rate(scores: Iterable[Score]) -> float:
    """Return the rate with the best metric, and among equal metrics the one with the lowest loss.

    >>> best_rate([Score(0.1, 0.9, 0.5), Score(0.01, 0.9, 0.4), Score(1.0, None, None)])
    0.01
    """
    best = max(scores, key=lambda score: score.rank)
    if best.metric is None:
        raise BatchwrightError(
            "the baseline failed or diverged at every learning rate of the grid; look into tuning.jsonl, "
            "or give the plan other grids or the cell an lr"
        )
    return best.lr


def _mean(finals: list[dict[str, Any]], name: str) -> float | None:
    values = [final.get(name) for final in finals]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None
