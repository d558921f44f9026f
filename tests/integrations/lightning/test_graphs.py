"""Exact updates with graphs under a Lightning Trainer: the same training, or a refusal that says why."""

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.integrations.lightning import AdaptiveBatching, ExactUpdates, PlannedDataModule
from batchwright.step import PadCollator
from batchwright.testing import EagerGraphs

from .training import make_trainer, parameters

LENGTHS = np.random.default_rng(0).integers(2, 30, size=80)
DATA = [{"input_ids": [1 + (place * 7 + step) % 15 for step in range(length)]} for place, length in enumerate(LENGTHS)]


class Words(ExactUpdates, pl.LightningModule):
    """Predicts the next token from the one before."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 16))

    def loss_sums(self, batch):
        ids = batch["input_ids"]
        logits, targets = self.net(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()
        loss = nn.functional.cross_entropy(logits, targets, ignore_index=0, reduction="sum")
        return loss, (targets != 0).sum()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.LinearLR(optimizer), "interval": "step"}]

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch["input_ids"]).mean())


class Losses(pl.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(outputs["report"].loss)


def make_data(grouping=None):
    sampler = bw.BatchSampler(LENGTHS, bw.MaxTokens(150), grouping=grouping or bw.Buckets(4))
    loader = DataLoader(DATA, batch_sampler=sampler, collate_fn=PadCollator(pad_to=sampler.pad_to))
    return PlannedDataModule(loader, val=DataLoader(DATA[:4], batch_size=1, collate_fn=PadCollator()))


def fit(model=None, *callbacks, data=None, trainer_options=None, **options):
    """Return the weights and losses of a fit, and its callback."""
    model = Words() if model is None else model
    batching, losses = AdaptiveBatching(clip_norm=0.5, **options), Losses()
    trainer = make_trainer(batching, losses, *callbacks, **(trainer_options or {}))
    trainer.fit(model, make_data() if data is None else data)
    return parameters(model), losses.seen, batching


def test_training_with_graphs_is_training_without():
    weights, losses, _ = fit()
    with pytest.warns(UserWarning, match="forward and backward are replayed, the update runs eagerly: a wrapped optim"):
        found, seen, batching = fit(graphs=EagerGraphs())
    assert seen == pytest.approx(losses, rel=1e-5)
    assert torch.allclose(found, weights, rtol=1e-5, atol=1e-6)
    summary = batching.graph_summary()
    assert summary.num_replayed > 10
    assert summary.num_captures == len(summary.shapes)  # the validation between epochs has changed nothing


@pytest.mark.filterwarnings("ignore:forward and backward are replayed")
def test_hooks_after_the_backward_pass_run_once_per_update():
    class Noting(pl.Callback):
        def __init__(self):
            self.norms = []

        def on_after_backward(self, trainer, pl_module):
            self.norms.append(float(sum(one.grad.square().sum() for one in pl_module.parameters())))

    eager, graphed = Noting(), Noting()
    fit(None, eager)
    _, seen, _ = fit(None, graphed, graphs=EagerGraphs())
    assert len(graphed.norms) == len(seen)
    assert graphed.norms == pytest.approx(eager.norms, rel=1e-4)


def test_a_hook_before_the_backward_pass_is_refused_and_auto_runs_eagerly():
    class Listening(pl.Callback):
        def __init__(self):
            self.num = 0

        def on_before_backward(self, trainer, pl_module, loss):
            self.num += 1

    with pytest.raises(ArgumentError, match=r"as Listening\.on_before_backward would not run at a replay"):
        fit(None, Listening(), graphs=EagerGraphs())
    listening = Listening()
    with pytest.warns(UserWarning, match="steps run eagerly, without graphs: Listening"):
        _, seen, batching = fit(None, listening, graphs="auto")
    assert listening.num == len(seen)
    assert batching.graph_summary().num_replayed == 0


class Logging(Words):
    def loss_sums(self, batch):
        loss, weight = super().loss_sums(batch)
        self.log("loss", loss / weight)
        return loss, weight


class Telling(Words):
    def loss_sums(self, batch):
        loss, weight = super().loss_sums(batch)
        self.trainer.newest = loss.detach()
        return loss, weight


class Annealed(Words):
    def loss_sums(self, batch):
        loss, weight = super().loss_sums(batch)
        return loss * (1 + self.global_step), weight


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Logging, "loss_sums logs, which a replay would not; leave graphs out, or return sums in the third place"),
        (Annealed, "loss_sums reads global_step of the Trainer, which a replay would not see change"),
        (Telling, "loss_sums writes newest of the Trainer, which a replay would not; leave graphs out"),
    ],
    ids=["logs", "reads", "writes"],
)
def test_a_loss_that_logs_or_uses_the_trainer_is_refused(kind, message):
    with pytest.raises(ArgumentError, match=message):
        fit(kind(), graphs=EagerGraphs())


def test_the_trainer_of_a_module_is_there_again_after_a_refusal():
    model = Logging()
    with pytest.raises(ArgumentError, match="loss_sums logs"):
        fit(model, graphs=EagerGraphs())
    assert isinstance(model.trainer, pl.Trainer)
    assert model.log.__func__ is pl.LightningModule.log


@pytest.mark.filterwarnings("ignore:.*CUDA device")
def test_auto_goes_on_eagerly_after_a_loss_that_logs():
    weights, losses, _ = fit(Logging())
    with pytest.warns(UserWarning, match="steps run eagerly, without graphs: loss_sums logs"):
        found, seen, batching = fit(Logging(), graphs="auto")
    assert seen == losses
    assert torch.equal(found, weights)
    assert batching.graph_summary().num_replayed == 0


def test_a_plan_of_many_shapes_is_refused():
    lengths = np.random.default_rng(0).integers(2, 200, size=400)
    loader = DataLoader(DATA * 5, batch_sampler=bw.BatchSampler(lengths, bw.MaxTokens(300)), collate_fn=PadCollator())
    with pytest.raises(ArgumentError, match=r"the plan has \d+ shapes, and each would be a graph; group by Buckets\("):
        fit(data=PlannedDataModule(loader, val=DataLoader(DATA[:4], collate_fn=PadCollator())), graphs=EagerGraphs())


def test_more_than_64_given_shapes_are_refused():
    lengths = np.random.default_rng(0).integers(2, 200, size=400)
    many = bw.BatchSampler(lengths, bw.MaxTokens(300))
    assert len(np.unique(many.plan.shapes, axis=0)) > 64
    with pytest.raises(ArgumentError, match=r"the plan has \d+ shapes, and each would be a graph"):
        fit(graphs=EagerGraphs(), shapes=many)


def test_auto_on_a_cpu_says_so_once():
    with pytest.warns(UserWarning, match="steps run eagerly, without graphs: graphs need a model on a CUDA") as caught:
        fit(graphs="auto")
    assert len([warning for warning in caught if "without graphs" in str(warning.message)]) == 1


def test_graphs_need_cuda():
    with pytest.raises(ArgumentError, match="graphs=True needs a model on a CUDA device"):
        fit(graphs=True)


@pytest.mark.needs_cuda
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_lightning_trainer_on_cuda_replays_what_it_would_run_eagerly(precision):
    options = {"trainer_options": {"accelerator": "gpu", "devices": 1, "precision": precision}}
    _, losses, _ = fit(**options)
    _, seen, batching = fit(graphs=True, **options)
    assert seen == pytest.approx(losses, rel=2e-2 if "bf16" in precision else 1e-4)
    assert batching.graph_summary().num_replayed > 10
