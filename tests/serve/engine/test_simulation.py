"""The core under a simulated day: a fake clock, random everything, and every request accounted for."""

import heapq
import itertools
import random

from batchwright.errors import Closed, DeadlineExceeded, DoesNotFitError, QueueFull, TooLarge
from batchwright.serve._engine.calls import Outcome
from batchwright.serve._engine.core import Core
from batchwright.serve._engine.policies import MAX_PASSED_OVER
from batchwright.serve._engine.request import Request, State
from batchwright.serve.latency import LatencyModel
from batchwright.serve.settings import Settings
from batchwright.testing import FakeClock

NUM_WORKERS = 2


class Poison(Exception):
    pass


class World:
    """A core, a device that fails in every way, and callers who submit, cancel and change the settings."""

    def __init__(self, seed, num_requests):
        self.random = random.Random(seed)
        self.clock = FakeClock()
        self.core = Core(Settings(max_tokens=8192, deadline_ms=100), LatencyModel())
        self.events, self.order = [], itertools.count()
        self.free_workers, self.memory_tokens = NUM_WORKERS, 6000
        self.num_left = num_requests
        self.requests, self.refused, self.ends, self.num_runs = [], [], {}, {}
        self.in_failed_batch = set()
        self.at(0.0, self.arrive)

    def at(self, seconds, action, *arguments):
        heapq.heappush(self.events, (self.clock() + seconds, next(self.order), action, arguments))

    def run(self):
        while self.events:
            when, _, action, arguments = heapq.heappop(self.events)
            self.clock.advance(when - self.clock())
            action(*arguments)
            self.use_free_workers()

    def arrive(self):
        number, self.num_left = self.num_left, self.num_left - 1
        if number == 0:
            return
        if number == 200:
            self.core.stop()  # a drain: the last 200 come too late
        allowed = self.random.choice([0.02, 0.05, 0.1, 0.5, float("inf")])
        length = min(9000, int(self.random.lognormvariate(3.5, 0.9)) + 1)
        priority = self.random.choice([-1, 0, 0, 0, 2])
        request = Request(number, length, self.clock(), self.clock() + allowed, priority)
        try:
            self.core.add(request)
        except (Closed, DeadlineExceeded, QueueFull, TooLarge) as error:
            self.refused.append((request, error))
        else:
            self.accept(request, allowed)
        # Quiet and busy spells take turns, and the device is overrun in the busy ones.
        self.at(self.random.expovariate(4000 if number // 2000 % 2 else 500), self.arrive)

    def accept(self, request, allowed):
        self.requests.append(request)
        if allowed < float("inf"):
            self.at(allowed, lambda: self.end(self.core.expire(request, self.clock())))
        if self.random.random() < 0.05:
            self.at(self.random.expovariate(50), self.cancel, request)
        if self.random.random() < 0.002:
            self.configure()

    def cancel(self, request):
        was_live = request.is_live
        self.core.cancel(request, self.clock())
        if was_live:
            self.end([request])

    def configure(self):
        settings = Settings(
            policy=self.random.choice(["adaptive", "adaptive", "greedy", "window"]),
            max_items=self.random.choice([4, 16, 64]),
            max_tokens=self.random.choice([512, 8192, None]),
            max_wait_ms=self.random.choice([0, 2, 10]),
            max_queue=self.random.choice([100, 1000]),
        )
        self.memory_tokens = self.random.choice([300, 2000, 6000])
        self.end(self.core.configure(settings, self.clock()))

    def use_free_workers(self):
        while self.free_workers and self.core.num_waiting:
            turn = self.core.take(self.clock())
            self.end(turn.ended)
            if turn.call is not None:
                self.free_workers -= 1
                self.start(turn.call)
            elif turn.wake_seconds is not None:
                self.at(turn.wake_seconds + 1e-9, lambda: None)
                return

    def start(self, call):
        for request in call.requests:
            assert request.state is State.RUNNING, "only a live request may be run"
            self.num_runs[request.item] = self.num_runs.get(request.item, 0) + 1
        length = max(request.length for request in call.requests)
        seconds = (0.004 + 4e-6 * len(call.requests) * length) * self.random.uniform(1, 1.2)
        self.at(seconds, self.finish, call, self.outcome(call.items, len(call.requests) * length), seconds)

    def outcome(self, items, tokens):
        if tokens > self.memory_tokens:
            return Outcome(error=MemoryError("full"), is_oom=True)
        bad = [item for item in items if item % 97 == 0]
        if bad:
            return Outcome(error=Poison(self.random.choice(bad)))
        return Outcome(values=[KeyError(item) if item % 89 == 0 else 2 * item + 1 for item in items])

    def finish(self, call, outcome, seconds):
        if outcome.error is not None:
            self.in_failed_batch.update(call.items)
        turn = self.core.complete(call, outcome, self.clock(), seconds)
        self.end(turn.ended)
        if turn.call is None:
            self.free_workers += 1
        else:
            self.start(turn.call)

    def end(self, ended):
        for request in ended:
            assert request.item not in self.ends, "a request ended twice"
            self.ends[request.item] = self.clock()

    def check(self, request):
        item, error = request.item, request.error
        assert request.passed_over <= MAX_PASSED_OVER
        if request.state is State.ANSWERED:
            assert request.result == 2 * item + 1
            assert item % 97
            assert item % 89
        elif request.state is State.FAILED:
            own = isinstance(error, Poison | KeyError) and error.args == (item,)
            assert own or isinstance(error, DoesNotFitError | TooLarge), error
            assert not isinstance(error, DoesNotFitError) or request.length > 300, "it would have fitted any memory"
        elif request.state is State.SHED:
            assert isinstance(error, DeadlineExceeded)
            assert item not in self.num_runs or item in self.in_failed_batch, "what is given up is not run"
        else:
            assert request.state is State.CANCELLED


def test_of_a_hundred_thousand_random_requests_each_ends_once_with_its_own_answer_or_error():
    world = World(seed=1, num_requests=100_000)
    world.run()
    assert len(world.requests) + len(world.refused) == 100_000
    assert world.ends.keys() == {request.item for request in world.requests}
    for request in world.requests:
        world.check(request)
    assert world.core.is_idle
    assert sum(isinstance(error, Closed) for _, error in world.refused) == 200
    stats = world.core.stats()
    assert stats.num_submitted == len(world.requests)
    ended = stats.num_answered + stats.num_failed + stats.num_shed + stats.num_cancelled
    assert (ended, stats.num_closed) == (len(world.requests), 0)
    # Everything that can happen did happen, often.
    assert min(stats.num_answered, stats.num_failed, stats.num_shed, stats.num_cancelled) > 500
    assert min(stats.num_ooms, *stats.num_refused.values()) > 20
    assert {"window", "full", "all", "urgent", "rescue"} <= stats.reasons.keys()


def test_the_same_seed_gives_the_same_day():
    first, second = World(seed=5, num_requests=3000), World(seed=5, num_requests=3000)
    first.run()
    second.run()
    assert first.ends == second.ends
    assert first.core.stats() == second.core.stats()
