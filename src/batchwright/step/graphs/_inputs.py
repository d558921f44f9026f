"""The inputs of a graph: what makes two micro-batches alike, their static buffers, and inputs of other shapes."""

from __future__ import annotations

from collections import Counter, UserDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from ..._containers import fields_of
from ..._tree import leaves, map_leaves
from ._catalogue import Shape, matches

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
        if vars(value):  # attributes that a static buffer would not have
            return False
        structure.append((type(value), value.dtype, value.ndim))
        sizes.append(tuple(value.shape))
        return True
    fields = fields_of(value)
    if fields is not None:
        structure.append((type(value), tuple(fields)))
        return all(_read(item, structure, sizes) for item in (*fields.values(), *_attributes_of(value, fields)))
    if isinstance(value, list | tuple):
        if getattr(value, "__dict__", None):  # attributes that one made of other entries would not have
            return False
        structure.append((type(value), len(value)))
        return all(_read(item, structure, sizes) for item in value)
    if type(value) in _SINGLE:
        # As a text, a float that is no number equals itself, and 0 does not equal -0.
        structure.append((type(value), value.hex() if type(value) is float else value))
        return True
    return False


def _attributes_of(value: Any, fields: Mapping[Any, Any]) -> list[Any]:
    """Return what a container holds besides its fields, each with its name; static inputs have the same."""
    if type(value) is dict or not hasattr(value, "__dict__"):
        return []
    is_known = type(value).__module__.partition(".")[0] == "transformers"  # whose private ones stay behind
    return [
        (name, item if type(item) in _SINGLE else _Unreadable)
        for name, item in vars(value).items()
        if name not in fields and not (isinstance(value, UserDict) and name == "data")
        if not (is_known and name.startswith("_"))
    ]


class _Unreadable:
    """Stands for an attribute that no signature can hold."""


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

    def fill_at_once(self, batch: Any) -> None:
        """Do the same, and never read the batch after the call: its owner may write to pinned memory again."""
        for buffer, tensor in zip(self._buffers, leaves(batch), strict=True):
            buffer.copy_(tensor, non_blocking=tensor.device.type != "cpu" or not tensor.is_pinned())


@final
class Axes:
    """Which dimension of which tensor follows which axis of a planned shape, learned from the batches seen."""

    def __init__(self) -> None:
        self._options: list[list[set[int | None]]] | None = None  # per tensor and dimension: axes, None for fixed
        self._sizes: list[tuple[int, ...]] = []

    def see(self, sizes: Sequence[tuple[int, ...]], shapes: Iterable[Shape]) -> None:
        """Learn from the sizes of a batch, which is of one of some planned shapes."""
        given = list(shapes)
        if len(given) != 1 or (self._options is not None and not _are_alike(sizes, self._sizes)):
            return  # it is not known which one, or the batch has other fields
        shape = given[0]
        if self._options is None:
            fixed: set[int | None] = {None}
            self._options = [[fixed | set(range(1, len(shape))) for _ in size[1:]] for size in sizes]
            self._sizes = list(sizes)
        for options, size, before in zip(self._options, sizes, self._sizes, strict=True):
            for place, width in enumerate(size[1:]):
                stays = {axis for axis in options[place] if axis is not None and shape[axis] == width}
                is_fixed = None in options[place] and before[place + 1] == width
                options[place] = stays | ({None} if is_fixed else set())

    def sizes_at(self, shape: Shape, like: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]] | None:
        """Return the sizes of the tensors of another planned shape, None while they are not certain.

        Args:
            shape: the planned shape.
            like: the sizes of a batch with the same fields.
        """
        if self._options is None or not _are_alike(like, self._sizes):
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


def _are_alike(sizes: Sequence[tuple[int, ...]], others: Sequence[tuple[int, ...]]) -> bool:
    return [*map(len, sizes)] == [*map(len, others)]


# A signature with its batch, or with the sizes of one that is made of another.
Target: TypeAlias = "tuple[Signature, Any]"


@final
class Catalogue:
    """The planned shapes, and what their batches look like as far as batches have shown it.

    Args:
        planned: shapes and how often each is planned, None without a plan.
    """

    def __init__(self, planned: Mapping[Shape, int] | None) -> None:
        self._planned = planned or {}
        self.is_planned = planned is not None
        self._axes = Axes()
        self._is_handed_out = False

    def see(self, signature: Signature) -> list[Shape]:
        """Learn from a batch, and return the planned shapes that it may be of."""
        shapes = [shape for shape in self._planned if matches(signature.sizes, shape)]
        self._axes.see(signature.sizes, shapes)
        return shapes

    def is_rare(self, shapes: Sequence[Shape]) -> bool:
        """Say whether shapes are planned only once though others come more often: not worth a capture."""
        return max(self._planned.values(), default=0) > 1 and all(self._planned[shape] == 1 for shape in shapes)

    def targets(self, signature: Signature, batch: Any) -> list[Target]:
        """Return what to capture now, largest first: the batch, and at the first time whatever else is planned."""
        targets = {signature: batch}
        if not self._is_handed_out:
            for shape in self._planned:
                # Sizes that are not certain yet are captured when they come.
                sizes = None if self.is_rare([shape]) else self._axes.sizes_at(shape, signature.sizes)
                if sizes is not None:
                    targets.setdefault(signature._replace(sizes=tuple(sizes)), sizes)
            self._is_handed_out = True
        return sorted(targets.items(), key=lambda target: elements_of(target[0]), reverse=True)

    def eager_elements(self, like: Signature) -> int:
        """Return the elements of the largest shape that is planned but not worth a capture."""
        rare = [self._axes.sizes_at(shape, like.sizes) for shape in self._planned if self.is_rare([shape])]
        return max((elements_of(like._replace(sizes=tuple(sizes))) for sizes in rare if sizes is not None), default=0)


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


def few_rows(sizes: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    """Return the sizes of two rows of a batch; most of its tensors have as many rows as the batch.

    >>> few_rows([(8, 5), (8,), (3, 3), ()])
    ((2, 5), (2,), (3, 3), ())
    """
    rows = Counter(size[0] for size in sizes if size)
    if not rows:
        return tuple(sizes)
    num = rows.most_common(1)[0][0]
    return tuple((min(num, 2), *size[1:]) if size and size[0] == num else size for size in sizes)
