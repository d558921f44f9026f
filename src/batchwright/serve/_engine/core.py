"""Core: every move a request can make, without a clock, a thread or a loop."""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Generator, Iterable
from dataclasses import dataclass, field
from typing import final

from ..._oom import text_of
from ...errors import Closed, DeadlineExceeded, QueueFull, TooLarge
from ..latency import LatencyModel
from ..settings import Settings
from ..stats import Counters, Stats
from .calls import Call, Group, Outcome, TokenLimit
from .isolation import Faults, Isolation
from .policies import pick
from .request import Request, State, longest, num_tokens
from .waiting import Backlog, Line

# After this many requests were given up only by prediction, one is run all the same: a wrong prediction must not last.
MAX_SHED_IN_A_ROW = 16
# Of the requests that are refused by prediction, one in this many is taken in all the same.
PROBE_EVERY = 32


@final
@dataclass(frozen=True)
class Turn:
    """What follows a move: a call to run, requests that have ended, when to ask again."""

    call: Call | None = None
    ended: list[Request] = field(default_factory=list)
    wake_seconds: float | None = None


@final
class Core:
    """The state machine of a batcher.

    Every move takes the time as an argument and returns what follows from it. A core does nothing by itself and is not
    safe between threads: its driver holds a lock, runs the calls and wakes the callers.

    Args:
        settings: policy and limits.
        model: how long batches take; it learns from every call that works.
    """

    def __init__(self, settings: Settings, model: LatencyModel, *, num_workers: int = 1) -> None:
        self.settings = self._limited = settings
        self._is_limited = False
        self.model = model
        self._backlog = Backlog(model, num_workers)
        self.is_open = True
        self.failure: str | None = None
        self.counters = Counters()
        self._queue = Line()
        self._running: dict[Request, None] = {}
        self._num_jobs = 0
        self._num_shed_in_a_row = 0
        self._num_refused = 0
        self._token_limit = TokenLimit()
        self._faults = Faults()
        self._ended: list[Request] = []
        self._now = 0.0
        # Requests to cancel with the next move; what is put in here needs no lock.
        self.left: deque[Request] = deque()

    @property
    def num_waiting(self) -> int:
        """Return how many requests wait."""
        return len(self._queue)

    @property
    def is_idle(self) -> bool:
        """Say whether nothing waits and nothing runs."""
        return not self._queue and not self._num_jobs

    def add(self, request: Request) -> None:
        """Take a request in, or say why not."""
        self.let_go(request.arrival)
        limit = self.settings.max_tokens
        if not self.is_open:
            self.counters.refused["closed"] += 1
            raise Closed("the batcher is closed; make a new one")
        if limit is not None and request.is_over(limit):
            self.counters.refused["too_large"] += 1
            raise _too_large(request, limit)
        if len(self._queue) >= self.settings.max_queue:
            self.counters.refused["queue_full"] += 1
            raise QueueFull(
                f"{len(self._queue)} requests wait, max_queue is {self.settings.max_queue}; try again later"
            )
        self._admit(request)
        self.counters.num_submitted += 1
        self._queue.add(request)
        self._backlog.enter(request)

    def _admit(self, request: Request) -> None:
        """Refuse a request that is predicted to miss its deadline, but not the 32nd in a row."""
        now = request.arrival
        self._backlog.arrive(request, now)
        if self.settings.policy != "adaptive" or request.deadline == math.inf or not self.model.is_ready:
            return
        predicted = self._backlog.predict(request, self._queue.share_before(request), now, self._limits())
        if predicted <= request.allowance:
            return
        self._num_refused += 1
        self._num_shed_in_a_row += 1
        is_untested = not self._num_jobs and self._num_shed_in_a_row >= MAX_SHED_IN_A_ROW
        if is_untested or self._num_refused % PROBE_EVERY == 0:
            return
        self._backlog.refuse(request)
        self.counters.refused["deadline"] += 1
        raise _refused(request, predicted)

    def cancel(self, request: Request, now: float) -> None:
        """Drop a request: if it waits it is never run, if it runs its answer is dropped."""
        if request in self._running or request in self._queue:  # not so in the child of a fork
            self._end(request, State.CANCELLED, now)
            self._take_ended()  # nobody waits for it

    def let_go(self, now: float) -> None:
        """Cancel those who left since the last move."""
        while self.left:
            self.cancel(self.left.popleft(), now)

    def expire(self, request: Request, now: float, *, running: bool = False) -> list[Request]:
        """Give up a request that is in no call at its deadline; one that runs may finish, unless ``running``."""
        if request.is_live and not request.is_called:
            self._shed(request, now)
        elif request.state is State.RUNNING and running:
            request.error = _still_running(request, now)
            self._end(request, State.SHED, now)
        return self._take_ended()

    def least_urgency(self) -> float:
        """Return when the most urgent request that waits is due; ``inf``: none waits."""
        return min((request.urgency for request in self._queue), default=math.inf)

    def first_arrival(self) -> float:
        """Return when the first of the requests that wait arrived; ``inf``: none waits."""
        return min((request.arrival for request in self._queue), default=math.inf)

    def take(self, now: float) -> Turn:
        """Decide what a free worker does."""
        self.let_go(now)
        decision = pick(self._queue, now, self.model, self._limits())
        shed, batch, reason = decision.shed, decision.batch, decision.reason
        if not batch and shed:
            batch, reason = self._probe(shed, now), "probe"
        chosen = set(map(id, batch))
        for request in shed:
            if id(request) not in chosen:
                self._shed(request, now)
        if not batch:
            return Turn(None, self._take_ended(), decision.wake_seconds)
        if decision.passed is not None:
            decision.passed.passed_over += 1
        return Turn(self._start(batch, reason, now), self._take_ended())

    def complete(self, call: Call, outcome: Outcome, now: float, seconds: float) -> Turn:
        """Take in the outcome of a call, and return the next call of the same batch if it needs one.

        Args:
            call: what was run.
            outcome: one value per request, or an error.
            now: the time.
            seconds: how long the call took.
        """
        self.let_go(now)
        self._learn(call.requests, outcome, seconds)
        self._now = now
        self.pause(call)
        try:
            following = self._begin(call.steps.send(outcome), call.steps, now)
            self.counters.num_calls += 1
        except StopIteration:
            following = None
            self._backlog.end(id(call.steps))
            self._num_jobs = max(0, self._num_jobs - 1)  # a crash has counted it as over
        return Turn(following, self._take_ended())

    def pause(self, call: Call) -> None:
        """Note that requests wait for their call."""
        for request in call.requests:
            request.is_called = False

    def thin(self, call: Call, now: float) -> list[Request]:
        """Take those out of a call that waits whom it comes too late for; the last stay, though they have ended."""
        self._now = now
        call.requests[:] = self._stay(call.requests) or call.requests
        return self._take_ended()

    def resume(self, call: Call) -> None:
        """Note that a call begins, which may have waited."""
        for request in call.requests:
            request.is_called = True

    def configure(self, settings: Settings, now: float) -> list[Request]:
        """Change the settings; requests that wait and no longer fit end with ``TooLarge``."""
        self.settings = self._limited = settings
        self._is_limited = False
        limit = math.inf if settings.max_tokens is None else settings.max_tokens
        for request in [request for request in self._queue if request.is_over(limit)]:
            request.error = _too_large(request, limit)
            self._end(request, State.FAILED, now)
        return self._take_ended()

    def stop(self) -> None:
        """Take no more requests; those that wait will still run."""
        self.is_open = self._is_limited = False

    def drop(self, now: float, more: Iterable[Request] = ()) -> list[Request]:
        """End every request that waits with ``Closed``, and more that do."""
        requests = [*self._queue, *(request for request in more if request.is_live)]
        return self._close(requests, "the batcher was closed before this request ran", now)

    def crash(self, error: BaseException, now: float) -> list[Request]:
        """End every request with ``Closed``: the driver of the core has failed, and nothing would ever run."""
        self.stop()
        self._num_jobs = 0
        self.failure = f"{type(error).__name__}: {text_of(error)}"
        return self._close([*self._queue, *self._running], f"the batcher failed: {self.failure}", now)

    def stats(self) -> Stats:
        """Return the figures so far."""
        model = {**self.model.coefficients, "margin": self.model.margin, "num_observed": self.model.num_observed}
        return Stats(
            num_waiting=len(self._queue),
            num_running=len(self._running),
            max_tokens=self._token_limit.within(self.settings.max_tokens),
            time_model=model,
            failure=self.failure,
            **self.counters.figures(),
        )

    def _limits(self) -> Settings:
        """Return the settings with the limits of this moment: memory may be short, a closed batcher does not wait."""
        if self._is_limited:
            return self._limited
        self._is_limited = True  # first: a batcher may be stopped meanwhile, without the lock
        tokens = self._token_limit.within(self.settings.max_tokens)
        wait = self.settings.max_wait_ms if self.is_open else 0.0
        if (self._limited.max_tokens, self._limited.max_wait_ms) != (tokens, wait):
            self._limited = dataclasses.replace(self.settings, max_tokens=tokens, max_wait_ms=wait)
        return self._limited

    def _probe(self, shed: list[Request], now: float) -> list[Request]:
        """Return, now and then, a request to run although it is predicted to be late."""
        candidates = [request for request in shed if request.deadline > now]
        self._num_shed_in_a_row += len(candidates)
        if not candidates or self._num_shed_in_a_row < MAX_SHED_IN_A_ROW:
            return []
        return [min(candidates, key=lambda request: request.length)]

    def _start(self, batch: list[Request], reason: str, now: float) -> Call:
        self._queue.remove(batch)
        self._backlog.leave(batch)
        for request in batch:
            self._running[request] = None
            request.state = State.RUNNING
        self._num_jobs += 1
        self._num_shed_in_a_row = 0
        self.counters.start(batch, reason, now)
        self.counters.num_calls += 1
        self._now = now
        steps = Isolation(
            self._settle,
            bisect=self.settings.on_error == "bisect",
            split_oom=self.settings.on_oom == "split",
            stay=self._stay,
            too_large=self._too_large,
            gains=self._gains,
            faults=self._faults,
        ).run(batch)
        return self._begin(next(steps), steps, now)

    def _begin(self, group: Group, steps: Generator[Group, Outcome, None], now: float) -> Call:
        call = Call(group, steps)
        self._backlog.start(id(steps), len(group), num_tokens(group), longest(group), now)
        self.resume(call)
        return call

    def _stay(self, group: Group) -> Group:
        """Return the requests that may run once more; a batch that failed keeps nobody past the deadline."""
        now = self._now
        for request in group:
            if request.deadline <= now and request.is_live:
                self._shed(request, now)
        return [request for request in group if request.is_live]

    def _gains(self, group: Group) -> tuple[float, float]:
        """Return the answers that a group gives in time if all goes well, and its seconds."""
        seconds = self.model.predict(len(group), longest(group))
        if not self.model.is_ready:
            return len(group), seconds
        finish = self._now + seconds
        return sum(request.deadline >= finish for request in group), seconds

    def _too_large(self, group: Group) -> None:
        self._token_limit.lower(len(group) * longest(group))
        self._is_limited = False

    def _learn(self, group: list[Request], outcome: Outcome, seconds: float) -> None:
        length = longest(group)
        if outcome.error is None:
            if self.model.is_ready:
                self._backlog.learn(len(group), length, seconds)
            self.model.observe(len(group), length, seconds)
            self._token_limit.rise(len(group) * length)
            self._is_limited = False
        elif outcome.is_oom:
            self.counters.num_ooms += 1

    def _settle(self, group: list[Request], outcome: Outcome) -> None:
        values = outcome.values if outcome.error is None else [outcome.error] * len(group)
        for request, value in zip(group, values, strict=True):
            if not request.is_live:
                continue
            # By the type: the results are the user's, and may say anything when they are asked for their class.
            if issubclass(type(value), BaseException):
                request.error = value
                self._end(request, State.FAILED, self._now)
            else:
                request.result = value
                self._end(request, State.ANSWERED, self._now)

    def _close(self, requests: Iterable[Request], why: str, now: float) -> list[Request]:
        for request in list(requests):
            request.error = Closed(why)
            self._end(request, State.CLOSED, now)
        return self._take_ended()

    def _shed(self, request: Request, now: float) -> None:
        if request.state is State.WAITING:
            self._backlog.give_up(request)
        request.error = _deadline_exceeded(request, now, self.model)
        self._end(request, State.SHED, now)

    def _end(self, request: Request, state: State, now: float) -> None:
        assert request.is_live, f"{request} ended twice"
        if request.state is State.WAITING:
            self._queue.remove([request])
            self._backlog.leave([request])
        else:
            del self._running[request]
        request.state = state
        self.counters.end(request, now)
        self._ended.append(request)

    def _take_ended(self) -> list[Request]:
        ended, self._ended = self._ended, []
        return ended


def _too_large(request: Request, limit: float) -> TooLarge:
    return TooLarge(
        f"an item of length {request.length} alone is over max_tokens={limit}; shorten it or raise the limit"
    )


def _refused(request: Request, predicted: float) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"not taken in: it would have finished after {predicted * 1e3:.1f} ms, and {request.allowance * 1e3:.1f} ms "
        "are allowed; raise deadline_ms or send fewer requests",
        deadline_seconds=request.allowance,
        predicted_seconds=predicted,
    )


def _deadline_exceeded(request: Request, now: float, model: LatencyModel) -> DeadlineExceeded:
    waited, predicted, alone = now - request.arrival, None, ""
    if model.is_ready:
        predicted = waited + model.predict(1, request.least_length)
        alone = f"; even alone it would have finished after {predicted * 1e3:.1f} ms"
    what, instead = "not run", "raise deadline_ms or send fewer requests"
    if request.state is not State.WAITING:
        what, instead = "not answered, its batch failed and time ran out", "raise deadline_ms or send no bad items"
    return DeadlineExceeded(
        f"{what}: waited {waited * 1e3:.1f} ms of the {request.allowance * 1e3:.1f} ms allowed{alone}; {instead}",
        waited_seconds=waited,
        deadline_seconds=request.allowance,
        predicted_seconds=predicted,
    )


def _still_running(request: Request, now: float) -> DeadlineExceeded:
    taken = now - request.arrival
    return DeadlineExceeded(
        f"still running {taken * 1e3:.1f} ms after it was submitted, with {request.allowance * 1e3:.1f} ms allowed; "
        "raise deadline_ms or send fewer requests",
        waited_seconds=taken,
        deadline_seconds=request.allowance,
    )
