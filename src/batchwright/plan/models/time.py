"""How many seconds a batch of a given shape takes, learned from a few measured shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from ..._checks import as_number
from ..._lengths import as_lengths, as_shapes
from ..._step_seconds import form_scores
from ..._types import MAX_INT32, FloatArray, IntArray
from ...errors import ArgumentError
from ._terms import (
    JSON_VERSION,
    Doubles,
    FittedTerms,
    Terms,
    as_positive,
    as_probes,
    dump_terms,
    fit_terms,
    num_told_apart,
    read_number,
    read_state,
    read_terms,
)

# A launch time is written as this version, so that a batchwright that knows no launch time refuses it.
_LAUNCH_VERSION = 2

_Mask: TypeAlias = npt.NDArray[np.bool_]

# Steps of one launch time differ by noise only, and hardly by half: farther apart they are not one.
_FLAT = 1.5
_MAX_STARTS = 24
_MAX_TURNS = 6
# Many probes tell the parts apart by themselves, and each limit makes a fit slower.
_FEW_PROBES = 48
# A launch time must lower the mean error at least to this share: noise alone lowers it a little.
_CLEAR_GAIN = 0.8
_NOT_WORSE = 1.01
_ROUNDING = 1e-9


@final
@dataclass(frozen=True, repr=False)
class TimeModel(FittedTerms):
    """Seconds of a step by batch shape; made by ``TimeModel.fit`` or ``TimeModel.from_json``.

    ``seconds = max(launch_seconds, c + b × (d + e·L + f·L²))``, the terms as in ``MemoryModel``. A GPU computes a
    small batch faster than the host launches its kernels: then a step takes ``launch_seconds`` whatever it holds. Where
    that time is 0, the smallest step takes ``c``. The first batch of a shape takes ``first_visit_seconds`` more, while
    the device plans and compiles for it.
    """

    terms: Terms
    first_visit_seconds: float = 0.0
    launch_seconds: float = field(default=0.0, metadata={"is_later": True})

    def __post_init__(self) -> None:
        for name in ("first_visit_seconds", "launch_seconds"):
            object.__setattr__(self, name, as_number(name, getattr(self, name), least=0))

    @classmethod
    def fit(
        cls,
        shapes: npt.ArrayLike,
        seconds: npt.ArrayLike,
        *,
        first_visit_seconds: npt.ArrayLike | None = None,
    ) -> TimeModel:
        """Fit the seconds of measured shapes, least in relative error.

        A launch time is kept only where it clearly lowers the error, by more than the further number alone would.
        To find it, measure some batches that are too small and at least two that are not.

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
        launch, terms = fit_launch(probes, steady)
        return cls(terms, extra, launch)

    def predict(self, shapes: npt.ArrayLike) -> Doubles:
        """Return the steady seconds expected for each shape ``(M, 1 + axes)``."""
        return predict_launch(self.launch_seconds, self.terms, shapes)

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

        Throughput is ``n / s(n)`` with ``s(n) = max(l, c + n·g)``, ``l`` the launch time and ``g`` the seconds of one
        more item. It only grows, so the best is at ``m = max_items``, and both parts of ``s`` must leave enough of it:
        ``n`` is at least ``(1 - t)·m·l / s(m)`` and ``(1 - t)·m·c / (s(m) - (1 - t)·m·g)``. Without a limit the best
        is ``1 / g``, and ``n`` is at least ``(1 - t)·l / g`` and ``(1 - t)·c / (t·g)``.

        Args:
            lengths: padded lengths, shape ``(M, axes)``, or ``(M,)`` for one axis.
            max_items: the most items, one number or ``(M,)``, e.g. ``budget.max_items(lengths)``; 0 gives 0.
            tolerance: the share of the best throughput to give up, above 0 and below 1.

        Returns:
            One number per length; 2**31 - 1 where an item takes no time and nothing limits the batch.

        >>> model = TimeModel(Terms(1, (0.08, 0.0, 1e-5, 0.0)))
        >>> model.knee([30, 300]).tolist(), model.knee([30, 300], max_items=400).tolist()
        ([5067, 507], [354, 218])
        >>> TimeModel(Terms(1, (0.0, 0.0, 1e-5, 0.0)), launch_seconds=0.08).knee([30, 300]).tolist()
        [254, 26]
        """
        given_up = as_number("tolerance", tolerance, above=0, below=1)
        checked = as_lengths(lengths)
        if checked.shape[1] != self.num_axes:
            raise ArgumentError(f"the model has {self.num_axes} length axes, got {checked.shape[1]}")
        launch, constant, per_item = self.launch_seconds, self.terms.constant, self.terms.per_item(checked)
        kept = 1 - given_up
        if max_items is None:
            compute_bound = _first_to_reach(kept * constant, given_up * per_item)
            return np.maximum(compute_bound, _first_to_reach(kept * launch, per_item))
        most = _as_counts(max_items, len(checked))
        largest = constant + per_item * most
        waiting = np.maximum(launch - largest, 0.0)  # of the largest batch, where even that one is launch-bound
        compute_bound = _first_to_reach(kept * constant * most, waiting + constant + given_up * per_item * most)
        launch_bound = _first_to_reach(kept * launch * most, waiting + largest)
        return np.minimum(np.maximum(compute_bound, launch_bound), most)

    def to_json(self) -> str:
        """Return the model as JSON; ``from_json`` gives an equal one."""
        launch: dict[str, Any] = {}
        if self.launch_seconds:
            launch = {"version": _LAUNCH_VERSION, "launch_seconds": self.launch_seconds}
        return dump_terms("TimeModel", self.terms, first_visit_seconds=self.first_visit_seconds, **launch)

    @classmethod
    def from_json(cls, text: str) -> TimeModel:
        """Read a model that ``to_json`` wrote; one from before launch times has none."""
        state = read_state("TimeModel", text, versions=(JSON_VERSION, _LAUNCH_VERSION))
        names = ["first_visit_seconds", *(["launch_seconds"] if state["version"] == _LAUNCH_VERSION else [])]
        numbers = {name: read_number("TimeModel", state, name) for name in names}
        return cls(read_terms("TimeModel", state, "coefficients"), **numbers)

    def __repr__(self) -> str:
        launch = f", launch_seconds={self.launch_seconds!r}" if self.launch_seconds else ""
        return f"TimeModel({self.terms!r}, first_visit_seconds={self.first_visit_seconds!r}{launch})"


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


def fit_launch(shapes: IntArray, seconds: Doubles) -> tuple[float, Terms]:
    """Fit ``max(launch, terms)``, least in relative error; a launch of 0 where it gains nothing.

    The probes that are launch-bound are among the fastest, so each number of the fastest is tried as a start: the
    launch time is fitted to these and the terms to the others. Then each probe goes to the part that is larger there,
    and so on until nothing moves. The best end is kept if it scores better than plain terms (``form_scores``) and
    clearly lowers the mean error.
    """
    plain = fit_terms(shapes, seconds)
    plain_error, plain_score = _judge(0.0, plain, shapes, seconds)
    best, least = (0.0, plain), plain_score
    if plain_error < _ROUNDING:
        return best
    seen: set[bytes] = set()  # from the same division the same ones follow
    for start in _starts(seconds):
        for launch, terms in _alternate(start, shapes, seconds, seen):
            error, score = _judge(launch, terms, shapes, seconds)
            if score < least - _ROUNDING and error < _CLEAR_GAIN * plain_error:
                best, least = (launch, terms), score
    return best


def predict_launch(launch: float, terms: Terms, shapes: npt.ArrayLike) -> Doubles:
    """Return the larger of the launch time and the terms for each shape."""
    found = terms.predict(shapes)
    return np.maximum(found, launch) if launch else found


def _judge(launch: float, terms: Terms, shapes: IntArray, seconds: Doubles) -> tuple[float, float]:
    """Return the mean relative error, and what forms are compared by."""
    error = _error(launch, terms, shapes, seconds)
    # Only the shapes above the launch time can tell terms apart.
    above = terms.predict(shapes) >= launch
    num_found = num_told_apart(terms, shapes[above]) + (launch > 0)
    return error, float(form_scores(error, num_found=num_found, num_readings=len(seconds)))


def _error(launch: float, terms: Terms, shapes: IntArray, seconds: Doubles) -> float:
    return float(np.abs(predict_launch(launch, terms, shapes) / seconds - 1).mean())


def _starts(seconds: Doubles) -> Iterator[_Mask]:
    """Yield which probes may be launch-bound: the fastest one, the fastest two, and so on while they are alike."""
    order = np.argsort(seconds, kind="stable")
    ranked = seconds[order]
    alike = int(np.searchsorted(ranked, _FLAT * ranked[0], side="right"))
    most = min(alike, len(seconds) - 1)
    for count in np.unique(np.linspace(1, most, min(most, _MAX_STARTS)).round().astype(int)):
        mask = np.zeros(len(seconds), dtype=bool)
        mask[order[:count]] = True
        yield mask


def _alternate(mask: _Mask, shapes: IntArray, seconds: Doubles, seen: set[bytes]) -> Iterator[tuple[float, Terms]]:
    """Yield the fits of a division, of the division that these fits imply, and so on."""
    for _ in range(_MAX_TURNS):
        if mask.tobytes() in seen or not mask.any() or mask.all():
            return
        seen.add(mask.tobytes())
        inverse = 1 / seconds[mask]
        launch = float(inverse.sum() / (inverse * inverse).sum())  # the least squares of launch / seconds - 1
        terms = _fit_rest(mask, launch, shapes, seconds)
        yield launch, terms
        mask = terms.predict(shapes) < launch


def _fit_rest(launched: _Mask, launch: float, shapes: IntArray, seconds: Doubles) -> Terms:
    """Return the terms of the other probes, which take no more than was measured where launches bind.

    What the other probes cannot tell apart is shared equally, as without a launch time, unless that fits worse: with
    few probes it would rise above the launch time elsewhere.
    """
    if len(shapes) > _FEW_PROBES:
        return fit_terms(shapes[~launched], seconds[~launched])
    shared, told = (fit_terms(shapes, seconds, limits=launched, limits_tell=tell) for tell in (False, True))
    errors = [_error(launch, terms, shapes, seconds) for terms in (shared, told)]
    return shared if errors[0] <= _NOT_WORSE * errors[1] + _ROUNDING else told
