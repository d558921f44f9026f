"""Calls of the user's function, what they gave, and which calls follow one that failed."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

from ...errors import DoesNotFitError
from .request import Request

Group: TypeAlias = list[Request]


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


Settle: TypeAlias = Callable[[Group, Outcome], None]
# Steps yield a group to run and are sent its outcome; they return the groups about which nothing is known yet.
Steps: TypeAlias = Generator[Group, Outcome, list[Group]]


@final
@dataclass(frozen=True)
class Isolation:
    """A bad item fails alone: parts of a failed batch run until every request has an answer or its own error.

    One bad item among ``n`` takes at most ``ceil(log2(n)) + 1`` more calls: half of the suspects are run; the half that
    fails, or the other half if it does not, holds the bad item. The halves that were put aside are run together at the
    end. A batch that ran out of memory is run in halves. A batch whose event loop went away is run once more. Cancelled
    requests are left out of every later call.

    Args:
        settle: takes a group and its outcome, one value per request or one error for all.
        bisect: look for the bad item; False fails the whole group with the error, and runs nothing twice.
        split_oom: halve a group that ran out of memory; False treats that like any other error.
    """

    settle: Settle
    bisect: bool = True
    split_oom: bool = True

    def run(self, batch: Group) -> Generator[Group, Outcome, None]:
        """Yield the groups to run, one after the other; send the outcome of each."""
        unknown = [batch]
        while unknown:
            group = _live(unknown.pop())
            if group:
                outcome = yield group
                unknown += yield from self._judge(group, outcome)

    def _judge(self, group: Group, outcome: Outcome) -> Steps:
        """Settle a group that ran, or find out more about it."""
        if outcome.is_lost and self.bisect:
            return [group]
        if outcome.error is None or outcome.is_final or outcome.is_lost:
            self.settle(group, outcome)
        elif outcome.is_oom and self.split_oom:
            return self._halve(group, outcome)
        elif self.bisect and len(group) > 1:
            return (yield from self._search(group, outcome))
        else:
            self.settle(group, outcome)
        return []

    def _halve(self, group: Group, outcome: Outcome) -> list[Group]:
        if len(group) == 1:
            error = DoesNotFitError(f"an item of length {group[0].length} alone ran out of memory: {outcome.error}")
            error.__cause__ = outcome.error
            self.settle(group, Outcome(error=error))
            return []
        _release(outcome.error)
        return [group[len(group) // 2 :], group[: len(group) // 2]]

    def _search(self, suspects: Group, failure: Outcome) -> Steps:
        """Find one bad item in a group that failed with an error."""
        aside: list[Group] = []
        while len(suspects) > 1:
            if len(_live(suspects)) < len(suspects):
                return [*aside, suspects]  # the bad item may be the cancelled one: the others are no longer suspect
            half, rest = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
            outcome = yield half
            if outcome.error is None:
                self.settle(half, outcome)
                suspects = rest
            elif outcome.is_oom or outcome.is_final or outcome.is_lost:
                return [*aside, rest, *(yield from self._judge(half, outcome))]
            else:
                suspects, failure = half, outcome
                aside.append(rest)
        if not aside:
            return [suspects]  # it has not run alone yet: a fault that has passed will not blame it
        self.settle(suspects, failure)
        return (yield from self._run_together(aside))

    def _run_together(self, aside: list[Group]) -> Steps:
        together = _live([request for group in aside for request in group])
        if not together:
            return []
        outcome = yield together
        if outcome.error is None or len(aside) == 1:
            return (yield from self._judge(together, outcome))
        return aside  # they hold another bad item, and smaller groups find it sooner


def _live(group: Group) -> Group:
    return [request for request in group if request.is_live]


def _release(error: BaseException | None) -> None:
    """Drop the frames that an error holds: their local variables keep the memory that is missing."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
