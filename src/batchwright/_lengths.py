"""The checks that every array of lengths or shapes passes once, and how lengths are padded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ._checks import is_whole
from ._types import MAX_INT32, IntArray
from .errors import ArgumentError, LengthsError

# Source and target are two; many more are the token ids of examples that are equally long.
_MAX_AXES = 16
_OF_TEXTS = "; measure_lengths(texts, tokenizer) counts the tokens of texts"


def as_lengths(lengths: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Check lengths and return them as ``int32`` of shape ``(N, axes)``, C-contiguous.

    Args:
        lengths: whole numbers of 1 or more, shape ``(N,)`` or ``(N, axes)``; a list, an array, a column of a table or
            a tensor, which is copied from its device.

    Returns:
        An array of shape ``(N, axes)``; it shares memory with the input where that is possible.

    >>> as_lengths([3, 5]).tolist()
    [[3], [5]]
    >>> as_lengths([3.5])
    Traceback (most recent call last):
        ...
    batchwright.errors.LengthsError: lengths must be integers, got float64; count tokens, e.g. [len(x) for x in data]
    """
    array = as_array("lengths", lengths, "(N,) or (N, axes), with as many lengths for every example", LengthsError)
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[1] == 0):
        raise LengthsError(
            f"lengths must have shape (N,) or (N, axes), got {array.shape}; give one row of lengths per example, in a "
            f"list or an array{'' if array.ndim else _not_in(lengths)}"
        )
    if array.ndim == 2 and array.shape[1] > _MAX_AXES:
        raise LengthsError(
            f"lengths has {array.shape[1]} numbers per example, over the {_MAX_AXES} axes that can be padded apart; if "
            "these are token ids, pass how many each example has, e.g. measure_lengths(ids) or [len(x) for x in ids]"
        )
    if len(array) == 0:
        raise LengthsError("lengths is empty; there is nothing to batch")
    array = _as_integers("lengths", array, LengthsError)
    _check_range(array)
    if array.ndim == 1:
        array = array[:, None]
    return np.ascontiguousarray(array, dtype=np.int32)


def as_shapes(shapes: npt.ArrayLike, *, num_axes: int | None = None) -> npt.NDArray[np.int64]:
    """Check shapes and return them as ``int64`` of shape ``(M, 1 + axes)``.

    >>> as_shapes([[8, 128]]).tolist()
    [[8, 128]]
    """
    array = as_array("shapes", shapes, "(M, 1 + axes)", ArgumentError)
    if array.ndim != 2 or array.shape[1] < 2:
        raise ArgumentError(
            f"shapes must have shape (M, 1 + axes), got {array.shape}; "
            "give one row (num_items, padded length per axis) per batch, e.g. [[8, 128]]"
        )
    if num_axes is not None and array.shape[1] != 1 + num_axes:
        raise ArgumentError(f"the model has {num_axes} length axes, got shapes with {array.shape[1] - 1}")
    array = _as_integers("shapes", array, ArgumentError)
    if len(array) and array.min() < 1:
        row = int(np.argmax((array < 1).any(axis=1)))
        raise ArgumentError(f"shapes must be 1 or more, got {array[row].tolist()} in row {row}")
    return array.astype(np.int64)


def pad_up(lengths: IntArray, multiple: int) -> IntArray:
    """Round lengths up to a multiple: ``ceil(length / multiple) * multiple``.

    >>> pad_up(np.array([1, 8, 9]), 8).tolist()
    [8, 8, 16]
    """
    return lengths if multiple == 1 else -(-lengths // multiple) * multiple


def as_array(name: str, values: Any, form: str, error: type[ArgumentError]) -> npt.NDArray[Any]:
    """Return values as an array of any type; masked entries would come back as if they were there."""
    if hasattr(values, "detach") and hasattr(values, "is_floating_point"):  # a tensor, on any device
        values = values.detach()
        if values.is_floating_point() or values.is_complex():  # not every such type is one of NumPy's
            raise error(f"{name} must be integers, got {values.dtype}{_advice(name, np.empty(0))}")
    try:
        array = np.asarray(values.cpu() if hasattr(values, "cpu") else values)
    except (RuntimeError, TypeError, ValueError) as reason:
        advice = "" if name != "lengths" else "; give one number per example, not the examples themselves"
        if advice and isinstance(values, list | tuple) and any(hasattr(one, "__len__") for one in values):
            advice = "; of lists of token ids pass the lengths, [len(x) for x in data]"
        raise error(f"{name} must form an array of shape {form}{advice}: {reason}") from reason
    if array.ndim == 2 and isinstance(values, list | tuple) and any(np.ma.is_masked(row) for row in values):
        values = np.ma.stack([np.ma.asarray(row) for row in values])
    if array.dtype.kind == "f" and isinstance(values, list | tuple):
        # NumPy has no type for its signed and unsigned numbers together, and makes them floats.
        objects = np.asarray(values, dtype=object)
        array = objects if all(map(is_whole, objects.flat)) else array
    if np.ma.is_masked(values):
        masked = np.ma.getmaskarray(values).reshape(len(array), -1).any(axis=1)
        raise error(
            f"{name} is masked in {masked.sum()} of {len(array)} examples, first in example {int(masked.argmax())}; "
            "leave those examples out, of the data too"
        )
    return array


def _as_integers(name: str, array: npt.NDArray[Any], error: type[ArgumentError]) -> IntArray:
    """Return an array of integers, or say what came in their place and where."""
    if array.dtype == object and all(map(is_whole, array.flat)):
        try:
            return array.astype(np.int64)
        except OverflowError:
            raise error(f"{name} must fit in 64 bits, got {max(array.flat, key=abs)}") from None
    # NumPy counts spans of time as integers, but not what unit they have.
    if np.issubdtype(array.dtype, np.integer) and not np.issubdtype(array.dtype, np.timedelta64):
        return array
    got = "texts" if array.dtype.kind in "US" else array.dtype
    raise error(f"{name} must be integers, got {got}{_advice(name, array)}")


def _not_in(lengths: Any) -> str:
    return ", not one number" if is_whole(lengths) else f", not in a {type(lengths).__name__}"


def _advice(name: str, array: npt.NDArray[Any]) -> str:
    kind, count = array.dtype.kind, "count tokens, e.g. [len(x) for x in data]"
    if kind == "m":
        return f"; choose a unit, e.g. {name} // np.timedelta64(1, 'ms')"
    if kind in "US":
        are_numbers = all(str(value).strip().isdecimal() for value in array.flat)
        return f"; convert them, e.g. np.asarray({name}).astype(int)" if are_numbers else _OF_TEXTS
    if array.dtype.names:
        fields = ", ".join(f"array[{field!r}]" for field in array.dtype.names)
        return f"; make the fields columns, e.g. np.stack([{fields}], axis=1)"
    if kind not in "fO" or array.size == 0:
        return f"; {count}"
    # By their texts: pandas' NA has no truth value, and not every NaN is a float.
    missing = [value is None or str(value) in ("nan", "NaT", "<NA>") for value in array.flat]
    if any(missing):
        first = missing.index(True) // (array.size // len(array))
        return f" with {sum(missing)} missing, first at example {first}; fill them in or leave those examples out"
    wrong = next((place for place, value in enumerate(array.flat) if kind == "O" and not is_whole(value)), None)
    if wrong is None:
        are_whole = kind == "f" and bool((array == np.floor(array)).all())
        return f"; convert them, e.g. np.asarray({name}).astype(int)" if are_whole else f"; {count}"
    found, advice = array.flat[wrong], f"; {count}"
    if isinstance(found, str):
        advice = _OF_TEXTS
    elif isinstance(found, Mapping):
        advice = "; count tokens, e.g. [len(row['input_ids']) for row in data], or name a column, data['length']"
    return f" with {repr(found)[:60]} at place {wrong}{advice}"


def _check_range(array: IntArray) -> None:
    """Refuse lengths below one and lengths or counts that 32 bits cannot hold."""
    if array.min() < 1:
        first = int(np.argmax((array < 1).reshape(len(array), -1).any(axis=1)))
        raise LengthsError(
            f"lengths must be 1 or more, got {array[first].tolist()} at example {first}; "
            "drop empty examples or count their padding, e.g. np.maximum(lengths, 1)"
        )
    if array.max() > MAX_INT32:
        raise LengthsError(f"lengths must be at most {MAX_INT32}, got {int(array.max())}; use a coarser unit")
    if len(array) > MAX_INT32:
        raise LengthsError(f"at most {MAX_INT32} examples can be planned at once, got {len(array)}")


def is_transformers_tokenizer(tokenizer: Any) -> bool:
    """Say whether this is a tokenizer of transformers, fast or slow, by what it can do.

    >>> is_transformers_tokenizer(str.split)
    False
    """
    has_names = hasattr(tokenizer, "convert_tokens_to_ids") and hasattr(tokenizer, "get_vocab")
    return has_names and callable(tokenizer) and not isinstance(tokenizer, type)


def is_backend_tokenizer(tokenizer: Any) -> bool:
    """Say whether this is a ``tokenizers.Tokenizer``, by what it can do.

    >>> is_backend_tokenizer(str.split)
    False
    """
    names = ("encode_batch", "enable_truncation", "no_padding", "to_str")
    return all(hasattr(tokenizer, name) for name in names) and not isinstance(tokenizer, type)
