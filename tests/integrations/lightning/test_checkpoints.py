"""Fits that resume from a checkpoint: the same batches, sizes and parameters as without a break."""

from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader

import batchwright as bw
from batchwright.errors import StateMismatchError
from batchwright.integrations.lightning import AdaptiveBatching
from batchwright.plan.sampler.regrouping import regroup
from batchwright.plan.sampler.resizable import ResizableBatchSampler
from batchwright.size.controller import BatchSizeController
from batchwright.size.signals import loss_driven
from batchwright.step import FitToMemory, MemoryMonitor
from batchwright.testing import FakeMemory

from .training import (
    BUDGET,
    DATA,
    LENGTHS,
    OPTIONS,
    Automatic,
    Model,
    fit,
    make_loader,
    make_resizable,
    parameters,
    plans,
)

# What Lightning says about small examples as these, and what torch says about Lightning.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .* does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


class Save(Callback):
    """Save a checkpoint after every update."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.save_checkpoint(self.folder / f"{trainer.global_step}.ckpt")


def fit_and_resume(folder, num_steps, make_loader=make_loader, make_model=Model, **options):
    """Return the models of a fit without a break and of one from the checkpoint that it left on the way."""
    whole, _ = fit(make_model(), make_loader(), callbacks=[Save(folder)], **options)
    resumed, _ = fit(make_model(), make_loader(), ckpt_path=folder / f"{num_steps}.ckpt", **options)
    return whole, resumed


def check_resumed(whole, resumed, num_steps):
    assert resumed.batches == whole.batches[num_steps:]
    assert torch.equal(parameters(resumed), parameters(whole))


# The first epoch ends with update 12, the second with 25, the third with 37.
@pytest.mark.parametrize("num_steps", [1, 11, 12, 14, 24, 25, 36])
def test_a_resumed_fit_sees_the_same_batches_and_ends_at_the_same_parameters(num_steps, tmp_path):
    check_resumed(*fit_and_resume(tmp_path, num_steps), num_steps)


@pytest.mark.parametrize("num_steps", [12, 14])
def test_a_fit_counted_in_steps_resumes_as_well(num_steps, tmp_path):
    check_resumed(*fit_and_resume(tmp_path, num_steps, max_epochs=-1, max_steps=30), num_steps)


def find_epoch_ends(batches):
    return [num for num in range(1, len(batches)) if sum(map(len, batches[:num])) % 61 == 0]


@pytest.mark.parametrize("limits", [{}, {"max_epochs": -1, "max_steps": 24}])
def test_a_resizable_fit_resumes_with_the_same_sizes_from_every_update(limits, tmp_path):
    whole, _ = fit(loader=make_resizable(), callbacks=[Save(tmp_path)], **limits)
    assert len(find_epoch_ends(whole.batches)) >= 2, "ends of epochs are among the places"
    assert len({len(batch) for batch in whole.batches}) > 2, "sizes change"
    for num_steps in range(1, len(whole.batches)):
        resumed, _ = fit(loader=make_resizable(), ckpt_path=tmp_path / f"{num_steps}.ckpt", **limits)
        check_resumed(whole, resumed, num_steps)


def test_batches_that_workers_formed_ahead_are_formed_the_same_again(tmp_path):
    def make():
        return make_resizable(num_workers=2)

    check_resumed(*fit_and_resume(tmp_path, 5, make, max_epochs=1), 5)


def test_regrouped_batches_resume(tmp_path):
    def make():
        controller = BatchSizeController(loss_driven(per="step"), min_size=2, max_size=16, initial=4)
        return regroup(DataLoader(DATA, batch_size=8, collate_fn=list), controller)

    def collate(examples):
        return {"x": torch.stack([example["x"] for example in examples])}

    whole = fit(loader=make(), batching=AdaptiveBatching(collate=collate), callbacks=[Save(tmp_path)])[0]
    resumed = fit(loader=make(), batching=AdaptiveBatching(collate=collate), ckpt_path=tmp_path / "7.ckpt")[0]
    assert sorted(chain(*whole.batches)) == sorted([*range(61)] * 3)
    check_resumed(whole, resumed, 7)


def test_a_size_that_follows_memory_resumes(tmp_path):
    memory = FakeMemory(1000, bytes_of=lambda num_items: 40 * num_items)

    class Measured(Model):
        def loss_sums(self, batch):
            memory.run_batch(len(batch["x"]))
            return super().loss_sums(batch)

    def make():
        return AdaptiveBatching(micro_batch=FitToMemory(16), memory=MemoryMonitor(source=memory))

    whole, resumed = make(), make()
    fit(Measured(), batching=whole, callbacks=[Save(tmp_path)], max_epochs=1)
    saved = torch.load(tmp_path / "2.ckpt", weights_only=True)["callbacks"]["AdaptiveBatching"]["stepper"]["memory"]
    assert saved["size"] == 4  # 1, then 2 and 4, at 0.04 and 0.08 of memory
    fit(Measured(), batching=resumed, ckpt_path=tmp_path / "2.ckpt", max_epochs=1)
    assert resumed.stepper.state_dict()["memory"] == whole.stepper.state_dict()["memory"]


def test_a_checkpoint_at_the_end_of_an_epoch_goes_on_with_the_next(tmp_path):
    for make in (make_loader, make_resizable):
        folder = tmp_path / make.__name__
        savers = [ModelCheckpoint(folder, save_top_k=-1, every_n_epochs=1, filename="{epoch}") for _ in range(2)]
        whole, _ = fit(Model(), make(), callbacks=[savers[0]], enable_checkpointing=True)
        path = folder / "epoch=1.ckpt"
        resumed, _ = fit(Model(), make(), callbacks=[savers[1]], enable_checkpointing=True, ckpt_path=path)
        check_resumed(whole, resumed, len(whole.batches) - len(resumed.batches))
        assert sorted(chain(*resumed.batches)) == list(range(61)), "the third epoch"


@pytest.mark.parametrize("make", [make_loader, make_resizable])
def test_loaders_asked_for_in_every_epoch_give_every_example(make, tmp_path):
    model, _ = fit(loader=make(), reload_dataloaders_every_n_epochs=1)
    seen = list(chain(*model.batches))
    assert [sorted(seen[start : start + 61]) for start in (0, 61, 122)] == [list(range(61))] * 3


def test_a_checkpoint_with_a_controller_is_refused_where_nothing_observes(tmp_path):
    fit(loader=make_resizable(), callbacks=[Save(tmp_path)], max_epochs=1)
    fixed = DataLoader(DATA, batch_sampler=ResizableBatchSampler(61, SimpleNamespace(size=4)))
    with pytest.raises(StateMismatchError, match="state of controller, which this run does not have"):
        fit(loader=fixed, ckpt_path=tmp_path / "3.ckpt")


def test_a_checkpoint_of_other_data_is_refused(tmp_path):
    fit(callbacks=[Save(tmp_path)], max_epochs=1)
    other = DataLoader(DATA, batch_sampler=bw.BatchSampler(LENGTHS[::-1], BUDGET, **OPTIONS))
    with pytest.raises(StateMismatchError, match="lengths"):
        fit(loader=other, ckpt_path=tmp_path / "3.ckpt")


def one_cycle(optimizer, trainer):
    # Asking for the number of updates makes the Trainer load the data before it has restored its own state.
    total = trainer.estimated_stepping_batches + 1
    return [{"scheduler": torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=total), "interval": "step"}]


def test_asking_for_the_number_of_updates_does_not_lose_the_place(tmp_path):
    def make():
        return Model(one_cycle)

    check_resumed(*fit_and_resume(tmp_path, 14, make_model=make), 14)


def test_planned_data_serves_automatic_optimisation(tmp_path):
    whole, resumed = fit_and_resume(tmp_path, 14, make_model=Automatic)
    assert whole.batches == list(chain(*plans()))
    assert resumed.batches == whole.batches[14:]
