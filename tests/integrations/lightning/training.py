"""A small module and the fits of it that the tests compare."""

import lightning.pytorch as pl
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader

import batchwright as bw
from batchwright.integrations.lightning import AdaptiveBatching, ExactUpdates, PlannedDataModule
from batchwright.plan.sampler.resizable import ResizableBatchSampler
from batchwright.size.controller import BatchSizeController
from batchwright.size.signals import loss_driven

LENGTHS = np.random.default_rng(0).integers(1, 30, size=61)
INPUTS = torch.randn(61, 4, generator=torch.Generator().manual_seed(0))
DATA = [{"x": INPUTS[index], "index": index} for index in range(61)]
OPTIONS = {"grouping": bw.WindowSort(batches_per_window=1)}
BUDGET = bw.MaxTokens(120)
# The second epoch is longer than the first, the third shorter.
NUM_BATCHES = [12, 13, 12]


class Model(ExactUpdates, pl.LightningModule):
    """A small net that notes the batches it is trained and validated on."""

    def __init__(self, schedulers=None):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.schedulers = schedulers
        self.batches = []

    def loss_sums(self, batch):
        return self.net(batch["x"]).square().sum(), len(batch["x"])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return optimizer if self.schedulers is None else ([optimizer], self.schedulers(optimizer, self.trainer))

    def on_train_batch_start(self, batch, batch_idx):
        self.batches.append(indices(batch))


class Validated(Model):
    """Notes the batches it is validated on, with the number of updates before."""

    def __init__(self):
        super().__init__()
        self.validated = []

    def validation_step(self, batch, batch_idx):
        self.validated.append((self.trainer.global_step, indices(batch)))


def sums_of(module, batch):
    return module.loss_sums(batch)


def indices(batch):
    return batch["index"].tolist() if isinstance(batch, dict) else [example["index"] for example in batch]


def parameters(model):
    return torch.cat([value.detach().flatten() for value in model.parameters()])


def make_sampler():
    return bw.BatchSampler(LENGTHS, BUDGET, **OPTIONS)


def make_loader(sampler=None, **options):
    return DataLoader(DATA, batch_sampler=sampler or make_sampler(), **options)


def make_trainer(*callbacks, package=pl, **options):
    settings = {
        "max_epochs": 3, "accelerator": "cpu", "logger": False, "enable_checkpointing": False,
        "enable_progress_bar": False, "enable_model_summary": False,
    }  # fmt: skip
    return package.Trainer(**{**settings, **options}, callbacks=list(callbacks))


def fit(model=None, loader=None, *, batching=None, val=None, callbacks=(), ckpt_path=None, **options):
    """Fit a model with a data module and return both it and the Trainer."""
    model, loader = model or Model(), make_loader() if loader is None else loader
    trainer = make_trainer(batching or AdaptiveBatching(), *callbacks, **options)
    trainer.fit(model, PlannedDataModule(loader, val=val), ckpt_path=ckpt_path)
    return model, trainer


def plans(num_epochs=3):
    return [list(bw.plan_batches(LENGTHS, BUDGET, epoch=epoch, **OPTIONS)) for epoch in range(num_epochs)]


def make_resizable(num_workers=0):
    controller = BatchSizeController(loss_driven(per="step"), min_size=2, max_size=16, initial=4)
    return DataLoader(DATA, batch_sampler=ResizableBatchSampler(61, controller), num_workers=num_workers)


class Automatic(pl.LightningModule):
    """A module with Lightning's own updates."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)
        self.batches = []

    def training_step(self, batch, batch_idx):
        self.batches.append(indices(batch))
        return self.net(batch["x"]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)
