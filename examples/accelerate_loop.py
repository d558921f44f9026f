"""Accelerate: one call prepares a loop whose updates are exact and that continues with the very next batch.

    accelerate launch examples/accelerate_loop.py      # or: python examples/accelerate_loop.py

You see that a run which is stopped, saved by ``accelerator.save_state`` and continued by another one has the losses of
a run without a stop, to the last digit. Change the model; ``prepare`` takes every option of ``Stepper``.
"""

import sys
import tempfile
from itertools import islice
from typing import Any

import torch
from accelerate import Accelerator
from texts import VOCABULARY, read_examples
from torch import Tensor, nn
from torch.utils.data import DataLoader

import batchwright as bw
from batchwright.integrations.accelerate import prepare
from batchwright.step import PadCollator


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the summed loss of the next words, and how many they are."""
    logits, targets = model(batch["input_ids"][:, :-1]).flatten(0, 1), batch["labels"][:, 1:].flatten()
    return nn.functional.cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum()


def begin(data: list[dict[str, list[int]]]) -> tuple[Any, Any, Any]:
    """Return what a loop needs: the accelerator, the loader and the stepper."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY))
    sampler = bw.BatchSampler([len(example["input_ids"]) for example in data], bw.MaxTokens(2048), seed=0)
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=PadCollator())
    accelerator, optimizer = Accelerator(cpu=True), torch.optim.AdamW(model.parameters(), lr=1e-2)
    return accelerator, *prepare(accelerator, model, optimizer, loader, loss_fn=loss_fn, clip_norm=1.0)[2:]


def main(quick: bool = False) -> dict[str, Any]:
    """Train with and without a stop, print and return the losses."""
    data = read_examples(200 if quick else 2000)
    _, loader, stepper = begin(data)
    reports = [stepper.step(batch) for batch in loader]
    accelerator, loader, stepper = begin(data)
    with tempfile.TemporaryDirectory() as folder:
        first = [stepper.step(batch).loss for batch in islice(loader, 3)]
        accelerator.save_state(folder)
        accelerator, loader, stepper = begin(data)  # as a new process would
        accelerator.load_state(folder)
        rest = [stepper.step(batch).loss for batch in loader]
    whole, num = [report.loss for report in reports], sum(report.batch_size for report in reports)
    print(f"an epoch: {len(whole)} updates, {num} of {len(data)} texts, loss {whole[0]:.3f} to {whole[-1]:.3f}")
    print(f"stopped after {len(first)} updates, then {len(rest)} more; the same losses: {[*first, *rest] == whole}")
    return {"whole": whole, "stopped": [*first, *rest], "num_texts": num, "num_data": len(data)}


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
