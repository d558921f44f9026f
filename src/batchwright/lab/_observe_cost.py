"""Sentences about what a strategy saves: updates and seconds, at a loss that is as good as the baseline's."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ._observe_best import Compared, compare_all
from ._observe_effects import LOSS, SECONDS, UPDATES, Measure, effects, seed_means
from ._observe_groups import fixed_clause, fixed_of
from ._observe_record import Evidence, Observation
from ._observe_slices import Slice
from ._observe_words import change_text, counted, interval_text, listed, p_text
from ._report_records import BASELINE, Record

# A loss that is at most this much higher counts as as good.
MARGIN = 0.05
_MARGIN_TEXT = f"{100 * MARGIN:.0f} %"


def cost_observation(records: Sequence[Record], part: Slice) -> Observation | None:
    """Name the strategies that need fewer updates and are shown to end within 5 % of the baseline's loss.

    "Shown" is a test of its own, that the loss is less than 5 % higher: a difference that was not found is no proof
    that there is none.

    Args:
        records: the runs.
        part: the cells to look at.

    Returns:
        The observation, None where no two seeds can be compared.
    """
    losses, updates, seconds = (_changes(records, part, measure) for measure in (LOSS, UPDATES, SECONDS))
    if not losses:
        return None
    as_good = {one.strategy: one for one in _shifted(losses) if one.is_shown and one.mean < 0}
    fewer = {one.strategy: one for one in compare_all(updates) if one.is_shown and one.mean < 0}
    saving = sorted(as_good.keys() & fewer.keys(), key=lambda name: (fewer[name].mean, name))
    if not saving:
        return Observation(
            topic="cost",
            sentence=f"Of {counted(len(losses), 'strategy')} none is shown to need fewer updates than {BASELINE} and "
            f"to end at most {_MARGIN_TEXT} above its validation loss, on {part}.",
        )
    best = saving[0]
    tests = {measure: _named(changes, best) for measure, changes in ((LOSS, losses), (SECONDS, seconds))}
    rest = fixed_clause(best, fixed_of(records))
    rest += f" The same holds for {listed(saving[1:])}." if saving[1:] else ""
    return Observation(
        topic="cost",
        sentence=f"{best} is shown to end less than {_MARGIN_TEXT} above the validation loss of {BASELINE} "
        f"({p_text(as_good[best].p_corrected)}), with "
        f"{_brief(UPDATES, fewer[best])} updates{_seconds_clause(tests[SECONDS])}, on {part}.{rest}",
        evidence=tuple(_evidence(best, part, {UPDATES: fewer[best], **tests})),
        strategies=tuple(saving),
    )


def _changes(records: Sequence[Record], part: Slice, measure: Measure) -> dict[str, list[float]]:
    found = effects(records, measure)
    names = dict.fromkeys(strategy for _, strategy in found)
    means = {name: list(seed_means(found, part.cells, name).values()) for name in names}
    return {name: changes for name, changes in means.items() if len(changes) > 1}


def _shifted(losses: dict[str, list[float]]) -> list[Compared]:
    """Test the losses against one that is higher by the margin."""
    limit = math.log1p(MARGIN)
    return compare_all({name: [change - limit for change in changes] for name, changes in losses.items()})


def _named(changes: dict[str, list[float]], name: str) -> Compared | None:
    return next((one for one in compare_all(changes) if one.strategy == name), None)


def _seconds_clause(test: Compared | None) -> str:
    if test is None:
        return ""
    if not test.is_shown:
        interval = interval_text(SECONDS, test.low, test.high)
        return f" and a time that is not shown to differ ({change_text(SECONDS, test.mean)}, {interval})"
    return f" and {_brief(SECONDS, test)} seconds"


def _brief(measure: Measure, one: Compared) -> str:
    if math.isclose(one.low, one.high):
        return change_text(measure, one.mean)
    return f"{change_text(measure, one.mean)} ({interval_text(measure, one.low, one.high)})"


def _evidence(name: str, part: Slice, tests: dict[Measure, Compared | None]) -> list[Evidence]:
    what = f"{name} against {BASELINE}, {part}"
    return [Evidence(what=what, measure=measure, compared=one) for measure, one in tests.items() if one is not None]
