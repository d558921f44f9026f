"""Token times: how long updates took by their tokens, whatever the number of their examples."""

from __future__ import annotations

import math
from collections import Counter
from statistics import median
from typing import Any, TypeAlias

import numpy as np

from ..._types import FloatArray
from ...errors import ArgumentError
from .._states import check_numbers
from ._timings import LARGEST_SIZE, Timing, at_pace, is_duration, predict_seconds, timed

# [tokens, seconds] of an update.
Reading: TypeAlias = list[float]

# What a state keeps.
_MOST_READINGS = 160
_MOST_LENGTHS = 32
# Readings within this factor are compared with one another.
_WIDTH = math.log(1.5)
# A group of readings is at least and at most so wide, and there are about so many groups. The root of the widest stays
# below what counts as slow.
_NARROWEST, _WIDEST, _MOST_GROUPS = 1.2, 2.0, 12
# Groups whose middles are closer are one: the noise of the clock between them would be the slope of the curve.
_CLOSEST = 1.1
# Readings of a group that make it timed.
ENOUGH_OF_TOKENS = 3
# A reading this many times the lower quartile of its group paid for a new shape, or for something else that passes.
_SLOW = 1.5
# Lengths that differ so much give the whole curve, and no other size needs to be tried.
_SPAN, _FEWEST_GROUPS = 4.0, 3
# Newest readings that say whether the pace has changed, how many of them must be comparable, and the change, as a
# logarithm, that counts.
_RECENT, _COMPARABLE = 15, 10
_CHANGE = 0.2


def add_tokens(readings: list[Reading], tokens: float, seconds: float) -> list[Reading]:
    """Return the readings, oldest first, with one more; the oldest of the fullest bucket leaves.

    A pace that has changed, because the data or the device did, scales what was read before.

    >>> add_tokens([[100.0, 0.5]], 300, 0.7)
    [[100.0, 0.5], [300.0, 0.7]]
    """
    if not (is_duration(seconds) and 0 < tokens <= LARGEST_SIZE):
        return readings
    readings = [*readings, [float(tokens), float(seconds)]]
    if len(readings) > _MOST_READINGS:
        buckets = [_bucket(tokens) for tokens, _ in readings]
        del readings[buckets.index(max(counts := Counter(buckets), key=lambda bucket: counts[bucket]))]
    return _follow_pace(readings)


def _follow_pace(readings: list[Reading]) -> list[Reading]:
    before, recent = readings[:-_RECENT], readings[-_RECENT:]
    if not _is_unusual(readings[-1], before):
        return readings
    usual = timed(token_timings(before), ENOUGH_OF_TOKENS)
    ratios = sorted(ratio for one in recent if (ratio := _ratio(one, usual)) is not None)
    if len(ratios) < _COMPARABLE:
        return readings
    # Three quarters of them must agree: a few slow first visits of shapes are no change of the pace.
    quarter = len(ratios) // 4
    if ratios[quarter] < math.exp(_CHANGE) and ratios[-1 - quarter] > math.exp(-_CHANGE):
        return readings
    factor = median(ratios)
    return [*([tokens, at_pace(seconds, factor)] for tokens, seconds in before), *recent]


def _is_unusual(reading: Reading, before: list[Reading]) -> bool:
    """Return whether a reading may be of another pace; to group all readings at every update would take too long."""
    low, high = reading[0] / _WIDEST, reading[0] * _WIDEST
    alike = [_scaled(one, reading[0]) for one in before if low <= one[0] <= high]
    return len(alike) >= ENOUGH_OF_TOKENS and abs(math.log(reading[1] / median(alike))) > _CHANGE / 2


def token_timings(readings: list[Reading]) -> list[Timing]:
    """Return the readings in groups of about the same tokens, fewest first, without those that were slow once.

    The seconds are scaled to the middle of the group by the root of the tokens: the truth is between no scaling, where
    launches take the time, and the whole of it.

    >>> token_timings([[100.0, 0.5], [100.0, 0.6], [100.0, 1.5], [900.0, 2.0]])
    [{'work': 100.0, 'seconds': [0.5, 0.6], 'pace': None}, {'work': 900.0, 'seconds': [2.0], 'pace': None}]
    """
    groups: list[list[Reading]] = []
    enough = max(ENOUGH_OF_TOKENS + 1, len(readings) / _MOST_GROUPS)
    for reading in sorted(readings, key=lambda one: one[0]):
        wide = reading[0] / groups[-1][0][0] if groups else math.inf
        if wide > _WIDEST or (len(groups[-1]) >= enough and wide > _NARROWEST):
            groups.append([])
        groups[-1].append(reading)
    apart: list[list[Reading]] = []
    for group in groups:
        if apart and _middle(group) < _CLOSEST * _middle(apart[-1]):
            apart[-1] += group
        else:
            apart.append(group)
    return [_timing(group) for group in apart]


def _ratio(reading: Reading, usual: list[Timing]) -> float | None:
    """Return how many times the usual seconds a reading took, None where none were read at about its tokens."""
    nearest = min(usual, key=lambda timing: abs(math.log(timing["work"] / reading[0])), default=None)
    if nearest is None or abs(math.log(nearest["work"] / reading[0])) > _WIDTH:
        return None
    return _scaled(reading, nearest["work"]) / median(nearest["seconds"])


def _timing(readings: list[Reading]) -> Timing:
    middle = _middle(readings)
    seconds = sorted(_scaled(reading, middle) for reading in readings)
    most = _SLOW * seconds[(len(seconds) - 1) // 4]
    return {"work": middle, "seconds": [value for value in seconds if value <= most], "pace": None}


def _middle(readings: list[Reading]) -> float:
    return median(tokens for tokens, _ in readings)


def spans_enough(timings: list[Timing]) -> bool:
    """Return whether lengths alone have shown how the time grows."""
    known = timed(timings, ENOUGH_OF_TOKENS)
    return len(known) >= _FEWEST_GROUPS and known[-1]["work"] >= _SPAN * known[0]["work"]


def mean_seconds(timings: list[Timing], sizes: FloatArray, lengths: list[float]) -> FloatArray:
    """Return the mean seconds of each size over lengths, the tokens per unit of a size in recent updates.

    Groups of many lengths say how the time rises; a guess that it hardly does would try sizes of no use.
    """
    tokens = np.outer(sizes, lengths)
    seconds = predict_seconds(timings, tokens.ravel(), enough=ENOUGH_OF_TOKENS, most_off=0.0)
    return np.asarray(seconds.reshape(tokens.shape).mean(axis=1))


def add_length(lengths: list[float], length: float) -> list[float]:
    """Return the newest tokens per example with one more."""
    return [*lengths, float(length)][-_MOST_LENGTHS:]


def check_token_readings(name: str, saved: Any) -> None:
    """Refuse what is not a list of pairs above 0."""
    if not isinstance(saved, list) or len(saved) > _MOST_READINGS:
        raise ArgumentError(f"{name} must be a list of at most {_MOST_READINGS} pairs, got {saved!r}")
    for index, pair in enumerate(saved):
        check_numbers(f"{name}[{index}]", pair, most=2, above=0, below=2 * LARGEST_SIZE)
        if len(pair) != 2:
            raise ArgumentError(f"{name}[{index}] must hold tokens and seconds, got {pair!r}")


def check_lengths(name: str, saved: Any) -> None:
    """Refuse what is not a list of a few lengths above 0."""
    check_numbers(name, saved, most=_MOST_LENGTHS, above=0, below=2 * LARGEST_SIZE)


def _bucket(tokens: float) -> int:
    return math.floor(math.log(tokens) / _WIDTH)


def _scaled(reading: Reading, middle: float) -> float:
    tokens, seconds = reading
    return seconds * math.sqrt(middle / tokens)
