"""Time, memory and worth of one arm, in a process of its own."""

from __future__ import annotations

import ctypes
import gc
import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from _arms import ARMS
from _distributions import DISTRIBUTIONS
from _metrics import summarize

_SELF = Path("/proc/self")


@final
@dataclass(frozen=True)
class Task:
    """One arm on one distribution.

    Args:
        arm: a name of ``ARMS``.
        distribution: a name of ``DISTRIBUTIONS``.
        num_examples: how many lengths to plan; the arm may be given fewer.
    """

    arm: str
    distribution: str
    num_examples: int


@final
class Session:
    """One arm in a process of its own: one plan for memory, then a timed plan whenever it is the arm's turn."""

    def __init__(self, task: Task) -> None:
        arm, self._distribution = ARMS[task.arm], DISTRIBUTIONS[task.distribution]
        self._all = self._distribution.lengths(task.num_examples)
        self._sorted = np.ascontiguousarray(self._all.reshape(len(self._all), -1)[:, 0])
        self._lengths = self._all[: arm.num_examples(task.distribution, task.num_examples)]
        # A short plan loads what is loaded lazily and compiles what is compiled, but leaves little memory to reuse.
        arm.make(self._lengths[: arm.warm_up_examples], self._distribution.budget).plan(0)
        self._planner = arm.make(self._lengths, self._distribution.budget)
        self._first, self._peak_bytes, self._method = _peak_growth(lambda: self._planner.plan(0))
        self._second: Any = None
        self._times: list[dict[str, float]] = []

    def take_turn(self) -> float:
        """Time an argsort and the plan of the next epoch, one after the other; return the seconds of the plan."""
        began = time.monotonic()  # one clock for all processes
        argsort = _seconds(lambda: np.argsort(self._sorted, kind="stable"))[1]
        cpu = time.process_time()
        result, seconds = _seconds(lambda: self._planner.plan(len(self._times) + 1))
        cpu = time.process_time() - cpu
        if self._second is None:
            self._second = result
        self._times.append({"began": began, "plan": seconds, "cpu": cpu, "argsort": argsort})
        return seconds

    def row(self) -> dict[str, Any]:
        """Return all figures: times over the turns, memory, and the worth of the first two epochs."""
        planner = self._planner
        epochs = planner.batches(self._first), planner.next_epoch(self._first, self._second)
        return {
            "num_examples": len(self._lengths),
            **timing(self._times, share=len(self._lengths) / len(self._all)),
            "peak_bytes_per_example": self._peak_bytes / len(self._lengths),
            "peak_method": self._method,
            **summarize(*epochs, self._lengths, self._distribution.budget),
        }


def timing(times: list[dict[str, float]], *, share: float) -> dict[str, Any]:
    """Return medians and spread; a ratio divides the plan by the argsort of the same turn, per example.

    Args:
        times: when each turn began, the seconds of the plan, of its processor and of the argsort.
        share: how many of the sorted examples were planned.

    >>> times = [{"began": 0, "plan": 2, "cpu": 2, "argsort": 1}, {"began": 7, "plan": 9, "cpu": 8, "argsort": 3}]
    >>> found = timing(times, share=0.5)
    >>> found["argsort_ratio"], found["argsort_ratio_min"], found["argsort_ratio_max"], found["plan_seconds"]
    (5.0, 4.0, 6.0, 5.5)
    """
    columns = {name: [turn[name] for turn in times] for name in ("began", "plan", "cpu", "argsort")}
    ratios = [turn["plan"] / turn["argsort"] / share for turn in times]
    return {
        "plan_seconds": statistics.median(columns["plan"]),
        "plan_seconds_all": columns["plan"],
        "turns_began": columns["began"],
        "plan_cpu_seconds": statistics.median(columns["cpu"]),
        "argsort_seconds": statistics.median(columns["argsort"]),
        "argsort_seconds_all": columns["argsort"],
        "argsort_ratio": statistics.median(ratios),
        "argsort_ratio_min": min(ratios),
        "argsort_ratio_max": max(ratios),
    }


def _seconds(call: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    result = call()
    return result, time.perf_counter() - began


def _peak_growth(call: Callable[[], Any]) -> tuple[Any, int, str]:
    """Return the result of a call, how far resident memory rose above its start, and how it was read."""
    gc.collect()
    gc.freeze()  # what was built beforehand must not slow the arm's own garbage collection
    if sys.platform == "linux":
        ctypes.CDLL(None).malloc_trim(0)  # freed memory that is still held would hide the growth
    try:
        (_SELF / "clear_refs").write_text("5")  # the peak starts again from here
        before, method = _status_bytes("VmRSS"), "VmHWM"
    except OSError:
        before, method = _max_rss_bytes(), "ru_maxrss"
    result = call()
    after = _status_bytes("VmHWM") if method == "VmHWM" else _max_rss_bytes()
    return result, max(0, after - before), method


def _status_bytes(field: str) -> int:
    for line in (_SELF / "status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"{field} is not in /proc/self/status")


def _max_rss_bytes() -> int:
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
