"""A small training run with a batch-size policy; as a script it saves after every update and can be killed.

python -m tests.walk.adaptive_run FOLDER POLICY WAY NUM_EPOCHS [DIE_AFTER]
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader

import batchwright as bw
from batchwright import size
from batchwright.step import Stepper, entropy_sum

NUM = 96
POLICIES = {
    "entropy": lambda: size.chain(
        size.entropy_driven(3, smallest=4, largest=48, per="examples", every=24), size.rate_limit(2)
    ),
    "loss": lambda: size.loss_driven("difference", per="examples", every=32),
    "noise": lambda: size.chain(size.noise_driven(horizon=1000), size.rate_limit(1.5)),
}


class Examples:
    """Three clouds of points, each with its index."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.labels = torch.arange(NUM) % 3
        centres = torch.tensor([[3.0, 0.0], [0.0, 3.0], [-3.0, -3.0]])
        self.points = centres[self.labels] + torch.randn(NUM, 2, generator=generator)

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int):
        return index, self.points[index], self.labels[index]


def collate(examples):
    indices, points, labels = zip(*examples, strict=True)
    return {"index": torch.tensor(indices), "x": torch.stack(points), "y": torch.stack(labels)}


def loss_fn(model, batch):
    logits = model(batch["x"])
    loss = nn.functional.cross_entropy(logits, batch["y"], reduction="sum")
    return loss, len(logits), {"entropy": entropy_sum(logits)}


class Run:
    """Everything a run consists of, with one state."""

    # A loader draws seeds of its workers from the global generator, also after a resume, unless it has its own.
    def __init__(self, policy: str, way: str) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.model = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.stepper = Stepper(
            self.model, self.optimizer, loss_fn, micro_batch=8, collate=collate, measure_noise=policy == "noise"
        )
        self.controller = bw.BatchSizeController(POLICIES[policy](), min_size=4, max_size=48, initial=8)
        if way == "sampler":
            self.data = bw.ResizableBatchSampler(NUM, self.controller, seed=1)
            self.loader = DataLoader(Examples(), batch_sampler=self.data, collate_fn=list, generator=torch.Generator())
        else:
            sampler = bw.BatchSampler([1] * NUM, bw.MaxItems(6), seed=1)
            loader = DataLoader(
                Examples(), batch_sampler=sampler, collate_fn=list, num_workers=2, generator=torch.Generator()
            )
            self.loader = self.data = bw.regroup(loader, self.controller)

    def epochs(self, num_epochs: int):
        """Yield (examples, size wanted next) after every update; goes on where the state stands."""
        while self.data.epoch < num_epochs:
            for examples in self.loader:
                report = self.stepper.step(examples)
                self.controller.observe(**report.observation())
                yield [index for index, _, _ in examples], self.controller.size

    def state(self) -> dict:
        return {
            "data": self.data.state_dict(),
            "controller": self.controller.state_dict(),
            "stepper": self.stepper.state_dict(),
            "model": [value.tolist() for value in self.model.state_dict().values()],
            "momentum": [
                None if (found := self.optimizer.state.get(p, {}).get("momentum_buffer")) is None else found.tolist()
                for p in self.model.parameters()
            ],
            "random": torch.get_rng_state().tolist(),
        }

    def load(self, state: dict) -> None:
        self.data.load_state_dict(state["data"])
        self.controller.load_state_dict(state["controller"])
        self.stepper.load_state_dict(state["stepper"])
        with torch.no_grad():
            for target, value in zip(self.model.state_dict().values(), state["model"], strict=True):
                target.copy_(torch.tensor(value))
        for parameter, value in zip(self.model.parameters(), state["momentum"], strict=True):
            if value is not None:
                self.optimizer.state[parameter]["momentum_buffer"] = torch.tensor(value)
        torch.set_rng_state(torch.tensor(state["random"], dtype=torch.uint8))


def main(folder: str, policy: str, way: str, num_epochs: str, die_after: str | None = None) -> None:
    run, state, log = Run(policy, way), Path(folder) / "state.json", Path(folder) / "log.jsonl"
    if state.exists():
        run.load(json.loads(state.read_text()))
    for num, row in enumerate(run.epochs(int(num_epochs))):
        with log.open("a") as file:
            file.write(json.dumps(row) + "\n")
        fresh = state.with_suffix(".new")
        fresh.write_text(json.dumps(run.state()))
        fresh.replace(state)
        if die_after is not None and num + 1 == int(die_after):
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
