"""Work: what a free worker runs next. Requests come first, offline work fills the gaps between them."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from typing import TypeAlias, final

from .calls import Call, Outcome
from .core import Core, Turn
from .request import Request
from .turns import Turns
from .units import Part, Units

# The share of the time allowed that a part of background work may take. A request that arrives just after it began
# waits for it and then for its own batch, so that two batches must fit, as among requests.
BACKGROUND_SHARE = 0.5
# How often an item is run that takes too long by prediction, while no request waits.
HOLD_SECONDS = 1.0
# The time allowed is the shortest among this many of the latest requests.
NUM_ALLOWANCES = 256

Job: TypeAlias = Call | Part


@final
class Work:
    """The requests of a core and the background work beside them. Its driver holds a lock around every move.

    Args:
        core: the state machine of the requests.
        device: shared with other batchers, whose deadlines count for the background work too.
        background: runs while no request can.
    """

    def __init__(self, core: Core, *, device: Turns | None, background: Units | None) -> None:
        self.core = core
        self._device = device
        self._background = background
        self._num_parts = 0
        self._allowances: deque[float] = deque(maxlen=NUM_ALLOWANCES)
        self._hold_until = -math.inf
        self.urgency = math.inf
        if device is not None:
            device.register(self)

    @property
    def is_idle(self) -> bool:
        """Say whether nothing waits and nothing runs; background work that has not begun does not count."""
        return self.core.is_idle and not self._num_parts

    @property
    def is_over(self) -> bool:
        """Say whether there will be nothing more to run."""
        return not self.core.is_open and not self.core.num_waiting

    @property
    def has_job(self) -> bool:
        """Say whether there is something to run, now or soon."""
        return bool(self.core.num_waiting) or (
            self.core.is_open and self._background is not None and self._background.has_part()
        )

    def add(self, request: Request) -> None:
        """Take a request in, or say why not."""
        self.core.add(request)
        self.urgency = min(self.urgency, request.urgency)
        # A deadline that the request alone cannot meet is no reason to hold back or refuse background work.
        model = self.core.model
        if not model.is_ready or request.allowance >= model.predict(1, request.least_length):
            self._allowances.append(request.allowance)

    def allowance(self) -> float:
        """Return the shortest time in seconds that requests are allowed; ``inf``: they have no deadline."""
        if not self.core.is_open:
            return math.inf
        setting, model = self.core.settings.deadline_ms, self.core.model
        # What came before the model was ready counts only if it can be met.
        least = model.predict(1, 1) if model.is_ready else 0.0
        met = (allowance for allowance in list(self._allowances) if allowance >= least)
        return min(math.inf if setting is None else setting / 1e3, min(met, default=math.inf))

    def take(self, now: float) -> tuple[Turn, Part | None]:
        """Return a batch of requests; only if there is none, a part of the background work."""
        turn = self.core.take(now) if self.core.num_waiting else Turn()
        if self._device is not None:
            self.urgency = self.core.least_urgency()
        if turn.call is not None or self._background is None or not self.core.is_open:
            return turn, None
        part = self._take_part(self._background, turn.wake_seconds)
        if part is None and turn.wake_seconds is None and self._background.has_part():
            turn, part = self._hold(self._background, turn, now)
        self._num_parts += part is not None
        return turn, part

    def complete(self, job: Job, outcome: Outcome, now: float, seconds: float) -> tuple[Call | None, list[Request]]:
        """Take in what a call gave; return the call that follows, and the requests that have ended."""
        if isinstance(job, Call):
            turn = self.core.complete(job, outcome, now, seconds)
            return turn.call, turn.ended
        assert self._background is not None
        if outcome.error is None:
            self.core.model.observe(job.stop - job.start, job.length, seconds)
        self._background.finish(job, outcome, self.core.settings)
        self._num_parts -= 1
        return None, []

    def begin_background(self) -> None:
        """Begin to read background work."""
        if self._background is not None:
            self._background.begin()

    def stop_background(self) -> None:
        """Run no more background work."""
        if self._background is not None:
            self._background.stop()

    def forget_background(self) -> None:
        """End the background work in the child of a fork."""
        if self._background is not None:
            self._background.forget()

    def _take_part(self, background: Units, wake_seconds: float | None) -> Part | None:
        """Return a part that ends before the requests that wait are due, and soon enough for one that comes next."""
        allowed = self.allowance() if self._device is None else self._device.least_allowance()
        seconds = self.core.settings.max_wait_ms / 1e3 if allowed == math.inf else BACKGROUND_SHARE * allowed
        now = seconds if wake_seconds is None else min(seconds, wake_seconds)
        return background.take(now, self.core.model, self.core.settings, most_seconds=seconds / BACKGROUND_SHARE)

    def _hold(self, background: Units, turn: Turn, now: float) -> tuple[Turn, Part | None]:
        """Wait with an item that takes too long by prediction, but run it now and then: the prediction may be old."""
        if now < self._hold_until:
            return dataclasses.replace(turn, wake_seconds=self._hold_until - now), None
        self._hold_until = now + HOLD_SECONDS
        single = dataclasses.replace(self.core.settings, max_items=1)
        return turn, background.take(math.inf, self.core.model, single, most_seconds=math.inf)
