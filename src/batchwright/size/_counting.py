"""What schedules count: epochs, updates or examples, one at a time or in blocks of ``every``."""

from __future__ import annotations

from typing import Literal, SupportsIndex, TypeAlias, get_args

from ..errors import ArgumentError
from ._numbers import as_whole
from .observation import Observation

Unit: TypeAlias = Literal["epoch", "step", "examples"]


def check_counting(per: str, every: SupportsIndex | None, *, by: str, needs_every: bool = False) -> int:
    """Check a unit and return the size of a block, 1 where none was given.

    Args:
        per: the unit.
        every: units that make one block.
        by: the policy, for the message.
        needs_every: whether counting single examples is surely a mistake.
    """
    if per not in get_args(Unit):
        raise ArgumentError(f"{by} counts per 'epoch', 'step' or 'examples', got per={per!r}")
    if every is None and per == "examples" and needs_every:
        raise ArgumentError(f"{by} per examples needs every, the examples of one block, e.g. every=50_000")
    return 1 if every is None else as_whole("every", every, least=1)


def count_of(observation: Observation, per: Unit, *, by: str) -> int:
    """Return what was completed of a unit, or say that it is missing."""
    value: int = observation.need(per, by=by)
    return value


def index_of(observation: Observation, per: Unit, every: int, *, by: str) -> int:
    """Return the block that comes next: ``count // every``.

    >>> index_of(Observation(examples=120_000), "examples", 50_000, by="linear")
    2
    """
    return count_of(observation, per, by=by) // every


def when(observation: Observation, per: Unit) -> str:
    """Say where training stands.

    >>> when(Observation(epoch=3), "epoch"), when(Observation(examples=500), "examples")
    ('at epoch 3', 'after 500 examples')
    """
    count = getattr(observation, per)
    return f"after {count} examples" if per == "examples" else f"at {per} {count}"


def in_force(observation: Observation) -> int | None:
    """Return the size in force, None before training."""
    return observation.batch_size if observation.size is None else observation.size
