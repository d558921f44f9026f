"""torch.compile over planned batches: mark which sizes are static, and count compilations.

torch.compile takes the first batch as static, and what changes in the second as dynamic from then on. A plan knows
better: a few shapes are worth a kernel each, many shapes need one kernel for all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from typing import TypeAlias, TypeVar, final

import numpy.typing as npt
from torch import Tensor

from .._checks import as_whole
from .._tree import leaves
from ..errors import ArgumentError
from ..plan import BatchSampler, PadTo, Plan, ResizableBatchSampler
from .graphs._catalogue import read_shapes
from .report import num_compilations

Batch = TypeVar("Batch")
Shapes: TypeAlias = "npt.ArrayLike | Plan | PadTo | BatchSampler | ResizableBatchSampler"
_Mark: TypeAlias = Callable[[Tensor, int], None]


@final
class MarkShapes:
    """Mark the sizes of a batch for ``torch.compile``: static where the plan has few, dynamic where it has many.

    A size is the number of rows (axis 0), or a padded length (any later axis). Sizes are marked static if the plan then
    needs at most ``max_compilations`` compilations of a function: all sizes if possible, else the lengths or the rows
    only. All others are marked dynamic, so one compilation serves them, and one more those of size 1, which torch takes
    apart. So no plan runs into torch's limit, after which torch.compile gives up and runs a function eagerly.

    Marks belong to a tensor and not to its values: ``.to(device)``, ``pin_memory`` and the workers of a ``DataLoader``
    make other tensors, without marks. Call it last, on the tensors that the model receives; with a ``Stepper`` that is
    inside ``loss_fn``.

    A number of rows that the plan does not hold is marked dynamic, so that all such batches cost one compilation
    more. A length that it does not hold stays unmarked where lengths are static: it may be a number of features.

    Args:
        shapes: ``plan.shapes``, a plan or a sampler with one, or a ``PadTo`` with static shapes: batches that are not
            full are then not part of it, so fill them up.
        max_compilations: the most that static sizes may cost; None is ``torch._dynamo.config.recompile_limit``, 8
            unless you change it. A model that is evaluated too compiles twice as often, so give half of it.

    Attributes:
        are_rows_static: whether the number of rows is marked static.
        are_lengths_static: whether padded lengths are marked static.
        num_expected: the compilations of one function that the plan asks for; torch needs one more for sizes that
            happen to be equal in the first batch.

    >>> import torch
    >>> mark = MarkShapes([[8, 64], [16, 32]])
    >>> mark.are_rows_static, mark.are_lengths_static, mark.num_expected
    (True, True, 2)
    >>> batch = mark({"input_ids": torch.zeros(8, 64)})
    """

    def __init__(self, shapes: Shapes, *, max_compilations: int | None = None) -> None:
        found = read_shapes(shapes).keys()
        choice = _choose(found, _limit(max_compilations))
        self.are_rows_static, self.are_lengths_static, self.num_expected = choice
        self._rows = frozenset(shape[0] for shape in found)
        self._lengths = frozenset(length for shape in found for length in shape[1:])
        # Tables have rows only.
        self._shortest, self._longest = min(self._lengths, default=0), max(self._lengths, default=0)

    def __call__(self, batch: Batch) -> Batch:
        """Mark the tensors of a batch and return it; nested batches are walked through."""
        from torch._dynamo import mark_static, maybe_mark_dynamic

        tensors = [tensor for tensor in leaves(batch) if tensor.ndim]
        counts = Counter(tensor.shape[0] for tensor in tensors)
        rows = counts.most_common(1)[0][0] if counts else 0
        is_planned = self.are_rows_static and rows in self._rows
        # The strict mark raises if the model needs the size to be fixed, as that of features is.
        mark_rows: _Mark = mark_static if is_planned else maybe_mark_dynamic
        mark_length: _Mark = mark_static if self.are_lengths_static else maybe_mark_dynamic
        for tensor in tensors:
            if tensor.shape[0] == rows:
                mark_rows(tensor, 0)
            for axis, size in enumerate(tensor.shape[1:], start=1):
                if self._is_length(size):
                    mark_length(tensor, axis)
        return batch

    def _is_length(self, size: int) -> bool:
        if self.are_lengths_static:
            return size in self._lengths
        # The next epoch has other lengths between the same bounds.
        return self._shortest <= size <= self._longest

    def __repr__(self) -> str:
        kinds = ["static" if flag else "dynamic" for flag in (self.are_rows_static, self.are_lengths_static)]
        return f"MarkShapes({kinds[0]} rows, {kinds[1]} lengths, {self.num_expected} compilations expected)"


def _limit(max_compilations: int | None) -> int:
    from torch._dynamo import config

    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"  # so called before torch 2.7
    limit: int = getattr(config, name)
    if max_compilations is None:
        return limit
    wanted = as_whole("max_compilations", max_compilations, least=1)
    if wanted > limit:
        raise ArgumentError(
            f"max_compilations must be at most torch's own limit of {limit}, got {wanted}; after that limit torch runs "
            f"eagerly, so set torch._dynamo.config.{name} = {wanted} first"
        )
    return wanted


def _choose(shapes: Collection[tuple[int, ...]], limit: int) -> tuple[bool, bool, int]:
    """Return whether rows and whether lengths are static, and the compilations that this takes."""
    # Lengths before rows: attention and softmax run over lengths.
    choices = [(True, True), (False, True), (True, False), (False, False)]
    costs = [(rows, lengths, _num_compilations(shapes, rows, lengths)) for rows, lengths in choices]
    return next((choice for choice in costs if choice[-1] <= limit), costs[-1])


def _num_compilations(shapes: Collection[tuple[int, ...]], are_rows_static: bool, are_lengths_static: bool) -> int:
    """Count what torch tells apart: every static size, and whether a dynamic one is 1, which it never takes as such."""
    flags = (are_rows_static, are_lengths_static)
    return len({tuple(size if flags[axis > 0] else size == 1 for axis, size in enumerate(shape)) for shape in shapes})


@final
class CompileCounter:
    """Counts the compilations of torch.compile from now on, in this process.

    >>> counter = CompileCounter()
    >>> counter.num
    0
    """

    def __init__(self) -> None:
        self._start = num_compilations()

    @property
    def num(self) -> int:
        """Return the graphs compiled since this counter was made."""
        now = num_compilations()
        # Some code clears torch's counters; what is counted since then is the least that happened.
        return now - self._start if now >= self._start else now
