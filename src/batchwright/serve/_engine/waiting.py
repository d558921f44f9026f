"""Line: the requests that wait, kept in order, so that no decision sorts them anew."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TypeAlias, final

from .request import Request

Entry: TypeAlias = tuple[float, float, int, Request]  # urgency, arrival, a number that no other has, the request

# Where requests that leave are looked for one by one: a batch is among the most urgent ones.
FRONT = 256
# Fewer are found one after the other by their place.
FEW = 8

_by_urgency = attrgetter("urgency", "arrival")


@final
class Line:
    """The requests that wait, the most urgent first.

    A request is put in its place once, with ``log2(n)`` comparisons; most arrive in the order of their urgency. Its
    deadline stands in a heap, from which those who left are dropped where they are met.

    >>> line = Line([Request("b", 1, arrival=2.0, deadline=9.0), Request("a", 1, arrival=1.0, deadline=3.0)])
    >>> [request.item for request in line.most_urgent(2)], line.share_before(Request("c", 1, 2.0, deadline=5.0))
    (['a', 'b'], 0.5)
    >>> [request.item for request in line.expired(3.0)]
    ['a']
    """

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self._waiting: dict[Request, Entry] = {}
        self._order: list[Entry] = []
        self._deadlines: list[tuple[float, int, Request]] = []
        self._num_added = 0
        for request in requests:
            self.add(request)

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def __contains__(self, request: Request) -> bool:
        return request in self._waiting

    def add(self, request: Request) -> None:
        """Put a request in its place."""
        number = self._num_added = self._num_added + 1
        entry = (request.urgency, request.arrival, number, request)
        self._waiting[request] = entry
        if not self._order or self._order[-1] < entry:
            self._order.append(entry)
        else:
            insort(self._order, entry)
        heapq.heappush(self._deadlines, (request.deadline, number, request))

    def remove(self, requests: Sequence[Request]) -> None:
        """Take requests out; a batch of the most urgent ones costs little more than one request."""
        if len(requests) == len(self._waiting):
            self._waiting, self._order, self._deadlines = {}, [], []
            return
        entries = [self._waiting.pop(request) for request in requests]
        if len(entries) >= FEW:
            entries = self._remove_front({entry[2]: entry for entry in entries})
        for entry in entries:
            del self._order[bisect_left(self._order, entry[:3])]
        if len(self._deadlines) > 2 * len(self._waiting) + FRONT:
            self._deadlines = [entry for entry in self._deadlines if entry[2] in self._waiting]
            heapq.heapify(self._deadlines)

    def _remove_front(self, leaving: dict[int, Entry]) -> list[Entry]:
        """Take out by number those among the most urgent ones, and return the others."""
        front = self._order[:FRONT]
        kept = [entry for entry in front if entry[2] not in leaving]
        self._order[: len(front)] = kept
        if len(front) - len(kept) == len(leaving):
            return []
        gone = {entry[2] for entry in front}
        return [entry for number, entry in leaving.items() if number not in gone]

    def most_urgent(self, num: int) -> list[Request]:
        """Return the most urgent requests, in order."""
        return [entry[3] for entry in self._order[:num]]

    def expired(self, now: float) -> list[Request]:
        """Return the requests at or past their deadline."""
        found = []
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2] not in self._waiting):
            entry = heapq.heappop(self._deadlines)
            if entry[2] in self._waiting:
                found.append(entry)
        for entry in found:  # they leave only if the caller says so
            heapq.heappush(self._deadlines, entry)
        return [request for _, _, request in found]

    def share_before(self, request: Request) -> float:
        """Return the share of the line that is more urgent than a request that is not in it."""
        if not self._order:
            return 0.0
        if self._order[-1][0] < request.urgency:
            return 1.0
        return bisect_left(self._order, _by_urgency(request)) / len(self._order)
