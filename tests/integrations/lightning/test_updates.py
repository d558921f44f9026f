"""AdaptiveBatching and ExactUpdates under a real Trainer on the CPU: one process here, two in ranks.py."""

from itertools import chain

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

from batchwright.errors import ArgumentError
from batchwright.integrations.lightning import AdaptiveBatching, ExactUpdates, PlannedDataModule, planned_loader
from batchwright.plan.sampler.resizable import ResizableBatchSampler
from batchwright.size.controller import BatchSizeController
from batchwright.size.schedules import linear
from batchwright.step import FitToMemory, MemoryMonitor, Stepper
from batchwright.testing import FakeMemory

from ...processes import run_ranks
from .training import (
    DATA,
    INPUTS,
    NUM_BATCHES,
    Automatic,
    Model,
    Validated,
    fit,
    make_loader,
    make_resizable,
    make_sampler,
    make_trainer,
    parameters,
    plans,
    sums_of,
)

# What Lightning says about small examples as these, and what torch says about Lightning.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .* does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


# The update and the data.


def test_training_is_that_of_a_plain_loop_over_the_plans_of_all_epochs():
    model, trainer = fit(batching=AdaptiveBatching(clip_norm=1.0))
    assert list(map(len, plans())) == NUM_BATCHES
    assert model.batches == list(chain(*plans()))
    twin = Model()
    stepper = Stepper(twin, torch.optim.AdamW(twin.parameters(), lr=0.01), sums_of, clip_norm=1.0)
    for batch in chain(*plans()):
        stepper.step({"x": INPUTS[batch]})
    assert torch.equal(parameters(model), parameters(twin))
    assert trainer.global_step == sum(NUM_BATCHES)


def test_every_epoch_is_validated_at_its_end_on_the_same_batches_whatever_its_length():
    model, _ = fit(Validated(), val=make_loader(), num_sanity_val_steps=0)
    ends = np.cumsum(NUM_BATCHES).tolist()
    assert sorted({step for step, _ in model.validated}) == ends
    for end in ends:
        assert [batch for step, batch in model.validated if step == end] == plans(1)[0]


def test_validation_within_an_epoch_follows_its_length():
    model, _ = fit(Validated(), val=DataLoader(DATA, batch_size=61), num_sanity_val_steps=0, val_check_interval=0.5)
    # Halves of 12, 13 and 12 batches, rounded down: 6 and 12, then 6 and 12 of 13, then 6 and 12.
    assert [step for step, _ in model.validated] == [6, 12, 18, 24, 31, 37]


def test_a_resizable_epoch_holds_every_example_once_and_is_validated():
    model, _ = fit(Validated(), make_resizable(), val=DataLoader(DATA, batch_size=61), num_sanity_val_steps=0)
    seen = list(chain(*model.batches))
    assert [sorted(seen[start : start + 61]) for start in (0, 61, 122)] == [list(range(61))] * 3
    assert len({len(batch) for batch in model.batches}) > 2, "sizes change"
    assert len(model.validated) == 3


def test_a_loader_can_be_handed_to_fit_without_a_data_module():
    model, trainer = Model(), make_trainer(AdaptiveBatching())
    trainer.fit(model, planned_loader(make_loader(), trainer))
    assert model.batches == list(chain(*plans()))


def test_a_data_module_serves_one_trainer_after_the_other():
    data, models = PlannedDataModule(make_loader()), [Model(), Model()]
    for model in models:
        make_trainer(AdaptiveBatching()).fit(model, data)
    assert models[0].batches == models[1].batches == list(chain(*plans()))


def test_data_that_lightning_divides_is_updated_exactly_too():
    model, trainer = Model(), make_trainer(AdaptiveBatching(micro_batch=3), max_epochs=1)
    trainer.fit(model, DataLoader(DATA, batch_size=8))
    twin = Model()
    stepper = Stepper(twin, torch.optim.AdamW(twin.parameters(), lr=0.01), sums_of)
    for start in range(0, 61, 8):
        stepper.step({"x": INPUTS[start : start + 8]})
    assert torch.allclose(parameters(model), parameters(twin), rtol=1e-5, atol=1e-7)


def test_examples_are_collated_one_micro_batch_at_a_time():
    widths = []

    def collate(examples):
        widths.append(len(examples))
        return {"x": torch.stack([example["x"] for example in examples])}

    model, _ = fit(loader=make_loader(collate_fn=list), batching=AdaptiveBatching(collate=collate, micro_batch=4))
    assert model.batches == list(chain(*plans()))
    assert (max(widths), sum(widths)) == (4, 3 * 61)


def test_out_of_memory_is_split_and_counted():
    class Scarce(Model):
        def loss_sums(self, batch):
            if len(batch["x"]) > 3:
                raise torch.OutOfMemoryError("more than three examples")
            return super().loss_sums(batch)

    batching = AdaptiveBatching()
    model, trainer = fit(Scarce(), batching=batching, log_every_n_steps=1)
    assert model.batches == list(chain(*plans()))
    assert trainer.global_step == sum(NUM_BATCHES)
    assert float(trainer.callback_metrics["batchwright/ooms"]) == batching.num_ooms > 0


def test_micro_batches_follow_memory_without_a_call_by_the_user():
    """Before, nothing fed FitToMemory under a Trainer: the size stayed 1."""
    memory = FakeMemory(1000, used_bytes=100, bytes_of=lambda num_items: 10 * num_items)

    class Measured(Model):
        def loss_sums(self, batch):
            memory.run_batch(len(batch["x"]))
            return super().loss_sums(batch)

    fit_to = FitToMemory(16)
    batching = AdaptiveBatching(micro_batch=fit_to, memory=MemoryMonitor(source=memory))
    model, trainer = Measured(), make_trainer(batching, max_epochs=1)
    trainer.fit(model, DataLoader(DATA, batch_size=16))
    assert fit_to.size == 16
    assert batching.stepper.state_dict()["memory"]["size"] == 16


class Unfreezing(BaseFinetuning):
    """Trains the head alone in the first epoch, and the rest as well, ten times slower, from the second on."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.body)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.body, optimizer, initial_denom_lr=10)


class TwoParts(ExactUpdates, pl.LightningModule):
    """A body and a head in double precision; examples count once to three times, and at most ``room`` fit."""

    def __init__(self, room=100):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(4, 3).double(), nn.Linear(3, 1).double()
        self.room = room

    def loss_sums(self, batch):
        weights = 1.0 + batch["index"] % 3
        losses = self.head(torch.tanh(self.body(batch["x"].double()))).square().squeeze(1)
        loss = (losses * weights).sum()
        if len(losses) > self.room:
            loss.register_hook(run_out)
        return loss, weights.sum()

    def configure_optimizers(self):
        return torch.optim.SGD([value for value in self.parameters() if value.requires_grad], lr=0.1)


def run_out(gradient):
    raise torch.OutOfMemoryError("out of memory")


def tune_by_hand(num_epochs):
    """Return the parameters after plain autograd, one example at a time, in batches of 8."""
    model = TwoParts()
    for epoch in range(num_epochs):
        for start in range(0, 61, 8):
            weights = {index: 1.0 + index % 3 for index in range(start, min(start + 8, 61))}
            for index, weight in weights.items():
                loss = model.head(torch.tanh(model.body(INPUTS[index].double()))).square().sum()
                (loss * weight / sum(weights.values())).backward()
            for part, rate in ((model.head, 0.1), (model.body, 0.01 if epoch >= 1 else 0.0)):
                for value in part.parameters():
                    value.data -= rate * value.grad
                    value.grad = None
    return parameters(model)


@pytest.mark.parametrize(("micro_batch", "room"), [("auto", 100), (3, 100), ("auto", 3)])
def test_parameters_that_a_callback_unfreezes_are_trained_exactly(micro_batch, room):
    """Before, sums of the body over micro-batches were not divided by their weight: 6 % off after two epochs."""
    model, batching = TwoParts(room), AdaptiveBatching(micro_batch=micro_batch)
    trainer = make_trainer(batching, Unfreezing(), max_epochs=3)
    trainer.fit(model, DataLoader(DATA, batch_size=8))
    torch.testing.assert_close(parameters(model), tune_by_hand(3), rtol=1e-12, atol=1e-14)


# Figures, schedulers, controller.


def test_figures_reach_the_logger(tmp_path):
    batching = AdaptiveBatching(measure_noise=True)
    fit(batching=batching, logger=CSVLogger(tmp_path), log_every_n_steps=1, max_epochs=1)
    lines = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    rows = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
    sizes = [float(row["batchwright/batch_size"]) for row in rows if row["batchwright/batch_size"]]
    assert sizes == list(map(len, plans(1)[0]))
    assert float(rows[11]["batchwright/loss"]) == pytest.approx(batching.report.loss)
    assert any(row["batchwright/noise_scale"] for row in rows)
    padding = next(row["batchwright/padding"] for row in rows if row["batchwright/padding"])
    assert float(padding) == pytest.approx(make_sampler().report().padding)


def both_intervals(optimizer, trainer):
    by_step = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    by_epoch = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.1)
    return [{"scheduler": by_step, "interval": "step", "frequency": 5}, {"scheduler": by_epoch, "interval": "epoch"}]


def test_schedulers_advance_by_their_interval_and_frequency():
    _, trainer = fit(Model(both_intervals))
    # Every fifth batch of an epoch: twice in 12 and 13 batches; and once per epoch.
    assert [config.scheduler.last_epoch for config in trainer.lr_scheduler_configs] == [6, 3]
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**6 * 0.1**3)


def test_a_schedule_by_epochs_takes_effect_with_the_first_batch_of_the_epoch():
    controller = BatchSizeController(linear(10, 10, per="epoch"), min_size=2, max_size=64)
    sampler = ResizableBatchSampler(61, controller)
    model, _ = fit(loader=DataLoader(DATA, batch_sampler=sampler))
    # 61 examples by 10, 20 and 30.
    assert list(map(len, model.batches)) == [10] * 6 + [1] + [20] * 3 + [1] + [30] * 2 + [1]
    assert sampler.controller.history == controller.history


# Precision.


class Watching(Model):
    """Notes the type that a layer computes in, and of the gradients."""

    def __init__(self):
        super().__init__()
        self.types, self.gradients, self.is_autocast = set(), [], set()

    def loss_sums(self, batch):
        self.types.add(self.net[0](batch["x"]).dtype)
        return super().loss_sums(batch)

    def on_before_optimizer_step(self, optimizer):
        self.gradients.append(self.net[0].weight.grad.dtype)
        self.is_autocast.add(torch.is_autocast_enabled("cpu"))


def test_bf16_is_used_only_in_the_forward_pass():
    model, trainer = fit(Watching(), precision="bf16-mixed")
    assert model.types == {torch.bfloat16}
    assert (set(model.gradients), model.is_autocast) == ({torch.float32}, {False})
    assert len(model.gradients) == trainer.global_step == sum(NUM_BATCHES)  # hooks run once per update


def test_a_scaler_is_used_once_and_updates_are_counted():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    batching = AdaptiveBatching(weight_of=lambda batch: len(batch["x"]))
    model, trainer = fit(Watching(), batching=batching, plugins=MixedPrecision("16-mixed", "cpu", scaler), max_epochs=1)
    plain, _ = fit(max_epochs=1)
    assert model.types == {torch.float16}
    assert trainer.global_step == NUM_BATCHES[0]
    # Rounding of float16 is about 1e-3; a gradient scaled twice or never would move AdamW far.
    assert torch.allclose(parameters(model), parameters(plain), atol=5e-3)
    assert not torch.equal(parameters(model), parameters(Model()))


# What is refused, and the other name of the package.


def test_a_trainer_without_the_callback_is_refused():
    with pytest.raises(ArgumentError, match="needs one AdaptiveBatching, got 0"):
        planned_loader(make_loader(), pl.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False))


def test_a_loader_without_a_planned_sampler_is_refused():
    with pytest.raises(ArgumentError, match="batchwright sampler"):
        fit(loader=DataLoader(DATA, batch_size=4))


def test_options_of_the_stepper_need_exact_updates():
    with pytest.raises(ArgumentError, match="Automatic runs its own updates"):
        fit(Automatic(), batching=AdaptiveBatching(clip_norm=1.0))


def test_precision_is_left_to_the_trainer():
    with pytest.raises(ArgumentError, match=r"autocast comes from Trainer\(precision"):
        AdaptiveBatching(autocast=torch.bfloat16)


def test_several_optimizers_are_refused():
    class Two(Model):
        def configure_optimizers(self):
            return [torch.optim.SGD(self.net[place].parameters(), lr=0.1) for place in (0, 2)]

    with pytest.raises(ArgumentError, match="a single optimizer, but configure_optimizers returned 2"):
        fit(Two())


def test_automatic_optimisation_cannot_be_switched_on_again():
    model = Model()
    model.automatic_optimization = False  # as modules with updates of their own write
    with pytest.raises(ArgumentError, match="by hand"):
        model.automatic_optimization = True


def test_overfitting_on_some_batches_is_refused():
    with pytest.raises(ArgumentError, match="overfit_batches"):
        fit(overfit_batches=2)


def test_a_module_without_loss_sums_cannot_be_made():
    class Empty(ExactUpdates, Automatic):
        pass

    with pytest.raises(TypeError, match="loss_sums"):
        Empty()


def test_the_other_name_of_the_package_works_with_a_planned_loader():
    other = pytest.importorskip("pytorch_lightning")

    class Net(ExactUpdates, other.LightningModule):
        loss_sums, on_train_batch_start = Model.loss_sums, Model.on_train_batch_start

        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 1)
            self.batches = []

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    model, trainer = Net(), make_trainer(AdaptiveBatching(), package=other)
    trainer.fit(model, planned_loader(make_loader(), trainer))
    assert model.batches == list(chain(*plans()))


# Ranks.


def test_two_ranks_train_as_one_process_would_and_resume(tmp_path):
    run_ranks("tests.integrations.lightning.ranks", 2, tmp_path)
