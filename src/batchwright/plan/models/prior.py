"""MemoryPrior: what a batch takes beside one known to fit, where nothing was measured on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeAlias, final, get_args

import numpy as np
import numpy.typing as npt

from ..._checks import as_number, as_whole
from ..._lengths import as_shapes
from ..._types import FloatArray, IntArray
from ...errors import ArgumentError
from ..budget import MaxCost

Task: TypeAlias = Literal["train", "generate"]
COEFFICIENTS = Path(__file__).with_name("memory_prior.json")


@final
@dataclass(frozen=True)
class MemoryPrior:
    """Memory of a batch relative to a reference batch, from measurements of many models; ``MemoryModel.pretrained``.

    With ``b`` items, ``L`` the sum of their padded lengths and ``T`` tokens generated each::

        cost = fixed + b × (per_item + L + T + square·L²)        relative = cost(batch) / cost(reference)

    all in tokens of input. Where a batch is longer than the reference, ``longer_square`` takes the place of ``square``:
    attention that stores its scores would take that much. It grows with every argument and is 1 for the reference.

    The coefficients are in ``memory_prior.json``, written by ``benchmarks/memory_prior/fit.py`` with the measurements
    beside it. They lean to the safe side: most models take less than predicted. A model that can be run is better
    measured: ``batchwright.step.calibrate``.

    Attributes:
        task: ``"train"`` or ``"generate"``.
        fixed: what a batch takes whatever its size.
        per_item: what an item takes whatever its length; in generation the scores over the vocabulary.
        square: of the squared length.
        longer_square: of the squared length, for batches longer than the reference.
    """

    task: Task
    fixed: float
    per_item: float
    square: float
    longer_square: float

    def __post_init__(self) -> None:
        for name in ("fixed", "per_item", "square", "longer_square"):
            object.__setattr__(self, name, as_number(name, getattr(self, name), least=0))

    def relative(self, shapes: npt.ArrayLike, *, reference: npt.ArrayLike, new_tokens: int | None = None) -> FloatArray:
        """Return the memory of each shape relative to the reference.

        Args:
            shapes: integers ``(M, 1 + axes)``: num_items, padded length per axis.
            reference: a shape known to fit, ``(1 + axes,)``.
            new_tokens: tokens generated for each item, the same for the reference; needed with ``task="generate"``
                unless shapes have an axis for the output.

        >>> prior = MemoryPrior("train", fixed=0.0, per_item=0.0, square=0.0, longer_square=0.0)
        >>> prior.relative([[16, 128], [8, 512]], reference=(8, 256)).tolist()
        [1.0, 2.0]
        """
        batches = as_shapes(_without_fractions(np.atleast_2d(np.asarray(shapes))))
        return self._cost_of(reference, new_tokens)(batches[:, 0], batches[:, 1:])

    def budget(self, *, reference: npt.ArrayLike, fraction: float = 0.9, new_tokens: int | None = None) -> MaxCost:
        """Return the budget of all batches predicted at most at a fraction of the reference's memory.

        Args:
            reference: a shape known to fit, ``(1 + axes,)``: the largest batch of the longest examples, say.
            fraction: of its memory, above 0 and at most 1.
            new_tokens: as in ``relative``.

        >>> prior = MemoryPrior("train", fixed=0.0, per_item=0.0, square=0.0, longer_square=0.0)
        >>> prior.budget(reference=(8, 512)).max_items(np.array([[512], [64]])).tolist()
        [7, 57]
        """
        return MaxCost(self._cost_of(reference, new_tokens), as_number("fraction", fraction, above=0, most=1))

    def _cost_of(self, reference: npt.ArrayLike, new_tokens: int | None) -> RelativeCost:
        shape = _as_reference(reference)
        if self.task == "generate" and new_tokens is None and len(shape) == 2:
            raise ArgumentError(
                "a prior for generation needs new_tokens=, the tokens generated for each item, or shapes with an axis "
                "for the output"
            )
        tokens = 0 if new_tokens is None else as_whole("new_tokens", new_tokens, least=1)
        return RelativeCost(self, shape, tokens)


def _without_fractions(shapes: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return floats that are all whole as integers, which lengths from a table of sums may be."""
    is_whole = shapes.dtype.kind == "f" and np.isfinite(shapes).all() and (shapes == np.trunc(shapes)).all()
    return shapes.astype(np.int64) if is_whole else shapes


def _as_reference(reference: npt.ArrayLike) -> tuple[int, ...]:
    numbers = reference if isinstance(reference, Iterable) else ()
    try:
        shape = tuple(as_whole("a number of reference", number, least=1) for number in numbers)
    except ArgumentError:
        shape = ()
    if len(shape) < 2:
        raise ArgumentError(
            f"reference must be a shape (num_items, padded length per axis) of 1 or more each, got {reference!r}"
        )
    return shape


@final
@dataclass(frozen=True)
class RelativeCost:
    """The cost function of a budget: memory relative to a reference."""

    prior: MemoryPrior
    reference: tuple[int, ...]
    new_tokens: int

    def __call__(self, num_items: IntArray, lengths: IntArray) -> FloatArray:
        """Return the relative memory of batches ``(M,)`` with lengths ``(M, axes)``."""
        if lengths.shape[1] != len(self.reference) - 1:
            raise ArgumentError(
                f"lengths must have as many axes as the reference {self.reference}, {len(self.reference) - 1}, got "
                f"{lengths.shape[1]}"
            )
        prior, length = self.prior, lengths.sum(axis=1).astype(np.float64)
        reference = float(sum(self.reference[1:]))
        square = np.where(length > reference, prior.longer_square, prior.square)
        return self._tokens(num_items, length, square) / self._tokens(self.reference[0], reference, square)

    def _tokens(self, num_items: Any, length: Any, square: FloatArray) -> FloatArray:
        prior = self.prior
        return prior.fixed + num_items * (prior.per_item + length + self.new_tokens + square * length**2)


@cache
def load_prior(task: Task) -> MemoryPrior:
    """Return the prior of a task, or say which tasks there are."""
    if task not in get_args(Task):
        raise ArgumentError(f"task must be 'train' or 'generate', got {task!r}")
    coefficients = json.loads(COEFFICIENTS.read_text(encoding="utf-8"))["coefficients"]
    return MemoryPrior(task, **coefficients[task])
