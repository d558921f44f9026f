"""Curriculum: easy examples first, and a batch that grows with the examples in play."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar, Literal, TypeAlias, final, get_args

import numpy as np
import numpy.typing as npt

from .._checks import as_number, check_choice
from .._types import FloatArray, IntArray
from ..errors import ArgumentError
from .observation import Observation
from .policy import TIMES, Answer, Part, Policy, ReasoningPolicy, State, as_size, show, word

Shape: TypeAlias = Literal["linear", "geometric", "sqrt"]


@final
@dataclass(frozen=True, kw_only=True)
class Growth(Part):
    """A share that grows from ``start_fraction`` at epoch 0 to 1 at ``full_at``.

    >>> [Growth(start_fraction=0.25, full_at=4, shape=shape).at(2) for shape in ("linear", "geometric")]
    [0.625, 0.5]
    """

    start_fraction: float
    full_at: float
    shape: Shape = "linear"

    def at(self, epoch: float) -> float:
        """Return the share at an epoch."""
        first, done = self.start_fraction, min(max(float(epoch) / self.full_at, 0.0), 1.0)
        if done in (0, 1):
            return 1.0 if done else first
        if self.shape == "linear":
            return first + (1 - first) * done
        return first ** (1 - done) if self.shape == "geometric" else math.sqrt(first**2 + (1 - first**2) * done)


@final
@dataclass(frozen=True, eq=False)
class Curriculum:
    """The easiest examples first: the share of examples in play grows from ``start_fraction`` to all of them.

    With ``t = epoch / full_at``, at most 1, and ``f`` the start fraction::

        linear      f + (1 − f)·t
        geometric   f^(1 − t)              slow at first
        sqrt        sqrt(f² + (1 − f²)·t)  fast at first

    Give it to ``ResizableBatchSampler``. Gradient noise that is measured meanwhile is noise of the examples in play.

    Args:
        difficulty: a score per example, larger is harder: a length, a loss, a score of your own. Examples with equal
            scores keep the order of the data.
        start_fraction: share of the examples in epoch 0, above 0 and at most 1.
        full_at: the first epoch with all examples, above 0.
        shape: how the share grows.

    >>> curriculum = Curriculum([30, 10, 20, 40], start_fraction=0.25, full_at=3)
    >>> [curriculum.prefix(epoch).tolist() for epoch in (0, 1, 3)]
    [[1], [1, 2], [1, 2, 0, 3]]
    """

    difficulty: npt.ArrayLike = field(repr=False)
    _: KW_ONLY
    start_fraction: float
    full_at: float
    shape: Shape = "linear"
    _growth: Growth = field(init=False, repr=False)
    _order: IntArray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        scores = _as_scores(self.difficulty)
        order = np.argsort(scores, kind="stable")
        scores.setflags(write=False)
        order.setflags(write=False)
        check_choice("shape", self.shape, get_args(Shape))
        growth = Growth(
            start_fraction=as_number("start_fraction", self.start_fraction, above=0, most=1),
            full_at=as_number("full_at", self.full_at, above=0),
            shape=self.shape,
        )
        plain = {"start_fraction": growth.start_fraction, "full_at": growth.full_at}
        for name, value in {"difficulty": scores, "_order": order, "_growth": growth, **plain}.items():
            object.__setattr__(self, name, value)

    @property
    def num_examples(self) -> int:
        """Return how many examples there are."""
        return len(self._order)

    def fraction(self, epoch: float) -> float:
        """Return the share of examples in play at an epoch."""
        return self._growth.at(epoch)

    def prefix(self, epoch: float) -> IntArray:
        """Return the examples in play at an epoch, easiest first: ``ceil(fraction × N)``, read-only."""
        # Rounded first: 0.55 × 100 is 55.00000000000001 and must not take one more.
        num = math.ceil(round(self.fraction(epoch) * self.num_examples, 6))
        return self._order[: max(1, num)]

    def policy(self, start: float) -> Policy:
        """Return the policy whose batch grows with the examples in play: ``start × fraction / start_fraction``.

        So every epoch has about as many updates as the first one.

        Args:
            start: the size in epoch 0, at least 1.

        >>> policy = Curriculum(range(1000), start_fraction=0.25, full_at=4).policy(16)
        >>> [policy.update(None, Observation(epoch=epoch))[0] for epoch in (0, 2, 4, 9)]
        [16.0, 40.0, 64.0, 64.0]
        """
        return CurriculumSize(self._growth, as_number("start", start, least=1))


@final
@dataclass(frozen=True, repr=False)
class CurriculumSize(ReasoningPolicy):
    """A batch that grows with the share of examples in play."""

    name: ClassVar[str] = "curriculum.policy"
    growth: Growth
    first: float

    def start(self) -> float:
        """Return the size in epoch 0."""
        return self.first

    def decide(self, state: State, observation: Observation) -> Answer:
        """Scale the first size with the share of examples in play."""
        epoch = observation.need("epoch", by=self.name)
        here, first = self.growth.at(epoch), self.growth.start_fraction
        size = as_size(self.first * (here / first))
        formula = f"{show(self.first)} {TIMES} {show(here)} / {show(first)} = {show(size)}"
        return Answer(size, state, f"the easiest {show(100 * here)} % of examples in epoch {epoch}: {formula}")

    def __repr__(self) -> str:
        return f"Curriculum(difficulty, {', '.join(self.growth.arguments())}).policy({word(self.first)})"


def _as_scores(difficulty: npt.ArrayLike) -> FloatArray:
    try:
        scores = np.array(difficulty, dtype=np.float64)
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(f"difficulty must be numbers, one per example: {error}") from error
    if scores.ndim != 1 or len(scores) == 0:
        raise ArgumentError(f"difficulty must be one score per example, shape (N,), got {scores.shape}")
    if np.isnan(scores).any():
        first = int(np.argmax(np.isnan(scores)))
        raise ArgumentError(f"difficulty is NaN at example {first}; give every example a score")
    return scores
