"""A growing batch in place of a falling learning rate: the noise of the update falls either way."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, SupportsIndex, TypeAlias, final

from ..errors import ArgumentError
from ._counting import Unit, check_counting, index_of, when
from ._named import Named
from ._numbers import LARGEST, TIMES, as_number, as_size, as_whole, grow, show
from .observation import Observation
from .policy import Policy, State

LrSchedule: TypeAlias = Callable[[int], float]


def decay_at(schedule: LrSchedule, index: int, after: int) -> float:
    """Return the rate relative to where it begins to fall: ``schedule(i) / schedule(after)``, 1 before."""
    return 1.0 if index <= after else float(schedule(index)) / float(schedule(after))


@final
@dataclass(frozen=True, repr=False)
class FromLr(Named, Policy):
    """``start × decay(i)^−power``; the state is the start where the controller gives it."""

    name: ClassVar[str] = "from_lr"
    schedule: LrSchedule
    _: KW_ONLY
    start_size: float | None = field(default=None, metadata={"argument": "start"})
    power: float = 1.0
    per: Unit = "epoch"
    every: int = 1
    after: int = 0
    max_factor: float | None = None

    def init(self) -> State:
        """Return None: the first size in force is not known yet."""
        return None

    def update(self, state: State, observation: Observation) -> tuple[float, State]:
        """Return the grown size, and the start."""
        start = self._start(state, observation)
        return as_size(start * self._factor(observation)), None if self.start_size is not None else start

    def start(self) -> float | None:
        """Return the start, None where the controller's initial size is it."""
        return self.start_size

    def explain(self, state: State, observation: Observation) -> str:
        """Return the formula with its numbers."""
        start, (size, _) = self._start(state, observation), self.update(state, observation)
        decay = decay_at(self.schedule, index_of(observation, self.per, self.every, by=self.name), self.after)
        formula = f"{show(start)} {TIMES} {show(decay)}^-{show(self.power)} = {show(size)}"
        return f"{self.name}: {formula} {when(observation, self.per)}"

    def _start(self, state: State, observation: Observation) -> float:
        if self.start_size is not None:
            return self.start_size
        return float(observation.current if state is None else state)

    def _factor(self, observation: Observation) -> float:
        index = index_of(observation, self.per, self.every, by=self.name)
        decay = decay_at(self.schedule, index, self.after)
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
    """Return a policy that grows the batch where a schedule would shrink the learning rate: leave the rate alone.

    With ``decay(i) = schedule(i) / schedule(after)`` (Smith et al. 2017)::

        B_i = start × decay(i)^−power

    Args:
        schedule: the learning rate at index ``i``, in any unit; a rate of 0 asks for the largest size there is.
        start: the size before the decay; None takes the size in force at the first observation.
        power: 1 keeps the noise of SGD as under the schedule; 2 suits rules by the square root of the size.
        per: what ``i`` counts: ``"epoch"``, ``"step"`` or ``"examples"``.
        every: units that make one index, ``i = count // every``.
        after: the index where the rate begins to fall, e.g. the end of its warm-up; the size stays until then.
        max_factor: the most the size is multiplied by.

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
        after=_check_schedule("from_lr", schedule, after),
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
    """Return a policy and a learning-rate factor that share a decay between them, for Adam and its kin.

    Where the schedule would multiply the rate by ``a``, the rate is multiplied by ``sqrt(a)`` and the batch by
    ``1 / a`` (Seesaw, arXiv 2510.14717). With ``decay(i) = schedule(i) / schedule(after)`` and ``M = max_factor``::

        B_i          = start × min(1 / decay(i), M)
        lr_factor(i) = schedule(after) × decay(i) × sqrt(min(1 / decay(i), M))

    Give ``max_factor`` where the batch meets a bound, e.g. ``max_size / start``: from there on the rate takes the whole
    decay.

    Args:
        schedule: the factor of the learning rate at index ``i``, as for ``torch.optim.lr_scheduler.LambdaLR``.
        start: the size before the decay; None takes the size in force at the first observation.
        per: what ``i`` counts: ``"epoch"``, ``"step"`` or ``"examples"``; step the learning-rate scheduler as often.
        every: units that make one index, ``i = count // every``.
        after: the index where the decay begins; until then the size stays and the rate follows the schedule.
        max_factor: the most the size is multiplied by.

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


def _check_schedule(name: str, schedule: Any, after: SupportsIndex) -> int:
    """Check that a schedule can be asked and is above 0 where it begins to fall; return that index."""
    begin = as_whole("after", after, least=0)
    if not callable(schedule):
        raise ArgumentError(f"{name} needs a function from an index to a learning rate, got {schedule!r}")
    first = schedule(begin)
    if not (math.isfinite(first) and first > 0):
        raise ArgumentError(
            f"{name} needs a schedule above 0 where it begins to fall, got {first!r} at {begin}; "
            "for a schedule with a warm-up give after, the index of its end"
        )
    return begin
