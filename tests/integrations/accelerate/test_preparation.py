"""prepare under a real Accelerator on the CPU: one process here, two ranks in ranks.py."""

from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import AutocastKwargs, DistributedType
from torch import nn
from torch.utils.data import DataLoader

import batchwright as bw
from batchwright.errors import ArgumentError, StateMismatchError
from batchwright.integrations._options import move_after_collate
from batchwright.integrations.accelerate import prepare
from batchwright.integrations.accelerate.preparation import _mover
from batchwright.plan.sampler.regrouping import regroup
from batchwright.plan.sampler.resizable import ResizableBatchSampler
from batchwright.size.controller import BatchSizeController
from batchwright.size.schedules import linear
from batchwright.size.signals import loss_driven
from batchwright.step import FitToMemory, MemoryMonitor, Stepper, WholeBatchLoss
from batchwright.testing import FakeMemory

from ...processes import run_ranks

LENGTHS = np.random.default_rng(0).integers(1, 30, size=60)
BUDGET = bw.MaxTokens(150)
DATA = [{"x": torch.randn(4, generator=torch.Generator().manual_seed(i)), "index": i} for i in range(60)]


def forget():
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def _forget_the_accelerator():
    """Accelerators share their state within a process; every test begins without one and leaves none."""
    forget()
    yield
    forget()


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Tanh(), nn.Linear(8, 1))


def loss_fn(model, batch):
    return model(batch["x"]).square().sum(), len(batch["x"])


def make_sampler():
    return bw.BatchSampler(LENGTHS, BUDGET)


def make_run(loader=None, *, accelerator=None, model=None, lr=0.01, **options):
    """Return the accelerator and what prepare made of a new model; its dropout begins at one seed."""
    accelerator = accelerator or Accelerator(cpu=True)
    model = model or make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01 if lr else 0.0)
    loader = loader if loader is not None else DataLoader(DATA, batch_sampler=make_sampler())
    options = {"loss_fn": loss_fn, **options}
    if callable(options.get("scheduler")):
        options["scheduler"] = options["scheduler"](optimizer)
    return accelerator, prepare(accelerator, model, optimizer, loader, **options)


def indices(batch):
    return batch["index"].tolist() if isinstance(batch, dict) else [example["index"] for example in batch]


def run_epochs(prepared, num_epochs, *, after_step=None):
    """Train and return the batches; ``after_step(num_steps)`` ends training where it answers True."""
    batches = []
    for _ in range(prepared.loader.epoch, num_epochs):
        for batch in prepared.loader:
            prepared.stepper.step(batch)
            batches.append(indices(batch))
            if after_step is not None and after_step(len(batches)):
                return batches
    return batches


def parameters(prepared):
    return torch.cat([parameter.detach().flatten() for parameter in prepared.model.parameters()])


# The update and the data.


def test_training_is_that_of_a_plain_loop_with_the_same_batches():
    _, prepared = make_run(clip_norm=1.0)
    batches = run_epochs(prepared, 2)
    model = make_model()
    stepper = Stepper(model, torch.optim.AdamW(model.parameters(), lr=0.01), loss_fn, clip_norm=1.0)
    sampler = make_sampler()
    expected = []
    for _ in range(2):
        for batch in DataLoader(DATA, batch_sampler=sampler):
            stepper.step(batch)
            expected.append(indices(batch))
    assert batches == expected
    assert torch.equal(parameters(prepared), torch.cat([value.detach().flatten() for value in model.parameters()]))


def test_a_whole_batch_loss_trains_in_micro_batches_as_without_them():
    whole = WholeBatchLoss(lambda model, batch: model(batch["x"]), lambda z: ((z @ z.T).square().sum(), len(z)))
    trained = []
    for micro_batch in ("auto", 3):
        model = make_model().eval()
        _, prepared = make_run(model=model, loss_fn=whole, micro_batch=micro_batch)
        run_epochs(prepared, 1)
        trained.append(parameters(prepared))
    assert torch.allclose(*trained, atol=1e-4)


def test_every_example_comes_once_per_epoch_and_epochs_differ():
    _, prepared = make_run()
    first = run_epochs(prepared, 1)
    second = run_epochs(prepared, 2)
    assert sorted(chain(*first)) == sorted(chain(*second)) == list(range(60))
    assert first != second
    assert (prepared.loader.epoch, len(prepared.loader)) == (2, len(bw.plan_batches(LENGTHS, BUDGET, epoch=2)))


def test_an_epoch_can_be_chosen():
    _, prepared = make_run()
    prepared.loader.set_epoch(3)
    assert run_epochs(prepared, 4) == list(bw.plan_batches(LENGTHS, BUDGET, epoch=3))


def test_examples_are_collated_one_micro_batch_at_a_time():
    widths = []

    def collate(examples):
        widths.append(len(examples))
        return {"x": torch.stack([example["x"] for example in examples])}

    loader = DataLoader(DATA, batch_sampler=make_sampler(), collate_fn=list)
    _, prepared = make_run(loader, collate=collate, micro_batch=4)
    batches = run_epochs(prepared, 1)
    assert max(widths) == 4
    assert sum(widths) == len(list(chain(*batches))) == 60


def test_batches_are_moved_to_the_device_and_examples_only_once_collated():
    # The device "meta" stands for one that is not the CPU.
    elsewhere = SimpleNamespace(device=torch.device("meta"), device_placement=True, non_blocking=False)
    batch, examples = {"x": torch.zeros(2, 4)}, [torch.zeros(4), torch.zeros(4)]
    assert _mover(elsewhere, has_examples=False)(batch)["x"].device.type == "meta"
    assert _mover(elsewhere, has_examples=True)(examples) is examples
    collate = move_after_collate({"collate": torch.stack}, _mover(elsewhere, has_examples=False))["collate"]
    assert collate(examples).device.type == "meta"
    assert _mover(SimpleNamespace(device_placement=False), has_examples=False)(batch) is batch


def test_another_loader_is_prepared_by_accelerate_and_updated_exactly():
    loader = DataLoader(DATA, batch_size=7)
    _, prepared = make_run(loader)
    sizes = [prepared.stepper.step(batch).batch_size for batch in prepared.loader]
    assert sizes == [7] * 8 + [4]
    assert type(prepared.loader).__name__ == "DataLoaderShard"


def test_out_of_memory_is_split_and_one_update_follows():
    def scarce(model, batch):
        if len(batch["x"]) > 3:
            raise torch.OutOfMemoryError("more than three examples")
        return loss_fn(model, batch)

    _, prepared = make_run(loss_fn=scarce)
    reports = [prepared.stepper.step(batch) for batch in prepared.loader]
    assert reports[0].ooms > 0
    assert sum(report.batch_size for report in reports) == 60
    assert prepared.stepper.stepper.state_dict()["num_updates"] == len(reports)


def test_parameters_outside_the_model_that_the_optimizer_has_are_trained_exactly():
    """Before, their sums over micro-batches were not divided by the weight: a change of -0.03 for -0.08."""
    model, scale = nn.Linear(4, 1).double(), nn.Parameter(torch.tensor(2.0).double())
    start = {"w": model.weight.detach().clone(), "b": model.bias.detach().clone(), "s": scale.detach().clone()}

    def scaled(net, batch):
        weights = 1.0 + batch["index"] % 3
        return (weights * (scale * net(batch["x"].double())).square().squeeze(1)).sum(), weights.sum()

    optimizer = torch.optim.SGD([*model.parameters(), scale], lr=0.01)
    loader = DataLoader(DATA, batch_sampler=make_sampler())
    prepared = prepare(Accelerator(cpu=True), model, optimizer, loader, loss_fn=scaled, micro_batch=3)
    batches = run_epochs(prepared, 1)
    values = {name: value.requires_grad_() for name, value in start.items()}
    for batch in batches:
        total = sum(1.0 + index % 3 for index in batch)
        for index in batch:
            output = values["w"] @ DATA[index]["x"].double() + values["b"]
            ((1.0 + index % 3) / total * (values["s"] * output).square().sum()).backward()
        for value in values.values():
            value.data -= 0.01 * value.grad
            value.grad = None
    for name, found in (("w", model.weight), ("b", model.bias), ("s", scale)):
        torch.testing.assert_close(found.detach(), values[name].detach(), rtol=1e-12, atol=1e-14)


# Checkpoints.


def test_a_size_that_follows_memory_is_fed_and_saved(tmp_path):
    memory = FakeMemory(1000, bytes_of=lambda num_items: 40 * num_items)

    def measured(model, batch):
        memory.run_batch(len(batch["x"]))
        return loss_fn(model, batch)

    def make():
        return make_run(loss_fn=measured, micro_batch=FitToMemory(16), memory=MemoryMonitor(source=memory))

    accelerator, whole = make()

    def save(num):
        if num == 2:
            accelerator.save_state(tmp_path)

    run_epochs(whole, 1, after_step=save)
    accelerator, resumed = make()
    accelerator.load_state(tmp_path)
    assert resumed.stepper.stepper.state_dict()["memory"]["size"] == 4  # 1, then 2 and 4
    run_epochs(resumed, 1)
    states = [prepared.stepper.stepper.state_dict()["memory"] for prepared in (whole, resumed)]
    assert states[0] == states[1]


def train_and_resume(folder, make, num_steps, num_epochs=3):
    """Return batches and parameters of a run without a break and of one that was saved and loaded on the way."""
    accelerator, whole = make()

    def save(num):
        if num == num_steps:
            accelerator.save_state(folder)

    expected = run_epochs(whole, num_epochs, after_step=save)
    accelerator, resumed = make()
    torch.manual_seed(1234)  # must not matter: the checkpoint holds the random state
    accelerator.load_state(folder)
    batches = expected[:num_steps] + run_epochs(resumed, num_epochs)
    return (expected, parameters(whole)), (batches, parameters(resumed))


@pytest.mark.parametrize("num_steps", [1, 12, 16])
def test_a_resumed_run_sees_the_same_batches_and_ends_at_the_same_parameters(num_steps, tmp_path):
    num_batches = [len(bw.plan_batches(LENGTHS, BUDGET, epoch=epoch)) for epoch in range(3)]
    assert num_batches == [8, 8, 8]  # so 12 is inside the second epoch and 16 its end
    (expected, end), (batches, resumed_end) = train_and_resume(tmp_path, make_run, num_steps)
    assert len(expected) == 24
    assert batches == expected
    assert torch.equal(end, resumed_end)


def test_batches_that_workers_prefetched_are_not_lost(tmp_path):
    def make():
        return make_run(DataLoader(DATA, batch_sampler=make_sampler(), num_workers=2))

    (expected, _), (batches, _) = train_and_resume(tmp_path, make, 3, num_epochs=1)
    assert batches == expected


def make_resizable(policy, **options):
    controller = BatchSizeController(policy, min_size=2, max_size=32, initial=4)
    sampler = ResizableBatchSampler(60, controller)
    return make_run(DataLoader(DATA, batch_sampler=sampler), **options)


def test_a_resizable_run_resumes_with_the_same_sizes_and_parameters(tmp_path):
    def make():
        return make_resizable(loss_driven(per="step"))

    (expected, end), (batches, resumed_end) = train_and_resume(tmp_path, make, 7)
    assert len({len(batch) for batch in expected}) > 3, "sizes change"
    assert batches == expected
    assert torch.equal(end, resumed_end)


@pytest.mark.parametrize("num_steps", [1, 3, 9])
def test_batches_that_workers_formed_ahead_keep_their_sizes(num_steps, tmp_path):
    """Two workers form four batches ahead, at sizes that no longer hold when the run is saved."""

    def make():
        controller = BatchSizeController(linear(4, 1, per="step"), min_size=2, max_size=32)
        sampler = ResizableBatchSampler(60, controller)
        return make_run(DataLoader(DATA, batch_sampler=sampler, num_workers=2))

    (expected, end), (batches, resumed_end) = train_and_resume(tmp_path, make, num_steps)
    assert len({len(batch) for batch in expected}) > 3, "sizes change"
    assert batches == expected
    assert torch.equal(end, resumed_end)


def test_a_loader_can_be_prepared_again_with_the_controller_of_its_sampler():
    controller = BatchSizeController(linear(4, 1, per="step"), min_size=2, max_size=32)
    loader = DataLoader(DATA, batch_sampler=ResizableBatchSampler(60, controller))
    for _ in range(2):
        _, prepared = make_run(loader, controller=controller)
        assert prepared.stepper.controller is controller


def test_a_place_in_batches_of_a_found_budget_needs_that_budget():
    _, prepared = make_run()
    prepared.stepper.load_state_dict(prepared.stepper.state_dict())
    state = prepared.stepper.state_dict()
    found = {**state, "sampler": {"found": "{}", "sampler": state["sampler"]}}
    with pytest.raises(StateMismatchError, match=r"saved with budget='auto'.*call prepare with it"):
        prepared.stepper.load_state_dict(found)


def test_a_checkpoint_of_other_parts_is_refused(tmp_path):
    accelerator, prepared = make_resizable(linear(4, 4))
    run_epochs(prepared, 1)
    accelerator.save_state(tmp_path)
    accelerator, _ = make_run(DataLoader(DATA, batch_size=4))
    with pytest.raises(StateMismatchError, match="controller, sampler, stepper, but this run has stepper"):
        accelerator.load_state(tmp_path)


# Controller and scheduler.


def test_a_schedule_by_epochs_takes_effect_with_the_first_batch_of_the_epoch():
    _, prepared = make_resizable(linear(4, 4, per="epoch"))
    sizes = [list(map(len, run_epochs(prepared, epoch))) for epoch in (1, 2, 3)]
    # 4, 8 and 12 divide 60 into 15, 7 and a half, and 5.
    assert sizes == [[4] * 15, [8] * 7 + [4], [12] * 5]


def test_the_controller_of_the_sampler_observes_every_update():
    _, prepared = make_resizable(linear(4, 4, per="epoch"))
    num_steps = len(run_epochs(prepared, 2))
    counts = prepared.stepper.controller.state_dict()["counts"]
    assert (counts["step"], counts["examples"], counts["epoch"]) == (num_steps, 120, 2)


def test_a_controller_beside_a_planned_sampler_observes_without_deciding():
    controller = BatchSizeController(linear(4, 4), min_size=2, max_size=32)
    _, prepared = make_run(controller=controller)
    run_epochs(prepared, 2)
    assert controller.state_dict()["counts"]["epoch"] == 2


def test_regrouped_batches_are_counted_and_resumed(tmp_path):
    def make():
        controller = BatchSizeController(loss_driven(per="step"), min_size=2, max_size=32, initial=4)
        chunks = DataLoader(DATA, batch_size=8, collate_fn=list)
        return make_run(regroup(chunks, controller), collate=lambda found: {"x": torch.stack([e["x"] for e in found])})

    (expected, end), (batches, resumed_end) = train_and_resume(tmp_path, make, 7, num_epochs=2)
    assert sorted(chain(*expected)) == sorted([*range(60), *range(60)])
    assert batches == expected
    assert torch.equal(end, resumed_end)


def halve_every_step(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)


def test_the_scheduler_advances_once_per_update_and_is_saved(tmp_path):
    accelerator, prepared = make_run(scheduler=halve_every_step)
    rates = [prepared.stepper.step(batch).lr for batch in prepared.loader]
    assert rates == pytest.approx([0.01 * 0.5**step for step in range(8)])
    accelerator.save_state(tmp_path)
    accelerator, resumed = make_run(scheduler=halve_every_step)
    accelerator.load_state(tmp_path)
    assert resumed.optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.5**8)


# Precision.


def test_bf16_is_used_in_the_forward_pass_and_parameters_stay_in_float32():
    seen = []

    def watching(model, batch):
        module_output = model[0](batch["x"])  # a part of the model, which Accelerate did not wrap
        seen.append((module_output.dtype, model(batch["x"]).dtype))
        return loss_fn(model, batch)

    _, prepared = make_run(accelerator=Accelerator(cpu=True, mixed_precision="bf16"), loss_fn=watching)
    before = parameters(prepared)
    run_epochs(prepared, 1)
    assert set(seen) == {(torch.bfloat16, torch.float32)}  # Accelerate hands outputs on in float32
    assert parameters(prepared).dtype == torch.float32
    assert not torch.equal(before, parameters(prepared))


def test_autocast_that_the_accelerator_has_off_stays_off():
    seen = []

    def watching(model, batch):
        seen.append(model[0](batch["x"]).dtype)
        return loss_fn(model, batch)

    handlers = [AutocastKwargs(enabled=False)]
    accelerator = Accelerator(cpu=True, mixed_precision="bf16", kwargs_handlers=handlers)
    run_epochs(make_run(accelerator=accelerator, loss_fn=watching)[1], 1)
    assert set(seen) == {torch.float32}


def with_scaler():
    """Return an accelerator with the scaler that mixed_precision="fp16" brings on a GPU."""
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    return accelerator


def test_a_scaler_is_used_once_and_leaves_the_update_the_same():
    _, scaled = make_run(accelerator=with_scaler(), weight_of=lambda batch: len(batch["x"]))
    _, plain = make_run()
    torch.manual_seed(0)
    run_epochs(scaled, 1)
    torch.manual_seed(0)
    run_epochs(plain, 1)
    assert torch.allclose(parameters(scaled), parameters(plain), rtol=1e-6, atol=1e-7)


def test_an_update_that_the_scaler_leaves_out_is_known_and_the_scheduler_waits():
    def overflowing(model, batch):
        loss, weight = loss_fn(model, batch)
        return loss * float("inf"), weight

    accelerator, prepared = make_run(
        accelerator=with_scaler(),
        loss_fn=overflowing,
        scheduler=halve_every_step,
        weight_of=lambda batch: len(batch["x"]),
    )
    before = parameters(prepared)
    prepared.stepper.step(next(iter(prepared.loader)))
    assert accelerator.optimizer_step_was_skipped
    assert torch.equal(before, parameters(prepared))
    assert prepared.optimizer.param_groups[0]["lr"] == 0.01


def test_a_scaler_without_weight_of_is_refused():
    with pytest.raises(ArgumentError, match="weight_of"):
        make_run(accelerator=with_scaler())


# What is refused.


def test_gradient_accumulation_of_the_accelerator_is_refused():
    with pytest.raises(ArgumentError, match="gradient_accumulation_steps=4, but Stepper accumulates"):
        make_run(accelerator=Accelerator(cpu=True, gradient_accumulation_steps=4))


@pytest.mark.parametrize("kind", ["DEEPSPEED", "MEGATRON_LM", "FSDP", "XLA"])
def test_what_runs_its_own_update_is_refused(kind):
    with pytest.raises(ArgumentError, match=f"cannot work with {kind}"):
        make_run(accelerator=SimpleNamespace(distributed_type=DistributedType[kind]))


@pytest.mark.parametrize("name", ["split_batches", "dispatch_batches"])
def test_a_second_division_of_the_data_is_refused(name):
    settings = DataLoaderConfiguration(**{name: True})
    with pytest.raises(ArgumentError, match=f"{name}=True"):
        make_run(accelerator=Accelerator(cpu=True, dataloader_config=settings))


@pytest.mark.parametrize("name", ["autocast", "scaler"])
def test_options_that_the_accelerator_decides_are_refused(name):
    with pytest.raises(ArgumentError, match=f"{name} comes from Accelerator"):
        make_run(**{name: None})


def test_a_sampler_of_another_rank_is_refused():
    sampler = bw.BatchSampler(LENGTHS, BUDGET, rank=1, world_size=4)
    with pytest.raises(ArgumentError, match="rank 1 of 4, this process is rank 0 of 1"):
        make_run(DataLoader(DATA, batch_sampler=sampler))


def test_two_controllers_are_refused():
    sampler = ResizableBatchSampler(60, BatchSizeController(linear(4, 4), min_size=2, max_size=32))
    other = BatchSizeController(linear(4, 4), min_size=2, max_size=32)
    with pytest.raises(ArgumentError, match="another controller"):
        make_run(DataLoader(DATA, batch_sampler=sampler), controller=other)


def test_a_scheduler_that_needs_a_metric_is_refused():
    with pytest.raises(ArgumentError, match="ReduceLROnPlateau"):
        make_run(scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)


def test_a_plain_list_of_batches_is_refused():
    with pytest.raises(ArgumentError, match="DataLoader or what regroup made, got list"):
        make_run([[1, 2]])


# Ranks.


def test_two_ranks_train_as_one_process_would_and_resume(tmp_path):
    run_ranks("tests.integrations.accelerate.ranks", 2, tmp_path)
