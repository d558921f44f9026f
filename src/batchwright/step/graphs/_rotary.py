"""Rotary positions whose frequencies change with the longest row of a batch: which lengths may share one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, final

from torch import nn

from ._catalogue import Shape


@final
class Frequencies(NamedTuple):
    """Rotary frequencies that are others for long texts.

    Attributes:
        part: the module that holds them.
        prefix: of its attributes; models with several kinds of layers have one for each.
        reach: tokens up to which they are the same.
        is_kept: beyond, every length has its own, and what a long text has changed stays for the next one.
        num_learned: tokens that are learned and stand in front of all others.
    """

    part: Any
    prefix: str
    reach: int
    is_kept: bool
    num_learned: int = 0

    def side_of(self, length: int) -> int:
        """Return the same number for lengths that have the same frequencies."""
        length += self.num_learned
        return 0 if length <= self.reach else length if self.is_kept else 1


Rotary: TypeAlias = tuple[Frequencies, ...]


def rotary_of(modules: Iterable[nn.Module]) -> Rotary:
    """Return all frequencies of some modules that are others for long texts."""
    parts = list(modules)
    found = [one for part in parts for one in _frequencies(part)]
    learned = max(map(num_learned, parts)) if found else 0
    return tuple(one._replace(num_learned=learned) for one in found)


def num_learned(model: Any) -> int:
    """Return how many learned tokens of PEFT stand in front of every text."""
    config: Any = getattr(model, "active_peft_config", None)
    return max(1, config.num_virtual_tokens or 1) if getattr(config, "is_prompt_learning", False) else 0


def _frequencies(part: Any) -> Iterator[Frequencies]:
    kinds = getattr(part, "rope_type", None)
    for layer, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
        prefix = "" if layer is None else f"{layer}_"
        if not hasattr(part, f"{prefix}original_inv_freq"):
            continue  # not of transformers
        if kind == "longrope":
            settings = part.config.rope_parameters
            settings = settings if layer is None else settings[layer]
            yield Frequencies(part, prefix, int(settings["original_max_position_embeddings"]), is_kept=False)
        elif isinstance(kind, str) and "dynamic" in kind:
            yield Frequencies(part, prefix, int(part.original_max_seq_len), is_kept=True)


def same_reach(rotary: Rotary) -> int | None:
    """Return up to how many tokens the positions of a row do not depend on longer rows, None for any number."""
    return min((one.reach - one.num_learned for one in rotary), default=None)


def side_of(rotary: Rotary, length: int) -> tuple[int, ...]:
    """Return the same for lengths that may share a batch, padding included."""
    return tuple(one.side_of(length) for one in rotary)


def sides_of(rotary: Rotary, lengths: Sequence[int]) -> list[list[int]]:
    """Return the places of lengths that may share batches, the longest first; all where positions never change.

    >>> sides_of((), [3, 5])
    [[0, 1]]
    """
    places: dict[tuple[int, ...], list[int]] = {}
    for place, length in enumerate(lengths):
        places.setdefault(side_of(rotary, length), []).append(place)
    return [places[side] for side in sorted(places, reverse=True)]


def may_pad(rotary: Rotary, shape: Shape, planned: Shape) -> bool:
    """Say whether a call keeps its positions when it is padded to a planned shape."""
    return all(
        side_of(rotary, one) == side_of(rotary, other) for one, other in zip(shape[1:], planned[1:], strict=True)
    )


def renew(rotary: Rotary) -> None:
    """Let positions be those of a model that has not read a long text yet."""
    for one in rotary:
        if one.is_kept and getattr(one.part, f"{one.prefix}max_seq_len_cached", one.reach) != one.reach:
            now, first = (getattr(one.part, f"{one.prefix}{name}") for name in ("inv_freq", "original_inv_freq"))
            one.part.register_buffer(f"{one.prefix}inv_freq", first.to(now.device), persistent=False)
            setattr(one.part, f"{one.prefix}max_seq_len_cached", one.reach)
