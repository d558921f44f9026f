"""Calls of the user's function: what they gave, which calls follow one that failed, and how large they may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

from ..._ceiling import Ceiling
from ..._oom import text_of
from ...errors import DoesNotFitError, ResultError
from .request import Request

Group: TypeAlias = list[Request]

# A function that failed for this many items one by one, and worked for none in between, is taken to fail always.
ALWAYS_FAILS_AFTER = 16
# Of each later batch so many items are still run one by one before the others are given up.
NUM_PROBES = 3
# A group of this share of the items among which one bad one is expected is clean about every second time.
_CLEAN_SHARE = 0.7


@final
@dataclass(frozen=True, slots=True)
class Outcome:
    """What a call of the function gave: one value per item, or an error.

    Args:
        values: one per item; an exception object fails only that item.
        error: what was raised instead.
        is_oom: the error means that memory ran out.
        is_final: the error says nothing about the items, so running parts of them would not help.
        is_lost: the event loop that ran the batch is gone; another one may do better.
    """

    values: Sequence[Any] = ()
    error: BaseException | None = None
    is_oom: bool = False
    is_final: bool = False
    is_lost: bool = False


@final
@dataclass(frozen=True)
class Call:
    """A group of requests to run now; hand its outcome to ``Core.complete``."""

    requests: Group
    steps: Generator[Group, Outcome, None] = field(repr=False)

    @property
    def items(self) -> list[Any]:
        """Return the list that the function is called with."""
        return [request.item for request in self.requests]


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


Settle: TypeAlias = Callable[[Group, Outcome], None]
# Steps yield a group to run and are sent its outcome; they return the requests about which nothing is known yet.
Steps: TypeAlias = Generator[Group, Outcome, Group]


def live(group: Group) -> Group:
    """Return the requests that have not ended."""
    return [request for request in group if request.is_live]


def _ignore(group: Group) -> None:
    """Do nothing about a batch that was too large."""


@final
@dataclass
class Isolation:
    """A bad item fails alone: parts of a failed batch run until every request has an answer or its own error.

    The rule, in order:

    1. No request is failed with an error that it did not raise alone, except under 6. A fault that has passed, or
       items that only fail together, fail nobody.
    2. One bad item among ``n`` takes at most ``ceil(log2(n)) + 2`` more calls: half of the suspects are run; the half
       that fails, or the other half if it does not, holds the bad item. It then runs alone, all others together.
    3. If those fail too, there are several bad items. The rest runs in groups of such a size that about every second
       one is clean, by what was found in this batch so far; a group that fails is searched in the same way.
    4. A batch that ran out of memory runs in halves. Only if both of them then fit was the batch too large; an item
       that runs out of memory alone says nothing about the size of batches.
    5. Before every call, requests that were cancelled or are past their deadline leave.
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
        faults: what earlier batches have shown.
    """

    settle: Settle
    bisect: bool = True
    split_oom: bool = True
    stay: Callable[[Group], Group] = live
    too_large: Callable[[Group], None] = _ignore
    faults: Faults = field(default_factory=Faults)
    _num_good: int = 0
    _num_bad: int = 0
    _num_failed: int = 0
    _wrong_counts: set[int] = field(default_factory=set)

    def run(self, batch: Group) -> Generator[Group, Outcome, None]:
        """Yield the groups to run, one after the other; send the outcome of each."""
        unknown = self.stay(batch)
        while unknown:
            group, later = self._part(unknown, self._size(len(unknown)))
            outcome = yield from self._call(group)
            unknown = self.stay((yield from self._judge(group, outcome)) + later)
            if unknown and outcome.error is not None and self._may_give_up():
                return self.settle(unknown, outcome)
        return None

    def _size(self, num_unknown: int) -> int:
        """Return how many of the requests about which nothing is known run next."""
        if self._num_failed and self.faults.always:
            return 1
        if self._num_failed < 2:
            return num_unknown  # as far as is known, one item is bad
        expected_among = (self._num_good + self._num_bad + 1) / (self._num_bad + 1)
        return max(1, min(num_unknown, int(_CLEAN_SHARE * expected_among)))

    def _part(self, group: Group, size: int) -> tuple[Group, Group]:
        """Return the first requests, at most so many and never as many as a wrong number of results, and the rest."""
        while size > 1 and size in self._wrong_counts:
            size -= 1
        return group[:size], group[size:]

    def _may_give_up(self) -> bool:
        return self.bisect and self.faults.always and self._num_bad >= NUM_PROBES

    def _call(self, group: Group) -> Generator[Group, Outcome, Outcome]:
        outcome = yield group
        self.faults.note(group, outcome)
        if outcome.error is None:
            self._num_good += len(group)
        elif len(group) == 1:
            self._num_bad += 1
        if isinstance(outcome.error, ResultError):
            self._wrong_counts.add(outcome.error.num_results or 0)
        return outcome

    def _is_about_items(self, group: Group, outcome: Outcome) -> bool:
        """Say whether a group failed because of some of its items, and parts of it may do better."""
        told = outcome.is_final or outcome.is_lost or (outcome.is_oom and self.split_oom)
        return outcome.error is not None and not told and self.bisect and len(group) > 1

    def _judge(self, group: Group, outcome: Outcome) -> Steps:
        """Settle a group that ran, or find out more about it."""
        if outcome.is_lost and self.bisect:
            return group
        if outcome.is_oom and self.split_oom and not outcome.is_final:
            return (yield from self._halve(group, outcome))
        if self._is_about_items(group, outcome):
            self._num_failed += 1
            if self._size(len(group)) < len(group):
                return group  # it holds more than one bad item, and smaller groups find them sooner
            return (yield from self._search(group))
        self.settle(group, outcome)
        return []

    def _halve(self, group: Group, outcome: Outcome) -> Steps:
        """Run the halves of a group that ran out of memory; note that it was too large if both of them fit."""
        _release(outcome.error)
        if len(group) == 1:
            self.settle(group, Outcome(error=_does_not_fit(group[0], outcome)))
            return []
        unknown: Group = []
        fits, half = True, len(group) // 2
        for part in (group[:half], group[half:]):
            staying = self.stay(part)
            fits &= len(staying) == len(part)
            if self._may_give_up():
                unknown += staying
            elif staying:
                came = yield from self._call(staying)
                fits &= came.error is None
                unknown += yield from self._judge(staying, came)
        if fits:
            self.too_large(group)
        return unknown

    def _search(self, suspects: Group) -> Steps:
        """Find one bad item in a group that failed with an error."""
        aside: Group = []
        while len(suspects) > 1:
            staying = self.stay(suspects)
            if len(staying) < len(suspects):
                return staying + aside  # the bad item may be one that left: the others are no longer suspect
            half, rest = self._part(suspects, len(suspects) // 2)
            outcome = yield from self._call(half)
            if outcome.error is None:
                self.settle(half, outcome)
                suspects = rest
            elif self._is_about_items(half, outcome):
                suspects, aside = half, rest + aside
            else:  # the bad item itself, or nothing that a search could use
                return (yield from self._judge(half, outcome)) + rest + aside
        # Only what it raises alone is its own error.
        accused = self.stay(suspects)
        if not accused:
            return aside
        outcome = yield from self._call(accused)
        return (yield from self._judge(accused, outcome)) + aside


def _does_not_fit(request: Request, outcome: Outcome) -> DoesNotFitError:
    assert outcome.error is not None, "only an error is out of memory"
    said = text_of(outcome.error)
    error = DoesNotFitError(f"an item of length {request.length} alone ran out of memory: {said}")
    error.__cause__ = outcome.error
    return error


def _release(error: BaseException | None) -> None:
    """Drop the frames that an error holds: their local variables keep the memory that is missing."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__context__ if error.__cause__ is None else error.__cause__


# Only a batch that uses this share of the limit raises it: a smaller one says nothing about memory.
_NEAR = 0.75
_GROWTH = 1.01
# Once the failure is forgotten.
_GROWTH_AFTERWARDS = 1.05
# It rises to just below what failed, and past it only after this many such batches: memory that is still short fails
# again about that late, memory that is free again is used from then on.
_BELOW_FAILURE = 0.95
_FORGET_AFTER = 250


@final
class TokenLimit:
    """The most padded tokens in a batch: halved when memory runs out, rising slowly while it does not.

    >>> learned = TokenLimit()
    >>> learned.lower(8192)
    >>> learned.within(16_384), learned.within(1000), learned.within(None)
    (4096, 1000, 4096)
    """

    def __init__(self) -> None:
        self._ceiling = Ceiling()
        self._most_fitted = 0

    def within(self, max_tokens: int | None) -> int | None:
        """Return the smaller of this limit and the setting."""
        if self._ceiling.limit == math.inf:
            return max_tokens
        tokens = int(self._ceiling.limit)
        return tokens if max_tokens is None else min(tokens, max_tokens)

    def lower(self, tokens: int) -> None:
        """Note that a batch of this many tokens did not fit, and its halves did.

        Half of it is the new limit, unless the limit is lower already. If as many tokens have fitted since the last
        such note, the batch may have failed for another reason, and only the next note counts.
        """
        if self._most_fitted >= tokens:
            self._most_fitted = 0
        else:
            self._ceiling = self._ceiling.fall(max(1.0, tokens / 2), failed_at=tokens)

    def rise(self, tokens: int) -> None:
        """Note that a batch of this many tokens fitted; near the limit it raises the limit a little."""
        self._most_fitted = max(self._most_fitted, tokens)
        limit = self._ceiling.limit
        if limit < math.inf and tokens >= _NEAR * int(limit):
            counted = self._ceiling.count(forget_after=_FORGET_AFTER)
            growth = _GROWTH if counted.failed_at < math.inf else _GROWTH_AFTERWARDS
            self._ceiling = counted.rise(limit * growth, share=_BELOW_FAILURE)
