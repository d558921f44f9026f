"""PadCollator: make a batch from examples that are padded to a common length."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import Tensor

from .._checks import as_flag
from ..errors import ArgumentError, LengthsError
from ..plan import PadTo
from .filler import ROW_WEIGHT

PadFunction: TypeAlias = Callable[[Any], tuple[int, ...]]

_IGNORED = -100  # the class that cross-entropy leaves out


@final
@dataclass(frozen=True, kw_only=True)
class PadCollator:
    """Turn a list of examples into padded tensors, as wide as the plan says.

    An example is a mapping of fields (``{"input_ids": […], "labels": […]}``). A field that is a sequence is padded on
    the right, a number is stacked. With ``sampler.pad_to`` the tensors have the shapes of the plan, so bucket bounds
    reach the model and ``torch.compile`` sees few shapes.

    A batch has as many rows as it has examples, so one that is short has a shape of its own. ``fill_rows=True`` fills
    it up to the full size of its static shape with copies of its first row, so that a model sees only numbers that are
    usual, and adds the field ``row_weight`` to every batch: 1 for each example, 0 for filler. Filler stands at the end,
    and ``row_weight.sum()`` is the number of examples. A loss has to leave filler out: it counts only labels that are
    not ignored, or multiplies the loss and the weight of each row with ``row_weight``. Layers that mix the rows of a
    batch, such as batch normalisation in training, do see filler. A batch that no static shape holds gets none.

    In filler, the label fields are ignored: a sequence, and a single whole number or flag, is -100 or its value in
    ``pad_values``. Other single numbers, such as the targets of a regression, stay copies. Labels of a type that has no
    -100, such as ``uint8`` or ``bool``, become ``int64`` in every batch.

    Args:
        pad_to: turns the lengths of a batch into padded lengths; ``sampler.pad_to`` of a ``BatchSampler``.
        axis_fields: the field that carries the length of each axis; the first is the source.
        same_axis: the axis that further fields are padded along; fields not named follow the first axis.
        pad_values: the padding of a field, a value that its type holds; by default -100 for ``labels`` and 0 for all
            others.
        mask_field: the name of a mask of real tokens along the first axis, added if examples have none; None adds none.
        fill_rows: fill short batches up with rows of weight 0; ``pad_to`` must have static shapes.
        label_fields: the fields that are ignored in filler; ``()`` leaves all of them copies, for a loss that divides
            by the labels of each row.

    >>> collate = PadCollator(pad_to=PadTo(multiple_of=4))
    >>> collate([{"input_ids": [5, 6], "label": 1}, {"input_ids": [7], "label": 0}])["input_ids"].tolist()
    [[5, 6, 0, 0], [7, 0, 0, 0]]
    >>> batch = PadCollator(pad_to=PadTo(((4,),), (2,)), fill_rows=True)([{"input_ids": [5, 6], "label": 1}])
    >>> batch["input_ids"].tolist(), batch["label"].tolist(), batch["row_weight"].tolist()
    ([[5, 6, 0, 0], [5, 6, 0, 0]], [1, -100], [1.0, 0.0])
    """

    pad_to: PadFunction = field(default_factory=PadTo)
    axis_fields: tuple[str, ...] = ("input_ids",)
    same_axis: Mapping[str, int] = field(default_factory=dict)
    pad_values: Mapping[str, int | float] = field(default_factory=dict)
    mask_field: str | None = "attention_mask"
    fill_rows: bool = False
    label_fields: tuple[str, ...] = ("labels", "label", "shift_labels")

    def __post_init__(self) -> None:
        for name in ("axis_fields", "label_fields"):
            _check_names(name, getattr(self, name))
        object.__setattr__(self, "fill_rows", as_flag("fill_rows", self.fill_rows))
        if self.fill_rows and not (isinstance(self.pad_to, PadTo) and self.pad_to.shapes):
            raise ArgumentError(
                f"fill_rows=True needs a pad_to with static shapes, got {self.pad_to!r}; give sampler.pad_to of a "
                "sampler with grouping=Buckets(count)"
            )
        for name, axis in self.same_axis.items():
            if axis not in range(len(self.axis_fields)):
                raise ArgumentError(
                    f"same_axis puts {name!r} on axis {axis!r}, but the axes are 0 to {len(self.axis_fields) - 1}, "
                    f"{self.axis_fields}; name the field of that axis in axis_fields"
                )

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the tensors of a batch, by field."""
        self._check_fields(examples)
        self._check_axes()
        lengths = np.array([[len(example[name]) for name in self.axis_fields] for example in examples])
        widths = self.pad_to(lengths)
        batch = {name: self._column(name, [example[name] for example in examples], widths) for name in examples[0]}
        if self.mask_field is not None and self.mask_field not in batch:
            real = torch.as_tensor(lengths[:, :1])
            batch[self.mask_field] = (torch.arange(widths[0]) < real).to(torch.int64)
        return self._filled(batch, len(examples), widths) if self.fill_rows else batch

    def _check_axes(self) -> None:
        """Refuse a plan of other axes than the fields have."""
        num_axes = self.pad_to.num_axes if isinstance(self.pad_to, PadTo) else None
        if num_axes not in (None, len(self.axis_fields)):
            raise LengthsError(
                f"the plan has {num_axes} lengths per example, but axis_fields names {len(self.axis_fields)}, "
                f"{self.axis_fields}; name the field of each length, such as axis_fields=('input_ids', 'labels')"
            )

    def _check_fields(self, examples: Sequence[Mapping[str, Any]]) -> None:
        if not examples:
            raise ArgumentError("a batch needs at least one example, got none")
        strange = next((example for example in examples if not isinstance(example, Mapping)), None)
        if strange is not None:
            raise ArgumentError(
                f"examples must be mappings of fields, got {type(strange).__name__}; give a list of rows such as "
                "{'input_ids': [5, 7], 'label': 1}"
            )
        missing = [name for name in self.axis_fields if name not in examples[0]]
        if missing:
            raise ArgumentError(
                f"examples have the fields {sorted(examples[0])}, not {missing}; turn texts into token ids first, or "
                "name the fields to pad, axis_fields=…"
            )
        if self.fill_rows and ROW_WEIGHT in (*examples[0], self.mask_field):
            raise ArgumentError(f"fill_rows=True adds the field {ROW_WEIGHT!r}, which is there already; rename yours")
        for place, example in enumerate(examples):
            if example.keys() != examples[0].keys():
                raise ArgumentError(
                    f"examples of a batch need the same fields, example 0 has {sorted(examples[0])} and "
                    f"example {place} has {sorted(example)}"
                )

    def _column(self, name: str, values: list[Any], widths: tuple[int, ...]) -> Tensor:
        rows = [_as_tensor(name, value) for value in values]
        if rows[0].ndim == 0:
            column = torch.stack(rows)
            if not self._is_ignored(name, column):
                return column
            return column.to(self._dtype(name, column.dtype, [self._ignored(name)]))
        width = widths[self._axis(name)]
        longest = max(len(row) for row in rows)
        if longest > width:
            own = f"axis_fields={(*self.axis_fields, name)!r}"
            others = f", or put it on another one, same_axis={{{name!r}: …}}" if len(self.axis_fields) > 1 else ""
            raise ArgumentError(
                f"field {name!r} has {longest} tokens but is padded to {width}, as it follows axis {self._axis(name)} "
                f"of {self.axis_fields}; give it an axis of its own, {own}{others}"
            )
        # An empty row does not show its type; torch reads [] as floats.
        dtypes = [row.dtype for row in rows if len(row)] or [rows[0].dtype]
        shape = (len(rows), width, *rows[0].shape[1:])
        needed = [self._padding(name), *([self._ignored(name)] if self.fill_rows and name in self.label_fields else [])]
        dtype = self._dtype(name, reduce(torch.promote_types, dtypes), needed)
        padded = torch.full(shape, self._padding(name), dtype=dtype)
        for place, row in enumerate(rows):
            padded[place, : len(row)] = row
        return padded

    def _axis(self, name: str) -> int:
        if name in self.axis_fields:
            return self.axis_fields.index(name)
        return self.same_axis.get(name, 0)

    def _padding(self, name: str) -> int | float:
        return self.pad_values.get(name, _IGNORED if name == "labels" else 0)

    def _ignored(self, name: str) -> int | float:
        return self.pad_values.get(name, _IGNORED)

    def _is_ignored(self, name: str, column: Tensor) -> bool:
        """Return whether filler gets the ignored value, and no copy: not what is measured, such as a single float."""
        is_measured = column.ndim == 1 and (column.is_floating_point() or column.is_complex())
        return self.fill_rows and name in self.label_fields and not is_measured

    def _dtype(self, name: str, dtype: torch.dtype, needed: Sequence[int | float]) -> torch.dtype:
        """Return the type of a field that holds some values, the same in every batch: whole numbers, for -100."""
        if all(_holds(dtype, value) for value in needed):
            return dtype
        if name not in self.pad_values:
            return torch.int64
        raise ArgumentError(
            f"field {name!r} is of {dtype}, which cannot hold its padding {self.pad_values[name]!r}; give another one "
            f"in pad_values, or another type"
        )

    def _filled(self, batch: dict[str, Tensor], num_real: int, widths: tuple[int, ...]) -> dict[str, Tensor]:
        missing = self._full_size(num_real, widths) - num_real
        if missing:
            batch = {name: torch.cat([column, self._filler(name, column, missing)]) for name, column in batch.items()}
        return {**batch, ROW_WEIGHT: torch.cat([torch.ones(num_real), torch.zeros(missing)]).to(torch.float32)}

    def _full_size(self, num_items: int, widths: tuple[int, ...]) -> int:
        """Return the rows of the static shape that a batch is padded to, or its own number where there is none."""
        assert isinstance(self.pad_to, PadTo)
        catalogue = zip(self.pad_to.shapes, self.pad_to.sizes, strict=True)
        return min((size for shape, size in catalogue if shape == widths and size >= num_items), default=num_items)

    def _filler(self, name: str, column: Tensor, num: int) -> Tensor:
        shape = (num, *column.shape[1:])
        return (
            column.new_full(shape, self._ignored(name)) if self._is_ignored(name, column) else column[:1].expand(shape)
        )


def _check_names(option: str, names: Any) -> None:
    if isinstance(names, str):
        raise ArgumentError(f"{option} must be a tuple, got {names!r}; write ({names!r},)")
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise ArgumentError(f"{option} must be a tuple of names of fields, got {names!r}; write () for none")


def _holds(dtype: torch.dtype, value: float) -> bool:
    """Say whether a type has a value: whole numbers their range, floats whatever does not overflow."""
    if dtype.is_complex:
        return True
    if dtype.is_floating_point:
        return not math.isfinite(value) or abs(value) <= torch.finfo(dtype).max
    if not math.isfinite(value) or value != int(value):
        return False
    least, most = (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return least <= value <= most


def _as_tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        value = value.copy()  # torch warns about arrays that it cannot write to, such as memory-mapped ones
    if isinstance(value, np.bool_):
        value = bool(value)  # which NumPy 1.26 warns about inside torch
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"field {name!r} cannot become a tensor: {error}; leave it out of the examples") from None
