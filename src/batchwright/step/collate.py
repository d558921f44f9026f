"""A collator that pads to the lengths the plan counted on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from ..errors import ArgumentError
from ..plan import PadTo

PadFunction = Callable[[Any], tuple[int, ...]]


@final
@dataclass(frozen=True, kw_only=True)
class PadCollator:
    """Turn a list of examples into padded tensors, as wide as the plan says.

    An example is a mapping of fields (``{"input_ids": […], "labels": […]}``); a field that is a sequence is padded on
    the right, a number is stacked. Give ``sampler.pad_to`` and the tensors have the shapes of the plan, so that bucket
    bounds reach the model and ``torch.compile`` sees few shapes.

    Args:
        pad_to: lengths of a batch to padded lengths; ``sampler.pad_to`` of a ``BatchSampler``.
        axis_fields: the field that carries the length of each axis; the first is the source.
        same_axis: further fields and the axis each is padded along; fields not named follow the first axis.
        pad_values: what a field is padded with; where it is not named, -100 for ``labels`` and 0 for all others.
        mask_field: a mask of real tokens along the first axis, added when the examples have none; None adds none.

    >>> collate = PadCollator(pad_to=PadTo(multiple_of=4))
    >>> collate([{"input_ids": [5, 6], "label": 1}, {"input_ids": [7], "label": 0}])["input_ids"].tolist()
    [[5, 6, 0, 0], [7, 0, 0, 0]]
    """

    pad_to: PadFunction = field(default_factory=PadTo)
    axis_fields: tuple[str, ...] = ("input_ids",)
    same_axis: Mapping[str, int] = field(default_factory=dict)
    pad_values: Mapping[str, int | float] = field(default_factory=dict)
    mask_field: str | None = "attention_mask"

    def __post_init__(self) -> None:
        if isinstance(self.axis_fields, str):
            raise ArgumentError(f"axis_fields must be a tuple, got {self.axis_fields!r}; write ({self.axis_fields!r},)")
        for name, axis in self.same_axis.items():
            if axis not in range(len(self.axis_fields)):
                raise ArgumentError(
                    f"same_axis puts {name!r} on axis {axis!r}, there are {len(self.axis_fields)} from 0: "
                    f"{self.axis_fields}; name the field of that axis in axis_fields"
                )

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the tensors of a batch, by field."""
        self._check_fields(examples)
        lengths = np.array([[len(example[name]) for name in self.axis_fields] for example in examples])
        widths = self.pad_to(lengths)
        batch = {name: self._column(name, [example[name] for example in examples], widths) for name in examples[0]}
        if self.mask_field is not None and self.mask_field not in batch:
            real = torch.as_tensor(lengths[:, :1])
            batch[self.mask_field] = (torch.arange(widths[0]) < real).to(torch.int64)
        return batch

    def _check_fields(self, examples: Sequence[Mapping[str, Any]]) -> None:
        if not examples:
            raise ArgumentError("a batch needs at least one example, got none")
        strange = next((example for example in examples if not isinstance(example, Mapping)), None)
        if strange is not None:
            raise ArgumentError(f"examples must be mappings of fields, got {type(strange).__name__}")
        missing = [name for name in self.axis_fields if name not in examples[0]]
        if missing:
            raise ArgumentError(f"examples have the fields {sorted(examples[0])}, not {missing}; pass axis_fields=…")
        for place, example in enumerate(examples):
            if example.keys() != examples[0].keys():
                raise ArgumentError(
                    f"examples of a batch need the same fields, example 0 has {sorted(examples[0])} and "
                    f"example {place} has {sorted(example)}"
                )

    def _column(self, name: str, values: list[Any], widths: tuple[int, ...]) -> Tensor:
        rows = [_as_tensor(name, value) for value in values]
        if rows[0].ndim == 0:
            return torch.stack(rows)
        width = widths[self._axis(name)]
        longest = max(len(row) for row in rows)
        if longest > width:
            raise ArgumentError(
                f"field {name!r} has {longest} tokens but is padded to {width}; it follows axis {self._axis(name)} of "
                f"{self.axis_fields}, say otherwise with same_axis={{{name!r}: …}}"
            )
        # An empty row says nothing of its type; torch takes [] for floats.
        dtypes = [row.dtype for row in rows if len(row)] or [rows[0].dtype]
        shape = (len(rows), width, *rows[0].shape[1:])
        fill = self.pad_values.get(name, -100 if name == "labels" else 0)
        padded = torch.full(shape, fill, dtype=reduce(torch.promote_types, dtypes))
        for place, row in enumerate(rows):
            padded[place, : len(row)] = row
        return padded

    def _axis(self, name: str) -> int:
        if name in self.axis_fields:
            return self.axis_fields.index(name)
        return self.same_axis.get(name, 0)


def _as_tensor(name: str, value: Any) -> Tensor:
    if isinstance(value, np.ndarray) and not value.flags.writeable:
        value = value.copy()  # torch warns of arrays that it could not write to, as memory-mapped ones
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"field {name!r} cannot become a tensor: {error}; leave it out of the examples") from None
