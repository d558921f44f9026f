"""noise_driven: the batch follows the noise of its gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, final, get_args

from ._answer import Answer, ReasoningPolicy, ask, hold
from ._counting import Unit
from ._noise_signal import add_noise, check_horizon, has_noise, scale_of, scale_words
from ._numbers import as_number, as_whole, show
from ._periods import Period, make_period
from ._response import Response
from ._signal_checks import check_choice, check_order, refuse_given
from .noise import NoiseAverage, noise_ratio
from .observation import Observation
from .policy import Policy, State

Estimator: TypeAlias = Literal["unbiased", "ratio"]


@final
@dataclass(frozen=True)
class NoiseScale(ReasoningPolicy):
    """Asks for ``target × S / G2``, once the averages are reliable."""

    target: float
    horizon: float
    num_examples: int | None

    def init(self) -> State:
        """Return averages of nothing."""
        return NoiseAverage(self.horizon).to_state()

    def decide(self, state: State, observation: Observation) -> Answer:
        """Average the noise, and follow it."""
        if not has_noise(observation, by="noise_driven"):
            return need_two(observation, state)
        average = add_noise(state, observation, by="noise_driven", num_examples=self.num_examples)
        scale, state = scale_of(average), average.to_state()
        if scale is None:
            return hold(observation, state, scale_words(average))
        return ask(observation, state, self.target * scale, f"{scale_words(average)}, target {show(self.target)}")


@final
@dataclass(frozen=True)
class NoiseRatio(ReasoningPolicy):
    """Grows the batch where the textbook ratio is high, shrinks it where it is low."""

    target: float
    high: float | None
    low: float | None
    response: Response
    period: Period

    def init(self) -> State:
        """Return a period without ratios."""
        return self.period.init()

    def decide(self, state: State, observation: Observation) -> Answer:
        """Gather ratios, and at the end of a period compare their mean with the limits."""
        if not has_noise(observation, by="noise_driven"):
            return need_two(observation, state)
        num_parts = int(observation.need("noise_parts", by="noise_driven"))
        mean, state = self.period.gather(state, observation, _ratio(observation, num_parts), by="noise_driven")
        if mean is None:
            return hold(observation, state, f"gathering the noise of {self.period.span()}")
        low, high = self._limits(num_parts)
        size, words = self.response.apply(observation.current, (mean > high) - (mean < low))
        found = f"noise ratio {show(mean)} over {self.period.span()} of {num_parts} parts"
        return Answer(size, state, f"{found} (low {show(low)}, high {show(high)}): {words}")

    def _limits(self, num_parts: int) -> tuple[float, float]:
        """Return the limits given, or those half a step either side of the target."""
        if self.high is not None or self.low is not None:
            return (-math.inf if self.low is None else self.low), (math.inf if self.high is None else self.high)
        most = num_parts - 1
        low, high = (self.target / math.sqrt(factor) for factor in (self.response.down, self.response.up))
        return most / (1 + low), most / (1 + high)


def need_two(observation: Observation, state: State) -> Answer:
    """Return the answer after a batch of one example, which has no parts to compare."""
    if observation.current > 1:
        return hold(observation, state, "one example alone has no noise")
    return Answer(2.0, state, "one example alone has no noise: 2")


def _ratio(observation: Observation, num_parts: int) -> float:
    batch_size = int(observation.need("batch_size", by="noise_driven"))
    s, g2 = float(observation.need("noise_s")), float(observation.need("noise_g2"))
    return noise_ratio(s, g2, num_examples=batch_size, num_parts=num_parts)


def noise_driven(
    target: float = 1.0,
    *,
    estimator: Estimator = "unbiased",
    horizon: float | None = None,
    num_examples: int | None = None,
    high: float | None = None,
    low: float | None = None,
    up: float | None = None,
    down: float | None = None,
    per: Unit | None = None,
    every: int | None = None,
) -> Policy:
    """Follow the noise of the gradient: a noisy one deserves a larger batch.

    ``estimator="unbiased"`` averages ``S``, the trace of the gradient's covariance, and ``G2``, the squared norm of the
    true gradient, over recent examples, and divides last::

        B = target · S / G2

    ``S / G2`` is the simple noise scale of McCandlish et al. 2018, a number of examples. At ``target=1`` a run needs
    twice the updates of an endless batch and twice the examples of the smallest one; more batch saves updates, less
    saves examples. The size holds until ``G2`` is two standard errors above 0. The first answer can be far from the
    size in force: put ``rate_limit`` behind it. The noise scale is a proxy: for language models it was found to
    understate how large a batch may be.

    ``estimator="ratio"`` is the rule as usually taught. With ``k`` micro-batches of mean gradients ``g_i``::

        gns = 1/k · sum_i |g_i − g_m|² / |g_m|²,   squares summed over all parameters

    The mean of ``gns`` over a period above ``high`` grows the batch, below ``low`` shrinks it. Beware: ``gns`` is about
    ``(k − 1)·N / (B + N)`` for a noise scale ``N`` and a batch ``B``. It saturates at ``k − 1`` however noisy the
    gradient is, and a limit that suits one ``k`` means nothing at another. Without limits they are taken where the
    batch is ``√up`` times smaller and ``1 / √down`` times larger than ``target · N``, for the ``k`` at hand.

    Args:
        target: batch size in units of the noise scale, above 0.
        estimator: ``"unbiased"`` or ``"ratio"``.
        horizon: unbiased: examples over which the averages forget, 100,000 by default. A batch above a quarter of it
            leaves too few updates in the average to be reliable, and the size holds.
        num_examples: unbiased: size of the training set, where the batch is no small share of it. The noise is then
            measured against the gradient of that set, ``G2 + S / num_examples``, and never asks for more than the set.
        high: ratio: grow above this; with ``low`` alone it never grows.
        low: ratio: shrink below this; with ``high`` alone it never shrinks.
        up: ratio: factor to grow by, 2 by default.
        down: ratio: factor to shrink by, 0.5 by default.
        per: ratio: a period: ``"epoch"`` (default), ``"step"`` or ``"examples"``.
        every: ratio: how many make a period; needed for examples.

    Returns:
        A policy that needs ``noise_s``, ``noise_g2``, ``batch_size``, and for the ratio ``noise_parts``.

    >>> policy = noise_driven()
    >>> state = policy.init()
    >>> for _ in range(10):
    ...     size, state = policy.update(state, Observation(batch_size=64, noise_s=90.0, noise_g2=0.5))
    >>> round(size, 6)
    180.0
    """
    check_choice("estimator", estimator, get_args(Estimator))
    as_number("target", target, above=0)
    if estimator == "unbiased":
        ratio_only = {"high": high, "low": low, "up": up, "down": down, "per": per, "every": every}
        refuse_given(ratio_only, belong_to="estimator='ratio'")
        if num_examples is not None:
            as_whole("num_examples", num_examples, least=1)
        length = NoiseAverage().horizon if horizon is None else horizon
        check_horizon(length)
        return NoiseScale(target, length, num_examples)
    refuse_given({"horizon": horizon, "num_examples": num_examples}, belong_to="estimator='unbiased'")
    for name, limit in (("high", high), ("low", low)):
        if limit is not None:
            as_number(name, limit, least=0)
    if high is not None and low is not None:
        check_order("low", low, "high", high)
    response = Response("exponential", 2.0 if up is None else up, 0.5 if down is None else down)
    return NoiseRatio(target, high, low, response, make_period(per or "epoch", every, by="noise_driven"))
