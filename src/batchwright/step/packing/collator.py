"""PackCollator: make a batch from rows of several examples, with padding or without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final, get_args

import torch
from torch import Tensor

from ..._checks import as_flag, as_whole, check_choice
from ...errors import ArgumentError
from .rows import flat_lengths, is_flat

Layout: TypeAlias = Literal["positions", "flat", "block"]
Example: TypeAlias = "Mapping[str, Any]"

_IGNORED = -100  # the class that cross-entropy leaves out


@final
@dataclass(frozen=True, kw_only=True)
class PackCollator:
    """Turn packed rows into one batch; examples of a row never see each other.

    Use it as ``DataLoader(bw.Rows(dataset), batch_sampler=…, collate_fn=PackCollator())`` with a plan of ``bw.Packed``.
    Positions begin at 0 with every example. If the model predicts the next token, the first label of every example is
    masked, since it would be predicted from the last token of its neighbour.

    - ``"positions"``: ``(rows, width)``. Most decoders of transformers 5 find the borders in ``position_ids`` and mask
      attention themselves; but only without a cache, so the batch says ``use_cache=False``.
    - ``"flat"``: one row of all examples without padding, with their borders in ``cu_seq_lens_q`` and similar fields.
      It is the fastest where ``use_varlen(model)`` or a flash attention can run. ``Stepper`` counts and cuts its
      examples.
    - ``"block"``: ``(rows, width)`` with a mask ``(rows, 1, width, width)``, for models that know nothing of packing.

    ``why_not_packed`` tells whether a model keeps the examples of a layout apart.

    Args:
        layout: one of the three above.
        width: the tokens of a row, such as the capacity of ``Packed``; None takes the longest row of the batch.
        pad_id: the token that fills rows up.
        mask_dtype: the type of the block mask. ``torch.bool`` is True where a token may look; a floating type is added
            to the scores.
        causal: the model predicts the next token, and a token sees no later one. False is for encoders, whose examples
            have ``labels`` of their own, all of which count.
        token_fields: further fields with a number per token, which are packed too where examples have them.

    >>> rows = [[{"input_ids": [5, 6, 7]}, {"input_ids": [8, 9]}], [{"input_ids": [4]}]]
    >>> batch = PackCollator()(rows)
    >>> batch["position_ids"].tolist(), batch["labels"].tolist()
    ([[0, 1, 2, 0, 1], [0, 0, 1, 2, 3]], [[-100, 6, 7, -100, 9], [-100, -100, -100, -100, -100]])
    >>> PackCollator(layout="flat")(rows)["cu_seq_lens_q"].tolist()
    [0, 3, 5, 6]
    """

    layout: Layout = "positions"
    width: int | None = None
    pad_id: int = 0
    mask_dtype: torch.dtype = torch.bool
    causal: bool = True
    token_fields: tuple[str, ...] = ("token_type_ids",)

    def __post_init__(self) -> None:
        check_choice("layout", self.layout, get_args(Layout))
        if self.width is not None:
            object.__setattr__(self, "width", as_whole("width", self.width, least=1))
        object.__setattr__(self, "pad_id", as_whole("pad_id", self.pad_id, least=0))
        object.__setattr__(self, "causal", as_flag("causal", self.causal))
        if isinstance(self.token_fields, str):
            raise ArgumentError(f"token_fields must be a tuple, got {self.token_fields!r}; write a comma after it")
        if self.layout == "positions" and not self.causal:
            raise ArgumentError(
                "layout='positions' is for decoders: encoders do not look for borders in position_ids; use 'flat' with "
                "use_varlen(model), or 'block'"
            )

    def __call__(self, rows: Sequence[Sequence[Example]]) -> dict[str, Any]:
        """Return the tensors of a batch of rows."""
        if not rows:
            raise ArgumentError("a batch needs at least one row, got none")
        for row in rows:
            _check_row(row)
        names = [name for name in self.token_fields if name in rows[0][0]]
        packed = [self._pack(row, names) for row in rows]
        return self._flat(packed) if self.layout == "flat" else self._padded(packed)

    @staticmethod
    def lengths(batch: Mapping[str, Any]) -> list[int]:
        """Return the tokens of every example of a flat batch, for ``Stepper(micro_batch=budget, lengths=…)``.

        >>> PackCollator.lengths(PackCollator(layout="flat")([[{"input_ids": [5, 6]}, {"input_ids": [7]}]]))
        [2, 1]
        """
        if not is_flat(batch):
            raise ArgumentError("PackCollator.lengths takes batches of PackCollator(layout='flat')")
        return flat_lengths(batch)

    def _pack(self, row: Sequence[Example], names: list[str]) -> _Row:
        tokens = [torch.as_tensor(example["input_ids"], dtype=torch.int64) for example in row]
        pairs = list(zip(row, tokens, strict=True))
        return _Row(
            torch.cat(tokens),
            torch.cat([self._labels(example, ids) for example, ids in pairs]),
            torch.cat([torch.arange(len(ids)) for ids in tokens]),
            torch.tensor([len(ids) for ids in tokens]),
            {name: torch.cat([_along(name, example, ids) for example, ids in pairs]) for name in names},
        )

    def _labels(self, example: Example, ids: Tensor) -> Tensor:
        if not self.causal and "labels" not in example:
            raise ArgumentError("with causal=False examples need labels, one per token, -100 where none counts")
        labels = _along("labels", {"labels": ids, **example}, ids).clone()
        if self.causal:
            labels[:1] = _IGNORED
        return labels

    def _flat(self, rows: Sequence[_Row]) -> dict[str, Any]:
        fields = {name: torch.cat([row.more[name] for row in rows])[None] for name in rows[0].more}
        return {
            "input_ids": torch.cat([row.tokens for row in rows])[None],
            "labels": torch.cat([row.labels for row in rows])[None],
            **fields,
            **_borders(torch.cat([row.lengths for row in rows])),
        }

    def _padded(self, rows: Sequence[_Row]) -> dict[str, Any]:
        longest = max(len(row.tokens) for row in rows)
        width = longest if self.width is None else self.width
        if longest > width:
            raise ArgumentError(f"a row has {longest} tokens and the width is {width}; plan with Packed({width})")
        batch: dict[str, Any] = {
            "input_ids": torch.stack([_filled(row.tokens, width, self.pad_id) for row in rows]),
            "labels": torch.stack([_filled(row.labels, width, _IGNORED) for row in rows]),
            "position_ids": torch.stack([_counted_on(row.positions, width) for row in rows]),
            "use_cache": False,
        }
        for name in rows[0].more:
            batch[name] = torch.stack([_filled(row.more[name], width, 0) for row in rows])
        if self.layout == "block":
            batch["attention_mask"] = block_mask(batch["position_ids"], causal=self.causal, dtype=self.mask_dtype)
        return batch


def block_mask(positions: Tensor, *, causal: bool, dtype: torch.dtype) -> Tensor:
    """Return which token may look at which: those of its example; padding is an example of its own.

    >>> block_mask(torch.tensor([[0, 1, 0]]), causal=True, dtype=torch.bool).int().tolist()
    [[[[1, 0, 0], [1, 1, 0], [0, 0, 1]]]]
    """
    example = (positions == 0).cumsum(1)
    same = example[:, :, None] == example[:, None, :]
    allowed = (same & torch.ones_like(same[0]).tril() if causal else same)[:, None]
    if dtype == torch.bool:
        return allowed
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill(~allowed, torch.finfo(dtype).min)


@final
@dataclass(frozen=True)
class _Row:
    tokens: Tensor
    labels: Tensor
    positions: Tensor
    lengths: Tensor
    more: Mapping[str, Tensor]


def _check_row(row: Any) -> None:
    is_row = isinstance(row, Sequence) and not isinstance(row, str) and len(row) > 0
    if not is_row or not all(isinstance(example, Mapping) and "input_ids" in example for example in row):
        raise ArgumentError(
            "a row must be a list of examples with 'input_ids'; wrap the data set in bw.Rows and plan with bw.Packed"
        )
    for example in row:
        mask = example.get("attention_mask")
        if mask is not None and not bool(torch.as_tensor(mask).all()):
            raise ArgumentError("an example has padding, zeros in its attention_mask; give examples without padding")


def _along(name: str, example: Example, ids: Tensor) -> Tensor:
    """Return a field of an example that has a number per token."""
    if name not in example:
        raise ArgumentError(f"examples of a batch need the same fields, but one has no {name!r}")
    values = torch.as_tensor(example[name], dtype=torch.int64)
    if values.shape != ids.shape:
        found = len(values) if values.ndim == 1 else f"shape {tuple(values.shape)}"
        raise ArgumentError(f"{name} must be as long as input_ids, {len(ids)}, got {found}")
    return values


def _borders(lengths: Tensor) -> dict[str, Any]:
    """Return the positions of the tokens of sequences, and where these begin and end."""
    borders, longest = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]), int(lengths.max())
    places = torch.arange(int(borders[-1])) - borders[:-1].repeat_interleave(lengths)
    borders = borders.to(torch.int32)
    return {
        "position_ids": places[None],
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": longest,
        "max_length_k": longest,
        "use_cache": False,
    }


def _filled(values: Tensor, width: int, fill: int) -> Tensor:
    return torch.cat([values, torch.full((width - len(values),), fill, dtype=torch.int64)])


def _counted_on(positions: Tensor, width: int) -> Tensor:
    return torch.cat([positions, torch.arange(width - len(positions))])


def flattened(batch: Mapping[str, Any], *, causal: bool) -> dict[str, Any]:
    """Return a padded batch without its padding, in the layout ``"flat"``.

    Args:
        batch: rows of tokens as a collator pads them, ``(B, L)``; its ``attention_mask`` says what is padding.
        causal: the model predicts the next token, so that the first label of a row counts nowhere.

    >>> batch = {"input_ids": torch.tensor([[5, 6], [7, 0]]), "attention_mask": torch.tensor([[1, 1], [1, 0]])}
    >>> flat = flattened(batch, causal=True)
    >>> flat["input_ids"].tolist(), flat["cu_seq_lens_q"].tolist()
    ([[5, 6, 7]], [0, 2, 3])
    """
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        raise ArgumentError("the collator gives no input_ids with a row per example and a token per column")
    mask = batch.get("attention_mask")
    is_real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0
    if is_real.shape != ids.shape or not bool(is_real.any(dim=1).all()):
        raise ArgumentError("the collator gives an attention_mask that does not say which tokens of each row are real")
    borders = _borders(is_real.sum(dim=1))
    found = {}
    for name, value in batch.items():
        if isinstance(value, Tensor) and name != "attention_mask":
            if value.shape[:2] != ids.shape:
                raise ArgumentError(f"the collator gives {name} of shape {tuple(value.shape)}, not a value per token")
            found[name] = value[is_real][None]
        elif name != "attention_mask":
            found[name] = value
    if "position_ids" in found and not torch.equal(found["position_ids"], borders["position_ids"]):
        raise ArgumentError("the collator gives position_ids that do not begin at 0 in every row")
    if causal and "labels" in found:
        found["labels"][0, borders["cu_seq_lens_q"][:-1].long()] = _IGNORED
    _check_labels(batch, is_real, causal=causal)
    return {**found, **borders}


def _check_labels(batch: Mapping[str, Any], is_real: Tensor, *, causal: bool) -> None:
    """Refuse labels that count in a padded batch and would be lost: those of padding, or after padding on the left."""
    is_kept = is_real
    if causal and "shift_labels" not in batch:
        is_first = is_real & (is_real.cumsum(dim=1) == 1)
        is_kept = is_real & ~is_first
        is_kept[:, 0] = True  # the first label of a row counts nowhere
    for name in ("labels", "shift_labels"):
        labels = batch.get(name)
        if isinstance(labels, Tensor) and bool(((labels != _IGNORED) & ~is_kept).any()):
            raise ArgumentError(
                f"{name} count at padding, or at the first token after padding on the left; pad on the right, with "
                "-100 in the labels"
            )
