"""The update of a graphed step: optimizers, groups, rates, clip, scaler, foreign gradients, states and noise."""

import copy
import json

import pytest
import torch
from torch import nn

from . import models
from .twins import BACKENDS, BLIND, SAME, Twins, adamw, distance, own, sgd

torch.set_num_threads(1)
SHAPE = (4, 6)
both_optimizers = pytest.mark.parametrize("make_optimizer", [sgd, adamw])

# With float64 parameters on CUDA the fused step takes no rate of as many digits, so it runs eagerly and says so.
pytestmark = pytest.mark.filterwarnings("ignore:forward and backward are replayed, .*float32, and float64")


def mlp(backend, **options):
    return Twins.of(backend, "mlp", **{"shapes": [SHAPE], **options})


def table(seed):
    return models.tables(SHAPE, seed=seed)


def train(twins, num=4, first=0):
    for seed in range(first, first + num):
        twins.step(table(seed))


_OPTIMIZERS = {
    "SGD": [{}, {"momentum": 0.9, "nesterov": True}, {"momentum": 0.9, "dampening": 0.5}],
    "Adam": [{}, {"amsgrad": True}],
    "AdamW": [{"weight_decay": 0.1}],
    "Adagrad": [{}],
    "RMSprop": [{}],
    "NAdam": [{}],
}
_WAYS = ({}, {"foreach": True}, {"foreach": False}, {"fused": True}, {"capturable": True})
_CASES = [
    pytest.param(name, {**options, **way}, id="-".join([name, *options, *(f"{key}={way[key]}" for key in way)]))
    for name, every in _OPTIMIZERS.items()
    for options in every
    for way in _WAYS
]


@pytest.mark.filterwarnings("ignore:forward and backward are replayed, the update runs eagerly")
@pytest.mark.parametrize("backend", BLIND)
@pytest.mark.parametrize(("name", "options"), _CASES)
def test_every_optimizer_follows_a_scheduler(name, options, backend):
    """Whether its update is captured or not; the rate changes at every update, as does the count of Adam."""

    def make(parameters):
        try:
            return getattr(torch.optim, name)(parameters, lr=0.05, **options)
        except (TypeError, RuntimeError) as error:
            pytest.skip(f"no such optimizer here: {error}")

    try:
        twins = mlp(backend, make_optimizer=make)
        schedulers = twins.each(
            lambda side: torch.optim.lr_scheduler.LambdaLR(side.optimizer, lambda step: 1 / (1 + step))
        )
        twins.eager.stepper.step(twins.here(table(0)))
    except (AssertionError, RuntimeError, TypeError, NotImplementedError) as error:
        pytest.skip(f"PyTorch cannot run it here: {error}")
    twins.graphed.stepper.step(twins.here(table(0)))
    for seed in range(1, 5):
        for scheduler in schedulers:
            scheduler.step()
        twins.step(table(seed))
    twins.check()
    assert twins.graphed.report.lr == pytest.approx(0.01)
    assert twins.graphed.report.graphed
    same_state(twins)


def same_state(twins, tolerance=1e-5):
    """Compare what the optimizers saved: anyone can load it, so it has the types of the eager one."""
    eager, graphed = (side.optimizer.state_dict() for side in twins.sides)
    assert eager["state"].keys() == graphed["state"].keys()
    for place, values in eager["state"].items():
        assert values.keys() == graphed["state"][place].keys()
        for name, value in values.items():
            other = graphed["state"][place][name]
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(other.cpu(), value.cpu(), rtol=tolerance, atol=1e-9)
            else:
                assert value == other
    for one, other in zip(eager["param_groups"], graphed["param_groups"], strict=True):
        assert {name: type(value) for name, value in one.items()} == {name: type(v) for name, v in other.items()}
        assert float(one["lr"]) == pytest.approx(float(other["lr"]))


@pytest.mark.parametrize("backend", BACKENDS)
@both_optimizers
def test_updates_in_float64_keep_all_digits(make_optimizer, backend):
    """A rate of 0.1 in float32 is off in the eighth digit."""
    twins = mlp(backend, make_optimizer=make_optimizer, dtype=torch.float64, clip_norm=0.5)
    train(twins, num=6)
    twins.check(1e-12)
    assert twins.graphed.report.graphed


@pytest.mark.parametrize("backend", BACKENDS)
@both_optimizers
def test_two_groups_have_their_own_rates_and_decay(make_optimizer, backend):
    def make(parameters):
        slow = {"params": parameters[:2], "lr": 0.001, "weight_decay": 0.5}
        return make_optimizer([slow, {"params": parameters[2:], "weight_decay": 0.0}])

    twins = mlp(backend, make_optimizer=make)
    train(twins)
    twins.each(lambda side: side.optimizer.param_groups[1].update(lr=0.3, weight_decay=0.2))
    train(twins, first=4)
    twins.check()
    assert twins.graphed.report.graphed


@pytest.mark.parametrize("backend", BACKENDS)
@both_optimizers
def test_clipping_sees_the_whole_gradient(make_optimizer, backend):
    twins = mlp(backend, make_optimizer=make_optimizer, clip_norm=0.1, micro_batch=4)
    for seed in range(5):
        twins.step(models.tables((8, 6), seed=seed))
        assert twins.graphed.report.grad_norm == pytest.approx(twins.eager.report.grad_norm, rel=1e-6)
        assert twins.graphed.report.grad_norm > 0.1
    twins.check()
    assert twins.graphed.report.graphed


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_a_scaler_skips_the_same_updates(backend, clip_norm):
    """One batch in four overflows float16: parameters stay, and both scales fall alike."""
    scalers = []

    def make_scaler(model):
        scalers.append(torch.amp.GradScaler(next(model.parameters()).device.type, init_scale=1024.0))
        return scalers[-1]

    twins = mlp(
        backend, make_optimizer=adamw, autocast=torch.float16, clip_norm=clip_norm,
        weight_of=lambda batch: float(batch[models.ROW_WEIGHT].sum()), scaler=own(make_scaler),
    )  # fmt: skip
    skipped = 0
    for seed in range(9):
        batch = table(seed)
        if seed % 4 == 2:
            batch["x"] *= 1e6
        before = copy.deepcopy(twins.graphed.values)
        twins.step(batch)
        skipped += all(map(torch.equal, before, twins.graphed.values))
        scales = [scaler.get_scale() for scaler in scalers]
        assert scales[0] == scales[1]
    assert (skipped, scales[0]) == (2, 256.0)
    twins.check(1e-4)
    assert twins.graphed.report.graphed


@pytest.mark.parametrize("backend", BACKENDS)
def test_bf16_autocast_gives_the_gradients_of_eager_autocast(backend):
    one = models.BY_NAME["llama"]
    twins = Twins.of(backend, "llama", autocast=torch.bfloat16)
    for seed in range(5):
        assert twins.gather(one.make_batch(one.shapes[seed % 2], seed=seed)) <= 2e-2
        twins.update()
    twins.check(1e-3)
    assert twins.graphed.report.graphed


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_weights_are_cast_anew_after_every_update(backend):
    """A cast that was cached while a graph was captured would keep the weights of that moment."""
    twins = mlp(backend, autocast=torch.bfloat16, make_optimizer=lambda parameters: sgd(parameters, lr=1.0))
    train(twins, num=6)
    twins.check(1e-3)
    assert twins.graphed.report.graphed


@pytest.mark.parametrize("backend", BACKENDS)
@both_optimizers
def test_a_rule_scales_the_rate_by_the_batch(make_optimizer, backend):
    twins = mlp(backend, make_optimizer=make_optimizer, micro_batch=4, lr_rule="linear", base_size=4)
    for rows in (4, 8, 12, 4, 8):
        twins.step(models.tables((rows, 6), seed=rows))
        group = twins.graphed.optimizer.param_groups[0]
        assert twins.graphed.report.lr == pytest.approx(float(group["lr"]) * rows / 4)
        assert isinstance(group["lr"], float)
    twins.check()
    assert twins.graphed.report.graphed


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_that_were_there_are_added(backend):
    twins = mlp(backend, existing_gradients="add")

    def leave(side):
        for parameter in side.model.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)

    for seed in range(4):
        if seed != 2:
            twins.each(leave)
        assert twins.gather(table(seed)) <= SAME
        twins.update()
    twins.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_that_were_there_are_cleared_with_a_warning(backend):
    twins = mlp(backend)
    train(twins, num=3)
    for parameter in twins.graphed.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    with pytest.warns(UserWarning, match="4 of 4 parameters had a gradient when the update began"):
        twins.step(table(9))
    train(twins, num=2)
    twins.check()


@pytest.mark.parametrize("backend", BACKENDS)
@both_optimizers
def test_gradients_are_gone_after_an_update(make_optimizer, backend):
    """The README says so: a loop that reads or adds to them finds none, replayed or not."""
    twins = mlp(backend, make_optimizer=make_optimizer)
    for seed in range(4):
        twins.step(table(seed))
        assert all(parameter.grad is None for parameter in twins.graphed.model.parameters())


class Branches(nn.Module):
    """One part that no batch uses, one for long batches only."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(1, 3)
        self.long = nn.Parameter(torch.ones(3))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        logits = self.body(x.mean(dim=1, keepdim=True))
        return logits * self.long if x.shape[1] > 6 else logits


@pytest.mark.parametrize("backend", BACKENDS)
@both_optimizers
def test_a_parameter_without_gradient_is_not_decayed(make_optimizer, backend):
    def make(parameters):
        # PyTorch's fused SGD cannot have momentum for some parameters only.
        return make_optimizer(parameters, weight_decay=0.3, **({"momentum": 0.0} if make_optimizer is sgd else {}))

    twins = Twins(backend, models.seeded(Branches), models.table_loss, [(4, 6), (4, 9)], make_optimizer=make)
    for seed in range(8):
        before = twins.graphed.model.long.detach().clone()
        width = (6, 9)[seed % 2]
        assert twins.gather(models.tables((4, width), seed=seed)) <= SAME
        assert twins.graphed.model.unused.grad is None
        twins.update()
        assert torch.equal(before, twins.graphed.model.long) is (width == 6)
    assert twins.graphed.model.unused.tolist() == [1, 1, 1]
    twins.check()
    assert twins.graphed.report.graphed


@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks_on_parameters_see_the_gradient_of_the_update(backend):
    twins = mlp(backend, micro_batch=4)
    seen = {id(side): [] for side in twins.sides}

    def register(side):
        def halve(gradient):
            seen[id(side)].append(float(gradient.norm()))
            return gradient / 2

        return next(side.model.parameters()).register_hook(halve)

    handles = twins.each(register)
    for seed in range(4):
        twins.step(models.tables((8, 6), seed=seed))
    twins.each(lambda side: handles.pop().remove())
    train(twins, num=2, first=4)
    twins.check()
    eager, graphed = seen.values()
    assert len(eager) == len(graphed) == 4
    assert graphed == pytest.approx(eager, rel=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_noise_is_measured_every_third_update(backend):
    twins = mlp(backend, micro_batch=4, measure_noise=3)
    reports = []
    for seed in range(7):
        twins.step(models.tables((8, 6), seed=seed))
        reports.append([side.report for side in twins.sides])
    for number, (eager, graphed) in enumerate(reports):
        assert (graphed.noise is None) is (number % 3 > 0)
        if graphed.noise is not None:
            assert (graphed.noise.s, graphed.noise.g2) == pytest.approx((eager.noise.s, eager.noise.g2), rel=1e-4)
    assert [graphed.graphed for _, graphed in reports[4:6]] == [True, True]
    twins.check()


@pytest.mark.parametrize("backend", BACKENDS)
@both_optimizers
def test_the_state_of_the_optimizer_can_be_loaded_between_updates(make_optimizer, backend):
    twins = mlp(backend, make_optimizer=make_optimizer)
    train(twins)
    states = twins.each(lambda side: copy.deepcopy(side.optimizer.state_dict()))
    train(twins, first=4)
    for side, state in zip(twins.sides, states, strict=True):
        side.optimizer.load_state_dict(state)
    train(twins, first=8)
    twins.check()
    same_state(twins)
    assert twins.graphed.report.graphed


@pytest.mark.parametrize("backend", BACKENDS)
@both_optimizers
def test_the_state_of_the_optimizer_can_be_cleared_between_updates(make_optimizer, backend):
    twins = mlp(backend, make_optimizer=make_optimizer)
    train(twins)
    twins.each(lambda side: side.optimizer.state.clear())
    train(twins, first=4)
    twins.check()
    same_state(twins)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_update_that_is_abandoned_leaves_no_trace(backend):
    twins = mlp(backend, make_optimizer=adamw)
    train(twins)
    before = copy.deepcopy(twins.graphed.values)
    for side in twins.sides:
        side.stepper.accumulate(twins.here(table(70)))
        side.stepper.abandon()
    assert all(map(torch.equal, before, twins.graphed.values))
    train(twins, first=4)
    twins.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_changed_between_reduce_and_update_is_used(backend):
    twins = mlp(backend, make_optimizer=adamw)
    train(twins)
    for seed in range(3):
        twins.gather(table(seed))
        twins.each(lambda side: next(side.model.parameters()).grad.mul_(3))
        twins.update()
    twins.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_replaced_between_reduce_and_update_is_used(backend):
    def replace(side):
        first = next(side.model.parameters())
        first.grad = torch.ones_like(first)

    twins = mlp(backend, make_optimizer=adamw)
    train(twins)
    for seed in range(3):
        twins.gather(table(seed))
        twins.each(replace)
        twins.update()
    twins.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_total_weight_given_by_a_trainer_gives_the_gradient_without_reduce(backend):
    twins = mlp(backend)
    for seed in range(4):
        for side in twins.sides:
            for part in range(2):
                side.stepper.accumulate(twins.here(table(seed + 10 * part)), total_weight=8.0)
        eager, graphed = (side.gradients for side in twins.sides)
        assert max(float((a - b).norm() / b.norm()) for a, b in zip(graphed, eager, strict=True)) <= SAME
        twins.update()
    twins.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_state_of_a_graphed_stepper_continues_in_another(backend):
    twins = mlp(backend, make_optimizer=adamw, measure_noise=2, micro_batch=4)
    for seed in range(3):
        twins.step(models.tables((8, 6), seed=seed))
    states = twins.each(lambda side: json.loads(json.dumps(side.stepper.state_dict())))
    assert states[1]["num_updates"] == 3
    assert states[0].keys() == states[1].keys()
    later = mlp(backend, make_optimizer=adamw, measure_noise=2, micro_batch=4)
    for before, after, state in zip(twins.sides, later.sides, reversed(states), strict=True):
        after.model.load_state_dict(before.model.state_dict())
        after.optimizer.load_state_dict(copy.deepcopy(before.optimizer.state_dict()))
        after.stepper.load_state_dict(state)  # that of the other side: graphed continues eager, and eager graphed
    for seed in range(3, 6):
        batch = models.tables((8, 6), seed=seed)
        twins.step(batch)
        later.step(batch)
        assert (later.graphed.report.noise is None) is (twins.eager.report.noise is None)
    twins.check()
    later.check()
    assert distance(later.graphed.values, twins.eager.values) <= SAME


@pytest.mark.parametrize("backend", BACKENDS)
def test_warm_up_before_the_first_update_changes_nothing(backend):
    twins = mlp(backend, make_optimizer=adamw)
    twins.graphed.stepper.warm_up()
    train(twins)
    twins.check()
    same_state(twins)
