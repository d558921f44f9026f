"""Measure the machine: attention on known and new shapes, and steps from small to large."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import accumulate, takewhile
from statistics import median
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..._machine import one_thread
from ..._progress import ProgressBar
from ...errors import DoesNotFitError
from ...step.calibration.running import Prober
from .machine import clock_for, look_at, wall_per_cpu
from .records import Attention, Effort, Findings, Launch, LaunchRow, Load, Visits, effort_for


def examine(device: torch.device | str, *, quick: bool = False, progress: bool = True) -> Findings:
    """Measure a device: attention kernels with new and known shapes, and training steps of many sizes.

    The random state stays as it was. A CPU is measured with one thread, in processor time: on shared cores, several
    threads mostly wait for each other, and the time on the wall counts what other processes do.

    Args:
        device: what to measure.
        quick: measure fewer shapes and sizes.
        progress: show a progress bar.

    Returns:
        What was measured; ``advise`` says what it means.
    """
    chosen = torch.device(device)
    machine = look_at(chosen)
    effort = effort_for(machine, quick=quick)
    total = len(BACKENDS) + len(sizes(effort)) + effort.rounds
    devices = [chosen] if chosen.type == "cuda" else []
    bar = ProgressBar(label="measuring", total=total, enabled=progress)
    with torch.random.fork_rng(devices), one_thread(), bar:
        attention, waits = [], [wall_per_cpu()]
        for backend in BACKENDS:
            bar.doing(f"attention: {backend}")
            attention.append(measure_attention(backend, chosen, effort))
            bar.update()
        waits.append(wall_per_cpu())
        bar.doing("steps from small to large")
        launch = measure_launch(chosen, effort, done=bar.update)
        waits.append(wall_per_cpu())
        bar.update(total - bar.done)  # sizes that took too long or did not fit were left out
    load = Load(wall_per_cpu=median(waits), average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None)
    return Findings(machine=machine, attention=tuple(attention), launch=launch, load=load)


_BACKENDS: dict[str, SDPBackend | None] = {
    "default": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
BACKENDS = tuple(_BACKENDS)

_NUM_ITEMS = 8
_HEAD_WIDTH = 64
_SHORTEST = 64


def measure_attention(
    backend: str,
    device: torch.device,
    effort: Effort,
    *,
    clock: Callable[[], float] | None = None,
) -> Attention:
    """Time steps through a stack of attention layers with a new shape, and again once the shape is known.

    Each kernel gets its own lengths, because it could reuse what another kernel has planned for a shape.

    Args:
        backend: one of ``BACKENDS``.
        device: where to run.
        effort: the sizes.
        clock: seconds that never go back; None is the one for the device.

    Returns:
        The shortest times over the shapes, and those of each; no visits if the kernel cannot run.
    """
    clock = clock_for(device) if clock is None else clock
    stack = _Stack(effort, device).to(device, _dtype(device))
    with warnings.catch_warnings(), _only(backend):
        warnings.simplefilter("ignore")  # torch warns about the reasons why a kernel cannot run
        masked = next((masked for masked in (True, False) if _runs(stack, masked)), None)
        if masked is None:
            return Attention(backend=backend)
        prober = Prober(
            lambda shape: stack.step(shape[0], shape[1], masked=masked), device, None, effort.repeats, [], clock
        )
        rows = [prober.measure((_NUM_ITEMS, length)) for length in _lengths(backend, effort.num_shapes)]
        picks = stack.choice(masked=masked) if backend == "default" else None
    found = [Visits(row.first_visit_seconds, row.seconds) for row in rows if row is not None]
    if not found:
        return Attention(backend=backend)
    return Attention(
        backend=backend,
        # Other work on the machine only adds time, and every shape is new once: the shortest time is the truest.
        visits=Visits(min(one.first_seconds for one in found), min(one.later_seconds for one in found)),
        takes_mask=masked,
        picks=picks,
        repeats=tuple(found),
    )


def _lengths(backend: str, num: int) -> list[int]:
    """Return lengths that no other kernel uses, all multiples of 8.

    >>> _lengths("default", 2), _lengths("flash", 2)
    ([64, 104], [72, 112])
    """
    first = _SHORTEST + 8 * BACKENDS.index(backend)
    return [first + 8 * len(BACKENDS) * place for place in range(num)]


def _dtype(device: torch.device) -> torch.dtype:
    if device.type == "cpu":
        return torch.float32
    return torch.bfloat16 if device.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float16


def _only(backend: str) -> AbstractContextManager[None]:
    kernel = _BACKENDS[backend]
    return nullcontext() if kernel is None else sdpa_kernel(kernel)


def _runs(stack: _Stack, masked: bool) -> bool:
    """Try a kernel on one small batch, which also loads what must be loaded once."""
    try:
        stack.step(2, 16, masked=masked)
    except RuntimeError:
        return False
    return True


@final
class _Stack(nn.Module):
    """A stack of nothing but attention layers."""

    def __init__(self, effort: Effort, device: torch.device) -> None:
        super().__init__()
        self._width, self._device = effort.width, device
        self._heads = max(1, effort.width // _HEAD_WIDTH)
        self.layers = nn.ModuleList(nn.Linear(effort.width, 3 * effort.width) for _ in range(effort.num_layers))

    def step(self, num_items: int, length: int, *, masked: bool) -> None:
        """Run one batch forward and backward."""
        x, mask = self._inputs(num_items, length, masked=masked)
        for layer in self.layers:
            query, key, value = self._heads_of(layer(x))
            mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
            x = x + mixed.transpose(1, 2).reshape(x.shape)
        x.float().square().mean().backward()
        self.zero_grad(set_to_none=True)

    def choice(self, *, masked: bool) -> str | None:
        """Return the name of the kernel that torch chooses for such a batch; None if torch does not say."""
        x, mask = self._inputs(_NUM_ITEMS, _SHORTEST, masked=masked)
        ask = getattr(torch, "_fused_sdp_choice", None)
        if ask is None:
            return None
        found = int(ask(*self._heads_of(self.layers[0](x)), attn_mask=mask))
        return next((name for name, kernel in _BACKENDS.items() if kernel is not None and kernel.value == found), None)

    def _inputs(self, num_items: int, length: int, *, masked: bool) -> tuple[Tensor, Tensor | None]:
        weight = next(self.parameters())
        x = torch.randn(num_items, length, self._width, device=self._device, dtype=weight.dtype)
        if not masked:
            return x, None
        mask = torch.ones(num_items, 1, 1, length, device=self._device, dtype=torch.bool)
        mask[1:, ..., -1] = False
        return x, mask.expand(num_items, 1, length, length)

    def _heads_of(self, projected: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        num_items, length, _ = projected.shape
        parts = projected.view(num_items, length, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
        return parts[0], parts[1], parts[2]


_NUM_LAUNCHES = 500


def measure_launch(
    device: torch.device,
    effort: Effort,
    *,
    run: Callable[[tuple[int, ...]], None] | None = None,
    done: Callable[[], Any] = lambda: None,
    clock: Callable[[], float] | None = None,
) -> Launch:
    """Time whole training steps, each with twice as many examples as the one before.

    All sizes run in turn, round after round, so that other work on the machine meets all of them alike.

    Args:
        device: where to run.
        effort: the sizes.
        run: runs a step of a shape; None trains a small model.
        done: called after each size that is tried, and after each round.
        clock: seconds that never go back; None is the one for the device.

    Returns:
        Tokens and seconds, up to the largest size, the first long step, or the end of the memory.
    """
    clock = clock_for(device) if clock is None else clock
    prober = Prober(_training_step(device, effort) if run is None else run, device, None, 1, [], clock)
    prober.measure((1, effort.length))  # allocates the state of the optimizer and loads kernels
    tried = _sizes_that_run(prober, effort, done)
    rounds: list[list[float]] = []
    for _ in range(effort.rounds):
        rounds.append(_round(prober, tried, effort))
        tried = tried[: len(rounds[-1])]
        done()
    if not tried:
        raise DoesNotFitError(f"one example of {effort.length} tokens does not fit {device}; free some of its memory")
    columns = zip(*(seconds[: len(tried)] for seconds in rounds), strict=True)
    rows = [LaunchRow(num * effort.length, median(each)) for num, each in zip(tried, columns, strict=True)]
    even = _without_peaks([row.seconds for row in rows])
    return Launch(
        model=f"{effort.num_layers} layers of width {effort.width:,}",
        rows=tuple(replace(row, seconds=seconds) for row, seconds in zip(rows, even, strict=True)),
        kernel_seconds=_kernel_seconds(device, clock),
        noise=max(row.seconds / lower for row, lower in zip(rows, even, strict=True)),
        rounds=tuple(tuple(_without_peaks(seconds[: len(tried)])) for seconds in rounds),
        in_processor_time=clock is time.process_time,
    )


def _sizes_that_run(prober: Prober, effort: Effort, done: Callable[[], Any]) -> list[int]:
    """Return the numbers of examples that fit, up to the first step that takes long; each has then run."""
    tried: list[int] = []
    for num_items in sizes(effort):
        found = prober.measure((num_items, effort.length))
        done()
        if found is None:
            break
        tried.append(num_items)
        if found.seconds > effort.most_seconds:
            break
    return tried


def _round(prober: Prober, tried: list[int], effort: Effort) -> list[float]:
    """Return the seconds of every size, the shorter of two steps; fewer if memory runs out."""
    found = (prober.measure((num_items, effort.length)) for num_items in tried)
    return [min(row.seconds, row.first_visit_seconds) for row in takewhile(lambda row: row is not None, found) if row]


def sizes(effort: Effort) -> list[int]:
    """Return the numbers of examples to try: powers of two.

    >>> from batchwright.cli.doctor.records import CPU
    >>> sizes(replace(CPU, max_items=8))
    [1, 2, 4, 8]
    """
    return [2**power for power in range(effort.max_items.bit_length())]


def _without_peaks(seconds: list[float]) -> list[float]:
    """Lower the time of steps that took longer than a larger one, because something else was running.

    >>> _without_peaks([9.0, 5.0, 6.0])
    [5.0, 5.0, 6.0]
    """
    return [*accumulate(reversed(seconds), min)][::-1]


def _training_step(device: torch.device, effort: Effort) -> Callable[[tuple[int, ...]], None]:
    heads = max(1, effort.width // _HEAD_WIDTH)
    layer = nn.TransformerEncoderLayer(
        effort.width, heads, 4 * effort.width, activation="gelu", batch_first=True, norm_first=True, device=device
    )
    # A nested tensor would skip the padding, which few models do.
    model = nn.TransformerEncoder(layer, effort.num_layers, enable_nested_tensor=False).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True if device.type == "cuda" else None)

    def run(shape: tuple[int, ...]) -> None:
        x = torch.randn(*shape, effort.width, device=device)
        with _autocast(device):
            loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return run


def _autocast(device: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", dtype=torch.bfloat16) if device.type == "cuda" else nullcontext()


def _kernel_seconds(device: torch.device, clock: Callable[[], float]) -> float:
    """Return the seconds to launch one small operation, from many that are launched without waiting."""
    x = torch.zeros(16, device=device)
    for _ in range(2):  # the first round only loads the kernel
        x.sum().item()
        start = clock()
        for _ in range(_NUM_LAUNCHES):
            x.add_(1)
        seconds = clock() - start
    return seconds / _NUM_LAUNCHES
