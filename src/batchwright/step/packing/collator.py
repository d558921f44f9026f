"""PackCollator: make a batch from rows of several examples, with padding or without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final, get_args

import torch
from torch import Tensor

from ..._checks import as_whole, check_choice
from ...errors import ArgumentError

Layout: TypeAlias = Literal["positions", "flat", "block"]
Example: TypeAlias = "Mapping[str, Any]"

_IGNORED = -100  # the class that cross-entropy leaves out


@final
@dataclass(frozen=True, kw_only=True)
class PackCollator:
    """Turn packed rows into one batch for a decoder-only model; examples of a row never see each other.

    Use it as ``DataLoader(bw.Rows(dataset), batch_sampler=…, collate_fn=PackCollator())`` with a plan of ``bw.Packed``.
    Positions begin at 0 with every example. The first label of every example is masked, since it would be predicted
    from the last token of its neighbour.

    - ``"positions"``: ``(rows, width)``. Models of transformers 5 find the borders in ``position_ids`` and mask
      attention themselves, with any kernel; but only without a cache, so the batch says ``use_cache=False``.
    - ``"flat"``: one row of all examples without padding, with ``cu_seq_lens_q`` and similar fields for variable-length
      flash attention.
    - ``"block"``: ``(rows, width)`` with a mask ``(rows, 1, width, width)``, for models that know nothing of packing.

    Args:
        layout: one of the three above.
        width: the tokens of a row, such as the capacity of ``Packed``; None takes the longest row of the batch.
        pad_id: the token that fills rows up.
        mask_dtype: the type of the block mask. ``torch.bool`` is True where a token may look; a floating type is added
            to the scores.

    >>> rows = [[{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}], [{"input_ids": [4]}]]
    >>> batch = PackCollator()(rows)
    >>> batch["position_ids"].tolist(), batch["labels"].tolist()
    ([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]], [[-100, 6, 7, -100, 9], [-100, -100, -100, -100, -100]])
    """

    layout: Layout = "positions"
    width: int | None = None
    pad_id: int = 0
    mask_dtype: torch.dtype = torch.bool

    def __post_init__(self) -> None:
        check_choice("layout", self.layout, get_args(Layout))
        if self.width is not None:
            object.__setattr__(self, "width", as_whole("width", self.width, least=1))
        object.__setattr__(self, "pad_id", as_whole("pad_id", self.pad_id, least=0))

    def __call__(self, rows: Sequence[Sequence[Example]]) -> dict[str, Any]:
        """Return the tensors of a batch of rows."""
        packed = [_pack(row) for row in rows]
        if not packed:
            raise ArgumentError("a batch needs at least one row, got none")
        return self._flat(packed) if self.layout == "flat" else self._padded(packed)

    def _flat(self, rows: Sequence[_Row]) -> dict[str, Any]:
        lengths = torch.cat([row.lengths for row in rows])
        borders = torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).to(torch.int32)])
        longest = int(lengths.max())
        return {
            "input_ids": torch.cat([row.tokens for row in rows])[None],
            "labels": torch.cat([row.labels for row in rows])[None],
            "position_ids": torch.cat([row.positions for row in rows])[None],
            "cu_seq_lens_q": borders,
            "cu_seq_lens_k": borders,
            "max_length_q": longest,
            "max_length_k": longest,
            "use_cache": False,
        }

    def _padded(self, rows: Sequence[_Row]) -> dict[str, Any]:
        longest = max(len(row.tokens) for row in rows)
        width = longest if self.width is None else self.width
        if longest > width:
            raise ArgumentError(f"a row has {longest} tokens and the width is {width}; plan with Packed({width})")
        batch: dict[str, Any] = {
            "input_ids": torch.stack([_filled(row.tokens, width, self.pad_id) for row in rows]),
            "labels": torch.stack([_filled(row.labels, width, -100) for row in rows]),
            "position_ids": torch.stack([_counted_on(row.positions, width) for row in rows]),
            "use_cache": False,
        }
        if self.layout == "block":
            batch["attention_mask"] = self._mask(batch["position_ids"])
        return batch

    def _mask(self, positions: Tensor) -> Tensor:
        """Return which token may look at which: the earlier ones of its example; padding is an example of its own."""
        example = (positions == 0).cumsum(1)
        same = example[:, :, None] == example[:, None, :]
        allowed = (same & torch.ones_like(same[0]).tril())[:, None]
        if self.mask_dtype == torch.bool:
            return allowed
        least = torch.finfo(self.mask_dtype).min
        return torch.zeros(allowed.shape, dtype=self.mask_dtype).masked_fill(~allowed, least)


@final
@dataclass(frozen=True)
class _Row:
    tokens: Tensor
    labels: Tensor
    positions: Tensor
    lengths: Tensor


def _pack(row: Sequence[Example]) -> _Row:
    if not row or not all(isinstance(example, Mapping) and "input_ids" in example for example in row):
        raise ArgumentError(
            "a row must be a list of examples with 'input_ids'; wrap the data set in bw.Rows and plan with bw.Packed"
        )
    tokens = [torch.as_tensor(example["input_ids"], dtype=torch.int64) for example in row]
    labels = [_labels(example, ids) for example, ids in zip(row, tokens, strict=True)]
    return _Row(
        torch.cat(tokens),
        torch.cat(labels),
        torch.cat([torch.arange(len(ids)) for ids in tokens]),
        torch.tensor([len(ids) for ids in tokens]),
    )


def _labels(example: Example, ids: Tensor) -> Tensor:
    labels = torch.as_tensor(example.get("labels", ids), dtype=torch.int64).clone()
    if labels.shape != ids.shape:
        raise ArgumentError(f"labels must be as long as input_ids, {len(ids)}, got {len(labels)}")
    labels[:1] = -100
    return labels


def _filled(values: Tensor, width: int, fill: int) -> Tensor:
    return torch.cat([values, torch.full((width - len(values),), fill, dtype=torch.int64)])


def _counted_on(positions: Tensor, width: int) -> Tensor:
    return torch.cat([positions, torch.arange(width - len(positions))])
