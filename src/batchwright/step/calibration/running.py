"""calibrate: run a few batch shapes, measure them, and put everything back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim import Optimizer

from ..._checks import as_whole
from ..._lengths import as_shapes
from ..._progress import ProgressBar
from ...errors import ArgumentError, BudgetError, DoesNotFitError
from ...plan.budget import as_limit
from .._optimizers import step_of_zeros
from ..measuring._restoring import restored
from ..memory.monitor import MemoryMonitor
from ..oom import devices_of, drop_gradients, free_memory, is_out_of_memory
from .result import Calibration, Measurement, Shape
from .shapes import Explore, Strategy, in_turn

MIN_PROBES = 4
# The allocator cannot fill a device to the last byte: blocks of many sizes leave gaps.
USABLE = 0.9

Restorable: TypeAlias = "nn.Module | Optimizer | None"


def calibrate(
    run: Callable[[Shape], Any],
    shapes: npt.ArrayLike | Explore,
    *,
    restore: Restorable | Sequence[Restorable],
    max_bytes: float | None = None,
    repeats: int = 2,
    accumulate: bool = True,
    device: torch.device | str | None = None,
    monitor: MemoryMonitor | None = None,
    progress: bool = True,
    clock: Callable[[], float] = time.perf_counter,
) -> Calibration:
    """Measure the peak memory and the seconds of a few batch shapes, and fit models of both.

    Shapes run from the cheapest to the largest. Running out of memory ends the list, and so does a shape that is
    predicted over ``max_bytes``. Afterwards parameters, buffers, gradients, optimizer state, modes and random state are
    as before, to the bit, even if ``run`` raises; copies are kept in host memory. The optimizer's state is allocated
    first, so that the memory model counts it.

    Args:
        run: does one real forward and backward pass for a shape ``(num_items, padded length per axis)``.
        shapes: at least 4 different ones, ``(M, 1 + axes)``: two numbers of items, three lengths per axis, the longest
            lengths and a batch near the limit; see ``default_shapes``. Or ``growing_shapes(lengths)``, or any function
            of the limit in bytes (None on the CPU) that returns a generator. It yields a shape and is sent the
            measurement, None if memory ran out.
        restore: the model and the optimizer, ``(model, optimizer)``; only the model if nothing is trained.
        max_bytes: no shape predicted over this runs; None is 0.9 of what this process can have. Unused on the CPU.
        repeats: timed runs after the first; their median counts.
        accumulate: keep gradients between runs, as if several micro-batches formed an update; False drops them.
        device: where memory is measured; None is the device of the model.
        monitor: measures memory instead of the device, on the CPU too.
        progress: show a bar for more than 4 shapes.
        clock: returns seconds that never go back.

    Returns:
        ``.memory`` (None on the CPU), ``.time``, ``.errors`` of held-out shapes, and what was measured.

    >>> model = nn.Linear(4, 1)
    >>> def run(shape):
    ...     num_items, length = shape
    ...     model(torch.zeros(num_items, length, 4)).sum().backward()
    >>> found = calibrate(run, [(1, 8), (4, 8), (4, 32), (16, 32)], restore=(model, None))
    >>> found.memory is None, len(found.errors.time), model.weight.grad is None
    (True, 4, True)
    """
    explore, total = _strategy(shapes)
    modules, optimizers = _sort_out(restore)
    device = _one_device(modules) if device is None else torch.device(device)
    if monitor is None and device.type != "cpu":
        monitor = MemoryMonitor(device)
    if max_bytes is not None:
        max_bytes = as_limit("max_bytes", max_bytes)
    with restored(modules, optimizers):
        for optimizer in optimizers:
            step_of_zeros(optimizer)
        gradients = [] if accumulate else [parameter for module in modules for parameter in module.parameters()]
        prober = Prober(run, device, monitor, as_whole("repeats", repeats, least=1), gradients, clock)
        limit = None if monitor is None else int(monitor.total_bytes * USABLE if max_bytes is None else max_bytes)
        show = progress and (total is None or total > MIN_PROBES)
        with ProgressBar(label="calibrating", total=total, enabled=show) as bar:
            rows, stopped = _probe(prober, explore(limit), bar)
    free_memory([device])
    return Calibration.fit(rows, max_bytes=limit, stopped=stopped)


def _probe(prober: Prober, strategy: Strategy, bar: ProgressBar) -> tuple[list[Measurement], str | None]:
    """Measure the shapes that the strategy asks for; return the measurements, and why other shapes did not run."""
    rows: list[Measurement] = []
    row: Measurement | None = None
    try:
        shape = next(strategy)
        while True:
            row = prober.measure(shape)
            if row is not None:
                rows.append(row)
                bar.update()
            shape = strategy.send(row)
    except StopIteration as end:
        stopped: str | None = end.value
    if len(rows) < MIN_PROBES:
        problem = BudgetError if row is not None else DoesNotFitError
        raise problem(
            f"{stopped}, and only {len(rows)} smaller shapes fit; {MIN_PROBES} are needed: give smaller shapes, "
            "or more memory"
        )
    return rows, stopped


def _strategy(shapes: npt.ArrayLike | Explore) -> tuple[Explore, int | None]:
    """Return a function that decides on the next shape, and the number of shapes, None if it is not known."""
    if callable(shapes):
        return shapes, None
    probes = _ordered(shapes)
    return partial(in_turn, probes), len(probes)


def _ordered(shapes: npt.ArrayLike) -> list[Shape]:
    """Return the different shapes, the one with the fewest tokens first."""
    found = np.unique(as_shapes(shapes), axis=0)
    if len(found) < MIN_PROBES:
        raise ArgumentError(
            f"calibrate needs at least {MIN_PROBES} different shapes, got {len(found)}; "
            "vary the items and the lengths, see default_shapes"
        )
    tokens = found[:, 0] * found[:, 1:].sum(axis=1)
    order = np.lexsort((found[:, 1:].max(axis=1), tokens))  # with equal tokens the longer row costs more
    return [tuple(row) for row in found[order].tolist()]


def _sort_out(restore: Restorable | Sequence[Restorable]) -> tuple[list[nn.Module], list[Optimizer]]:
    given = list(restore) if isinstance(restore, list | tuple) else [restore]
    modules = [item for item in given if isinstance(item, nn.Module)]
    optimizers = [item for item in given if isinstance(item, Optimizer)]
    strange = [item for item in given if item is not None and not isinstance(item, nn.Module | Optimizer)]
    if strange or not modules:
        raise ArgumentError(f"restore must be (model, optimizer) or (model, None), got {restore!r}")
    return modules, optimizers


def _one_device(modules: list[nn.Module]) -> torch.device:
    found = sorted({device for module in modules for device in devices_of(module)}, key=str)
    if len(found) > 1:
        names = ", ".join(map(str, found))
        raise ArgumentError(f"the model lies on {names}; pass device=, the one that fills up first")
    return found[0] if found else torch.device("cpu")


@final
class Prober:
    """Runs one shape several times and measures it.

    Args:
        run: one forward and backward pass of a shape.
        device: is synchronized before and after each run.
        monitor: reads the peak; None measures only time.
        repeats: timed runs after the first.
        drop_gradients_of: parameters whose gradients are dropped before each run.
        clock: returns seconds that never go back.
    """

    def __init__(
        self,
        run: Callable[[Shape], Any],
        device: torch.device,
        monitor: MemoryMonitor | None,
        repeats: int,
        drop_gradients_of: list[nn.Parameter],
        clock: Callable[[], float],
    ) -> None:
        self._run, self._device, self._monitor = run, device, monitor
        self._repeats, self._drop_gradients_of, self._clock = repeats, drop_gradients_of, clock

    def measure(self, shape: Shape) -> Measurement | None:
        """Return what a shape takes, None if memory runs out."""
        try:
            return self._measure(shape)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        # Outside the except block the traceback is gone, and with it the activations that it held.
        free_memory([self._device])
        return None

    def _measure(self, shape: Shape) -> Measurement:
        if self._monitor is not None:
            self._monitor.reset_peak()
        first = self._seconds(shape)
        steady = [self._seconds(shape) for _ in range(self._repeats)]
        peak = None if self._monitor is None else self._monitor.peak_bytes
        return Measurement(shape, float(np.median(steady)), first, peak)

    def _seconds(self, shape: Shape) -> float:
        drop_gradients(self._drop_gradients_of)
        synchronize(self._device)
        start = self._clock()
        self._run(shape)
        synchronize(self._device)
        return max(self._clock() - start, 1e-9)  # a clock may be too coarse to see it


def synchronize(device: torch.device) -> None:
    """Wait until a device has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()
