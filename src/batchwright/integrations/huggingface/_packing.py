"""Packed batches of an adaptive trainer: flat where attention can run on them, padded where it cannot."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch

from ..._types import IntArray
from ...errors import ArgumentError
from ...plan.grouping.base import Grouping
from ...plan.grouping.sorting import WindowSort
from ...step.collators import PadCollator
from ...step.huggingface import has_usual_loss, unwrapped, usual_reading
from ...step.oom import Snapshot
from ...step.packing.attention import VarlenHandle, is_flash, is_prepared, try_varlen, why_not_varlen
from ...step.packing.collator import PackCollator, flattened
from ...step.packing.probing import complaint_about_rows, doubt_about_rows, why_not_packed
from .._devices import Devices

logger = logging.getLogger(__name__)

Collate = Callable[[list[Any]], Any]


@final
class Packing:
    """How the batches of ``grouping=Packed(…)`` are planned, collated and counted.

    Args:
        grouping: what is planned; for padded batches no ``Packed``.
        collate: makes a batch of examples, or of rows.
        takes_rows: the collator takes rows of examples.
        width: of the rows of a collator that pads them; None for the longest.
        is_flat: there is no padding.
        handle: gives the model its own attention back.
    """

    def __init__(
        self,
        grouping: Grouping,
        collate: Collate,
        *,
        takes_rows: bool = False,
        width: int | None = None,
        is_flat: bool = False,
        handle: VarlenHandle | None = None,
    ) -> None:
        self.grouping, self.collate, self.takes_rows = grouping, collate, takes_rows
        self._width, self._is_flat, self._handle = width, is_flat, handle

    def num_padded(self, rows: Sequence[Sequence[int]], lengths: IntArray) -> int:
        """Return the tokens of a batch of rows, with padding."""
        sums = [int(lengths[list(row)].sum(dtype=np.int64)) for row in rows]
        return sum(sums) if self._is_flat else len(sums) * (max(sums) if self._width is None else self._width)

    def close(self) -> None:
        """Give the model its own attention back."""
        if self._handle is not None:
            self._handle.remove()


def choose_packing(
    grouping: Grouping,
    *,
    dataset: Any,
    lengths: IntArray,
    collate: Collate,
    collator: Any,
    model: Any,
    devices: Devices,
    has_own_loss: bool,
    is_said: bool,
) -> Packing:
    """Return flat batches, rows as the user's ``PackCollator`` makes them, or padded batches with the reason logged.

    Args:
        grouping: a ``Packed``.
        dataset: what the loader reads.
        lengths: of its examples.
        collate: of the trainer's own loader.
        collator: of the user.
        model: without wrappers for several devices.
        devices: of the training.
        has_own_loss: the trainer takes the loss of the model.
        is_said: the reason was logged before.
    """
    if isinstance(collator, PackCollator):
        rows = _rows(grouping, collate, collator, model, devices)
        if collator.layout != "flat" and not is_flash(model) and not is_said and devices.args.process_index == 0:
            logger.warning("%s.", doubt_about_rows(collator))
        return rows
    flatten, handle = Flattened(collate, _predicts_next(model)), None
    reason = _reason(lengths, model, devices, has_own_loss=has_own_loss)
    if reason is None:
        reason = _reason_of_collator(flatten, dataset, lengths, model)
    if reason is None and not is_prepared(model):
        found = try_varlen(model, dtype=_dtype(model, devices.args))
        handle, reason = (None, found) if isinstance(found, str) else (found, None)
    if reason is None:
        return Packing(grouping, flatten, is_flat=True, handle=handle)
    if not is_said and devices.args.process_index == 0:
        logger.warning(
            "Batches of %s are padded, by WindowSort, as packed rows would be slower or not exact: %s. "
            "data_collator=PackCollator() packs rows all the same, for decoders.",
            grouping,
            reason,
        )
    return Packing(WindowSort(), collate)


def check_collator(collator: Any, *, is_packed: bool) -> None:
    """Refuse a collator of rows where none are planned."""
    if isinstance(collator, PackCollator) and not is_packed:
        raise ArgumentError(
            "data_collator=PackCollator() takes rows of several examples; pass grouping=Packed(capacity), without a "
            "controller"
        )


def _rows(grouping: Grouping, collate: Collate, collator: PackCollator, model: Any, devices: Devices) -> Packing:
    """Return rows as the user wants them, if examples of a row cannot see each other."""
    is_flat, handle = collator.layout == "flat", None
    if collator.causal != _predicts_next(model):
        raise ArgumentError(
            f"{type(unwrapped(model)).__name__} {'predicts' if not collator.causal else 'does not predict'} the next "
            f"token, but the data_collator says causal={collator.causal}; pass PackCollator(causal="
            f"{not collator.causal}, …)"
        )
    if is_flat and not is_prepared(model):
        found = try_varlen(model, dtype=_dtype(model, devices.args))
        if isinstance(found, str) and not collator.causal:
            raise ArgumentError(f"data_collator=PackCollator(layout='flat') cannot run: {found}; use layout='block'")
        if isinstance(found, str) and devices.args.process_index == 0:
            logger.warning("Flat batches run with a mask of all pairs of tokens, which is slow: %s.", found)
        handle = None if isinstance(found, str) else found
    is_tried = is_flat and (handle is not None or is_prepared(model))
    reason = None if is_tried else why_not_packed(model, collator)
    if reason is not None:
        raise ArgumentError(complaint_about_rows(model, collator, reason))
    return Packing(
        grouping, collate, takes_rows=True, width=None if is_flat else collator.width, is_flat=is_flat, handle=handle
    )


def _predicts_next(model: Any) -> bool:
    return usual_reading(model, torch.zeros((1, 2), dtype=torch.int64)).shifts


def _dtype(model: Any, args: Any) -> torch.dtype:
    """Return the type of the forward pass."""
    if args.bf16 or args.fp16:
        return torch.bfloat16 if args.bf16 else torch.float16
    dtype: torch.dtype = next(model.parameters()).dtype
    return dtype


def _reason(lengths: IntArray, model: Any, devices: Devices, *, has_own_loss: bool) -> str | None:
    """Return why flat batches cannot run, or would not give the loss of padded ones."""
    name = type(unwrapped(model)).__name__
    if lengths.shape[1] != 1:
        return "examples have a length for inputs and another one for labels"
    if devices.is_divided:
        return "ranks hold parts of the model"
    if not has_own_loss:
        return "the trainer computes a loss of its own, which may look at rows"
    if not has_usual_loss(model):
        return f"the loss of {name} is not known to be a mean over its labels"
    if is_prepared(model) or is_flash(model):
        return None
    return why_not_varlen(model, devices.args.device, _dtype(model, devices.args))


def _reason_of_collator(flatten: Flattened, dataset: Any, lengths: IntArray, model: Any) -> str | None:
    """Return why batches of the trainer's collator cannot be flattened, as its shortest and longest example show."""
    chosen = dict.fromkeys([int(lengths.argmin()), int(lengths.argmax())])
    snapshot = Snapshot.of(unwrapped(model))  # a collator may draw random numbers
    try:
        flatten([dataset[index] for index in chosen])
    except ArgumentError as error:
        return str(error)
    finally:
        snapshot.restore()
    return None


@final
@dataclass(frozen=True)
class Flattened:
    """Collate as the trainer does, then leave out all padding.

    Attributes:
        collate: of the trainer.
        causal: the model predicts the next token.
    """

    collate: Collate
    causal: bool

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        """Return a flat batch."""
        batch = self.collate(examples)
        if not isinstance(batch, Mapping):
            raise ArgumentError(f"the collator gives a {type(batch).__name__}, not a mapping")
        return flattened(batch, causal=self.causal)


@final
@dataclass(frozen=True)
class Padded:
    """What evaluation uses in place of a ``PackCollator``: rows of one example, padded.

    >>> batch = Padded(PackCollator(pad_id=9))([{"input_ids": [5, 6]}, {"input_ids": [7]}])
    >>> batch["input_ids"].tolist(), batch["labels"].tolist()
    ([[5, 6], [7, 9]], [[5, 6], [7, -100]])
    """

    collator: PackCollator

    def __call__(self, examples: list[Any]) -> dict[str, Any]:
        """Return a padded batch."""
        names = [name for name in self.collator.token_fields if name in examples[0]]
        rows = []
        for example in examples:
            tokens = example["input_ids"]
            labels = example.get("labels", tokens if self.collator.causal else None)
            found = {} if labels is None else {"labels": labels}
            rows.append({"input_ids": tokens, **found, **{name: example[name] for name in names}})
        return PadCollator(pad_values={"input_ids": self.collator.pad_id})(rows)


@contextmanager
def padding(trainer: Any) -> Iterator[None]:
    """Let a trainer whose collator packs rows make loaders of padded batches."""
    collator = trainer.data_collator
    if isinstance(collator, PackCollator):
        trainer.data_collator = Padded(collator)
    try:
        yield
    finally:
        trainer.data_collator = collator
