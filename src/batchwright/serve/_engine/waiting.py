"""Those that wait: kept in order, so that no decision sorts them anew, and how long they all take."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TypeAlias, final

from ..latency import MAX_RATIO, LatencyModel
from ..settings import Settings
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


_by_length = attrgetter("length")

# Lengths are counted in classes that are an eighth of an octave wide: 8, 9, …, 15, 16-17, 18-19, … up to 2**53.
NUM_CLASSES = 8 * 54 + 8
# Arrivals are counted over this time and the same time before it.
SLOT_SECONDS = 0.25
# So much of what arrives later and is shorter goes first: some batches are closed, some hold the most urgent request.
# This share has the most answers in time in benchmarks/serving_simulation.py.
OVERTAKING = 0.6
# A wait of at most this share of what is allowed needs no closer look.
SHORT_SHARE = 0.4
MAX_OVERTAKING = 0.98
# So many different lengths are counted before they are put into classes.
MAX_UNSORTED = 1024
# Of the requests that are not answered, this share is to be refused on arrival, and the others may be given up later.
EARLY_SHARE = 0.7
# How far one of them moves the factor, and its limits.
_STEP = 0.05
LEAST_STRICTNESS, MOST_STRICTNESS = 0.5, 3.0
# How many padded tokens there are per token is learned from batches, each of which counts this much.
_WEIGHT = 0.05


def length_class(length: int) -> int:
    """Return the class of a length of 1 or more.

    >>> [length_class(length) for length in (1, 2, 8, 9, 15, 16, 17, 18)]
    [8, 16, 32, 33, 39, 40, 40, 41]
    """
    bits = length.bit_length()
    return 8 * bits + ((length << 3 >> (bits - 1)) & 7)


@final
class Sums:
    """Requests, tokens and squared lengths, in all and per class.

    Lengths are put into their classes only when somebody asks for them: while the workers keep up, nobody does.

    >>> sums = Sums()
    >>> for length in (3, 5, 5):
    ...     sums.add(length)
    >>> sums.remove([5])
    >>> (sums.num, sums.tokens, sums.squares), sums.below(length_class(5))
    ((2, 8, 34), (1, 3, 9))
    """

    def __init__(self) -> None:
        self.num = self.tokens = self.squares = 0
        self._classes = [(0, 0, 0)] * NUM_CLASSES
        self._lowest = NUM_CLASSES
        self._unsorted: dict[int, int] = {}

    def add(self, length: int) -> None:
        """Count a request."""
        self.num += 1
        self.tokens += length
        self.squares += length * length
        unsorted = self._unsorted
        unsorted[length] = unsorted.get(length, 0) + 1
        if len(unsorted) > MAX_UNSORTED:
            self._sort()

    def remove(self, lengths: Iterable[int]) -> None:
        """Take requests out."""
        unsorted = self._unsorted
        for length in lengths:
            self.num -= 1
            self.tokens -= length
            self.squares -= length * length
            unsorted[length] = unsorted.get(length, 0) - 1

    def below(self, stop: int) -> tuple[int, int, int]:
        """Return the sums over the classes below ``stop``."""
        self._sort()
        num = tokens = squares = 0
        for count, total, square in self._classes[self._lowest : stop]:
            num += count
            tokens += total
            squares += square
        return num, tokens, squares

    def _sort(self) -> None:
        for length, count in self._unsorted.items():
            place = length_class(length)
            self._lowest = min(self._lowest, place)
            num, tokens, squares = self._classes[place]
            self._classes[place] = (num + count, tokens + count * length, squares + count * length * length)
        self._unsorted.clear()


@final
class Strictness:
    """By which factor predicted waits are multiplied before they are compared with what is allowed.

    No formula knows how a queue will behave: whom later requests overtake, how much the times of the device vary. So
    the factor is learned from what became of the requests that it decides about. Each one that was taken in and then
    given up raises it, each one that was refused on arrival lowers it, and it rests where the latter are 70 %: then
    most of those without an answer hear of it at once, and no more are refused than that takes.

    Requests that every factor admits, or none, do not count: they say nothing about it.

    >>> strictness = Strictness()
    >>> strictness.is_deciding(wait=0.04, left=0.05), strictness.is_deciding(wait=0.01, left=0.05)
    (True, False)
    >>> for _ in range(10):
    ...     strictness.note_given_up()
    >>> round(strictness.factor, 2)
    1.42
    """

    def __init__(self) -> None:
        self.factor = 1.0

    def is_deciding(self, wait: float, left: float) -> bool:
        """Say whether the factor decides if a predicted wait fits into the time that is left for it."""
        return LEAST_STRICTNESS * wait <= left < MOST_STRICTNESS * wait

    def note_given_up(self) -> None:
        """Note a request that was taken in, and not run before it was too late."""
        self.factor = min(self.factor * math.exp(_STEP * EARLY_SHARE), MOST_STRICTNESS)

    def note_refused(self) -> None:
        """Note a request that was refused on arrival."""
        self.factor = max(self.factor * math.exp(-_STEP * (1 - EARLY_SHARE)), LEAST_STRICTNESS)


@final
class Backlog:
    """What waits and what arrives, and how long that takes.

    Args:
        model: how long batches take.
        num_workers: how many batches may run at once.
    """

    def __init__(self, model: LatencyModel, num_workers: int = 1) -> None:
        self._model = model
        self._num_workers = num_workers
        self._waiting = Sums()
        self._arriving, self._arrived = Sums(), Sums()
        self._slot_start = -math.inf
        self._correction = self._padding = 1.0
        self._num_real = self._num_padded = 1.0
        self._ends: dict[int, float] = {}
        self._strictness = Strictness()

    def arrive(self, request: Request, now: float) -> None:
        """Count an arrival, whether it is taken in or not."""
        # The rate of arrivals is that of the slot that runs and the one before it, which counts as empty after a pause.
        if now - self._slot_start >= SLOT_SECONDS:
            is_fresh = now - self._slot_start < 2 * SLOT_SECONDS
            self._arrived = self._arriving if is_fresh else Sums()
            self._arriving, self._slot_start = Sums(), now
        self._arriving.add(request.length)

    def enter(self, request: Request) -> None:
        """Count a request that waits."""
        self._waiting.add(request.length)

    def leave(self, requests: Iterable[Request]) -> None:
        """Count requests that no longer wait."""
        self._waiting.remove(map(_by_length, requests))

    def start(self, job: int, num_items: int, num_tokens: int, longest: int, now: float) -> None:
        """Note a call that begins."""
        self._ends[job] = now + self._correction * self._model.predict(num_items, longest)
        self._num_real += _WEIGHT * (num_tokens - self._num_real)
        self._num_padded += _WEIGHT * (num_items * longest - self._num_padded)
        self._padding = self._num_padded / self._num_real

    def learn(self, num_items: int, longest: int, seconds: float) -> None:
        """Learn from a call that worked how far the model is off: one of known coefficients learns nothing itself."""
        ratio = seconds / self._model.predict(num_items, longest)
        self._correction += _WEIGHT * (min(max(ratio, 1 / MAX_RATIO), MAX_RATIO) - self._correction)

    def end(self, job: int) -> None:
        """Note that a call has ended."""
        self._ends.pop(job, None)

    def predict(self, request: Request, share_before: float, now: float, settings: Settings) -> float:
        """Return the seconds until a request that arrives now has its answer.

        While the workers keep up, the requests that are more urgent go first. With more work than they can do, the
        shorter ones of them go first, since that answers the most, and those that arrive in the meantime overtake:
        ``wait = (busy + shorter) / (1 - share of the workers that shorter arrivals take)``. A factor that is learned
        from those who were given up, or refused, multiplies the wait.

        Args:
            request: is not among those that wait yet.
            share_before: the share of those that wait that are more urgent.
            now: the time.
            settings: policy and limits.
        """
        model, length = self._model, request.least_length
        own = self._correction * (model.constant + model.per_item(length))
        wait = self._busy(now)
        allowed = request.deadline - request.arrival
        if share_before:
            waiting = self._waiting
            sums = waiting.num, waiting.tokens, waiting.squares
            wait += share_before * self._seconds(sums, allowed, settings)
        factor = self._strictness.factor
        if own + factor * wait <= SHORT_SHARE * allowed:
            return own + factor * wait  # it will be in time; most requests end here, and it costs little
        wait = self._look_closer(request, share_before, now, settings)
        request.is_doubtful = self._strictness.is_deciding(wait, allowed - own)
        return own + factor * wait

    def refuse(self, request: Request) -> None:
        """Learn from a request that was not taken in."""
        if request.is_doubtful:
            self._strictness.note_refused()

    def give_up(self, request: Request) -> None:
        """Learn from a request that waited until it was too late."""
        if request.is_doubtful:
            self._strictness.note_given_up()

    def _look_closer(self, request: Request, share_before: float, now: float, settings: Settings) -> float:
        """Return the seconds that a request waits if shorter ones go first."""
        arriving, arrived, place = self._arriving, self._arrived, length_class(request.length)
        num, tokens, squares = map(sum, zip(arriving.below(place), arrived.below(place), strict=True))
        overtaking = share_before * OVERTAKING * self._share((num, tokens, squares), now, settings)
        shorter = self._seconds(self._waiting.below(place + 1), request.allowance, settings)
        return (self._busy(now) + share_before * shorter) / (1 - min(overtaking, MAX_OVERTAKING))

    def _busy(self, now: float) -> float:
        """Return the seconds until a worker is free."""
        if len(self._ends) < self._num_workers:
            return 0.0
        return max(0.0, min(self._ends.values()) - now)

    def _seconds(self, sums: tuple[int, int, int], allowance: float, settings: Settings) -> float:
        """Return the time of requests by their number, tokens and squared lengths."""
        num, tokens, squares = sums
        seconds = self._items_seconds(tokens, squares)
        constant = self._model.constant
        most = max(allowance / 2 - constant, constant)  # as policies cut it: two batches fit into an allowance
        num_batches = max(num / settings.max_items, seconds / most if most else 0.0)
        if settings.max_tokens is not None:
            num_batches = max(num_batches, self._padding * tokens / settings.max_tokens)
        return self._correction * (seconds + math.ceil(num_batches) * constant) / self._num_workers

    def _share(self, sums: tuple[int, int, int], now: float, settings: Settings) -> float:
        """Return the share of the workers' time that arrivals take in full batches, by the same sums."""
        num, tokens, squares = sums
        seconds = self._items_seconds(tokens, squares) + num / settings.max_items * self._model.constant
        return self._correction * seconds / (SLOT_SECONDS + now - self._slot_start) / self._num_workers

    def _items_seconds(self, tokens: int, squares: int) -> float:
        """Return the time of items by the sums of their lengths and of the squares of these, with padding."""
        _, per_token, per_square, _ = self._model._coefficients
        return self._padding * (per_token * tokens + per_square * squares)
