"""Policies made of parts: transforms behind a policy, one policy after another, the largest of several."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

from ..errors import ArgumentError, MissingSignalError
from ._holding import cooldown as cooldown
from ._holding import hysteresis as hysteresis
from ._holding import monotone as monotone
from ._named import Named
from ._numbers import as_size
from ._several import check_policies
from ._several import maximum as maximum
from ._several import switch as switch
from ._transforms import clamp as clamp
from ._transforms import multiple_of as multiple_of
from ._transforms import rate_limit as rate_limit
from ._transforms import smooth as smooth
from .observation import Observation
from .policy import Policy, State, Transform

__all__ = [
    "chain",
    "clamp",
    "cooldown",
    "hysteresis",
    "maximum",
    "monotone",
    "multiple_of",
    "rate_limit",
    "smooth",
    "switch",
]


@final
@dataclass(frozen=True, repr=False)
class Chain(Named, Policy):
    """A policy whose answer goes through transforms."""

    name: ClassVar[str] = "chain"
    policy: Policy
    transforms: tuple[Transform, ...]

    def init(self) -> State:
        """Return the states of all parts."""
        return {"policy": self.policy.init(), "transforms": [transform.init() for transform in self.transforms]}

    def update(self, state: State, observation: Observation) -> tuple[float, State]:
        """Return the transformed size; NaN, which holds the size, passes by what is behind it."""
        wanted, inner = self.policy.update(state["policy"], observation)
        size, after = as_size(wanted), list(state["transforms"])
        for index, transform in enumerate(self.transforms):
            if math.isnan(size):
                break
            changed, after[index] = transform.update(after[index], observation, size)
            size = as_size(changed)
        return size, {"policy": inner, "transforms": after}

    def start(self) -> float | None:
        """Return the policy's start, transformed with fresh states."""
        size = self.policy.start()
        for transform in self.transforms if size is not None else ():
            try:
                size, _ = transform.update(transform.init(), _BEGINNING, as_size(size))
            except MissingSignalError:  # a transform of what is measured has nothing to say yet
                continue
        return size

    def explain(self, state: State, observation: Observation) -> str:
        """Join the words of all parts that change something."""
        words = [self.policy.explain(state["policy"], observation)]
        size = as_size(self.policy.update(state["policy"], observation)[0])
        for transform, memory in zip(self.transforms, state["transforms"], strict=True):
            if math.isnan(size):
                break
            words.append(transform.explain(memory, observation, size))
            size = as_size(transform.update(memory, observation, size)[0])
        return "; ".join(word for word in words if word)

    def _arguments(self) -> list[str]:
        return [repr(part) for part in (self.policy, *self.transforms)]


_BEGINNING = Observation(epoch=0, step=0, examples=0, tokens=0)


def chain(policy: Policy, *transforms: Transform) -> Policy:
    """Return a policy whose answer goes through transforms, first to last.

    Args:
        policy: what asks for a size.
        *transforms: what shapes the answer; put ``clamp`` last.

    >>> from .schedules import exponential
    >>> policy = chain(exponential(30, 3), rate_limit(2), multiple_of(8), clamp(32, 4096))
    >>> policy.explain(policy.init(), Observation(epoch=2, size=85))
    'exponential: 30 × 3^2 = 270 at epoch 2; rate_limit(2) allows 170; multiple_of(8) makes it 168'
    """
    check_policies("chain", (policy,))
    for transform in transforms:
        if not isinstance(transform, Transform):
            raise ArgumentError(
                f"chain takes a policy and then transforms, got {transform!r}; "
                "several policies go into maximum or switch"
            )
    return Chain(policy, transforms)
