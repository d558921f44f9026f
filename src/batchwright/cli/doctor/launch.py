"""How long training steps of different sizes take; small ones take only as long as launching their kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from ...errors import DoesNotFitError
from ...step.calibration.running import Prober
from .records import Effort, Launch, LaunchRow

_NUM_LAUNCHES = 500


def measure_launch(
    device: torch.device,
    effort: Effort,
    *,
    done: Callable[[], Any] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Launch:
    """Time whole training steps, each with twice as many examples as the one before.

    Args:
        device: where to run.
        effort: the sizes.
        done: called after each size.
        clock: seconds that never go back.

    Returns:
        Tokens and seconds, up to the largest size, the first long step, or the end of the memory.
    """
    run = _training_step(device, effort)
    prober = Prober(run, device, None, effort.repeats, [], clock)
    prober.measure((1, effort.length))  # allocates the state of the optimizer and loads kernels
    rows: list[LaunchRow] = []
    for num_items in sizes(effort):
        row = prober.measure((num_items, effort.length))
        done()
        if row is None:
            break
        rows.append(LaunchRow(num_items * effort.length, row.seconds))
        if row.seconds > effort.most_seconds:
            break
    if not rows:
        raise DoesNotFitError(f"one example of {effort.length} tokens does not fit {device}; free some of its memory")
    even = _without_peaks(rows)
    return Launch(
        model=f"{effort.num_layers} layers of width {effort.width:,}",
        rows=tuple(even),
        kernel_seconds=_kernel_seconds(device, clock),
        noise=max(row.seconds / lower.seconds for row, lower in zip(rows, even, strict=True)),
    )


def sizes(effort: Effort) -> list[int]:
    """Return the numbers of examples to try: powers of two.

    >>> from dataclasses import replace
    >>> from .records import CPU
    >>> sizes(replace(CPU, max_items=8))
    [1, 2, 4, 8]
    """
    return [2**power for power in range(effort.max_items.bit_length())]


def _without_peaks(rows: list[LaunchRow]) -> list[LaunchRow]:
    """Lower the time of steps that took longer than a larger one, because something else was running.

    >>> [row.seconds for row in _without_peaks([LaunchRow(1, 9.0), LaunchRow(2, 5.0), LaunchRow(4, 6.0)])]
    [5.0, 5.0, 6.0]
    """
    least = accumulate((row.seconds for row in reversed(rows)), min)
    return [row._replace(seconds=seconds) for row, seconds in zip(rows, reversed([*least]), strict=True)]


def _training_step(device: torch.device, effort: Effort) -> Callable[[tuple[int, ...]], None]:
    heads = max(1, effort.width // 64)
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
    for _ in range(_NUM_LAUNCHES):
        x.add_(1)
    x.sum().item()
    start = clock()
    for _ in range(_NUM_LAUNCHES):
        x.add_(1)
    seconds = clock() - start
    x.sum().item()
    return seconds / _NUM_LAUNCHES
