"""Memory and training progress together: progress decides the batch, memory decides the pieces it runs in.

Two sizes follow two signals and never disturb each other:

- the **batch** of an update grows while the moving average of the loss falls (``size.loss_driven``);
- the **micro-batch**, what the device holds at once, halves above 90 % of memory and doubles below 70 %
  (``FitToMemory.accumulating``). The number of accumulation steps is the quotient of the two.

Midway another program takes three quarters of the memory and gives it back later. The pieces get smaller and the
updates stay the same: a second run with the memory for itself ends with the same weights, up to rounding. A size that
was too large is not tried again for 512 batches, so the pieces do not grow back within this short run.

    python examples/memory_and_progress.py

It needs torch and scikit-learn, takes a few seconds and runs on the CPU, where a stand-in plays the memory. On a GPU
leave ``memory=`` and the stand-in out: the Stepper then reads the GPU's own memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

import batchwright as bw
from batchwright import size
from batchwright.step import FitToMemory, MemoryMonitor, Stepper
from batchwright.testing import FakeMemory

NUM_EPOCHS = 8
MAX_BATCH = 256
MAX_STEPS = 16
# The epochs in which another program holds a share of the memory, and that share.
BUSY_EPOCHS = range(3, 6)
BUSY_SHARE = 0.75
# What one example takes while it runs: 256 of them fill the memory to 80 %.
EXAMPLE_BYTES = 1_000
TOTAL_BYTES = 320_000


@dataclass(frozen=True)
class Row:
    """What one epoch did."""

    epoch: int
    is_busy: bool
    loss: float
    batch_size: int
    micro_batch: int
    num_steps: int
    memory_fraction: float


@dataclass
class Result:
    """A run: its epochs, why the batch changed, and the weights at the end."""

    rows: list[Row] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)


def make_model() -> nn.Module:
    """Return a small network without BatchNorm, so that no piece of a batch depends on the others."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def train(*, is_busy: bool) -> Result:
    """Train on scikit-learn's digits; ``is_busy`` lets another program hold memory in some epochs."""
    memory = FakeMemory(TOTAL_BYTES)
    pixels, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    data = pixels.float() / 16, labels
    model = make_model()

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        inputs, targets = batch
        memory.run_batch(len(inputs), EXAMPLE_BYTES)  # a GPU takes the memory by itself
        return F.cross_entropy(model(inputs), targets, reduction="sum"), len(inputs)

    # Progress: the batch is multiplied by up to 2 per epoch while the average loss falls by 1 % or more.
    policy = size.loss_driven("ema", alpha=0.5, gain=1.0, tolerance=0.01)
    controller = size.BatchSizeController(policy, min_size=32, max_size=MAX_BATCH, initial=32)
    sampler = bw.ResizableBatchSampler(len(labels), controller, seed=0)
    # Memory: from 1 to 16 accumulation steps for the largest batch.
    fit = FitToMemory.accumulating(MAX_BATCH, max_steps=MAX_STEPS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stepper = Stepper(
        model, optimizer, loss_fn, micro_batch=fit, memory=MemoryMonitor(source=memory), lr_rule="sqrt", base_size=32
    )

    result = Result()
    for epoch in range(NUM_EPOCHS):
        busy = is_busy and epoch in BUSY_EPOCHS
        memory.used_bytes = int(BUSY_SHARE * TOTAL_BYTES) if busy else 0
        reports = [stepper.step(tuple(part[batch] for part in data)) for batch in sampler]
        loss = sum(report.loss * report.batch_size for report in reports) / len(labels)
        last = reports[-2]  # the last batch of an epoch may be short
        result.rows.append(
            Row(epoch, busy, loss, last.batch_size, fit.size, last.num_micro_batches, last.memory_fraction or 0.0)
        )
        controller.observe(epoch=epoch + 1, loss=loss)
    result.reasons = [str(decision) for decision in controller.history]
    result.weights = [parameter.detach() for parameter in model.parameters()]
    return result


def difference(first: Result, second: Result) -> float:
    """Return the largest difference between the weights of two runs."""
    pairs = zip(first.weights, second.weights, strict=True)
    return max(float((mine - other).abs().max()) for mine, other in pairs)


def main() -> tuple[Result, Result]:
    """Train with and without another program in the memory, and print what happened."""
    busy, free = train(is_busy=True), train(is_busy=False)
    print("epoch  memory of others   loss  batch  micro-batch  steps  memory at the peak")
    for row in busy.rows:
        others = f"{BUSY_SHARE:.0%}" if row.is_busy else "none"
        print(
            f"{row.epoch:>5}  {others:>16}  {row.loss:>5.3f}  {row.batch_size:>5}  {row.micro_batch:>11}  "
            f"{row.num_steps:>5}  {row.memory_fraction:>18.0%}"
        )
    print("\nWhy the batch changed:", *busy.reasons, sep="\n  ")
    apart = difference(busy, free)
    print(f"\nThe same run with the memory for itself ends with weights that differ by {apart:.1e} at most.")
    return busy, free


if __name__ == "__main__":
    main()
