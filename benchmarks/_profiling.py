"""Where the seconds of a step go: kernels of the device, gaps between them, and what the host waits for."""

from __future__ import annotations

import statistics
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _gpu import Device, Row, markdown
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

NUM_STEPS = 3
NUM_TIMED = 10
MOST = 25
_MOST_GAPS = 8
_MS = 1e-3  # of a microsecond
# The first part of a name that fits decides.
KINDS = {
    "matrices": ("gemm", "nvjet", "cutlass", "cublas", "xmma", "aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("flash", "fmha", "attention", "attn"),
    "optimizer": ("multi_tensor", "fused_adam", "FusedAdam", "foreach"),
    "copies": ("Memcpy", "Memset", "copy_kernel", "direct_copy", "CatArray", "aten::copy_"),
    "softmax": ("softmax", "SoftMax", "nll_loss"),
    "reductions": ("reduce_kernel", "aten::sum", "aten::mean"),
    "elementwise": ("elementwise", "aten::mul", "aten::add"),
}


class Kernel(NamedTuple):
    """Something that ran on the device, in microseconds."""

    name: str
    start: float
    end: float


def profile_steps(step: Callable[[], Any], device: Device) -> Row:
    """Return the milliseconds of a step, its kernels, the gaps of the device and the waits of the host.

    Args:
        step: runs a step; it has run often enough to be warm.
        device: that it runs on.
    """
    found = {**_timed(step, device), "waits": _waits(step, device)}
    activities = [ProfilerActivity.CPU, *([] if device.is_cpu else [ProfilerActivity.CUDA])]
    device.synchronize()
    with profile(activities=activities) as profiler:
        for _ in range(NUM_STEPS):
            step()
        device.synchronize()
    events = list(profiler.events() or ())
    kernels = _kernels(events, device)
    return {**found, **summary_of(kernels, NUM_STEPS), "host": _host(events)}


def _timed(step: Callable[[], Any], device: Device) -> Row:
    """Return the milliseconds of steps without a profiler: on the host until the call returns, and on the device."""
    device.synchronize()
    calls, start = [], time.perf_counter()
    for _ in range(NUM_TIMED):
        before = time.perf_counter()
        step()
        calls.append(time.perf_counter() - before)
    device.synchronize()
    alone = []
    for _ in range(NUM_STEPS):
        before = time.perf_counter()
        step()
        device.synchronize()
        alone.append(time.perf_counter() - before)
    whole = (time.perf_counter() - start - sum(alone)) / NUM_TIMED
    return {
        "ms": 1e3 * whole, "call_ms": 1e3 * statistics.median(calls),
        "alone_ms": 1e3 * statistics.median(alone), "profiled_steps": NUM_STEPS,
    }  # fmt: skip


def _waits(step: Callable[[], Any], device: Device) -> list[str]:
    """Return where the host waits for the device in a step, as ``file:line``, each with its count."""
    if device.is_cpu:
        return []
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    places = [f"{'/'.join(Path(one.filename).parts[-2:])}:{one.lineno}" for one in caught]
    return [f"{num} x {place}" for place, num in Counter(places).most_common()]


def _kernels(events: Iterable[Any], device: Device) -> list[Kernel]:
    """Return what ran on the device; on the CPU, the operators that call no other."""
    found = []
    for event in events:
        is_own = event.device_type == (DeviceType.CPU if device.is_cpu else DeviceType.CUDA)
        is_mark = getattr(event, "is_user_annotation", False) or event.name.startswith(("ProfilerStep", "Optimizer."))
        if is_own and not is_mark and not (device.is_cpu and event.cpu_children):
            found.append(Kernel(event.name, event.time_range.start, event.time_range.end))
    return sorted(found, key=lambda kernel: kernel.start)


def summary_of(kernels: list[Kernel], num_steps: int) -> Row:
    """Return milliseconds per step: busy and idle, by kind, of the longest kernels and gaps.

    >>> found = summary_of([Kernel("gemm", 0, 3000), Kernel("copy_kernel", 5000, 6000)], 1)
    >>> found["busy_ms"], found["idle_ms"], found["kinds"]["matrices"]
    (4.0, 2.0, 3.0)
    """
    seconds: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    gaps: list[tuple[float, str, str]] = []
    busy, end, last = 0.0, None, ""
    for name, start, stop in kernels:
        seconds[name] += stop - start
        counts[name] += 1
        kinds[kind_of(name)] += stop - start
        if end is not None and start > end:
            gaps.append((start - end, last, name))
        busy += max(0.0, stop - max(start, start if end is None else end))
        end, last = (stop, name) if end is None or stop > end else (end, last)
    span = 0.0 if end is None else end - kernels[0].start
    rows = [
        {"name": name[:160], "kind": kind_of(name), "ms": total * _MS / num_steps, "count": counts[name] / num_steps}
        for name, total in seconds.most_common(MOST)
    ]
    longest = [{"ms": gap * _MS, "after": before[:80], "before": name[:80]} for gap, before, name in sorted(gaps)[::-1]]
    return {
        "busy_ms": busy * _MS / num_steps,
        "idle_ms": (span - busy) * _MS / num_steps,
        "num_kernels": len(kernels) / num_steps,
        "kinds": {kind: total * _MS / num_steps for kind, total in kinds.most_common()},
        "kernels": rows,
        "gaps": longest[:_MOST_GAPS],
    }


def kind_of(name: str) -> str:
    """Return what a kernel computes, by its name."""
    return next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "others")


def _host(events: Iterable[Any]) -> list[Row]:
    """Return the operators and calls that take most of the host's own time."""
    spent: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for event in events:
        if event.device_type == DeviceType.CPU:
            spent[event.name] += event.self_cpu_time_total
            counts[event.name] += 1
    return [
        {"name": name[:160], "ms": total * _MS / NUM_STEPS, "count": counts[name] / NUM_STEPS}
        for name, total in spent.most_common(MOST)
    ]


def render_profile(row: Row) -> str:
    """Return a profile as text."""
    kinds = ", ".join(f"{kind} {ms:.1f}" for kind, ms in row["kinds"].items())
    lines = [
        f"{row.get('model', '')} {row.get('arm', '')}: {row['ms']:.1f} ms a step, {row['call_ms']:.1f} in the call, "
        f"{row['alone_ms']:.1f} from an idle device",
        f"device busy {row['busy_ms']:.1f} ms, idle {row['idle_ms']:.1f}, {row['num_kernels']:.0f} kernels; {kinds}",
        "the host waits at: " + (", ".join(row["waits"]) or "nothing"),
        "",
        markdown(row["kernels"], (("kernel", "name", ""), ("ms", "ms", ".2f"), ("count", "count", ".0f"))),
    ]
    return "\n".join(lines)
