"""A policy that begins again after a period: small batches, larger ones, and small ones once more."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from typing import ClassVar, SupportsIndex, final

from ..errors import ArgumentError
from ._counting import Unit, check_counting, count_of, index_of, when
from ._named import Named
from ._numbers import as_whole
from ._schedule import Schedule
from .observation import Observation
from .policy import Policy, State


@final
@dataclass(frozen=True, repr=False)
class Cyclic(Named, Policy):
    """Another policy, shown a count that begins again."""

    name: ClassVar[str] = "cyclic"
    inner: Policy
    period: int
    _: KW_ONLY
    per: Unit = "epoch"
    every: int = 1

    def init(self) -> State:
        """Return the inner policy's."""
        return self.inner.init()

    def update(self, state: State, observation: Observation) -> tuple[float, State]:
        """Return the inner policy's answer at the folded count."""
        return self.inner.update(state, self._fold(observation))

    def start(self) -> float | None:
        """Return the inner policy's."""
        return self.inner.start()

    def explain(self, state: State, observation: Observation) -> str:
        """Say where in which cycle, and the inner policy's words."""
        cycle = index_of(observation, self.per, self.every, by=self.name) // self.period
        return f"cycle {cycle} {when(observation, self.per)}; {self.inner.explain(state, self._fold(observation))}"

    def _fold(self, observation: Observation) -> Observation:
        count = count_of(observation, self.per, by=self.name)
        return replace(observation, **{self.per: count % (self.period * self.every)})  # type: ignore[arg-type]


def cyclic(inner: Policy, period: SupportsIndex, *, per: Unit = "epoch", every: SupportsIndex | None = None) -> Policy:
    """Return a policy that restarts another one: ``inner`` at ``i mod period``.

    Args:
        inner: the policy of one cycle.
        period: indices in a cycle.
        per: what is folded: ``"epoch"``, ``"step"`` or ``"examples"``; other counts reach ``inner`` as they are.
        every: units that make one index, ``i = count // every``; ``inner`` still counts units.

    >>> from .schedules import linear
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
