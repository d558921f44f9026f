"""Run by test_auto in two processes: prepare(controller="auto") on DDP, whose clocks disagree."""

import sys
import time
from itertools import chain
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader

from batchwright.integrations.accelerate import prepare

from ...processes import act_as_torchrun, leave_group

NUM, BASE = 960, 2
DRAW = torch.Generator().manual_seed(0)
DATA = [{"x": torch.randn(6, generator=DRAW), "y": torch.randint(5, (), generator=DRAW), "i": i} for i in range(NUM)]


class SharedNorm(nn.Module):
    """Norms a query that all examples share, whose vectors cannot be measured."""

    def __init__(self):
        super().__init__()
        self.lift, self.norm, self.head = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5)
        self.query = nn.Parameter(torch.ones(1, 8).normal_())

    def forward(self, x):
        return self.head(self.lift(x) * self.norm(self.query))


def make_model(kind):
    if kind == "shared norm":
        return SharedNorm()
    norms = [nn.LayerNorm(8)] if kind == "norm" else []
    return nn.Sequential(nn.Linear(6, 8), *norms, nn.Tanh(), nn.Linear(8, 5))


def main(rank, world_size, folder, kind):
    act_as_torchrun(rank, world_size, folder / "store")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = make_model(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (NUM // BASE))

    def loss_fn(module, batch):
        time.sleep(0.002 + 0.002 * rank)  # one rank is slower, and launch-bound
        return nn.functional.cross_entropy(module(batch["x"]), batch["y"], reduction="sum"), len(batch["x"])

    loader = DataLoader(DATA, batch_size=BASE, shuffle=True)
    prepared = prepare(
        Accelerator(cpu=True), model, optimizer, loader, loss_fn=loss_fn, scheduler=scheduler, controller="auto"
    )
    seen, sizes = [], []
    for batch in prepared.loader:
        report = prepared.stepper.step(batch)
        seen.append(batch["i"].tolist())
        sizes.append(report.batch_size)
    everyone = [None] * world_size
    mine = (seen, sizes, prepared.stepper.controller.state_dict(), prepared.stepper.scheduler.get_last_lr())
    dist.all_gather_object(everyone, mine)
    shares, all_sizes, states, rates = zip(*everyone, strict=True)
    steps = [(set(mine), set(other)) for mine, other in zip(*shares, strict=True)]
    assert not any(mine & other for mine, other in steps[:-1])
    # Sizes follow the clocks, and may leave one example for the last step: then both ranks run it.
    assert sorted(chain.from_iterable(mine | other for mine, other in steps)) == list(range(NUM))
    assert all_sizes[0] == all_sizes[1]
    assert states[0] == states[1], states
    assert all_sizes[0][0] == BASE * world_size
    assert max(all_sizes[0]) > BASE * world_size
    assert abs(rates[0][0]) < 1e-12, rates
    leave_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
