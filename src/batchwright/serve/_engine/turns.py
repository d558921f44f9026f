"""Turns: whose batch runs next on a device that several batchers share."""

from __future__ import annotations

import contextvars
import itertools
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol, final

from ...errors import ArgumentError
from .gaps import Gaps
from .lifetimes import forget_in_forks

# How often those that wait look whether they still need the device.
POLL_SECONDS = 0.25

# The workers and devices that are busy until what runs in this context returns: its own, and those of the functions
# that wait for it. A request that needs one of them would wait forever. The process comes with them: a fork inside a
# function inherits its context, but nothing of what is busy.
_held: contextvars.ContextVar[tuple[int, frozenset[Any]]] = contextvars.ContextVar("_held", default=(0, frozenset()))

_places = itertools.count()


@final
class Turns:
    """The turns on a device: one holder at a time, then the most urgent of those that wait.

    Args:
        name: what messages call the device.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._place = next(_places)
        self._changed = threading.Condition()
        self._holder: Claim | None = None
        self._claims: list[Claim] = []
        self._num_turns = 0
        self._numbers = itertools.count()
        self._members: weakref.WeakSet[Member] = weakref.WeakSet()
        # Parts of offline work that wait, in their middle, until they may go on.
        self.paused: set[Any] = set()
        forget_in_forks(self)

    def __repr__(self) -> str:
        return f"Device({self.name!r})"

    @property
    def is_wanted(self) -> bool:
        """Say, without a lock, whether somebody waits for the device with a request."""
        return any(claim.is_urgent for claim in tuple(self._claims))

    def register(self, member: Member) -> None:
        """Note a batcher, so that the background work of no other one takes longer than its requests allow."""
        with self._changed:
            self._members.add(member)

    def members(self) -> list[Member]:
        """Return the batchers of the device."""
        with self._changed:
            return list(self._members)

    def check_inside(self, held: Iterable[Turns]) -> None:
        """Refuse a request from a function that runs while these devices are held, unless all were made earlier."""
        for other in held:
            if other is self:
                raise ArgumentError(
                    f"a function that runs on {self!r} submits to a batcher of the same device and would wait for "
                    "itself forever; call that function directly"
                )
            if other._place > self._place:
                raise ArgumentError(
                    f"a function that runs on {other!r} submits to a batcher of {self!r}, which was made earlier; two "
                    f"such functions could wait for each other's device forever: make {self!r} after {other!r}"
                )

    def acquire(self, claim: Claim, *, unless: Callable[[], bool] = lambda: False) -> None:
        """Wait until nobody has the device and nobody more urgent waits for it.

        Args:
            claim: who waits.
            unless: says that the device is not needed any more; the claim is then given up.
        """
        with self._changed:
            claim.number, claim.num_turns_before = next(self._numbers), self._num_turns
            self._claims.append(claim)
            self._changed.notify_all()
            while not unless():
                if self._holder is None and min(self._claims, key=self._order) is claim:
                    self._holder = claim
                    self._num_turns += 1
                    break
                self._changed.wait(POLL_SECONDS)
            self._claims.remove(claim)
            if self._holder is not claim:
                self._changed.notify_all()

    def _order(self, claim: Claim) -> tuple[float, bool, int]:
        """Return the order among claims; if requests wait until a part has ended, it goes on after every other turn."""
        urgency, is_new, number = claim.place()
        if claim.has_begun and self._num_turns > claim.num_turns_before:
            urgency = min([urgency, *(member.again_urgency for member in self._members)])
        return urgency, is_new, number

    def release(self, claim: Claim) -> None:
        """Give the device back; of a claim that does not have it, nothing."""
        with self._changed:
            if self._holder is claim:
                self._holder = None
                self._changed.notify_all()

    def pass_on(self, claim: Claim) -> None:
        """Give the device to those that are more urgent, and wait until it is back."""
        self.release(claim)
        self.acquire(claim)

    def forget(self) -> None:
        """Begin anew in the child of a fork, where no thread of the parent lives."""
        self.paused.clear()
        self._changed = threading.Condition()
        self._holder = None
        self._claims = []


class Member(Protocol):
    """What shares a device: something that knows how long its requests may take, and what is between them."""

    @property
    def gaps(self) -> Gaps:
        """Return what is known about the time between its requests."""

    @property
    def again_urgency(self) -> float:
        """Return when the most urgent of its requests that wait until a part has ended is due; ``inf``: none does."""

    def allowance(self) -> float:
        """Return the shortest time in seconds that its requests are allowed."""


@final
class Claim:
    """What a worker waits for a device with.

    Args:
        urgency: when the most urgent request is due, on the clock of all batchers of the device; ``inf``: there is
            only background work. It is asked whenever the device is free, since more urgent requests may have come.

    Attributes:
        running_urgency: when a batch that has begun, and waits for the device again, is due.
        num_turns_before: how many turns there were on the device when it began to wait.
        has_begun: it is for a part that goes on afterwards, which comes before new parts: it holds memory meanwhile.
    """

    def __init__(self, urgency: Callable[[], float]) -> None:
        self._urgency = urgency
        self.number = self.num_turns_before = 0
        self.running_urgency = math.inf
        self.has_begun = False

    @property
    def is_urgent(self) -> bool:
        """Say whether it is for a request."""
        return self.place()[0] < math.inf

    def place(self) -> tuple[float, bool, int]:
        """Return the order among claims: by urgency, then those that have begun, then by age."""
        return min(self._urgency(), self.running_urgency), not self.has_begun, self.number


def check_nesting(own: Any, device: Turns | None) -> frozenset[Any]:
    """Refuse a request that would wait for itself; return what is busy while it waits."""
    held = held_here()
    if own in held:
        raise ArgumentError("the batched function submits to its own batcher and would wait for itself forever")
    if device is not None:
        device.check_inside([other for other in held if isinstance(other, Turns)])
    return held


def hold(busy: frozenset[Any]) -> None:
    """Note what is busy until what runs in this context returns."""
    _held.set((os.getpid(), busy))


def held_here() -> frozenset[Any]:
    """Return what is busy until what runs in this context returns; nothing in a process that was forked there."""
    pid, busy = _held.get()
    return busy if pid == os.getpid() else frozenset()
