"""Encodings: nested tensors with a row per example, checked, joined in the order of the batch, and gathered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..._containers import fields_of
from ..._ranks import Ranks
from ..._tree import map_leaves
from ...errors import ArgumentError
from ..oom import Snapshot

_ROWS = "encode must return a tensor with one row per example, or a nested dict or tuple of such tensors"
_WIDE = "pool or pad to one width that does not depend on the micro-batch"
# By how much an encoding may differ when it is computed again, as a share of the largest: kernels may differ.
_TOLERANCE = {torch.float64: 1e-6, torch.complex128: 1e-6, torch.float32: 5e-3, torch.complex64: 5e-3}

Rows: TypeAlias = "slice | Tensor"


class Kind(NamedTuple):
    """What the rows of a tensor share, and where it stands in the encodings."""

    place: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class Piece(NamedTuple):
    """The encodings of one micro-batch.

    Attributes:
        part: its places in the batch.
        real: those of them that are examples and no filler.
        kinds: of the tensors.
        tensors: with a graph only where the batch is one piece.
        have_graph: which of them depend on parameters.
        random: the random state that the micro-batch began with.
    """

    part: Sequence[int]
    real: Sequence[int]
    kinds: list[Kind]
    tensors: list[Tensor]
    have_graph: list[bool]
    random: Snapshot | None


def flatten(encodings: Any, num: int) -> tuple[list[Kind], list[Tensor]]:
    """Return the tensors of encodings, depth first, or say which of them has no row per example."""
    kinds, tensors = [], []
    for place, value in _walk(encodings, ""):
        if not isinstance(value, Tensor):
            raise ArgumentError(f"encode returned a {type(value).__name__} at encodings{place}; {_ROWS}")
        if value.layout is not torch.strided or value.is_nested:
            raise ArgumentError(f"encodings{place} is a nested or sparse tensor, whose rows cannot be joined; {_ROWS}")
        if value.ndim == 0 or len(value) != num:
            raise ArgumentError(
                f"encodings{place} has shape {tuple(value.shape)} for a micro-batch of {num} examples; {_ROWS}"
                + _advice(value, num)
            )
        kinds.append(Kind(place, value.dtype, tuple(value.shape[1:])))
        tensors.append(value)
    if not tensors:
        raise ArgumentError(f"encode returned no tensor, got {type(encodings).__name__}; {_ROWS}")
    return kinds, tensors


def _advice(value: Tensor, num: int) -> str:
    if value.ndim == 0 or len(value) == 1:
        return "; what belongs to no example, such as a temperature, is used by the loss itself"
    if len(value) % num == 0:
        return "; several views of an example are several tensors, or a second axis"
    return ""


def _walk(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    fields = fields_of(value)
    if fields is not None:
        for name, item in fields.items():
            yield from _walk(item, f"{place}[{name!r}]")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _walk(item, f"{place}[{index}]")
    elif value is not None:  # the fields that a model left out
        yield place, value


def skeleton_of(encodings: Any) -> Any:
    """Return encodings without their rows, to be filled by ``fill``."""
    return map_leaves(encodings, lambda tensor: tensor.new_empty(0))


def fill(skeleton: Any, tensors: Sequence[Tensor]) -> Any:
    """Return encodings like ``skeleton`` with these tensors."""
    rest = iter(tensors)
    return map_leaves(skeleton, lambda _: next(rest))


def check_alike(pieces: Sequence[Piece]) -> None:
    """Refuse pieces whose rows cannot be joined."""
    first = pieces[0].kinds
    for piece in pieces[1:]:
        if piece.kinds != first:
            found = next((pair for pair in zip(first, piece.kinds, strict=False) if pair[0] != pair[1]), None)
            what = (
                f"{_text(found[0])} and {_text(found[1])}" if found else f"{len(first)} and {len(piece.kinds)} of them"
            )
            raise ArgumentError(f"encode returned different rows for two micro-batches: {what}; {_WIDE}")


def _text(kind: Kind) -> str:
    return f"encodings{kind.place} of {str(kind.dtype).removeprefix('torch.')} {kind.shape}"


def join(pieces: Sequence[Piece]) -> tuple[list[Tensor], list[Rows]]:
    """Return the tensors of all pieces in the order of the batch, and where the rows of every piece stand in them."""
    places = [place for piece in pieces for place in piece.real]
    order = sorted(range(len(places)), key=places.__getitem__)
    is_sorted = order == list(range(len(order)))
    rank = {places[index]: position for position, index in enumerate(order)}
    tensors = [torch.cat(column) for column in zip(*[piece.tensors for piece in pieces], strict=True)]
    if not is_sorted:
        index = torch.tensor(order)
        tensors = [tensor[index.to(tensor.device)] for tensor in tensors]
    return tensors, [_as_rows([rank[place] for place in piece.real]) for piece in pieces]


def _as_rows(positions: list[int]) -> Rows:
    start = positions[0]
    if positions == list(range(start, start + len(positions))):
        return slice(start, start + len(positions))
    return torch.tensor(positions)


def rows_of(tensor: Tensor, rows: Rows) -> Tensor:
    """Return some rows of a tensor."""
    return tensor[rows] if isinstance(rows, slice) else tensor[rows.to(tensor.device)]


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Return all that a row holds as one row of bytes."""
    return torch.cat([_as_bytes(tensor) for tensor in tensors], dim=1)


def gather(tensors: Sequence[Tensor], packed: Tensor, ranks: Ranks) -> tuple[list[Tensor], int, int]:
    """Return the rows of all ranks, in the order of the ranks, where those of this rank begin, and its number.

    Args:
        tensors: of this rank.
        packed: the same as bytes.
        ranks: who shares them.
    """
    shares, rank = ranks.gather_rows(packed)
    whole = torch.cat(shares)
    widths = [_as_bytes(tensor[:1]).shape[1] for tensor in tensors]
    parts = whole.split(widths, dim=1)
    gathered = [
        part.contiguous().view(tensor.dtype).reshape(len(whole), *tensor.shape[1:])
        for part, tensor in zip(parts, tensors, strict=True)
    ]
    return gathered, sum(map(len, shares[:rank])), rank


def _as_bytes(tensor: Tensor) -> Tensor:
    """Return rows of bytes, which every back end can send."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(len(tensor), -1)
    return (torch.view_as_real(flat).reshape(len(tensor), -1) if flat.is_complex() else flat).view(torch.uint8)


def are_far(again: Tensor, before: Tensor) -> Tensor:
    """Say, on the device, whether rows that were computed again are others than before."""
    now, then = again.detach(), before.detach()
    if not now.numel():
        return torch.zeros((), dtype=torch.bool, device=now.device)
    size = torch.where(then.isfinite(), then, 0).abs().max()
    is_near = (now - then).abs() <= size * _TOLERANCE.get(now.dtype, 0.05)
    return ~((now == then) | is_near | (now.isnan() & then.isnan())).all()
