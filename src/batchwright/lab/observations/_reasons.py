"""Likely reasons for an effect, from what the records show: updates, batch sizes, rates, and where the loss stood."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, final

from .._records import RunRecord, finished, number
from ..strategies.strategy import BASELINE
from ._effects import SECONDS, SIMULATED, UPDATES, Measure, digits, effects, end_of, percent_change
from ._equal import EQUAL_EXAMPLES, EQUAL_SIMULATED, EQUAL_UPDATES, Basis, loss_at

UNKNOWN = "the records do not show why."
# Changes below these are no reason for anything.
_MANY, _FALLING, _CALM, _ROSE = math.log(1.25), math.log(1.02), math.log(2), math.log(1.05)


@final
@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the runs of a strategy did, as means of logarithms over all its pairs with the baseline.

    Args:
        updates: its updates against those of the baseline.
        simulated: its simulated seconds against those of the baseline; None without them.
        seconds: its measured seconds against those of the baseline.
        size: its mean batch size.
        base_size: the mean batch size of the baseline.
        noise: learning rate per example of a batch, at the end against the start; None if not recorded.
        base_noise: the same for the baseline.
        rate: its learning rate at the start against that of the baseline; None if not recorded.
        falling: how much the loss of the baseline still fell over the last quarter of the examples.
        rising: how far the loss of the baseline ended above its lowest point.
    """

    updates: float | None
    simulated: float | None
    seconds: float | None
    size: float | None
    base_size: float | None
    noise: float | None
    base_noise: float | None
    rate: float | None
    falling: float | None
    rising: float | None


def facts_of(records: Iterable[RunRecord], strategy: str) -> Facts:
    """Return what the runs of a strategy did, against the runs of the baseline on the same data sets and models."""
    every = list(finished(records))
    mine = [run for run in every if run["strategy"] == strategy]
    places = {(run["dataset"], run["model"]) for run in mine}
    base = [run for run in every if run["strategy"] == BASELINE and (run["dataset"], run["model"]) in places]
    starts = [_mean(some, lambda run: _rate(run, 0)) for some in (mine, base)]
    return Facts(
        updates=_change([*mine, *base], UPDATES),
        simulated=_change([*mine, *base], SIMULATED),
        seconds=_change([*mine, *base], SECONDS),
        size=_mean(mine, _size),
        base_size=_mean(base, _size),
        noise=_mean(mine, _calming),
        base_noise=_mean(base, _calming),
        rate=None if starts[0] is None or starts[1] is None else starts[0] - starts[1],
        falling=_mean(base, _still_falling),
        rising=_mean(base, _risen),
    )


def why(records: Sequence[RunRecord], strategy: str, basis: Basis, *, is_better: bool) -> str:
    """Return a likely reason for an effect that was shown, with its figures; it claims no more than "likely".

    Args:
        records: the runs.
        strategy: the strategy that is better or worse than the baseline.
        basis: what the two were compared on.
        is_better: the direction of the effect.
    """
    facts = facts_of(records, strategy)
    if basis is EQUAL_EXAMPLES:
        parts = _better(facts) if is_better else _worse(facts)
    elif basis is EQUAL_UPDATES:
        parts = _by_size(facts, is_better=is_better)
    elif basis is EQUAL_SIMULATED:
        model = time_model_of(records)
        text = "simulated time at " + time_text(model) if model else "simulated time"
        parts = _by_time(facts.simulated, text, is_better=is_better)
    else:
        parts = _by_time(facts.seconds, "measured time", is_better=is_better)
    return f"{strategy}: likely because {' and because '.join(parts)}." if parts else f"{strategy}: {UNKNOWN}"


def why_kept(records: Sequence[RunRecord], strategy: str) -> str:
    """Return a likely reason why a strategy keeps the loss of the baseline with fewer updates."""
    facts, parts = facts_of(records, strategy), []
    if facts.rate is not None and facts.rate >= _MANY:
        parts.append(f"its learning rate was {_times(facts.rate)} that of {BASELINE}")
    if facts.falling is not None and facts.falling < _FALLING:
        fall = percent_change(-facts.falling)
        parts.append(f"the loss of {BASELINE} hardly fell any more ({fall} over the last quarter of the examples)")
    return f"{strategy}: likely because {' and because '.join(parts)}." if parts else f"{strategy}: {UNKNOWN}"


def _better(facts: Facts) -> list[str]:
    parts = []
    if _calmer(facts):
        parts.append(f"{_calm_text(facts)}, as when a learning rate decays")
    if (facts.updates or 0) >= _MANY:
        parts.append(f"it made more updates ({percent_change(facts.updates or 0)})")
    if (facts.rising or 0) >= _ROSE:
        risen = percent_change(facts.rising or 0)
        parts.append(f"the loss of {BASELINE} had passed its lowest point and ended above it ({risen})")
    return parts


def _worse(facts: Facts) -> list[str]:
    parts, still = [], (facts.falling or 0) >= _FALLING
    fall = f"while the loss of {BASELINE} still fell ({percent_change(-(facts.falling or 0))} over the last quarter)"
    if still and (facts.updates or 0) <= -_MANY:
        parts.append(f"it made fewer updates ({percent_change(facts.updates or 0)}) {fall}")
    if still and _calmer(facts):
        parts.append(f"{_calm_text(facts)}{'' if parts else ' ' + fall}, so it annealed early")
    if (facts.noise or 0) - (facts.base_noise or 0) >= _CALM and facts.noise is not None:
        parts.append(f"the noise of its updates (rate per example of a batch) rose to {_times(facts.noise)} its start")
    return parts


def _by_size(facts: Facts, *, is_better: bool) -> list[str]:
    if facts.size is None or facts.base_size is None:
        return []
    change = facts.size - facts.base_size
    if abs(change) < _MANY or (change > 0) != is_better:
        return []
    sizes = f"{digits(math.exp(facts.size))} against {digits(math.exp(facts.base_size))} on average"
    return [f"each of its updates used {'more' if is_better else 'fewer'} examples ({sizes})"]


def _by_time(change: float | None, what: str, *, is_better: bool) -> list[str]:
    if change is None or abs(change) < _MANY or (change < 0) != is_better:
        return []
    return [f"the same examples cost it {'less' if is_better else 'more'} {what} ({percent_change(change)})"]


def time_model_of(records: Iterable[RunRecord]) -> Mapping[str, Any] | None:
    """Return the time model of the newest run that states one."""
    found: Mapping[str, Any] | None = None
    for run in records:
        given = run.get("time_model")
        found = given if isinstance(given, Mapping) and given else found
    return found


def time_text(model: Mapping[str, Any]) -> str:
    """Write a time model.

    >>> time_text({"fixed_ms": 2.0, "per_example_ms": 0.02})
    '2 ms per update and 0.02 ms per example'
    """
    fixed, each = (number(model.get(key)) for key in ("fixed_ms", "per_example_ms"))
    if fixed is None or each is None:
        return str(model.get("about") or "the stated time model")
    return f"{fixed:g} ms per update and {each:g} ms per example"


def _calmer(facts: Facts) -> bool:
    return facts.noise is not None and facts.noise - (facts.base_noise or 0) <= -_CALM


def _calm_text(facts: Facts) -> str:
    return f"the noise of its updates (rate per example of a batch) fell to {_times(facts.noise or 0)} its start"


def _times(log_ratio: float) -> str:
    return f"{digits(math.exp(log_ratio))} times"


def _change(runs: Sequence[RunRecord], measure: Measure) -> float | None:
    changes = [change for by_seed in effects(runs, measure).values() for change in by_seed.values()]
    return fmean(changes) if changes else None


def _mean(runs: Iterable[RunRecord], of: Callable[[RunRecord], float | None]) -> float | None:
    values = [value for run in runs if (value := of(run)) is not None]
    return fmean(values) if values else None


def _size(run: RunRecord) -> float | None:
    """Return the logarithm of the mean batch size: examples per update."""
    examples, updates = (end_of(run, axis) for axis in ("examples", "updates"))
    return math.log(examples / updates) if examples and updates else None


def _rate(run: RunRecord, place: int) -> float | None:
    curve = run.get("curve") or ()
    lr = number(curve[place].get("lr")) if curve else None
    return math.log(lr) if lr is not None and lr > 0 else None


def _calming(run: RunRecord) -> float | None:
    """Return the change of the learning rate divided by the batch size, from the first point to the last."""
    curve, rates = run.get("curve") or (), (_rate(run, 0), _rate(run, -1))
    sizes = [number(curve[place].get("batch_size")) for place in (0, -1)] if curve else [None, None]
    if rates[0] is None or rates[1] is None or not sizes[0] or not sizes[1]:
        return None
    return (rates[1] - rates[0]) - math.log(sizes[1] / sizes[0])


def _still_falling(run: RunRecord) -> float | None:
    end = end_of(run, "examples")
    if not end:
        return None
    before, last = loss_at(run, "examples", 0.75 * end), loss_at(run, "examples", end)
    return math.log(before / last) if before and last else None


def _risen(run: RunRecord) -> float | None:
    losses = [loss for point in run.get("curve") or () if (loss := number(point.get("validation_loss")))]
    return math.log(losses[-1] / min(losses)) if losses and min(losses) > 0 else None
