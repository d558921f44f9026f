"""Everything that goes wrong at once: is an answer lost, wrong or given twice, and does a bad item harm a good one?

    python benchmarks/serving_stress.py                       # 200,000 requests, some minutes
    python benchmarks/serving_stress.py --requests 5000

Four batchers, whose functions run in threads, in the event loops of the callers, and in processes, are asked by three
event loops and eight threads at the same time. Callers cancel, time out and set deadlines; items raise, end the
process, hang, return the wrong number of results, have impossible lengths or run out of memory; the processes of one
batcher are killed, and the program forks while it serves. Every answer is compared with the one that belongs to its
item.

Afterwards, in turns: the throughput with one item per second that never fits into memory, and without.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import platform
import shlex
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

from _serving_callers import NUM_LOOPS, NUM_THREADS, Services, Tally, make_asks, start_callers
from _serving_poison import AsyncRecorder, Item, Recorder, answer, length_of, respond, value_of
from serving_load import stub_seconds

from batchwright._machine import num_cores, processor_name, versions_of
from batchwright.errors import DoesNotFitError
from batchwright.serve import Batcher, Closed, WorkerDied

RESULTS = Path(__file__).parent / "results" / "serving_stress.json"
# If nothing ended for so long, what is still open is lost.
STANDSTILL_SECONDS = 60.0
FORK_SECONDS = KILL_SECONDS = 1.0
# Of the throughput without items that run out of memory.
LEAST_SHARE = 0.8
Row = dict[str, Any]
Callers = Sequence[tuple[Thread, Tally]]


@contextlib.contextmanager
def serving(recorders: dict[str, Recorder], run_timeout_ms: float) -> Iterator[Services]:
    """Start the services; batches are small where one item may end a process or hang."""
    options: Row = {"length_of": length_of, "max_queue": 10_000, "num_workers": 2}
    careful: Row = {"max_items": 16, "run_timeout_ms": run_timeout_ms}
    services: Services = {
        "thread": Batcher(recorders["thread"], **options),
        "coroutine": Batcher(recorders["coroutine"], **careful, **options),
        "process": Batcher(respond, worker="process", **careful, **options),  # some of its items end the process
        "killed": Batcher(respond, worker="process", **careful, **options),  # its processes are killed from outside
    }
    try:
        yield services
    finally:
        for service in services.values():
            service.close_sync(drain=False, timeout_seconds=10)


def fork(services: Iterable[Batcher[Any, Any]]) -> bool:
    """Fork while it serves; say whether every service told the child so, and could be closed there."""
    pid = os.fork()
    if pid == 0:
        is_right = False
        with contextlib.suppress(BaseException):
            is_right = all([_is_closed(service) for service in services])
        os._exit(0 if is_right else 1)
    end = time.monotonic() + STANDSTILL_SECONDS
    while (found := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return False
        time.sleep(0.01)
    return os.waitstatus_to_exitcode(found[1]) == 0


def _is_closed(service: Batcher[Any, Any]) -> bool:
    try:
        service.submit_sync((0, "good", 1))
    except Closed:
        service.stats()
        service.close_sync()
        return True
    return False


def kill_worker(service: Batcher[Any, Any]) -> bool:
    """Kill a process that serves, by the id that it gives; say whether that was possible."""
    try:
        pid = service.submit_sync((-1, "pid", 1), priority=10)
        os.kill(pid, signal.SIGKILL)
    except (OSError, WorkerDied):  # it was gone already
        return False
    return True


def disturb(services: Services, callers: Callers) -> Row:
    """Fork and kill until every caller is done, or nothing has moved for long."""
    figures: Row = {"num_forks": 0, "num_forks_wrong": 0, "num_kills": 0}
    next_fork = time.monotonic() + FORK_SECONDS / 2
    next_kill = time.monotonic() + KILL_SECONDS
    while any(thread.is_alive() for thread, _ in callers):
        now = time.monotonic()
        if now > max(tally.latest for _, tally in callers) + STANDSTILL_SECONDS:
            break
        if now >= next_fork:
            figures["num_forks"] += 1
            figures["num_forks_wrong"] += not fork(services.values())
            next_fork = now + FORK_SECONDS
        if now >= next_kill:
            figures["num_kills"] += kill_worker(services["killed"])
            next_kill = now + KILL_SECONDS
        time.sleep(0.02)
    return figures


def still_works(service: Batcher[Any, Any]) -> bool:
    """Say whether a service answers, is healthy, and has ended every request that it took in."""
    items: list[Item] = [(-number, "good", 8) for number in range(2, 202)]
    came = [value_of(result) for result in service.map(items)]
    stats = service.stats()
    ended = stats.num_answered + stats.num_failed + stats.num_shed + stats.num_cancelled + stats.num_closed
    is_even = stats.num_submitted == ended and not stats.num_waiting and not stats.num_running
    return came == [answer(item[0]) for item in items] and stats.is_healthy and is_even


def stress(num: int, run_timeout_ms: float) -> Row:
    """Run everything at once and return what came of it."""
    recorders = {"thread": Recorder(num), "coroutine": AsyncRecorder(num)}
    start = time.monotonic()
    with serving(recorders, run_timeout_ms) as services:
        callers = start_callers(services, make_asks(num))
        figures = disturb(services, callers)
        figures["seconds"] = round(time.monotonic() - start, 1)
        tallies = [tally for _, tally in callers]
        works = {name: still_works_in_time(service) for name, service in services.items()}
        stats = {name: service.stats() for name, service in services.items()}
    numbers = [number for tally in tallies for number in tally.numbers]
    ends: Counter[tuple[str, str]] = sum((tally.ends for tally in tallies), Counter())
    return figures | {
        "num_requests": num,
        "num_lost": num - len(set(numbers)),
        "num_wrong": sum(count for (_, how), count in ends.items() if how == "wrong"),
        "num_duplicated": len(numbers) - len(set(numbers)) + sum(r.num_duplicates for r in recorders.values()),
        "num_good_failed_by_a_mate": sum(count for (_, how), count in ends.items() if how == "failed by a mate"),
        "num_killed_from_outside": sum(count for (_, how), count in ends.items() if how == "killed"),
        "works_at_the_end": works,
        "ends": {f"{kind}: {how}": count for (kind, how), count in sorted(ends.items())},
        "faults": [fault for tally in tallies for fault in tally.faults][:20],
        "services": {name: _figures(one.to_dict()) for name, one in stats.items()},
    }


def still_works_in_time(service: Batcher[Any, Any]) -> bool:
    """Ask in another thread: a service that hangs must not hang the report."""
    said: list[bool] = []
    thread = Thread(target=lambda: said.append(still_works(service)), daemon=True)
    thread.start()
    thread.join(STANDSTILL_SECONDS)
    return said == [True]


def _figures(stats: Row) -> Row:
    names = ("num_submitted", "num_answered", "num_failed", "num_shed", "num_cancelled", "num_calls", "num_batches")
    return {name: stats[name] for name in (*names, "num_ooms", "num_restarts", "num_abandoned", "max_tokens")}


def sleep_like_a_device(items: list[Item]) -> list[int]:
    """Take the time of the stub of serving.py; run out of memory halfway if an item never fits."""
    seconds = stub_seconds(len(items), max(item[2] for item in items))
    if any(item[1] == "never fits" for item in items):
        time.sleep(seconds / 2)
        raise MemoryError("it does not fit")
    time.sleep(seconds)
    return [answer(item[0]) for item in items]


async def throughput(batcher: Batcher[Any, Any], seconds: float, *, with_ooms: bool) -> float:
    """Return the good answers per second while 128 requests are open, with one that never fits per second or none."""
    end, num_answered = time.monotonic() + seconds, 0

    async def caller(place: int) -> None:
        nonlocal num_answered
        while time.monotonic() < end:
            assert await batcher.submit((place, "good", 32)) == answer(place)
            num_answered += 1

    async def spoil() -> None:
        for _ in range(int(seconds)):
            await asyncio.sleep(0.5)
            with contextlib.suppress(DoesNotFitError):
                await batcher.submit((0, "never fits", 32))
                raise AssertionError("an item that never fits was answered")
            await asyncio.sleep(0.5)

    await asyncio.gather(*map(caller, range(128)), *([spoil()] if with_ooms else []))
    return num_answered / seconds


def compare_throughput(num_turns: int, seconds: float) -> Row:
    """Take turns with and without items that run out of memory, on one batcher."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    with Batcher(sleep_like_a_device, length_of=length_of) as batcher:
        asyncio.run(throughput(batcher, 1, with_ooms=False))
        for turn in range(2 * num_turns):
            with_ooms = turn % 2 == 1
            rates[with_ooms].append(round(asyncio.run(throughput(batcher, seconds, with_ooms=with_ooms)), 1))
    ratios = [after / before for before, after in zip(rates[False], rates[True], strict=True)]
    share = statistics.median(ratios)
    return {"per_second_without": rates[False], "per_second_with": rates[True], "median_share": round(share, 3)}


def problems(row: Row) -> list[str]:
    """Return what must not be."""
    none = ("num_lost", "num_wrong", "num_duplicated", "num_good_failed_by_a_mate", "num_forks_wrong")
    found = [f"{name} is {row[name]}" for name in none if row[name]]
    found += [f"the {name} service no longer works" for name, works in row["works_at_the_end"].items() if not works]
    if row["num_killed_from_outside"] > row["num_kills"]:
        found.append("more requests were killed than processes")
    if row["out_of_memory"]["median_share"] < LEAST_SHARE:
        found.append(f"out of memory once per second leaves {row['out_of_memory']['median_share']} of the throughput")
    return found


def table(row: Row) -> str:
    lines = ["| | |", "|---|---:|"]
    names = [name for name, value in row.items() if isinstance(value, int | float)]
    lines += [f"| {name.removeprefix('num_').replace('_', ' ')} | {row[name]:,} |" for name in names]
    lines += [f"| {name} | {count:,} |" for name, count in row["ends"].items()]
    lines += [f"| {name} works at the end | {works} |" for name, works in row["works_at_the_end"].items()]
    lines += [f"| throughput with one item per second out of memory | {row['out_of_memory']['median_share']:.1%} |"]
    return "\n".join(lines)


def environment() -> Row:
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
        "cpu": processor_name(),
        "num_cpus": num_cores(),
        "platform": platform.platform(),
        "versions": versions_of("batchwright", "numpy", "pandas"),
        "callers": {"event loops": NUM_LOOPS, "threads": NUM_THREADS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200_000)
    parser.add_argument("--run-timeout-ms", type=float, default=2000.0, help="of a call; some items hang")
    parser.add_argument("--turns", type=int, default=5, help="of the throughput, each with and without")
    parser.add_argument("--turn-seconds", type=float, default=5.0)
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    row = stress(options.requests, options.run_timeout_ms)
    row["out_of_memory"] = compare_throughput(options.turns, options.turn_seconds)
    found = problems(row)
    print(table(row))
    print("\n".join([*row["faults"], *found]) or "nothing lost, wrong or given twice")
    options.output.write_text(json.dumps({"environment": environment(), "problems": found, **row}, indent=1) + "\n")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
