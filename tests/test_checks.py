"""The checks of arguments and states: what comes back is a plain value, what is refused is told in words."""

import json
import math
import re
from fractions import Fraction
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright._checks import (
    FixedSize,
    as_flag,
    as_number,
    as_sized,
    as_state,
    as_whole,
    check_choice,
    check_order,
    check_ranks,
    check_same,
    has_size,
    is_number,
    read_number,
    read_size,
    read_whole,
)
from batchwright.errors import ArgumentError, StateMismatchError


@pytest.mark.parametrize(
    "value", [3, 0.5, np.int8(3), np.uint64(3), np.float16(0.5), Fraction(1, 2), math.nan, math.inf]
)
def test_real_numbers_are_numbers(value):
    assert is_number(value)


@pytest.mark.parametrize("value", [True, np.True_, "3", None, 3j, np.complex64(3), np.timedelta64(3), np.array(3), [3]])
def test_other_values_are_not(value):
    assert not is_number(value)


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3), np.array(3)])
def test_a_whole_number_may_come_from_numpy(value):
    whole = as_whole("seed", value, least=0)
    assert whole == 3
    assert type(whole) is int  # a state holds it as JSON


@pytest.mark.parametrize("value", [-1, True, np.True_, 3.0, "3", None, np.float64(3), np.array([3]), math.nan])
def test_anything_else_is_no_whole_number(value):
    with pytest.raises(ArgumentError, match="seed must be a whole number of 0 or more, got"):
        as_whole("seed", value, least=0)


def test_the_least_whole_number_is_allowed_and_none_is_too_large():
    assert as_whole("size", 2, least=2) == 2
    assert as_whole("size", 10**30, least=2) == 10**30
    with pytest.raises(ArgumentError, match="size must be a whole number of 2 or more, got 1"):
        as_whole("size", 1, least=2)


@pytest.mark.parametrize("value", [8, np.int64(8), np.float32(8), np.float64(8), Fraction(8)])
def test_a_number_becomes_a_float(value):
    number = as_number("slope", value)
    assert number == 8
    assert type(number) is float


@pytest.mark.parametrize("value", [True, np.True_, "8", None, math.nan, np.float32("nan"), np.array([8.0]), 8j])
def test_anything_else_is_no_number(value):
    with pytest.raises(ArgumentError, match=f"^slope must be a number, got {re.escape(repr(value))}$"):
        as_number("slope", value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, np.float32("inf"), 10**400, -(10**400)])
def test_infinity_is_a_number_only_where_it_is_allowed(value):
    with pytest.raises(ArgumentError, match="slope must be a number, got"):
        as_number("slope", value)
    assert as_number("slope", value, infinite=True) == (math.inf if value > 0 else -math.inf)


def test_bounds_hold_for_infinity_too():
    assert as_number("wait", math.inf, above=0, infinite=True) == math.inf
    for value, bounds in [(-math.inf, {"above": 0}), (math.inf, {"most": 9}), (math.inf, {"below": 9})]:
        with pytest.raises(ArgumentError):
            as_number("wait", value, infinite=True, **bounds)


@pytest.mark.parametrize(
    ("value", "bounds", "words"),
    [
        (0, {"least": 1}, "a number of 1 or more, got 0"),
        (1, {"above": 1}, "a number above 1, got 1"),
        (2, {"most": 1}, "a number of at most 1, got 2"),
        (1, {"below": 1}, "a number below 1, got 1"),
        (2, {"above": 0, "most": 1}, "a number above 0 and at most 1, got 2"),
        (1.5, {"above": 0, "below": 1}, "a number above 0 and below 1, got 1.5"),
        (11, {"least": -10, "most": 10}, "a number of -10 or more and at most 10, got 11"),
        (math.inf, {"least": 0.5}, "a number of 0.5 or more, got inf"),
        (np.float64(2), {"most": 1e12, "above": 2}, "a number above 2 and at most 1e+12, got np.float64(2.0)"),
    ],
)
def test_the_allowed_range_is_told(value, bounds, words):
    with pytest.raises(ArgumentError, match=f"^share must be {re.escape(words)}$"):
        as_number("share", value, **bounds)


@given(st.floats(-4, 4), st.floats(-2, 2), st.floats(-2, 2))
def test_a_number_is_returned_exactly_when_it_is_in_the_range(value, low, high):
    for bounds, is_in in [
        ({"least": low, "most": high}, low <= value <= high),
        ({"above": low, "below": high}, low < value < high),
    ]:
        try:
            assert as_number("x", value, **bounds) == value
        except ArgumentError:
            assert not is_in
        else:
            assert is_in


@pytest.mark.parametrize("value", [True, False, np.True_, np.False_])
def test_a_flag_becomes_plain(value):
    assert as_flag("shuffle", value) is bool(value)


@pytest.mark.parametrize("value", [1, 0, "True", None, np.int64(1), np.array([True])])
def test_anything_else_is_no_flag(value):
    with pytest.raises(ArgumentError, match="shuffle must be True or False, got"):
        as_flag("shuffle", value)


def test_a_choice_is_one_of_the_allowed_words():
    check_choice("ladder", "pow2", (None, "pow2"))
    check_choice("ladder", None, (None, "pow2"))
    for value in ("pow3", 2, True, np.array(["pow2"]), ["pow2"]):
        with pytest.raises(ArgumentError, match="ladder must be one of None, 'pow2', got"):
            check_choice("ladder", value, (None, "pow2"))


def test_limits_need_room_between_them():
    check_order("low", 0.1, "high", 0.2)
    for high in (0.1, 0.0, math.nan):
        with pytest.raises(ArgumentError, match=f"low must be below high, got low=0.1, high={high}"):
            check_order("low", 0.1, "high", high)


def test_a_rank_is_below_the_world_size():
    rank, world_size = check_ranks(np.int32(3), np.uint8(4))
    assert (rank, world_size) == (3, 4)
    assert type(rank) is type(world_size) is int
    with pytest.raises(ArgumentError, match="rank must be below world_size, got rank 4 of 4; ranks count from 0"):
        check_ranks(4, 4)
    with pytest.raises(ArgumentError, match="rank must be a whole number of 0 or more, got -1"):
        check_ranks(-1, 4)
    with pytest.raises(ArgumentError, match="world_size must be a whole number of 1 or more, got 0"):
        check_ranks(0, 0)


@pytest.mark.parametrize("value", [3, 3.0, np.int64(3), np.float32(3), np.arange(3), np.array(3), "3", None])
def test_numbers_and_arrays_are_no_controllers(value):
    assert not has_size(value)


def test_a_controller_may_be_an_array_to_numpy():
    class Controller:
        size = 3

        def __array__(self, dtype=None, copy=None):
            return np.array([32, 64])

    assert as_sized("controller", controller := Controller()) is controller


def test_a_number_is_a_size_that_never_changes():
    assert as_sized("controller", np.int64(3)) == as_sized("controller", 3) == FixedSize(3)
    assert json.dumps(as_sized("controller", np.uint8(3)).size) == "3"


def test_a_controller_is_kept_and_its_size_read_when_asked_for():
    controller = SimpleNamespace(size=np.int64(3))
    assert as_sized("controller", controller) is controller
    controller.size = np.int32(5)
    assert read_size(controller) == 5
    assert type(read_size(controller)) is int


@pytest.mark.parametrize("value", [0, -1, True, 2.5, "64", None, np.arange(3), np.array([3]), np.float64(3)])
def test_what_is_neither_a_size_nor_a_controller_is_refused(value):
    with pytest.raises(ArgumentError, match=r"controller must be a whole number of 1 or more, or have one as \.size"):
        as_sized("controller", value)


@pytest.mark.parametrize("size", [0, 2.5, None, True, "3"])
def test_a_controller_whose_size_is_none_is_refused_at_once(size):
    with pytest.raises(ArgumentError, match=r"controller\.size must be a whole number of 1 or more, got"):
        as_sized("controller", SimpleNamespace(size=size))


def test_a_saved_value_that_differs_is_named():
    check_same("seed", 1, np.int64(1))
    check_same("settings", {"a": 1, "b": None}, {"a": 1, "b": None})
    with pytest.raises(StateMismatchError, match="saved with seed = None, here it is 2; use the same data"):
        check_same("seed", None, 2)


@pytest.mark.parametrize(
    ("saved", "words"),
    [({"a": 1, "b": 3}, "b = 3, here it is 2"), ({"a": 1}, "b = None, here it is 2"), (7, "settings = 7, here it is")],
)
def test_settings_are_compared_key_by_key(saved, words):
    with pytest.raises(StateMismatchError, match=words):
        check_same("settings", saved, {"a": 1, "b": 2})


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_a_whole_number_of_a_state_becomes_plain(value):
    assert type(read_whole({"epoch": value}, "epoch")) is int


@pytest.mark.parametrize("state", [{}, {"epoch": None}, {"epoch": -1}, {"epoch": 1.0}, {"epoch": True}, {"epoch": "1"}])
def test_a_state_without_it_is_refused(state):
    with pytest.raises(StateMismatchError, match="the state needs epoch as a whole number of 0 or more, got"):
        read_whole(state, "epoch")


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (None, "got None; to start from the beginning, do not call it"),
        ([("epoch", 1)], r"got list \[\('epoch', 1\)\]"),
        ('{"epoch": 1}', "got str "),
        (7, "got int 7"),
        (np.arange(40), "got ndarray array\\(.{54}…; to start"),
    ],
)
def test_a_state_is_the_dict_that_was_saved(state, words):
    with pytest.raises(StateMismatchError, match=f"load_state_dict of Loader needs the dict .* returned, {words}"):
        as_state(state, of="Loader")


def test_the_keys_that_a_state_lacks_are_named():
    state = MappingProxyType({"epoch": 3})
    assert as_state(state, of="Loader", needs=["epoch"]) is state
    with pytest.raises(StateMismatchError, match="the state lacks 'seed', 'rank', which every state of Loader has"):
        as_state(state, of="Loader", needs=["seed", "epoch", "rank"])


def test_an_array_in_a_state_is_another_value_and_no_riddle():
    with pytest.raises(StateMismatchError, match=r"saved with lengths = array\(\[1, 2\]\), here it is 'ab'"):
        check_same("lengths", np.array([1, 2]), "ab")


def test_keys_of_several_types_are_compared_too():
    with pytest.raises(StateMismatchError, match="saved with 3 = 'odd', here it is None"):
        check_same("settings", {"a": 1, 3: "odd"}, {"a": 1})


@pytest.mark.parametrize("value", ["1.5", None, math.nan, math.inf, True, -1.0, [1.5]])
def test_a_number_of_a_state_is_checked_as_an_argument_is(value):
    assert read_number({"ratio": 2}, "ratio") == 2
    with pytest.raises(StateMismatchError, match="returned: ratio must be a number of 0 or more, got"):
        read_number({"ratio": value}, "ratio", least=0)
