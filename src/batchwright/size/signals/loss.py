"""loss_driven: the batch grows while the loss falls; and the measures of how a loss varies."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, SupportsIndex, TypeAlias, final, get_args

from ..._checks import as_flag, as_number, as_whole, check_choice, check_order, is_number
from ...errors import ArgumentError
from .._states import check_numbers, check_record
from ..observation import Observation, Unit
from ..policy import Answer, Part, Policy, ReasoningPolicy, State, hold, options, show
from ._base import Mode, Period, Response, make_period, make_response

MeasureName: TypeAlias = Literal["difference", "ema", "variance"]
Span: TypeAlias = Callable[[int], str]

# The usual weight of the newest loss in the moving average.
ALPHA = 0.1
# Two means of the same losses in another order differ by about this share, from rounding only.
_ROUNDING = 1e-12


class Verdict(NamedTuple):
    """What a measure found, and in words: above 0 the loss does well, below 0 it does not, 0 says nothing."""

    variation: float
    words: str


class Measure(Part, ABC):
    """Turns losses, one after the other, into verdicts; it remembers a list of numbers."""

    @property
    @abstractmethod
    def num_kept(self) -> int:
        """Return the most numbers that it remembers."""

    @abstractmethod
    def take(self, past: list[float], loss: float, span: Span) -> tuple[Verdict | None, list[float]]:
        """Return the verdict on a loss, None while there are too few losses, and the numbers to remember.

        Args:
            past: the numbers it remembered.
            loss: the newest loss.
            span: a number of periods in words.
        """


@final
@dataclass(frozen=True)
class Difference(Measure):
    """``Δ = loss − previous``, or with ``alpha`` the same for the moving average.

    ``average = alpha·loss + (1 − alpha)·previous average``; the first loss is the first average. ``relative`` divides
    ``Δ`` by the size of the previous value.

    >>> Difference(tolerance=0.0).take([2.0], 1.5, "{} epochs".format)
    (Verdict(variation=0.25, words='loss fell 25 % over 1 epochs (tolerance 0 %)'), [1.5])
    """

    tolerance: float = 0.0
    relative: bool = True
    alpha: float | None = None

    @property
    def num_kept(self) -> int:
        """Return 1: the loss or the average before."""
        return 1

    def take(self, past: list[float], loss: float, span: Span) -> tuple[Verdict | None, list[float]]:
        """Compare a loss, or the average with it, with the one before."""
        if not past:
            return None, [loss]
        before = past[-1]
        now = loss if self.alpha is None else _blend(before, loss, self.alpha)
        what = "loss" if self.alpha is None else "average loss"
        return self.judge(_change(now, before, relative=self.relative), f"{what} {{}} over {span(1)}"), [now]

    def judge(self, change: float, sentence: str) -> Verdict:
        """Return the verdict on a change; the sentence has a place for what the loss did."""
        way = "fell" if change < 0 else "rose"
        moved = "stayed the same" if change == 0 else f"{way} {_amount(abs(change), self.relative)}"
        words = f"{sentence.format(moved)} (tolerance {_amount(self.tolerance, self.relative)})"
        return Verdict(0.0 if abs(change) <= self.tolerance else -change, words)

    def arguments(self) -> list[str]:
        """Return the arguments of the call; the moving average is a measure of its own there."""
        shared = options(tolerance=(self.tolerance, 0.0), relative=(self.relative, True))
        return shared if self.alpha is None else ["'ema'", *options(alpha=(self.alpha, ALPHA)), *shared]


@final
@dataclass(frozen=True)
class Variance(Measure):
    """``var = 1/K · sum_k (loss_k − mean)²`` of the last ``K = window`` values.

    ``divide=False`` leaves out ``1/K``; ``relative`` divides by the squared mean; ``detrend`` measures around the line
    of least squares, and then a fall or rise of that line decides if the loss does not fluctuate. ``proportional``
    gives the variance itself as the variation, with the sign of what the loss does.
    """

    fixed: ClassVar[tuple[str, ...]] = ("'variance'",)
    window: int = 5
    steady: float = 1e-4
    fluctuating: float = 1e-2
    tolerance: float = 0.0
    relative: bool = True
    divide: bool = True
    detrend: bool = False
    proportional: bool = field(default=False, metadata={"is_later": True})

    @property
    def num_kept(self) -> int:
        """Return the length of the window."""
        return self.window

    def take(self, past: list[float], loss: float, span: Span) -> tuple[Verdict | None, list[float]]:
        """Judge the variance of the last values."""
        values = [*past, loss][-self.window :]
        return (None if len(values) < self.window else self._judge(values, span)), values

    def _judge(self, values: list[float], span: Span) -> Verdict:
        variance, slope = self._measure(values)
        words = f"variance of the loss over {span(self.window)} is {show(variance)}"
        if not math.isfinite(variance):
            return Verdict(0.0, words)
        if variance > self.fluctuating:
            return Verdict(-variance if self.proportional else -1.0, f"{words}, above {show(self.fluctuating)}")
        if self.proportional:
            return self._weigh(variance, slope, words)
        if self.detrend:
            # The slope of the line takes the place of the difference of two losses.
            return Difference(self.tolerance, self.relative).judge(slope, f"{words} around a line that {{}} per period")
        if variance < self.steady:
            return Verdict(1.0, f"{words}, below {show(self.steady)}")
        return Verdict(0.0, f"{words}, between {show(self.steady)} and {show(self.fluctuating)}")

    def _weigh(self, variance: float, slope: float, words: str) -> Verdict:
        """Return the variance with the sign of a fall or rise over the window."""
        trend = Difference(self.tolerance, self.relative).judge(slope, f"{words} while it {{}} per period")
        return Verdict(math.copysign(variance, trend.variation) if trend.variation else 0.0, trend.words)

    def arguments(self) -> list[str]:
        """Return the arguments of the call; ``gain`` stands for ``proportional``."""
        return [text for text in super().arguments() if text != "proportional=True"]

    def _measure(self, values: list[float]) -> tuple[float, float]:
        """Return the variance and the slope per value, both relative if asked for."""
        largest = max(map(abs, values)) or 1.0
        # Divided by the largest, no square can overflow.
        scaled = [value / largest for value in values]
        mean, slope = _line(scaled)
        center = (len(scaled) - 1) / 2
        line = [mean + (slope * (index - center) if self.detrend else 0.0) for index in range(len(scaled))]
        square = math.fsum((value - at) ** 2 for value, at in zip(scaled, line, strict=True))
        square /= len(values) if self.divide else 1
        unit = abs(mean) if self.relative else 1 / largest
        return _divide(square, unit * unit), _divide(slope, unit)


def _line(values: list[float]) -> tuple[float, float]:
    """Return the mean and the slope of the line of least squares."""
    center = (len(values) - 1) / 2
    mean = math.fsum(values) / len(values)
    top = math.fsum((index - center) * (value - mean) for index, value in enumerate(values))
    return mean, top / math.fsum((index - center) ** 2 for index in range(len(values)))


def _blend(before: float, loss: float, alpha: float) -> float:
    # The first form leaves an average of equal values exactly there; the second cannot overflow.
    exact = before + alpha * (loss - before)
    return exact if math.isfinite(exact) else (1 - alpha) * before + alpha * loss


def _change(now: float, before: float, *, relative: bool) -> float:
    change = now - before
    if abs(change) <= _ROUNDING * max(abs(now), abs(before)):
        return 0.0
    if relative:
        change = _divide(change, max(abs(before), sys.float_info.min))
    return min(max(change, -sys.float_info.max), sys.float_info.max)


def _divide(top: float, bottom: float) -> float:
    if bottom == 0:
        return 0.0 if top == 0 else math.copysign(math.inf, top)
    return top / bottom


def _amount(value: float, relative: bool) -> str:
    return f"{show(100 * value)} %" if relative else f"by {show(value)}"


@final
@dataclass(frozen=True, repr=False)
class LossDriven(ReasoningPolicy):
    """Grows the batch if a measure finds that the loss does well, and shrinks it if it does not."""

    measure: Measure
    response: Response
    period: Period
    direction: int = 1

    def init(self) -> State:
        """Return a period without losses, and nothing to compare with."""
        return {"period": self.period.init(), "past": []}

    def check_state(self, state: State, name: str = "policy_state") -> None:
        """Check the period and the numbers that the measure remembers."""
        check_record(
            name,
            state,
            {
                "period": lambda at, saved: self.period.check_state(saved, at),
                "past": lambda at, saved: check_numbers(at, saved, most=self.measure.num_kept),
            },
        )

    def decide(self, state: State, observation: Observation) -> Answer:
        """Take a loss, and compare at the end of a period."""
        mean, period, done = self.period.follow(state["period"], observation, "loss", by=self.name)
        if mean is None:
            return hold(observation, {**state, "period": period}, done)
        verdict, past = self.measure.take(state["past"], mean, self.period.span)
        state = {"period": period, "past": past}
        if verdict is None:
            return hold(observation, state, f"too few losses to compare, {len(past)}")
        size, words = self.response.apply(observation.exact, self.direction * verdict.variation)
        return Answer(size, state, f"{verdict.words}: {words}")


def loss_driven(
    measure: MeasureName = "difference",
    *,
    alpha: float = ALPHA,
    window: SupportsIndex = 5,
    up: float | None = None,
    down: float | None = None,
    mode: Mode = "exponential",
    gain: float | None = None,
    tolerance: float = 0.0,
    relative: bool = True,
    steady: float = 1e-4,
    fluctuating: float = 1e-2,
    divide: bool = True,
    detrend: bool = False,
    direction: Literal[1, -1] = 1,
    per: Unit = "epoch",
    every: SupportsIndex | None = None,
) -> Policy:
    """Grow the batch while the loss falls, shrink it when the loss rises or fluctuates.

    Three measures say how the mean loss ``L`` of a period varies::

        difference   Δ = L − previous L
        ema          M = alpha·L + (1 − alpha)·previous M,   Δ = M − previous M,   M = L at first
        variance     var = 1/K · sum_k (L_k − mean)²  of the last K = window periods

    ``Δ`` below ``−tolerance`` grows the batch, above ``tolerance`` shrinks it, else it holds. With ``relative``, ``Δ``
    is divided by the previous value, so that ``tolerance=0.01`` is one percent whatever the loss measures. At a
    tolerance of 0 a plateau is a coin flip, and ``ema`` goes on creeping long after the loss has stopped: use a small
    tolerance.

    A variance has no sign. Above ``fluctuating`` the batch shrinks; below ``steady`` the loss has settled and the batch
    grows; between them it holds. With ``relative`` the variance is divided by the squared mean, so 1e-4 and 1e-2 are
    standard deviations of 1 % and 10 % of the loss. A loss that falls fast has a high variance too: the batch stays
    small early and grows late. ``detrend=True`` measures around the line of least squares instead; then a loss that
    falls along that line by more than ``tolerance`` per period grows the batch, and one that rises shrinks it.

    ``gain`` makes the step proportional to the variation, and ``up`` and ``down`` its limits. The variation is ``−Δ``
    for the first two measures. For the variance it is ``−var`` above ``fluctuating``; else ``var`` if the line of least
    squares falls by more than ``tolerance`` per period, ``−var`` if it rises by more (``steady`` is not used)::

        linear       B + gain·variation
        exponential  B · exp(gain·variation)

    The rule as usually written leaves some choices open. This is how they are made here, and how to get the other one:

    - Epochs or batches? Means over epochs, since a single batch is noise that itself depends on the batch size. For
      batches use ``per="step"``; for equal windows whatever the epoch ``per="examples", every=…``.
    - Sum or mean of squares? A mean, so that ``window`` does not change its meaning; ``divide=False`` for the sum.
    - ``K`` or ``K + 1`` values in a window? ``K``; pass ``window=K + 1`` for the other.
    - Training or validation loss? Whichever is observed.
    - On a noisy plateau this rule shrinks the batch, while ``noise_driven`` or ``from_lr`` would grow it. They
      contradict each other. The rule's own sign is the default; ``direction=-1`` turns it around. The rule's own sign
      can feed on itself: a smaller batch is noisier, the loss rises, and the batch shrinks to the minimum.

    Args:
        measure: ``"difference"``, ``"ema"`` or ``"variance"``.
        alpha: weight of the newest loss in the average, above 0 and below 1.
        window: ``K``, at least 2; 3 with ``detrend``.
        up: the step upwards: a factor (default 2), or with ``mode="linear"`` a number of examples (default 8).
        down: the step downwards: a factor (default 0.5), or with ``mode="linear"`` a number of examples (default 8).
        mode: ``"exponential"`` multiplies by ``up`` or ``down``; ``"linear"`` adds ``up`` or subtracts ``down``.
        gain: makes the step proportional to the variation, above 0; None takes whole steps.
        tolerance: variation that does not count, 0 or more.
        relative: whether variations are shares of the loss; False for losses around 0.
        steady: variance below which the batch grows.
        fluctuating: variance above which the batch shrinks.
        divide: whether the variance is divided by ``K``.
        detrend: whether the variance is taken around a line.
        direction: 1, or −1 to exchange growing and shrinking.
        per: a period: ``"epoch"``, ``"step"``, ``"examples"`` or ``"tokens"``. If it is observed once per epoch, the
            policy decides each time; if it is observed after every update, it gathers the mean, weighted by
            ``batch_size``, and decides when ``epoch`` has risen.
        every: units per period; needed for examples.

    Returns:
        A policy that needs ``loss``, and ``epoch`` or ``batch_size`` for its periods.

    >>> policy = loss_driven(tolerance=0.01)
    >>> _, state = policy.update(policy.init(), Observation(epoch=1, loss=2.0, size=64))
    >>> policy.update(state, Observation(epoch=2, loss=1.5, size=64))[0]
    128.0
    >>> policy.explain(state, Observation(epoch=2, loss=1.99, size=64))
    'loss fell 0.5 % over the epoch (tolerance 1 %): holds 64'
    >>> loss_driven("ema", tolerance=0.01)
    loss_driven('ema', tolerance=0.01)
    """
    check_choice("measure", measure, get_args(MeasureName))
    if not (is_number(direction) and direction in (1, -1)):
        raise ArgumentError(f"direction must be 1 or -1, got {direction!r}")
    # Settings of the other measures are checked too: nonsense stays nonsense when it is not used.
    alpha = as_number("alpha", alpha, above=0, below=1)
    tolerance, relative = as_number("tolerance", tolerance, least=0), as_flag("relative", relative)
    divide, detrend = as_flag("divide", divide), as_flag("detrend", detrend)
    window = as_whole("window", window, least=3 if detrend else 2)
    steady, fluctuating = as_number("steady", steady, least=0), as_number("fluctuating", fluctuating)
    check_order("steady", steady, "fluctuating", fluctuating)
    response = make_response(up, down, mode=mode, gain=gain)
    period = make_period(per, every, by="loss_driven")
    if measure != "variance":
        difference = Difference(tolerance, relative, alpha if measure == "ema" else None)
        return LossDriven(difference, response, period, int(direction))
    if tolerance and not detrend and gain is None:
        raise ArgumentError("a variance has no sign: set steady and fluctuating, or use tolerance with detrend=True")
    variance = Variance(window, steady, fluctuating, tolerance, relative, divide, detrend, gain is not None)
    return LossDriven(variance, response, period, int(direction))
