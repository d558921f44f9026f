"""loss_below and loss_settled: the batch grows once the loss is low, or once it no longer moves."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import SupportsIndex, final

from ..._checks import as_flag, as_number, as_whole
from ...errors import ArgumentError
from .._states import check_numbers, check_record
from ..observation import Observation, Unit
from ..policy import Answer, Policy, ReasoningPolicy, State, hold, options, show
from ._base import Mode, Period, Response, make_period, make_response


@final
@dataclass(frozen=True, repr=False)
class LossBelow(ReasoningPolicy):
    """Grows the batch while the loss is below a threshold."""

    threshold: float
    _: KW_ONLY
    response: Response
    period: Period

    def init(self) -> State:
        """Return a period without losses."""
        return self.period.init()

    def check_state(self, state: State, name: str = "policy_state") -> None:
        """Check the period."""
        self.period.check_state(state, name)

    def decide(self, state: State, observation: Observation) -> Answer:
        """Gather losses, and compare their mean at the end of a period."""
        mean, state, done = self.period.follow(state, observation, "loss", by=self.name)
        if mean is None:
            return hold(observation, state, done)
        words = f"loss {show(mean)} over {self.period.span()}"
        if mean >= self.threshold:
            return hold(observation, state, f"{words}, not below {show(self.threshold)}")
        size, step = self.response.apply(observation.exact, 1)
        return Answer(size, state, f"{words}, below {show(self.threshold)}: {step}")


def loss_below(
    threshold: float,
    *,
    up: float | None = None,
    mode: Mode = "exponential",
    per: Unit = "epoch",
    every: SupportsIndex | None = None,
) -> Policy:
    """Grow the batch while the loss is below a threshold, once per period; it never shrinks the batch.

    With ``L`` the mean loss of a period::

        L < threshold    exponential  B × up      linear  B + up
        else             B holds

    A loss that stays below takes the size to its maximum, one step per period; ``clamp`` or the controller's
    ``max_size`` says where that is.

    Args:
        threshold: grow below this loss.
        up: the step: a factor (default 2), or with ``mode="linear"`` a number of examples (default 8).
        mode: ``"exponential"`` multiplies by ``up``, ``"linear"`` adds it.
        per: a period: ``"epoch"``, ``"step"``, ``"examples"`` or ``"tokens"``.
        every: units per period; needed for examples.

    Returns:
        A policy that needs ``loss``, and ``epoch`` or ``batch_size`` for its periods.

    >>> policy = loss_below(0.5)
    >>> [policy.update(policy.init(), Observation(epoch=1, loss=loss, size=64))[0] for loss in (0.6, 0.5, 0.4)]
    [64.0, 64.0, 128.0]
    """
    return LossBelow(
        as_number("threshold", threshold),
        response=_upwards(up, mode),
        period=make_period(per, every, by="loss_below"),
    )


@final
@dataclass(frozen=True, repr=False)
class LossSettled(ReasoningPolicy):
    """Grows the batch once the last losses lie close together; the state holds them."""

    _: KW_ONLY
    tolerance: float = 0.01
    window: int = 3
    relative: bool = True
    response: Response
    period: Period

    def init(self) -> State:
        """Return a period without losses, and no window."""
        return {"period": self.period.init(), "past": []}

    def check_state(self, state: State, name: str = "policy_state") -> None:
        """Check the period and the window."""
        checks = {
            "period": lambda at, saved: self.period.check_state(saved, at),
            "past": lambda at, saved: check_numbers(at, saved, most=self.window),
        }
        check_record(name, state, checks)

    def decide(self, state: State, observation: Observation) -> Answer:
        """Gather losses, and at the end of a period look at the last ones."""
        mean, period, done = self.period.follow(state["period"], observation, "loss", by=self.name)
        if mean is None:
            return hold(observation, {**state, "period": period}, done)
        past = [*state["past"], mean][-self.window :]
        state = {"period": period, "past": past}
        if len(past) < self.window:
            return hold(observation, state, f"{len(past)} of {self.window} losses since the size changed")
        change = self._change(past)
        words = f"loss moved by {self._show(change)} over {self.period.span(self.window)}"
        if change > self.tolerance:
            return hold(observation, state, f"{words}, above {self._show(self.tolerance)}")
        size, step = self.response.apply(observation.exact, 1)
        # The loss may fall again at the new size: the next decision needs a window of its own.
        return Answer(size, {**state, "past": []}, f"{words}, at most {self._show(self.tolerance)}: {step}")

    def _change(self, past: list[float]) -> float:
        """Return the largest loss of the window less the smallest, or that as a share of their mean's size."""
        largest = max(map(abs, past)) or 1.0
        scaled = [loss / largest for loss in past]  # so that no sum overflows
        span, mean = max(scaled) - min(scaled), abs(sum(scaled) / len(scaled))
        if not self.relative:
            return min(span * largest, 1e308)
        return 0.0 if span == 0 else span / mean if mean > span * 1e-300 else 1e308

    def _show(self, value: float) -> str:
        return f"{show(100 * value)} %" if self.relative else show(value)

    def arguments(self) -> list[str]:
        """Return the arguments of the call."""
        settings = options(tolerance=(self.tolerance, 0.01), window=(self.window, 3), relative=(self.relative, True))
        return [*settings, *self.response.arguments(), *self.period.arguments()]


def loss_settled(
    *,
    tolerance: float = 0.01,
    window: SupportsIndex = 3,
    up: float | None = None,
    mode: Mode = "exponential",
    relative: bool = True,
    per: Unit = "epoch",
    every: SupportsIndex | None = None,
) -> Policy:
    """Grow the batch when the loss has converged; it never shrinks the batch.

    With ``L_1 … L_K`` the mean losses of the last ``K = window`` periods::

        change = (max L − min L) / |mean L|          without the division if relative=False
        change <= tolerance    exponential  B × up      linear  B + up,     and a new window begins
        else                   B holds

    Args:
        tolerance: the change that counts as none, 0 or more.
        window: ``K``, at least 2.
        up: the step: a factor (default 2), or with ``mode="linear"`` a number of examples (default 8).
        mode: ``"exponential"`` multiplies by ``up``, ``"linear"`` adds it.
        relative: whether the change is a share of the loss; False for losses around 0.
        per: a period: ``"epoch"``, ``"step"``, ``"examples"`` or ``"tokens"``.
        every: units per period; needed for examples.

    Returns:
        A policy that needs ``loss``, and ``epoch`` or ``batch_size`` for its periods.

    >>> policy = loss_settled(window=2)
    >>> state = policy.init()
    >>> for epoch, loss in enumerate([1.0, 0.9, 0.895], start=1):
    ...     size, state = policy.update(state, Observation(epoch=epoch, loss=loss, size=64))
    >>> size  # 0.005 / 0.8975 is 0.56 %
    128.0
    """
    return LossSettled(
        tolerance=as_number("tolerance", tolerance, least=0),
        window=as_whole("window", window, least=2),
        relative=as_flag("relative", relative),
        response=_upwards(up, mode),
        period=make_period(per, every, by="loss_settled"),
    )


def _upwards(up: float | None, mode: Mode) -> Response:
    response = make_response(up, None, mode=mode)
    if response.up == (mode == "exponential"):
        raise ArgumentError(f"up={up!r} never changes the size; choose one that does")
    return response
