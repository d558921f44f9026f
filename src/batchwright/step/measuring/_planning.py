"""Which batches the branches of an experiment train on, and after which updates they are evaluated."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, final

from ..._checks import as_whole
from ...errors import ArgumentError


@final
class Plan(NamedTuple):
    """What is run: the batches of every repeat, and those that are held out."""

    factors: list[int]
    repeats: list[list[Any]]
    held_out: list[Any]

    @property
    def num_repeats(self) -> int:
        """Return how many times every branch is run."""
        return len(self.repeats)

    def marks(self, factor: int) -> list[int]:
        """Return after how many updates a branch is evaluated: those of each larger branch, and its own."""
        return [len(self.repeats[0]) // other for other in reversed(self.factors) if other >= factor]


def make_plan(batches: Any, factors: Any, evaluate: Any, repeats: Any) -> Plan:
    """Check the arguments and share the batches out."""
    wanted = [as_whole("a factor", factor, least=1) for factor in factors]
    if len(wanted) < 2 or sorted(set(wanted)) != wanted:
        raise ArgumentError(f"factors must be two or more different whole numbers that rise, got {tuple(factors)}")
    num_repeats, block = as_whole("repeats", repeats, least=1), math.lcm(*wanted)
    for name, given in (("batches", batches), ("evaluate", evaluate)):
        if given is not None and not isinstance(given, list | tuple):
            raise ArgumentError(f"{name} must be a list of batches, got {type(given).__name__}; use list(…)")
    held_out = list(batches[-block:] if evaluate is None else evaluate)
    trained = list(batches[:-block] if evaluate is None else batches)
    if not held_out:
        raise ArgumentError("evaluate must hold at least one batch; None holds the last batches out")
    if not trained or len(trained) % (block * num_repeats):
        rest = "" if evaluate is not None else f", and {block} more to hold out"
        raise ArgumentError(
            f"factors {tuple(wanted)} and {num_repeats} repeats need a multiple of {block * num_repeats} batches to "
            f"train on{rest}; got {len(batches)} batches"
        )
    size = len(trained) // num_repeats
    return Plan(wanted, [trained[start : start + size] for start in range(0, len(trained), size)], held_out)
