"""The checks that every array of lengths or shapes passes once, and how lengths are padded."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ._types import MAX_INT32, IntArray
from .errors import ArgumentError, LengthsError


def as_lengths(lengths: npt.ArrayLike) -> npt.NDArray[np.int32]:
    """Check lengths and return them as ``int32`` of shape ``(N, axes)``, C-contiguous.

    Args:
        lengths: whole numbers of 1 or more, shape ``(N,)`` or ``(N, axes)``; a list, an array or a CPU tensor.

    Returns:
        An array of shape ``(N, axes)``; it shares memory with the input where that is possible.

    >>> as_lengths([3, 5]).tolist()
    [[3], [5]]
    >>> as_lengths([3.5])
    Traceback (most recent call last):
        ...
    batchwright.errors.LengthsError: lengths must be integers, got float64; count tokens, e.g. [len(x) for x in data]
    """
    try:
        array = np.asarray(lengths)
    except (RuntimeError, TypeError, ValueError) as error:
        raise LengthsError(
            f"lengths must form an array of shape (N,) or (N, axes), with as many lengths for every example: {error}"
        ) from error
    if array.ndim not in (1, 2) or (array.ndim == 2 and array.shape[1] == 0):
        raise LengthsError(
            f"lengths must have shape (N,) or (N, axes), got {array.shape}; give one row of lengths per example"
        )
    if len(array) == 0:
        raise LengthsError("lengths is empty; there is nothing to batch")
    if not np.issubdtype(array.dtype, np.integer):
        raise LengthsError(f"lengths must be integers, got {array.dtype}; count tokens, e.g. [len(x) for x in data]")
    _check_range(array)
    if array.ndim == 1:
        array = array[:, None]
    return np.ascontiguousarray(array, dtype=np.int32)


def as_shapes(shapes: npt.ArrayLike, *, num_axes: int | None = None) -> npt.NDArray[np.int64]:
    """Check shapes and return them as ``int64`` of shape ``(M, 1 + axes)``.

    >>> as_shapes([[8, 128]]).tolist()
    [[8, 128]]
    """
    try:
        array = np.asarray(shapes)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"shapes must form an array of shape (M, 1 + axes): {error}") from error
    if array.ndim != 2 or array.shape[1] < 2:
        raise ArgumentError(
            f"shapes must have shape (M, 1 + axes), got {array.shape}; "
            "give one row (num_items, padded length per axis) per batch, e.g. [[8, 128]]"
        )
    if num_axes is not None and array.shape[1] != 1 + num_axes:
        raise ArgumentError(f"the model has {num_axes} length axes, got shapes with {array.shape[1] - 1}")
    if not np.issubdtype(array.dtype, np.integer):
        raise ArgumentError(f"shapes must be integers, got {array.dtype}")
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
