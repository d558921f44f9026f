"""How many seconds a batch of a given shape takes, learned from a few measured shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from ..._checks import as_number
from ..._lengths import as_lengths, as_shapes
from ..._types import MAX_INT32, FloatArray, IntArray
from ...errors import ArgumentError
from ._terms import Doubles, FittedTerms, Terms, as_positive, as_probes, dump_terms, fit_terms, load_terms


@final
@dataclass(frozen=True, repr=False)
class TimeModel(FittedTerms):
    """Seconds of a step by batch shape; made by ``TimeModel.fit`` or ``TimeModel.from_json``.

    ``seconds = c + b × (d + e·L + f·L²)`` as in ``MemoryModel``; ``c`` is what the smallest step takes. The
    first batch of a shape takes ``first_visit_seconds`` more, while the device plans and compiles for it.
    """

    terms: Terms
    first_visit_seconds: float = 0.0

    def __post_init__(self) -> None:
        seconds = as_number("first_visit_seconds", self.first_visit_seconds, least=0)
        object.__setattr__(self, "first_visit_seconds", seconds)

    @classmethod
    def fit(
        cls,
        shapes: npt.ArrayLike,
        seconds: npt.ArrayLike,
        *,
        first_visit_seconds: npt.ArrayLike | None = None,
    ) -> TimeModel:
        """Fit the seconds of measured shapes, least in relative error.

        Args:
            shapes: integers ``(M, 1 + axes)``: num_items, padded length per axis; 3 or more, not all alike.
            seconds: ``(M,)``, the steady time of each shape, once it has run before.
            first_visit_seconds: the whole time of each shape's first run, ``(M,)`` or one number for all.
                The model keeps the median of what it exceeds ``seconds`` by; 0 if it does not, or for None.

        >>> shapes = [[1, 64], [8, 64], [8, 128], [4, 256], [2, 512]]
        >>> seconds = [0.08 + 1e-5 * b * length for b, length in shapes]
        >>> model = TimeModel.fit(shapes, seconds, first_visit_seconds=[s + 0.4 for s in seconds])
        >>> model.predict([[10, 100]]).round(6).tolist(), round(model.first_visit_seconds, 6)
        ([0.09], 0.4)
        """
        probes, steady = as_probes(shapes, seconds, name="seconds")
        extra = 0.0 if first_visit_seconds is None else _median_extra(first_visit_seconds, steady)
        return cls(fit_terms(probes, steady), extra)

    def predict(self, shapes: npt.ArrayLike) -> Doubles:
        """Return the steady seconds expected for each shape ``(M, 1 + axes)``."""
        return self.terms.predict(shapes)

    def cost(self, num_items: IntArray, lengths: IntArray) -> Doubles:
        """Return the steady seconds of ``num_items`` ``(M,)`` at padded lengths ``(M, axes)``, for ``cost=`` of a plan.

        >>> model = TimeModel(Terms(1, (0.08, 0.0, 1e-5, 0.0)))
        >>> model.cost(np.array([10]), np.array([[100]])).round(6).tolist()
        [0.09]
        """
        return self.predict(np.column_stack([num_items, lengths]))

    def predict_plan(self, shapes: npt.ArrayLike) -> float:
        """Return the seconds of running the shapes once: their sum, and a first visit for each distinct one.

        >>> model = TimeModel(Terms(1, (0.08, 0.0, 1e-5, 0.0)), first_visit_seconds=0.4)
        >>> round(model.predict_plan([[10, 100], [10, 100], [10, 100]]), 6)
        0.67
        """
        checked = as_shapes(shapes, num_axes=self.num_axes)
        first_visits = len(np.unique(checked, axis=0)) * self.first_visit_seconds
        return float(self.predict(checked).sum()) + first_visits

    def knee(
        self, lengths: npt.ArrayLike, *, max_items: npt.ArrayLike | None = None, tolerance: float = 0.05
    ) -> npt.NDArray[np.int64]:
        """Return the smallest number of items whose throughput is within ``tolerance`` of the best.

        Throughput is ``n / (c + n·g)`` with ``g`` the seconds of one more item. It only grows, so the best is
        at ``m = max_items`` and the answer is ``ceil((1 - t)·m·c / (c + t·m·g))``. Without a limit the best
        is ``1 / g`` and the answer ``ceil((1 - t)·c / (t·g))``.

        Args:
            lengths: padded lengths, shape ``(M, axes)``, or ``(M,)`` for one axis.
            max_items: the most items, one number or ``(M,)``, e.g. ``budget.max_items(lengths)``; 0 gives 0.
            tolerance: the share of the best throughput to give up, above 0 and below 1.

        Returns:
            One number per length; 2**31 - 1 where an item takes no time and nothing limits the batch.

        >>> model = TimeModel(Terms(1, (0.08, 0.0, 1e-5, 0.0)))
        >>> model.knee([30, 300]).tolist(), model.knee([30, 300], max_items=400).tolist()
        ([5067, 507], [354, 218])
        """
        given_up = as_number("tolerance", tolerance, above=0, below=1)
        checked = as_lengths(lengths)
        if checked.shape[1] != self.num_axes:
            raise ArgumentError(f"the model has {self.num_axes} length axes, got {checked.shape[1]}")
        constant, per_item = self.terms.constant, self.terms.per_item(checked)
        if max_items is None:
            return _first_to_reach((1 - given_up) * constant, given_up * per_item)
        most = _as_counts(max_items, len(checked))
        goal, step = (1 - given_up) * constant * most, constant + given_up * per_item * most
        return np.minimum(_first_to_reach(goal, step), most)

    def to_json(self) -> str:
        """Return the model as JSON; ``from_json`` gives an equal one."""
        return dump_terms("TimeModel", self.terms, first_visit_seconds=self.first_visit_seconds)

    @classmethod
    def from_json(cls, text: str) -> TimeModel:
        """Read a model that ``to_json`` wrote."""
        return cls(*load_terms("TimeModel", text, extra="first_visit_seconds"))

    def __repr__(self) -> str:
        return f"TimeModel({self.terms!r}, first_visit_seconds={self.first_visit_seconds!r})"


def _median_extra(first_visit_seconds: npt.ArrayLike, steady: Doubles) -> float:
    first = as_positive(first_visit_seconds, name="first_visit_seconds")
    if first.shape not in ((), steady.shape):
        wanted = f"one number or one per shape, {steady.shape}"
        raise ArgumentError(f"first_visit_seconds must be {wanted}, got {first.shape}")
    return max(0.0, float(np.median(first - steady)))


def _as_counts(max_items: npt.ArrayLike, num_lengths: int) -> npt.NDArray[np.int64]:
    counts = np.asarray(max_items)
    if not np.issubdtype(counts.dtype, np.integer) or counts.shape not in ((), (num_lengths,)):
        wanted = f"a whole number, or one for each of {num_lengths} lengths"
        raise ArgumentError(f"max_items must be {wanted}, got {max_items!r}")
    if (counts < 0).any():
        raise ArgumentError(f"max_items must be 0 or more, got {counts.min()}")
    few = np.minimum(counts.astype(np.uint64), MAX_INT32)  # a small kind of NumPy could not hold MAX_INT32
    return np.broadcast_to(few, (num_lengths,)).astype(np.int64)


def _first_to_reach(goal: FloatArray | float, step: FloatArray) -> npt.NDArray[np.int64]:
    """Return the smallest whole ``n >= 1`` with ``n × step >= goal``, at most ``MAX_INT32``."""
    quotient = np.where(np.greater(goal, 0), float(MAX_INT32), 1.0) + np.zeros(len(step))
    np.divide(goal, step, out=quotient, where=step * MAX_INT32 > goal)
    count = np.ceil(quotient).astype(np.int64)
    # Rounding may carry the quotient across a whole number, by one at most.
    count -= (count - 1) * step >= goal
    count += count * step < goal
    return np.clip(count, 1, MAX_INT32)
