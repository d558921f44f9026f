"""Measure the machine: attention on known and new shapes, steps from small to large, and what graphs save."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..._machine import one_thread
from ..._progress import ProgressBar
from ...step.calibration.running import Prober
from .machine import clock_for, look_at, wall_per_cpu
from .passes import Steps, decoding, encoding
from .records import Attention, Effort, Findings, Graphs, Load, Visits, effort_for
from .steps import measure_graphs, measure_launch, sizes


def examine(device: torch.device | str, *, quick: bool = False, progress: bool = True) -> Findings:
    """Measure a device: attention kernels with new and known shapes, training steps of many sizes, and CUDA graphs.

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
    steps = effort.of_decoding()
    total = (
        len(BACKENDS) + len(sizes(effort)) + effort.rounds + 4 * len(effort.graph_items) + 2 * len(steps.graph_items)
    )
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
        bar.doing("CUDA graphs")
        graphs = measure_graphs(chosen, effort, done=bar.update)
        bar.doing("encoding")
        encoded = _saved(encoding, chosen, effort, bar.update)
        bar.doing("decoding")
        decoded = _saved(decoding, chosen, steps, bar.update)
        bar.update(total - bar.done)  # sizes that took too long or did not fit were left out
    load = Load(wall_per_cpu=median(waits), average=os.getloadavg()[0] if hasattr(os, "getloadavg") else None)
    return Findings(
        machine=machine, attention=tuple(attention), launch=launch, graphs=graphs, load=load, encoding=encoded,
        decoding=decoded,
    )  # fmt: skip


def _saved(
    make: Callable[[torch.device, Effort], Steps], device: torch.device, effort: Effort, done: Callable[[], None]
) -> Graphs:
    """Return what graphs save of passes, on CUDA only."""
    return measure_graphs(
        device, effort, make_steps=partial(make, device, effort) if device.type == "cuda" else None, done=done
    )


_BACKENDS: dict[str, SDPBackend | None] = {
    "default": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
BACKENDS = tuple(_BACKENDS)

_NUM_ITEMS = 8
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
        self._heads = effort.num_heads
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
