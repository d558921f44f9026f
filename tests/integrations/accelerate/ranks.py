"""Run by test_preparation in two processes: DDP on gloo under an Accelerator, one rank runs out of memory."""

import os
import sys

import numpy as np
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import DataLoader

import batchwright as bw
from batchwright.integrations._ranked import agree
from batchwright.integrations.accelerate import prepare
from batchwright.plan.sampler.resizable import ResizableBatchSampler
from batchwright.size.controller import BatchSizeController
from batchwright.size.signals import loss_driven
from batchwright.step import Stepper

from ...processes import leave_group

LENGTHS = np.random.default_rng(0).integers(1, 30, size=61)
BUDGET = bw.MaxTokens(150)
INPUTS = torch.randn(61, 4, generator=torch.Generator().manual_seed(0)).double()
DATA = [{"x": INPUTS[index], "index": index} for index in range(61)]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def loss_fn(model, batch):
    return model(batch["x"]).square().sum(), len(batch["x"])


def make_planned(rank, world_size):
    return bw.BatchSampler(LENGTHS, BUDGET)


def make_resizable(rank, world_size):
    controller = BatchSizeController(loss_driven(per="step"), min_size=4, max_size=32, initial=6)
    return ResizableBatchSampler(61, controller)


def make_run(make_sampler, rank, world_size, *, num_steps_of_oom=0):
    """Return an accelerator and what was prepared; the last rank runs out of memory in its first updates."""
    AcceleratorState._reset_state(False)  # the process group stays
    accelerator = Accelerator(cpu=True)
    assert (accelerator.process_index, accelerator.num_processes) == (rank, world_size)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    calls = iter(range(1000))

    def scarce(module, batch):
        if rank == world_size - 1 and len(batch["x"]) > 2 and next(calls) < num_steps_of_oom:
            raise torch.OutOfMemoryError("more than two examples")
        return loss_fn(module, batch)

    loader = DataLoader(DATA, batch_sampler=make_sampler(rank, world_size))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1000)
    return accelerator, prepare(accelerator, model, optimizer, loader, loss_fn=scarce, scheduler=scheduler)


def gather(value, world_size):
    values = [None] * world_size
    dist.all_gather_object(values, value)
    return values


def run_epochs(prepared, num_epochs, world_size, *, after_step=lambda num: None):
    """Return the batches of all ranks, step by step, and how often this rank ran out of memory."""
    steps, ooms = [], 0
    for _ in range(prepared.loader.epoch, num_epochs):
        for batch in prepared.loader:
            ooms += prepared.stepper.step(batch).ooms
            steps.append(gather(batch["index"].tolist(), world_size))
            after_step(len(steps))
    return steps, ooms


def reference(steps):
    """Return the parameters after the same steps in one process."""
    model = make_model()
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), lr=0.01), loss_fn)
    for step in steps:
        stepper.step({"x": INPUTS[[index for batch in step for index in batch]]})
    return flat(model)


def flat(model):
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def check(make_sampler, folder, rank, world_size):
    accelerator, prepared = make_run(make_sampler, rank, world_size, num_steps_of_oom=3)
    steps, ooms = run_epochs(
        prepared, 2, world_size, after_step=lambda num: accelerator.save_state(folder) if num == 4 else None
    )
    assert ooms > 0  # of the last rank; reports count all
    seen = sorted(index for step in steps for batch in step for index in batch)
    assert seen == sorted([*range(61), *range(61)]), "every example once per epoch, over all ranks"
    end = flat(prepared.model)
    assert all(torch.equal(end, other) for other in gather(end, world_size)), "ranks drifted apart"
    assert torch.allclose(end, reference(steps), rtol=1e-9, atol=1e-12), "not the update of one process"
    check_resumed(make_sampler, folder, rank, world_size, steps, end)
    return prepared, steps


def check_resumed(make_sampler, folder, rank, world_size, steps, end):
    accelerator, resumed = make_run(make_sampler, rank, world_size)
    accelerator.load_state(folder)
    rest, _ = run_epochs(resumed, 2, world_size)
    assert rest == steps[4:]
    assert torch.allclose(flat(resumed.model), end, rtol=1e-12, atol=1e-14)


def check_outside(rank, world_size):
    """A parameter that DDP does not know is trained as in one process: the loss is the mean of s² |x|²."""
    AcceleratorState._reset_state(False)
    model, scale = make_model(), torch.nn.Parameter(torch.tensor(2.0).double())
    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.01)
    loader = DataLoader(DATA, batch_sampler=make_planned(rank, world_size))

    def scaled(module, batch):
        return (scale * batch["x"]).square().sum() + 0 * module(batch["x"]).sum(), len(batch["x"])

    prepared = prepare(Accelerator(cpu=True), model, optimizer, loader, loss_fn=scaled, micro_batch=2)
    steps, _ = run_epochs(prepared, 1, world_size)
    expected = 2.0
    for step in steps:
        indices = [index for batch in step for index in batch]
        squares = sum(float(INPUTS[index].square().sum()) for index in indices)
        expected -= 0.01 * 2 * expected * squares / len(indices)
    assert abs(scale.item() - expected) < 1e-12 * expected


def main(rank, world_size, folder):
    torch.set_num_threads(1)
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(world_size))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")  # asked for, though the group exists already
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    prepared, steps = check(make_planned, f"{folder}/planned", rank, world_size)
    # As many scheduler steps as batches of the loader that was given.
    assert prepared.stepper.scheduler.scheduler.last_epoch == world_size * len(steps)
    prepared, steps = check(make_resizable, f"{folder}/resizable", rank, world_size)
    assert len({sum(map(len, step)) for step in steps}) > 2, "sizes change"
    assert prepared.stepper.scheduler.scheduler.last_epoch == len(steps)
    check_outside(rank, world_size)
    # What every rank measures for itself is the same in their observations, or their sizes would differ.
    observed = agree({"seconds": float(rank), "memory_fraction": None, "loss": 0.5}, torch.device("cpu"))
    assert observed == {"seconds": world_size - 1, "memory_fraction": None, "loss": 0.5}
    leave_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
