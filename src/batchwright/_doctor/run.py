"""Look, measure, gather."""

from __future__ import annotations

import torch

from .._machine import one_thread
from .._progress import ProgressBar
from .attention import BACKENDS, measure_attention
from .effort import effort_for
from .launch import measure_launch, sizes
from .machine import default_device, look_at
from .records import Findings


def examine(*, quick: bool = False, device: torch.device | str | None = None, progress: bool = True) -> Findings:
    """Measure a device: attention kernels with new and with known shapes, and steps of many sizes.

    The random state is as before afterwards. A CPU is measured with one thread: several on shared cores mostly wait
    for each other, and time less evenly.

    Args:
        quick: fewer shapes and sizes.
        device: None is the accelerator torch finds, else the CPU.
        progress: show a bar.

    Returns:
        What was measured; ``advise`` says what it means.
    """
    chosen = default_device() if device is None else torch.device(device)
    machine = look_at(chosen)
    effort = effort_for(machine, quick=quick)
    total = len(BACKENDS) + len(sizes(effort))
    devices = [chosen] if chosen.type == "cuda" else []
    bar = ProgressBar(label="measuring", total=total, enabled=progress)
    with torch.random.fork_rng(devices), one_thread(), bar:
        attention = []
        for backend in BACKENDS:
            attention.append(measure_attention(backend, chosen, effort))
            bar.update()
        launch = measure_launch(chosen, effort, done=bar.update)
        bar.update(total - bar.done)  # sizes that were too long or did not fit are left out
    return Findings(machine=machine, attention=tuple(attention), launch=launch)
