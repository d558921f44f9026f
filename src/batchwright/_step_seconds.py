"""StepSeconds: the seconds of a step by its amount of work, in one number such as tokens or examples."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt

from .errors import ArgumentError

Doubles: TypeAlias = npt.NDArray[np.float64]
_Masks: TypeAlias = npt.NDArray[np.bool_]

# Relative errors up to this count squared, larger ones as they are: repeats of one step differ by about as much.
_USUAL_ERROR = 0.02
# Closer than this is no better: no step is timed so exactly.
_LEAST_ERROR = 5e-4
_NUM_ROUNDS = 12
# A larger error has no more say in which form is kept: it is a slow moment of the machine, not the shape of the curve.
_MOST_ERROR = 0.15
_MAX_POINTS = 64


@final
class StepSeconds(NamedTuple):
    """Seconds of a step: ``max(launch, constant + per_unit × work)``, none of the three below 0.

    ``launch`` is what a step takes however small it is, because the host launches its kernels one by one meanwhile.
    Where it is 0, the seconds are a plain line. A time that never grows is a constant.

    >>> StepSeconds(0.04, 0.01, 1e-5).predict([100, 3000, 9000]).round(6).tolist()
    [0.04, 0.04, 0.1]
    """

    launch: float
    constant: float
    per_unit: float

    def predict(self, work: npt.ArrayLike) -> Doubles:
        """Return the seconds expected for each amount of work; more work never takes less."""
        grown = self.constant + self.per_unit * np.asarray(work, dtype=np.float64)
        return np.asarray(np.maximum(self.launch, grown))


def fit_step_seconds(work: npt.ArrayLike, seconds: npt.ArrayLike) -> StepSeconds:
    """Fit the seconds of steps to their amounts of work, least in relative error.

    Repeats of an amount count as one, with their median. Three forms are tried: a line, ``max(launch, per_unit ×
    work)``, and ``max(launch, constant + per_unit × work)``, the last two with the corner between any two amounts. An
    error above 2 % counts less and less, so that one reading far off hardly moves the curve. The form kept has the
    least ``log(mean error) + p / (n - p)`` for ``n`` amounts and ``p`` numbers above 0: a corner must pay for itself,
    the more so with few readings. A corner whose rise is within that 2 % is no corner: what the largest step took above
    the others would decide alone how steep the curve goes on. Two amounts give the line through them; where that would
    be below 0 at no work, the smaller one is the launch and the larger one ``per_unit × work``.

    Args:
        work: the work of each step, above 0, at least two different ones.
        seconds: what each step took, above 0.

    >>> fit = fit_step_seconds([1, 2, 4, 8, 16, 32], [5.0, 5.0, 5.0, 7.0, 11.0, 19.0])
    >>> [round(value, 6) for value in fit]
    [5.0, 3.0, 0.5]
    """
    amounts, times = _as_readings(work, seconds)
    amounts, times = _typical(amounts, times)
    # In units of the largest, so that squares neither overflow nor vanish.
    units = np.array([times[-1], times[-1], times[-1] / amounts[-1]])
    amounts, times = amounts / amounts[-1], times / times[-1]
    found = _through_two(amounts, times) if len(amounts) == 2 else _best(amounts, times)
    return StepSeconds(*(found * units).tolist())


def form_scores(errors: npt.ArrayLike, *, num_found: npt.ArrayLike, num_readings: int) -> Doubles:
    """Return what forms of a curve are compared by, least is best: ``log(error) + p / (n - p)``.

    Args:
        errors: the mean relative error of each form.
        num_found: how many numbers each of them has, ``p``; as many as readings meet any readings, and never win.
        num_readings: how many readings they were fitted to, ``n``.

    >>> form_scores([0.1, 0.05], num_found=[2, 3], num_readings=11).round(2).tolist()
    [-2.08, -2.62]
    """
    used = np.asarray(num_found, dtype=np.float64)
    room = np.where(used < num_readings, num_readings - used, 1e-9)
    return np.asarray(np.log(np.maximum(errors, _LEAST_ERROR)) + used / room)


def _as_readings(work: npt.ArrayLike, seconds: npt.ArrayLike) -> tuple[Doubles, Doubles]:
    amounts, times = (np.asarray(values, dtype=np.float64) for values in (work, seconds))
    if amounts.ndim != 1 or amounts.shape != times.shape:
        raise ArgumentError(
            f"work and seconds must hold one number per step, got shapes {amounts.shape} and {times.shape}"
        )
    for name, values in (("work", amounts), ("seconds", times)):
        wrong = ~(np.isfinite(values) & (values > 0))
        if wrong.any():
            first = int(np.argmax(wrong))
            raise ArgumentError(f"{name} must be finite and above 0, got {values[first]} at {first}")
    if len(np.unique(amounts)) < 2:
        raise ArgumentError(f"a fit needs two different amounts of work, got {np.unique(amounts).tolist()}; time more")
    return amounts, times


def _typical(amounts: Doubles, times: Doubles) -> tuple[Doubles, Doubles]:
    """Return the amounts in rising order, each once, with the median of its seconds; at most ``_MAX_POINTS``."""
    order = np.argsort(amounts, kind="stable")
    amounts, times = amounts[order], times[order]
    distinct, starts = np.unique(amounts, return_index=True)
    groups = np.array_split(np.arange(len(distinct)), min(len(distinct), _MAX_POINTS))
    parts = np.split(times, starts[1:])
    middle = [np.median(distinct[group]) for group in groups]
    return np.array(middle), np.array([np.median(np.concatenate([parts[i] for i in group])) for group in groups])


def _through_two(amounts: Doubles, times: Doubles) -> Doubles:
    slope = (times[1] - times[0]) / (amounts[1] - amounts[0])
    constant = times[0] - slope * amounts[0]
    if slope <= 0:
        return np.array([0.0, times.mean(), 0.0])
    return np.array([0.0, constant, slope] if constant >= 0 else [times[0], 0.0, times[1] / amounts[1]])


def _best(amounts: Doubles, times: Doubles) -> Doubles:
    """Return launch, constant and slope of the form with the least score."""
    num = len(amounts)
    # Row k: the k smallest steps are launch-bound. In one axis any division by a corner is one of these.
    corners = np.arange(num) < np.arange(1, num)[:, None]
    line = np.zeros((1, num), dtype=bool)
    found = np.vstack(
        [
            _fit(amounts, times, line, constant=True),
            _fit(amounts, times, corners, constant=False),
            _fit(amounts, times, corners, constant=True),
        ]
    )
    errors = np.clip(np.abs(_predict(found, amounts) / times - 1), 0, _MOST_ERROR).mean(axis=1)
    scores = form_scores(errors, num_found=(found > 0).sum(axis=1), num_readings=num)
    rises = found[:, 1] + found[:, 2] * amounts[-1] > (1 + _USUAL_ERROR) * found[:, 0]
    scores = np.where(rises | (found[:, 0] == 0), scores, np.inf)
    return np.asarray(found[int(np.argmin(scores))])


def _fit(amounts: Doubles, times: Doubles, launched: _Masks, *, constant: bool) -> Doubles:
    """Return launch, constant and slope for each row of ``launched``, which says what is launch-bound."""
    weights = np.ones(launched.shape)
    ones, slopes = 1 / times, amounts / times  # what 1 in each number adds to the relative time of a step
    for _ in range(_NUM_ROUNDS):
        flat, rest = np.where(launched, weights, 0.0), np.where(launched, 0.0, weights)
        launch = _ratio(flat @ ones, flat @ (ones * ones))
        found = np.column_stack([launch, _lines(rest, ones, slopes, constant=constant)])
        # Each part has its own error: a launch above the line elsewhere is for the score to judge.
        parts = np.where(launched, launch[:, None] * ones, found[:, [1]] * ones + found[:, [2]] * slopes)
        before, weights = weights, _USUAL_ERROR / np.maximum(np.abs(parts - 1), _USUAL_ERROR)
        if np.abs(weights - before).max() < 1e-4:
            break
    return found


def _lines(weights: Doubles, ones: Doubles, slopes: Doubles, *, constant: bool) -> Doubles:
    """Return constant and slope, none below 0, that make the weighted squares least."""
    goal = np.stack([weights @ ones, weights @ slopes])
    a, b, d = weights @ (ones * ones), weights @ (ones * slopes), weights @ (slopes * slopes)
    steep = np.stack([np.zeros_like(a), _ratio(goal[1], d)])
    if not constant:
        return steep.T
    level = np.stack([_ratio(goal[0], a), np.zeros_like(a)])
    free = a * d - b * b > 1e-12 * a * d  # False where one amount alone is left
    area = np.where(free, a * d - b * b, 1.0)
    both = np.stack([d * goal[0] - b * goal[1], a * goal[1] - b * goal[0]]) / area
    found = np.where(both[0] < 0, steep, np.where(both[1] < 0, level, both))
    return np.where(free, found, steep).T


def _predict(found: Doubles, amounts: Doubles) -> Doubles:
    return np.asarray(np.maximum(found[:, [0]], found[:, [1]] + found[:, [2]] * amounts))


def _ratio(over: Doubles, under: Doubles) -> Doubles:
    return np.divide(over, under, out=np.zeros_like(over), where=under > 0)
