"""The machine of a run: its processor, the versions on it, and how many threads it uses."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path


def num_cores() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor_name() -> str:
    """Return what the processor calls itself, or "unknown"."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine() or "unknown"


def versions_of(*packages: str) -> dict[str, str | None]:
    """Return the version of Python and of each package; None for one that is not installed.

    >>> versions_of("no_such_package")["no_such_package"] is None
    True
    """
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use one thread inside the context: processes share the processors, and sums keep their order.

    >>> import torch
    >>> with one_thread():
    ...     torch.get_num_threads()
    1
    """
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
