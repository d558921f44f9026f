"""A model that changes between updates: what was captured before is not replayed on it."""

import copy

import pytest
import torch
from torch import nn

from . import models
from .twins import BACKENDS, SAME, Twins, adamw, sgd

torch.set_num_threads(1)
SHAPE = (4, 6)


def table(seed):
    return models.tables(SHAPE, seed=seed)


def train(twins, num=3, first=0):
    for seed in range(first, first + num):
        twins.step(table(seed))


def mlp(backend, **options):
    return Twins.of(backend, "mlp", **{"shapes": [SHAPE], **options})


def freeze(side):
    side.model[0].requires_grad_(False)


def thaw(side):
    side.model[0].requires_grad_(True)


def replace_layer(side):
    side.model[1] = nn.ReLU()


def replace_data(side):
    side.model[0].weight.data = side.model[0].weight.data * 0.5


def copy_data(side):
    with torch.no_grad():
        side.model[0].weight.mul_(0.5)


def load(side):
    side.model.load_state_dict({name: value * 0.5 for name, value in side.model.state_dict().items()})


def assign(side):
    """Put other tensors in place, as ``load_state_dict(assign=True)`` and the merging of adapters do."""
    side.model[2].bias.data = torch.zeros(3, device=side.model[2].bias.device)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
@pytest.mark.parametrize(
    "change", [freeze, replace_layer, replace_data, copy_data, load, assign], ids=lambda change: change.__name__
)
def test_a_change_between_updates_counts_from_the_next_one(change, make_optimizer, backend):
    twins = mlp(backend, make_optimizer=make_optimizer)
    train(twins)
    assert twins.graphed.report.graphed
    twins.each(change)
    train(twins, first=3)
    twins.check()
    assert twins.graphed.report.graphed


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make_optimizer", [sgd, adamw])
def test_a_frozen_layer_stays_and_moves_again_when_it_is_thawed(make_optimizer, backend):
    twins = mlp(backend, make_optimizer=make_optimizer)
    train(twins)
    twins.each(freeze)
    before = twins.graphed.model[0].weight.detach().clone()
    train(twins, first=3)
    assert torch.equal(before, twins.graphed.model[0].weight)
    twins.each(thaw)
    train(twins, first=6)
    assert not torch.equal(before, twins.graphed.model[0].weight)
    twins.check()
    assert twins.graphed.report.graphed


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_group_that_is_added_later_is_trained(backend):
    def make(parameters):
        return sgd(parameters[2:])

    twins = mlp(backend, make_optimizer=make)
    train(twins)
    twins.each(lambda side: side.optimizer.add_param_group({"params": list(side.model[0].parameters()), "lr": 0.2}))
    train(twins, first=3)
    twins.check()
    assert not torch.equal(twins.graphed.start[0], twins.graphed.model[0].weight)


def make_normed():
    return models.seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_buffers_move_as_in_eager_steps(backend):
    """Captures, trials and warm-ups run forward passes of their own, which must not count."""
    twins = Twins(backend, make_normed(), models.table_loss, [SHAPE])
    for num in range(1, 5):
        twins.step(table(num))
        assert int(twins.graphed.model[1].num_batches_tracked) == num
        assert torch.allclose(twins.graphed.model[1].running_mean, twins.eager.model[1].running_mean, rtol=1e-5)
    twins.check()
    assert twins.graphed.report.graphed


@pytest.mark.parametrize("backend", BACKENDS)
def test_eval_and_train_are_noticed(backend):
    twins = Twins(backend, make_normed(), models.table_loss, [SHAPE])
    for number, mode in enumerate([True, False, True, False]):
        twins.each(lambda side, mode=mode: side.model.train(mode))
        for seed in range(3):
            assert twins.gather(table(10 * number + seed)) <= SAME
            twins.update()
        assert twins.graphed.report.graphed
    twins.check()
    assert int(twins.graphed.model[1].num_batches_tracked) == 6


@pytest.mark.parametrize("backend", BACKENDS)
def test_one_layer_in_eval_mode_is_noticed(backend):
    twins = Twins(backend, make_normed(), models.table_loss, [SHAPE])
    train(twins)
    twins.each(lambda side: side.model[1].eval())
    train(twins, first=3)
    twins.check()
    assert int(twins.graphed.model[1].num_batches_tracked) == 3


class Scaled(nn.Module):
    """A module with a setting that a user changes by hand."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.temperature = 1.0

    def forward(self, x):
        return self.layer(x) * self.temperature


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_setting_of_a_module_that_changes_is_noticed(backend):
    twins = Twins(backend, models.seeded(Scaled), models.table_loss, [SHAPE])
    train(twins)
    twins.each(lambda side: setattr(side.model, "temperature", 5.0))
    train(twins, first=3)
    twins.check()
    assert twins.graphed.report.graphed


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_that_is_switched_on_is_not_left_out(backend):
    """With p = 1 every activation is dropped, so the first layer has a gradient of exactly 0."""
    model = models.seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.0), nn.Linear(8, 3)))
    twins = Twins(backend, model, models.table_loss, [SHAPE], make_optimizer=lambda parameters: sgd(parameters, lr=0.1))
    train(twins)
    twins.each(lambda side: setattr(side.model[1], "p", 1.0))
    for seed in range(3):
        twins.graphed.stepper.accumulate(twins.here(table(seed)))
        twins.graphed.stepper.reduce()
        assert not twins.graphed.model[0].weight.grad.any()
        twins.graphed.stepper.update()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_forward_hook_that_is_registered_later_runs_at_every_step(backend):
    twins = mlp(backend)
    train(twins)
    seen = []
    handle = twins.graphed.model[0].register_forward_hook(lambda module, inputs, output: seen.append(len(output)))
    with pytest.warns(UserWarning, match="hook"):
        twins.step(table(3))
    train(twins, num=2, first=4)
    assert len(seen) >= 3
    num_seen = len(seen)
    handle.remove()
    train(twins, first=6)
    assert len(seen) == num_seen
    twins.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_parameter_replaced_by_another_is_trained(backend):
    def swap(side):
        side.model[2] = nn.Linear(16, 3, device=side.model[0].weight.device)
        with torch.no_grad():
            for parameter in side.model[2].parameters():
                parameter.fill_(0.1)
        side.optimizer.param_groups[0]["params"] = list(side.model.parameters())

    twins = mlp(backend, make_optimizer=lambda parameters: sgd(parameters, momentum=0.0))
    train(twins)
    twins.each(swap)
    train(twins, first=3)
    twins.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_copy_of_the_model_does_not_share_its_graphs(backend):
    """Exponential averages and checkpoints copy a model in the middle of training."""
    twins = mlp(backend)
    train(twins)
    saved = copy.deepcopy(twins.graphed.model)
    values = [value.clone() for value in saved.state_dict().values()]
    train(twins, first=3)
    assert all(map(torch.equal, values, saved.state_dict().values()))
    twins.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_validation_between_updates_changes_nothing(backend):
    twins = mlp(backend)
    for round_ in range(3):
        train(twins, first=3 * round_)
        with torch.no_grad():
            losses = [float(models.table_loss(side.model, twins.here(table(99)))[0]) for side in twins.sides]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    twins.check()
    assert twins.graphed.report.graphed
