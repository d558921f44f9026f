"""ExperimentBudget: when an experiment may be made, so that experiments take at most a share of the time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, SupportsIndex, final

from .._checks import as_number, as_state, as_whole, read_number, read_whole
from ..errors import ArgumentError

# How many times the plain estimate the first experiment is taken to last: copies, evaluations, new shapes.
_FIRST_OVERRUN = 2.0
# Updates over which the mean of their seconds forgets.
_UPDATES = 16
# How many times the mean an update counts at most: a longer one is a pause of the machine, and no training.
_LONGEST = 16.0
# Halvings of the share, after which more experiments that hold the size change nothing.
_MOST_HELD = 10


@final
@dataclass(frozen=True)
class ExperimentBudget:
    """Says when an experiment may be made; a value that is replaced and never changed.

    With ``t`` the seconds of training, ``e`` those of experiments and ``x`` those of the next one, it is allowed if::

        e + x <= share · (t + e + x),   share = max_share / 2 ** num_held

    ``x`` is that of ``num_batches · len(factors)`` updates, by the mean of the newest ones, and twice that before the
    first experiment; then the newest experiment says how far the estimate was off. One that held the size makes the
    next one less likely to pay, so the share is halved until the size grows. A run too short for one has none.

    A size that is found early helps for the rest of the run. If it is known how long the run will be,
    ``planned_seconds`` takes the place of ``t + e + x`` as long as it is more: the first experiment then comes as soon
    as training took as long as it will take, and the share is one of the whole run.

    Attributes:
        max_share: of all seconds, above 0 and below 1.
        trained_seconds: of updates so far.
        spent_seconds: of experiments so far.
        update_seconds: mean of the newest updates, 0 before the first.
        overrun: how many times the plain estimate an experiment takes.
        num_held: experiments since the last one that let the size grow.
        planned_seconds: of the whole run, with experiments; None if nobody knows.

    >>> budget = ExperimentBudget()
    >>> num_updates = 0
    >>> while not budget.allows(16):  # 16 batches at three factors: 48 updates, 4.8 s if it takes twice as long
    ...     budget, num_updates = budget.after_update(0.05), num_updates + 1
    >>> num_updates  # 91.2 s, so that 4.8 are a twentieth of all
    1825
    >>> budget = budget.after_experiment(2.7, num_batches=16, has_grown=True)
    >>> round(budget.share, 3), round(budget.overrun, 3)
    (0.029, 1.125)
    """

    max_share: float = 0.05
    trained_seconds: float = 0.0
    spent_seconds: float = 0.0
    update_seconds: float = 0.0
    overrun: float = _FIRST_OVERRUN
    num_held: int = 0
    planned_seconds: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "max_share", as_number("max_share", self.max_share, above=0, below=1))
        for name in ("trained_seconds", "spent_seconds", "update_seconds", "overrun"):
            object.__setattr__(self, name, as_number(name, getattr(self, name), least=0))
        num_held = min(as_whole("num_held", self.num_held, least=0), _MOST_HELD)
        object.__setattr__(self, "num_held", num_held)
        if self.planned_seconds is not None:
            object.__setattr__(self, "planned_seconds", as_number("planned_seconds", self.planned_seconds, above=0))

    @property
    def share(self) -> float:
        """Return which part of all seconds so far experiments took."""
        total = self.trained_seconds + self.spent_seconds
        return self.spent_seconds / total if total else 0.0

    def expected_seconds(self, num_batches: SupportsIndex, factors: Sequence[float] = (1, 2, 4)) -> float:
        """Return how long an experiment is expected to take, 0 before the first update."""
        return self.overrun * self._plain_seconds(num_batches, factors)

    def allows(self, num_batches: SupportsIndex, factors: Sequence[float] = (1, 2, 4)) -> bool:
        """Return whether an experiment may be made now.

        Args:
            num_batches: of the size in force, that each branch trains on.
            factors: of ``measure_size``.
        """
        expected = self.expected_seconds(num_batches, factors)
        spent = self.spent_seconds + expected
        total = self.trained_seconds + spent
        if self.planned_seconds is not None and self.trained_seconds >= expected:
            total = max(total, self.planned_seconds)
        return expected > 0 and spent <= self.max_share / 2**self.num_held * total

    def after_update(self, seconds: float) -> ExperimentBudget:
        """Return the budget after an update of some seconds; what is no duration counts as none.

        A machine that was asleep, or a clock that jumped, is no training: an update counts at most 16 times the mean.
        """
        seconds = float(seconds)
        if not 0 < seconds < float("inf"):
            return self
        if self.update_seconds:
            seconds = min(seconds, _LONGEST * self.update_seconds)
        mean = self.update_seconds + (seconds - self.update_seconds) / (_UPDATES if self.update_seconds else 1)
        return replace(self, trained_seconds=self.trained_seconds + seconds, update_seconds=mean)

    def after_experiment(
        self, seconds: float, *, num_batches: SupportsIndex, factors: Sequence[float] = (1, 2, 4), has_grown: bool
    ) -> ExperimentBudget:
        """Return the budget after an experiment.

        Args:
            seconds: that it took in all: ``SizeExperiment.total_seconds``.
            num_batches: as in ``allows``.
            factors: as in ``allows``.
            has_grown: whether the size is larger now.
        """
        seconds, plain = as_number("seconds", seconds, above=0), self._plain_seconds(num_batches, factors)
        return replace(
            self,
            spent_seconds=self.spent_seconds + seconds,
            overrun=seconds / plain if plain else self.overrun,
            num_held=0 if has_grown else min(self.num_held + 1, _MOST_HELD),
        )

    def _plain_seconds(self, num_batches: SupportsIndex, factors: Sequence[float]) -> float:
        """Return the seconds of the updates of all branches, as if larger batches saved no time."""
        if not factors:
            raise ArgumentError("factors must not be empty: an experiment compares sizes")
        return as_whole("num_batches", num_batches, least=1) * len(factors) * self.update_seconds

    def to_state(self) -> dict[str, Any]:
        """Return the budget as JSON values."""
        # Without a plan it leaves the state that it always left.
        return {name: value for name, value in asdict(self).items() if value is not None}

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> ExperimentBudget:
        """Return the budget of a saved state."""
        numbers = ["trained_seconds", "spent_seconds", "update_seconds", "overrun"]
        state = as_state(state, of="ExperimentBudget", needs=["max_share", *numbers, "num_held"])
        values: dict[str, Any] = {name: read_number(state, name, least=0) for name in numbers}
        values["max_share"] = read_number(state, "max_share", above=0, below=1)
        if state.get("planned_seconds") is not None:
            values["planned_seconds"] = read_number(state, "planned_seconds", above=0)
        return ExperimentBudget(**values, num_held=read_whole(state, "num_held"))
