"""Sizes that step up at milestones, or climb to a last size and stay there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Literal, SupportsIndex, TypeVar, final

from ..errors import ArgumentError
from ._counting import Unit, check_counting
from ._numbers import as_number, as_size, as_whole, grow, show
from ._schedule import Schedule
from .policy import Policy

Value = TypeVar("Value")


@final
@dataclass(frozen=True, repr=False)
class Milestones(Schedule):
    """The size of the last milestone that was reached."""

    name: ClassVar[str] = "milestones"
    sizes: tuple[tuple[int, float], ...]
    _: KW_ONLY
    per: Unit = "epoch"
    every: int = 1

    def size_at(self, index: int) -> float:
        """Return the size of the last milestone at or before the index."""
        return self.sizes[find_last(self.sizes, index)][1]

    def words_at(self, index: int) -> str:
        """Return the size and its milestone."""
        at, size = self.sizes[find_last(self.sizes, index)]
        return f"{show(size)} from milestone {at},"


def milestones(sizes: Mapping[int, float], *, per: Unit = "epoch", every: SupportsIndex | None = None) -> Policy:
    """Return a policy that changes the size at given counts.

    Args:
        sizes: the size from each count on; the count 0 must be there.
        per: what the keys count: ``"epoch"``, ``"step"`` or ``"examples"``.
        every: units that make one of the keys' counts, usually 1.

    >>> from .observation import Observation
    >>> policy = milestones({0: 64, 50_000: 256}, per="examples")
    >>> [policy.update(None, Observation(examples=examples))[0] for examples in (0, 49_999, 50_000)]
    [64.0, 64.0, 256.0]
    """
    blocks = check_counting(per, every, by="milestones")
    pairs = as_pairs("milestones", sizes, example="{0: 64, 10: 256}")
    checked = tuple((at, as_number(f"the size at {at}", size, least=1)) for at, size in pairs)
    return Milestones(checked, per=per, every=blocks)


def as_pairs(name: str, mapping: Mapping[int, Value], *, example: str) -> list[tuple[int, Value]]:
    """Check a mapping from counts and return it in their order."""
    if not isinstance(mapping, Mapping) or not mapping:
        raise ArgumentError(f"{name} needs a mapping from counts, e.g. {example}, got {mapping!r}")
    pairs = {as_whole(f"a key of {name}", at, least=0): value for at, value in mapping.items()}
    if 0 not in pairs:
        raise ArgumentError(f"{name} must say what holds at 0, e.g. {example}, got the keys {sorted(pairs)}")
    return sorted(pairs.items(), key=lambda pair: pair[0])


def find_last(pairs: tuple[tuple[int, Any], ...], index: int) -> int:
    """Return the position of the last pair whose count is at most ``index``.

    >>> find_last(((0, "a"), (10, "b")), 10)
    1
    """
    return bisect_right([at for at, _ in pairs], index) - 1


@final
@dataclass(frozen=True, repr=False)
class WarmUp(Schedule):
    """From one size to another over some counts, then the other."""

    name: ClassVar[str] = "warm_up"
    start_size: float
    end_size: float
    over: int
    _: KW_ONLY
    mode: Literal["linear", "geometric"] = "linear"
    per: Unit = "epoch"
    every: int = 1

    def size_at(self, index: int) -> float:
        """Return the size on the way, and the last one from ``over`` on."""
        if index >= self.over:
            return self.end_size
        done = index / self.over
        if self.mode == "geometric":
            return grow(self.start_size, self.end_size / self.start_size, done)
        return as_size(self.start_size + (self.end_size - self.start_size) * done)

    def words_at(self, index: int) -> str:
        """Say how far the way is done."""
        done = f"{min(index, self.over)}/{self.over} from {show(self.start_size)} to {show(self.end_size)}"
        return f"{done} = {show(self.size_at(index))}"


def warm_up(
    start: float,
    end: float,
    over: SupportsIndex,
    *,
    mode: Literal["linear", "geometric"] = "linear",
    per: Unit = "epoch",
    every: SupportsIndex | None = None,
) -> Policy:
    """Return a policy that climbs from one size to another and stays there.

    With ``p = min(1, i / over)``::

        linear     B_i = start + (end − start) × p
        geometric  B_i = start × (end / start)^p

    Args:
        start: the size at the beginning.
        end: the size from index ``over`` on.
        over: indices on the way.
        mode: ``"linear"`` adds the same each time, ``"geometric"`` multiplies by the same.
        per: what ``i`` counts: ``"epoch"``, ``"step"`` or ``"examples"``.
        every: units that make one index, ``i = count // every``.

    >>> from .observation import Observation
    >>> policy = warm_up(64, 1024, over=4, mode="geometric")
    >>> [policy.update(None, Observation(epoch=epoch))[0] for epoch in range(6)]
    [64.0, 128.0, 256.0, 512.0, 1024.0, 1024.0]
    """
    if mode not in ("linear", "geometric"):
        raise ArgumentError(f"mode must be 'linear' or 'geometric', got {mode!r}")
    blocks = check_counting(per, every, by="warm_up")
    sizes = as_number("start", start, least=1), as_number("end", end, least=1)
    return WarmUp(*sizes, as_whole("over", over, least=1), mode=mode, per=per, every=blocks)
