"""One bad item fails alone: find it with few calls, and answer its mates."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeAlias, final

from ..errors import DoesNotFitError
from ._request import Outcome, Request

Group: TypeAlias = list[Request]
Settle: TypeAlias = Callable[[Group, Outcome], None]
# A step asks for a group to be run and is sent what came of it; it returns the groups of which nothing is known.
Steps: TypeAlias = Generator[Group, Outcome, list[Group]]


@final
@dataclass(frozen=True)
class Isolation:
    """Runs a batch; where it fails, runs parts of it until every request has an answer or an error of its own.

    One bad item among ``n`` takes at most ``ceil(log2(n)) + 1`` calls more: half of the suspects is run, the half that
    fails (or the other one, if it does not) holds the bad item, and what was put aside on the way is run together at
    the end. A batch that ran out of memory is run in halves. One whose event loop went away is run once more. Cancelled
    requests are left out of every later call.

    Args:
        settle: takes a group and what came of it, one value a request or an error for all of them.
        bisect: look for the bad item; False fails the whole group with the error, and runs nothing twice.
        split_oom: halve what ran out of memory; False treats it as any other error.
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
                return [*aside, suspects]  # perhaps the bad one was cancelled: the others are suspect no more
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
            return [suspects]  # suspect only because the others are not; if the fault was a passing one it is over
        self.settle(suspects, failure)
        return (yield from self._run_together(aside))

    def _run_together(self, aside: list[Group]) -> Steps:
        together = _live([request for group in aside for request in group])
        if not together:
            return []
        outcome = yield together
        if outcome.error is None or len(aside) == 1:
            return (yield from self._judge(together, outcome))
        return aside  # another bad one is among them: smaller groups find it sooner


def _live(group: Group) -> Group:
    return [request for request in group if request.is_live]


def _release(error: BaseException | None) -> None:
    """Drop the frames that an error holds: their local variables are the memory that is missing."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
