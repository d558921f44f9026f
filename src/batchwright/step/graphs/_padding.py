"""Padding a call up to a planned shape, and cutting its results back to what came."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._checks import is_number
from ..._containers import fields_of, rebuilt
from ..._tree import leaves, map_leaves
from ...errors import ArgumentError
from ._catalogue import Shape
from ._inputs import resized
from ._micro import NotGraphableError
from .summary import FAR_SIDE, UNPLANNED

# The positional and the named arguments of a call; those with names in their order.
Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
# What a field is padded with; None for rows only. A flag is a number too.
Fill: TypeAlias = "float | None"
# cut(output, shape): the output of a padded call, and the shape that came
Cut: TypeAlias = Callable[[Any, Shape], Any]

# So many graphs would take longer to capture than they save.
_MOST_SHAPES = 256


def run(function: Callable[..., Any], call: Call) -> Any:
    """Call a function; containers of its own, since it may take fields out of them."""
    args, kwargs = map_leaves(call, lambda tensor: tensor)
    return function(*args, **kwargs)


def names_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a function's positional parameters, none where nobody can tell.

    >>> names_of(lambda ids, mask: ids)
    ('ids', 'mask')
    """
    called = function.forward if isinstance(function, torch.nn.Module) else function
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):
        return ()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return tuple(one.name for one in parameters if one.kind in positional)


@final
class Padding:
    """Pads named tensors of calls up to planned shapes ``(rows, length)`` or ``(rows,)``.

    The first axis of a named tensor has the rows, the second the length if the shapes have one. Filler columns hold the
    field's value, filler rows are copies of the first row, so that a model sees only numbers that are usual.

    Args:
        fills: the value that each named tensor is padded with; None pads only its rows.
        cut: "rows" keeps the rows that came of every tensor of the output; or a function of the output and the shape
            that came.
        shapes: the planned ones.
        names: of the positional arguments.
    """

    def __init__(self, fills: Any, cut: Any, shapes: Iterable[Shape], names: tuple[str, ...]) -> None:
        self._fills = _checked_fills(fills)
        if cut != "rows" and not callable(cut):
            raise ArgumentError(f'cut must be "rows" or a function of an output and a shape, got {cut!r}')
        self._cut: Cut | None = None if isinstance(cut, str) else cut
        # Of as many elements, the shorter: attention grows with the square of the length.
        self.shapes = sorted(shapes, key=lambda shape: (math.prod(shape), shape[::-1]))
        self._names = names
        most = max(map(len, self.shapes))
        if most > 2 or most != min(map(len, self.shapes)):
            raise ArgumentError(
                f"calls are padded up to shapes of (rows, length) or (rows,), got {self.shapes[-1]}; leave pad= out to "
                "capture calls as they come"
            )
        if len(self.shapes) > _MOST_SHAPES:
            raise ArgumentError(
                f"shapes holds {len(self.shapes)} different ones, and every one is captured; plan at most "
                f"{_MOST_SHAPES}, e.g. with grouping=bw.Buckets(16)"
            )
        self._has_length = most == 2

    @property
    def most_rows(self) -> int:
        """Return the rows of the planned shape that has the most."""
        return max(shape[0] for shape in self.shapes)

    def shape_of(self, call: Call) -> Shape:
        """Return the rows and the length of a call, or say which tensors disagree."""
        found: dict[int, dict[int, str]] = {0: {}, 1: {}}

        def look(name: str, tensor: Tensor) -> Tensor:
            for axis in self._axes_of(name, tensor):
                found[axis].setdefault(tensor.shape[axis], name)
            return tensor

        self._map(call, look)
        for axis, what in ((0, "rows"), (1, "lengths"))[: 1 + self._has_length]:
            if len(found[axis]) != 1:
                seen = ", ".join(f"{name} has {size}" for size, name in found[axis].items()) or "no tensor has any"
                raise ArgumentError(
                    f"the tensors named in pad= ({', '.join(self._fills)}) must share their {what}: {seen}; name those "
                    "with rows and a length, with None those that have only rows"
                )
        return tuple(next(iter(found[axis])) for axis in range(1 + self._has_length))

    def planned_for(self, shape: Shape, may_pad: Callable[[Shape, Shape], bool]) -> Shape | str:
        """Return the planned shape of the fewest elements that holds a call, or why none does.

        Args:
            shape: of the call.
            may_pad: whether such a call may be padded to a shape that holds it.
        """
        if min(shape) < 1:
            return UNPLANNED  # there is no row to copy
        holding = [one for one in self.shapes if all(map(int.__ge__, one, shape))]
        return next((one for one in holding if may_pad(shape, one)), FAR_SIDE if holding else UNPLANNED)

    def pad(self, call: Call, shape: Shape) -> Call:
        """Return a call of a planned shape."""
        return self._map(
            call, lambda name, tensor: _padded(tensor, shape, self._axes_of(name, tensor), self._fills[name])
        )

    def cut(self, output: Any, shape: Shape, planned: Shape) -> Any:
        """Return the output of a call that had a shape, before it was padded to a planned one."""
        if self._cut is not None:
            return self._cut(output, shape)
        if any(tensor.ndim == 0 or tensor.shape[0] != planned[0] for tensor in leaves(output)):
            sizes = ", ".join(str(tuple(tensor.shape)) for tensor in leaves(output))
            raise NotGraphableError(
                f'cut="rows" needs outputs with {planned[0]} rows, got tensors of {sizes}; give a function as cut='
            )
        return output if shape[0] == planned[0] else map_leaves(output, lambda tensor: tensor[: shape[0]])

    def whole(self, call: Call, output: Any) -> Any:
        """Return the output of a call that was not padded, in the form that ``cut`` gives it."""
        if self._cut is None:
            return output
        return self._cut(output, self.shape_of(call))

    def resize(self, call: Call, shape: Shape) -> Call:
        """Return a call of another shape, made of the rows and columns of one, again and again."""
        sizes: dict[int, list[int]] = {}

        def look(name: str, tensor: Tensor) -> Tensor:
            size = sizes.setdefault(id(tensor), list(tensor.shape))
            for axis in self._axes_of(name, tensor):
                size[axis] = shape[axis]
            return tensor

        self._map(call, look)
        made: Call = resized(call, [tuple(sizes.get(id(tensor), tensor.shape)) for tensor in leaves(call)])
        return made

    def turned(self, call: Call) -> Call:
        """Return a call with its rows in the other order."""
        return self._map(call, lambda name, tensor: tensor.flip(0) if tensor.ndim else tensor)

    def has_other_rows(self, call: Call) -> bool:
        """Say whether a call has a row that is not equal to its first one."""
        found: list[bool] = []

        def look(name: str, tensor: Tensor) -> Tensor:
            found.append(bool((tensor != tensor[:1]).any()) if tensor.ndim else False)
            return tensor

        self._map(call, look)
        return any(found)

    def _axes_of(self, name: str, tensor: Tensor) -> range:
        """Return the axes of a named tensor that follow the shape."""
        has_length = self._has_length and self._fills[name] is not None
        return range(min(tensor.ndim, 1 + has_length))

    def _map(self, call: Call, function: Callable[[str, Tensor], Tensor]) -> Call:
        """Return a call with every named tensor replaced."""

        def replace(name: str, tensor: Tensor) -> Tensor:
            return function(name, tensor) if name in self._fills else tensor

        args, kwargs = call
        names = (*self._names, *[""] * len(args))
        return (
            tuple(_map_named(value, replace, name) for value, name in zip(args, names, strict=False)),
            {name: _map_named(value, replace, name) for name, value in kwargs.items()},
        )


def _map_named(value: Any, function: Callable[[str, Tensor], Tensor], name: str) -> Any:
    """Return nested values with every tensor replaced; its name is that of the nearest field around it."""
    if isinstance(value, Tensor):
        return function(name, value)
    fields = fields_of(value)
    if fields is not None:
        return rebuilt(value, {key: _map_named(item, function, str(key)) for key, item in fields.items()})
    if isinstance(value, list | tuple):
        return type(value)(_map_named(item, function, name) for item in value)
    return value


def _padded(tensor: Tensor, shape: Shape, axes: range, fill: Fill) -> Tensor:
    if len(axes) == 2 and tensor.shape[1] < shape[1]:
        assert fill is not None
        if not (tensor.is_floating_point() or tensor.is_complex()) and not float(fill).is_integer():
            raise ArgumentError(f"pad= gives {fill!r} for a tensor of {tensor.dtype}, which cannot hold it")
        # F.pad counts dimensions from the last.
        tensor = F.pad(tensor, [*[0, 0] * (tensor.ndim - 2), 0, shape[1] - tensor.shape[1]], value=fill)
    if len(axes) and tensor.shape[0] < shape[0]:
        filler = tensor[:1].expand(shape[0] - tensor.shape[0], *tensor.shape[1:])
        tensor = torch.cat([tensor, filler])
    return tensor


def _checked_fills(fills: Any) -> dict[str, Fill]:
    if not isinstance(fills, Mapping) or not fills:
        raise ArgumentError(
            f"pad must name the tensors to pad and their values, such as {{'input_ids': 0, 'attention_mask': 0}}, got "
            f"{fills!r}"
        )
    for name, fill in fills.items():
        is_fill = fill is None or isinstance(fill, bool) or (is_number(fill) and not math.isnan(fill))
        if not isinstance(name, str) or not is_fill:
            raise ArgumentError(
                f"pad gives {fill!r} for {name!r}; give a number, or None for a tensor without a length"
            )
    return dict(fills)
