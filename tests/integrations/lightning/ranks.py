"""Run by test_updates in two processes: DDP on gloo under a Trainer, one rank runs out of memory."""

import os
import sys
import warnings

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader

import batchwright as bw
from batchwright.integrations.lightning import AdaptiveBatching, ExactUpdates, PlannedDataModule
from batchwright.plan.sampler.resizable import ResizableBatchSampler
from batchwright.size.controller import BatchSizeController
from batchwright.size.signals import loss_driven
from batchwright.step import Stepper

from ...processes import leave_group

LENGTHS = np.random.default_rng(0).integers(1, 30, size=61)
INPUTS = torch.randn(61, 4, generator=torch.Generator().manual_seed(0)).double()
DATA = [{"x": INPUTS[index], "index": index} for index in range(61)]
NUM_BEFORE = 4  # updates before the checkpoint


class Model(ExactUpdates, pl.LightningModule):
    """Notes its batches; the last rank runs out of memory when it is first given more than two examples."""

    def __init__(self, num_ooms=0):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
        self.num_ooms = num_ooms
        self.batches, self.validated = [], []

    def loss_sums(self, batch):
        if self.num_ooms and len(batch["x"]) > 2:
            self.num_ooms -= 1
            raise torch.OutOfMemoryError("more than two examples")
        return self.net(batch["x"]).square().sum(), len(batch["x"])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def on_train_batch_start(self, batch, batch_idx):
        self.batches.append(batch["index"].tolist())

    def validation_step(self, batch, batch_idx, dataloader_idx):
        self.validated.append([(dataloader_idx, index) for index in batch["index"].tolist()])


class Save(Callback):
    """Save a checkpoint on the way."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step == NUM_BEFORE:
            trainer.save_checkpoint(self.path)


def make_planned():
    return bw.BatchSampler(LENGTHS, bw.MaxTokens(120), grouping=bw.WindowSort(batches_per_window=1))


def make_resizable():
    controller = BatchSizeController(loss_driven(per="step"), min_size=4, max_size=32, initial=6)
    return ResizableBatchSampler(61, controller)


def fit(make_sampler, *callbacks, model=None, num_ooms=0, ckpt_path=None):
    model, batching = model or Model(num_ooms), AdaptiveBatching()
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0, log_every_n_steps=1,
        callbacks=[batching, *callbacks],
    )  # fmt: skip
    samplers = [bw.BatchSampler(LENGTHS, bw.MaxTokens(num), shuffle=False) for num in (120, 60)]
    val = [DataLoader(DATA, batch_sampler=sampler) for sampler in samplers]
    data = PlannedDataModule(DataLoader(DATA, batch_sampler=make_sampler()), val=val)
    trainer.fit(model, data, ckpt_path=ckpt_path)
    logged = float(trainer.callback_metrics["batchwright/ooms"])
    assert [logged] * 2 == gather(batching.num_ooms, 2), "the figure counts all ranks"
    return model, batching


def gather(value, world_size):
    values = [None] * world_size
    dist.all_gather_object(values, value)
    return values


def flat(model):
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def reference(steps):
    """Return the parameters after the same steps in one process."""
    model = Model()
    stepper = Stepper(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), lambda module, batch: module.loss_sums(batch)
    )
    for step in steps:
        stepper.step({"x": INPUTS[[index for batch in step for index in batch]]})
    return flat(model)


def check(make_sampler, path, rank, world_size):
    is_last = rank == world_size - 1
    model, batching = fit(make_sampler, Save(path), num_ooms=3 if is_last else 0)
    assert batching.num_ooms > 0  # of the last rank, known to all
    steps = list(zip(*gather(model.batches, world_size), strict=True))
    seen = sorted(index for step in steps for batch in step for index in batch)
    assert seen == sorted([*range(61), *range(61)]), "every example once per epoch, over all ranks"
    validated = sorted(pair for batches in gather(model.validated, world_size) for batch in batches for pair in batch)
    assert validated == sorted([(loader, index) for loader in (0, 1) for index in range(61)] * 2), "once per epoch"
    end = flat(model)
    assert all(torch.equal(end, other) for other in gather(end, world_size)), "ranks drifted apart"
    assert torch.allclose(end, reference(steps), rtol=1e-9, atol=1e-12), "not the update of one process"
    resumed, _ = fit(make_sampler, ckpt_path=path)
    assert resumed.batches == model.batches[NUM_BEFORE:]
    assert torch.allclose(flat(resumed), end, rtol=1e-12, atol=1e-14)
    return steps


def check_failure(rank, world_size):
    """An error on the last rank ends training on all of them; before, the others waited for it for ever."""

    class Failing(Model):
        def loss_sums(self, batch):
            if rank == world_size - 1 and self.trainer.global_step == 2:
                raise ZeroDivisionError("only here")
            return super().loss_sums(batch)

    with pytest.raises(ZeroDivisionError, match="only here"):
        fit(make_planned, model=Failing())


def main(rank, world_size, folder):
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(world_size))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    steps = check(make_planned, f"{folder}/planned.ckpt", rank, world_size)
    assert len(steps) == 13, "six updates in the first epoch, seven in the second"
    steps = check(make_resizable, f"{folder}/resizable.ckpt", rank, world_size)
    assert len({sum(map(len, step)) for step in steps}) > 2, "sizes change"
    check_failure(rank, world_size)
    leave_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
