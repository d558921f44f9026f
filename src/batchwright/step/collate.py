"""A collator that pads to the lengths the plan counted on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
        pad_values: what a field is padded with; 0 where it is not named.
        mask_field: a mask of real tokens along the first axis, added when the examples have none; None adds none.

    >>> collate = PadCollator(pad_to=PadTo(multiple_of=4))
    >>> collate([{"input_ids": [5, 6], "label": 1}, {"input_ids": [7], "label": 0}])["input_ids"].tolist()
    [[5, 6, 0, 0], [7, 0, 0, 0]]
    """

    pad_to: PadFunction = field(default_factory=PadTo)
    axis_fields: tuple[str, ...] = ("input_ids",)
    same_axis: Mapping[str, int] = field(default_factory=dict)
    pad_values: Mapping[str, int | float] = field(default_factory=lambda: {"labels": -100})
    mask_field: str | None = "attention_mask"

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """Return the tensors of a batch, by field."""
        if not examples:
            raise ArgumentError("a batch needs at least one example, got none")
        missing = [name for name in self.axis_fields if name not in examples[0]]
        if missing:
            raise ArgumentError(f"examples have the fields {sorted(examples[0])}, not {missing}; pass axis_fields=…")
        lengths = np.array([[len(example[name]) for name in self.axis_fields] for example in examples])
        widths = self.pad_to(lengths)
        batch = {name: self._column(name, [example[name] for example in examples], widths) for name in examples[0]}
        if self.mask_field is not None and self.mask_field not in batch:
            real = torch.as_tensor(lengths[:, :1])
            batch[self.mask_field] = (torch.arange(widths[0]) < real).to(torch.int64)
        return batch

    def _column(self, name: str, values: list[Any], widths: tuple[int, ...]) -> Tensor:
        rows = [torch.as_tensor(value) for value in values]
        if rows[0].ndim == 0:
            return torch.stack(rows)
        width = widths[self._axis(name)]
        longest = max(len(row) for row in rows)
        if longest > width:
            raise ArgumentError(
                f"field {name!r} has {longest} tokens but is padded to {width}; it follows axis {self._axis(name)} of "
                f"{self.axis_fields}, say otherwise with same_axis={{{name!r}: …}}"
            )
        shape = (len(rows), width, *rows[0].shape[1:])
        padded = torch.full(shape, self.pad_values.get(name, 0), dtype=rows[0].dtype)
        for place, row in enumerate(rows):
            padded[place, : len(row)] = row
        return padded

    def _axis(self, name: str) -> int:
        if name in self.axis_fields:
            return self.axis_fields.index(name)
        return self.same_axis.get(name, 0)
