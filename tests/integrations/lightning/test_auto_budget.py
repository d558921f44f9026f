"""AdaptiveBatching(budget="auto"): found when training begins, kept by checkpoints, refused where it cannot be."""

from itertools import chain

import pytest
import torch

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.integrations import _planned_budget
from batchwright.integrations.lightning import AdaptiveBatching, PlannedDataModule, planned_loader
from batchwright.step import MemoryMonitor
from batchwright.testing import FakeMemory

from .test_checkpoints import Save
from .training import LENGTHS, Automatic, Model, fit, make_loader, make_resizable, make_trainer, parameters

ONE = bw.MaxItems(1)


@pytest.fixture(autouse=True)
def _apart(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    torch.set_num_threads(1)


class Logging(Model):
    """A model that draws random numbers, logs, and takes made-up memory by the longest example of a batch."""

    def __init__(self, memory):
        super().__init__()
        self._memory, self.num_calls = [memory], 0

    def loss_sums(self, batch):
        longest = max(int(LENGTHS[index]) for index in batch["index"].tolist())
        self._memory[0].run_batch(len(batch["x"]), longest, 10)
        self.log("draw", torch.rand(()))
        return super().loss_sums(batch)


def train(budget="auto", *, total_bytes=10_000, sampler_budget=ONE, **options):
    memory = FakeMemory(total_bytes, used_bytes=100)
    batching = AdaptiveBatching(budget=budget, memory=MemoryMonitor(source=memory))
    loader = make_loader(bw.BatchSampler(LENGTHS, sampler_budget))
    torch.manual_seed(3)
    model, trainer = fit(Logging(memory), loader, batching=batching, **options)
    return model, trainer, batching, memory


def test_training_is_that_with_the_found_budget_given_to_the_sampler():
    model, trainer, batching, memory = train(max_epochs=2)
    given, *_ = train(None, sampler_budget=batching.found_budget, max_epochs=2)
    assert given.batches == model.batches
    assert len(model.batches) < 2 * len(LENGTHS)
    assert sorted(chain(*model.batches[: len(model.batches) // 2])) == list(range(len(LENGTHS)))
    assert torch.equal(parameters(given), parameters(model))
    assert memory.peak_bytes <= 0.9 * 10_000
    assert trainer.global_step == len(model.batches)
    assert "log" not in vars(model)


def test_a_loader_that_is_made_before_training_will_do():
    memory = FakeMemory(10_000, used_bytes=100)
    batching = AdaptiveBatching(budget="auto", memory=MemoryMonitor(source=memory))
    trainer = make_trainer(batching, max_epochs=1)
    trainer.fit(
        model := Logging(memory), planned_loader(make_loader(bw.BatchSampler(LENGTHS, bw.MaxItems(1))), trainer)
    )
    assert sorted(chain(*model.batches)) == list(range(len(LENGTHS)))
    assert batching.found_budget is not None


def test_a_known_budget_is_not_looked_for_again(monkeypatch):
    *_, first, _ = train(max_epochs=1)
    monkeypatch.setattr(_planned_budget, "find_budget", None)
    *_, second, _ = train(max_epochs=1)
    assert second.found_budget == first.found_budget


def test_a_loss_that_is_written_anew_is_measured_again(tmp_path):
    """loss_sums of the same name may hold more; the class before was found in the cache."""

    class Twice(Logging):
        def loss_sums(self, batch):
            loss, weight = super().loss_sums(batch)
            return 2 * loss, weight

    Twice.__qualname__, Twice.__module__ = Logging.__qualname__, Logging.__module__
    for kind in (Logging, Logging, Twice):
        memory = FakeMemory(10_000, used_bytes=100)
        batching = AdaptiveBatching(budget="auto", memory=MemoryMonitor(source=memory))
        fit(kind(memory), make_loader(bw.BatchSampler(LENGTHS, ONE)), batching=batching, max_epochs=1)
    assert len(list((tmp_path / "cache" / "batchwright" / "budgets").iterdir())) == 2


@pytest.mark.parametrize("num_steps", [1, 3, 12])
def test_a_resumed_run_plans_the_same_batches_whatever_it_would_find(num_steps, tmp_path, monkeypatch):
    whole, _, batching, _ = train(total_bytes=2_000, max_epochs=2, callbacks=[Save(tmp_path)])
    monkeypatch.setattr(_planned_budget, "find_budget", None)
    resumed, _, again, _ = train(total_bytes=40_000, max_epochs=2, ckpt_path=tmp_path / f"{num_steps}.ckpt")
    assert again.found_budget == batching.found_budget
    assert resumed.batches == whole.batches[num_steps:]
    assert torch.equal(parameters(resumed), parameters(whole))


@pytest.mark.parametrize("budget", [bw.MaxTokens(8), "automatic"], ids=["given", "word"])
def test_other_budgets_belong_to_the_sampler(budget):
    with pytest.raises(ArgumentError, match="'auto'"):
        AdaptiveBatching(budget=budget)


def test_batches_that_a_controller_sizes_are_left_to_the_stepper():
    with pytest.raises(ArgumentError, match="leave budget out: where a controller decides the size, Stepper"):
        fit(Model(), make_resizable(), batching=AdaptiveBatching(budget="auto"))


def test_a_module_with_updates_of_its_own_is_refused():
    trainer = make_trainer(AdaptiveBatching(budget="auto"), max_epochs=1)
    with pytest.raises(ArgumentError, match="Automatic does not have; derive it from ExactUpdates"):
        trainer.fit(Automatic(), PlannedDataModule(make_loader()))


def test_a_schedule_that_needs_the_number_of_batches_first_is_refused():
    class Scheduled(Model):
        def configure_optimizers(self):
            assert self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    with pytest.raises(ArgumentError, match="configure_optimizers cannot ask for it; set max_steps, or give a budget"):
        fit(Scheduled(), batching=AdaptiveBatching(budget="auto"))


@pytest.mark.parametrize("option", ["budget", "controller"])
def test_a_loader_that_nobody_plans_is_refused(option):
    trainer = make_trainer(AdaptiveBatching(**{option: "auto"}))
    loader = torch.utils.data.DataLoader([{"x": torch.ones(4), "index": 0}] * 8, batch_size=4)
    with pytest.raises(ArgumentError, match=rf"AdaptiveBatching\({option}='auto'\) .* PlannedDataModule\(loader\)"):
        trainer.fit(Model(), loader)
