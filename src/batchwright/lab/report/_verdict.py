"""The verdict for readers who know no statistics: what was compared, which is better, how sure, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import final

from .._records import RunRecord, finished
from ..observations._dropouts import dropout_text
from ..observations._effects import LOSS, SECONDS, SIMULATED, UPDATES, Measure, counted, effects, hundredths, listed
from ..observations._equal import BASES, EQUAL_EXAMPLES
from ..observations._headline import MARGIN, TOPIC, baseline_text, detectable_text, headlines
from ..observations._ranking import Verdicts, testable
from ..observations._reasons import time_model_of, time_text
from ..observations._slices import fixed_of, overall
from ..observations._tuning import edge_note, edge_rates, wall_note
from ..observations.evidence import Compared, Finding, compare_all
from ..strategies.strategy import BASELINE

_MOST_NAMED = 3
# From here on a factor is easier to read than per cent.
_MANY_TIMES = math.log(3)


@final
@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What stands on top of the page.

    Args:
        lead: which strategy is better, or why nothing can be concluded.
        answers: questions and their answers, in plain words.
        exact: the same with intervals, pairs and p-values.
    """

    lead: str
    answers: tuple[tuple[str, str], ...]
    exact: tuple[str, ...] = ()

    def sentences(self) -> tuple[str, ...]:
        """Return it as text: the lead, and every question with its answer."""
        return (self.lead, *(f"{question}: {answer}" for question, answer in self.answers))


def verdict_of(records: Sequence[RunRecord], findings: Sequence[Finding]) -> Verdict:
    """Return the verdict of some runs in plain words; every figure is one of the findings' tests.

    Args:
        records: the runs.
        findings: what ``observe`` says about them.
    """
    exact = headlines(findings)
    verdicts = _verdicts(findings, EQUAL_EXAMPLES.measure)
    scope = ("What was compared", _scope(records))
    if verdicts is None:
        return Verdict(lead=exact[0], answers=(scope,), exact=tuple(exact[1:]))
    sure, cost = _certainty(records, verdicts), _cost(records, findings, verdicts)
    answers = (scope, ("How sure", sure), *([("What it costs", cost)] if cost else []))
    return Verdict(lead=_lead(records, verdicts), answers=answers, exact=tuple(exact))


def in_words(change: float, *, less: str = "lower", more: str = "higher", times: str = "high") -> str:
    """Write the logarithm of a quotient in words.

    >>> in_words(math.log(0.8)), in_words(math.log(1.3), more="more"), in_words(math.log(4)), in_words(0.0)
    ('20 % lower', '30 % more', '4 times as high', 'the same')
    """
    if change >= _MANY_TIMES:
        return f"{math.exp(change):.2g} times as {times}"
    share = hundredths(abs(math.expm1(change))).lstrip("+±")
    return "the same" if float(share) == 0 else f"{share} % {less if change < 0 else more}"


def chance_in_words(p: float) -> str:
    """Say how often chance alone would show a result.

    >>> chance_in_words(0.0002), chance_in_words(0.023)
    ('fewer than 1 of 1,000 labs', 'about 1 of 43 labs')
    """
    return "fewer than 1 of 1,000 labs" if p < 0.001 else f"about 1 of {1 / p:,.0f} labs"


def _verdicts(findings: Sequence[Finding], measure: Measure) -> Verdicts | None:
    """Return the tests of the headline by one measure, None if it could not be compared."""
    for finding in findings:
        if finding.topic == TOPIC and finding.evidence and finding.evidence[0].measure is measure:
            return Verdicts.of(measure, (one.compared for one in finding.evidence))
    return None


def _scope(records: Sequence[RunRecord]) -> str:
    num_ended, num_others = len(list(finished(records))), len({run["strategy"] for run in records} - {BASELINE})
    kinds = (("dataset", "data set"), ("model", "model"), ("seed", "seed"))
    parts = [counted(len({run[key] for run in records}), what) for key, what in kinds]
    return (
        f"{counted(num_others, 'strategy')} for the batch size, each against {baseline_text(records)}, in pairs of "
        f"runs with the same data set, model and seed: {listed(parts)}. {num_ended:,} of "
        f"{counted(len(records), 'run')} ended well. What counts is the validation loss after the same training "
        "examples: lower is better."
    )


def _lead(records: Sequence[RunRecord], verdicts: Verdicts) -> str:
    better, worse, base = verdicts.better(), verdicts.worse(), baseline_text(records)
    if better:
        text = f"After the same examples, better than {base}: {_named(better)}."
        fixed = [one.strategy for one in better if one.strategy in fixed_of(records)]
        if fixed:
            text += f" The batch size of {listed(fixed)} never changes, so this does not come from adapting it."
    else:
        shown, chance = ("", "") if verdicts.first in worse else (" shown to be", ", which could be chance")
        text = f"After the same examples, no strategy is{shown} better than {base}; the nearest is "
        text += f"{_named([verdicts.first])}{chance}."
    losing = [one for one in reversed(worse) if better or one is not verdicts.first]
    return f"{text} Worse: {_named(losing)}." if losing else text


def _named(some: Sequence[Compared]) -> str:
    names = [f"{one.strategy}, whose loss ended {in_words(one.mean)}" for one in some[:1]]
    names += [f"{one.strategy}, {in_words(one.mean)}" for one in some[1:]]
    return listed(names, most=_MOST_NAMED)


def _certainty(records: Sequence[RunRecord], verdicts: Verdicts) -> str:
    first = verdicts.first
    better = verdicts.better()
    if not better:
        text = f"Chance alone can explain what {first.strategy} changed.{detectable_text(verdicts)}"
        if first.is_shown:
            chance = chance_in_words(first.p_corrected)
            text = f"If {first.strategy} made no difference, {chance} like this one would show it as worse by chance."
        return " ".join(part for part in (text, dropout_text(records)) if part)
    chance = chance_in_words(first.p_corrected)
    text = f"If it made no difference, {chance} like this one would show such a result for {first.strategy} by chance. "
    text += f"With 95 % confidence its loss is {_interval(first)}; {_where(records, first.strategy)}."
    rates = edge_rates(records)
    notes = [
        f"{one.strategy}: {note}."
        for one in better[:_MOST_NAMED]
        for note in (edge_note(rates, one.strategy), wall_note(records, one.strategy))
        if note
    ]
    return " ".join([text, *notes, *([dropout_text(records)] if dropout_text(records) else [])])


def _interval(one: Compared) -> str:
    """Write an interval whose ends lie on one side of zero as one range.

    >>> parts = {"strategy": "linear", "num_pairs": 9, "mean": -0.2, "p_corrected": 0.01, "num_tests": 1}
    >>> _interval(Compared(low=math.log(0.75), high=math.log(0.9), **parts))
    'between 10 % and 25 % lower'
    """
    ends = sorted((one.low, one.high), key=abs)
    if one.low * one.high <= 0:
        return f"between {in_words(one.low)} and {in_words(one.high)}"
    near, far = (in_words(end) for end in ends)
    word = far.split(" % ")[-1]
    return f"between {near.removesuffix(f' {word}')} and {far}" if near != far else far


def _where(records: Sequence[RunRecord], strategy: str) -> str:
    """Say on how many pairs of data set and model the mean loss was lower."""
    means = [fmean(changes.values()) for (_, name), changes in effects(records, LOSS).items() if name == strategy]
    num_lower = sum(mean < 0 for mean in means)
    where = "all of them" if num_lower == len(means) else f"{num_lower} of them"
    if len(means) == 1:
        return "there was one pair of data set and model"
    return f"of {len(means)} pairs of data set and model it was lower on {where}"


def _cost(records: Sequence[RunRecord], findings: Sequence[Finding], verdicts: Verdicts) -> str:
    better = verdicts.better()
    parts = [_prices(records, better[0].strategy)] if better else []
    parts += [_in_time(records, findings), _saving(findings, better[0].strategy if better else "")]
    return " ".join(part for part in parts if part)


def _prices(records: Sequence[RunRecord], strategy: str) -> str:
    """Say what a strategy needed of updates and time, against the baseline."""
    cells, parts = overall(records).cells, []
    for measure, what, words in (
        (UPDATES, "updates", {"less": "fewer", "more": "more", "times": "many"}),
        (SECONDS, "measured seconds", {"less": "fewer", "more": "more", "times": "many"}),
        (SIMULATED, "simulated seconds", {"less": "fewer", "more": "more", "times": "many"}),
    ):
        tests = {one.strategy: one for one in compare_all(testable(effects(records, measure), cells))}
        if strategy in tests:
            one = tests[strategy]
            parts.append(f"{in_words(one.mean, **words)} {what}" if one.is_shown else f"about as many {what}")
    return f"{strategy} needed {listed(parts)} for the same examples." if parts else ""


def _in_time(records: Sequence[RunRecord], findings: Sequence[Finding]) -> str:
    """Say which strategy is best after equal seconds, simulated if there are such."""
    model = time_model_of(records)
    for basis in BASES:
        verdicts = _verdicts(findings, basis.measure)
        if basis.axis in ("simulated_seconds", "seconds") and verdicts is not None:
            words = basis.words
            if basis.axis == "simulated_seconds" and model is not None:
                words += f" (as if each run took {time_text(model)})"
            if not verdicts.better():
                return f"Compared {words}, no strategy is shown to be better."
            first = verdicts.better()[0]
            return f"Compared {words}, {first.strategy} is ahead: its loss is {in_words(first.mean)}."
    return ""


def _saving(findings: Sequence[Finding], best: str) -> str:
    """Name the strategy with the fewest updates that is shown to keep the loss, unless it is the best one anyway."""
    for finding in findings:
        if finding.topic == TOPIC and finding.evidence and finding.evidence[0].measure is UPDATES:
            kept = [one.compared for one in finding.evidence if one.compared.strategy in finding.strategies]
            if kept and kept[0].strategy != best:
                fewer = in_words(kept[0].mean, less="fewer", more="more", times="many")
                return (
                    f"If only updates count: {kept[0].strategy} made {fewer} and is shown to end less than "
                    f"{100 * MARGIN:.0f} % above the loss of {BASELINE}."
                )
    return ""
