"""Run by test_several_ranks in several processes: DDP on gloo, ranks that run out of memory on their own."""

import random
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from batchwright._ranks import Ranks
from batchwright.step import MemoryMonitor, Stepper
from batchwright.testing import FakeMemory

from ..processes import leave_group


class Model(nn.Module):
    """Buffers that every forward changes, and a parameter that no loss reaches."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 1)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.seen += len(x)
        return self.second(torch.tanh(self.first(x)))


def make_batch(step, rank):
    """Return the share of one rank: uneven numbers of examples, and weights that are not all one."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    num = 3 + (7 * step + 5 * rank) % 11
    weights = torch.randint(1, 4, (num,), generator=generator).double()
    return {"x": torch.randn(num, 4, generator=generator).double(), "w": weights}


def loss_of(model, batch):
    return (model(batch["x"])[:, 0].square() * batch["w"]).sum(), batch["w"].sum()


def reference_gradient(model, step, world_size):
    """Return the gradient of the mean over the examples of all ranks, computed in one process."""
    twin = Model().double()
    twin.load_state_dict(model.state_dict())
    shares = [make_batch(step, rank) for rank in range(world_size)]
    batch = {key: torch.cat([share[key] for share in shares]) for key in ("x", "w")}
    loss, weight = loss_of(twin, batch)
    (loss / weight).backward()
    return {name: parameter.grad for name, parameter in twin.named_parameters()}


def main(rank, world_size, path, num_steps):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = Model().double()
    ddp = DistributedDataParallel(model)
    # A number of Python keeps its digits: 2**24 + 1 tokens are not 2**24.
    assert Ranks(ddp).sum([16_777_217.0], torch.device("cpu")) == [16_777_217.0 * world_size]
    chance = random.Random(rank)
    ooms, worst = 0, 0.0

    def loss_fn(module, batch):
        assert module is model, "loss_fn receives the unwrapped module"
        loss, weight = loss_of(module, batch)
        if len(batch["x"]) > 1 and chance.random() < 0.15:
            if chance.random() < 0.5:
                raise torch.OutOfMemoryError("out of memory in forward")
            loss.register_hook(lambda gradient: raise_oom())
        return loss, weight

    memory = MemoryMonitor(source=FakeMemory(1000, used_bytes=100 + 50 * rank))
    stepper = Stepper(ddp, torch.optim.AdamW(ddp.parameters(), lr=0.01), loss_fn, memory=memory)
    for step in range(num_steps):
        expected = reference_gradient(model, step, world_size)
        stepper.accumulate(make_batch(step, rank))
        stepper.reduce()
        for name, parameter in model.named_parameters():
            if expected[name] is None:
                assert parameter.grad is None, f"{name} is unused on all ranks and keeps no gradient"
                continue
            error = (parameter.grad - expected[name]).norm() / expected[name].norm().clamp(min=1e-30)
            worst = max(worst, float(error))
        report = stepper.update()
        ooms += report.ooms
        check_equal(model, rank)
        check_same_report(report, rank)
    print(f"rank {rank}: {ooms} ooms, worst {worst:.3e}")
    assert ooms > 0
    assert worst < 1e-10
    leave_group()


def raise_oom():
    raise torch.OutOfMemoryError("out of memory in backward")


def check_same_report(report, rank):
    """Check that a policy would observe the same figures on every rank."""
    mine = [report.loss, report.seconds, report.memory_fraction, report.ooms, report.batch_size]
    first = [mine]
    dist.broadcast_object_list(first, src=0)
    assert first[0] == mine, f"rank {rank} reports {mine}, rank 0 {first[0]}"


def check_equal(model, rank):
    """Check that parameters and buffers are the same bits on every rank."""
    mine = torch.cat([value.double().flatten() for value in model.state_dict().values()])
    first = mine.clone()
    dist.broadcast(first, src=0)
    assert torch.equal(mine, first), f"rank {rank} differs from rank 0"


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
