"""Reach: what a model and a loss read from Python, found by their code, and put back as it was."""

import functools
import itertools
import random
import types
from collections import UserDict, deque
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from batchwright.step import Stepper
from batchwright.step.graphs._reach import MOST_ENTRIES, Reach

from .plain import batch_of, squares
from .tape import TapeGraphs
from .twins import Twins, sgd

SCALE = 1.0


class Model(nn.Module):
    def __init__(self, **attributes):
        super().__init__()
        self.layer = nn.Linear(2, 1)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x):
        return self.layer(x) * self.config.scale


class Trainer:
    """Counts its steps all the time, and reads only its settings in the loss."""

    def __init__(self):
        self.beta = 1.0
        self.num_steps = 0
        self.settings = SimpleNamespace(alpha=1.0, verbose=True)

    def loss(self, model, batch):
        return self.weighed(model(batch)), len(batch)

    def weighed(self, output):
        return output.sum() * self.beta * self.settings.alpha


def changes(reach, before):
    found = [place.change_from(values) for place, values in zip(reach.places, before, strict=True)]
    return [one for one in found if one is not None]


def change(module, loss_fn, act):
    """Return what is seen to change when something is done."""
    reach = Reach(module, loss_fn)
    before = [place.values() for place in reach.places]
    assert changes(reach, before) == []
    act()
    return changes(reach, before)


def plain_loss(model, batch):
    return model(batch).sum(), len(batch)


def test_an_object_in_a_module_counts_by_the_attributes_that_code_reads():
    config = SimpleNamespace(scale=1.0, name="a")
    assert change(Model(config=config), plain_loss, lambda: vars(config).update(scale=2.0)) == ["config.scale"]
    assert change(Model(config=config), plain_loss, lambda: vars(config).update(name="b")) == []


@pytest.mark.parametrize(
    ("value", "act"),
    [
        ([1.0, 2.0], lambda value: value.append(3.0)),
        ([[1.0], [2.0]], lambda value: value[1].append(3.0)),
        ({"a": {"b": 1.0}}, lambda value: value["a"].update(b=2.0)),
        ({"a": 1.0}, lambda value: value.update(c=2.0)),
        ({1.0}, lambda value: value.add(2.0)),
        (deque([1.0]), lambda value: value.appendleft(2.0)),
        (([1.0],), lambda value: value[0].append(2.0)),
        ([torch.ones(1)], lambda value: value.__setitem__(0, torch.ones(1))),
        ([1.0] * (MOST_ENTRIES + 1), lambda value: value.append(1.0)),
        (functools.partial(max, default=1.0), lambda value: value.keywords.update(default=2.0)),
    ],
    ids=["list", "list-of-lists", "dicts", "new-key", "set", "deque", "tuple", "tensors", "many", "partial"],
)
def test_containers_in_a_module_count_with_all_that_they_hold(value, act):
    model = Model(config=SimpleNamespace(scale=1.0), held=value)
    assert len(change(model, plain_loss, lambda: act(value))) == 1


def test_variables_of_a_closure_count():
    beta, other = 1.0, {"gamma": 1.0}

    def loss_fn(model, batch):
        return model(batch).sum() * beta * other["gamma"], len(batch)

    def act():
        nonlocal beta
        beta = 2.0

    assert change(nn.Linear(2, 1), loss_fn, act) == ["beta of loss_fn"]
    assert change(nn.Linear(2, 1), loss_fn, lambda: other.update(gamma=2.0)) == ["other of loss_fn"]


def test_globals_and_the_functions_that_a_loss_calls_count(monkeypatch):
    def loss_fn(model, batch):
        return scaled(model(batch).sum()), len(batch)

    assert change(nn.Linear(2, 1), loss_fn, lambda: monkeypatch.setitem(globals(), "SCALE", 2.0)) == [
        "the globals of scaled.SCALE"
    ]


def scaled(value):
    return value * SCALE


def test_a_method_counts_by_what_it_and_the_methods_it_calls_read():
    trainer = Trainer()
    for loss_fn in (trainer.loss, functools.partial(Trainer.loss, trainer)):
        trainer.beta, trainer.settings.alpha = 1.0, 1.0
        assert len(change(nn.Linear(2, 1), loss_fn, lambda: vars(trainer).update(beta=2.0))) == 1
        assert len(change(nn.Linear(2, 1), loss_fn, lambda: vars(trainer.settings).update(alpha=2.0))) == 1
        assert change(nn.Linear(2, 1), loss_fn, lambda: vars(trainer).update(num_steps=9)) == []
        assert change(nn.Linear(2, 1), loss_fn, lambda: vars(trainer.settings).update(verbose=False)) == []


def test_a_callable_object_and_attributes_of_a_function_count():
    class Loss:
        def __init__(self):
            self.beta = 1.0

        def __call__(self, model, batch):
            return model(batch).sum() * self.beta, len(batch)

    def loss_fn(model, batch):
        return model(batch).sum() * loss_fn.beta, len(batch)

    loss_fn.beta, called = 1.0, Loss()
    assert change(nn.Linear(2, 1), called, lambda: setattr(called, "beta", 2.0)) == ["loss_fn.beta"]
    assert change(nn.Linear(2, 1), loss_fn, lambda: setattr(loss_fn, "beta", 2.0)) == ["loss_fn.beta"]


def test_defaults_count():
    def loss_fn(model, batch, *, options={"beta": 1.0}):  # noqa: B006
        return model(batch).sum() * options["beta"], len(batch)

    assert len(change(nn.Linear(2, 1), loss_fn, lambda: loss_fn.__kwdefaults__["options"].update(beta=2.0))) == 1


def test_a_class_counts_by_its_attributes_and_by_a_method_that_is_put_in_front():
    class Base(nn.Module):
        scale = 1.0

        def forward(self, x):
            return x * self.scale

    class Derived(Base):
        pass

    assert change(Derived(), plain_loss, lambda: setattr(Base, "scale", 2.0)) == ["Base.scale"]
    assert change(Derived(), plain_loss, lambda: setattr(Derived, "forward", lambda self, x: x)) == ["Derived.forward"]


def test_another_model_tensors_and_generators_are_found():
    teacher, table = nn.Sequential(nn.Linear(2, 1), nn.Dropout()), torch.ones(3)
    generators = [random.Random(0), np.random.default_rng(0), np.random.RandomState(0), torch.Generator()]

    def loss_fn(model, batch):
        return (model(batch) - teacher(batch)).sum() * table.sum() + len(generators), len(batch)

    reach = Reach(nn.Linear(2, 1), loss_fn)
    assert [type(part).__name__ for part in reach.modules] == ["Linear", "Sequential", "Linear", "Dropout"]
    assert [tensor for _, tensor in reach.tensors] == [table]
    assert [generator for _, generator in reach.generators] == generators


def test_parameters_and_buffers_of_the_model_are_no_tensors_beside_it():
    model = nn.BatchNorm1d(2)
    model.alias = model.running_mean

    def loss_fn(model_, batch):
        return model_(batch).sum() + model.weight.sum(), len(batch)

    assert Reach(model, loss_fn).tensors == []


def test_what_refers_to_itself_is_walked_once():
    ring = [1.0]
    ring.append(ring)
    model = Model(config=SimpleNamespace(scale=1.0), ring=ring)
    model.config.owner = model
    reach = Reach(model, plain_loss)
    assert len(reach.modules) == 2
    assert sum(place.held is ring for place in reach.places) == 1


def test_every_place_can_be_put_back():
    number = 1.0
    config = SimpleNamespace(scale=1.0)
    held = [[1.0], {"a": 1.0}, {1.0}, deque([1.0])]

    def loss_fn(model, batch):
        return model(batch).sum() * number * len(held), len(batch)

    reach = Reach(Model(config=config), loss_fn)
    before = [(place, place.values(), place.copy()) for place in reach.places]
    number = 2.0
    config.scale = 3.0
    held[0].append(2.0)
    held[1]["b"] = 2.0
    held[2].add(2.0)
    held[3].append(2.0)
    held.append("more")
    for place, _, copied in before:
        place.refill(copied)
    assert all(place.change_from(values) is None for place, values, _ in before)
    assert (number, config.scale, held) == (1.0, 1.0, [[1.0], {"a": 1.0}, {1.0}, deque([1.0])])


class Held(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.held = held

    def forward(self, x):
        return self.layer(x) * self.read()


@dataclass(slots=True)
class Slotted:
    alpha: float = 1.0


class ReadsSlots(Held):
    def read(self):
        return self.held.alpha


class ReadsByName(Held):
    def read(self):
        return getattr(self.held, "alpha", 1.0)


class ReadsAnArray(Held):
    def read(self):
        return float(self.held[0])


class ReadsALongList(Held):
    def read(self):
        return self.held[0]


def set_alpha(held):
    held.alpha = 3.0


def set_first(held):
    held[0] = 3.0


CHANGES = {
    "slots": (ReadsSlots, Slotted, set_alpha),
    "getattr": (ReadsByName, lambda: types.SimpleNamespace(alpha=1.0), set_alpha),
    "array": (ReadsAnArray, lambda: np.ones(1), set_first),
    "long list": (ReadsALongList, lambda: [1.0] * 300, set_first),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_setting_of_the_model_that_changes_counts_from_the_next_step(case):
    make, held, act = CHANGES[case]
    twins = Twins("tape", make(held()), squares, [(4, 6)] * 4)
    for seed in range(4):
        twins.step(batch_of(seed=seed))
    assert twins.graphed.report.graphed
    twins.each(lambda side: act(side.model.held))
    for seed in range(4, 7):
        twins.step(batch_of(seed=seed))
    twins.check()


class Lazy:
    """As the configs of OmegaConf and ml_collections: attributes are looked up in a table."""

    def __init__(self, **values):
        self.__dict__["_content"] = dict(values)

    def __getattr__(self, name):
        try:
            return self.__dict__["_content"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name, value):
        self._content[name] = value


class ReadsByKey(Held):
    def read(self):
        return self.held["alpha"]


def set_key(held):
    held["alpha"] = 3.0


LOOKED_UP = {
    "UserDict": (ReadsByKey, lambda: UserDict(alpha=1.0), set_key),
    "__getattr__": (ReadsSlots, lambda: Lazy(alpha=1.0), set_alpha),
}


@pytest.mark.parametrize("case", LOOKED_UP)
def test_a_setting_that_is_looked_up_in_a_table_counts_from_the_next_step(case):
    make, held, act = LOOKED_UP[case]
    twins = Twins("tape", make(held()), squares, [(4, 6)] * 4)
    for seed in range(4):
        twins.step(batch_of(seed=seed))
    twins.each(lambda side: act(side.model.held))
    for seed in range(4, 7):
        twins.step(batch_of(seed=seed))
    twins.check()


@dataclass(slots=True)
class Statistics:
    mean: torch.Tensor


class KeepsAMean(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.statistics = Statistics(torch.zeros(()))

    def forward(self, x):
        with torch.no_grad():
            self.statistics.mean.lerp_(x.mean(), 0.5)
        return self.layer(x) * (1 + self.statistics.mean)


def test_a_tensor_in_an_object_with_slots_is_written_once_per_step():
    twins = Twins("tape", KeepsAMean(), squares, [(4, 6)] * 4)
    for seed in range(6):
        twins.step(batch_of(seed=seed))
    eager, graphed = twins.each(lambda side: float(side.model.statistics.mean))
    assert graphed == pytest.approx(eager, rel=1e-5)
    twins.check()


class CountsInAnArray(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.calls = np.zeros(1, dtype=int)

    def forward(self, x):
        self.calls += 1
        return self.layer(x)


def test_a_count_in_an_array_goes_on():
    model = CountsInAnArray()
    stepper = Stepper(model, sgd(model.parameters()), squares, graphs=TapeGraphs(), shapes=[(4, 6)] * 4)
    with pytest.warns(UserWarning, match="the forward pass changes calls"):  # noqa: PT031
        for seed in range(8):
            stepper.step(batch_of(seed=seed))
    assert model.calls[0] == 8


class PenaltyAtTimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.calls = itertools.count()

    def forward(self, x):
        return self.layer(x) * (2.0 if next(self.calls) % 20 == 19 else 1.0)


def test_a_model_that_counts_its_passes_with_an_iterator_runs_as_eagerly():
    twins = Twins("tape", PenaltyAtTimes(), squares, [(4, 6)] * 4)
    with pytest.warns(UserWarning, match="calls is an iterator, which a replay does not advance"):  # noqa: PT031
        for seed in range(21):
            twins.step(batch_of(seed=seed))
    twins.check()


def test_a_loss_with_a_generator_of_the_system_trains_eagerly():
    chance, model = random.SystemRandom(), nn.Linear(6, 3)

    def loss_fn(model, batch):
        loss, weight = squares(model, batch)
        return loss * (1.0 if chance.random() < 0.5 else 2.0), weight

    stepper = Stepper(model, sgd(model.parameters()), loss_fn, graphs=TapeGraphs(), shapes=[(4, 6)] * 4)
    with pytest.warns(UserWarning, match="chance of loss_fn draws random numbers of the system"):  # noqa: PT031
        for seed in range(4):
            report = stepper.step(batch_of(seed=seed))
    assert not report.graphed


def test_a_counter_on_a_module_that_no_code_reads_costs_no_graph():
    model = nn.Sequential(nn.Linear(6, 3))
    model.num_updates = 0
    stepper = Stepper(model, sgd(model.parameters()), squares, graphs=TapeGraphs(), shapes=[(4, 6)] * 4)
    for seed in range(24):
        report = stepper.step(batch_of(seed=seed))
        model.num_updates += 1
    assert report.graphed
