"""noise_driven: the batch follows the noise of its gradient, averaged over recent examples."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar, Literal, SupportsIndex, TypeAlias, final, get_args

from ..._checks import as_number, as_whole, check_choice, check_order
from .._states import Check, check_number, check_record, check_size, check_whole
from ..noise import TOO_LARGE, Evidence, NoiseAverage, RecentNoise, add_recent, noise_ratio
from ..observation import Observation, Unit
from ..policy import Answer, Policy, ReasoningPolicy, State, ask, hold, options, show
from ._base import Period, Response, make_period, make_response, refuse_given
from ._readings import ran_in_force

Estimator: TypeAlias = Literal["unbiased", "ratio"]

# Examples over which averages of noise forget.
HORIZON = 100_000.0
# Measured updates over which averages of the noise forget, if no horizon in examples is given: half of those so far,
# within bounds. Early in training the noise scale grows as fast as the run does; a longer average would be behind it.
_SHARE_OF_NOISE, FEWEST_NOISE, _MOST_NOISE = 0.5, 12.0, 64.0
# Measured updates until a noise scale below the base counts as it is.
EARLY = 32
# Updates of several examples that may lack noise after a single one, which cannot say whether noise is measured at all.
_GRACE = 256
# A noise scale of more examples is larger than every batch.
_MOST_SCALE = 2.0**53
_NOT_MEASURED = "no noise was measured since the last observation"


class ScalePolicy(ReasoningPolicy):
    """Averages the noise of updates, and decides by the noise scale once it is reliable; abstract.

    Attributes:
        horizon: examples over which the averages forget.
        num_examples: size of the training set; None for an endless source.
        period: after which it decides; None decides after every update.
        unit: what sizes count: a noise scale is a number of examples.
    """

    unit: ClassVar[str] = "examples"
    horizon: float
    num_examples: int | None = None
    period: Period | None = None

    @abstractmethod
    def follow(self, scale: float, words: str, state: State, observation: Observation) -> Answer:
        """Return the answer to a noise scale, which the words name."""

    def init(self) -> State:
        """Return empty averages."""
        average = NoiseAverage(self.horizon).to_state()
        return average if self.period is None else {"average": average, "count": 0}

    def check_state(self, state: State, name: str = "policy_state") -> None:
        """Check the averages."""
        check = partial(check_average, horizon=self.horizon)
        if self.period is None:
            check(name, state)
        else:
            check_record(name, state, {"average": check, "count": check_whole})

    def decide(self, state: State, observation: Observation) -> Answer:
        """Average the noise, and follow it, now or at the end of a period."""
        if self.period is None:
            return self._decide(state, observation)
        ends, count = self.period.count(state["count"], observation, by=self.name)
        average = NoiseAverage(**state["average"])
        if ends and observation.noise_s is None and average.weight > 0:
            answer = self._answer(average, observation)
        else:
            answer = self._decide(state["average"], observation)
        state = {"average": answer.state, "count": count}
        if ends or (lacks_noise(observation) and observation.current == 1):
            return answer._replace(state=state)
        return hold(observation, state, f"gathering the noise of {self.period.span()}")

    def _decide(self, state: State, observation: Observation) -> Answer:
        if lacks_noise(observation):
            return need_two(observation, state)
        if observation.noise_s is None and (state["weight"] > 0 or observation.ends_epoch):
            return hold(observation, state, _NOT_MEASURED)
        average = add_noise(state, observation, by=self.name, num_examples=self.num_examples)
        return self._answer(average, observation)

    def _answer(self, average: NoiseAverage, observation: Observation) -> Answer:
        state, updates = average.to_state(), f"{average.num_updates:.0f} updates"
        scale = average.scale if average.is_reliable else None
        if scale is None or not math.isfinite(scale):
            return hold(observation, state, f"noise scale not reliable after {updates}")
        return self.follow(scale, f"noise scale {show(scale)} over {updates}", state, observation)


@final
@dataclass(frozen=True, repr=False)
class NoiseScale(ScalePolicy):
    """Asks for ``target × S / G2``."""

    name: ClassVar[str] = "noise_driven"
    target: float = 1.0
    horizon: float = HORIZON
    num_examples: int | None = None
    period: Period | None = field(default=None, metadata={"is_later": True})

    def follow(self, scale: float, words: str, state: State, observation: Observation) -> Answer:
        """Ask for ``target × scale``."""
        return ask(observation, state, self.target * scale, f"{words}, target {show(self.target)}")

    def arguments(self) -> list[str]:
        """Return the arguments of the call."""
        shared = options(
            target=(self.target, 1), horizon=(self.horizon, HORIZON), num_examples=(self.num_examples, None)
        )
        return shared if self.period is None else [*shared, *self.period.written()]


@final
@dataclass(frozen=True, repr=False, kw_only=True)
class NoiseRatio(ReasoningPolicy):
    """Grows the batch if the textbook ratio is high, shrinks it if the ratio is low."""

    name: ClassVar[str] = "noise_driven"
    fixed: ClassVar[tuple[str, ...]] = ("estimator='ratio'",)
    target: float = 1.0
    high: float | None = None
    low: float | None = None
    response: Response
    period: Period
    num_parts: int | None = field(default=None, metadata={"is_later": True})

    def init(self) -> State:
        """Return a period without ratios.

        Later on ``num_parts`` of the ratios is there too, and ``followed``, the newest size in force of which one ran.
        """
        return self.period.init()

    def check_state(self, state: State, name: str = "policy_state") -> None:
        """Check the period, the number of parts and the size that ran."""
        self.period.check_state(_of_period(state) if isinstance(state, dict) else state, name)
        if "num_parts" in state:
            as_whole(f"{name}['num_parts']", state["num_parts"], least=2)
        if "followed" in state:
            check_size(f"{name}['followed']", state["followed"])

    def decide(self, state: State, observation: Observation) -> Answer:
        """Gather ratios, and at the end of a period compare their mean with the limits."""
        if lacks_noise(observation):
            return need_two(observation, state)
        ratio, num_parts, done = math.nan, state.get("num_parts"), _NOT_MEASURED
        if observation.noise_s is not None or (num_parts is None and not observation.ends_epoch):
            ratio, num_parts, done = self._read(state, observation)
        mean, after = self.period.gather(_of_period(state), observation, ratio, by=self.name)
        later = {"num_parts": num_parts, "followed": _followed(state, observation)}
        state = {**after, **{name: value for name, value in later.items() if value is not None}}
        if mean is None or num_parts is None:
            return hold(observation, state, done)
        num_parts = self.num_parts or num_parts
        low, high = self._limits(num_parts)
        size, words = self.response.apply(observation.exact, (mean > high) - (mean < low))
        found = f"noise ratio {show(mean)} over {self.period.span()} of {num_parts} parts"
        return Answer(size, state, f"{found} (low {show(low)}, high {show(high)}): {words}")

    def _read(self, state: State, observation: Observation) -> tuple[float, int | None, str]:
        """Return the ratio of an update, of how many parts ratios are, and what is done with it."""
        s, g2 = (float(observation.need(name, by=self.name)) for name in ("noise_s", "noise_g2"))
        num_parts, num_examples = (int(observation.need(name, by=self.name)) for name in ("noise_parts", "batch_size"))
        before = state.get("num_parts")
        if num_parts < 2:
            return math.nan, before, "noise of a single part is left out"
        if self.num_parts not in (None, num_parts):  # a ratio of another number of parts cannot be compared
            return math.nan, before or num_parts, f"noise of {num_parts} parts, not of {self.num_parts}, is left out"
        if "followed" in state and not ran_in_force(observation):
            return math.nan, before or num_parts, f"a batch of {num_examples} says little about the size in force"
        ratio = noise_ratio(s, g2, num_examples=num_examples, num_parts=num_parts)
        if before is not None and state["weight"] > 0 and self.high is None and self.low is None:
            # Limits that follow the number of parts are proportional to k − 1, as ratios are in expectation.
            ratio, num_parts = ratio * (before - 1) / (num_parts - 1), before
        return ratio, num_parts, f"gathering the noise of {self.period.span()}"

    def _limits(self, num_parts: int) -> tuple[float, float]:
        """Return the given limits, or limits half a step either side of the target."""
        if self.high is not None or self.low is not None:
            return (-math.inf if self.low is None else self.low), (math.inf if self.high is None else self.high)
        # The ratio is about (k − 1) / (1 + B / N); B / N is the target at the middle, and half a step off it here.
        most = num_parts - 1
        low, high = (self.target / math.sqrt(factor) for factor in (self.response.down, self.response.up))
        return most / (1 + low), most / (1 + high)


def noise_driven(
    target: float = 1.0,
    *,
    estimator: Estimator = "unbiased",
    horizon: float | None = None,
    num_examples: SupportsIndex | None = None,
    high: float | None = None,
    low: float | None = None,
    up: float | None = None,
    down: float | None = None,
    num_parts: SupportsIndex | None = None,
    per: Unit | None = None,
    every: SupportsIndex | None = None,
) -> Policy:
    """Follow the noise of the gradient: a noisy one deserves a larger batch.

    ``estimator="unbiased"`` averages ``S``, the trace of the gradient's covariance, and ``G2``, the squared norm of the
    true gradient, over recent examples, and divides last::

        B = target · S / G2

    ``S / G2`` is the simple noise scale of McCandlish et al. 2018, a number of examples. At ``target=1`` a run needs
    twice the updates of an endless batch and twice the examples of the smallest batch; a larger batch saves updates, a
    smaller one saves examples. The size holds until ``G2`` is two standard errors above 0. The first answer can be far
    from the size in force: put ``rate_limit`` after it. The noise scale is a proxy: for language models it was found
    to understate how large a batch may be.

    ``estimator="ratio"`` is the rule as usually taught. With ``k`` micro-batches of mean gradients ``g_i``::

        gns = 1/k · sum_i |g_i − g_m|² / |g_m|²,   squares summed over all parameters

    Where ``k`` does not divide the batch, parts count by their examples (``noise_ratio``); put ``multiple_of(k)`` after
    the policy for equal parts. The mean of ``gns`` over a period above ``high`` grows the batch, below ``low`` shrinks
    it. Beware: in expectation ``gns`` is about ``(k − 1)·N / (B + N)`` for a noise scale ``N`` and a batch ``B``. It
    saturates at ``k − 1`` however noisy the gradient is, and a limit that suits one ``k`` means nothing at another. If
    no limits are given, they are set where the batch is ``√up`` times smaller and ``1 / √down`` times larger than
    ``target · N``, for the current ``k``.

    Args:
        target: batch size in units of the noise scale, above 0.
        estimator: ``"unbiased"`` or ``"ratio"``.
        horizon: unbiased: examples over which the averages forget, 100,000 by default. A batch above a quarter of it
            leaves too few updates in the average to be reliable, and the size holds.
        num_examples: unbiased: size of the training set, if the batch is a large share of it. The noise is then
            measured against the gradient of that set, ``G2 + S / num_examples``, and never asks for more than the set.
        high: ratio: grow above this; with only ``low`` it never grows.
        low: ratio: shrink below this; with only ``high`` it never shrinks.
        up: ratio: factor to grow by, 2 by default.
        down: ratio: factor to shrink by, 0.5 by default.
        num_parts: ratio: ``k``, at least 2; noise of another number of micro-batches is left out. Give the same number
            to ``Stepper(measure_noise=True, noise_parts=k)``. None takes whatever comes.
        per: a period, after which it decides: ``"epoch"`` (the default of the ratio), ``"step"`` (of the unbiased
            estimator) or ``"examples"``.
        every: units per period; needed for examples.

    Returns:
        A policy that needs ``noise_s``, ``noise_g2``, ``batch_size``, and for the ratio ``noise_parts``.

    >>> policy = noise_driven()
    >>> state = policy.init()
    >>> for _ in range(10):
    ...     size, state = policy.update(state, Observation(batch_size=64, noise_s=90.0, noise_g2=0.5))
    >>> round(size, 6)
    180.0
    >>> noise_driven(0.5, horizon=50_000)
    noise_driven(target=0.5, horizon=50000)
    """
    check_choice("estimator", estimator, get_args(Estimator))
    target = as_number("target", target, above=0)
    usual_unit: Unit = "step" if estimator == "unbiased" else "epoch"
    period = make_period(usual_unit if per is None else per, every, by="noise_driven")
    if estimator == "unbiased":
        ratio_only = {"high": high, "low": low, "up": up, "down": down, "num_parts": num_parts}
        refuse_given(ratio_only, belong_to="estimator='ratio'")
        set_size = None if num_examples is None else as_whole("num_examples", num_examples, least=1)
        usual = None if period == Period("step", 1) else period  # the form of the states that it always left
        return NoiseScale(target, HORIZON if horizon is None else as_horizon(horizon), set_size, usual)
    refuse_given({"horizon": horizon, "num_examples": num_examples}, belong_to="estimator='unbiased'")
    high = None if high is None else as_number("high", high, least=0)
    low = None if low is None else as_number("low", low, least=0)
    if high is not None and low is not None:
        check_order("low", low, "high", high)
    parts = None if num_parts is None else as_whole("num_parts", num_parts, least=2)
    response = make_response(up, down)
    return NoiseRatio(target=target, high=high, low=low, response=response, period=period, num_parts=parts)


def as_horizon(horizon: float) -> float:
    """Return a number of examples, or refuse one so large that a single example does not count in it."""
    return as_number("horizon", horizon, above=0, most=1e12)


def check_average(name: str, state: State, *, horizon: float) -> None:
    """Refuse what is not an average of noise over this horizon."""
    numbers: dict[str, Check] = dict.fromkeys(
        ("s", "g2"), lambda at, saved: check_number(at, saved, least=-TOO_LARGE, most=TOO_LARGE)
    )
    squares: dict[str, Check] = {"g2_square": lambda at, saved: check_number(at, saved, least=0)}
    shares: dict[str, Check] = dict.fromkeys(
        ("weight", "weight_square"), lambda at, saved: check_number(at, saved, least=0, most=1 + 1e-9)
    )
    same: dict[str, Check] = {"horizon": lambda at, saved: check_number(at, saved, least=horizon, most=horizon)}
    check_record(name, state, {**same, **numbers, **squares, **shares})


def _of_period(state: State) -> State:
    return {name: value for name, value in state.items() if name not in ("num_parts", "followed")}


def _followed(state: State, observation: Observation) -> int | None:
    """Return the newest size in force of which a batch ran.

    A batch of another size after it is the last of an epoch, or was formed before the size changed.
    """
    runs = observation.batch_size is not None and ran_in_force(observation)
    followed: int | None = observation.current if runs else state.get("followed")
    return followed


def lacks_noise(observation: Observation) -> bool:
    """Return whether noise was not observed and need not be: only a batch of one example may lack it."""
    return observation.noise_s is None and observation.batch_size == 1


def need_two(observation: Observation, state: State) -> Answer:
    """Return the answer after a batch of one example, which has no parts to compare."""
    if observation.current > 1:
        return hold(observation, state, "a single example has no noise")
    return Answer(2.0, state, "a single example has no noise: 2")


def add_noise(state: State, observation: Observation, *, by: str, num_examples: int | None = None) -> NoiseAverage:
    """Return the average with the noise of one more update.

    Drawn without replacement from ``N`` examples, the squared norm of the gradient of all of them is
    ``GB − (1 − B/N)·S/B``, which is ``G2 + S/N``.

    Args:
        state: the average so far.
        observation: has noise.
        by: who asks, for the message.
        num_examples: ``N``; None takes examples as drawn from an endless source.
    """
    s, g2 = float(observation.need("noise_s", by=by)), float(observation.need("noise_g2", by=by))
    corrected = g2 if num_examples is None else g2 + s / num_examples
    return NoiseAverage(**state).update(s, corrected, num_examples=int(observation.need("batch_size", by=by)))


def take_noise(state: State, observation: Observation, *, size: float, horizon: float | None, by: str) -> State:
    """Return the state of ``OnlineGoodput`` with the noise of an update, if it has any.

    Args:
        state: before the update.
        observation: of the update.
        size: examples of the size in force.
        horizon: examples over which averages forget, None for a number of measured updates.
        by: who asks, for the message.
    """
    if observation.noise_s is None and (state["has_noise"] or state["grace"] > 0 or lacks_noise(observation)):
        return {**state, "grace": _GRACE if lacks_noise(observation) else max(0, state["grace"] - 1)}
    average = NoiseAverage(**state["average"])
    if horizon is None:
        # The average forgets after so many updates of the size in force, and an update counts by its examples: the few
        # of an epoch's last batch must not push out what whole ones told.
        num = min(max(_SHARE_OF_NOISE * state["measured"], FEWEST_NOISE), _MOST_NOISE)
        own = num * max(size, int(observation.need("batch_size", by=by)))
        part = min(average.horizon / own, 1 / max(average.weight, 1e-300))
        weights = {"weight": average.weight * part, "weight_square": average.weight_square * part**2}
        average = replace(average, horizon=own, **weights)
    average = add_noise(average.to_state(), observation, by=by)
    recent = add_recent(state["recent"], float(observation.noise_s or 0.0), float(observation.noise_g2 or 0.0))
    after = {"average": average.to_state(), "recent": recent, "has_noise": True, "measured": state["measured"] + 1}
    return {**state, **after}


def find_scale(state: State) -> Evidence:
    """Return the noise scale; a bound where it is not reliable, and None where nobody can tell.

    A batch far below the noise scale never measures it; the bound lets it grow until it does. A scale that was reliable
    once stands until the next one, or until the bound is above it.
    """
    found = RecentNoise.of(state["recent"]).weigh(NoiseAverage(**state["average"]))
    if found.scale is not None:  # a quotient of extremes is no number of examples, nor one that a state can hold
        found = found._replace(scale=min(max(found.scale, 1 / _MOST_SCALE), _MOST_SCALE))
    before = state["scale"]
    if found.is_sure or before is None or (found.scale is not None and found.scale > before):
        return found
    return found._replace(scale=before, is_sure=True)


def lean(scale: float, base: float, num_updates: float) -> tuple[float, str]:
    """Return a noise scale, one below the base drawn to it as long as little was measured, and the words for it.

    The noise scale is low while the loss falls fast, and grows: what was measured so far says what it is at least for
    the rest of the run. Whoever chose the base knew more of the whole run than its first updates tell.
    """
    trust = min(1.0, num_updates / EARLY)
    if scale >= base or trust == 1:
        return scale, ""
    drawn = math.exp(trust * math.log(scale) + (1 - trust) * math.log(base))
    return drawn, f", which grows, taken as {show(drawn)}"
