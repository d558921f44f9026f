"""Reach: what a model and a loss read from Python, found by their code, and put back as it was."""

import functools
import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from batchwright.step.graphs._reach import MOST_ENTRIES, Reach

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


def labels_of(reach):
    return sorted(place.label for place in reach.places)


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
