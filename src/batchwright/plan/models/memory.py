"""How much memory a batch of a given shape takes, learned from a few measured shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from ..._checks import as_number
from ..._types import MAX_INT32, FloatArray, IntArray
from ...errors import ArgumentError, BudgetError
from ..budget import Budget, as_limit
from ._terms import MIN_ROWS as MIN_ROWS
from ._terms import (
    Doubles,
    FittedTerms,
    Predict,
    Terms,
    as_probes,
    dump_terms,
    fit_terms,
    read_number,
    read_state,
    read_terms,
    seen_margin,
    unseen_errors,
    unseen_margin,
)
from .prior import MemoryPrior, Task, load_prior
from .time import fit_launch

# Even a perfect fit leaves what the allocator rounds up and keeps between blocks.
MIN_MARGIN = 0.005


@final
@dataclass(frozen=True, repr=False)
class MemoryModel(FittedTerms):
    """Peak memory by batch shape; made by ``MemoryModel.fit`` or ``MemoryModel.from_json``.

    ``bytes = c + b × (d + e·L + f·L²)`` for ``b`` items of padded length ``L``; of several axes each has its
    terms and each pair a product. No coefficient is below 0, so a larger batch never takes less. Where small batches
    peak elsewhere than large ones (in the update, not in the loss), ``other`` holds the terms of that phase, and the
    larger of the two counts.

    The model is as good as its probes. Measure at least two numbers of items, three lengths per axis, the
    longest lengths and a batch near the limit; beyond what was measured ``upper`` covers less than it says.
    """

    terms: Terms
    margin: float
    other: Terms | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "margin", as_number("margin", self.margin, least=0))

    @classmethod
    def fit(cls, shapes: npt.ArrayLike, peak_bytes: npt.ArrayLike, *, quantile: float = 0.95) -> MemoryModel:
        """Fit the peak memory of measured shapes, least in relative error.

        ``upper`` adds a margin to ``predict``. To find it, each shape is left out in turn and predicted
        from the others: that is the error for a shape never seen, and with 4 to 12 probes much wider than
        the error of the fit itself. The margin is the ``ceil(quantile × (n + 1))``-th smallest of the ``n``
        errors ``|peak / predicted - 1|``. Fewer than 19 shapes do not have that many at 0.95; then it is the
        largest error × ``(n + 1) / n``. It also covers that quantile of the measured peaks, all of them at
        1.0, and is at least 0.5 %. Probes too few to foretell each other give a wide margin; measure more.
        Two phases are fitted from 12 shapes on, and kept where they halve the mean error of one.

        Args:
            shapes: integers ``(M, 1 + axes)``: num_items, padded length per axis; 3 or more, not all alike.
            peak_bytes: ``(M,)``, the peak measured for each shape.
            quantile: the share of batches whose peak ``upper`` shall cover, above 0 and at most 1.

        >>> shapes = [[1, 64], [8, 64], [8, 128], [4, 256], [2, 512]]
        >>> model = MemoryModel.fit(shapes, [100 + 3 * b * length for b, length in shapes])
        >>> model.predict([[10, 100]]).round(6).tolist(), model.upper([[10, 100]]).round(6).tolist()
        ([3100.0], [3115.5])
        """
        level = as_number("quantile", quantile, above=0, most=1)
        probes, peaks = as_probes(shapes, peak_bytes, name="peak_bytes")
        fit, errors = one_phase, unseen_errors(_by(one_phase), probes, peaks)
        if errors.max() > MIN_MARGIN and len(errors) >= MIN_SHAPES:
            others = unseen_errors(_by(two_phases), probes, peaks)
            # Twice the coefficients follow noise as well: a slightly smaller error is not a sign of a second phase.
            if others.mean() < errors.mean() / 2:
                fit, errors = two_phases, others
        phases = fit(probes, peaks)
        margin = max(MIN_MARGIN, seen_margin(peak_of(phases, probes), peaks, level), unseen_margin(errors, level))
        return cls(phases[0], margin, phases[1] if len(phases) > 1 else None)

    @property
    def phases(self) -> Phases:
        """One set of terms, or two of which the larger counts."""
        return (self.terms,) if self.other is None else (self.terms, self.other)

    def predict(self, shapes: npt.ArrayLike) -> Doubles:
        """Return the bytes expected for each shape ``(M, 1 + axes)``."""
        return peak_of(self.phases, shapes)

    def upper(self, shapes: npt.ArrayLike) -> Doubles:
        """Return the bytes to set aside for each shape: ``predict × (1 + margin)``."""
        return self.predict(shapes) * (1 + self.margin)

    def budget(self, max_bytes: float) -> MaxBytes:
        """Return the budget of all batches whose ``upper`` is at most ``max_bytes``."""
        return MaxBytes(self, max_bytes)

    @staticmethod
    def pretrained(task: Task = "train") -> MemoryPrior:
        """Return what many models took, relative to a batch known to fit; for when nothing can be measured.

        Args:
            task: ``"train"``, or ``"generate"`` with a term for the output.

        >>> budget = MemoryModel.pretrained("train").budget(reference=(8, 512), fraction=0.9)
        >>> budget.max_items(np.array([[512], [128]])).tolist()
        [7, 28]
        """
        return load_prior(task)

    @property
    def least_bytes(self) -> float:
        """What is taken whatever the batch: parameters, optimizer state, gradients."""
        return max(phase.constant for phase in self.phases)

    def to_json(self) -> str:
        """Return the model as JSON; ``from_json`` gives an equal one."""
        other: dict[str, Any] = {} if self.other is None else {"other": self.other.named()}
        return dump_terms("MemoryModel", self.terms, margin=self.margin, **other)

    @classmethod
    def from_json(cls, text: str) -> MemoryModel:
        """Read a model that ``to_json`` wrote."""
        state = read_state("MemoryModel", text)
        other = read_terms("MemoryModel", state, "other") if "other" in state else None
        return cls(read_terms("MemoryModel", state, "coefficients"), read_number("MemoryModel", state, "margin"), other)

    def __repr__(self) -> str:
        other = "" if self.other is None else f", other=({self.other!r})"
        return f"MemoryModel({self.terms!r}, margin={self.margin!r}{other})"


def _by(fit: Fit) -> Predict:
    return lambda shapes, values, others: peak_of(fit(shapes, values), others)


@final
@dataclass(frozen=True, repr=False)
class MaxBytes(Budget):
    """At most ``max_bytes`` of peak memory a batch, by a fitted model: ``model.upper(shape) <= max_bytes``.

    >>> model = MemoryModel(Terms(1, (100.0, 0.0, 3.0, 0.0)), margin=0.005)
    >>> MaxBytes(model, 5000).max_items(np.array([[10], [100], [2000]])).tolist()
    [162, 16, 0]
    """

    model: MemoryModel
    max_bytes: float

    def __post_init__(self) -> None:
        if not isinstance(self.model, MemoryModel):
            raise ArgumentError(f"MaxBytes needs a MemoryModel, got {self.model!r}; see MemoryModel.fit")
        object.__setattr__(self, "max_bytes", as_limit("MaxBytes", self.max_bytes))

    def fraction(self, num_items: IntArray, lengths: IntArray) -> FloatArray:
        """Return ``model.upper / max_bytes``."""
        return self._share(np.asarray(num_items), self._per_items(lengths))

    def max_items(self, lengths: IntArray) -> IntArray:
        """Return the largest ``n`` with ``model.upper((n, *lengths)) <= max_bytes``."""
        per_items = self._per_items(lengths)
        guess = self._guess(per_items)
        # Rounding may move the quotient. The share never falls as items are added, not even in the last bit,
        # so bisection between what fits and what does not is exact. It runs only where the guess is wrong.
        low = np.where(self._share(guess, per_items) <= 1, guess, 0)
        high = np.where(self._share(guess + 1, per_items) <= 1, MAX_INT32, guess) + 1
        while (high - low > 1).any():
            middle = (low + high) // 2
            fits = self._share(middle, per_items) <= 1
            low, high = np.where(fits, middle, low), np.where(fits, high, np.maximum(middle, low + 1))
        return low

    def _guess(self, per_items: list[Doubles]) -> IntArray:
        """Return the items that fit by division, off by rounding."""
        most = np.full(len(per_items[0]), float(MAX_INT32))
        for phase, per_item in zip(self.model.phases, per_items, strict=True):
            room = max(0.0, float(self.max_bytes) / (1 + self.model.margin) - phase.constant)
            fitting = np.full(len(per_item), float(MAX_INT32))
            np.divide(room, per_item, out=fitting, where=per_item > room / MAX_INT32)
            most = np.minimum(most, fitting)
        return most.astype(np.int64)

    def _per_items(self, lengths: IntArray) -> list[Doubles]:
        lengths = np.asarray(lengths)
        if lengths.ndim != 2 or lengths.shape[1] != self.model.num_axes:
            wanted = f"{self.model.num_axes} length axes"
            raise BudgetError(
                f"the memory model was fitted to {wanted}, got lengths of shape {lengths.shape}; pass (M, axes)"
            )
        return [phase.per_item(lengths) for phase in self.model.phases]

    def _share(self, num_items: IntArray, per_items: list[Doubles]) -> Doubles:
        pairs = zip(self.model.phases, per_items, strict=True)
        peaks = [phase.constant + num_items * per_item for phase, per_item in pairs]
        upper = np.maximum(peaks[0], peaks[-1]) * (1 + self.model.margin)
        return upper / float(self.max_bytes)

    def __repr__(self) -> str:
        # Dividing by a power of two loses no digit, so two limits never look alike.
        return f"MaxBytes({float(self.max_bytes) / 2**30!r} GiB, {self.model!r})"


Phases: TypeAlias = "tuple[Terms, ...]"
Fit: TypeAlias = Callable[[IntArray, Doubles], Phases]
_Mask: TypeAlias = npt.NDArray[np.bool_]

# Two phases have twice the coefficients; fewer shapes could be met by chance.
MIN_SHAPES = 12
# Many shapes tell the phases apart by themselves, and each limit of the other phase makes a fit slower.
_FEW_SHAPES = 48
_LEVEL = 0.95  # of the margin over a floor, as the default of ``fit``
_MAX_TURNS = 10
_NUM_WORST = 3
_ROUNDING = 1e-18  # of squared relative errors
_SHARES = (0.3, 0.5, 0.7)


def peak_of(phases: Phases, shapes: npt.ArrayLike) -> Doubles:
    """Return the larger prediction of the phases for each shape.

    >>> flat, growing = Terms(1, (500.0, 0.0, 0.0, 0.0)), Terms(1, (100.0, 0.0, 3.0, 0.0))
    >>> peak_of((flat, growing), [[2, 10], [20, 10]]).tolist()
    [500.0, 700.0]
    """
    found = phases[0].predict(shapes)
    for phase in phases[1:]:
        found = np.maximum(found, phase.predict(shapes))
    return found


def one_phase(shapes: IntArray, values: Doubles) -> Phases:
    """Fit one set of terms to all shapes."""
    return (fit_terms(shapes, values),)


def with_floor(shapes: IntArray, values: Doubles) -> Phases:
    """Fit one set of terms and a floor, ``max(floor, terms)``; only the terms where a floor gains nothing.

    Small batches peak at the end of the backward pass, when all gradients are there, whatever they hold; large ones
    peak at the loss, before there is any gradient. One set of terms that passes through both is too flat: it says too
    little for the largest batches. A floor has one number, so that fewer shapes show it than a second phase.

    >>> shapes = np.array([[1, 64], [2, 64], [4, 64], [16, 64], [16, 128], [16, 256], [8, 512]])
    >>> peaks = np.maximum(9000.0, 7000 + 3.0 * shapes.prod(axis=1))
    >>> [round(float(peak)) for peak in peak_of(with_floor(shapes, peaks), [[2, 100], [64, 256]])]
    [9000, 56152]
    """
    floor, terms = fit_launch(shapes, values)
    if not floor:
        return (terms,)
    return terms, Terms(terms.num_axes, (floor, *(0.0 for _ in terms.values[1:])))


def margin_with_floor(shapes: IntArray, values: Doubles) -> float:
    """Return the margin of ``with_floor`` for a shape not measured; see ``MemoryModel.fit``."""
    return unseen_margin(unseen_errors(_by(with_floor), shapes, values), _LEVEL)


def two_phases(shapes: IntArray, values: Doubles) -> Phases:
    """Fit the larger of two sets of terms, least in the squared relative error; one set where two gain nothing.

    A step of training peaks in the backward pass or in the update, an encoder with a decoder in either. Shapes are
    divided by a first guess; both parts are fitted, each shape goes to the phase that is larger there, and so on until
    nothing moves: max-affine regression (Magnani and Boyd 2009). Of the shapes of the other part a phase knows one
    thing, that it takes no more there: without that, a phase seen at only one length could say anything about others.
    Of several first guesses the best end counts, and shapes that it fits badly are tried in the other phase. The first
    of the two phases is that of the largest shape.
    """
    best = one_phase(shapes, values)
    seen: set[bytes] = set()  # from the same division the same ones follow
    for guess in _guesses(best, shapes, values):
        best = _descend(best, guess, shapes, values, seen)
    for _ in range(_MAX_TURNS):
        before = best
        for guess in _neighbours(best, shapes, values):
            best = _descend(best, guess, shapes, values, seen)
        if best is before:
            break
    largest = shapes[[int(np.argmax(values))]]
    return tuple(sorted(best, key=lambda phase: -float(phase.predict(largest)[0])))


def _error(phases: Phases, shapes: IntArray, values: Doubles) -> float:
    return float(((peak_of(phases, shapes) / values - 1) ** 2).sum())


def _guesses(one: Phases, shapes: IntArray, values: Doubles) -> Iterator[_Mask]:
    """Yield divisions: small and large values, rows long on one axis or on another, over and under one fit."""
    for share in _SHARES:
        yield values <= np.quantile(values, share)
    sides = shapes[:, 1:].astype(np.float64)
    for one_axis in range(sides.shape[1]):
        for other in range(one_axis):
            ratio = sides[:, one_axis] / sides[:, other]
            for share in _SHARES:
                yield ratio <= np.quantile(ratio, share)
    yield peak_of(one, shapes) > values


def _neighbours(phases: Phases, shapes: IntArray, values: Doubles) -> Iterator[_Mask]:
    """Yield divisions in which one of the shapes that are fitted worst goes to the other phase."""
    if len(phases) < 2:
        return
    mask = phases[0].predict(shapes) > phases[1].predict(shapes)
    errors = np.abs(peak_of(phases, shapes) / values - 1)
    for row in np.argsort(-errors, kind="stable")[:_NUM_WORST]:
        changed = mask.copy()
        changed[row] = not changed[row]
        yield changed


def _descend(best: Phases, mask: _Mask, shapes: IntArray, values: Doubles, seen: set[bytes]) -> Phases:
    """Return the best phases on the way down from a division, or those that were better before."""
    least = _error(best, shapes, values)
    for phases in _alternate(mask, shapes, values, seen):
        error = _error(phases, shapes, values)
        if error < least - _ROUNDING:
            best, least = phases, error
    return best


def _alternate(mask: _Mask, shapes: IntArray, values: Doubles, seen: set[bytes]) -> Iterator[Phases]:
    """Yield the fits of a division, of the division that these fits imply, and so on."""
    for _ in range(_MAX_TURNS):
        # A phase needs enough rows for its terms, and a division seen before leads to ends seen before.
        if mask.tobytes() in seen or min(mask.sum(), (~mask).sum()) < MIN_ROWS:
            return
        seen |= {mask.tobytes(), (~mask).tobytes()}
        phases = tuple(_fit_part(part, shapes, values) for part in (mask, ~mask))
        yield phases
        mask = phases[0].predict(shapes) > phases[1].predict(shapes)


def _fit_part(part: _Mask, shapes: IntArray, values: Doubles) -> Terms:
    # With few shapes the others bound the phase from above: it takes no more than was measured there.
    if len(shapes) > _FEW_SHAPES:
        return fit_terms(shapes[part], values[part])
    return fit_terms(shapes, values, limits=~part)
