"""entropy_driven: the batch grows with the confidence of the model."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar, Literal, SupportsIndex, TypeAlias, final, get_args

from ..._checks import as_number, as_whole, check_choice, check_order
from ...errors import ArgumentError
from ..observation import Observation, Unit
from ..policy import TIMES, Answer, Part, Policy, ReasoningPolicy, State, hold, options, show
from ._base import Period, Response, make_period, make_response, refuse_given

EntropyMode: TypeAlias = Literal["track", "threshold"]


@final
@dataclass(frozen=True, kw_only=True)
class EntropyRange(Part):
    """A size for every entropy: from ``smallest`` at ``h = 1`` to ``largest`` at ``h = 0``.

    >>> EntropyRange(smallest=16, largest=256).answer(64, 0.5)[0]
    64.0
    """

    smallest: float
    largest: float

    def answer(self, current: float, h: float) -> tuple[float, str]:
        """Return ``smallest × (largest / smallest)^(1 − h)``, and the formula in words."""
        size = self.smallest * (self.largest / self.smallest) ** (1 - h)
        words = f"{show(self.smallest)} {TIMES} {show(self.largest / self.smallest)}^{show(1 - h)} = {show(size)}"
        return min(max(size, self.smallest), self.largest), words


@final
@dataclass(frozen=True)
class EntropyLimits(Part):
    """Grow below one entropy, shrink above another."""

    fixed: ClassVar[tuple[str, ...]] = ("mode='threshold'",)
    low: float = 0.3
    high: float = 0.7
    response: Response = field(kw_only=True)

    def answer(self, current: float, h: float) -> tuple[float, str]:
        """Return the size after one step, and the step in words."""
        size, words = self.response.apply(current, (h < self.low) - (h > self.high))
        return size, f"low {show(self.low)}, high {show(self.high)}: {words}"


@final
@dataclass(frozen=True, repr=False)
class EntropyDriven(ReasoningPolicy):
    """Turns the mean entropy of a period, as a share of the largest possible entropy, into a size."""

    most: float
    rule: EntropyRange | EntropyLimits
    period: Period
    num_classes: int = field(compare=False)  # only ``most`` matters for the size

    def init(self) -> State:
        """Return a period without entropies."""
        return self.period.init()

    def check_state(self, state: State, name: str = "policy_state") -> None:
        """Check the period."""
        self.period.check_state(state, name)

    def start(self) -> float | None:
        """Return the size for an uncertain model, as every model is at first."""
        return self.rule.smallest if isinstance(self.rule, EntropyRange) else None

    def decide(self, state: State, observation: Observation) -> Answer:
        """Gather entropies, and at the end of a period turn their mean into a size."""
        mean, state, done = self.period.follow(state, observation, "entropy", by=self.name)
        if mean is None:
            return hold(observation, state, done)
        h = min(max(mean / self.most, 0.0), 1.0)
        size, words = self.rule.answer(observation.exact, h)
        return Answer(size, state, f"entropy {show(mean)} of at most {show(self.most)}, h = {show(h)}; {words}")

    def arguments(self) -> list[str]:
        """Return the arguments of the call; the largest entropy is one of them if it is not ``log C``."""
        reference = options(reference=(self.most, math.log(self.num_classes)))
        return [str(self.num_classes), *self.rule.arguments(), *reference, *self.period.arguments()]


def entropy_driven(
    num_classes: SupportsIndex,
    *,
    mode: EntropyMode = "track",
    smallest: float | None = None,
    largest: float | None = None,
    low: float | None = None,
    high: float | None = None,
    up: float | None = None,
    down: float | None = None,
    reference: float | None = None,
    per: Unit = "epoch",
    every: SupportsIndex | None = None,
) -> Policy:
    """Grow the batch as the model becomes certain: low entropy of its output, large batch.

    The entropy ``H = −sum_i p_i log p_i`` in nats is 0 for a certain model and ``log C`` for one that knows nothing.
    Its mean over a period is taken as a share ``h = H / log C``, kept from 0 to 1::

        track       B = smallest · (largest / smallest)^(1 − h)
        threshold   h < low: B × up,   h > high: B × down,   else B holds

    ``"track"`` is the default. It gives every entropy its size, whatever came before, and comes back when the model
    grows uncertain again. ``"threshold"`` is the rule as usually written. It says in which direction but not how far,
    so an entropy that stays low takes the size to its maximum, one step per period.

    Confident is not correct: a model that memorises takes the batch to its maximum. Label smoothing keeps ``h`` above
    0, and language models with a large vocabulary begin far below 1; ``reference`` sets what counts as uncertain.

    Give the targets to ``step.entropy_sum(logits, targets)`` to leave padding out of the mean.

    Args:
        num_classes: ``C``, at least 2.
        mode: ``"track"`` or ``"threshold"``.
        smallest: track: the size at ``h = 1``, at least 1.
        largest: track: the size at ``h = 0``, above ``smallest``.
        low: threshold: grow below this ``h``, 0.3 by default.
        high: threshold: shrink above this ``h``, 0.7 by default.
        up: threshold: factor to grow by, 2 by default.
        down: threshold: factor to shrink by, 0.5 by default.
        reference: the entropy that counts as ``h = 1``, such as the first one measured; None is ``log C``.
        per: a period: ``"epoch"``, ``"step"``, ``"examples"`` or ``"tokens"``.
        every: units per period; needed for examples.

    Returns:
        A policy that needs ``entropy``, and ``epoch`` or ``batch_size`` for its periods.

    >>> policy = entropy_driven(10, smallest=32, largest=512)
    >>> size, _ = policy.update(policy.init(), Observation(epoch=1, entropy=math.log(10) / 2, size=32))
    >>> round(size, 6)  # halfway between 32 and 512 in factors
    128.0
    """
    check_choice("mode", mode, get_args(EntropyMode))
    num_classes = as_whole("num_classes", num_classes, least=2)
    most = math.log(num_classes) if reference is None else as_number("reference", reference, above=0)
    rule: EntropyRange | EntropyLimits
    if mode == "track":
        refuse_given({"low": low, "high": high, "up": up, "down": down}, belong_to="mode='threshold'")
        rule = _range(smallest, largest)
    else:
        refuse_given({"smallest": smallest, "largest": largest}, belong_to="mode='track'")
        rule = _limits(0.3 if low is None else low, 0.7 if high is None else high, make_response(up, down))
    return EntropyDriven(most, rule, make_period(per, every, by="entropy_driven"), num_classes)


def _range(smallest: float | None, largest: float | None) -> EntropyRange:
    if smallest is None or largest is None:
        wish = "the sizes for an uncertain and for a certain model, e.g. smallest=32, largest=1024"
        raise ArgumentError(f"entropy_driven needs smallest and largest, {wish}; or mode='threshold'")
    smallest, largest = as_number("smallest", smallest, least=1), as_number("largest", largest)
    check_order("smallest", smallest, "largest", largest)
    return EntropyRange(smallest=smallest, largest=largest)


def _limits(low: float, high: float, response: Response) -> EntropyLimits:
    low, high = as_number("low", low, above=0, below=1), as_number("high", high, above=0, below=1)
    check_order("low", low, "high", high)
    return EntropyLimits(low=low, high=high, response=response)
