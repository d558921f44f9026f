"""memory_driven: the batch follows the memory in use."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import SupportsIndex, final

from ..._ceiling import Ceiling
from ..._checks import as_flag, as_number, as_whole, check_order
from .._states import check_number, check_record, check_size, check_whole, optional
from ..observation import Observation, Unit
from ..policy import Answer, Policy, ReasoningPolicy, State, hold, options
from ._base import Period, Response, make_period, make_response
from ._readings import ran_in_force


@final
@dataclass(frozen=True, repr=False)
class MemoryDriven(ReasoningPolicy):
    """Shrinks the batch above one share of memory, grows it below another."""

    high: float
    low: float
    response: Response
    remember: bool
    patience: int
    period: Period | None = field(default=None, metadata={"is_later": True})

    def init(self) -> State:
        """Return a state in which no size was too large."""
        gathered = {} if self.period is None else {"peak": None, "num_readings": 0, "count": 0}
        return {"too_large": None, "num_fitting": 0, **gathered}

    def check_state(self, state: State, name: str = "policy_state") -> None:
        """Check the size that was too large, the count of readings and the peak of the period."""
        checks = {"too_large": optional(check_size), "num_fitting": check_whole}
        if self.period is not None:
            checks |= {"peak": optional(lambda at, saved: check_number(at, saved, least=0))}
            checks |= {"num_readings": check_whole, "count": check_whole}
        check_record(name, state, {**checks, "ran": check_size}, may_lack=["ran"])

    def decide(self, state: State, observation: Observation) -> Answer:
        """Compare the share with the limits, now or at the end of a period."""
        runs = observation.batch_size is not None and ran_in_force(observation)
        if runs and state.get("peak") is not None and state.get("ran", observation.current) > observation.current:
            state = {**state, "peak": None}  # of a larger size, which says nothing about this one
        answer = self._decide(state, observation)
        ran = observation.current if runs else state.get("ran")  # the newest size in force of which a batch ran
        return answer if ran is None else answer._replace(state={**answer.state, "ran": ran})

    def _decide(self, state: State, observation: Observation) -> Answer:
        if self.period is not None:
            return self._gather(self.period, state, observation)
        if observation.ends_epoch:
            return hold(observation, state, "no update ran since the last observation")
        fraction = float(observation.need("memory_fraction", by=self.name))
        refusal = self._refuse(state, observation, fraction)
        return self._compare(state, observation, fraction) if refusal is None else hold(observation, state, refusal)

    def _gather(self, period: Period, state: State, observation: Observation) -> Answer:
        """Keep the largest share of the period, and compare it at the end."""
        ends, count = period.count(state["count"], observation, by=self.name)
        # An observation that only ends an epoch need not have the figure.
        only_ends = observation.ends_epoch or (ends and period.per == "epoch" and state["num_readings"] > 0)
        is_needed = not only_ends or observation.memory_fraction is not None
        fraction = float(observation.need("memory_fraction", by=self.name)) if is_needed else math.nan
        refusal = self._refuse(state, observation, fraction) if is_needed else None
        peak = state["peak"]
        if is_needed and refusal is None:
            peak = fraction if peak is None else max(peak, fraction)
        num = 0 if ends else state["num_readings"] + is_needed
        gathered = {"peak": None if ends else peak, "num_readings": num, "count": count}
        if not ends or peak is None:
            said = refusal or f"gathering the memory use of {period.span()}"
            return hold(observation, {**state, **gathered}, said)
        answer = self._compare(state, observation, peak)
        return answer._replace(state={**answer.state, **gathered})

    def _refuse(self, state: State, observation: Observation, fraction: float) -> str | None:
        """Say why a reading does not count.

        A light one of a small batch says nothing, nor does a heavy one of a batch formed before the size shrank.
        """
        ran = observation.batch_size
        if not (math.isfinite(fraction) and fraction >= 0):
            return f"memory use of {fraction} is not a share"
        if fraction <= self.high and ran is not None and ran < observation.current:
            return f"a batch of {ran} says little about the size in force"
        is_large = ran is not None and ran > observation.current and not ran_in_force(observation)
        if fraction > self.high and is_large and state.get("ran", 0) > observation.current:
            return f"a batch of {ran} was formed before the size shrank"
        return None

    def _compare(self, state: State, observation: Observation, fraction: float) -> Answer:
        current = observation.current
        if fraction > self.high:
            return self._change(observation, {"too_large": current, "num_fitting": 0}, fraction, -1)
        learned = self._weigh(state, current, fraction)
        too_large = None if math.isinf(learned.failed_at) else learned.failed_at
        state = {"too_large": too_large, "num_fitting": learned.num_clean}
        if fraction >= self.low:
            return hold(observation, state, f"{self._words(fraction)}, between the limits")
        # What counts is the size that will run: a wish just below the size that was too large is rounded to it.
        if self.remember and learned.blocks(observation.rounded(self.response.apply(observation.exact, 1)[0])):
            return hold(observation, state, f"{self._words(fraction)}, but {too_large} was too large")
        return self._change(observation, state, fraction, 1)

    def _weigh(self, state: State, size: int, fraction: float) -> Ceiling:
        """Count the readings in a row that say that the size that was too large would fit; after enough, forget it."""
        too_large = math.inf if state["too_large"] is None else state["too_large"]
        # The limit is 0: the size that this policy asks for need not be the size in force.
        learned = Ceiling(0, too_large, state["num_fitting"])
        # Memory grows at most in proportion to the items, so this estimate is never too low.
        fits = fraction * max(1.0, learned.failed_at / size) <= self.high
        return learned.count(forget_after=self.patience, clean=fits)

    def _change(self, observation: Observation, state: State, fraction: float, way: int) -> Answer:
        size, words = self.response.apply(observation.exact, way)
        return Answer(size, state, f"{self._words(fraction)}: {words}")

    def _words(self, fraction: float) -> str:
        return f"memory {100 * fraction:.1f} % full (low {100 * self.low:g} %, high {100 * self.high:g} %)"

    def arguments(self) -> list[str]:
        """Return the arguments of the call; the response has one factor for both directions."""
        written = options(
            high=(self.high, 0.8),
            low=(self.low, 0.48),
            factor=(self.response.up, 2),
            remember=(self.remember, True),
            patience=(self.patience, 10),
        )
        return written if self.period is None else [*written, *self.period.written()]


def memory_driven(
    high: float = 0.8,
    low: float = 0.48,
    factor: float = 2,
    *,
    remember: bool = True,
    patience: SupportsIndex = 10,
    per: Unit = "step",
    every: SupportsIndex | None = None,
) -> Policy:
    """Shrink the batch when memory runs full, grow it when there is room.

    Above ``high`` the size is divided by ``factor``, below ``low`` multiplied by it, else it holds.

    By itself this rule swings for ever if ``low × factor`` is above ``high``, as it is by default: at 0.45 the batch
    doubles, at 0.9 it is halved, and so on. So a size that passed ``high`` is remembered, and the batch does not grow
    back to it until ``patience`` readings in a row say that it would fit, with memory in proportion to the items.
    A reading from a batch smaller than the size in force, such as the last one of an epoch, never grows the size.
    A batch that was formed before the size shrank never shrinks it again.

    This changes the update. To keep the update and split it instead, give ``step.FitToMemory`` to
    ``Stepper(micro_batch=…)``: it follows the same rule for micro-batches. With a Stepper that splits, memory depends
    on the micro-batch and hardly on the size that this policy sets.

    Args:
        high: shrink above this share of memory, at most 1.
        low: grow below this share, above 0.
        factor: by how much, above 1.
        remember: False forgets sizes that were too large, and may swing.
        patience: readings in a row, or periods, before a size that was too large is tried again.
        per: a period: ``"step"`` decides after every reading, ``"epoch"`` once per epoch, by the highest reading of the
            epoch; ``"examples"`` too.
        every: units per period; needed for examples.

    Returns:
        A policy that needs ``memory_fraction``, the share in use at the peak of the update.

    >>> policy = memory_driven()
    >>> state = policy.init()
    >>> sizes = [64]
    >>> for _ in range(4):  # memory proportional to the batch: 128 takes 0.9
    ...     size, state = policy.update(state, Observation(size=sizes[-1], memory_fraction=sizes[-1] * 0.9 / 128))
    ...     sizes.append(int(size))
    >>> sizes
    [64, 128, 64, 64, 64]
    """
    low, high = as_number("low", low, above=0), as_number("high", high, most=1)
    check_order("low", low, "high", high)
    factor = as_number("factor", factor, above=1)
    response = make_response(factor, 1 / factor)
    remember, patience = as_flag("remember", remember), as_whole("patience", patience, least=1)
    period = make_period(per, every, by="memory_driven")
    is_each = period == Period("step", 1)  # what this policy always did, and the form of the states it left
    return MemoryDriven(high, low, response, remember, patience, None if is_each else period)
