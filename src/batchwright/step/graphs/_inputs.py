"""The inputs of a graph: what makes two micro-batches alike, their static buffers, and inputs of other shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from ..._containers import fields_of
from ..._tree import leaves, map_leaves
from .._catalogue import Shape

_SINGLE = frozenset({bool, int, float, str, bytes, type(None), torch.dtype, torch.device})


@final
class Signature(NamedTuple):
    """All that a capture takes for granted about a micro-batch: structure, kinds of tensors, single values."""

    structure: tuple[Any, ...]
    sizes: tuple[tuple[int, ...], ...]


def signature_of(batch: Any) -> Signature | None:
    """Return the signature, None for a batch that holds what no capture can take in."""
    structure: list[Any] = []
    sizes: list[tuple[int, ...]] = []
    return Signature(tuple(structure), tuple(sizes)) if _read(batch, structure, sizes) else None


def _read(value: Any, structure: list[Any], sizes: list[tuple[int, ...]]) -> bool:
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_nested or value.requires_grad or value.is_quantized:
            return False
        structure.append((type(value), value.dtype, value.ndim))
        sizes.append(tuple(value.shape))
        return True
    fields = fields_of(value)
    if fields is not None:
        structure.append((type(value), tuple(fields)))
        return all(_read(item, structure, sizes) for item in fields.values())
    if isinstance(value, list | tuple):
        structure.append((type(value), len(value)))
        return all(_read(item, structure, sizes) for item in value)
    if type(value) in _SINGLE:
        structure.append((type(value), value))
        return True
    return False


def elements_of(signature: Signature) -> int:
    """Return how many numbers the tensors hold: the larger, the more memory a step takes."""
    return sum(int(np.prod(size)) for size in signature.sizes)


@final
class StaticInputs:
    """Buffers on the device, in which every replay finds its micro-batch.

    Attributes:
        batch: the micro-batch made of the buffers.
    """

    def __init__(self, like: Any, device: torch.device) -> None:
        self.batch = map_leaves(like, lambda tensor: tensor.detach().to(device, copy=True))
        self._buffers = list(leaves(self.batch))

    def fill(self, batch: Any) -> None:
        """Copy a micro-batch of the same signature into the buffers."""
        for buffer, tensor in zip(self._buffers, leaves(batch), strict=True):
            buffer.copy_(tensor, non_blocking=True)


@final
class Axes:
    """Which dimension of which tensor follows which axis of a planned shape, learned from the batches seen."""

    def __init__(self) -> None:
        self._options: list[list[set[int | None]]] | None = None  # per tensor and dimension: axes, None for fixed
        self._sizes: list[tuple[int, ...]] = []

    def see(self, sizes: Sequence[tuple[int, ...]], shapes: Iterable[Shape]) -> None:
        """Learn from the sizes of a batch, which is of one of some planned shapes."""
        given = list(shapes)
        if len(given) != 1 or (self._options is not None and len(sizes) != len(self._options)):
            return  # it is not known which one, or the batch has other fields
        shape = given[0]
        if self._options is None:
            fixed: set[int | None] = {None}
            self._options = [[fixed | set(range(1, len(shape))) for _ in size[1:]] for size in sizes]
            self._sizes = list(sizes)
        for options, size, before in zip(self._options, sizes, self._sizes, strict=True):
            for place, width in enumerate(size[1:] if len(size) == len(before) else ()):
                stays = {axis for axis in options[place] if axis is not None and shape[axis] == width}
                is_fixed = None in options[place] and before[place + 1] == width
                options[place] = stays | ({None} if is_fixed else set())

    def sizes_at(self, shape: Shape) -> list[tuple[int, ...]] | None:
        """Return the sizes of the tensors of another planned shape, None while they are not certain."""
        if self._options is None:
            return None
        found = []
        for options, size in zip(self._options, self._sizes, strict=True):
            widths = [self._width(option, shape, width) for option, width in zip(options, size[1:], strict=True)]
            if None in widths:
                return None
            found.append((shape[0], *widths) if size else ())
        return found  # type: ignore[return-value]

    @staticmethod
    def _width(options: set[int | None], shape: Shape, before: int) -> int | None:
        """Return the width that all options agree on."""
        widths = {before if axis is None else shape[axis] for axis in options}
        return widths.pop() if len(widths) == 1 else None


def resized(batch: Any, sizes: Sequence[tuple[int, ...]]) -> Any:
    """Return a batch of other sizes made of the rows and columns of one, again and again, so that all values are valid.

    >>> resized({"x": torch.tensor([[1, 2], [3, 4]])}, [(3, 3)])["x"].tolist()
    [[1, 2, 1], [3, 4, 3], [1, 2, 1]]
    """
    wanted = iter(sizes)

    def repeat(tensor: Tensor) -> Tensor:
        for axis, size in enumerate(next(wanted)):
            if size != tensor.shape[axis]:
                places = torch.arange(size, device=tensor.device) % tensor.shape[axis]
                tensor = tensor.index_select(axis, places)
        return tensor

    return map_leaves(batch, repeat)
