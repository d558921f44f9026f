"""Policies made of parts: one after another, the largest or smallest of several, and everything for a chain."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, SupportsIndex, final

from ..errors import ArgumentError
from ._states import check_parts
from .observation import Observation, Unit, check_counting
from .policy import Named, Policy, State, as_size, check_policies, checker_of, show, unit_of, word
from .schedules import Counting, as_pairs, find_last
from .transforms import chain, clamp, cooldown, hysteresis, monotone, multiple_of, rate_limit, smooth

__all__ = [
    "chain",
    "clamp",
    "cooldown",
    "hysteresis",
    "maximum",
    "minimum",
    "monotone",
    "multiple_of",
    "rate_limit",
    "smooth",
    "switch",
]


@final
@dataclass(frozen=True, repr=False)
class Switch(Counting, Policy):
    """One policy after another; the state holds the state of each."""

    policies: tuple[tuple[int, Policy], ...]

    @property
    def unit(self) -> str | None:
        """Return what sizes count, None if no policy says."""
        return unit_of(self.name, [policy for _, policy in self.policies])

    def init(self) -> State:
        """Return the states of all policies."""
        return [policy.init() for _, policy in self.policies]

    def update(self, state: State, observation: Observation) -> tuple[float, State]:
        """Return the answer of the policy in charge; the others see nothing."""
        active, after = self._active(observation), list(state)
        seen = self._seen(active, state, observation)
        size, after[active] = self.policies[active][1].update(after[active], seen)
        return size, after

    def start(self) -> float | None:
        """Return the first policy's start."""
        return self.policies[0][1].start()

    def explain(self, state: State, observation: Observation) -> str:
        """Return the words of the policy in charge."""
        active = self._active(observation)
        at, policy = self.policies[active]
        seen = self._seen(active, state, observation)
        return f"switch: the policy from {at} on; {policy.explain(state[active], seen)}"

    def check_state(self, state: State, name: str = "policy_state") -> None:
        """Check the state of each policy."""
        check_parts(name, state, [checker_of(policy) for _, policy in self.policies])

    def _active(self, observation: Observation) -> int:
        return find_last(self.policies, self.index(observation))

    def _seen(self, active: int, state: State, observation: Observation) -> Observation:
        """Return what the policy in charge sees: whether it has seen nothing before, and takes over."""
        # In epoch 0 no epoch has ended, and every count of epochs is right from the beginning.
        takes_over = active > 0 and bool(observation.epoch) and state[active] == self.policies[active][1].init()
        return replace(observation, takes_over=True) if takes_over else observation


def switch(policies: Mapping[int, Policy], *, per: Unit = "epoch", every: SupportsIndex | None = None) -> Policy:
    """Return a policy that hands over from one policy to the next at given counts.

    Only the policy in charge is updated: the next one starts without having seen what came before. Counts do not
    restart, so a schedule that takes over at epoch 10 starts with its size for epoch 10. A policy that gathers figures
    of an epoch holds the size in the observation with which it takes over, and decides when the next epoch ends.

    Args:
        policies: the policy from each count on; the count 0 must be there.
        per: what the keys count: ``"epoch"``, ``"step"``, ``"examples"`` or ``"tokens"``.
        every: units per count of the keys, usually 1.

    >>> from .schedules import constant, linear
    >>> policy = switch({0: constant(32), 10: linear(64, 8)})
    >>> [policy.update(policy.init(), Observation(epoch=epoch))[0] for epoch in (9, 10)]
    [32.0, 144.0]
    """
    blocks = check_counting(per, every, by="switch")
    pairs = as_pairs("switch", policies, example="{0: linear(32, 8), 10: constant(256)}")
    check_policies("switch", tuple(policy for _, policy in pairs))
    unit_of("switch", [policy for _, policy in pairs])
    return Switch(tuple(pairs), per=per, every=blocks)


@dataclass(frozen=True, repr=False)
class Extreme(Named, Policy):
    """One of several answers, chosen by size; the state holds the state of each policy; abstract.

    Attributes:
        choose: returns the answer that wins.
    """

    choose: ClassVar[Callable[[Iterable[float]], float]]
    policies: tuple[Policy, ...]

    @property
    def unit(self) -> str | None:
        """Return what sizes count, None if no policy says."""
        return unit_of(self.name, self.policies)

    def init(self) -> State:
        """Return the states of all policies."""
        return [policy.init() for policy in self.policies]

    def update(self, state: State, observation: Observation) -> tuple[float, State]:
        """Return the answer that wins; NaN, which holds the size, loses against every number."""
        answers = [policy.update(memory, observation) for policy, memory in zip(self.policies, state, strict=True)]
        return self._winner([as_size(size) for size, _ in answers]), [after for _, after in answers]

    def start(self) -> float | None:
        """Return the start that wins, None if no policy has one."""
        starts = [start for policy in self.policies if (start := policy.start()) is not None]
        return type(self).choose(starts) if starts else None

    def explain(self, state: State, observation: Observation) -> str:
        """Return all answers, and the words of the policy that wins."""
        pairs = list(zip(self.policies, state, strict=True))
        sizes = [as_size(policy.update(memory, observation)[0]) for policy, memory in pairs]
        chosen = self._winner(sizes)
        winner, memory = pairs[0 if math.isnan(chosen) else sizes.index(chosen)]
        return f"{self.name} of {', '.join(map(show, sizes))}; {winner.explain(memory, observation)}"

    def check_state(self, state: State, name: str = "policy_state") -> None:
        """Check the state of each policy."""
        check_parts(name, state, [checker_of(policy) for policy in self.policies])

    def arguments(self) -> list[str]:
        """Return the policies."""
        return [word(policy) for policy in self.policies]

    def _winner(self, sizes: list[float]) -> float:
        numbers = [size for size in sizes if not math.isnan(size)]
        return type(self).choose(numbers) if numbers else math.nan


@final
@dataclass(frozen=True, repr=False)
class Maximum(Extreme):
    """The largest of several answers."""

    choose: ClassVar[Callable[[Iterable[float]], float]] = max


@final
@dataclass(frozen=True, repr=False)
class Minimum(Extreme):
    """The smallest of several answers."""

    choose: ClassVar[Callable[[Iterable[float]], float]] = min


def maximum(*policies: Policy) -> Policy:
    """Return a policy that asks for the most that any of several policies asks for; all of them are updated.

    >>> from .schedules import constant, linear
    >>> policy = maximum(constant(64), linear(32, 8))
    >>> [policy.update(policy.init(), Observation(epoch=epoch))[0] for epoch in (0, 4, 5)]
    [64.0, 64.0, 72.0]
    """
    _check_some("maximum", policies)
    return Maximum(policies)


def minimum(*policies: Policy) -> Policy:
    """Return a policy that asks for the least that any of several policies asks for; all of them are updated.

    It grows only where all of them grow: ``minimum(memory_driven(per="epoch"), speed_driven())`` grows the batch if
    memory is free *and* training no longer becomes faster, and shrinks it if memory runs full. Give all of them the
    same period: policies that decide at different times hold the size for each other, and it never grows.

    >>> from .schedules import constant, linear
    >>> policy = minimum(constant(64), linear(32, 8))
    >>> [policy.update(policy.init(), Observation(epoch=epoch))[0] for epoch in (0, 4, 5)]
    [32.0, 64.0, 64.0]
    """
    _check_some("minimum", policies)
    return Minimum(policies)


def _check_some(name: str, policies: tuple[Policy, ...]) -> None:
    if not policies:
        raise ArgumentError(f"{name} needs at least one policy, got none")
    check_policies(name, policies)
    unit_of(name, policies)
