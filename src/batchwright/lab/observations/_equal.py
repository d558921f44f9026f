"""The loss of two runs after equal updates or equal seconds, read off their curves, and why it sometimes cannot be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from .._records import RunRecord, finished, number
from ..strategies.strategy import BASELINE
from ._dropouts import partner_of
from ._effects import (
    CONVERGENCE,
    LOSS,
    METRIC,
    SECONDS,
    SIMULATED,
    UPDATES,
    Measure,
    counted,
    end_of,
    listed,
)


@final
@dataclass(frozen=True, kw_only=True)
class Basis:
    """What two runs have in common when their losses are compared.

    Args:
        axis: the column of the curve; empty for the end of both runs.
        words: the basis in a sentence.
        measure: the loss on this basis.
    """

    axis: str
    words: str
    measure: Measure


_UNITS = {"updates": "updates", "simulated_seconds": "simulated seconds", "seconds": "measured seconds"}


def loss_at(record: RunRecord, axis: str, at: float) -> float | None:
    """Return the validation loss of a run at a place of an axis; None where its curve cannot say.

    Between two validations the logarithm of the loss is read along a straight line over the logarithm of the axis,
    since losses fall fast at first and ever more slowly: straight lines through the losses themselves would lie above
    the truth. Before the first validation of a trained model nothing is read, and nothing beyond the last.

    >>> points = [{"updates": n, "validation_loss": loss} for n, loss in ((0, 9.0), (10, 2.0), (40, 1.0))]
    >>> round(loss_at({"curve": points}, "updates", 20), 4), loss_at({"curve": points}, "updates", 5)
    (1.4142, None)
    """
    after: tuple[float, float] | None = None
    # From the end, since most places are near it.
    for point in reversed(record.get("curve") or ()):
        place, loss = number(point.get(axis)), number(point.get("validation_loss"))
        if place is None or loss is None or place <= 0 or loss <= 0:
            continue
        if math.isclose(place, at, rel_tol=1e-9):
            return loss
        if place < at:
            return None if after is None else _between((place, loss), after, at)
        after = (place, loss)
    return None


def _between(before: tuple[float, float], after: tuple[float, float], at: float) -> float:
    share = math.log(at / before[0]) / math.log(after[0] / before[0])
    return before[1] ** (1 - share) * after[1] ** share


def losses_at_equal(run: RunRecord, base: RunRecord, axis: str) -> tuple[float, float] | None:
    """Return the losses of two runs where the shorter of them ended; None if ``why_unequal`` gives a reason."""
    found = _read_both(run, base, axis)
    return None if isinstance(found, str) else found


def why_unequal(run: RunRecord, base: RunRecord, axis: str) -> str:
    """Return why two runs have no common place on an axis, in words; empty if they have one."""
    found = _read_both(run, base, axis)
    return found if isinstance(found, str) else ""


def _read_both(run: RunRecord, base: RunRecord, axis: str) -> tuple[float, float] | str:
    """Return both losses, or why they cannot be read."""
    ends = end_of(run, axis), end_of(base, axis)
    if ends[0] is None or ends[1] is None:
        return f"their records hold no {_UNITS[axis]}"
    if axis == "seconds" and any(run.get(key) != base.get(key) for key in ("hardware", "versions")):
        return "they ran on different machines or versions"
    there, here = (loss_at(one, axis, min(ends[0], ends[1])) for one in (run, base))
    if there is None or here is None:
        return "the shorter run ends before the first validation of the longer one"
    return there, here


def _at_equal(axis: str, name: str, words: str) -> Measure:
    return Measure(
        name=name,
        title=f"validation loss {words}",
        of=LOSS.of,
        both=lambda run, base: losses_at_equal(run, base, axis),
    )


EQUAL_EXAMPLES = Basis(axis="", words="after the same examples", measure=LOSS)
EQUAL_UPDATES = Basis(
    axis="updates",
    words="after the same number of updates",
    measure=_at_equal("updates", "loss_updates", "after equal updates"),
)
EQUAL_SIMULATED = Basis(
    axis="simulated_seconds",
    words="in the same simulated seconds",
    measure=_at_equal("simulated_seconds", "loss_simulated", "in equal simulated seconds"),
)
EQUAL_SECONDS = Basis(
    axis="seconds",
    words="in the same measured seconds",
    measure=_at_equal("seconds", "loss_seconds", "in equal measured seconds"),
)
BASES = (EQUAL_EXAMPLES, EQUAL_UPDATES, EQUAL_SIMULATED, EQUAL_SECONDS)
# What the matrix shows, in this order.
MEASURES = (*(basis.measure for basis in BASES), METRIC, CONVERGENCE, UPDATES, SIMULATED, SECONDS)


def missing_text(records: Iterable[RunRecord], basis: Basis) -> str:
    """Say which strategies have pairs of runs that cannot be compared on a basis, and why; empty if there are none.

    >>> def run(name, *updates):
    ...     place = {"dataset": "wine", "model": "mlp", "strategy": name, "seed": 0, "status": "ok"}
    ...     curve = [{"updates": n, "validation_loss": 1.0} for n in updates]
    ...     return place | {"curve": curve, "final": {"validation_loss": 1.0}}
    >>> missing_text([run("constant", 0, 50, 90), run("large", 0, 9)], EQUAL_UPDATES)
    'Left out: 1 pair of large (the shorter run ends before the first validation of the longer one).'
    """
    if not basis.axis:
        return ""
    runs = list(finished(records))
    baselines = {partner_of(run): run for run in runs if run["strategy"] == BASELINE}
    pairs = [(run, base) for run in runs if (base := baselines.get(partner_of(run))) is not None and run is not base]
    found: dict[str, Counter[str]] = {}
    for run, base in pairs:
        reason = why_unequal(run, base, basis.axis)
        if reason:
            found.setdefault(reason, Counter())[run["strategy"]] += 1
    parts = [f"{_left_out(names, len(pairs))} ({reason})" for reason, names in sorted(found.items())]
    return f"Left out: {'; '.join(parts)}." if parts else ""


def _left_out(names: Counter[str], num_pairs: int) -> str:
    if names.total() == num_pairs > 1:
        return f"all {num_pairs:,} pairs of runs"
    return listed([f"{counted(count, 'pair')} of {name}" for name, count in sorted(names.items())], most=4)
