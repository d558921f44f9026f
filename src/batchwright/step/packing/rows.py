"""Packed rows: several sequences in one row of tokens, where they begin, and how to take some of them.

A packed row without padding is a *flat batch* if it says where its sequences begin and end, in ``cu_seq_lens_q``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from ..._lengths import as_lengths
from ...errors import ArgumentError
from ...plan import PadTo
from ..splitting import Lengths, LogicalBatch, Part, checked_lengths

# Where the sequences of a packed row begin and end, and how long the longest of them is.
BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k")
_LONGEST = ("max_length_q", "max_length_k")
_IGNORED = -100


def is_flat(batch: Any) -> bool:
    """Say whether a batch is a single row of sequences with their bounds.

    >>> ids = torch.ones((1, 5), dtype=torch.int64)
    >>> is_flat({"input_ids": ids, "cu_seq_lens_q": torch.tensor([0, 2, 5])}), is_flat({"input_ids": ids})
    (True, False)
    """
    if not isinstance(batch, Mapping) or not isinstance(batch.get(BOUNDS[0]), Tensor):
        return False
    tokens = batch.get("input_ids", batch.get("inputs_embeds"))
    return isinstance(tokens, Tensor) and tokens.ndim >= 2 and len(tokens) == 1 and batch[BOUNDS[0]].ndim == 1


def num_sequences(batch: Mapping[str, Any]) -> int:
    """Return the number of sequences of a flat batch, without a look at its values.

    >>> num_sequences({"cu_seq_lens_q": torch.tensor([0, 2, 5])})
    2
    """
    return len(batch[BOUNDS[0]]) - 1


def flat_lengths(batch: Mapping[str, Any]) -> list[int]:
    """Return the number of tokens of every sequence of a flat batch.

    >>> flat_lengths({"cu_seq_lens_q": torch.tensor([0, 2, 5])})
    [2, 3]
    """
    lengths: list[int] = batch[BOUNDS[0]].diff().tolist()
    return lengths


def is_packed(batch: Mapping[str, Any]) -> bool:
    """Say whether rows hold several sequences, as far as the inputs tell.

    >>> is_packed({"input_ids": torch.ones(1, 4), "position_ids": torch.tensor([[0, 1, 0, 1]])})
    True
    """
    if any(name in batch for name in BOUNDS):
        return True
    positions = batch.get("position_ids")
    if not (isinstance(positions, Tensor) and positions.ndim >= 2) or isinstance(batch.get("attention_mask"), Tensor):
        return False
    return starts_again(positions)


def starts_again(positions: Tensor) -> bool:
    """Say whether positions of some row begin again, as they do with every sequence of a packed one.

    >>> starts_again(torch.tensor([[0, 1, 2]])), starts_again(torch.tensor([[0, 1, 0]]))
    (False, True)
    """
    return bool((positions.diff(dim=-1) != 1).any())


def sequence_starts(batch: Mapping[str, Any]) -> list[int] | None:
    """Return where the sequences of a single row begin; None if its ``position_ids`` do not tell.

    Attention keeps sequences apart by ``position_ids``. Other bounds alone hold for some kinds of attention only.
    """
    positions = batch.get("position_ids")
    if not isinstance(positions, Tensor) or positions.ndim < 2 or isinstance(batch.get("attention_mask"), Tensor):
        return None
    rows = positions.flatten(0, -2)
    is_single = positions.shape[-2] == 1
    if not is_single or not bool((rows == rows[0]).all()):
        return None
    return [0, *((rows[0].diff() != 1).nonzero().flatten() + 1).tolist()]


@final
class PackedRow:
    """A packed row, of which any sequences can be taken.

    Args:
        batch: a model's inputs; ``position_ids`` begin again where a sequence does.

    Attributes:
        num: the number of sequences.

    >>> row = PackedRow({"input_ids": torch.tensor([[5, 6, 7]]), "position_ids": torch.tensor([[0, 1, 0]])})
    >>> row.num, row.lengths, row.take([1])["input_ids"].tolist()
    (2, [2, 1], [[7]])
    """

    def __init__(self, batch: Mapping[str, Any]) -> None:
        self._batch = batch
        starts = sequence_starts(batch)
        if starts is None:
            raise ArgumentError("the batch is not a single row with position_ids that begin again at every sequence")
        self._width = int(batch["position_ids"].shape[-1])
        self._bounds = [*starts, self._width]
        self.num = len(starts)
        self._check(starts)

    def _check(self, starts: list[int]) -> None:
        for name in BOUNDS:
            if name in self._batch and self._batch[name].tolist() != self._bounds:
                raise ArgumentError(f"{name} and position_ids disagree about where the sequences begin")

    def check_labels(self) -> None:
        """Refuse a label that is predicted by the last token of another sequence, which a cut would drop."""
        labels, starts = self._batch.get("labels"), self._bounds[1:-1]
        if isinstance(labels, Tensor) and "shift_labels" not in self._batch and starts:
            if bool((labels[0, starts] != _IGNORED).any()):
                raise ArgumentError("the first label of a packed sequence counts, but a cut would drop it")

    @property
    def lengths(self) -> list[int]:
        """Return the number of tokens of every sequence."""
        return [end - start for start, end in zip(self._bounds, self._bounds[1:], strict=False)]

    def take(self, units: Sequence[int]) -> dict[str, Any]:
        """Return a row of some sequences, with the bounds that it has."""
        spans = [range(self._bounds[unit], self._bounds[unit + 1]) for unit in units]
        places = torch.tensor([place for span in spans for place in span])
        return {name: self._taken(name, value, spans, places) for name, value in self._batch.items()}

    def _taken(self, name: str, value: Any, spans: list[range], places: Tensor) -> Any:
        lengths = torch.tensor([len(span) for span in spans])
        if name in BOUNDS:
            return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(value)
        if name in _LONGEST:
            return lengths.max().to(value) if isinstance(value, Tensor) else int(lengths.max())
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        if name == "seq_idx":
            return torch.repeat_interleave(torch.arange(len(spans)), lengths)[None].to(value)
        axis = value.ndim - 1 if name.endswith("position_ids") else 1
        if value.ndim < 2 or value.shape[axis] != self._width:
            raise ArgumentError(
                f"the tensor {name!r} of shape {tuple(value.shape)} does not run along the {self._width} tokens of a "
                "packed row, so the row cannot be cut"
            )
        return value.index_select(axis, places.to(value.device))


@final
class FlatBatch(LogicalBatch):
    """A row of examples without padding, with their bounds."""

    is_flat = True
    gains_from_sorting = False

    def __init__(self, batch: Any, *, lengths: Callable[[Any], Any] | None) -> None:
        self.source = self._batch = batch
        self.num_examples = num_sequences(batch)
        self._lengths = None if lengths is None else checked_lengths(lengths(batch), self.num_examples)

    @cached_property
    def lengths(self) -> Lengths:  # type: ignore[override]  # read from the device only where they are needed
        """Return the tokens of every example."""
        return as_lengths(flat_lengths(self._batch)) if self._lengths is None else self._lengths

    @property
    def num_tokens(self) -> int:
        """Return the length of the row."""
        tokens = self._batch["input_ids"] if "input_ids" in self._batch else self._batch["inputs_embeds"]
        return int(tokens.shape[1])

    def shape_of(self, part: Part, pad_to: PadTo) -> tuple[int, ...]:
        """Return the number of examples of a micro-batch, and the length they would have if all were equally long."""
        return len(part), -(-int(self.lengths[part].sum()) // len(part))

    def take(self, indices: Part) -> Any:
        """Return the row of some examples; all of them in order are the batch itself."""
        is_whole = list(indices) == list(range(self.num_examples))
        return self._batch if is_whole else self._row.take(indices)

    @cached_property
    def _row(self) -> PackedRow:
        return PackedRow(self._batch)
