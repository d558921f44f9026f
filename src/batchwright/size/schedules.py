"""Sizes known before training: constant, growing, in cycles, at milestones, or instead of a falling learning rate."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Literal, SupportsIndex, TypeVar, final

from .._checks import as_number, as_whole, check_choice
from ..errors import ArgumentError
from .from_learning_rate import from_lr, seesaw
from .observation import Observation, Unit, blocks_of_one, check_counting, index_of, when
from .policy import TIMES, Answer, Named, Policy, ReasoningPolicy, State, as_size, grow, show, unit_of

__all__ = ["constant", "cyclic", "exponential", "from_lr", "linear", "milestones", "seesaw", "warm_up"]

Value = TypeVar("Value")


@final
@dataclass(frozen=True, repr=False)
class Constant(ReasoningPolicy):
    """The same size throughout."""

    size: float

    def start(self) -> float:
        """Return the size."""
        return self.size

    def decide(self, state: State, observation: Observation) -> Answer:
        """Return the size."""
        return Answer(self.size, state, f"constant: {show(self.size)}")


def constant(size: float) -> Policy:
    """Return a policy that asks for one size, as a baseline or a floor inside ``maximum``.

    >>> constant(64).start()
    64.0
    """
    return Constant(as_number("size", size, least=1))


@dataclass(frozen=True, repr=False, kw_only=True)
class Counting(Named):
    """A policy that depends on how many epochs, updates or examples are completed; abstract.

    Attributes:
        per: what is counted.
        every: how many make one index.
        needs_every: whether a call per examples must say ``every``.
    """

    needs_every: ClassVar[bool] = False
    per: Unit = "epoch"
    every: int = 1

    def arguments(self) -> list[str]:
        """Return the arguments of the call."""
        return [*super().arguments(), *(blocks_of_one(self.per, self.every) if self.needs_every else ())]

    def index(self, observation: Observation) -> int:
        """Return the index that comes next."""
        return index_of(observation, self.per, self.every, by=self.name)


class Schedule(Counting, ReasoningPolicy):
    """A size that depends only on the index; abstract.

    It is computed from the index and never from the size before it, so that rounding errors do not add up.
    """

    @abstractmethod
    def at(self, index: int) -> tuple[float, str]:
        """Return the size at an index, and how it is computed."""

    def start(self) -> float:
        """Return the size at index 0."""
        return self.at(0)[0]

    def decide(self, state: State, observation: Observation) -> Answer:
        """Return the size at the index that comes next."""
        size, words = self.at(self.index(observation))
        return Answer(size, state, f"{self.name}: {words} {when(observation, self.per)}")


@final
@dataclass(frozen=True, repr=False)
class Linear(Schedule):
    """``start + slope × i``."""

    needs_every: ClassVar[bool] = True
    start_size: float
    slope: float

    def at(self, index: int) -> tuple[float, str]:
        """Return ``start + slope × index``."""
        size = as_size(self.start_size + self.slope * min(index, 2**63))
        return size, f"{show(self.start_size)} + {show(self.slope)} {TIMES} {index} = {show(size)}"


def linear(start: float, slope: float, *, per: Unit = "epoch", every: SupportsIndex | None = None) -> Policy:
    """Return a policy that adds the same number of examples each time: ``B_i = start + slope × i``.

    Args:
        start: the size at the beginning, ``B_0``.
        slope: examples added per index; below 0 the size shrinks.
        per: what ``i`` counts: ``"epoch"``, ``"step"``, ``"examples"`` or ``"tokens"``.
        every: units per index, ``i = count // every``; needed for examples.

    >>> policy = linear(32, 8)
    >>> policy.update(policy.init(), Observation(epoch=3))
    (56.0, None)
    """
    blocks = check_counting(per, every, by="linear", needs_every=Linear.needs_every)
    return Linear(as_number("start", start, least=1), as_number("slope", slope), per=per, every=blocks)


@final
@dataclass(frozen=True, repr=False)
class Exponential(Schedule):
    """``start × factor^i``."""

    needs_every: ClassVar[bool] = True
    start_size: float
    factor: float

    def at(self, index: int) -> tuple[float, str]:
        """Return ``start × factor^index``, kept finite."""
        size = grow(self.start_size, self.factor, index)
        return size, f"{show(self.start_size)} {TIMES} {show(self.factor)}^{index} = {show(size)}"


def exponential(start: float, factor: float, *, per: Unit = "epoch", every: SupportsIndex | None = None) -> Policy:
    """Return a policy that multiplies the size each time: ``B_i = start × factor^i``.

    Args:
        start: the size at the beginning, ``B_0``.
        factor: growth per index; below 1 the size shrinks.
        per: what ``i`` counts: ``"epoch"``, ``"step"``, ``"examples"`` or ``"tokens"``.
        every: units per index, ``i = count // every``; needed for examples.

    >>> policy = exponential(32, 2, every=5)
    >>> policy.update(policy.init(), Observation(epoch=11))
    (128.0, None)
    """
    blocks = check_counting(per, every, by="exponential", needs_every=Exponential.needs_every)
    return Exponential(as_number("start", start, least=1), as_number("factor", factor, above=0), per=per, every=blocks)


@final
@dataclass(frozen=True, repr=False)
class WarmUp(Schedule):
    """From one size to another within some counts, then the other size."""

    start_size: float
    end_size: float
    over: int
    _: KW_ONLY
    mode: Literal["linear", "geometric"] = "linear"

    def at(self, index: int) -> tuple[float, str]:
        """Return the size on the way, and the last size from ``over`` on."""
        done = min(index, self.over)
        size = self._on_the_way(done / self.over) if done < self.over else self.end_size
        return size, f"{done}/{self.over} from {show(self.start_size)} to {show(self.end_size)} = {show(size)}"

    def _on_the_way(self, share: float) -> float:
        if self.mode == "geometric":
            return grow(self.start_size, self.end_size / self.start_size, share)
        return as_size(self.start_size + (self.end_size - self.start_size) * share)


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
        over: the number of indices in between.
        mode: ``"linear"`` adds the same number each time, ``"geometric"`` multiplies by the same factor.
        per: what ``i`` counts: ``"epoch"``, ``"step"``, ``"examples"`` or ``"tokens"``.
        every: units per index, ``i = count // every``.

    >>> policy = warm_up(64, 1024, over=4, mode="geometric")
    >>> [policy.update(None, Observation(epoch=epoch))[0] for epoch in range(6)]
    [64.0, 128.0, 256.0, 512.0, 1024.0, 1024.0]
    """
    check_choice("mode", mode, ("linear", "geometric"))
    blocks = check_counting(per, every, by="warm_up")
    sizes = as_number("start", start, least=1), as_number("end", end, least=1)
    return WarmUp(*sizes, as_whole("over", over, least=1), mode=mode, per=per, every=blocks)


@final
@dataclass(frozen=True, repr=False)
class Milestones(Schedule):
    """The size of the last milestone that was reached."""

    sizes: tuple[tuple[int, float], ...]

    def at(self, index: int) -> tuple[float, str]:
        """Return the size of the last milestone at or before the index."""
        count, size = self.sizes[find_last(self.sizes, index)]
        return size, f"{show(size)} from milestone {count},"


def milestones(sizes: Mapping[int, float], *, per: Unit = "epoch", every: SupportsIndex | None = None) -> Policy:
    """Return a policy that changes the size at given counts.

    Args:
        sizes: the size from each count on; the count 0 must be there.
        per: what the keys count: ``"epoch"``, ``"step"``, ``"examples"`` or ``"tokens"``.
        every: units per count of the keys, usually 1.

    >>> policy = milestones({0: 64, 50_000: 256}, per="examples")
    >>> [policy.update(None, Observation(examples=examples))[0] for examples in (0, 49_999, 50_000)]
    [64.0, 64.0, 256.0]
    """
    blocks = check_counting(per, every, by="milestones")
    pairs = as_pairs("milestones", sizes, example="{0: 64, 10: 256}")
    checked = tuple((at, as_number(f"the size at {at}", size, least=1)) for at, size in pairs)
    return Milestones(checked, per=per, every=blocks)


def as_pairs(name: str, mapping: Mapping[int, Value], *, example: str) -> list[tuple[int, Value]]:
    """Check a mapping from counts and return its pairs, sorted by count."""
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
class Cyclic(Counting, Policy):
    """Another policy that sees a count that starts again."""

    inner: Policy
    period: int

    @property
    def unit(self) -> str | None:
        """Return what sizes count, None if the inner policy does not say."""
        return unit_of(self.name, [self.inner])

    def init(self) -> State:
        """Return the inner policy's state."""
        return self.inner.init()

    def update(self, state: State, observation: Observation) -> tuple[float, State]:
        """Return the inner policy's answer at the folded count."""
        return self.inner.update(state, self._fold(observation))

    def start(self) -> float | None:
        """Return the inner policy's start."""
        return self.inner.start()

    def check_state(self, state: State, name: str = "policy_state") -> None:
        """Check the inner policy's state."""
        self.inner.check_state(state, name)

    def explain(self, state: State, observation: Observation) -> str:
        """Say which cycle it is, and give the inner policy's words."""
        cycle = self.index(observation) // self.period
        return f"cycle {cycle} {when(observation, self.per)}; {self.inner.explain(state, self._fold(observation))}"

    def _fold(self, observation: Observation) -> Observation:
        count = observation.need(self.per, by=self.name)
        return replace(observation, **{self.per: count % (self.period * self.every)})


def cyclic(inner: Policy, period: SupportsIndex, *, per: Unit = "epoch", every: SupportsIndex | None = None) -> Policy:
    """Return a policy that restarts another policy: ``inner`` at ``i mod period``.

    Args:
        inner: the policy of one cycle.
        period: indices per cycle.
        per: the count that starts again: ``"epoch"``, ``"step"``, ``"examples"`` or ``"tokens"``; the other counts go
            on.
        every: units per index, ``i = count // every``; ``inner`` still counts units.

    >>> policy = cyclic(linear(32, 32), 4)
    >>> [policy.update(None, Observation(epoch=epoch))[0] for epoch in range(6)]
    [32.0, 64.0, 96.0, 128.0, 32.0, 64.0]
    """
    blocks = check_counting(per, every, by="cyclic")
    if not isinstance(inner, Policy):
        raise ArgumentError(f"cyclic repeats a policy, got {inner!r}; e.g. cyclic(linear(32, 8), 4)")
    if isinstance(inner, Schedule) and inner.per != per:
        raise ArgumentError(
            f"cyclic per {per} would never restart {inner!r}, which counts per {inner.per}; use the same unit"
        )
    return Cyclic(inner, as_whole("period", period, least=1), per=per, every=blocks)
