"""Gaps: how long offline work may take between requests, learned from how near they came to their deadline."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple, final

import numpy as np

from ..._types import FloatArray
from ..latency import MAX_RATIO

# With more of the time taken by requests, nobody could say when a queue will be empty.
MAX_BUSY = 0.9
# How far the latest call moves the slowness of the machine, and how wide the classes are that it is put into.
FOLLOW = 0.5
LEVEL = 0.05
# How far one part that made a request late moves the boldness, as a logarithm, and how little of it is left at least.
STEP = 0.35
LEAST_BOLDNESS = 1 / 64


@final
@dataclass(frozen=True)
class GapSettings:
    """How many requests may be late because of offline work, and how many are looked at.

    Args:
        late_share: the share of requests that parts may make late, as an expectation; one of those that are looked at
            is always allowed, since a single one is no tail.
        share_of_late: or this share of those that are late in any case, if that is more.
        long_share: the share of requests that single items may make late which are longer than parts may be.
        found_share: the share of requests that parts and items may really make late; where there are more, less is
            expected of them from then on.
        num_requests: the latest requests that are looked at, this many at most,
        num_seconds: and of these only those that ended in the last seconds, this many.
        num_arrivals: the latest arrivals that tell the rate of requests, this many.
    """

    late_share: float = 1 / 3000
    share_of_late: float = 0.1
    long_share: float = 1 / 3000
    found_share: float = 1 / 2000
    num_requests: int = 8000
    num_seconds: float = 900.0
    num_arrivals: int = 256

    def allowed(self, num: int, num_late: int) -> float:
        """Return how many of ``num`` requests parts may make late, if ``num_late`` are late in any case.

        >>> [GapSettings().allowed(num, num_late) for num, num_late in ((100, 0), (6000, 0), (6000, 60))]
        [1.0, 2.0, 6.0]
        """
        return max(1.0, self.late_share * num, self.share_of_late * num_late)


@final
@dataclass(frozen=True)
class Slacks:
    """The predicted seconds of a part that requests could have waited for and still been in time, sorted.

    Those without any are late in any case, and only counted.

    >>> slacks = Slacks.of([0.03, -0.2, 0.01])
    >>> slacks.ordered.tolist(), slacks.num, slacks.num_late
    ([0.01, 0.03], 3, 1)
    """

    ordered: FloatArray
    sums: FloatArray
    num: int
    num_late: int

    @classmethod
    def of(cls, seconds: Sequence[float] | FloatArray) -> Slacks:
        """Sort the seconds of requests."""
        values = np.asarray(seconds, dtype=float)
        ordered = np.sort(values[(values > 0) & (values < math.inf)])
        return cls(ordered, np.concatenate([[0.0], np.cumsum(ordered)]), len(values), int((values <= 0).sum()))

    def late_seconds(self, seconds: float) -> float:
        """Return ``Σ max(0, seconds - slack)``: the time at the start of a part in which each is late if it arrives.

        >>> Slacks.of([0.25, 0.75, 2.0, -1.0]).late_seconds(1.0)
        1.0
        """
        place = int(np.searchsorted(self.ordered, seconds))
        return max(0.0, seconds * place - float(self.sums[place]))


def next_boldness(boldness: float, settings: GapSettings, *, is_late: bool) -> float:
    """Return the share of what the settings allow that is used, after a request came or was made late.

    What is expected rests on the past: a machine that becomes slow now and then is worse than that. So every part that
    made a request late lowers the boldness, and every request raises it; it rests where as many are late as may be,
    and is 1 where fewer are.

    Args:
        boldness: before.
        settings: the shares that may be late.
        is_late: a part has made requests late; else a request has come.

    >>> next_boldness(1.0, GapSettings(), is_late=False), round(next_boldness(1.0, GapSettings(), is_late=True), 3)
    (1.0, 0.705)
    """
    step = -STEP if is_late else STEP * settings.found_share
    return min(1.0, max(LEAST_BOLDNESS, boldness * math.exp(step)))


def longest_part(most: float, slacks: Slacks, settings: GapSettings, *, boldness: float = 1.0) -> float:
    """Return the longest predicted time of parts that make few enough requests late.

    A request that arrives at any moment of a part of ``t`` seconds waits for what is left of it, and is late with the
    probability ``max(0, 1 - slack / t)``. The sum of these over the requests grows with ``t``; this is the largest
    ``t`` where it is what the settings allow.

    Args:
        most: never more than this.
        slacks: of the requests.
        settings: how many may be late.
        boldness: the share of that which is used.

    >>> longest_part(0.1, Slacks.of([0.01, 0.02]), GapSettings())
    0.03
    >>> longest_part(0.1, Slacks.of([0.3, 0.2]), GapSettings())
    0.1
    """
    allowed = boldness * settings.allowed(slacks.num, slacks.num_late)
    if not 0 < most < math.inf or slacks.late_seconds(most) <= allowed * most:
        return most
    # With the k smallest below t the sum is k - sums[k] / t. Too small a k gives too large a t, and so does too large
    # a one: it would count slacks above t as below it.
    first = int(allowed) + 1
    counts = np.arange(first, len(slacks.ordered) + 1)
    return float(min((slacks.sums[first:] / (counts - allowed)).min(), most))


def expected_late(seconds: float, slacks: Slacks, *, rate: float, busy: float) -> float:
    """Return how many requests a part of so many predicted seconds is expected to make late.

    ``rate / (1 - busy) · Σ max(0, seconds - slack) / num``. Those that arrive after the part are held up too, until the
    queue is empty again: in all ``1 / (1 - busy)`` times as many as arrive in it.

    Args:
        seconds: the predicted time of the part.
        slacks: of the latest requests.
        rate: requests per second.
        busy: the share of the time that requests need.

    >>> expected_late(1.0, Slacks.of([0.25, 0.75, 2.0, -1.0]), rate=10.0, busy=0.5)
    5.0
    """
    if not slacks.num:
        return 0.0
    return rate / (1 - min(busy, MAX_BUSY)) * slacks.late_seconds(seconds) / slacks.num


@final
class Sample(NamedTuple):
    """A request that has ended.

    Args:
        at: when.
        allowance: the seconds that it was allowed.
        need: what it took from when no part held it up any more, divided by how slow the machine was taken to be.
        ratio: by how much the part before it took longer than a machine of that slowness needs, 1 or more.
    """

    at: float
    allowance: float
    need: float
    ratio: float


def slacks_of(samples: Sequence[Sample], slowness: float, settings: GapSettings) -> Slacks:
    """Return the predicted seconds of a part that requests could wait for and be in time, on a machine as slow as now.

    ``(allowance / slowness - need) / ratio``. Late in any case is who was late, not who would be on this machine.

    Args:
        samples: the latest requests, the latest last.
        slowness: how many times slower than predicted the machine is just now.
        settings: how old they may be.

    >>> sample = Sample(at=0.0, allowance=0.2, need=0.04, ratio=1.5)
    >>> slacks_of([sample], 2.0, GapSettings()).ordered.round(6).tolist()
    [0.04]
    """
    if not samples:
        return Slacks.of([])
    table = np.fromiter(chain.from_iterable(samples), dtype=float, count=4 * len(samples)).reshape(-1, 4)
    _, allowance, need, ratio = table[table[:, 0] >= samples[-1].at - settings.num_seconds].T
    found = Slacks.of((allowance / slowness - need) / ratio)
    return dataclasses.replace(found, num_late=int((need >= allowance).sum()))


@final
@dataclass(frozen=True)
class Table:
    """What follows from the same requests, by the class of the slowness: filled where it is asked for."""

    slacks: dict[int, Slacks] = field(default_factory=dict)
    longest: dict[tuple[float, int], float] = field(default_factory=dict)


@final
class Gaps:
    """What is known about the time between requests.

    >>> gaps = Gaps()
    >>> for slack in (0.15, 0.01, 0.02):
    ...     gaps.note_request(allowance=0.2, slack=slack, now=0.0)
    >>> round(gaps.longest_part(0.1), 6)
    0.03
    """

    def __init__(self, settings: GapSettings | None = None) -> None:
        self._settings = settings or GapSettings()
        self._samples: deque[Sample] = deque(maxlen=self._settings.num_requests)
        # When requests arrived, and the seconds of all batches until then.
        self._arrivals: deque[tuple[float, float]] = deque(maxlen=self._settings.num_arrivals)
        self._table = Table()
        self._num_new = 0
        self._busy_seconds = 0.0
        self._slowness = self._expected = self._ratio = 1.0
        self._saved = 0.0
        self._boldness = 1.0

    @property
    def saved(self) -> float:
        """Return how many late requests are saved up."""
        return self._saved

    @property
    def boldness(self) -> float:
        """Return the share of the allowed risk that is taken."""
        return self._boldness

    @property
    def slowness(self) -> float:
        """Return how many times slower than predicted the machine is just now, 1 or more."""
        return self._slowness

    def note_arrival(self, now: float) -> None:
        """Count a request, whether it is taken in or not."""
        self._arrivals.append((now, self._busy_seconds))
        self._saved += self._settings.long_share * self._boldness
        self._boldness = next_boldness(self._boldness, self._settings, is_late=False)

    def note_batch(self, seconds: float, ratio: float) -> None:
        """Note how long a batch of requests ran, and real over predicted seconds."""
        self._busy_seconds += seconds
        self._follow(ratio)

    def note_part(self, ratio: float) -> None:
        """Note real over predicted seconds of a part."""
        self._expected = self._slowness
        self._ratio = max(1.0, min(ratio, MAX_RATIO) / self._expected)
        self._follow(ratio)

    def note_request(self, allowance: float, slack: float, now: float) -> None:
        """Note how much longer a request could have waited, had no part held it up."""
        # The next part is decided by what is expected then. So what counts is how it went beside what was expected.
        if allowance < math.inf:
            self._samples.append(Sample(now, allowance, (allowance - slack) / self._expected, self._ratio))
            self._num_new += 1

    def note_late(self) -> None:
        """Note a part that made requests late."""
        self._boldness = next_boldness(self._boldness, self._settings, is_late=True)
        self._table = Table(self._table.slacks)

    def longest_part(self, most: float) -> float:
        """Return the predicted seconds that a part may take, at most ``most``."""
        table, level = self._latest()
        if (most, level) not in table.longest:
            found = longest_part(most, table.slacks[level], self._settings, boldness=self._boldness)
            table.longest[most, level] = found
        return table.longest[most, level]

    def expected_late(self, seconds: float, now: float) -> float:
        """Return how many requests a part of so many predicted seconds is expected to make late."""
        if len(self._arrivals) < 2:
            return 0.0
        start, busy_seconds = self._arrivals[0]
        taken = max(now - start, 1e-9)
        busy = (self._busy_seconds - busy_seconds) / taken
        rate = self._slowness * len(self._arrivals) / taken  # a slow part takes longer, and more arrive in it
        table, level = self._latest()
        return expected_late(seconds, table.slacks[level], rate=rate, busy=busy)

    def may_spend(self, num_late: float) -> bool:
        """Say whether this many late requests are saved up, and spend them.

        Every request saves ``long_share``, times the boldness. However much is saved, what is left afterwards is one at
        most, so that a quiet hour does not pay for many at once.
        """
        if num_late > self._saved:
            return False
        self._saved = min(self._saved - num_late, 1.0)
        return True

    def _follow(self, ratio: float) -> None:
        self._slowness += FOLLOW * (max(1.0, min(ratio, MAX_RATIO)) - self._slowness)

    def _latest(self) -> tuple[Table, int]:
        """Return what follows from the latest requests, and the class of the slowness of now, which is in it."""
        # Rarer as more is known: sorting 8,000 numbers with every request would cost more than it tells.
        if self._num_new > len(self._samples) // 32:
            self._num_new, self._table = 0, Table()
        table = self._table  # others on the same device ask as well, and one of them may put a new one in its place
        level = round(math.log(self._slowness) / LEVEL)
        if level not in table.slacks:
            table.slacks[level] = slacks_of(list(self._samples), math.exp(level * LEVEL), self._settings)
        return table, level
