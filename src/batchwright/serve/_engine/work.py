"""Work: what a free worker runs next. Requests come first, offline work fills the gaps between them."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, final

from ...errors import DeadlineExceeded
from ..latency import LatencyModel
from ..settings import Settings
from .calls import Call, Outcome
from .core import Core, Turn
from .gaps import Gaps
from .neighbours import Job, Neighbours, Run
from .request import Request, State, longest
from .turns import Member, Turns
from .units import Part, Units

# The most of the time allowed that a part of background work may take. A request that arrives just after it began waits
# for it, for a batch of others that came meanwhile, and for its own: three must fit. What requests need may lower it.
BACKGROUND_SHARE = 1 / 3
# How often an item that takes too long is looked at again; how often it is run if requests have no deadline.
HOLD_SECONDS = 1.0
# How often it is looked whether a part that gave way has ended its wait.
POLL_SECONDS = 0.02
# The time allowed is the shortest among this many of the latest requests.
NUM_ALLOWANCES = 256


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
        self.gaps = Gaps()
        # Without background work on its device nobody asks what is between requests.
        self._has_gaps = background is not None or device is not None
        # By how much the last part held up the requests that have been running since it ended.
        self._delay = 0.0
        self._is_blameless = True
        self._is_between = False
        self._num_late = 0
        # How long parts that give way hold up requests at once; None: none ever gave way.
        self._held: LatencyModel | None = None
        self._part_seconds: float | None = None
        self._why_waiting: str | None = None
        self.urgency = math.inf
        # Until then requests wait on purpose, unless another one comes.
        self._waits_until = -math.inf
        # Parts that wait in their middle, and what shares the memory with them.
        self._paused: set[Part] = set() if device is None else device.paused
        self.neighbours = Neighbours(core, self._paused)
        # A part ran out of memory beside others: the next one begins when nothing else runs.
        self._is_part_alone = False
        if device is not None:
            device.register(self)

    @property
    def is_idle(self) -> bool:
        """Say whether nothing waits and nothing runs; background work that has not begun does not count."""
        return self.core.is_idle and not self._num_parts

    @property
    def is_over(self) -> bool:
        """Say whether there will be nothing more to run."""
        return not self.core.is_open and not self.core.num_waiting and not self.neighbours.is_awaited

    @property
    def has_background(self) -> bool:
        """Say whether there is background work beside the requests."""
        return self._background is not None

    @property
    def has_job(self) -> bool:
        """Say whether there is something to run, now or soon."""
        return bool(self.core.num_waiting or self.neighbours.is_awaited) or (
            self.core.is_open and self._background is not None and self._background.has_part()
        )

    @property
    def again_urgency(self) -> float:
        """Return when the most urgent of the requests that wait until a part has ended is due; ``inf``: none does."""
        return self.neighbours.least_urgency()

    @property
    def must_go_on(self) -> bool:
        """Say whether a part goes on after every batch in its middle, since requests wait until it has ended."""
        members: list[Member] = [self] if self._device is None else self._device.members()
        return any(member.again_urgency < math.inf for member in members)

    def add(self, request: Request) -> None:
        """Take a request in, or say why not."""
        if self._has_gaps:
            self._add_noted(request)
        else:
            self.core.add(request)
        self.urgency = min(self.urgency, request.urgency)
        self._waits_until = -math.inf
        # A deadline that the request alone cannot meet is no reason to hold back or refuse background work.
        model = self.core.model
        if not model.is_ready or request.allowance >= model.predict(1, request.least_length):
            self._allowances.append(request.allowance)

    def _add_noted(self, request: Request) -> None:
        self.gaps.note_arrival(request.arrival)
        try:
            self.core.add(request)
        except DeadlineExceeded as error:
            self._note_one(request, request.allowance - (error.predicted_seconds or 0.0), request.arrival)
            raise

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
        turn, part = self._choose(now)
        if (job := turn.call or part) is not None:
            self.neighbours.begin(job)
        return turn, part

    def _choose(self, now: float) -> tuple[Turn, Part | None]:
        again = self.neighbours.take(now)
        self._note(again.ended, now)
        if again.call is not None or again.ended:
            return again, None
        turn = Turn() if self.neighbours.keeps_batches_out else self._take_requests(now)
        if turn.call is not None:
            return turn, None
        # A device has memory for one part, and a part that had too little has all of it.
        is_short = self._is_part_alone and self.neighbours.is_busy
        if is_short or self.neighbours.keeps_parts_out or (self._paused and self._device is not None):
            wake = POLL_SECONDS if turn.wake_seconds is None else min(POLL_SECONDS, turn.wake_seconds)
            return dataclasses.replace(turn, wake_seconds=wake), None
        if self._background is None or not self.core.is_open:
            return turn, None
        part = self._take_part(self._background, turn.wake_seconds, now)
        if part is None and turn.wake_seconds is None and self._background.has_part():
            turn = dataclasses.replace(turn, wake_seconds=HOLD_SECONDS)
        self._num_parts += part is not None
        return turn, part

    def complete(self, job: Job, outcome: Outcome, now: float, seconds: float) -> tuple[Call | None, list[Request]]:
        """Take in what a call gave; return the call that follows, and the requests that have ended."""
        run = self.neighbours.end(job)
        if isinstance(job, Call):
            if self._may_work_without(run, job, outcome):
                self.core.counters.num_ooms += outcome.is_oom
                ended = self.neighbours.put(job, run, now)
                self._note(ended, now)
                return None, ended
            if outcome.error is None and outcome.held_seconds is not None:
                self._learn_held(len(job.requests), longest(job.requests), outcome.held_seconds)
            if self._has_gaps:
                ratio = _ratio(self.core.model, len(job.requests), longest(job.requests), seconds)
                self.gaps.note_batch(seconds, ratio)
            turn = self.core.complete(job, outcome, now, seconds)
            self._note(turn.ended, now)
            if turn.call is None:
                self.neighbours.finish(job)
            else:
                self.neighbours.begin(turn.call, run.inside)
            return turn.call, turn.ended
        assert self._background is not None
        self.resume(job)
        if outcome.error is None:
            self._learn(job, seconds, outcome.held_seconds)
        self._background.finish(job, outcome, self.core.settings, is_crowded=run.is_crowded)
        self._is_part_alone = outcome.is_oom and run.is_crowded and job.stop - job.start == 1
        self._num_parts = max(0, self._num_parts - 1)  # a crash has counted it as over
        self._hold_up(now)
        return None, []

    def _may_work_without(self, run: Run, call: Call, outcome: Outcome) -> bool:
        """Say whether a call failed for want of what others took, memory or depth of calls, and may run once more."""
        settings = self.core.settings
        if outcome.is_oom and not outcome.is_final:
            is_beside = run.beside_part or (run.beside_call and len(call.requests) == 1)
            return is_beside and settings.on_oom == "split"
        return bool(self._paused) and isinstance(outcome.error, RecursionError) and settings.on_error == "bisect"

    def _hold_up(self, now: float) -> None:
        """Note that a part has held up the requests that wait until now."""
        self._delay = max(0.0, now - max(self.core.first_arrival(), self._waits_until))
        self._is_blameless = self.core.model.is_ready  # before that, nobody could know how long it takes

    def is_wanted(self, now: float) -> bool:
        """Say, without a lock, whether a request waits to run, of this batcher or of another one of the device."""
        if self.core.num_waiting and not self._waits_on_purpose(now):
            return True
        return self._device is not None and self._device.is_wanted

    def urgency_at(self, now: float) -> float:
        """Return when the most urgent request is due; ``inf``: there is none, or it still waits on purpose."""
        urgency = math.inf if self._waits_on_purpose(now) else self.urgency
        return urgency if self._paused else min(urgency, self.again_urgency)

    def _waits_on_purpose(self, now: float) -> bool:
        return now < self._waits_until and self.core.is_open

    def pause(self, part: Part) -> None:
        """Note that a part waits, in its middle, for others."""
        self._paused.add(part)

    def resume(self, part: Part) -> None:
        """Note that it goes on, or never will."""
        self._paused.discard(part)

    def configure(self, settings: Settings, now: float) -> list[Request]:
        """Change the settings; return the requests that no longer fit."""
        self._waits_until = -math.inf
        return self.core.configure(settings, now)

    def crash(self, error: BaseException, now: float) -> list[Request]:
        """End all requests with an error that no worker survives."""
        self.neighbours.clear()
        self._num_parts = 0
        return self.core.crash(error, now)

    def take_between(self, now: float, *, may_run: bool = True, part: Part | None = None) -> Turn:
        """Return a batch of requests that runs in the middle of a part, which has held them up until now.

        Nothing unless they ``may_run``: the part goes on, and holds up those that wait once more.
        """
        if not may_run or self.neighbours.keeps_batches_out:
            self._is_between, self._delay = False, 0.0
            return Turn()
        if not self._is_between:
            self._hold_up(now)
        turn = self._take_requests(now)
        self._is_between = turn.call is not None or bool(turn.ended)
        if turn.call is not None:
            self.neighbours.begin(turn.call, part)
        return turn

    def _take_requests(self, now: float) -> Turn:
        turn = self.core.take(now) if self.core.num_waiting else Turn()
        self._note(turn.ended, now)
        is_waiting = turn.call is None and turn.wake_seconds is not None
        self._waits_until = now + (turn.wake_seconds or 0.0) if is_waiting else -math.inf
        if self._device is not None:
            self.urgency = self.core.least_urgency()
        if turn.call is None:
            self._delay = 0.0
        return turn

    def expire(self, request: Request, now: float, *, running: bool = False) -> list[Request]:
        """Give up a request that is in no call at its deadline; one that runs may finish, unless ``running``."""
        ended = self.core.expire(request, now, running=running) + self.neighbours.leave(now)
        self._note(ended, now)
        return ended

    def leave(self, now: float) -> list[Request]:
        """Drop the requests whose callers have left; return those that have ended meanwhile."""
        self.core.let_go(now)
        ended = self.neighbours.leave(now)
        self._note(ended, now)
        return ended

    def _learn(self, part: Part, seconds: float, held_seconds: float | None) -> None:
        size, model = part.stop - part.start, self._part_model
        held = seconds if held_seconds is None else held_seconds
        of_requests = model is self.core.model  # until the other one is ready
        self.gaps.note_part(_ratio(model, size, part.length, seconds if of_requests else held))
        self.core.model.observe(size, part.length, seconds)
        if held_seconds is not None or self._held is not None:
            self._learn_held(size, part.length, held)

    def _learn_held(self, size: int, length: int, seconds: float) -> None:
        if self._held is None:
            self._held = LatencyModel()
        self._held.observe(size, length, seconds)

    @property
    def _part_model(self) -> LatencyModel:
        """Return what tells for how long a part lets no request run: until it ends, or gives way the next time."""
        return self._held if self._held is not None and self._held.is_ready else self.core.model

    def _note(self, ended: Iterable[Request], now: float) -> None:
        """Note how much longer requests could have waited, had no part held them up."""
        for request in ended if self._has_gaps else ():
            if request.state is State.ANSWERED:
                self._note_one(request, request.deadline - now, now)
            elif request.state is State.SHED and self.core.model.is_ready:
                alone = self.core.model.predict(1, request.least_length)
                self._note_one(request, min(-1e-9, request.deadline - now - alone), now)

    def _note_one(self, request: Request, left: float, now: float) -> None:
        """Note a request by the seconds that were left when it ended, below 0 if it is late."""
        self.gaps.note_request(request.allowance, left + self._delay, now)
        if left < 0 < left + self._delay:
            self._num_late += 1
            if self._is_blameless:  # one part counts once: a pause of the machine may make many late
                self.gaps.note_late()
            self._is_blameless = False

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

    def background_stats(self) -> dict[str, Any]:
        """Return how long parts may take, and why the next item waits; nothing without background work."""
        if self._background is None:
            return {}
        return {
            "part_ms": None if self._part_seconds is None else 1e3 * self._part_seconds,
            "slowness": self.gaps.slowness,
            "boldness": self.gaps.boldness,
            "num_late": self._num_late,
            "waiting": self._why_waiting,
        }

    def _take_part(self, background: Units, wake_seconds: float | None, now: float) -> Part | None:
        """Return a part that ends before the requests that wait are due, and soon enough for one that comes next."""
        members: list[Member] = [self] if self._device is None else self._device.members()
        allowed = min(member.allowance() for member in members)
        if allowed == math.inf:
            most, longest_item = self.core.settings.max_wait_ms / 1e3, 2 * self.core.settings.max_wait_ms / 1e3
        else:
            most, longest_item = BACKGROUND_SHARE * allowed, allowed
        self._part_seconds = seconds = min(member.gaps.longest_part(most) for member in members)
        if wake_seconds is not None:
            seconds = min(seconds, wake_seconds)
            return background.take(seconds, self._part_model, self.core.settings, most_seconds=longest_item)
        long = self._long_seconds(background, seconds, longest_item)
        if long is not None and self._may_run(long, members, now, has_deadline=allowed < math.inf):
            return background.take(long, self._part_model, self.core.settings, most_seconds=longest_item)
        return background.take(seconds, self._part_model, self.core.settings, most_seconds=longest_item)

    def _long_seconds(self, background: Units, seconds: float, most: float) -> float | None:
        """Return what the next item takes at least, if that is longer than parts may take and it is not refused."""
        self._why_waiting = None
        length, model = background.next_length(), self._part_model
        if length is None or not model.is_ready:
            return None
        alone = model.predict(1, length)
        # Up to twice the constant, more items with it cost little: there batching pays.
        return max(alone, min(2 * model.constant, most)) if seconds < alone <= most else None

    def _may_run(self, seconds: float, members: Sequence[Member], now: float, *, has_deadline: bool) -> bool:
        """Say whether an item that takes longer than parts may runs now all the same."""
        if not has_deadline:
            if now >= self._hold_until:
                self._hold_until = now + HOLD_SECONDS
                return True
            self._why_waiting = f"an item takes about {seconds * 1e3:.1f} ms; one that takes so long runs every second"
            return False
        num_late = sum(member.gaps.expected_late(seconds, now) for member in members)
        if self.gaps.may_spend(num_late):
            return True
        self._why_waiting = (
            f"an item takes about {seconds * 1e3:.1f} ms and is expected to make {num_late:.2g} requests late; "
            f"{self.gaps.saved:.2g} are saved up for it"
        )
        return False


def _ratio(model: LatencyModel, num_items: int, length: int, seconds: float) -> float:
    """Return real over predicted seconds."""
    return seconds / model.predict(num_items, length) if model.is_ready else 1.0
