"""Functions that cost a batch: called with care, and known again by their values when a state is continued."""

from __future__ import annotations

import binascii
import re
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from .._types import FloatArray, IntArray
from ..errors import BudgetError, StateMismatchError

Cost = Callable[[IntArray, IntArray], npt.NDArray[Any]]

# Before the values of a cost in the text of a state; one part for each number of axes, "!" where it takes none.
_MARK = " #"
_VALUES = rf"{_MARK}([\w=+/.!-]+)"
_NONE = "!"
_MAX_AXES = 3
# Where a cost is looked at. Steps lie far apart: two functions that agree at all of them hardly differ elsewhere.
_ITEMS = (1, 3, 64, 1000)
_LENGTHS = (1, 7, 50, 128, 513, 2000, 20_000)
# Single precision and another order of a sum stay within this; a change that is meant does not.
_TOLERANCE = 1e-5


def evaluate(cost: Cost, num_items: IntArray, lengths: IntArray) -> FloatArray:
    """Call a cost with 64-bit integers, in which squares of lengths fit, and check what it returns."""
    num_items, lengths = np.asarray(num_items, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
    # Copies, as a cost may add what a tokenizer adds in place: lengths += 2.
    costs = _as_numbers(cost(num_items.copy(), lengths.copy()))
    if costs.shape != num_items.shape:
        raise BudgetError(
            f"cost must return one number per shape, {num_items.shape}, got {costs.shape}; "
            "it receives num_items (M,) and padded_lengths (M, axes) and returns (M,)"
        )
    if np.isnan(costs).any():
        row = int(np.argmax(np.isnan(costs)))
        raise BudgetError(
            f"cost is NaN for {num_items[row]} items of length {lengths[row].tolist()}; return a finite number"
        )
    return costs


def evaluate_finite(cost: Cost, num_items: IntArray, lengths: IntArray) -> FloatArray:
    """Call a cost for batches that are planned, where infinity would hide all other costs."""
    costs = evaluate(cost, num_items, lengths)
    refuse_infinite(np.isinf(costs), num_items, lengths)
    return costs


def refuse_infinite(is_infinite: npt.NDArray[np.bool_], num_items: IntArray, lengths: IntArray) -> None:
    """Say which batch has an infinite cost, if any has."""
    if is_infinite.any():
        row = int(is_infinite.argmax())
        raise BudgetError(
            f"cost is infinite for {num_items[row]} items of length {lengths[row].tolist()}; give a finite cost, and "
            "keep out what must not be planned by the budget, as in budget & MaxCost(cost, limit)"
        )


def _as_numbers(costs: Any) -> FloatArray:
    if hasattr(costs, "detach"):  # a tensor, perhaps on a device, of half precision or part of a gradient
        costs = costs.detach().cpu().double().numpy()
    try:
        array = np.asarray(costs)
    except ValueError:
        array = np.empty(0, dtype=object)
    if array.dtype.kind not in "biuf":
        found = type(costs).__name__ if array.dtype.kind == "O" else f"{type(costs).__name__} of {array.dtype}"
        raise BudgetError(f"cost must return real numbers, one per shape, got {found}")
    return array.astype(np.float64)


def name_of(cost: Cost) -> str:
    """Return a name that is the same in every run: never the address of an object, numbers as Python prints them."""
    name = getattr(cost, "__qualname__", None) or repr(cost)
    if " at 0x" in name:
        return type(cost).__qualname__
    return re.sub(r"np\.(?:float|int|uint)\d+\(([^()]*)\)", r"\1", name)


def with_values(text: str, cost: Cost) -> str:
    """Return a text by which a saved state knows a cost: its name and its values at 28 shapes.

    The shapes have 1 to 1,000 items of 1 to 20,000 tokens and one to three axes. Functions that differ only elsewhere
    are not told apart. What a cost refuses, or cannot compute, counts as such.
    """
    parts = [_values_at(cost, num_axes) for num_axes in range(1, _MAX_AXES + 1)]
    return f"{text}{_MARK}{'.'.join(parts)}"


def as_saved(mine: Any, saved: Any) -> Any:
    """Return our part of a state as the saved one has it, where both mean the same.

    Versions before wrote no values of costs; and values that agree to five digits are the same, so that the rounding of
    another machine does not count.

    Raises:
        StateMismatchError: a cost of the same name had other values.

    >>> as_saved("MaxCost(f, 9) #AACAPw==.!.!", "MaxCost(f, 9)")
    'MaxCost(f, 9)'
    """
    if isinstance(mine, dict) and isinstance(saved, Mapping):
        return {name: as_saved(value, saved.get(name)) for name, value in mine.items()}
    if not (isinstance(mine, str) and isinstance(saved, str) and _MARK in mine):
        return mine
    if _MARK not in saved:
        return re.sub(_VALUES, "", mine)
    if re.sub(_VALUES, _MARK, mine) != re.sub(_VALUES, _MARK, saved):
        return mine
    values = [re.findall(_VALUES, text) for text in (mine, saved)]
    if len(values[0]) != len(values[1]) or not all(map(_are_close, *values)):
        raise StateMismatchError(
            f"the state was saved with {re.sub(_VALUES, '', saved)}, whose cost had other values than here; use the "
            "same function, or start without the state"
        )
    return saved


def _values_at(cost: Cost, num_axes: int) -> str:
    values = [_value_at(cost, items, length, num_axes) for items in _ITEMS for length in _LENGTHS]
    if np.isnan(values).all():
        return _NONE
    return binascii.b2a_base64(np.array(values, dtype="<f4").tobytes(), newline=False).decode()


def _value_at(cost: Cost, num_items: int, length: int, num_axes: int) -> float:
    # The axes differ within a shape, so that exchanging them is seen. One shape at a time: a table of costs may end.
    lengths = np.array([[length + 3 * axis for axis in range(num_axes)]])
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return float(evaluate(cost, np.array([num_items]), lengths)[0])
    except Exception:  # a function for other numbers of axes raises nearly anything
        return float("nan")


def _are_close(mine: str, saved: str) -> bool:
    parts = [text.split(".") for text in (mine, saved)]
    return len(parts[0]) == len(parts[1]) and all(map(_is_close, *parts))


def _is_close(mine: str, saved: str) -> bool:
    if _NONE in (mine, saved):
        return mine == saved
    try:
        one, other = (np.frombuffer(binascii.a2b_base64(text), dtype="<f4") for text in (mine, saved))
    except ValueError:
        return False
    return one.shape == other.shape and bool(np.allclose(one, other, rtol=_TOLERANCE, atol=0, equal_nan=True))
