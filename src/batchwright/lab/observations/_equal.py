"""The loss of two runs after equal updates or equal seconds, read off their curves, and why it sometimes cannot be."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

from .._records import RunRecord, finished, number
from ..strategies.strategy import BASELINE
from ._dropouts import partner_of
from ._effects import (
    CONVERGENCE,
    LEAST_LOSS,
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
        if place is None or loss is None or place <= 0 or loss < 0:
            continue
        if math.isclose(place, at, rel_tol=1e-9):
            return loss
        if place < at:
            return None if after is None else _between((place, loss), after, at)
        after = (place, loss)
    return None


def _between(before: tuple[float, float], after: tuple[float, float], at: float) -> float:
    share = _share(before[0], after[0], at)
    return float(max(LEAST_LOSS, before[1]) ** (1 - share) * max(LEAST_LOSS, after[1]) ** share)


def _share(before: float, after: float, at: float) -> float:
    return math.log(at / before) / math.log(after / before)


def misreading(record: RunRecord, axis: str, at: float) -> tuple[float, float]:
    """Return two estimates of how wrong a loss is that is read at a place, as logarithms of quotients.

    Each validation beside the place is left out and read off its own neighbours, and the quotient of what was read and
    what was found tells how far the curve is from straight there. In the middle between two validations that much may
    be wrong, and nothing at one of them: it is multiplied by ``4·share·(1 − share)``. Where a validation has no
    neighbour, the estimate is that of the other one.

    >>> points = [{"updates": n, "validation_loss": loss} for n, loss in ((10, 2.0), (20, 2.0), (40, 1.0), (80, 0.5))]
    >>> [round(one, 3) for one in misreading({"curve": points}, "updates", 20 * 2**0.5)]
    [-0.347, 0.0]
    """
    points = [
        (place, loss)
        for point in record.get("curve") or ()
        if (place := number(point.get(axis))) is not None
        and (loss := number(point.get("validation_loss"))) is not None
        and place > 0
        and loss >= 0
    ]
    following = next((index for index, (place, _) in enumerate(points) if place >= at * (1 - 1e-9)), None)
    if not following or math.isclose(points[following][0], at, rel_tol=1e-9):
        return 0.0, 0.0
    share = _share(points[following - 1][0], points[following][0], at)
    found = [_left_out_error(points, index) for index in (following - 1, following)]
    known = [one for one in found if one is not None] or [_step(points[following - 1], points[following])]
    weight = 4 * share * (1 - share)
    return weight * known[0], weight * known[-1]


def _left_out_error(points: Sequence[tuple[float, float]], index: int) -> float | None:
    if not 0 < index < len(points) - 1:
        return None
    place, loss = points[index]
    if not points[index - 1][0] < place < points[index + 1][0]:
        return None
    return math.log(_between(points[index - 1], points[index + 1], place) / max(LEAST_LOSS, loss))


def _step(before: tuple[float, float], after: tuple[float, float]) -> float:
    """Return the whole step between two validations: with no others, anything between them may be true."""
    return math.log(max(LEAST_LOSS, after[1]) / max(LEAST_LOSS, before[1]))


def losses_at_equal(run: RunRecord, base: RunRecord, axis: str) -> tuple[float, float] | None:
    """Return the losses of two runs where the shorter of them ended; None if ``why_unequal`` gives a reason."""
    found = _read_both(run, base, axis)
    return None if isinstance(found, str) else found


def misread_at_equal(run: RunRecord, base: RunRecord, axis: str) -> tuple[float, float]:
    """Return two estimates of how wrong the change between two runs is, since the longer one is read."""
    ends = end_of(run, axis), end_of(base, axis)
    if ends[0] is None or ends[1] is None:
        return 0.0, 0.0
    there, here = (misreading(one, axis, min(ends[0], ends[1])) for one in (run, base))
    return there[0] - here[0], there[1] - here[1]


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
        floor=LEAST_LOSS,
        misreading=lambda run, base: misread_at_equal(run, base, axis),
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
