"""AdaptiveBatching(controller="auto"): the size is found, and rate, beta2 and schedulers follow it."""

import warnings
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


def make_loader(batch_size=BASE):
    return DataLoader(DATA, batch_size=batch_size, shuffle=True)


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
    assert len({len(batch) for batch in whole.batches}) >= 3
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


class Descending(Guesser):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001)


def fit_twice(first, second, sizes=(BASE, BASE)):
    """Fit two modules with the same callback and return the reports of the second fit."""
    batching = AdaptiveBatching(controller="auto")
    fit(first, make_loader(sizes[0]), batching=batching, max_epochs=1)
    return fit(second, make_loader(sizes[1]), batching=batching, max_epochs=1)[0].reports


def test_a_second_fit_begins_at_the_batch_size_of_its_own_loader():
    assert fit_twice(Guesser(), Guesser(), sizes=(4, 8))[0].batch_size == 8


def test_a_second_fit_couples_rate_and_beta2_as_its_own_optimizer_needs():
    reports = fit_twice(Descending(), Guesser())
    assert max(report.batch_size for report in reports) > BASE
    for report in reports:
        factor = report.batch_size / BASE
        assert report.lr == pytest.approx(0.01 * factor**0.5)
        assert report.beta2 == pytest.approx(0.999**factor)


def test_a_second_fit_with_sgd_is_not_refused_for_a_rule_that_nobody_gave():
    for report in fit_twice(Guesser(), Descending()):
        assert report.lr == pytest.approx(0.001 * report.batch_size / BASE)


def test_with_a_base_size_schedulers_still_advance_once_per_batch_size_examples():
    def schedulers(optimizer, trainer):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / (NUM // BASE))
        return [{"scheduler": scheduler, "interval": "step"}]

    batching = AdaptiveBatching(controller="auto", base_size=8)
    model, _ = fit(Guesser(schedulers), make_loader(), batching=batching, max_epochs=1)
    assert model.rates[-1] == pytest.approx(0.0, abs=1e-12)


class SharedNorm(Guesser):
    """Norms a number that all examples share."""

    def __init__(self):
        super().__init__()
        self.norm, self.query = nn.LayerNorm(4), nn.Parameter(torch.tensor([[1.0, -1.0, 2.0, 0.5]]))

    def loss_sums(self, batch):
        return super().loss_sums({**batch, "x": batch["x"] * self.norm(self.query)})


def test_norms_that_cannot_be_measured_leave_the_noise_to_parts_of_the_batch(tmp_path):
    class Save(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.save_checkpoint(tmp_path / f"{trainer.global_step}.ckpt")

    with pytest.warns(UserWarning, match="in parts of every 8th batch: .*norm.bias: its output of shape"):
        whole, _ = fit(
            SharedNorm(), make_loader(), batching=AdaptiveBatching(controller="auto"), callbacks=[Save()], max_epochs=1
        )
    measured = [report.noise is not None for report in whole.reports]
    assert measured == [place % 8 == 0 for place in range(len(measured))]
    batching = AdaptiveBatching(controller="auto")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="noise is measured in parts")
        resumed, _ = fit(SharedNorm(), make_loader(), batching=batching, ckpt_path=tmp_path / "9.ckpt", max_epochs=1)
    assert [report.noise is not None for report in resumed.reports] == measured[9:]
    assert torch.equal(parameters(resumed), parameters(whole))
