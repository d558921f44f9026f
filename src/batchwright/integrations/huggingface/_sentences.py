"""Trainers of sentence-transformers: what planned batches would replace, their losses, and the lengths of texts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from ..._progress import progress
from ..._types import IntArray
from ...errors import ArgumentError, LengthsError
from ._trl import is_of

_MASK = "_attention_mask"
_TEXTS_AT_ONCE = 256


def check_sentences(trainer: Any) -> None:
    """Refuse what decides about the batches of a sentence-transformers trainer itself."""
    if not is_of("sentence_transformers", type(trainer)):
        return
    chosen = getattr(trainer.args, "batch_sampler", "batch_sampler")
    if getattr(chosen, "value", chosen) != "batch_sampler":
        name = getattr(chosen, "value", None) or getattr(chosen, "__name__", chosen)
        raise ArgumentError(
            f"batch_sampler={name!r} decides which examples share a batch, and so does the plan; leave it out, or use "
            "the trainer as it is"
        )
    if isinstance(trainer.train_dataset, Mapping):
        raise ArgumentError(
            f"the training data are {len(trainer.train_dataset)} data sets, and a batch must come from one of them, "
            "which a plan does not know; pass one data set"
        )


def losses_of(trainer: Any) -> list[Any]:
    """Return the losses that a trainer of sentence-transformers was given, and those inside of them."""
    found = getattr(trainer, "loss", None) if is_of("sentence_transformers", type(trainer)) else None
    given = list(found.values()) if isinstance(found, Mapping) else [found]
    return [part for loss in given if isinstance(loss, nn.Module) for part in loss.modules()]


def reads_texts(collator: Any) -> bool:
    """Say whether a collator makes tokens of texts, as those of sentence-transformers do."""
    return is_of("sentence_transformers", type(collator))


def measure_texts(dataset: Any, collator: Any, *, show_progress: bool) -> IntArray:
    """Return the tokens of every column of texts, shape ``(N, columns)``, as the collator makes them.

    Args:
        dataset: of texts.
        collator: of the trainer; it adds prompts, and cuts long texts.
        show_progress: show a bar.
    """
    starts = range(0, len(dataset), _TEXTS_AT_ONCE)
    parts = progress(
        _parts(dataset, collator, starts), label="measuring texts", total=len(starts), enabled=show_progress
    )
    return np.concatenate(list(parts))


def _parts(dataset: Any, collator: Any, starts: range) -> Iterator[IntArray]:
    for start in starts:
        rows = [dataset[index] for index in range(start, min(start + starts.step, len(dataset)))]
        batch = collator(rows)
        masks = [value for name, value in batch.items() if name.endswith(_MASK) and isinstance(value, Tensor)]
        if not masks or any(mask.ndim != 2 or len(mask) != len(rows) for mask in masks):
            raise LengthsError(
                f"the collator makes {', '.join(map(repr, batch))} of the examples, but no attention_mask with a row "
                "per example, which tells lengths; pass lengths=, one row per example"
            )
        yield np.stack([mask.sum(dim=1).clamp(min=1).numpy() for mask in masks], axis=1)
