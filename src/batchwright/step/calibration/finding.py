"""find_budget: run a few batches of real examples as they are trained on, and find how large a batch should be."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

from ..._lengths import as_lengths
from ..._progress import ProgressBar
from ..._types import IntArray
from ...errors import DoesNotFitError
from .._optimizers import step_of_zeros
from ..measuring._restoring import restored
from ..memory.monitor import MemoryMonitor
from ..oom import drop_gradients, free_memory, is_out_of_memory
from .found import FoundBudget
from .result import Measurement, Shape
from .running import USABLE, synchronize
from .searching import Search, probe_rows

# Steps are timed until they have taken so long together, but so many at most.
_MOST_REPEATS, _ENOUGH_SECONDS = 5, 0.25


class Probe(ABC):
    """Runs batches of examples as training does."""

    @abstractmethod
    def load(self, indices: list[int]) -> Any:
        """Return the batch of some examples; an error here is one of the data, and is raised."""

    def begin(self, batch: Any) -> None:  # noqa: B027  # many have nothing to do here
        """Get ready to run a batch. The only place where ranks may wait for each other: all raise, or none."""

    @abstractmethod
    def run(self, batch: Any) -> Any:
        """Run forward and backward."""


@final
@dataclass(frozen=True)
class Agreement:
    """How ranks agree; both functions are collectives.

    Attributes:
        largest: returns the largest of each value over all ranks.
        settle: raises on all ranks if one of them has an error.
    """

    largest: Callable[[list[float]], list[float]]
    settle: Callable[[Exception | None], None]


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error


ALONE = Agreement(list, _raise)


def find_budget(
    probe: Probe,
    lengths: IntArray,
    *,
    modules: Iterable[nn.Module],
    optimizers: Iterable[Any],
    device: torch.device,
    monitor: MemoryMonitor | None,
    wants_knee: bool = True,
    accumulates: bool = False,
    reserved_bytes: int = 0,
    agreement: Agreement = ALONE,
    progress: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> FoundBudget:
    """Measure a few batches of real examples, and find the budget; everything is put back, to the bit.

    Args:
        probe: loads and runs batches.
        lengths: of the examples, as padded, ``(N, axes)``.
        modules: are put back.
        optimizers: their state is allocated first, and put back.
        device: that batches run on.
        monitor: reads memory; None does not limit it.
        wants_knee: stop where throughput does. Without a monitor it always does.
        accumulates: several micro-batches make an update, so gradients are there while a batch runs.
        reserved_bytes: what training needs besides, e.g. for what ranks send.
        agreement: of ranks, which all measure the same batches.
        progress: show a bar.
        clock: returns seconds that never go back.
    """
    lengths = as_lengths(lengths)
    modules, optimizers = list(modules), list(optimizers)
    limit = limit_bytes(monitor, reserved_bytes, agreement)
    search = Search(probe_rows(lengths), limit, wants_knee=wants_knee, most_items=max(8, len(lengths)))
    trained = [parameter for module in modules for parameter in module.parameters()]
    with restored(modules, optimizers), ProgressBar(label="finding a budget", enabled=progress) as bar:
        for optimizer in optimizers:
            step_of_zeros(optimizer)
        prober = _Prober(probe, device, monitor, [] if accumulates else trained, agreement, clock)
        for row, num in search.shapes():
            found = prober.measure((num, *row.lengths), row.examples(num, lengths))
            search.note((num, *row.lengths), found)
            bar.update()
    free_memory([device])
    return search.budget()


def limit_bytes(monitor: MemoryMonitor | None, reserved_bytes: int, agreement: Agreement) -> int | None:
    """Return the memory to plan for, the least of all ranks: 0.9 of what this process can have. A collective."""
    mine = -1.0 if monitor is None else USABLE * monitor.total_bytes - reserved_bytes
    (least,) = agreement.largest([-mine])
    return None if monitor is None else int(max(1.0, -least))


@final
class _Prober:
    """Measures batches, the same on all ranks."""

    def __init__(
        self,
        probe: Probe,
        device: torch.device,
        monitor: MemoryMonitor | None,
        drop_gradients_of: list[nn.Parameter],
        agreement: Agreement,
        clock: Callable[[], float],
    ) -> None:
        self._probe, self._device, self._monitor = probe, device, monitor
        self._drop_gradients_of, self._agreement, self._clock = drop_gradients_of, agreement, clock

    def measure(self, shape: Shape, indices: list[int]) -> Measurement | None:
        """Return what a batch takes on the slowest and the fullest rank, None if memory runs out on one of them."""
        batch = self._load(indices)
        found, failure = self._attempt(shape, batch)
        is_oom = failure is not None and is_out_of_memory(failure)
        error = None if is_oom else failure
        numbers = [0.0, 0.0, -1.0] if found is None else [found.seconds, found.first_visit_seconds, found.peak_bytes]
        peaks = [-1.0 if number is None else float(number) for number in numbers]
        ooms, errors, seconds, first, peak = self._agreement.largest([float(is_oom), float(error is not None), *peaks])
        if errors:
            self._agreement.settle(error)
        if ooms:
            free_memory([self._device])
            return None
        return Measurement(shape, seconds, first, None if self._monitor is None else int(peak))

    def _load(self, indices: list[int]) -> Any:
        batch, failure = None, None
        try:
            batch = self._probe.load(indices)
        except Exception as error:  # raised on all ranks
            failure = error
        self._agreement.settle(failure)
        return batch

    def _attempt(self, shape: Shape, batch: Any) -> tuple[Measurement | None, Exception | None]:
        try:
            self._probe.begin(batch)
            if self._monitor is not None:
                self._monitor.reset_peak()
            first = self._seconds(batch)
            steady = [self._seconds(batch)]
            # Short steps are noisy, and cheap.
            while len(steady) < _MOST_REPEATS and sum(steady) < _ENOUGH_SECONDS:
                steady.append(self._seconds(batch))
            peak = None if self._monitor is None else self._monitor.peak_bytes
            return Measurement(shape, min(steady), first, peak), None
        except Exception as error:
            # Without its traceback, which holds activations.
            is_oom = is_out_of_memory(error) or isinstance(error, DoesNotFitError)
            return None, MemoryError() if is_oom else error

    def _seconds(self, batch: Any) -> float:
        drop_gradients(self._drop_gradients_of)
        synchronize(self._device)
        start = self._clock()
        self._probe.run(batch)
        synchronize(self._device)
        return max(self._clock() - start, 1e-9)  # a clock may be too coarse to see it
