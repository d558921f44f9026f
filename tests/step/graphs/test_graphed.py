"""Ways in which a replay could differ from an eager step without notice: each is followed, or runs eagerly.

The tape replays kernels and runs no Python, so whatever a CUDA graph would freeze is frozen here too.
"""

import functools
import random
import types
import warnings
from collections import UserDict, deque
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import nn

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.step import Stepper
from batchwright.testing import EagerGraphs, FakeClock

from . import models
from .tape import TapeGraphs
from .twins import SAME, Twins, adamw, distance, sgd

torch.set_num_threads(1)
SHAPE = (4, 6)
OTHER = 3.0


def table(seed):
    return models.tables(SHAPE, seed=seed)


class Scaled(nn.Module):
    """A layer, times whatever ``scale`` returns."""

    def __init__(self, value=None):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.value = value

    def scale(self):
        return 1.0

    def forward(self, x):
        return self.layer(x) * self.scale()


def twins_of(make=Scaled, loss_fn=models.table_loss, backend="tape", **options):
    return Twins(backend, models.seeded(make), loss_fn, [SHAPE], **options)


def train(twins, num=4, first=0, make=table):
    for seed in range(first, first + num):
        for side in twins.sides:
            side.report = side.stepper.step(make(seed))


def check(twins):
    assert distance(twins.graphed.values, twins.eager.values) <= SAME
    assert twins.graphed.report.loss == pytest.approx(twins.eager.report.loss, rel=1e-5)
    assert twins.graphed.report.weight == twins.eager.report.weight


def reasons_of(twins):
    return " ".join(twins.graphed.stepper.graph_summary().reasons)


@pytest.fixture
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# Values that change between steps


def from_config(model):
    return model.value.scale


def from_entry(model):
    return model.value[0]


def from_nested(model):
    return model.value["a"][0]


def rewrite(value, place, new):
    value[place] = new


# What the module holds, how its forward reads it, and how a user changes it.
_HELD = {
    "config": (lambda: SimpleNamespace(scale=1.0), from_config, lambda held: setattr(held, "scale", OTHER)),
    "list": (lambda: [1.0], from_entry, lambda held: rewrite(held, 0, OTHER)),
    "long-list": (lambda: [1.0] * 100, from_entry, lambda held: rewrite(held, 0, OTHER)),
    "deque": (lambda: deque([1.0]), from_entry, lambda held: rewrite(held, 0, OTHER)),
    "nested": (lambda: {"a": [1.0]}, from_nested, lambda held: rewrite(held["a"], 0, OTHER)),
    "tensor": (lambda: torch.ones(1), from_entry, lambda held: held.fill_(OTHER)),
    "tensor-in-a-list": (lambda: [torch.ones(1)], from_entry, lambda held: rewrite(held, 0, torch.full((1,), OTHER))),
    "partial": (
        lambda: functools.partial(SimpleNamespace, scale=1.0),
        lambda model: model.value().scale,
        lambda held: held.keywords.update(scale=OTHER),
    ),
}


@pytest.mark.parametrize("case", _HELD)
def test_what_a_module_holds_and_a_user_changes_counts_from_the_next_step(case):
    hold, read, change = _HELD[case]

    class Model(Scaled):
        def __init__(self):
            super().__init__(hold())

        def scale(self):
            return read(self)

    twins = twins_of(Model)
    train(twins)
    assert twins.graphed.report.graphed
    twins.each(lambda side: change(side.model.value))
    train(twins, first=4)
    check(twins)
    assert twins.graphed.report.graphed


def test_a_class_that_is_patched_counts():
    class Model(Scaled):
        factor = 1.0

        def scale(self):
            return self.factor

    twins = twins_of(Model)
    train(twins)
    Model.factor = OTHER
    train(twins, first=4)
    check(twins)
    Model.forward = lambda self, x: self.layer(x) * 0.5
    train(twins, first=8)
    check(twins)


def test_a_variable_of_the_loss_counts():
    """A term whose weight grows in the course of training is the usual case."""
    beta, more = 1.0, {"gamma": 1.0}

    def loss_fn(model, batch):
        loss, weight = models.table_loss(model, batch)
        return loss * beta * more["gamma"], weight

    twins = twins_of(loss_fn=loss_fn)
    train(twins)
    beta = OTHER
    train(twins, first=4)
    check(twins)
    more["gamma"] = 0.5
    train(twins, first=8)
    check(twins)
    assert twins.graphed.report.graphed


FACTOR = 1.0


class ByGlobal(Scaled):
    def scale(self):
        return FACTOR


def loss_by_global(model, batch):
    loss, weight = models.table_loss(model, batch)
    return loss * FACTOR, weight


@pytest.mark.parametrize("where", ["loss", "model"])
def test_a_global_that_the_loss_or_the_model_reads_counts(where, monkeypatch):
    twins = twins_of(loss_fn=loss_by_global) if where == "loss" else twins_of(ByGlobal)
    train(twins)
    monkeypatch.setitem(globals(), "FACTOR", OTHER)
    train(twins, first=4)
    check(twins)


class Task:
    """A trainer of one's own: the loss is a method, and steps are counted beside it."""

    def __init__(self):
        self.beta, self.num_steps = 1.0, 0

    def loss(self, model, batch):
        loss, weight = models.table_loss(model, batch)
        return loss * self.beta, weight


@pytest.mark.parametrize("way", ["method", "partial"])
def test_an_attribute_that_a_method_reads_counts_and_a_counter_that_it_does_not_read_does_not(way):
    task = Task()
    twins = twins_of(loss_fn=task.loss if way == "method" else functools.partial(Task.loss, task))
    for seed in range(12):
        task.num_steps = seed
        train(twins, num=1, first=seed)
    assert twins.graphed.stepper.graph_summary().num_captures == 1
    task.beta = OTHER
    train(twins, first=12)
    check(twins)
    assert twins.graphed.stepper.graph_summary().num_captures == 2


def test_a_number_that_changes_at_every_step_ends_graphs_with_advice():
    beta = 1.0

    def loss_fn(model, batch):
        loss, weight = models.table_loss(model, batch)
        return loss * beta, weight

    twins = twins_of(loss_fn=loss_fn)

    def anneal():
        nonlocal beta
        for seed in range(40):
            beta = 1 + seed // 3 / 10
            train(twins, num=1, first=seed)

    with pytest.warns(UserWarning, match="beta of loss_fn changes again and again .* a tensor on the device"):
        anneal()
    check(twins)


def test_a_number_in_a_tensor_may_change_at_every_step():
    beta = torch.ones(())

    def loss_fn(model, batch):
        loss, weight = models.table_loss(model, batch)
        return loss * beta, weight

    twins = twins_of(loss_fn=loss_fn)
    for seed in range(12):
        beta.fill_(1 + seed / 10)
        train(twins, num=1, first=seed)
    check(twins)
    assert twins.graphed.report.graphed


def test_another_model_in_the_loss_counts_with_its_mode_and_its_memory():
    teacher = models.seeded(lambda: nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.0)))

    def loss_fn(model, batch):
        loss, weight = models.table_loss(model, batch)
        with torch.no_grad():
            factor = teacher(batch["x"]).abs().mean()
        return loss * factor, weight

    twins = twins_of(loss_fn=loss_fn)
    train(twins)
    teacher[0].weight.data = teacher[0].weight.data * OTHER
    train(twins, first=4)
    check(twins)
    teacher[1].p = 1.0
    train(twins, first=8)
    check(twins)
    with torch.no_grad():
        teacher[0].weight.mul_(2)  # an average of the student is written in place, and a replay reads it
    teacher[1].p = 0.0
    train(twins, first=12)
    check(twins)
    assert twins.graphed.report.graphed


def test_a_hook_on_all_modules_that_comes_late_runs(quiet):
    twins = twins_of()
    train(twins)
    register = nn.modules.module.register_module_forward_hook
    handle = register(lambda module, inputs, output: output * OTHER if isinstance(module, nn.Linear) else None)
    try:
        train(twins, first=4)
    finally:
        handle.remove()
    check(twins)


def test_a_table_that_grows_in_an_eager_micro_batch_is_read_by_the_next_one():
    """The old table is freed then, and a replay in the same update would read memory of something else."""

    class Cached(Scaled):
        def __init__(self):
            super().__init__(torch.ones(4))

        def forward(self, x):
            if len(x) > len(self.value):
                self.value = torch.full((len(x),), 1.0 + len(x))
            return self.layer(x) * self.value[: len(x), None]

    def split(batch, indices):
        return len(batch) if indices is None else batch[indices[0]]

    twins = twins_of(Cached, split=split, micro_batch=1)
    train(twins, make=lambda seed: [models.tables((4, 6), seed=seed + place) for place in range(3)])
    assert twins.graphed.report.graphed
    train(twins, num=1, make=lambda seed: [models.tables((rows, 6), seed=rows + seed) for rows in (4, 7, 4)])
    check(twins)


# What a forward pass or a loss does besides


class InConfig(Scaled):
    def __init__(self):
        super().__init__(SimpleNamespace(num=0))

    def scale(self):
        self.value.num += 1
        return min(1.0, self.value.num / 6)


class InAList(Scaled):
    def __init__(self):
        super().__init__([torch.ones(1)])

    def forward(self, x):
        output = self.layer(x)
        self.value.append(output.detach().mean())
        return output * min(1.0, len(self.value) / 6)


class InAClass(Scaled):
    counts: ClassVar = {}

    def scale(self):
        self.counts[id(self)] = self.counts.get(id(self), 0) + 1
        return min(1.0, self.counts[id(self)] / 6)


@pytest.mark.parametrize("backend", ["tape", "again"])
@pytest.mark.parametrize("make", [InConfig, InAList, InAClass])
def test_a_forward_pass_that_counts_runs_eagerly_and_counts_right(make, backend):
    twins = twins_of(make, backend=backend)
    with pytest.warns(UserWarning, match="the forward pass changes .*, and a replay would not"):
        train(twins, num=8)
    check(twins)
    assert not twins.graphed.report.graphed


def test_a_loss_that_counts_runs_eagerly_and_counts_right():
    counts = {}

    def loss_fn(model, batch):
        counts[id(model)] = counts.get(id(model), 0) + 1
        loss, weight = models.table_loss(model, batch)
        return loss * min(1.0, counts[id(model)] / 7), weight

    twins = twins_of(loss_fn=loss_fn)
    with pytest.warns(UserWarning, match="changes counts of loss_fn"):
        train(twins, num=9)
    check(twins)
    assert [counts[id(side.model)] for side in twins.sides] == [9, 9]


def test_a_tensor_that_the_forward_pass_writes_to_is_written_once_per_step():
    """No trial and no rehearsal may count, although the tensor is no buffer."""

    class Averages(Scaled):
        def __init__(self):
            super().__init__(torch.ones(1))

        def scale(self):
            self.value.mul_(1.1)
            return self.value.clone()

    twins = twins_of(Averages)
    for number in range(1, 8):
        train(twins, num=1, first=number)
        assert float(twins.graphed.model.value) == pytest.approx(1.1**number, rel=1e-5)
    check(twins)
    assert twins.graphed.report.graphed


def test_a_sum_that_the_loss_keeps_on_the_device_is_right():
    totals = {}

    def loss_fn(model, batch):
        loss, weight = models.table_loss(model, batch)
        totals["side"][model.place] += weight
        return loss, weight

    totals["side"] = torch.zeros(2)
    twins = twins_of(loss_fn=loss_fn)
    for place, side in enumerate(twins.sides):
        side.model.place = place
    train(twins, num=6)
    assert twins.graphed.report.graphed
    assert totals["side"].tolist() == [24, 24]


@pytest.mark.parametrize("kind", ["random", "numpy", "state", "torch"])
def test_a_generator_of_the_loss_runs_eagerly_and_draws_as_ever(kind, quiet):
    made = {
        "random": lambda: random.Random(1),
        "numpy": lambda: np.random.default_rng(1),
        "state": lambda: np.random.RandomState(1),
        "torch": lambda: torch.Generator().manual_seed(1),
    }[kind]
    generators = [made(), made()]

    def loss_fn(model, batch):
        loss, weight = models.table_loss(model, batch)
        own = generators[model.place]
        draw = float(torch.rand((), generator=own)) if kind == "torch" else float(own.uniform(0, 1))
        return loss * (0.5 + draw), weight

    twins = twins_of(loss_fn=loss_fn)
    for place, side in enumerate(twins.sides):
        side.model.place = place
    train(twins, num=8)
    check(twins)
    assert "random numbers on the host" in reasons_of(twins)


# Batches


@pytest.mark.parametrize("backend", ["tape", "again"])
def test_a_loss_may_take_fields_out_of_its_batch_and_write_to_it(backend):
    def loss_fn(model, batch):
        labels = batch.pop("labels")
        batch["x"].mul_(0.5)
        return models.table_loss(model, {**batch, "labels": labels})

    twins = twins_of(loss_fn=loss_fn, backend=backend)
    train(twins, num=6)
    check(twins)
    assert twins.graphed.report.graphed


class Named(UserDict):
    """A mapping that takes attributes."""


def named(seed, scale):
    batch = Named(table(seed))
    batch.scale = scale
    return batch


def named_loss(model, batch):
    loss, weight = models.table_loss(model, batch.data)
    return loss * batch.scale, weight


def test_an_attribute_of_a_batch_is_not_frozen():
    twins = twins_of(loss_fn=named_loss)
    train(twins, num=8, make=lambda seed: named(seed, 1.0 + (seed // 2) % 2))
    check(twins)
    assert twins.graphed.report.graphed


def test_the_sign_of_a_zero_is_not_frozen():
    def loss_fn(model, batch):
        loss, weight = models.table_loss(model, batch)
        return loss * (2 + np.copysign(1, batch["zero"])), weight

    twins = twins_of(loss_fn=loss_fn)
    train(twins, num=8, make=lambda seed: {**table(seed), "zero": -0.0 if seed > 4 else 0.0})
    check(twins)


@pytest.mark.parametrize(
    "value", [lambda seed: f"name-{seed}", lambda seed: seed, lambda seed: [str(seed)] * 4], ids=["text", "int", "list"]
)
def test_single_values_that_differ_in_every_batch_are_not_captured_without_end(value):
    twins = twins_of()
    with pytest.warns(UserWarning, match="single values, such as a list of names, that differ from batch to batch"):
        train(twins, num=30, make=lambda seed: {**table(seed), "name": value(seed)})
    check(twins)
    assert twins.graphed.stepper.graph_summary().num_captures == 0


def test_a_few_single_values_that_come_again_are_captured_each():
    twins = twins_of()
    train(twins, num=24, make=lambda seed: {**table(seed), "task": seed % 3})
    check(twins)
    assert twins.graphed.report.graphed
    twins = twins_of()
    train(twins, num=60, make=lambda seed: {**table(seed), "task": seed % 10})
    assert twins.graphed.stepper.graph_summary().num_captures == 4
    assert "differ again and again" in reasons_of(twins)


def test_a_value_that_is_no_number_is_captured_once():
    twins = twins_of()
    train(twins, num=8, make=lambda seed: {**table(seed), "missing": float("nan")})
    assert twins.graphed.report.graphed
    assert twins.graphed.stepper.graph_summary().num_captures == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[:1].expand(4, 6),
        lambda x: x.T.contiguous().T,
        lambda x: torch.cat([x, x], dim=1)[:, ::2],
    ],
    ids=["expanded", "transposed", "strided"],
)
def test_batches_of_every_layout_give_the_same_gradients(change):
    twins = twins_of()
    train(twins, num=3)
    train(twins, num=4, first=3, make=lambda seed: {**table(seed), "x": change(table(seed)["x"])})
    check(twins)
    assert twins.graphed.report.graphed


def test_arrays_in_a_batch_run_eagerly_with_a_reason():
    def loss_fn(model, batch):
        loss, weight = models.table_loss(model, batch)
        return loss * float(batch["scales"].mean()), weight

    twins = twins_of(loss_fn=loss_fn)
    train(twins, num=5, make=lambda seed: {**table(seed), "scales": np.full(4, 1.0 + seed)})
    check(twins)
    assert reasons_of(twins) == "a batch holds more than tensors and single values"


def test_one_tensor_in_two_fields_that_is_written_to_runs_eagerly_or_right(quiet):
    def loss_fn(model, batch):
        batch["x"].mul_(0.5)
        loss, weight = models.table_loss(model, batch)
        return loss * batch["again"].abs().mean(), weight

    def make(seed):
        batch = table(seed)
        return {**batch, "again": batch["x"]}

    twins = twins_of(loss_fn=loss_fn)
    train(twins, num=6, make=make)
    check(twins)


# Sums on the host


def test_a_weight_that_is_counted_on_the_host_may_differ_from_shape_to_shape():
    def loss_fn(model, batch):
        loss, _ = models.table_loss(model, batch)
        return loss, len(batch["x"]), {"rows": len(batch["x"]), "loss": loss.detach()}

    twins = Twins("tape", models.seeded(Scaled), loss_fn, [SHAPE, (8, 6)])
    for seed in range(8):
        batch = models.tables((4 + 4 * (seed % 2), 6), seed=seed)
        for side in twins.sides:
            side.report = side.stepper.step(batch)
        assert twins.graphed.report.weight == len(batch["x"])
        assert twins.graphed.report.metrics == pytest.approx(twins.eager.report.metrics)
    assert twins.graphed.report.graphed


def test_a_weight_from_an_iterator_of_the_loss_is_found_out_by_the_trial(quiet):
    """An iterator cannot be seen into, but eager and replayed sums differ."""
    counts = {}

    def loss_fn(model, batch):
        loss, _ = models.table_loss(model, batch)
        return loss, next(counts.setdefault(id(model), iter(range(4, 100))))

    twins = twins_of(loss_fn=loss_fn)
    train(twins, num=6)
    assert not twins.graphed.report.graphed


# Updates and errors


def test_two_batches_that_are_abandoned_leave_no_trace():
    twins = twins_of(make_optimizer=adamw)
    train(twins)
    for side in twins.sides:
        side.stepper.accumulate(table(70))
        side.stepper.accumulate(table(71))
        side.stepper.abandon()
        assert all(parameter.grad is None for parameter in side.model.parameters())
    train(twins, first=4)
    check(twins)


class Breaking(TapeGraphs):
    """Its replays fail once it is told to."""

    fails = False

    def capture(self, function, *, writes=()):
        replay = super().capture(function, writes=writes)

        def run():
            replay()
            if self.fails:
                raise RuntimeError("the device went away")

        return run


def breaking_stepper():
    model = models.seeded(Scaled)
    backend = Breaking()
    stepper = Stepper(model, sgd(model.parameters()), models.table_loss, graphs=backend, shapes=[SHAPE])
    return stepper, backend, model


def test_an_error_inside_a_replay_raises_and_the_gradients_before_it_stay():
    stepper, backend, model = breaking_stepper()
    eager = models.seeded(Scaled)
    reference = Stepper(eager, sgd(eager.parameters()), models.table_loss)
    for seed in range(4):
        assert stepper.step(table(seed)).loss == pytest.approx(reference.step(table(seed)).loss, rel=1e-6)
    for one in (stepper, reference):
        one.accumulate(table(4))
    backend.fails = True
    with pytest.raises(RuntimeError, match="the device went away"):
        stepper.accumulate(table(5))
    backend.fails = False
    for one in (stepper, reference):
        one.accumulate(table(6))
        one.update()
    assert distance(list(model.parameters()), list(eager.parameters())) <= SAME


def test_two_steppers_take_turns_on_one_model_with_an_optimizer_each():
    def run(**options):
        model = models.make_mlp()
        first, second = list(model.parameters())[:2], list(model.parameters())[2:]
        steppers = [
            Stepper(model, adamw(first), models.table_loss, **{name: make() for name, make in options.items()}),
            Stepper(model, sgd(second), models.table_loss, **{name: make() for name, make in options.items()}),
        ]
        reports = [[one.step(table(10 * seed + place)) for place, one in enumerate(steppers)] for seed in range(8)]
        return list(model.parameters()), reports[-1]

    expected, _ = run()
    found, reports = run(graphs=TapeGraphs, shapes=lambda: [SHAPE])
    assert distance(found, expected) <= SAME
    assert all(report.graphed for report in reports)


def test_two_steppers_share_an_optimizer_and_clip_each_in_its_own_way():
    def run(graphs):
        model = models.make_mlp()
        optimizer = adamw(model.parameters())
        steppers = [
            Stepper(model, optimizer, models.table_loss, clip_norm=norm, **({} if graphs is None else
                    {"graphs": graphs(), "shapes": [SHAPE]}))
            for norm in (None, 0.05)
        ]  # fmt: skip
        for seed in range(16):
            report = steppers[seed % 2].step(table(seed))
        return list(model.parameters()), report

    expected, eager = run(None)
    found, report = run(TapeGraphs)
    assert distance(found, expected) <= SAME
    assert report.grad_norm == pytest.approx(eager.grad_norm, rel=1e-5)
    assert report.graphed


def test_parameters_of_the_loss_that_are_not_in_the_model_are_trained():
    def run(**options):
        model, extra = models.seeded(Scaled), nn.Parameter(torch.ones(3))

        def loss_fn(model, batch):
            return models.row_loss(model(batch["x"]) * extra, batch)

        stepper = Stepper(model, sgd([*model.parameters(), extra]), loss_fn, **options)
        for seed in range(6):
            if seed == 3:
                extra.data = extra.data * 2
            report = stepper.step(table(seed))
        return [*model.parameters(), extra], report

    expected, _ = run()
    found, report = run(graphs=TapeGraphs(), shapes=[SHAPE])
    assert distance(found, expected) <= SAME
    assert report.graphed


def test_tied_weights_get_the_sum_of_both_gradients():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
            self.second.weight = self.first.weight
            self.last = nn.Linear(6, 3)

        def forward(self, x):
            return self.last(self.second(torch.tanh(self.first(x))))

    twins = twins_of(Tied, make_optimizer=adamw)
    train(twins, num=5)
    check(twins)
    assert twins.graphed.report.graphed


def test_the_state_of_the_stepper_may_be_loaded_between_steps():
    twins = twins_of()
    train(twins)
    twins.each(lambda side: side.stepper.load_state_dict(side.stepper.state_dict()))
    train(twins, first=4)
    check(twins)
    assert twins.graphed.report.graphed


# Which shapes are captured


def run_shapes(shapes, planned, **options):
    model = models.seeded(Scaled)
    stepper = Stepper(model, sgd(model.parameters()), models.table_loss, shapes=planned, **options)
    reports = [stepper.step(models.tables(shape, seed=seed)) for seed, shape in enumerate(shapes)]
    return stepper.graph_summary(), [report.graphed for report in reports]


def test_without_shapes_a_shape_is_captured_when_it_comes_again():
    summary, graphed = run_shapes([(4, 6), (5, 6), (4, 6), (4, 6), (5, 6), (5, 6)], None, graphs=EagerGraphs())
    # The first run warms up, the second of a shape is compared with eager, the third is replayed.
    assert graphed == [False, False, False, True, False, True]
    assert summary.reasons == {"without shapes=, a shape is captured when it comes again": 1}


def test_a_shape_that_was_not_planned_runs_eagerly():
    summary, graphed = run_shapes([(4, 6)] * 3 + [(5, 6)] * 3, [(4, 6)], graphs=EagerGraphs())
    assert graphed == [False, False, True, False, False, False]
    assert summary.reasons == {"a shape was not planned": 3}
    assert summary.hit_rate == pytest.approx(1 / 6)


def test_a_shape_that_is_planned_once_is_captured_only_if_it_comes_again():
    planned = [(4, 6)] * 5 + [(5, 6)]
    summary, graphed = run_shapes([(4, 6), (4, 6), (5, 6), (5, 6), (5, 6)], planned, graphs=EagerGraphs())
    assert graphed == [False, False, False, False, True]
    assert summary.reasons == {"a shape is planned only once": 1}


def test_the_catalogue_is_captured_at_once_from_the_largest_down():
    sizes = []

    class Ordered(TapeGraphs):
        def capture(self, function, *, writes=()):
            sizes.append(getattr(function, "__self__", None))
            return super().capture(function, writes=writes)

    summary, graphed = run_shapes([(4, 6), (4, 6), (8, 6), (6, 6)], [(4, 6), (8, 6), (6, 6)], graphs=Ordered())
    assert summary.num_captures == 3
    rows = [one.signature.sizes[0][0] for one in sizes if hasattr(one, "signature")]
    assert rows == [8, 8, 6, 6, 4, 4]  # forward and backward of each
    assert graphed == [False] * 4  # each is compared with an eager run first


def test_auto_keeps_only_graphs_that_are_faster(monkeypatch):
    clock = FakeClock()

    class Slow(TapeGraphs):
        def capture(self, function, *, writes=()):
            replay = super().capture(function, writes=writes)

            def slow():
                clock.advance(1.0)
                replay()

            return slow

        def seconds(self):
            return clock()

    monkeypatch.setattr("batchwright.step.graphs.graphed.make_backend", lambda choice, device: Slow())
    summary, graphed = run_shapes([(4, 6)] * 5, [(4, 6)], graphs="auto")
    assert not any(graphed)
    assert summary.reasons == {"a shape did not fit into memory, or gained nothing": 3}


def test_samplers_and_budgets_are_catalogues_too():
    sampler = bw.BatchSampler([6] * 16, bw.MaxItems(4), grouping=bw.Buckets(1), shuffle=False)
    _, graphed = run_shapes([(4, 6)] * 3, sampler, graphs=EagerGraphs())
    assert graphed == [False, False, True]


@pytest.mark.parametrize("shapes", [[], [(4, 6.5)], [(0, 6)], "abc"], ids=str)
def test_bad_shapes_are_refused(shapes):
    model = models.seeded(Scaled)
    with pytest.raises(ArgumentError, match="shapes"):
        Stepper(model, sgd(model.parameters()), models.table_loss, graphs=EagerGraphs(), shapes=shapes)


class Room(types.ModuleType):
    """What a device knows and no code can see: variables of modules are not looked at."""

    def __init__(self, backend):
        super().__init__("room")
        self.backend, self.num_failed = backend, 0

    def take(self, num_rows):
        """Fail for 12 rows as soon as two shapes are captured, forward and backward; replays run no Python."""
        if num_rows == 12 and self.backend.num_captures >= 4:
            self.num_failed += 1
            raise MemoryError("no room beside the pool")


def test_where_eager_runs_do_not_fit_beside_the_pool_graphs_are_used_after_one_was_compared():
    backend = TapeGraphs()
    room = Room(backend)

    def crowded(model, batch):
        room.take(len(batch["x"]))
        return models.table_loss(model, batch)

    model, twin = models.make_mlp(), models.make_mlp()
    stepper = Stepper(model, sgd(list(model.parameters())), crowded, graphs=backend, shapes=[(4, 6), (12, 6)] * 3)
    eager = Stepper(twin, sgd(list(twin.parameters())), models.table_loss)
    reports = []
    for seed in range(8):
        batch = models.tables(((4, 12)[seed % 2], 6), seed=seed)
        reports.append(stepper.step(batch))
        eager.step(batch)
    assert room.num_failed == 1
    assert [report.ooms for report in reports] == [0, 1, 0, 0, 0, 0, 0, 0]
    assert [report.graphed for report in reports] == [False, *[True] * 7]
    assert all(report.num_micro_batches == 1 for report in reports)
    assert distance(list(model.parameters()), list(twin.parameters())) <= SAME


class Crowded(TapeGraphs):
    """A device on which no eager step fits beside the pool; a wrong one gives other gradients than it was asked for."""

    def __init__(self, *, free_bytes=1099, is_wrong=False):
        super().__init__()
        self._free_bytes, self._is_wrong = free_bytes, is_wrong

    def free_bytes(self):
        return self._free_bytes

    def capture(self, function, *, writes=()):
        replay = super().capture(function, writes=writes)

        def run():
            replay()
            for tensor in writes if self._is_wrong else ():
                tensor.mul_(2)

        return run


def run_crowded(backend, *, loss_fn=models.table_loss, between=None):
    """Return the reports of eight steps of two shapes, and the distance from eager ones."""
    model, twin = models.make_mlp(), models.make_mlp()
    stepper = Stepper(model, sgd(list(model.parameters())), loss_fn, graphs=backend, shapes=[(4, 6), (12, 6)] * 3)
    eager = Stepper(twin, sgd(list(twin.parameters())), loss_fn)
    reports = []
    for seed in range(8):
        batch = models.tables(((4, 12)[seed % 2], 6), seed=seed)
        reports.append(stepper.step(batch))
        eager.step(batch)
        if between is not None:
            between(seed, model, twin)
    return reports, distance(list(model.parameters()), list(twin.parameters()))


def test_where_no_eager_step_would_fit_beside_the_pool_two_rows_are_compared_and_nothing_runs_out_of_memory():
    seen = types.ModuleType("seen")  # whose variables are not looked at, as a list would be
    seen.rows = []

    def noted(model, batch):
        seen.rows.append(len(batch["x"]))
        return models.table_loss(model, batch)

    reports, far = run_crowded(Crowded(), loss_fn=noted)
    assert [report.graphed for report in reports] == [False, *[True] * 7]
    assert [report.ooms for report in reports] == [0] * 8
    assert seen.rows.count(2) == 3  # before the capture, in it, and beside it
    assert far <= SAME


def test_where_an_eager_step_fits_beside_the_pool_each_shape_is_compared():
    reports, far = run_crowded(Crowded(free_bytes=1100))
    assert [report.graphed for report in reports] == [*[False] * 3, *[True] * 5]
    assert far <= SAME


def test_two_rows_that_differ_from_an_eager_run_end_all_graphs():
    with pytest.warns(UserWarning, match="steps run eagerly, without graphs"):
        reports, far = run_crowded(Crowded(is_wrong=True))
    assert not any(report.graphed for report in reports)
    assert far == 0


def test_a_loss_that_wants_all_rows_is_compared_with_all_of_them():
    def picky(model, batch):
        if len(batch["x"]) < 4:
            raise ValueError("too few rows")
        return models.table_loss(model, batch)

    reports, far = run_crowded(Crowded(), loss_fn=picky)
    assert [report.graphed for report in reports] == [False, *[True] * 7]
    assert far <= SAME


def test_a_model_that_changes_is_compared_again_where_memory_is_short():
    def freeze(seed, *both):
        if seed == 3:
            for model in both:
                next(model.parameters()).requires_grad_(requires_grad=False)

    backend = Crowded()
    reports, far = run_crowded(backend, between=freeze)
    assert [report.graphed for report in reports] == [False, True, True, True, False, True, True, True]
    assert far <= SAME


def test_the_stand_in_has_room_for_eager_steps_or_none():
    for total_bytes, first in ((100 + 4 * 10 + 10, 2), (None, 4)):
        backend = EagerGraphs(bytes_per_capture=10, used_bytes=100, total_bytes=total_bytes)
        _, graphed = run_shapes([(4, 6), (8, 6)] * 4, [(4, 6), (8, 6)] * 4, graphs=backend)
        assert graphed == [step >= first - 1 for step in range(8)]


SIX = [(num, 6) for num in (4, 6, 8, 10, 12, 14)]


class OneWrong(TapeGraphs):
    """The forward pass of one capture gives other numbers, and only that."""

    def __init__(self, number):
        super().__init__()
        self._number = number

    def capture(self, function, *, writes=()):
        replay, is_wrong = super().capture(function, writes=writes), self.num_captures == self._number

        def run():
            replay()
            if is_wrong:
                writes[0].add_(1)

        return run


def test_after_four_whole_comparisons_the_numbers_of_the_forward_pass_suffice():
    _, graphed = run_shapes(SIX * 2, SIX * 2, graphs=TapeGraphs())
    assert graphed == [*[False] * 5, *[True] * 7]


@pytest.mark.parametrize("number", [1, 5, 11])
def test_a_graph_with_other_numbers_than_an_eager_forward_pass_is_compared_whole_and_refused(number):
    with pytest.warns(UserWarning, match="a replay gave other results"):
        summary, graphed = run_shapes(SIX * 2, SIX * 2, graphs=OneWrong(number))
    assert summary.num_captures == 6
    assert not graphed[-1]


def test_choosing_compares_every_graph(monkeypatch):
    monkeypatch.setattr("batchwright.step.graphs.graphed.make_backend", lambda choice, device: TapeGraphs())
    monkeypatch.setattr("batchwright.step.graphs.graphed.WORTH", 1e9)
    _, graphed = run_shapes(SIX * 2, SIX * 2, graphs="auto")
    assert graphed == [*[False] * 7, *[True] * 5]
