"""Sizes known before training: constant, growing, in cycles, at milestones, or instead of a falling learning rate."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, SupportsIndex, final

from ._annealing import from_lr as from_lr
from ._annealing import seesaw as seesaw
from ._counting import Unit, check_counting
from ._cyclic import cyclic as cyclic
from ._named import Named
from ._numbers import TIMES, as_number, as_size, grow, show
from ._ramps import milestones as milestones
from ._ramps import warm_up as warm_up
from ._schedule import Schedule
from .observation import Observation
from .policy import Policy, State

__all__ = ["constant", "cyclic", "exponential", "from_lr", "linear", "milestones", "seesaw", "warm_up"]


@final
@dataclass(frozen=True, repr=False)
class Constant(Named, Policy):
    """The same size for ever."""

    name: ClassVar[str] = "constant"
    size: float

    def init(self) -> State:
        """Return None: there is nothing to remember."""
        return None

    def update(self, state: State, observation: Observation) -> tuple[float, State]:
        """Return the size."""
        return self.size, state

    def start(self) -> float:
        """Return the size."""
        return self.size

    def explain(self, state: State, observation: Observation) -> str:
        """Say which size it is."""
        return f"constant: {show(self.size)}"


def constant(size: float) -> Policy:
    """Return a policy that asks for one size, as a baseline or a floor inside ``maximum``.

    >>> constant(64).start()
    64.0
    """
    return Constant(as_number("size", size, least=1))


@final
@dataclass(frozen=True, repr=False)
class Linear(Schedule):
    """``start + slope × i``."""

    name: ClassVar[str] = "linear"
    start_size: float
    slope: float
    _: KW_ONLY
    per: Unit = "epoch"
    every: int = 1

    def size_at(self, index: int) -> float:
        """Return ``start + slope × index``."""
        return as_size(self.start_size + self.slope * min(index, 2**63))

    def words_at(self, index: int) -> str:
        """Return the formula with its numbers."""
        return f"{show(self.start_size)} + {show(self.slope)} {TIMES} {index} = {show(self.size_at(index))}"


def linear(start: float, slope: float, *, per: Unit = "epoch", every: SupportsIndex | None = None) -> Policy:
    """Return a policy that adds the same number of examples each time: ``B_i = start + slope × i``.

    Args:
        start: the size at the beginning, ``B_0``.
        slope: examples added per index; below 0 the size shrinks.
        per: what ``i`` counts: ``"epoch"``, ``"step"`` or ``"examples"``.
        every: units that make one index, ``i = count // every``; needed for examples.

    >>> policy = linear(32, 8)
    >>> policy.update(policy.init(), Observation(epoch=3))
    (56.0, None)
    """
    blocks = check_counting(per, every, by="linear", needs_every=True)
    return Linear(as_number("start", start, least=1), as_number("slope", slope), per=per, every=blocks)


@final
@dataclass(frozen=True, repr=False)
class Exponential(Schedule):
    """``start × factor^i``."""

    name: ClassVar[str] = "exponential"
    start_size: float
    factor: float
    _: KW_ONLY
    per: Unit = "epoch"
    every: int = 1

    def size_at(self, index: int) -> float:
        """Return ``start × factor^index``, kept finite."""
        return grow(self.start_size, self.factor, index)

    def words_at(self, index: int) -> str:
        """Return the formula with its numbers."""
        return f"{show(self.start_size)} {TIMES} {show(self.factor)}^{index} = {show(self.size_at(index))}"


def exponential(start: float, factor: float, *, per: Unit = "epoch", every: SupportsIndex | None = None) -> Policy:
    """Return a policy that multiplies the size each time: ``B_i = start × factor^i``.

    Args:
        start: the size at the beginning, ``B_0``.
        factor: growth per index; below 1 the size shrinks.
        per: what ``i`` counts: ``"epoch"``, ``"step"`` or ``"examples"``.
        every: units that make one index, ``i = count // every``; needed for examples.

    >>> policy = exponential(32, 2, every=5)
    >>> policy.update(policy.init(), Observation(epoch=11))
    (128.0, None)
    """
    blocks = check_counting(per, every, by="exponential", needs_every=True)
    return Exponential(as_number("start", start, least=1), as_number("factor", factor, above=0), per=per, every=blocks)
