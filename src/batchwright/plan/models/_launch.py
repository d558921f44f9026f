"""The time that a step takes however small it is, told apart from what grows with the batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ..._step_seconds import form_scores
from ..._types import IntArray
from ._terms import Doubles, Terms, fit_terms, num_told_apart

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
