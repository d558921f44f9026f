"""AdaptiveBatching and ExactUpdates under a real Trainer on the CPU: one process here, two in ranks.py."""

from itertools import chain
from types import SimpleNamespace

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import DataLoader

import batchwright as bw
from batchwright.errors import ArgumentError, StateMismatchError
from batchwright.integrations.lightning import AdaptiveBatching, ExactUpdates, PlannedDataModule, planned_loader
from batchwright.plan._regroup import regroup
from batchwright.plan.resizable import ResizableBatchSampler
from batchwright.size.controller import BatchSizeController
from batchwright.size.schedules import linear
from batchwright.size.signals import loss_driven
from batchwright.step import Stepper

from ...processes import run_ranks

LENGTHS = np.random.default_rng(0).integers(1, 30, size=61)
INPUTS = torch.randn(61, 4, generator=torch.Generator().manual_seed(0))
DATA = [{"x": INPUTS[index], "index": index} for index in range(61)]
OPTIONS = {"grouping": bw.WindowSort(batches_per_window=1)}
BUDGET = bw.MaxTokens(120)
# The second epoch is longer than the first, the third shorter.
NUM_BATCHES = [12, 13, 12]

# What Lightning says about small examples as these, and what torch says about Lightning.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .* does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


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


def test_examples_are_collated_a_micro_batch_at_a_time():
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


def test_planned_data_serves_automatic_optimisation(tmp_path):
    whole, resumed = fit_and_resume(tmp_path, 14, make_model=Automatic)
    assert whole.batches == list(chain(*plans()))
    assert resumed.batches == whole.batches[14:]


# Checkpoints.


class Save(Callback):
    """Save a checkpoint behind every update."""

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


def make_resizable(num_workers=0):
    controller = BatchSizeController(loss_driven(per="step"), min_size=2, max_size=16, initial=4)
    return DataLoader(DATA, batch_sampler=ResizableBatchSampler(61, controller), num_workers=num_workers)


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
def test_loaders_that_are_asked_for_every_epoch_give_every_example(make, tmp_path):
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
    # Every fifth batch of an epoch: twice in 12 and 13 batches; and once an epoch.
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


def test_bf16_is_used_in_the_forward_pass_alone():
    model, trainer = fit(Watching(), precision="bf16-mixed")
    assert model.types == {torch.bfloat16}
    assert (set(model.gradients), model.is_autocast) == ({torch.float32}, {False})
    assert len(model.gradients) == trainer.global_step == sum(NUM_BATCHES)  # hooks run once an update


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

    with pytest.raises(ArgumentError, match="one optimizer, configure_optimizers returned 2"):
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
