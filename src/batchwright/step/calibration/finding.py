"""How large a batch should be, by running some: ``find_budget`` for training, ``auto_batch`` for inference."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, final

import numpy.typing as npt
import torch
from torch import nn

from ..._checks import as_number, as_whole
from ..._lengths import as_lengths
from ..._progress import ProgressBar
from ..._types import IntArray
from ...errors import DoesNotFitError
from ...plan import Budget, MaxItems, MaxTokens
from .._optimizers import step_of_zeros
from ..measuring._restoring import restored
from ..memory.monitor import MemoryMonitor
from ..oom import drop_gradients, free_memory, is_out_of_memory
from ._checking import planned_checks
from ._searching import Row as Row
from ._searching import Search, probe_rows
from .found import FoundBudget
from .result import Measurement, Shape
from .running import USABLE, synchronize

# Steps are timed until they have taken this long together, but this often at most.
_MOST_REPEATS, _ENOUGH_SECONDS = 5, 0.25
# On a CPU other programs take their turns: a step of 2 ms may take 500, so one run of up to a second says nothing.
_LEAST_REPEATS_CPU, _ENOUGH_SECONDS_CPU = 3, 1.0


# Where memory is not measured, batches stop where throughput does, and early: on a CPU, running out ends the process.
_LEAST_GAIN = 1.05
_MOST_ITEMS, _MOST_ITEMS_UNMEASURED = 1024, 64
_MOST_SECONDS = 10.0


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
    clock: Callable[[], float] | None = None,
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
        clock: returns seconds that never go back; None reads the time, and on a CPU that of the process too.
    """
    lengths = as_lengths(lengths)
    modules, optimizers = list(modules), list(optimizers)
    limit = limit_bytes(monitor, reserved_bytes, agreement)
    search = Search(probe_rows(lengths), limit, wants_knee=wants_knee, most_items=max(8, len(lengths)))
    trained = [parameter for module in modules for parameter in module.parameters()]
    with restored(modules, optimizers), ProgressBar(label="finding a budget", enabled=progress) as bar:
        agreement.settle(_failure_of_states(optimizers))
        clocks = _usual_clocks(device) if clock is None else (clock,)
        prober = _Prober(probe, device, monitor, [] if accumulates else trained, agreement, clocks)
        for row, num in search.shapes():
            found = prober.measure((num, *row.lengths), row.examples(num, lengths))
            search.note((num, *row.lengths), found)
            bar.update()
        for shape, examples in planned_checks(search, lengths):
            search.note(shape, prober.measure(shape, examples))
            bar.update()
    free_memory([device])
    return search.budget()


def _usual_clocks(device: torch.device) -> tuple[Callable[[], float], ...]:
    """Return clocks of which the least counts.

    A CPU that other programs use too makes long steps wait most, so larger batches would look slow. Such a step takes
    less time of the processor than it takes; one that several threads share takes more.
    """
    return (time.perf_counter, time.process_time) if device.type == "cpu" else (time.perf_counter,)


def _failure_of_states(optimizers: list[Any]) -> Exception | None:
    """Allocate the states of optimizers; return the error, which all ranks raise: one may have no room for them."""
    try:
        for optimizer in optimizers:
            step_of_zeros(optimizer)
    except Exception as error:
        return error
    return None


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
        clocks: Sequence[Callable[[], float]],
    ) -> None:
        self._probe, self._device, self._monitor = probe, device, monitor
        self._drop_gradients_of, self._agreement, self._clocks = drop_gradients_of, agreement, clocks

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
            while self._wants_more(steady):
                steady.append(self._seconds(batch))
            peak = None if self._monitor is None else self._monitor.peak_bytes
            return Measurement(shape, min(steady), first, peak), None
        except Exception as error:
            # Without its traceback, which holds activations.
            is_oom = is_out_of_memory(error) or isinstance(error, DoesNotFitError)
            return None, MemoryError() if is_oom else error

    def _wants_more(self, steady: list[float]) -> bool:
        """Say whether to time a step once more: short steps are noisy, and cheap."""
        if self._device.type == "cpu" and len(steady) < _LEAST_REPEATS_CPU:
            return sum(steady) < _ENOUGH_SECONDS_CPU
        return len(steady) < _MOST_REPEATS and sum(steady) < _ENOUGH_SECONDS

    def _seconds(self, batch: Any) -> float:
        drop_gradients(self._drop_gradients_of)
        return _seconds(lambda: self._probe.run(batch), self._device, self._clocks)


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
    clock: Callable[[], float] | None = None,
) -> Budget:
    """Do what ``auto_batch`` does, on several ranks that agree; ``fn`` computes in this process."""
    longest = tuple(int(length) for length in as_lengths(lengths).max(axis=0))
    margin = as_number("margin", margin, least=0, below=1)
    place = _default_device() if device is None else torch.device(device)
    if memory is None and place.type != "cpu":
        memory = MemoryMonitor(place)
    clocks = _usual_clocks(place) if clock is None else (clock,)
    usual = _MOST_ITEMS_UNMEASURED if memory is None else _MOST_ITEMS
    most = usual if max_items is None else as_whole("max_items", max_items, least=1)
    num, is_out, readings = 0, False, dict[int, _Reading]()
    while num < most:
        wanted = min(most, max(1, 2 * num))
        if num and not _is_worthwhile(readings, num, wanted, margin, memory is not None):
            break
        found = _read(fn, (wanted, *longest), place, memory, clocks, agreement)
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
    if has_memory:  # at one length, what a batch takes grows in proportion to its items
        return now.used + (now.peak - now.used) * wanted / num <= (1 - margin) * now.total
    before = readings.get(num // 2)
    return before is None or num / now.seconds >= _LEAST_GAIN * (num // 2) / before.seconds


def _read(
    fn: Callable[[Shape], Any],
    shape: Shape,
    device: torch.device,
    memory: MemoryMonitor | None,
    clocks: Sequence[Callable[[], float]],
    agreement: Agreement,
) -> _Reading | None:
    """Return what a batch takes on the slowest and fullest rank, None if memory runs out on one of them."""
    numbers, failure, is_oom = [0.0, 0.0, 0.0, 0.0], None, False
    if memory is not None:
        memory.reset_peak()
        numbers[2], numbers[3] = float(memory.used_bytes), -float(memory.total_bytes)
    try:
        numbers[0] = min(_seconds(partial(fn, shape), device, clocks) for _ in range(2))
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


def _seconds(run: Callable[[], Any], device: torch.device, clocks: Sequence[Callable[[], float]]) -> float:
    synchronize(device)
    starts = [clock() for clock in clocks]
    run()
    synchronize(device)
    took = min(clock() - start for clock, start in zip(clocks, starts, strict=True))
    return max(took, 1e-9)  # a clock may be too coarse to see it


def _default_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
