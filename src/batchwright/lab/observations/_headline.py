"""The headline: is any strategy better after equal examples, updates or seconds, and which ones save updates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import final

from .._records import CellKey, RunRecord, finished, number
from ..strategies.strategy import BASELINE
from ._dropouts import dropout_text
from ._effects import (
    LEAST_LOSS,
    LOSS,
    SECONDS,
    UPDATES,
    Effects,
    Measure,
    counted,
    effects,
    hundredths,
    listed,
    misreadings,
    p_text,
)
from ._equal import BASES, EQUAL_EXAMPLES, EQUAL_SIMULATED, Basis, missing_text
from ._ranking import Verdicts, fixed_clause, testable
from ._reasons import time_model_of, time_text, why, why_kept
from ._slices import Slice, fixed_of
from ._tuning import edge_note, edge_rates, wall_note
from .evidence import Compared, Finding, compare_all, compare_family

TOPIC = "headline"
# A loss that is at most this much higher counts as equally good.
MARGIN = 0.05
# A lab that would miss a gain of this size has decided nothing.
DECIDED = 0.25
_HOPELESS = 0.9
_MOST_NAMED = 3
_NUMBERS = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight", "Nine", "Ten")


@final
@dataclass(frozen=True, kw_only=True)
class Family:
    """Every strategy against the baseline on every basis, over all cells, corrected together.

    Args:
        found: the changes of each basis, by the name of its measure.
        compared: the tests, by the name of the measure and the strategy.
    """

    found: Mapping[str, Effects]
    compared: Mapping[tuple[str, str], Compared]

    def on(self, basis: Basis) -> Verdicts:
        """Return the tests on one basis, the best mean first."""
        mine = [one for (name, _), one in self.compared.items() if name == basis.measure.name]
        return Verdicts.of(basis.measure, mine)


def family_of(runs: Sequence[RunRecord], whole: Slice) -> Family:
    """Test all strategies that ran on all cells, on each basis that the records allow."""
    found = {basis.measure.name: effects(runs, basis.measure) for basis in BASES}
    values = {
        (name, strategy): cells
        for name, changes in found.items()
        for strategy, cells in testable(changes, whole.cells).items()
    }
    wrong = {basis.measure.name: misreadings(runs, basis.measure) for basis in BASES}
    misread = {
        (name, strategy): [wrong[name].get((cell, strategy), 0.0) for cell in whole.cells] for name, strategy in values
    }
    return Family(found=found, compared=compare_family(values, misread=misread))


def headlines(findings: Sequence[Finding]) -> list[str]:
    """Return the sentences for the top of a report: the headline, or why nothing can be concluded."""
    found = [one.sentence for one in findings if one.topic == TOPIC]
    return found or [next((one.sentence for one in findings if one.topic == "overall"), "")]


def headline(runs: Sequence[RunRecord], whole: Slice, family: Family) -> list[Finding]:
    """Return one finding per basis and one about updates, in plain words, each with interval, n and p."""
    bases = [_basis_finding(runs, basis, family) for basis in BASES]
    first, *others = bases
    gone = dropout_text(runs)
    if gone:
        before = f"Losses {EQUAL_EXAMPLES.words} cannot be compared." if first is None else first.sentence
        first = replace(first or Finding(topic=TOPIC, sentence=""), sentence=f"{before} {gone}")
    return [one for one in (first, updates_finding(runs, whole), *others) if one is not None]


def _basis_finding(runs: Sequence[RunRecord], basis: Basis, family: Family) -> Finding | None:
    verdicts = family.on(basis)
    if not verdicts.compared:
        return _not_compared(runs, basis)
    better, worse = verdicts.better(), verdicts.worse()
    rates, base = edge_rates(runs), baseline_text(runs)
    sentence = _verdict_text(verdicts, base, basis, _notes(runs, rates, verdicts))
    if not better:
        sentence += detectable_text(verdicts)
    fixed = [one.strategy for one in better if one.strategy in fixed_of(runs)]
    if fixed:
        sentence += f" The batch size of {listed(fixed)} never changes, so this does not come from adapting it."
    sentence += _floor_text(runs, basis) + _time_text(runs, basis) + _after(missing_text(runs, basis))
    named = [(one.strategy, True) for one in better] + [(one.strategy, False) for one in reversed(worse)]
    reasons = [why(runs, name, basis, is_better=is_better) for name, is_better in named[:_MOST_NAMED]]
    return Finding(
        topic=TOPIC,
        sentence=sentence,
        evidence=tuple(one.evidence(basis.measure, "over all") for one in verdicts.compared),
        strategies=tuple(one.strategy for one in better),
        why=" ".join(reasons),
    )


def _notes(runs: Sequence[RunRecord], rates: Mapping[tuple[CellKey, str], float], verdicts: Verdicts) -> dict[str, str]:
    """Return what must stand next to an arm: that its best rate lay at the edge of the grid, or beside a wall."""
    names = [one.strategy for one in verdicts.compared]
    notes = {name: [note for note in (edge_note(rates, name), wall_note(runs, name)) if note] for name in names}
    return {name: "; ".join(some) for name, some in notes.items() if some}


def _verdict_text(verdicts: Verdicts, base: str, basis: Basis, notes: Mapping[str, str]) -> str:
    better, worse, measure = verdicts.better(), verdicts.worse(), verdicts.measure

    def with_note(one: Compared, chance: str = "") -> str:
        return f"{one.strategy}, {one.figures(measure)}{chance}{_after(notes.get(one.strategy, ''), '; ')}"

    def named(some: Sequence[Compared]) -> str:
        return listed([with_note(one) for one in some], most=_MOST_NAMED)

    if better:
        text = f"{_count(len(better), 'strategy')} ended with a lower validation loss than {base} {basis.words}: "
        text += named(better)
    else:
        first = verdicts.first
        gain, nearest = with_note(first, ", could be chance"), with_note(first)
        best = f"the best mean, {gain}" if measure.gain(first.mean) > 0 else f"the nearest is {nearest}"
        text = f"No strategy ended with a lower validation loss than {base} {basis.words}: {best}"
    if worse:
        text += f". {_count(len(worse), 'strategy')} ended higher: {named(list(reversed(worse)))}"
    return text + "."


def detectable_text(verdicts: Verdicts) -> str:
    """Say which size of gain could have been seen, or that the lab cannot decide."""
    sizes = [one.detectable for one in verdicts.compared if one.error > 0]
    if not sizes:
        return ""
    share = -math.expm1(-median(sizes))
    if share > _HOPELESS:
        return " This lab cannot decide it: with so few seeds hardly any gain would have been seen. Run more seeds."
    text = f"a loss lower by {hundredths(share).removeprefix('+')} % or more would have been seen in four of five labs"
    if share > DECIDED:
        return f" This lab cannot decide it: only {text} like this one. Run more seeds."
    return f" {text[0].upper()}{text[1:]} like this one."


def _floor_text(runs: Sequence[RunRecord], basis: Basis) -> str:
    """Say that a loss of 0 was compared, and as what."""
    if basis is not EQUAL_EXAMPLES or all((LOSS.of(run) or 0.0) >= LEAST_LOSS for run in finished(runs)):
        return ""
    return f" A loss of 0, or below {LEAST_LOSS:g}, counts as {LEAST_LOSS:g} in quotients."


def _time_text(runs: Sequence[RunRecord], basis: Basis) -> str:
    if basis is not EQUAL_SIMULATED:
        return ""
    model = time_model_of(runs)
    if model is None:
        return ""
    about = f" ({model['about']})" if model.get("about") else ""
    return f" The time model: {time_text(model)}{about}."


def _not_compared(runs: Sequence[RunRecord], basis: Basis) -> Finding | None:
    """Say that a basis cannot be compared, and why; None for equal examples, about which other findings speak."""
    if basis is EQUAL_EXAMPLES:
        return None
    reason = (
        missing_text(runs, basis) or "No strategy has two pairs of runs that ended well on every data set and model."
    )
    return Finding(topic=TOPIC, sentence=f"Losses {basis.words} cannot be compared. {reason}")


def updates_finding(runs: Sequence[RunRecord], whole: Slice) -> Finding | None:
    """Say which strategies made at most half of the baseline's updates, and which of them keep its loss.

    Both are tests of their own: that updates are below half, and that the loss is less than 5 % higher. None if no
    two seeds can be compared.
    """
    updates, losses = (testable(effects(runs, one), whole.cells) for one in (UPDATES, LOSS))
    tests = {one.strategy: one for one in compare_all(updates)}
    below = shown_below(updates, -math.log(2))
    kept = shown_below(losses, math.log1p(MARGIN))
    if not tests:
        return None
    base, margin = baseline_text(runs), f"{100 * MARGIN:.0f} %"
    saving = sorted(below, key=lambda name: (tests[name].mean, name))
    if not saving:
        fewest = min(tests.values(), key=lambda one: (one.mean, one.strategy))
        text = f"No strategy made at most half of the updates of {base} on the same examples; the fewest: "
        return Finding(
            topic=TOPIC,
            sentence=f"{text}{fewest.strategy}, {fewest.figures(UPDATES)}.",
            evidence=(fewest.evidence(UPDATES, "over all"),),
        )
    some = [f"{name}, {tests[name].figures(UPDATES)}" for name in saving]
    sentence = (
        f"{_count(len(saving), 'strategy')} made at most half of the updates of {base} on the same examples: "
        f"{listed(some, most=_MOST_NAMED)}. "
    )
    good = [f"{name} ({p_text(kept[name].p_corrected)})" for name in saving if name in kept]
    sentence += (
        f"Of these, {listed(good)} {'is' if len(good) == 1 else 'are'} shown to end less than {margin} above its loss."
        if good
        else f"None of these is shown to end less than {margin} above its loss."
    )
    return Finding(
        topic=TOPIC,
        sentence=sentence,
        evidence=tuple(tests[name].evidence(UPDATES, "over all") for name in saving),
        strategies=tuple(name for name in saving if name in kept),
        why=" ".join(why_kept(runs, name) for name in [name for name in saving if name in kept][:_MOST_NAMED]),
    )


def cost_finding(records: Sequence[RunRecord], part: Slice) -> Finding | None:
    """Name the strategies that need fewer updates and are shown to end within 5 % of the baseline's loss.

    "Shown" is a test of its own, that the loss is less than 5 % higher: a difference that was not found does not prove
    that there is none. None if no two seeds can be compared.
    """
    losses, updates, seconds = (testable(effects(records, one), part.cells) for one in (LOSS, UPDATES, SECONDS))
    if not losses:
        return None
    margin = f"{100 * MARGIN:.0f} %"
    # Tested against a loss that is higher by the margin.
    as_good, fewer = shown_below(losses, math.log1p(MARGIN)), shown_below(updates, 0.0)
    saving = sorted(as_good.keys() & fewer.keys(), key=lambda name: (fewer[name].mean, name))
    if not saving:
        return Finding(
            topic="cost",
            sentence=f"Of {counted(len(losses), 'strategy')} none is shown to need fewer updates than {BASELINE} and "
            f"to end at most {margin} above its validation loss, on {part}.",
        )
    best = saving[0]
    loss, time = (next((one for one in compare_all(x) if one.strategy == best), None) for x in (losses, seconds))
    tests = ((UPDATES, fewer[best]), (LOSS, loss), (SECONDS, time))
    rest = f" The same holds for {listed(saving[1:])}." if saving[1:] else ""
    return Finding(
        topic="cost",
        sentence=f"On {part}, {best} is shown to end less than {margin} above the validation loss of {BASELINE} "
        f"({p_text(as_good[best].p_corrected)}). Its updates change by {_brief(UPDATES, fewer[best])}"
        f"{_seconds_clause(time)}.{fixed_clause(best, fixed_of(records))}{rest}",
        evidence=tuple(one.evidence(measure, str(part)) for measure, one in tests if one is not None),
        strategies=tuple(saving),
    )


def _seconds_clause(test: Compared | None) -> str:
    if test is None:
        return ""
    if test.is_shown:
        return f" and its seconds by {_brief(SECONDS, test)}"
    return f"; its seconds are not shown to differ ({', '.join(SECONDS.texts(test.mean, test.low, test.high))})"


def _brief(measure: Measure, one: Compared) -> str:
    mean, interval = measure.texts(one.mean, one.low, one.high)
    return mean if math.isclose(one.low, one.high) else f"{mean} ({interval})"


def shown_below(values: Mapping[str, Sequence[Mapping[int, float]]], limit: float) -> dict[str, Compared]:
    """Return the strategies whose mean change is shown to lie below a limit, with the test against the limit."""
    shifted = {
        name: [{seed: change - limit for seed, change in changes.items()} for changes in cells]
        for name, cells in values.items()
    }
    return {one.strategy: one for one in compare_all(shifted) if one.is_shown and one.mean < 0}


def baseline_text(runs: Sequence[RunRecord]) -> str:
    """Return the baseline in words, with its batch size.

    >>> run = {"strategy": "constant", "status": "ok", "final": {"validation_loss": 1.0}}
    >>> baseline_text([run | {"curve": [{"batch_size": 64}]}]), baseline_text([run])
    ('a constant batch of 64', 'constant')
    """
    points = [point for run in finished(runs) if run["strategy"] == BASELINE for point in run.get("curve") or ()]
    sizes = sorted({size for point in points if (size := number(point.get("batch_size"))) is not None})
    if not sizes:
        return BASELINE
    span = f"{sizes[0]:g}" if len(sizes) == 1 else f"{sizes[0]:g} to {sizes[-1]:g}, by data set"
    return f"a constant batch of {span}" if len(sizes) == 1 else f"a constant batch ({span})"


def _count(number: int, what: str) -> str:
    """Write a small number as a word, to begin a sentence."""
    word = _NUMBERS[number] if number < len(_NUMBERS) else f"{number:,}"
    return f"{word} {counted(number, what).partition(' ')[2]}"


def _after(text: str, before: str = " ") -> str:
    return before + text if text else ""
