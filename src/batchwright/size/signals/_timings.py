"""Timings: how long updates of each size took, learned from the updates themselves."""

from __future__ import annotations

import math
from functools import partial
from statistics import median
from typing import Any, TypedDict

import numpy as np

from ..._step_seconds import fit_step_seconds
from ..._types import FloatArray
from ...errors import ArgumentError
from .._states import check_number, check_numbers, check_record, optional
from ._readings import summarize

# A size is timed once it has this many readings; the first one of all, which pays for new shapes, is never taken.
ENOUGH = 5
# What a state keeps: more sizes or readings would make it long and the times hardly better.
_MOST_SIZES = 12
_MOST_READINGS = 31
_SAME_SIZE = math.log(1.2)
# Readings that say whether the pace has changed, and the change, as a logarithm, that counts: the clock's own noise is
# smaller.
_RECENT = 15
_CHANGE = 0.2
# How far a reading may be off: so many of its standard errors, at most this share of it.
_SURE = 2.0
_MOST_OFF = 0.1
# Sizes this far apart, if there are such, say how fast the time rises: between near ones the clock's noise is larger.
_APART = 1.9
# Larger numbers are not exact as floats.
LARGEST_SIZE = 2.0**53
# The least number of sizes that a curve goes through.
FEWEST = 2
# Seconds below, or above its inverse, are those of no update.
_LEAST_SECONDS = 1e-12


class Timing(TypedDict):
    """Readings at about one size; plain JSON.

    Attributes:
        work: the size, a moving mean.
        seconds: the newest readings.
        pace: the median that the pace is compared with, None until there is one.
    """

    work: float
    seconds: list[float]
    pace: float | None


def add_reading(timings: list[Timing], work: float, seconds: float) -> list[Timing]:
    """Return the timings with one more reading, the size that it belongs to last.

    Sizes within a factor of 1.2 share their readings. The size that was not seen for longest is forgotten first, but
    not the last two that are timed.
    A pace that has changed at one size, because the data or the device did, has changed at the others too: their
    readings are scaled by as much, since they were not made since.

    >>> timings = []
    >>> for seconds in (9.0, 1.0, 1.2, 1.1):  # the first is left out
    ...     timings = add_reading(timings, 64, seconds)
    >>> timings
    [{'work': 64.0, 'seconds': [1.0, 1.2, 1.1], 'pace': None}]
    """
    if not (is_duration(seconds) and work <= LARGEST_SIZE):
        return timings
    mine = min(
        (timing for timing in timings if _is_near(timing, work)), key=partial(_distance, work=work), default=None
    )
    others = _newest([timing for timing in timings if timing is not mine])
    if mine is None:
        return [*others, {"work": work, "seconds": [], "pace": None}]
    readings, work = [*mine["seconds"], seconds][-_MOST_READINGS:], mine["work"] + (work - mine["work"]) / ENOUGH
    if len(readings) < _RECENT:
        return [*others, {"work": work, "seconds": readings, "pace": None}]
    now = median(readings[-_RECENT:])
    before = mine["pace"] or now
    if abs(math.log(now / before)) > _CHANGE:
        others = [_scale(timing, now / before) for timing in others]
        readings, before = readings[-_RECENT:], now
    return [*others, {"work": work, "seconds": readings, "pace": before}]


def is_duration(seconds: float) -> bool:
    """Return whether an update may have taken so many seconds."""
    return _LEAST_SECONDS < seconds < 1 / _LEAST_SECONDS


def at_pace(seconds: float, factor: float) -> float:
    """Return what a reading would have been at another pace, within what updates take."""
    return min(max(factor * seconds, _LEAST_SECONDS), 1 / _LEAST_SECONDS)


def num_readings(timings: list[Timing], work: float) -> int:
    """Return how many readings there are at about a size."""
    return sum(len(timing["seconds"]) for timing in timings if _is_near(timing, work))


def timed(timings: list[Timing], enough: int = ENOUGH) -> list[Timing]:
    """Return the sizes with enough readings, smallest first."""
    return sorted((timing for timing in timings if len(timing["seconds"]) >= enough), key=lambda timing: timing["work"])


def predict_seconds(
    timings: list[Timing], sizes: FloatArray, *, enough: int = ENOUGH, most_off: float = _MOST_OFF
) -> FloatArray:
    """Return the seconds of an update of each size; at least two sizes are timed.

    The curve is ``max(launch, constant + per_unit × size)``. Where a size was timed, the reading counts more than the
    curve, in the measure of its number of readings; between sizes the difference is interpolated. Below all of them
    nobody knows whether the time goes on falling: it is taken to fall as between the two smallest, so that a smaller
    size is tried once where that would pay. Above all of them it is taken to rise by as little as the readings of the
    two largest allow, each off by ``most_off`` of it at most: a try costs a few updates, and a curve taken for too
    steep costs the rest of the run.
    """
    known = timed(timings, enough)
    works = np.array([timing["work"] for timing in known], dtype=np.float64)
    times = np.array([median(timing["seconds"]) for timing in known])
    curve = fit_step_seconds(works, times)
    trust = np.array([len(timing["seconds"]) / (len(timing["seconds"]) + ENOUGH) for timing in known])
    off = trust * np.log(times / curve.predict(works))
    seconds = curve.predict(sizes) * np.exp(np.interp(np.log(sizes), np.log(works), off))
    slope = max(0.0, float((times[1] - times[0]) / max(works[1] - works[0], 1e-9 * works[1])))
    falling = np.maximum(times[0] - slope * (works[0] - sizes), times[0] * sizes / works[0])
    seconds = np.where(sizes < works[0], np.minimum(seconds, falling), seconds)
    rising = times[-1] + _least_rise(known, most_off) * (sizes - works[-1])
    return np.where(sizes > works[-1], np.minimum(seconds, rising), seconds)


def _least_rise(known: list[Timing], most_off: float) -> float:
    """Return the least seconds per unit of work between the two largest sizes that their readings allow."""
    last = known[-1]
    apart = [timing for timing in known[:-1] if timing["work"] <= last["work"] / _APART]
    before = apart or [timing for timing in known[:-1] if not _is_near(timing, last["work"])] or known[:1]
    (low, low_off), (high, high_off) = (summarize(timing["seconds"]) for timing in (before[-1], last))
    low_off, high_off = (min(_SURE * off, most_off) for off in (low_off, high_off))
    return max(0.0, (high * (1 - high_off) - low * (1 + low_off)) / (last["work"] - before[-1]["work"]))


def _newest(timings: list[Timing]) -> list[Timing]:
    """Return the timings that are kept beside the size that runs."""
    while len(timings) >= _MOST_SIZES:
        spare = [timing for timing in timings if len(timing["seconds"]) < ENOUGH]
        oldest = timings[0] if len(timings) - len(spare) > FEWEST or not spare else spare[0]
        timings = [timing for timing in timings if timing is not oldest]
    return timings


def check_timings(name: str, saved: Any) -> None:
    """Refuse what is not a list of timings."""
    if not isinstance(saved, list) or len(saved) > _MOST_SIZES:
        raise ArgumentError(f"{name} must be a list of at most {_MOST_SIZES} timings, got {saved!r}")
    checks = {
        "work": check_positive,
        "seconds": lambda at, values: check_numbers(at, values, most=_MOST_READINGS, above=0),
        "pace": optional(check_positive),
    }
    for index, timing in enumerate(saved):
        check_record(f"{name}[{index}]", timing, checks)


def check_positive(name: str, saved: Any) -> None:
    """Refuse what is not a number above 0, or too large for a size."""
    check_number(name, saved, above=0, most=LARGEST_SIZE)


def _distance(timing: Timing, work: float) -> float:
    return abs(math.log(timing["work"] / work))


def _is_near(timing: Timing, work: float) -> bool:
    return _distance(timing, work) <= _SAME_SIZE


def _scale(timing: Timing, factor: float) -> Timing:
    pace = None if timing["pace"] is None else at_pace(timing["pace"], factor)
    return {"work": timing["work"], "seconds": [at_pace(value, factor) for value in timing["seconds"]], "pace": pace}
