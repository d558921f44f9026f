"""Choose the learning rate of every arm: the same number of runs for each, on seeds that are not compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, final

from ...errors import StoreError
from .._records import RunRecord, number
from ..datasets.dataset import Dataset
from ..presets import LabPlan
from ..strategies.catalogue import get as get_strategy
from ._choice import Choice, next_rates
from ._jobs import Arm, Job, arms_of

Run: TypeAlias = Callable[[Sequence[Job]], Sequence[RunRecord]]


def num_tuning_runs(plan: LabPlan, datasets: Sequence[Dataset]) -> int:
    """Return how many runs choose the learning rates of a plan; it is known before the first one."""
    free = [plan.cells[arm.cell] for arm in arms_of(plan, datasets) if plan.cells[arm.cell].lr is None]
    num_rates = sum(len(plan.grids[cell.optimizer]) + 2 * plan.tuning_rounds for cell in free)
    return num_rates * len(plan.tuning_seeds)


def tune(plan: LabPlan, datasets: Sequence[Dataset], run: Run) -> dict[Arm, Choice]:
    """Return the learning rate of every arm of a plan.

    Args:
        plan: the plan.
        datasets: the data set of each cell.
        run: makes some runs and returns their records in the same order.
    """
    searches = {arm: _Search(plan, arm, datasets[arm.cell]) for arm in arms_of(plan, datasets)}
    # A replay repeats sizes that its source recorded at the best rate of the source, so it waits for that one.
    for is_replay in (False, True):
        some = [one for one in searches.values() if (one.source is not None) is is_replay and one.is_free]
        for search in some:
            search.start(searches)
        for _ in range(plan.tuning_rounds + 1):
            by_search = [search.jobs() for search in some]
            records = iter(run([job for jobs in by_search for job in jobs]))
            for search, jobs in zip(some, by_search, strict=True):
                search.take([(job, next(records)) for job in jobs])
    return {arm: search.choice() for arm, search in searches.items()}


@final
@dataclass
class _Search:
    """The search for the rate of one arm."""

    plan: LabPlan
    arm: Arm
    dataset: Dataset
    finals: dict[float, list[Mapping[str, Any] | None]] = field(default_factory=dict)
    # By seed, the run whose sizes a replay repeats.
    repeated: dict[int, Job] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cell = self.plan.cells[self.arm.cell]
        self.source = get_strategy(self.arm.strategy).replays
        self.is_free = self.cell.lr is None

    def start(self, searches: Mapping[Arm, _Search]) -> None:
        """Take over the runs to repeat: those of the next tuning seed, or of the only one."""
        if self.source is None:
            return
        other, seeds = searches[Arm(self.arm.cell, self.source)], self.plan.tuning_seeds
        rate = other.choice().best_tried
        if rate is not None:
            following = (*seeds[1:], seeds[0])
            self.repeated = {seed: other.job(rate, then) for seed, then in zip(seeds, following, strict=True)}

    def jobs(self) -> list[Job]:
        """Return the runs of the next round."""
        if self.source is not None and not self.repeated:
            return []  # there is nothing to repeat, since its source has no rate
        rates = next_rates(self.losses()) if self.finals else self.plan.grids[self.cell.optimizer]
        return [self.job(rate, seed) for rate in rates for seed in self.plan.tuning_seeds]

    def job(self, rate: float, seed: int) -> Job:
        """Return the run at a rate; it is validated at its end only."""
        settings = replace(self.cell.settings(self.dataset).with_lr(rate), num_evaluations=1)
        repeated = self.repeated.get(seed)
        note = (
            {} if repeated is None else {"replays": {"strategy": self.source, "seed": repeated.seed, "id": repeated.id}}
        )
        return Job(
            cell=self.cell,
            strategy=self.arm.strategy,
            seed=seed,
            settings=settings,
            notes={**note, "data": dict(self.cell.data)},
            after=None if repeated is None else repeated.id,
            update_time=self.plan.update_time,
            digest=self.dataset.digest,
        )

    def take(self, runs: Sequence[tuple[Job, RunRecord]]) -> None:
        """Note how runs ended."""
        for job, record in runs:
            self.finals.setdefault(job.settings.lr, []).append(_final_of(record))

    def losses(self) -> dict[float, float | None]:
        """Return the mean final validation loss of each rate, None if a run of it failed or diverged."""
        return {rate: _mean_loss(finals) for rate, finals in self.finals.items()}

    def choice(self) -> Choice:
        """Return the rate that the runs so far lead to."""
        if not self.is_free:
            return Choice(lr=self.cell.lr, losses={})
        found = [final for finals in self.finals.values() for final in finals]
        return Choice.of(
            self.losses(),
            num_diverged=sum(final is not None and _loss(final) is None for final in found),
            num_failed=sum(final is None for final in found),
            seeds=self.plan.tuning_seeds,
        )


def _final_of(record: RunRecord) -> Mapping[str, Any] | None:
    """Return where a run ended, None if it failed."""
    if record["status"] != "ok":
        return None
    final = record.get("final")
    if not isinstance(final, Mapping) or "validation_loss" not in final:
        raise StoreError(
            f"the run {record['id']} in tuning.jsonl says that it ended well but has no final loss: the file is "
            "damaged; remove that line, and the run is made again"
        )
    return final


def _loss(final: Mapping[str, Any]) -> float | None:
    return number(final["validation_loss"])


def _mean_loss(finals: Sequence[Mapping[str, Any] | None]) -> float | None:
    losses = [None if final is None else _loss(final) for final in finals]
    known = [loss for loss in losses if loss is not None]
    return sum(known) / len(known) if len(known) == len(losses) else None
