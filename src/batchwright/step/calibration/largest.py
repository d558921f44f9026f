"""auto_batch: the largest batch that runs without a backward pass, found by doubling."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy.typing as npt
import torch

from ..._checks import as_number, as_whole
from ..._lengths import as_lengths
from ...errors import DoesNotFitError
from ...plan import Budget, MaxItems, MaxTokens
from ..memory.monitor import MemoryMonitor
from ..oom import free_memory, is_out_of_memory
from .finding import ALONE, Agreement
from .result import Shape
from .running import synchronize

# Where memory is not measured, batches stop where throughput does, and early: on a CPU, running out ends the process.
_LEAST_GAIN = 1.05
_MOST_ITEMS, _MOST_ITEMS_UNMEASURED = 1024, 64
_MOST_SECONDS = 10.0


class _Reading(NamedTuple):
    seconds: float
    peak: float
    used: float
    total: float


def auto_batch(
    fn: Callable[[Shape], Any],
    lengths: npt.ArrayLike,
    *,
    max_items: int | None = None,
    margin: float = 0.1,
    memory: MemoryMonitor | None = None,
    device: torch.device | str | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Budget:
    """Find the largest batches that a function runs, for inference: evaluation, scoring, embedding.

    The longest examples run in batches of 1, 2, 4 and so on. The batch that runs out of memory is halved: the one
    before it is the result. If memory is measured, a batch that would not fit, by what the last one took, does not run
    at all. Elsewhere batches stop growing where throughput does. Examples that are shorter run with as many tokens.

    Args:
        fn: runs a batch of shape ``(num_items, padded length per axis)``, without gradients.
        lengths: of the examples, ``(N,)`` or ``(N, axes)``.
        max_items: the most examples; None is 1024, or 64 where memory is not measured.
        margin: the share of memory that is left free, and of the tokens that ran out of it.
        memory: measures memory; None takes that of ``device``, but not of a CPU.
        device: where ``fn`` runs; None is the accelerator that torch finds, else the CPU.
        clock: returns seconds that never go back.

    Returns:
        A budget for ``plan_batches`` and ``eval_budget``; ``budget.max_items([[512]])`` is the number at a length.

    Raises:
        DoesNotFitError: not even one of the longest examples runs.

    >>> from batchwright.testing import FakeMemory
    >>> device = FakeMemory(1000, used_bytes=100)
    >>> budget = auto_batch(lambda shape: device.run_batch(*shape), [3, 7, 40], memory=MemoryMonitor(source=device))
    >>> budget
    MaxTokens(640) & MaxItems(1024)
    """
    return largest_batch(
        fn, lengths, max_items=max_items, margin=margin, memory=memory, device=device, clock=clock, agreement=ALONE
    )


def largest_batch(
    fn: Callable[[Shape], Any],
    lengths: npt.ArrayLike,
    *,
    agreement: Agreement,
    max_items: int | None = None,
    margin: float = 0.1,
    memory: MemoryMonitor | None = None,
    device: torch.device | str | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Budget:
    """Do what ``auto_batch`` does, on several ranks that agree."""
    longest = tuple(int(length) for length in as_lengths(lengths).max(axis=0))
    margin = as_number("margin", margin, least=0, below=1)
    place = _default_device() if device is None else torch.device(device)
    if memory is None and place.type != "cpu":
        memory = MemoryMonitor(place)
    usual = _MOST_ITEMS_UNMEASURED if memory is None else _MOST_ITEMS
    most = usual if max_items is None else as_whole("max_items", max_items, least=1)
    num, is_out, readings = 0, False, dict[int, _Reading]()
    while num < most:
        wanted = min(most, max(1, 2 * num))
        if num and not _is_worthwhile(readings, num, wanted, margin, memory is not None):
            break
        found = _read(fn, (wanted, *longest), place, memory, clock, agreement)
        if found is None:
            is_out = True
            break
        readings[wanted], num = found, wanted
    if num == 0:
        raise DoesNotFitError(
            f"not even one example of length {longest if len(longest) > 1 else longest[0]} runs; shorten it, use a "
            "smaller type of numbers, or give more memory"
        )
    tokens = num * sum(longest)
    # What ran just below the limit may not run again.
    tokens = max(sum(longest), int(tokens * (1 - margin))) if is_out else tokens
    return MaxTokens(tokens) & MaxItems(most)


def _is_worthwhile(readings: dict[int, _Reading], num: int, wanted: int, margin: float, has_memory: bool) -> bool:
    """Say whether a larger batch is predicted to fit, or else to be faster."""
    now = readings[num]
    if sum(reading.seconds for reading in readings.values()) * 2 > _MOST_SECONDS:
        return False
    if has_memory:
        return now.used + (now.peak - now.used) * wanted / num <= (1 - margin) * now.total
    before = readings.get(num // 2)
    return before is None or num / now.seconds >= _LEAST_GAIN * (num // 2) / before.seconds


def _read(
    fn: Callable[[Shape], Any],
    shape: Shape,
    device: torch.device,
    memory: MemoryMonitor | None,
    clock: Callable[[], float],
    agreement: Agreement,
) -> _Reading | None:
    """Return what a batch takes on the slowest and fullest rank, None if memory runs out on one of them."""
    numbers, failure, is_oom = [0.0, 0.0, 0.0, 0.0], None, False
    if memory is not None:
        memory.reset_peak()
        numbers[2], numbers[3] = float(memory.used_bytes), -float(memory.total_bytes)
    try:
        numbers[0] = min(_seconds(fn, shape, device, clock) for _ in range(2))
        numbers[1] = 0.0 if memory is None else float(memory.peak_bytes)
    except Exception as error:
        is_oom = is_out_of_memory(error)
        failure = None if is_oom else error
    ooms, errors, seconds, peak, used, total = agreement.largest([float(is_oom), float(failure is not None), *numbers])
    if errors:
        agreement.settle(failure)
    if ooms:
        free_memory([device])
        return None
    return _Reading(seconds, peak, used, -total)


def _seconds(fn: Callable[[Shape], Any], shape: Shape, device: torch.device, clock: Callable[[], float]) -> float:
    synchronize(device)
    start = clock()
    fn(shape)
    synchronize(device)
    return max(clock() - start, 1e-9)


def _default_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
