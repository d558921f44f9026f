"""What the arguments of dynabatch may be; what cannot be planned is refused by name."""

from __future__ import annotations

import math
import numbers
import warnings
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from ..._lengths import as_lengths
from ...errors import ArgumentError, LengthsError
from ._prior import Task


def as_array(values: Any) -> npt.NDArray[Any]:
    """Return lengths as an array, read in one go: a column of a data set is slow to read one by one.

    >>> as_array((3, 5)).tolist()
    [3, 5]
    """
    if not isinstance(values, np.ndarray | list | tuple) and not hasattr(values, "__array__"):
        values = values[:] if hasattr(values, "__getitem__") else list(values)
    return np.asarray(values)


def check_lengths(token_lengths: Any, word_lengths: Any, char_lengths: Any) -> dict[str, npt.NDArray[np.int32]]:
    """Return the lengths by name, tokens of shape ``(N, axes)``; words and characters where they are given."""
    lengths = {"token": as_lengths(as_array(token_lengths))}
    for name, given in (("word", word_lengths), ("char", char_lengths)):
        if given is None:
            continue
        array = as_array(given)
        if len(array) != len(lengths["token"]):
            raise LengthsError(
                f"{name}_lengths must give one number an example, {len(lengths['token'])}, got {len(array)}"
            )
        if not np.issubdtype(array.dtype, np.integer) or array.min() < 0:
            raise LengthsError(f"{name}_lengths must be whole numbers of 0 or more, got {array.dtype}")
        lengths[name] = array.astype(np.int32)
    return lengths


def check_number(name: str, value: Any) -> float:
    """Return a finite number of 0 or more."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not 0 <= value < math.inf:
        raise ArgumentError(f"{name} must be a finite number of 0 or more, got {value!r}")
    return float(value)


def check_task(task: Any) -> Task:
    """Return the task, or say which there are."""
    if task not in get_args(Task):
        raise ArgumentError(f"task must be one of {', '.join(map(repr, get_args(Task)))}, got {task!r}")
    chosen: Task = task
    return chosen


def warn_about_long(token_lengths: npt.NDArray[Any], max_length: int) -> None:
    """Warn of given lengths over the limit: nothing has cut those texts."""
    longest = int(token_lengths.max())
    if longest > max_length:
        num = int(np.count_nonzero(token_lengths > max_length))
        warnings.warn(
            f"{num} of the given token_lengths are over max_input_token_length={max_length}, the longest is {longest}; "
            "they are planned as given, so cut the texts or raise the limit",
            stacklevel=4,
        )
