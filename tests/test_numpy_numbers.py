"""NumPy's numbers are numbers: every option takes them, and afterwards nothing shows that they were NumPy's.

``CALLS`` names every public call outside ``size`` and ``step``, which have tests of their own, that takes a number or a
flag. The last test fails for an option that is neither there nor in ``EXCEPTIONS``.
"""

import importlib
import inspect
import json
import re
from typing import Protocol

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright as bw
from batchwright import testing

from .numpy_calls import CALLS, EXCEPTIONS, learned, regrouped, resized, sampled, streamed
from .test_public_names import load_tool


def numpy_kinds(value):
    """Return NumPy's kinds that hold a value exactly."""
    if isinstance(value, bool):
        return [np.bool_]
    kinds = [np.float64, np.float32] if isinstance(value, float) else [np.int64, np.int32]
    if value == int(value) and 0 <= value <= 255 and not isinstance(value, float):
        kinds.append(np.uint8)
    return [kind for kind in kinds if kind(value) == value]


def numpy_inside(value, path="", seen=None):
    """Yield the places of NumPy's numbers in a value, in attributes of our objects too."""
    seen = set() if seen is None else seen
    if isinstance(value, np.generic):
        yield f"{path} is {value!r}"
    if isinstance(value, str | bytes | np.ndarray | np.generic) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, dict):
        inside = [*value.items(), *((f"key {key!r}", key) for key in value)]
    elif type(value).__module__.startswith("batchwright"):
        names = [*getattr(value, "__dict__", ()), *(getattr(type(value), "__slots__", ()))]
        inside = [(name, getattr(value, name, None)) for name in names]
    elif isinstance(value, list | tuple | set | frozenset) or type(value).__name__ == "deque":
        inside = list(enumerate(value))
    else:
        return
    for name, item in inside:
        yield from numpy_inside(item, f"{path}.{name}", seen)


def text_of(made):
    """Return the text of what was made, unless it is that of any object."""
    return None if " at 0x" in repr(made) else repr(made)


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=4, deadline=None, database=None)
@given(data=st.data())
def test_a_call_with_numpy_numbers_is_the_call_with_plain_ones(name, data):
    call, options = CALLS[name]
    plain = {option: data.draw(kind.values, label=option) for option, kind in options.items()}
    other = {option: data.draw(st.sampled_from(numpy_kinds(value)))(value) for option, value in plain.items()}
    made, found = call(**plain)
    made_by_numpy, found_by_numpy = call(**other)
    assert list(numpy_inside([made_by_numpy, found_by_numpy])) == []
    assert json.dumps(found_by_numpy) == json.dumps(found)
    assert text_of(made_by_numpy) == text_of(made)
    assert "np." not in (text_of(made_by_numpy) or "")


@pytest.mark.parametrize("name", CALLS)
def test_what_is_no_number_is_refused_in_words(name):
    call, options = CALLS[name]
    for option, kind in options.items():
        for value in kind.refused:
            with pytest.raises(kind.error) as caught:
                call(**{option: value})
            assert "got" in str(caught.value), (option, value)


def test_an_index_of_any_kind_finds_a_batch():
    plan = bw.plan_batches([1] * 300, bw.MaxItems(1))
    assert plan[np.uint8(200)] == plan[200]
    assert plan[np.int8(-1)] == plan[-1] == plan[299]
    for index in (2.5, "3", np.array([3])):
        with pytest.raises(TypeError):  # as a list does
            plan[index]


@pytest.mark.parametrize("make", [sampled, resized, regrouped, streamed])
def test_a_state_with_numpy_numbers_is_continued_with_plain_ones(make):
    state = make()[1][1]
    given = {key: np.int64(value) if isinstance(value, int) else value for key, value in state.items()}
    made = make()[0]
    made.load_state_dict(given)
    assert json.dumps(made.state_dict()) == json.dumps(state)
    assert list(numpy_inside(made)) == []


def test_small_kinds_do_not_overflow():
    wide, small = learned(200, 200, 0.5), learned(np.uint8(200), np.uint8(200), 0.5)
    assert wide[1] == small[1]
    memory = testing.FakeMemory(10**6)
    memory.run_batch(np.uint8(200), np.uint8(200))
    assert memory.peak_bytes == 40_000


ROOMS = {
    "": "batchwright", "errors.": "batchwright.errors", "serve.": "batchwright.serve",
    "serve.http.": "batchwright.serve.http", "testing.": "batchwright.testing", "lab.": "batchwright.lab",
    **{f"lab.{part}.": f"batchwright.lab.{part}" for part in (
        "callbacks", "datasets", "models", "observations", "presets", "report", "statistics", "strategies")},
}  # fmt: skip
OTHER_ROOMS = ("batchwright.size", "batchwright.step")  # with tests of their own


def is_numeric(parameter):
    """Say whether a parameter takes a number or a flag: by its default, or by its annotation outside of brackets."""
    kinds = (int, float)
    text = str(parameter.annotation)
    while re.search(r"\[[^\[\]]*\]", text):
        text = re.sub(r"\[[^\[\]]*\]", "", text)
    return isinstance(parameter.default, kinds) or bool(re.search(r"\b(int|float|bool|SupportsIndex)\b", text))


def numeric_options(call):
    try:
        parameters = inspect.signature(call).parameters.values()
    except (TypeError, ValueError):
        return set()
    return {
        parameter.name
        for parameter in parameters
        if is_numeric(parameter) and parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }


def public_calls():
    """Yield every public function, class and method of the rooms, by the name that ``CALLS`` would use."""
    tool, seen = load_tool(), set()
    for prefix, front in ROOMS.items():
        try:
            importlib.import_module(front)
        except ImportError:  # an optional package is missing
            continue
        for name, value in tool._names_of(front):
            if not callable(value) or value in seen or value.__module__.startswith(OTHER_ROOMS):
                continue
            seen.add(value)
            yield prefix + name, value
            if isinstance(value, type) and Protocol not in value.__mro__:
                ours = [base for base in value.__mro__ if base.__module__.startswith("batchwright")]
                for member in tool._members(ours):
                    if callable(getattr(value, member, None)):
                        yield f"{prefix}{name}.{member}", getattr(value, member)


def test_every_public_option_that_takes_a_number_is_tried():
    found = {name: numeric_options(call) for name, call in public_calls()}
    missing = {
        name: options - set(CALLS.get(name, (None, {}))[1])
        for name, options in found.items()
        if name not in EXCEPTIONS and options - set(CALLS.get(name, (None, {}))[1])
    }
    assert missing == {}
    listed = {*CALLS, *EXCEPTIONS}
    assert {name for name in listed - set(found) if not name.startswith(("lab.", "serve.http."))} == {
        "BatchSizeController"
    }
