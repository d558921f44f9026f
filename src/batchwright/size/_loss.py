"""loss_driven: the batch grows while the loss falls."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, final, get_args

from ..errors import ArgumentError
from ._answer import Answer, ReasoningPolicy, hold
from ._counting import Unit
from ._periods import Period, make_period
from ._response import Mode, Response
from ._signal_checks import check_choice, check_inside, refuse_given
from ._variation import Difference, Measure, Variance
from .observation import Observation
from .policy import Policy, State

MeasureName: TypeAlias = Literal["difference", "ema", "variance"]

# A whole step by default: a factor, or a number of examples.
_STEPS = {"exponential": (2.0, 0.5), "linear": (8.0, 8.0)}


@final
@dataclass(frozen=True)
class LossDriven(ReasoningPolicy):
    """Grows the batch where a measure finds that the loss does well, and shrinks it where it does not."""

    measure: Measure
    response: Response
    period: Period
    direction: int

    def init(self) -> State:
        """Return a period without losses, and no value to compare with."""
        return {"period": self.period.init(), "past": []}

    def decide(self, state: State, observation: Observation) -> Answer:
        """Take a loss, and at the end of a period compare."""
        loss = self.period.read(state["period"], observation, "loss", by="loss_driven")
        mean, period = self.period.gather(state["period"], observation, loss, by="loss_driven")
        if mean is None:
            found = "gathering the loss" if math.isfinite(loss) else f"loss is {loss} and left out"
            return hold(observation, {**state, "period": period}, f"{found} of {self.period.span()}")
        verdict, past = self.measure.take(state["past"], mean, self.period.span)
        state = {"period": period, "past": past}
        if verdict is None:
            return hold(observation, state, f"too few losses to compare, {len(past)}")
        size, words = self.response.apply(observation.current, self.direction * verdict.variation)
        return Answer(size, state, f"{verdict.words}: {words}")


def loss_driven(
    measure: MeasureName = "difference",
    *,
    alpha: float = 0.1,
    window: int = 5,
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
    every: int | None = None,
) -> Policy:
    """Grow the batch while the loss falls, shrink it when the loss rises or fluctuates.

    Three measures of how the loss varies, each of the mean loss ``L`` of a period::

        difference   Δ = L − previous L
        ema          M = alpha·L + (1 − alpha)·previous M,   Δ = M − previous M,   M = L at first
        variance     var = 1/K · sum_k (L_k − mean)²  of the last K = window periods

    ``Δ`` below ``−tolerance`` grows the batch, above ``tolerance`` shrinks it, else it holds. With ``relative``, ``Δ``
    is divided by the previous value, so that ``tolerance=0.01`` is one percent whatever the loss measures. At a
    tolerance of 0 a plateau is a coin flip, and ``ema`` goes on creeping long after the loss stands: use a small one.

    A variance has no sign. Above ``fluctuating`` the batch shrinks; below ``steady`` the loss has settled and the batch
    grows; between them it holds. With ``relative`` the variance is divided by the squared mean, so 1e-4 and 1e-2 are
    standard deviations of 1 % and 10 % of the loss. A loss that falls fast has a high variance too: the batch stays
    small early and grows late. ``detrend=True`` measures around the line of least squares instead; then a loss that
    falls along that line by more than ``tolerance`` a period grows the batch, and one that rises shrinks it.

    Choices where the rule as usually written leaves them open, and how to have the other one:

    - Epochs or batches? Means over epochs, since a single batch is noise that itself depends on the batch size. For
      batches ``per="step"``; for equal windows whatever the epoch ``per="examples", every=…``.
    - Sum or mean of squares? A mean, so that ``window`` does not change its meaning; ``divide=False`` for the sum.
    - ``K`` or ``K + 1`` values in a window? ``K``; pass ``window=K + 1`` for the other.
    - Training or validation loss? Whichever is observed.
    - On a noisy plateau this rule shrinks the batch, and ``noise_driven`` or a learning-rate schedule in its place
      grows it. They contradict each other. The rule's own sign is the default, ``direction=-1`` turns it around. Its
      own sign can feed on itself: a smaller batch is noisier, the loss rises, the batch shrinks to the minimum.

    Args:
        measure: ``"difference"``, ``"ema"`` or ``"variance"``.
        alpha: weight of the newest loss in the average, above 0 and below 1.
        window: ``K``, at least 2; 3 with ``detrend``.
        up: the step upwards: a factor (default 2), or with ``mode="linear"`` a number of examples (default 8).
        down: the step downwards: a factor (default 0.5), or with ``mode="linear"`` a number of examples (default 8).
        mode: ``"exponential"`` multiplies by ``up`` or ``down``; ``"linear"`` adds ``up`` or subtracts ``down``.
        gain: makes the step proportional to the variation, and ``up`` and ``down`` its limits: ``size × exp(−gain·Δ)``
            or ``size − gain·Δ``. None takes whole steps. Not for ``"variance"``, which has no sign.
        tolerance: variation that counts as none, 0 or more.
        relative: whether variations are shares of the loss; False for losses around 0.
        steady: variance below which the batch grows.
        fluctuating: variance above which the batch shrinks.
        divide: whether the variance has its ``1/K``.
        detrend: whether the variance is taken around a line.
        direction: 1, or −1 to exchange growing and shrinking.
        per: a period: ``"epoch"``, ``"step"`` or ``"examples"``. Observed once an epoch, it decides each time; observed
            every update, it gathers the mean, weighted by ``batch_size``, and decides when ``epoch`` has risen.
        every: how many make a period; needed for examples.

    Returns:
        A policy that needs ``loss``, and ``epoch`` or ``batch_size`` for its periods.

    >>> policy = loss_driven(tolerance=0.01)
    >>> _, state = policy.update(policy.init(), Observation(epoch=1, loss=2.0, size=64))
    >>> policy.update(state, Observation(epoch=2, loss=1.5, size=64))[0]
    128.0
    >>> policy.explain(state, Observation(epoch=2, loss=1.99, size=64))
    'loss fell 0.5 % over the epoch (tolerance 1 %): holds 64'
    """
    check_choice("measure", measure, get_args(MeasureName))
    check_choice("mode", mode, tuple(_STEPS))
    if direction not in (1, -1):
        raise ArgumentError(f"direction must be 1 or -1, got {direction!r}")
    chosen: Measure
    if measure == "variance":
        refuse_given({"gain": gain}, belong_to="measure='difference' and 'ema', whose variation has a sign")
        chosen = Variance(window, steady, fluctuating, tolerance, relative, divide, detrend)
    else:
        # Settings of the other measures are checked too: nonsense stays nonsense when it is not used.
        Variance(window, steady, fluctuating, 0.0, relative, divide, detrend)
        chosen = Difference(tolerance, relative, alpha if measure == "ema" else None)
    check_inside("alpha", alpha, 0, 1)
    usual_up, usual_down = _STEPS[mode]
    response = Response(mode, usual_up if up is None else up, usual_down if down is None else down, gain)
    return LossDriven(chosen, response, make_period(per, every, by="loss_driven"), direction)
