"""Isolation: which calls follow one that failed, so that a bad item fails alone and the others are answered soon."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TypeAlias, final

from ..._oom import text_of
from ...errors import DoesNotFitError, ResultError
from .calls import Group, Outcome
from .request import Request

# A function that failed for this many items one by one, and worked for none in between, is taken to fail always.
ALWAYS_FAILS_AFTER = 16
# Of each later batch this many items are still run one by one before the others are given up.
NUM_PROBES = 3
# The shares of bad items that are thought possible, each as likely as the others before a batch has run.
RATES = tuple(2.0**-power for power in range(1, 13))
# A call takes at least this share of the time of the whole batch: what it takes beside the function.
LEAST_CALL = 1 / 16

_deadline = attrgetter("deadline")


@final
class Faults:
    """What the batches of one function have in common: how many items failed one by one since a call worked."""

    def __init__(self) -> None:
        self.num_alone = 0

    @property
    def always(self) -> bool:
        """Say whether the function is taken to fail always."""
        return self.num_alone >= ALWAYS_FAILS_AFTER

    def note(self, group: Group, outcome: Outcome) -> None:
        """Take in how a call went."""
        if outcome.error is None:
            self.num_alone = 0
        elif len(group) == 1 and not outcome.is_lost:
            self.num_alone += 1


@final
class Odds:
    """How likely parts of a batch are to hold no bad item, by what its calls have shown so far.

    Every item is bad with the same unknown probability ``p``. A clean group of ``n`` makes ``p`` likely by the factor
    ``(1 - p)^n``, one that failed by ``1 - (1 - p)^n``, and an item that failed alone by ``p`` (Bayes).

    Args:
        num_good: how many items were in clean groups.
        num_bad: how many failed alone.
        num_failed: how many items each of the groups has that failed and is not told apart yet.

    >>> odds = Odds(num_good=0, num_bad=0, num_failed=[64])
    >>> round(odds.of_clean(32, 64), 2), round(odds.of_clean(16, 64), 2)
    (0.16, 0.31)
    >>> round(Odds(num_good=0, num_bad=0, num_failed=[32, 32]).of_clean(16, 32), 2)
    0.13
    """

    def __init__(self, num_good: int, num_bad: int, num_failed: list[int]) -> None:
        # The posterior of p on a grid of powers of two, all of which are as likely at first.
        weights = [
            (1 - rate) ** num_good * rate**num_bad * math.prod(1 - (1 - rate) ** num for num in num_failed)
            for rate in RATES
        ]
        total = sum(weights) or 1.0  # 0 where the counts are so large that every weight underflows
        self._weights = [(weight / total, 1 - rate) for weight, rate in zip(weights, RATES, strict=True)]

    def of_clean(self, num: int, num_suspects: int | None = None) -> float:
        """Return the probability that ``num`` items are all good; among suspects at least one is bad."""
        if num_suspects is None:
            return sum(weight * good**num for weight, good in self._weights)
        # P(part clean, suspects not clean) / P(suspects not clean), and clean suspects have a clean part.
        return sum(
            weight * (good**num - good**num_suspects) / (1 - good**num_suspects) for weight, good in self._weights
        )


Settle: TypeAlias = Callable[[Group, Outcome], None]
# Steps yield a group to run and are sent its outcome.
Steps: TypeAlias = Generator[Group, Outcome, None]


def live(group: Group) -> Group:
    """Return the requests that have not ended."""
    return [request for request in group if request.is_live]


def _ignore(group: Group) -> None:
    """Do nothing about a batch that was too large."""


def _alike(group: Group) -> tuple[float, float]:
    """Return the answers that a group gives in time and its seconds, where nothing is known about either."""
    return len(group), 32.0 + len(group)


@final
@dataclass
class Isolation:
    """A bad item fails alone: parts of a failed batch run until every request has an answer or its own error.

    The rule, in order:

    1. No request is failed with an error that it did not raise alone, except under 6. A fault that has passed, or
       items that only fail together, fail nobody.
    2. The next call is the one that gives most answers in time per second: those that it gives if it is clean, times
       the probability of that. It is a part of a group that failed, or of the requests about which nothing is known.
    3. If a part fails, nothing is known any more about the rest of its group. If it is clean, the rest holds the bad
       item. One bad item among ``n`` takes at most ``2·ceil(log2(n))`` more calls, three more if batches hardly pay.
    4. A batch that ran out of memory runs in halves. Only if both of them then fit was the batch too large; an item
       that runs out of memory alone says nothing about the size of batches.
    5. Before every call, requests that were cancelled or are past their deadline leave. The bad item may be one of
       them, so nothing is known any more about their group.
    6. A function that has failed for 16 items one by one, and worked for none in between, is taken to fail always. The
       rest of the batch has the error without another call. Of every later batch that fails, three items are run alone
       before the others are given up. One call that works ends this.
    7. A group never has as many items as there were results when their number was wrong: a function that returns the
       same two values for any batch would be taken at its word for a group of two.
    8. A batch whose event loop went away is run once more.

    Args:
        settle: takes a group and its outcome, one value per request or one error for all.
        bisect: look for the bad item; False fails the whole group with the error, and runs nothing twice.
        split_oom: halve a group that ran out of memory; False treats that like any other error.
        stay: returns the requests of a group that may still run, and ends the others.
        too_large: takes a group that ran out of memory while both of its halves fitted.
        gains: returns how many answers a group that runs now gives in time, if it is clean, and its seconds.
        faults: what earlier batches have shown.
    """

    settle: Settle
    bisect: bool = True
    split_oom: bool = True
    stay: Callable[[Group], Group] = live
    too_large: Callable[[Group], None] = _ignore
    gains: Callable[[Group], tuple[float, float]] = _alike
    faults: Faults = field(default_factory=Faults)
    _unknown: Group = field(default_factory=list)
    _failed: list[Group] = field(default_factory=list)
    _least_seconds: float = 0.0
    _num_good: int = 0
    _num_bad: int = 0
    _wrong_counts: set[int] = field(default_factory=set)

    def run(self, batch: Group) -> Steps:
        """Yield the groups to run, one after the other; send the outcome of each."""
        group, rest = self.stay(batch), list[Request]()
        while group:
            outcome = yield from self._call(group)
            if outcome.error is None and rest:
                self._failed.append(rest)  # it holds the bad item
            else:
                self._unknown += rest
            yield from self._judge(group, outcome)
            if outcome.error is not None and not outcome.is_lost and self._may_give_up():
                return self._give_up(outcome)
            self._look_who_stays()
            group, rest = self._next()
        return None

    def _call(self, group: Group) -> Generator[Group, Outcome, Outcome]:
        self._least_seconds = self._least_seconds or LEAST_CALL * self.gains(group)[1]
        outcome = yield group
        self.faults.note(group, outcome)
        if outcome.error is None:
            self._num_good += len(group)
        elif len(group) == 1 and not outcome.is_lost:
            self._num_bad += 1
        if isinstance(outcome.error, ResultError):
            self._wrong_counts.add(outcome.error.num_results or 0)
        return outcome

    def _judge(self, group: Group, outcome: Outcome) -> Steps:
        """Settle a group that ran, or note what is known about it now."""
        if outcome.is_lost and self.bisect:
            self._unknown += group
        elif outcome.is_oom and self.split_oom and not outcome.is_final:
            yield from self._halve(group, outcome)
        elif outcome.error is not None and not outcome.is_final and self.bisect and len(group) > 1:
            self._failed.append(group)
        else:
            self.settle(group, outcome)

    def _halve(self, group: Group, outcome: Outcome) -> Steps:
        """Run the halves of a group that ran out of memory; note that it was too large if both of them fit."""
        _release(outcome.error)
        if len(group) == 1:
            return self.settle(group, Outcome(error=_does_not_fit(group[0], outcome)))
        fits, half = True, len(group) // 2
        for part in (group[:half], group[half:]):
            staying = self.stay(part)
            fits &= len(staying) == len(part)
            if self._may_give_up():
                self._unknown += staying
            elif staying:
                came = yield from self._call(staying)
                fits &= came.error is None
                yield from self._judge(staying, came)
        if fits:
            self.too_large(group)
        return None

    def _may_give_up(self) -> bool:
        return self.bisect and self.faults.always and self._num_bad >= NUM_PROBES

    def _give_up(self, outcome: Outcome) -> None:
        for group in [self._unknown, *self._failed]:
            if staying := self.stay(group):
                self.settle(staying, outcome)

    def _look_who_stays(self) -> None:
        """Let requests go; if one of a group that failed goes, the others are no longer suspect."""
        staying = [(self.stay(group), len(group)) for group in self._failed]
        self._failed = [group for group, num in staying if len(group) == num]
        dissolved = [request for group, num in staying if len(group) < num for request in group]
        self._unknown = self.stay(self._unknown) + dissolved

    def _next(self) -> tuple[Group, Group]:
        """Return the part that gives most answers in time per second, and the rest of the group that failed with it."""
        odds = Odds(self._num_good, self._num_bad, list(map(len, self._failed)))
        self._unknown.sort(key=_deadline)
        best: tuple[float, Group, Group] = (-1.0, [], [])
        for group in [self._unknown, *self._failed]:
            num_suspects = None if group is self._unknown else len(group)
            for size in self._sizes(len(group), num_suspects):
                part = group[:size]
                num_answers, seconds = self.gains(part)
                rate = num_answers * odds.of_clean(size, num_suspects) / (seconds + self._least_seconds)
                if rate > best[0]:
                    best = rate, part, group
        _, part, group = best
        return part, self._take_out(part, group)

    def _take_out(self, part: Group, group: Group) -> Group:
        rest = group[len(part) :]
        if group is self._unknown:
            self._unknown = rest
            return []
        self._failed = [other for other in self._failed if other is not group]
        return rest

    def _sizes(self, num: int, num_suspects: int | None) -> list[int]:
        """Return how many of a group may run: all, half, a quarter and so on, but not all of one that failed."""
        if num and self.faults.always:
            return [1]
        sizes = [num >> power for power in range(num.bit_length())]
        if num_suspects is not None and num > 1:
            del sizes[0]
        return [self._allowed(size) for size in sizes]

    def _allowed(self, size: int) -> int:
        """Return a size or the next lower one that is no wrong number of results."""
        while size > 1 and size in self._wrong_counts:
            size -= 1
        return size


def _does_not_fit(request: Request, outcome: Outcome) -> DoesNotFitError:
    assert outcome.error is not None, "only an error is out of memory"
    said = text_of(outcome.error)
    error = DoesNotFitError(f"an item of length {request.length} ran out of memory by itself: {said}")
    error.__cause__ = outcome.error
    return error


def _release(error: BaseException | None) -> None:
    """Drop the frames that an error holds: their local variables keep the memory that is missing."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__context__ if error.__cause__ is None else error.__cause__
