"""Containers: what they hold, and the same container made of other values."""

import enum
from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from batchwright._containers import fields_of, is_open, is_plain, rebuilt
from batchwright.errors import ArgumentError

Pair = namedtuple("Pair", ["x", "y"])
Color = enum.Enum("Color", ["RED"])


class Checked(Pair):
    """A named tuple that takes other arguments than its fields."""

    def __new__(cls, total):
        return super().__new__(cls, total, total)


class NoArguments(OrderedDict):
    def __init__(self):
        super().__init__()


class Upper(dict):
    """A dict that changes its keys when it is made."""

    def __init__(self, values):
        super().__init__({name.upper(): value for name, value in values.items()})


@dataclass(frozen=True, kw_only=True)
class Frozen:
    x: int
    y: int = 3


@dataclass(slots=True)
class Slotted:
    x: int
    y: int


@dataclass
class Cached:
    x: int
    y: int

    @cached_property
    def total(self):
        return self.x + self.y


@pytest.mark.parametrize(
    "value",
    [
        {"x": 1, "y": 2},
        OrderedDict(x=1, y=2),
        UserDict(x=1, y=2),
        BatchEncoding({"x": 1, "y": 2}),
        MappingProxyType({"x": 1, "y": 2}),
        Pair(1, 2),
        Checked(1),
        Frozen(x=1, y=2),
        Slotted(1, 2),
        Cached(1, 2),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_container_of_the_same_type_holds_the_new_values(value):
    made = rebuilt(value, {"x": 7, "y": 8})
    assert type(made) is type(value)
    assert fields_of(made) == {"x": 7, "y": 8}
    assert fields_of(value)["x"] == 1


def test_a_result_of_torch_is_a_container():
    top = torch.tensor([[1, 5], [7, 3]]).max(1)
    made = rebuilt(top, {name: value[:1] for name, value in fields_of(top).items()})
    assert type(made) is type(top)
    assert (made.values.tolist(), made.indices.tolist()) == ([5], [1])


def test_a_cached_property_is_computed_anew():
    value = Cached(1, 2)
    assert value.total == 3
    assert rebuilt(value, {"x": 10, "y": 20}).total == 30


def test_a_default_factory_is_kept():
    assert rebuilt(defaultdict(list, x=1), {"x": 2})["new"] == []


@pytest.mark.parametrize("value", [NoArguments(), Upper({"x": 1})])
def test_a_mapping_that_cannot_be_made_from_a_dict_becomes_one(value):
    made = rebuilt(value, {"x": 2})
    assert type(made) is dict
    assert made == {"x": 2}


@dataclass
class Derived:
    x: int
    total: int = field(init=False)

    def __post_init__(self):
        self.total = 2 * self.x


@dataclass
class Extra:
    x: int

    def __post_init__(self):
        self.num = 8


@dataclass
class Scaled:
    x: int
    scale: InitVar[int] = 2

    def __post_init__(self, scale):
        self.x = self.x * scale


@dataclass
class Normed:
    x: torch.Tensor

    def __post_init__(self):
        self.x = self.x / self.x.sum()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Derived(1), "derives 'total' from its fields"),
        (Extra(1), "derives 'num' from its fields"),
        (Scaled(1), "derives 'scale' from its fields"),
        (Normed(torch.ones(2)), "changes 'x' when it is made"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_dataclass_that_is_more_than_its_fields_is_refused(value, message):
    with pytest.raises(ArgumentError, match=message):
        rebuilt(value, {"x": torch.ones(1)})


class Holder:
    def __init__(self, held):
        self.held = held


class Slots:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held


PLAIN = [0.5, "a", b"a", None, True, 1j, np.float32(2), Color.RED, Path("/"), torch.Size([2]), torch.half, len, int]


@pytest.mark.parametrize("value", PLAIN, ids=str)
def test_a_single_value_belongs_to_no_example_alone_or_in_an_object(value):
    assert is_plain(value)
    assert is_plain(Holder(value))
    assert is_plain(Slots(Holder(value)))


@pytest.mark.parametrize(
    "value", [[1], (1,), {"a": 1}, {1}, range(2), iter([1]), torch.ones(2), np.ones(2), Frozen(x=1)], ids=repr
)
def test_what_may_hold_a_value_per_example_is_no_single_value_alone_or_in_an_object(value):
    assert not is_plain(value)
    assert not is_plain(Holder(value))
    assert not is_plain(Slots(Holder(value)))


def test_an_object_that_holds_itself_is_looked_at_once():
    value = Holder(1)
    value.me = value
    assert is_plain(value)


class Tensors(Mapping):
    """A mapping that knows more than its keys and values, as a TensorDict knows its batch size."""

    def __getitem__(self, name):
        return 1

    def __iter__(self):
        return iter("x")

    def __len__(self):
        return 1


def test_a_mapping_that_is_no_dict_may_hold_more_than_its_fields():
    assert fields_of(Tensors()) == {"x": 1}
    assert [is_open(value) for value in ({}, UserDict(), Pair(1, 2), Tensors())] == [True, True, True, False]
