"""Collation to planned lengths with the collators of transformers, which pad to the longest example by themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from ...plan.collating import PadTo
from ...step.collators import PadCollator

_SOURCE, _TARGET = "input_ids", "labels"
_MULTIPLE = "pad_to_multiple_of"


@final
@dataclass(frozen=True)
class PlannedCollator:
    """Lets a collator pad to the lengths of the plan.

    A collator that pads to a multiple pads to length W if W is that multiple and no example is longer. With two axes
    it runs once for each: labels and what belongs to the decoder come from the second.

    Args:
        collate: what the loader calls: the collator, or one of the trainer's around it.
        collator: pads to ``pad_to_multiple_of``.
        pad_to: turns the lengths of a batch into planned lengths.
    """

    collate: Callable[[list[Any]], Any]
    collator: Any
    pad_to: PadTo

    def __call__(self, examples: list[Mapping[str, Any]]) -> Any:
        """Return the batch of some examples."""
        names = (_SOURCE, _TARGET)[: len(self.pad_to.shapes[0]) if self.pad_to.shapes else 1]
        lengths = np.array([[max(1, len(example[name])) for name in names] for example in examples])
        widths = self.pad_to(lengths)
        if len(widths) == 1:
            return self._padded(examples, widths[0])
        source, target = (self._padded(examples, width) for width in widths)
        return {name: (target if _is_of_decoder(name) else source)[name] for name in source}

    def _padded(self, examples: list[Any], width: int) -> Any:
        return with_collator(self.collate, self.collator, _at_multiple(self.collator, width))(examples)


def _is_of_decoder(name: str) -> bool:
    return name == _TARGET or name.startswith("decoder_")


def _at_multiple(collator: Any, width: int) -> Any:
    twin = copy.copy(collator)
    setattr(twin, _MULTIPLE, width)
    return twin


def with_collator(collate: Any, collator: Any, other: Any) -> Callable[[list[Any]], Any]:
    """Return what the loader calls with another collator inside."""
    if collate is collator:
        return other  # type: ignore[no-any-return]
    twin = copy.copy(collate)  # the trainer's own, which removes columns that the model does not take
    twin.data_collator = other
    return twin  # type: ignore[no-any-return]


def planned_collator(collate: Any, collator: Any, pad_to: PadTo) -> Callable[[list[Any]], Any] | None:
    """Return what collates to planned lengths, None if the collator cannot be told them."""
    if collate is not collator and getattr(collate, "data_collator", None) is not collator:
        return None
    if isinstance(collator, PadCollator):
        is_plain = isinstance(collator.pad_to, PadTo)
        return with_collator(collate, collator, replace(collator, pad_to=pad_to)) if is_plain else collate  # type: ignore[no-any-return]
    pads_to_longest = getattr(collator, "padding", True) in (True, "longest")
    num_axes = len(pad_to.shapes[0]) if pad_to.shapes else 1
    if not hasattr(collator, _MULTIPLE) or not pads_to_longest or num_axes > 2:
        return None
    if num_axes == 2 and not hasattr(collator, "label_pad_token_id"):
        return None
    return PlannedCollator(collate, collator, pad_to)


def are_equally_long(shapes: Sequence[Sequence[int]]) -> bool:
    """Say whether all batches are padded to the same lengths, so that any collator will do."""
    return len(np.unique(np.asarray(shapes)[:, 1:], axis=0)) == 1
