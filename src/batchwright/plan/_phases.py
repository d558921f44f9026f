"""Two phases of a step, each with its own peak: the larger one is the peak of the step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ._arrays import IntArray
from ._features import MIN_ROWS, Doubles, Terms, fit_terms

Phases: TypeAlias = "tuple[Terms, ...]"
Fit: TypeAlias = Callable[[IntArray, Doubles], Phases]
_Mask: TypeAlias = npt.NDArray[np.bool_]

# Two phases have twice the coefficients; fewer shapes could be met by chance.
MIN_SHAPES = 12
# Many shapes tell the phases apart by themselves, and each limit of the other phase makes a fit slower.
_FEW_SHAPES = 48
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


def two_phases(shapes: IntArray, values: Doubles) -> Phases:
    """Fit the larger of two sets of terms, least in the squared relative error; one set where two gain nothing.

    A step of training peaks in the backward pass or in the update, an encoder with a decoder in either. Shapes are
    divided by a first guess; both parts are fitted, each shape goes to the phase that is larger there, and so on until
    nothing moves: max-affine regression (Magnani and Boyd 2009). Of the shapes of the other part a phase knows one
    thing, that it takes no more there: without that, a phase seen at one length alone could say anything about others.
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
    for _ in range(_MAX_TURNS):
        if mask.tobytes() in seen or min(mask.sum(), (~mask).sum()) < MIN_ROWS:
            return
        seen |= {mask.tobytes(), (~mask).tobytes()}
        phases = tuple(_fit_part(part, shapes, values) for part in (mask, ~mask))
        yield phases
        mask = phases[0].predict(shapes) > phases[1].predict(shapes)


def _fit_part(part: _Mask, shapes: IntArray, values: Doubles) -> Terms:
    if len(shapes) > _FEW_SHAPES:
        return fit_terms(shapes[part], values[part])
    return fit_terms(shapes, values, limits=~part)
