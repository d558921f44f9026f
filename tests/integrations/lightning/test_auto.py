"""AdaptiveBatching(controller="auto"): the size is found, and rate, beta2 and schedulers follow it."""

from itertools import chain

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.integrations.lightning import AdaptiveBatching
from batchwright.step import StepReport

from .training import Model, fit, parameters

NUM, BASE = 320, 4
DRAW = torch.Generator().manual_seed(0)
DATA = [{"x": torch.randn(4, generator=DRAW), "index": index} for index in range(NUM)]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def launch_bound(monkeypatch):
    """Plant a clock on which an update takes 50 ms, whatever it holds."""
    monkeypatch.setattr(StepReport, "seconds", property(lambda self: 0.05))


class Guesser(Model):
    """Guesses noise, whose gradients say little about the next example."""

    def __init__(self, schedulers=None, *, norm=False):
        super().__init__(schedulers)
        if norm:
            self.net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1))
        self.reports, self.rates = [], []

    def loss_sums(self, batch):
        wanted = (batch["index"] % 7 - 3).float()[:, None]
        return (self.net(batch["x"]) - wanted).square().sum(), len(batch["x"])

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.reports.append(outputs["report"])
        self.rates.append(self.optimizers().param_groups[0]["lr"])


def make_loader():
    return DataLoader(DATA, batch_size=BASE, shuffle=True)


@pytest.mark.parametrize("norm", [True, False], ids=["norms", "no norms"])
def test_the_size_grows_and_rate_and_beta2_follow(norm):
    lines = []
    batching = AdaptiveBatching(controller="auto", history=lines.append)
    model, _ = fit(Guesser(norm=norm), make_loader(), batching=batching, max_epochs=2)
    sizes = [report.batch_size for report in model.reports]
    assert (sizes[0], max(sizes)) == (BASE, NUM // 20)
    assert sorted(chain.from_iterable(model.batches)) == sorted([*range(NUM)] * 2)
    assert "timing 8" in lines[0]
    assert "times the examples per second of" in lines[-1]
    for report in model.reports:
        factor = report.batch_size / BASE
        assert report.lr == pytest.approx(0.01 * factor**0.5)
        assert report.beta2 == pytest.approx(0.999**factor)


def test_schedulers_advance_with_the_examples():
    def schedulers(optimizer, trainer):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 160)
        return [{"scheduler": scheduler, "interval": "step"}]

    model, _ = fit(Guesser(schedulers), make_loader(), batching=AdaptiveBatching(controller="auto"), max_epochs=2)
    done = 0
    for report, rate in zip(model.reports, model.rates, strict=True):
        done += report.batch_size
        assert rate == pytest.approx(0.01 * (1 - done // BASE / 160), abs=1e-12)
    assert (done, model.rates[-1]) == (2 * NUM, pytest.approx(0, abs=1e-12))


def test_a_resumed_fit_is_the_one_without_a_break(tmp_path):
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    options = {"max_epochs": 2}
    whole, _ = fit(
        Guesser(), make_loader(), batching=AdaptiveBatching(controller="auto"), callbacks=[Save()], **options
    )
    assert len({len(batch) for batch in whole.batches}) > 3
    for stop_at in (5, 25, len(whole.batches) - 3):
        path = tmp_path / f"{stop_at}.ckpt"
        batching = AdaptiveBatching(controller="auto")
        resumed, _ = fit(Guesser(), make_loader(), batching=batching, ckpt_path=path, **options)
        assert resumed.batches == whole.batches[stop_at:]
        assert torch.equal(parameters(resumed), parameters(whole))


def test_batches_of_its_own_are_refused():
    sampler = bw.BatchSampler([1] * NUM, bw.MaxItems(4))
    with pytest.raises(ArgumentError, match="makes the batches itself, from a DataLoader with a batch_size"):
        fit(Guesser(), DataLoader(DATA, batch_sampler=sampler), batching=AdaptiveBatching(controller="auto"))
