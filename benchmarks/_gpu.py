"""The device a GPU benchmark runs on: its cap, its peak, and what a report says about it."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, final

# Shapes vary from step to step; growing segments keep the allocator from fragmenting. The same for every arm.
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from _live_bytes import LiveBytes
from torch._subclasses.fake_tensor import FakeTensorMode

from batchwright.step import MemoryMonitor

GIB = 2**30
Row = dict[str, Any]


@final
class Device:
    """A GPU with a cap on its memory, to stand for a smaller card; for a trial run the CPU, counting live tensors.

    Args:
        cap_bytes: the most memory this process may have.
        smoke: run tiny models on the CPU.
        counted: run models of full size on the CPU, with tensors that have a size but no data.
        cudnn_attention: leave cuDNN among the attention kernels, as PyTorch does.
    """

    def __init__(self, cap_bytes: float, *, smoke: bool, counted: bool = False, cudnn_attention: bool = False) -> None:
        self.cap_bytes = int(cap_bytes)
        self.is_small, self.is_counted, self.is_cpu = smoke, counted, smoke or counted
        self.name = "cpu" if self.is_cpu else "cuda"
        self._modes = contextlib.ExitStack()
        if self.is_cpu:
            torch.set_num_threads(1)
            self._live = LiveBytes(self.cap_bytes)
            self._fake = FakeTensorMode() if counted else contextlib.nullcontext()
            self.monitor = MemoryMonitor(source=self._live)
            return
        if not torch.cuda.is_available():
            raise SystemExit("no CUDA device; --smoke runs a tiny model on the CPU")
        torch.cuda.set_per_process_memory_fraction(self.cap_bytes / torch.cuda.get_device_properties(0).total_memory)
        torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)
        self.monitor = MemoryMonitor("cuda")

    def __enter__(self) -> Device:
        gc.freeze()  # what was imported need not be searched at every collection
        if self.is_cpu:
            self._modes.enter_context(self._fake)
            self._modes.enter_context(self._live)
        return self

    def __exit__(self, *error: object) -> None:
        self._modes.close()
        gc.unfreeze()

    def synchronize(self) -> None:
        if not self.is_cpu:
            torch.cuda.synchronize()

    @property
    def used_bytes(self) -> int:
        """Return the memory that tensors hold now."""
        return self._live.used_bytes if self.is_cpu else torch.cuda.memory_allocated()

    @property
    def num_retries(self) -> int:
        """Return how often the allocator gave its cached blocks back to find room, which stops the device."""
        return 0 if self.is_cpu else int(torch.cuda.memory_stats()["num_alloc_retries"])

    @property
    def num_ooms(self) -> int:
        """Return how often memory ran out."""
        return 0 if self.is_cpu else int(torch.cuda.memory_stats().get("num_ooms", 0))

    def free(self) -> None:
        """Give back what nothing refers to any more."""
        gc.collect()
        if not self.is_cpu:
            torch.cuda.empty_cache()

    def fits(self, call: Callable[[], Any]) -> bool:
        """Run something and say whether memory sufficed."""
        try:
            call()
        except torch.OutOfMemoryError:
            pass
        else:
            return True
        # Outside the except block, where the traceback no longer holds the activations.
        self.free()
        return False

    def peak(self, stepper_bytes: int = 0) -> Row:
        """Return the peak since it was reset, and its share of the cap.

        Args:
            stepper_bytes: the peak that a stepper reports. A replay takes memory from the pool of its graphs without
                a word to the allocator; the stepper's peak has the pool in it.
        """
        peak = max(self.monitor.peak_bytes, stepper_bytes)
        reserved = {} if self.is_cpu else {"reserved_gib": torch.cuda.max_memory_reserved() / GIB}
        return {"peak_gib": peak / GIB, "peak_of_cap": peak / self.cap_bytes, **reserved}

    def describe(self) -> Row:
        return {
            "device": platform.machine() if self.is_cpu else torch.cuda.get_device_name(),
            "cap_gib": self.cap_bytes / GIB,
            "allocator": os.environ["PYTORCH_CUDA_ALLOC_CONF"],
            "cudnn_attention": not self.is_cpu and torch.backends.cuda.cudnn_sdp_enabled(),
            "versions": {name: _version(name) for name in ("batchwright", "numpy", "torch", "transformers")},
            "python": platform.python_version(),
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }


def make_parser(doc: str | None, *, cap_gib: float) -> argparse.ArgumentParser:
    """Return a parser with the options that every GPU benchmark has."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=None, help="write the rows as JSON, after each of them")
    parser.add_argument("--cap-gib", type=float, default=cap_gib, help="cap of the allocator (default: %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU, to see that it runs")
    return parser


def write(path: Path | None, report: Row) -> None:
    """Write a report where one is wanted; after each row, so that what was measured is kept."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # A command that is killed here leaves the file as it was.
        unfinished = path.with_name(path.name + ".unfinished")
        unfinished.write_text(json.dumps(report, indent=1) + "\n")
        os.replace(unfinished, path)


def markdown(rows: Sequence[Row], columns: Sequence[tuple[str, str, str]]) -> str:
    """Return a table; a column is (title, key, format), and a row without the key has an empty cell."""
    lines = ["| " + " | ".join(title for title, *_ in columns) + " |", "| --- |" + " ---: |" * (len(columns) - 1)]
    for row in rows:
        cells = ["" if row.get(key) is None else format(row[key], form) for _, key, form in columns]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
