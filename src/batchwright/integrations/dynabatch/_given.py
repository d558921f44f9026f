"""What a user gives instead of having it measured or planned: lengths as tables hold them, and whole batches."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import numpy.typing as npt

from ..._lengths import as_array, as_lengths
from ..._types import MAX_INT32
from ...errors import ArgumentError, LengthsError
from ...plan import Grouping
from ...plan.grouping.base import Groups, Problem
from ._longest_first import arrange

_COUNT = "count tokens, and fill what is missing"


def as_token_lengths(values: Any) -> npt.NDArray[np.int32]:
    """Return token lengths ``(N, axes)``; floats must be whole, and an empty text counts as one token.

    >>> as_token_lengths([3.0, 0.0]).tolist()
    [[3], [1]]
    >>> as_token_lengths([3.5])
    Traceback (most recent call last):
        ...
    batchwright.errors.LengthsError: token_lengths must be whole numbers, got 3.5 at example 0; count tokens, and fill \
what is missing
    """
    array = as_whole_numbers("token_lengths", values)
    return as_lengths(np.where(array == 0, array.dtype.type(1), array))


def as_whole_numbers(name: str, values: Any) -> npt.NDArray[Any]:
    """Return lengths as an array of integers with one row per example, or say what came instead."""
    array = as_array(name, _read(name, values), "(N,) or (N, axes)", LengthsError)
    if array.dtype.kind == "O":  # a table column with gaps, or numbers of several types
        array = _as_floats(name, array)
    if array.ndim == 0:
        raise LengthsError(f"{name} must have one number per example, got {type(values).__name__}; {_COUNT}")
    if array.dtype.kind == "f":
        is_whole = np.isfinite(array) & (array == np.trunc(array))
        if not is_whole.all():
            place = int(np.argmin(is_whole.reshape(len(array), -1).all(axis=1)))
            raise LengthsError(
                f"{name} must be whole numbers, got {array[place].tolist()} at example {place}; {_COUNT}"
            )
    elif array.dtype.kind not in "iu":
        raise LengthsError(f"{name} must be whole numbers, got {array.dtype}; {_COUNT}")
    if array.size and array.max() > MAX_INT32:
        raise LengthsError(f"{name} must be at most {MAX_INT32}, got {int(array.max())}")
    return array if array.dtype.kind in "iu" else array.astype(np.int64)


def _read(name: str, values: Any) -> Any:
    """Return what can be made an array; a column of a data set is read at once, as one by one is slow."""
    if isinstance(values, str | bytes | Set | Mapping):
        raise LengthsError(
            f"{name} must be a list, an array or a column in the order of the examples, got {type(values).__name__}"
        )
    if hasattr(values, "detach") and hasattr(values, "is_floating_point"):  # a tensor, on any device
        values = values.detach().cpu()
        return values.double().numpy() if values.is_floating_point() else values
    if isinstance(values, list | tuple) or hasattr(values, "__array__"):
        return values
    if hasattr(values, "__getitem__"):
        return values[:]
    return list(values) if isinstance(values, Iterable) else values


def _as_floats(name: str, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    try:
        return array.astype(np.float64)
    except (OverflowError, TypeError, ValueError):
        kinds = ", ".join(sorted({type(value).__name__ for value in array.ravel().tolist()}))
        raise LengthsError(f"{name} must be whole numbers, got values of type {kinds}; {_COUNT}") from None


def check_lengths(token_lengths: Any, word_lengths: Any, char_lengths: Any) -> dict[str, npt.NDArray[np.int32]]:
    """Return the lengths by name, tokens of shape ``(N, axes)``; words and characters if they are given."""
    lengths = {"token": as_token_lengths(token_lengths)}
    for name, given in (("word", word_lengths), ("char", char_lengths)):
        if given is None:
            continue
        array = as_whole_numbers(f"{name}_lengths", given)
        if len(array) != len(lengths["token"]):
            raise LengthsError(
                f"{name}_lengths must have one number per example, {len(lengths['token'])}, got {len(array)}"
            )
        if array.ndim != 1 or array.min() < 0:
            raise LengthsError(f"{name}_lengths must be a whole number of 0 or more per example, got {_worst(array)}")
        lengths[name] = array.astype(np.int32)
    return lengths


def _worst(array: npt.NDArray[Any]) -> str:
    return f"shape {array.shape}" if array.ndim != 1 else str(array.min())


def as_batches(batches: Any, num_examples: int) -> list[npt.NDArray[np.int32]]:
    """Return batches that hold no example twice, or say what is wrong with them.

    >>> [batch.tolist() for batch in as_batches([[2, 0], (1,)], 3)]
    [[2, 0], [1]]
    """
    if isinstance(batches, str | bytes | Set | Mapping) or not isinstance(batches, Iterable):
        raise ArgumentError(f"batches must be a list of lists of indices, got {type(batches).__name__}")
    arrays = [_as_batch(number, batch) for number, batch in enumerate(batches)]
    if not arrays:
        raise ArgumentError("batches must hold one batch or more, got none")
    indices = np.concatenate(arrays)
    wrong = indices[(indices < 0) | (indices >= num_examples)]
    if len(wrong):
        raise ArgumentError(
            f"batches must hold indices from 0 to {num_examples - 1}, got {int(wrong[0])}; the sampler was made for "
            f"{num_examples} examples"
        )
    twice = np.flatnonzero(np.bincount(indices) > 1)
    if len(twice):
        raise ArgumentError(
            f"batches must hold an example at most once: {len(twice)} come more than once, such as {twice[0]}"
        )
    return [array.astype(np.int32) for array in arrays]


def _as_batch(number: int, batch: Any) -> npt.NDArray[np.int64]:
    try:
        array = np.asarray(batch)
    except (RuntimeError, TypeError, ValueError):
        array = np.empty((0, 0))
    if array.ndim != 1 or len(array) == 0 or not np.issubdtype(array.dtype, np.integer):
        raise ArgumentError(f"each batch must be a list of one index or more, got {batch!r} as number {number}")
    return array.astype(np.int64)


@final
@dataclass(frozen=True)
class GivenBatches(Grouping):
    """Exactly the batches that the user set; shuffling moves whole batches and the examples inside them.

    Args:
        indices: the examples of all batches, one batch after another.
        sizes: how many examples each batch has.
        keep_first: this many batches come first in every epoch.
        balance_over: batches of near-equal cost come in runs of this many.
        digest: names the batches in a state.
    """

    indices: npt.NDArray[np.int32] = field(repr=False, compare=False)
    sizes: npt.NDArray[np.int64] = field(repr=False, compare=False)
    keep_first: int
    balance_over: int = field(repr=False)
    digest: str

    @staticmethod
    def of(batches: list[npt.NDArray[np.int32]], *, keep_first: int, balance_over: int) -> GivenBatches:
        """Return the grouping of checked batches."""
        indices, sizes = np.concatenate(batches), np.array([len(batch) for batch in batches], dtype=np.int64)
        digest = hashlib.blake2b(np.concatenate([sizes, indices]).astype("<i8").tobytes(), digest_size=16)
        return GivenBatches(indices, sizes, keep_first, balance_over, digest.hexdigest())

    def group(self, problem: Problem) -> Groups:
        """Return the batches in the order of the epoch."""
        return arrange(problem, self.indices, self.sizes, self.keep_first, self.balance_over)

    @property
    def keeps_order(self) -> bool:
        """Return True: the order is the user's, or chosen here."""
        return True
