"""A growing batch in place of a falling learning rate: the noise of the update falls either way."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, SupportsIndex, TypeAlias, final

from .._checks import as_number, as_whole
from ..errors import ArgumentError
from ._states import check_none, check_size, optional
from .observation import Observation, Unit, check_counting, index_of, when
from .policy import LARGEST, TIMES, Answer, Policy, ReasoningPolicy, State, as_size, grow, show

LrSchedule: TypeAlias = Callable[[int], float]


def decay_at(schedule: LrSchedule, index: int, after: int) -> float:
    """Return the rate relative to the rate where it begins to fall: ``schedule(i) / schedule(after)``, 1 before."""
    return 1.0 if index <= after else float(schedule(index)) / float(schedule(after))


@final
@dataclass(frozen=True, repr=False)
class FromLr(ReasoningPolicy):
    """``start × decay(i)^−power``; the state is the start if the controller gives it."""

    schedule: LrSchedule
    _: KW_ONLY
    start_size: float | None = field(default=None, metadata={"argument": "start"})
    power: float = 1.0
    per: Unit = "epoch"
    every: int = 1
    after: int = 0
    max_factor: float | None = None

    def start(self) -> float | None:
        """Return the start, None if it is the controller's initial size."""
        return self.start_size

    def decide(self, state: State, observation: Observation) -> Answer:
        """Return the grown size, and remember the start."""
        start = self.start_size
        if start is None:
            start = state = float(observation.current if state is None else state)
        decay = decay_at(self.schedule, index_of(observation, self.per, self.every, by=self.name), self.after)
        size = as_size(start * self._factor(decay))
        formula = f"{show(start)} {TIMES} {show(decay)}^-{show(self.power)} = {show(size)}"
        return Answer(size, state, f"{self.name}: {formula} {when(observation, self.per)}")

    def check_state(self, state: State, name: str = "policy_state") -> None:
        """Refuse what is not a size to start from."""
        (check_none if self.start_size is not None else optional(check_size))(name, state)

    def _factor(self, decay: float) -> float:
        if not math.isfinite(decay):
            return math.nan
        factor = grow(1.0, decay, -self.power) if decay > 0 else LARGEST
        return factor if self.max_factor is None else min(factor, self.max_factor)


def from_lr(
    schedule: LrSchedule,
    *,
    start: float | None = None,
    power: float = 1.0,
    per: Unit = "epoch",
    every: SupportsIndex | None = None,
    after: SupportsIndex = 0,
    max_factor: float | None = None,
) -> Policy:
    """Return a policy that grows the batch where a schedule would shrink the learning rate; keep the rate constant.

    With ``decay(i) = schedule(i) / schedule(after)`` (Smith et al. 2017)::

        B_i = start × decay(i)^−power

    Args:
        schedule: the learning rate at index ``i``, in any unit; a rate of 0 asks for the largest size there is.
        start: the size before the decay; None takes the size in force at the first observation.
        power: 1 keeps the noise of SGD as under the schedule; 2 suits rules by the square root of the size.
        per: what ``i`` counts: ``"epoch"``, ``"step"``, ``"examples"`` or ``"tokens"``.
        every: units per index, ``i = count // every``.
        after: the index where the rate begins to fall, e.g. the end of its warm-up; the size stays until then.
        max_factor: the most that the size is multiplied by.

    >>> policy = from_lr(lambda epoch: 0.5 ** (epoch // 10), start=64)
    >>> [policy.update(None, Observation(epoch=epoch))[0] for epoch in (0, 9, 10, 20)]
    [64.0, 64.0, 128.0, 256.0]
    """
    return FromLr(
        schedule,
        start_size=None if start is None else as_number("start", start, least=1),
        power=as_number("power", power, above=0),
        per=per,
        every=check_counting(per, every, by="from_lr"),
        after=_check_schedule(schedule, after),
        max_factor=None if max_factor is None else as_number("max_factor", max_factor, least=1),
    )


def seesaw(
    schedule: LrSchedule,
    *,
    start: float | None = None,
    per: Unit = "epoch",
    every: SupportsIndex | None = None,
    after: SupportsIndex = 0,
    max_factor: float | None = None,
) -> tuple[Policy, LrSchedule]:
    """Return a policy and a learning-rate factor that share a decay, for Adam and similar optimizers.

    Where the schedule would multiply the rate by ``a``, the rate is multiplied by ``sqrt(a)`` and the batch by
    ``1 / a`` (Seesaw, arXiv 2510.14717). With ``decay(i) = schedule(i) / schedule(after)`` and ``M = max_factor``::

        B_i          = start × min(1 / decay(i), M)
        lr_factor(i) = schedule(after) × decay(i) × sqrt(min(1 / decay(i), M))

    Give ``max_factor`` if the batch reaches a bound, e.g. ``max_size / start``: from there on the rate takes the whole
    decay.

    Args:
        schedule: the factor of the learning rate at index ``i``, as for ``torch.optim.lr_scheduler.LambdaLR``.
        start: the size before the decay; None takes the size in force at the first observation.
        per: what ``i`` counts: ``"epoch"``, ``"step"``, ``"examples"`` or ``"tokens"``; step the learning-rate
            scheduler as often.
        every: units per index, ``i = count // every``.
        after: the index where the decay begins; until then the size stays and the rate follows the schedule.
        max_factor: the most that the size is multiplied by.

    Returns:
        ``(policy, lr_factor)``; ``LambdaLR(optimizer, lr_factor)`` applies the second.

    >>> policy, lr_factor = seesaw(lambda epoch: 0.25**epoch, start=64)
    >>> policy.update(None, Observation(epoch=1)), lr_factor(1)
    ((256.0, None), 0.5)
    """
    policy = from_lr(schedule, start=start, per=per, every=every, after=after, max_factor=max_factor)
    peak, most = as_whole("after", after, least=0), math.inf if max_factor is None else max_factor

    # A plain function: LambdaLR would write the attributes of any other callable into its state.
    def lr_factor(index: int) -> float:
        if index <= peak:
            return float(schedule(index))
        decay = decay_at(schedule, index, peak)
        return float(schedule(peak)) * decay * math.sqrt(min(1 / decay, most)) if decay > 0 else 0.0

    return policy, lr_factor


def _check_schedule(schedule: Any, after: SupportsIndex) -> int:
    """Check that a schedule can be called and is above 0 where it begins to fall; return that index."""
    begin = as_whole("after", after, least=0)
    if not callable(schedule):
        raise ArgumentError(f"from_lr needs a function from an index to a learning rate, got {schedule!r}")
    first = float(schedule(begin))
    if not (math.isfinite(first) and first > 0):
        raise ArgumentError(
            f"from_lr needs a schedule above 0 where it begins to fall, got {first!r} at {begin}; "
            "for a schedule with a warm-up give after, the index of its end"
        )
    return begin
