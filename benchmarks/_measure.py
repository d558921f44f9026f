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
from _arm import Planner
from _arms import ARMS
from _distributions import DISTRIBUTIONS, IntArray
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
        repeats: how often the plan is timed.
        max_seconds: no further repeat is begun after so much time; at least one is done.
    """

    arm: str
    distribution: str
    num_examples: int
    repeats: int
    max_seconds: float


def measure(task: Task) -> dict[str, Any]:
    """Plan once for memory, then again for time, and judge the first two epochs."""
    arm, distribution = ARMS[task.arm], DISTRIBUTIONS[task.distribution]
    lengths = distribution.lengths(arm.num_examples(task.distribution, task.num_examples))
    # A short plan loads what is loaded lazily and compiles what is compiled, but leaves little memory to reuse.
    arm.make(lengths[: arm.warm_up_examples], distribution.budget).plan(0)
    planner = arm.make(lengths, distribution.budget)
    first, peak_bytes, method = _peak_growth(lambda: planner.plan(0))
    second, timing = _time(planner, lengths, task)
    epochs = planner.batches(first), planner.next_epoch(first, second)
    return {
        "num_examples": len(lengths),
        **timing,
        "peak_bytes_per_example": peak_bytes / len(lengths),
        "peak_method": method,
        **summarize(*epochs, lengths, distribution.budget),
    }


def _time(planner: Planner, lengths: IntArray, task: Task) -> tuple[Any, dict[str, Any]]:
    """Time the plan and a stable argsort of the same lengths in turn; return the plan of epoch 1."""
    plan_seconds, cpu_seconds, argsort_seconds = [], [], []
    began, second = time.perf_counter(), None
    for epoch in range(1, task.repeats + 1):
        argsort_seconds.append(_seconds(lambda: np.argsort(lengths, kind="stable"))[1])
        cpu = time.process_time()
        result, seconds = _seconds(lambda epoch=epoch: planner.plan(epoch))  # type: ignore[misc]
        cpu_seconds.append(time.process_time() - cpu)
        plan_seconds.append(seconds)
        second = result if epoch == 1 else second
        del result
        if time.perf_counter() - began > task.max_seconds:
            break
    seconds, argsort = statistics.median(plan_seconds), statistics.median(argsort_seconds)
    return second, {
        "plan_seconds": seconds,
        "plan_seconds_all": plan_seconds,
        "plan_cpu_seconds": statistics.median(cpu_seconds),
        "argsort_seconds": argsort,
        "argsort_seconds_all": argsort_seconds,
        "argsort_ratio": seconds / argsort,
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
