"""The captured update: what it takes for granted is looked at before every replay."""

import copy
import re
import warnings
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from batchwright.step import Stepper
from batchwright.step.graphs._update import UpdateGraph, has_state, why_not
from batchwright.testing import EagerGraphs

from . import models
from .plain import batch_of, squares
from .tape import TapeGraphs
from .twins import SAME, Twins, adamw, distance, own, sgd

torch.set_num_threads(1)
SHAPE = (4, 6)


def table(seed):
    return models.tables(SHAPE, seed=seed)


def twins_of(backend="tape", make_optimizer=adamw, **options):
    return Twins.of(backend, "mlp", shapes=[SHAPE], make_optimizer=make_optimizer, **options)


def train(twins, num=4, first=0, after=None):
    for seed in range(first, first + num):
        twins.step(table(seed))
        if after is not None:
            twins.each(after)


def num_replayed(twins):
    return twins.graphed.stepper.graph_summary().num_updates_replayed


def check(twins):
    assert distance(twins.graphed.values, twins.eager.values) <= SAME


# Which optimizers


def make(kind, **options):
    return kind([nn.Parameter(torch.ones(2))], **{"lr": 0.1, **options})


class OwnAdam(torch.optim.Adam):
    """Might do anything in its step."""


def own_step(optimizer):
    step = optimizer.step
    optimizer.step = lambda *given: step(*given)
    return optimizer


def hooked(optimizer):
    optimizer.register_step_post_hook(lambda *given: None)
    return optimizer


def scheduled(optimizer):
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    return optimizer


@pytest.mark.parametrize(
    ("optimizer", "scaler", "reason"),
    [
        (lambda: make(torch.optim.Adam, fused=True), None, None),
        (lambda: make(torch.optim.AdamW, fused=True), None, None),
        (lambda: make(torch.optim.SGD, fused=True), None, None),
        (lambda: make(torch.optim.AdamW, capturable=True), None, None),
        (lambda: scheduled(make(torch.optim.AdamW, fused=True)), None, None),
        (lambda: make(torch.optim.RMSprop), None, "the step of RMSprop is not captured; Adam, AdamW and SGD are"),
        (lambda: make(OwnAdam, fused=True), None, "the step of OwnAdam is not captured; Adam, AdamW and SGD are"),
        (lambda: make(torch.optim.SGD), None, "the step of SGD is captured only with fused=True here"),
        (lambda: make(torch.optim.Adam), None, r"the step of Adam keeps its counts on the host; Adam\(…, fused=True\)"),
        (
            lambda: make(torch.optim.Adam, capturable=True),
            torch.amp.GradScaler("cpu"),
            "the step of Adam is captured only with fused=True here",
        ),
        (lambda: make(torch.optim.Adam, capturable=True), torch.amp.GradScaler("cpu", enabled=False), None),
        (lambda: hooked(make(torch.optim.Adam, fused=True)), None, "hooks of Adam's step do not run at a replay"),
        (lambda: own_step(make(torch.optim.Adam, fused=True)), None, "the step of Adam was replaced by another"),
        (
            lambda: own_step(scheduled(make(torch.optim.Adam, fused=True))),
            None,
            "the step of Adam was replaced by another",
        ),
    ],
)
def test_an_optimizer_is_captured_only_if_its_step_is_known(optimizer, scaler, reason):
    found = why_not(optimizer(), scaler, EagerGraphs())
    assert found is None if reason is None else re.match(reason, found or "")


def test_hooks_of_all_optimizers_stand_against_a_capture():
    handle = register_optimizer_step_post_hook(lambda *given: None)
    try:
        found = why_not(make(torch.optim.Adam, fused=True), None, EagerGraphs())
    finally:
        handle.remove()
    assert found == "hooks of all optimizers do not run at a replay"


@pytest.mark.parametrize(
    ("kind", "options", "needs_step"),
    [
        (torch.optim.SGD, {}, False),
        (torch.optim.SGD, {"momentum": 0.9}, True),
        (torch.optim.Adam, {}, True),
        (torch.optim.AdamW, {"amsgrad": True}, True),
    ],
)
def test_state_is_there_after_the_first_step(kind, options, needs_step):
    optimizer = make(kind, **options)
    (parameter,) = optimizer.param_groups[0]["params"]
    assert has_state(optimizer)  # without a gradient nothing is needed
    parameter.grad = torch.ones(2)
    assert has_state(optimizer) is not needs_step
    optimizer.step()
    assert has_state(optimizer)


# What a captured update takes for granted


def captured(**options):
    parameters = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, fused=True, **options)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    return UpdateGraph(optimizer, parameters, 1.0, scaler, EagerGraphs()), optimizer, parameters, scaler


def load_copy(optimizer):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def put(optimizer, **options):
    optimizer.param_groups[0].update(options)


@pytest.mark.parametrize(
    ("act", "fits"),
    [
        (lambda optimizer, parameters, scaler: None, True),
        (lambda optimizer, parameters, scaler: put(optimizer, lr=0.5), True),
        (lambda optimizer, parameters, scaler: put(optimizer, lr=torch.tensor(0.5)), True),
        (lambda optimizer, parameters, scaler: put(optimizer, note=["of", "a", "user"]), True),
        (lambda optimizer, parameters, scaler: nn.init.zeros_(parameters[0]), True),
        (lambda optimizer, parameters, scaler: scaler.update(64.0), True),
        (lambda optimizer, parameters, scaler: put(optimizer, weight_decay=0.5), False),
        (lambda optimizer, parameters, scaler: put(optimizer, betas=(0.5, 0.9)), False),
        (lambda optimizer, parameters, scaler: put(optimizer, maximize=True), False),
        (lambda optimizer, parameters, scaler: put(optimizer, foreach=True), False),
        (lambda optimizer, parameters, scaler: setattr(parameters[1], "grad", None), False),
        (lambda optimizer, parameters, scaler: setattr(parameters[1], "data", torch.ones(3)), False),
        (lambda optimizer, parameters, scaler: optimizer.state.clear(), False),
        (lambda optimizer, parameters, scaler: load_copy(optimizer), False),
        (lambda optimizer, parameters, scaler: optimizer.add_param_group({"params": [torch.ones(1)]}), False),
        (lambda optimizer, parameters, scaler: optimizer.param_groups[0]["params"].pop(), False),
        (lambda optimizer, parameters, scaler: scaler.set_growth_interval(3), False),
        (lambda optimizer, parameters, scaler: scaler.set_backoff_factor(0.25), False),
        (lambda optimizer, parameters, scaler: setattr(scaler, "_scale", torch.ones(())), False),
    ],
    ids=[
        "nothing", "rate", "rate-in-a-tensor", "note", "values", "scale", "decay", "betas", "maximize", "foreach",
        "no-gradient", "memory", "no-state", "loaded", "group", "member", "interval", "backoff", "another-scale",
    ],
)  # fmt: skip
def test_every_change_that_a_replay_would_not_follow_is_seen(act, fits):
    graph, optimizer, parameters, scaler = captured()
    assert graph.fits()
    act(optimizer, parameters, scaler)
    assert graph.fits() is fits


def test_a_replay_takes_the_rates_that_it_is_given():
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = torch.optim.SGD([parameter], lr=0.1, fused=True)
    parameter.grad = torch.ones(2, dtype=torch.float64)
    graph = UpdateGraph(optimizer, [parameter], None, None, EagerGraphs())
    assert parameter.tolist() == [0, 0]
    assert graph.run([0.1]) is None
    assert parameter.tolist() == [-0.1, -0.1]  # every digit of it
    graph.run([torch.tensor(1.0)])
    assert parameter.tolist() == [-1.1, -1.1]
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_the_norm_is_that_before_clipping():
    parameter = nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    graph = UpdateGraph(torch.optim.SGD([parameter], lr=1.0, fused=True), [parameter], 0.5, None, EagerGraphs())
    assert float(graph.run([1.0])) == 5
    assert parameter.tolist() == pytest.approx([-0.3, -0.4], rel=1e-5)


# Whole updates


@pytest.mark.parametrize(
    "make_optimizer",
    [
        lambda parameters: adamw(parameters, maximize=True),
        lambda parameters: adamw(parameters, amsgrad=True),
        lambda parameters: sgd(parameters, maximize=True),
        lambda parameters: sgd(parameters, momentum=0.0, weight_decay=0.1),
        lambda parameters: sgd(parameters, nesterov=True),
        lambda parameters: adamw(parameters, lr=torch.tensor(0.02)),
    ],
    ids=["maximize", "amsgrad", "sgd-maximize", "sgd-decay", "nesterov", "rate-in-a-tensor"],
)
@pytest.mark.parametrize("clip_norm", [None, 0.1])
def test_updates_are_replayed_from_the_second_on(make_optimizer, clip_norm):
    twins = twins_of(make_optimizer=make_optimizer, clip_norm=clip_norm)
    train(twins, num=6)
    check(twins)
    assert num_replayed(twins) >= 4


def test_a_rate_in_a_tensor_that_is_changed_in_place_is_followed():
    twins = twins_of(make_optimizer=lambda parameters: adamw(parameters, lr=torch.tensor(0.02)))
    train(twins, num=8, after=lambda side: side.optimizer.param_groups[0]["lr"].mul_(0.5))
    check(twins)
    assert num_replayed(twins) >= 6


def test_a_decay_that_changes_at_every_step_runs_eagerly_after_some_captures():
    def decay(side):
        side.optimizer.param_groups[0]["weight_decay"] += 0.1

    twins = twins_of()
    with pytest.warns(UserWarning, match="the update runs eagerly: options of the optimizer change again and again"):
        train(twins, num=14, after=decay)
    check(twins)
    assert num_replayed(twins) == 8


@pytest.mark.filterwarnings("ignore:forward and backward are replayed, the update runs eagerly")
@pytest.mark.parametrize("make_optimizer", [adamw, sgd])
def test_a_cycle_of_momenta_is_followed(make_optimizer):
    twins = twins_of(make_optimizer=make_optimizer)
    cycles = twins.each(lambda side: torch.optim.lr_scheduler.OneCycleLR(side.optimizer, 0.1, total_steps=30))
    for seed in range(20):
        twins.step(table(seed))
        for cycle in cycles:
            cycle.step()
    check(twins)


def test_a_step_that_a_user_put_in_place_runs_at_every_update():
    """Averages of the weights are often kept that way."""
    calls = []

    def wrap(side):
        step = side.optimizer.step

        def counted(*given):
            calls.append(side is twins.graphed)
            return step(*given)

        side.optimizer.step = counted

    twins = twins_of()
    train(twins)
    twins.each(wrap)
    with pytest.warns(UserWarning, match="the update runs eagerly: the step of AdamW was replaced by another"):
        train(twins, first=4)
    check(twins)
    assert (calls.count(True), calls.count(False)) == (4, 4)


def test_a_factor_of_a_scaler_that_is_changed_is_followed():
    scalers = []

    def make_scaler(model):
        scalers.append(torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1000))
        return scalers[-1]

    twins = twins_of(
        autocast=torch.float16, scaler=own(make_scaler), weight_of=lambda batch: float(batch[models.ROW_WEIGHT].sum())
    )
    train(twins)
    for scaler in scalers:
        scaler.set_growth_interval(6)  # good steps in a row, of which there were four
    train(twins, first=4)
    assert scalers[0].get_scale() == scalers[1].get_scale() > 64
    assert num_replayed(twins) >= 4


def test_a_group_that_is_added_between_updates_is_trained():
    extra = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    used = []

    def loss_fn(model, batch):
        factor = extra[model.place] if used else 1.0
        return models.row_loss(model(batch["x"]) * factor, batch)

    twins = Twins("tape", models.make_mlp(), loss_fn, [SHAPE], make_optimizer=adamw)
    for place, side in enumerate(twins.sides):
        side.model.place = place
    train(twins)
    used.append(True)
    for place, side in enumerate(twins.sides):
        side.optimizer.add_param_group({"params": [extra[place]]})
    train(twins, first=4)
    check(twins)
    assert extra[1].tolist() != [1, 1, 1]
    assert distance([extra[1]], [extra[0]]) <= SAME


def test_an_update_that_cannot_be_captured_is_said_once_and_runs_eagerly():
    twins = twins_of(make_optimizer=lambda parameters: torch.optim.RMSprop(parameters, lr=0.01))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(twins, num=6)
    messages = [str(one.message) for one in caught]
    assert messages == [
        "forward and backward are replayed, the update runs eagerly: the step of RMSprop is not captured; Adam, AdamW "
        "and SGD are"
    ]
    check(twins)
    assert twins.graphed.report.graphed


def test_an_update_whose_capture_fails_runs_eagerly():
    class Refusing(TapeGraphs):
        def capture(self, function, *, writes=()):
            if len(writes) > 5:  # the update writes to parameters and to the state
                raise RuntimeError("no update here")
            return super().capture(function, writes=writes)

    twins = twins_of()
    twins.graphed.stepper._graphs._updates._backend = Refusing()
    with pytest.warns(UserWarning, match="its capture failed with RuntimeError: no update here"):
        train(twins, num=6)
    check(twins)
    assert num_replayed(twins) == 0


class NoRoomForUpdates(TapeGraphs):
    def capture(self, function, *, writes=()):
        if "UpdateGraph" in function.__qualname__:
            self.num_captures += 1
            with mock.patch.object(torch.optim.SGD, "step", side_effect=torch.OutOfMemoryError("CUDA out of memory")):
                function()
        return super().capture(function, writes=writes)


def test_an_update_that_runs_out_of_memory_in_its_capture_runs_eagerly_with_a_scaler():
    model = nn.Linear(6, 3)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    stepper = Stepper(
        model,
        sgd(model.parameters()),
        squares,
        graphs=NoRoomForUpdates(),
        shapes=[(4, 6)] * 4,
        scaler=scaler,
        weight_of=lambda batch: len(batch["x"]),
    )
    for seed in range(5):
        stepper.step(batch_of(seed=seed))


def test_an_update_that_finds_no_memory_is_not_blamed_on_the_optimizers_options():
    model = nn.Linear(6, 3)
    stepper = Stepper(model, sgd(model.parameters()), squares, graphs=NoRoomForUpdates(), shapes=[(4, 6)] * 4)
    with pytest.warns(UserWarning, match="its capture ran out of memory"):  # noqa: PT031
        for seed in range(14):
            stepper.step(batch_of(seed=seed))
    assert "its capture ran out of memory" in stepper.graph_summary().reasons


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 3), nn.Linear(8, 3)])

    def forward(self, x, task):
        return self.heads[task](self.body(x))


def of_task(model, batch):
    return (model(batch["x"], batch["task"]) - batch["y"]).square().sum(), len(batch["x"])


def test_two_tasks_that_take_turns_keep_their_updates_replayed():
    twins = Twins("tape", TwoHeads(), of_task, [(4, 6)] * 4, make_optimizer=adamw)
    for seed in range(24):
        batch = {**batch_of(seed=seed), "task": seed % 2}
        for side in twins.sides:
            side.report = side.stepper.step(batch)
    twins.check()
    summary = twins.graphed.stepper.graph_summary()
    assert summary.num_updates_replayed >= 16
    assert not any("again and again" in reason for reason in summary.reasons)
