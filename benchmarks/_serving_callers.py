"""The callers of serving_stress.py: what each asks for, how it behaves, and whether it got what belongs to it."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from _serving_poison import ERRORS, MAX_LENGTH, ORDINARY, OWN, Item, answer, value_of

from batchwright.serve import Batcher, DeadlineExceeded, WorkerDied

Services = Mapping[str, Batcher[Any, Any]]

NUM_LOOPS, NUM_THREADS = 3, 8
# Requests that one loop has open at a time.
IN_FLIGHT = 64
# The shares of the requests: by service, by what the caller does, by how many items are bad.
SERVICES = {"thread": 0.7, "coroutine": 0.2, "process": 0.05, "killed": 0.05}
MANNERS = {"wait": 0.85, "deadline": 0.07, "cancel": 0.04, "time out": 0.04}
BAD_SHARE = 0.02
# Items that end a process or hang cost seconds: by service, how many requests there are to one of them.
RARE = (
    ("coroutine", "hang", 50_000),
    ("process", "hang", 50_000),
    ("process", "kill -9", 10_000),
    ("process", "os._exit", 10_000),
)


@dataclass(frozen=True)
class Ask:
    """A request to come: to whom, how the caller behaves, after how many seconds it gives up."""

    item: Item
    service: str
    manner: str
    seconds: float


@dataclass
class Tally:
    """What became of the requests of one caller."""

    ends: Counter[tuple[str, str]] = field(default_factory=Counter)
    numbers: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    latest: float = field(default_factory=time.monotonic)

    def note(self, ask: Ask, result: Any, error: BaseException | None) -> None:
        """Count the end of a request, and what is wrong with it."""
        number, kind, _ = ask.item
        self.numbers.append(number)
        self.latest = time.monotonic()
        if error is None:
            is_right = kind == "good" and value_of(result) == answer(number)
            self._end(ask, "answered" if is_right else "wrong", f"{ask} was answered with {result!r}")
        elif isinstance(error, DeadlineExceeded) and ask.manner == "deadline":
            self._end(ask, "late")
        elif isinstance(error, asyncio.CancelledError | TimeoutError) and ask.manner in ("cancel", "time out"):
            self._end(ask, "given up")
        elif ask.service == "killed" and isinstance(error, WorkerDied):
            self._end(ask, "killed")  # from outside, while it ran alone: nobody can know whose fault that was
        elif kind == "good":
            self._end(ask, "failed by a mate", f"{ask} ended with {type(error)}")
        else:
            is_own = kind not in OWN or error.args == (number,)
            is_right = type(error) is ERRORS[kind] and is_own
            self._end(ask, "own error" if is_right else "wrong", f"{ask} ended with {type(error)}")

    def _end(self, ask: Ask, how: str, fault: str = "") -> None:
        self.ends[ask.item[1], how] += 1
        if how in ("wrong", "failed by a mate"):
            self.faults.append(fault)


def make_asks(num: int, seed: int = 0) -> list[Ask]:
    """Draw the requests; bad items come without a deadline, so that each must end with its own error."""
    rng = random.Random(seed)
    asks = []
    for number in range(num):
        service = rng.choices(list(SERVICES), list(SERVICES.values()))[0]
        kind, manner = "good", rng.choices(list(MANNERS), list(MANNERS.values()))[0]
        if rng.random() < BAD_SHARE:
            kind, manner = rng.choice(ORDINARY), "wait"
        item = (number, kind, min(MAX_LENGTH, int(rng.lognormvariate(3, 1))))
        asks.append(Ask(item, service, manner, rng.choice((0.0, 0.001, 0.005, 0.02))))
    for service, kind, per in RARE:
        numbers = [ask.item[0] for ask in asks if ask.service == service and ask.item[1] == "good"]
        for number in rng.sample(numbers, max(1, num // per)):
            asks[number] = Ask((number, kind, 8), service, "wait", 0.0)
    return asks


async def ask_in_loop(batcher: Batcher[Any, Any], ask: Ask) -> Any:
    if ask.manner == "deadline":
        return await batcher.submit(ask.item, deadline_ms=1e3 * ask.seconds + 1)
    if ask.manner == "time out":
        return await asyncio.wait_for(batcher.submit(ask.item), ask.seconds)
    if ask.manner == "wait":
        return await batcher.submit(ask.item)
    task = asyncio.ensure_future(batcher.submit(ask.item))
    await asyncio.sleep(ask.seconds)
    task.cancel()
    return await task


async def call_in_loop(services: Services, asks: Sequence[Ask], tally: Tally) -> None:
    coming = iter(asks)

    async def caller() -> None:
        for ask in coming:
            try:
                result = await ask_in_loop(services[ask.service], ask)
            except (Exception, asyncio.CancelledError) as error:
                tally.note(ask, None, error)
            else:
                tally.note(ask, result, None)

    await asyncio.gather(*(caller() for _ in range(IN_FLIGHT)))


def call_in_thread(services: Services, asks: Sequence[Ask], tally: Tally) -> None:
    """Ask one after the other; a thread cannot cancel, so it sets a deadline where a loop would."""
    for ask in asks:
        allowed = None if ask.manner == "wait" else 1e3 * ask.seconds + 1
        try:
            result = services[ask.service].submit_sync(ask.item, deadline_ms=allowed)
        except Exception as error:
            tally.note(ask, None, error)
        else:
            tally.note(ask, result, None)


def start_callers(services: Services, asks: Sequence[Ask]) -> list[tuple[threading.Thread, Tally]]:
    """Deal the requests out: a tenth to the threads, the others to the loops."""
    for_threads, for_loops = asks[::10], [ask for place, ask in enumerate(asks) if place % 10]
    targets: list[Callable[[Tally], Any]] = [
        *(partial(run_loop, services, for_loops[place::NUM_LOOPS]) for place in range(NUM_LOOPS)),
        *(partial(call_in_thread, services, for_threads[place::NUM_THREADS]) for place in range(NUM_THREADS)),
    ]
    tallies = [Tally() for _ in targets]
    threads = [
        threading.Thread(target=target, args=(tally,), daemon=True)
        for target, tally in zip(targets, tallies, strict=True)
    ]
    for thread in threads:
        thread.start()
    return list(zip(threads, tallies, strict=True))


def run_loop(services: Services, asks: Sequence[Ask], tally: Tally) -> None:
    asyncio.run(call_in_loop(services, asks, tally))
