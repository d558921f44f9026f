"""goodput: the batch that makes the most progress per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import SupportsIndex, final, get_args

import numpy as np

from ..._checks import as_number, as_whole, check_choice, check_order
from ..._types import FloatArray, IntArray
from ...errors import ArgumentError
from ..observation import Observation
from ..policy import Answer, Policy, State, ask, hold, options, show
from ._base import refuse_given
from ._online import OnlineGoodput, SizeUnit
from ._prediction import StepTime, TimePrediction
from .noise_scale import HORIZON, ScalePolicy, as_horizon

_NUM_CANDIDATES = 50
_MOST = 2**53


@final
@dataclass(frozen=True, repr=False)
class Goodput(ScalePolicy):
    """Asks for the size that makes the most progress per second."""

    time: StepTime
    base_size: int
    candidates: tuple[int, ...]
    horizon: float = HORIZON
    gain: float = 1.05
    num_candidates: int = field(default=_NUM_CANDIDATES, compare=False)  # as asked for; equal ones were dropped

    def start(self) -> float | None:
        """Return ``base_size``."""
        return float(self.base_size)

    def follow(self, scale: float, words: str, state: State, observation: Observation) -> Answer:
        """Move if another size promises enough."""
        current = observation.current
        sizes = np.array([current, *self.candidates], dtype=np.int64)
        progress = self.progress(sizes, scale)
        best = int(np.argmax(progress))
        promise = f"{words}, {sizes[best]} promises {progress[best] / progress[0]:.3f} of the goodput"
        if progress[best] <= self.gain * progress[0]:
            return hold(observation, state, f"{promise}, not above {show(self.gain)}")
        return ask(observation, state, float(sizes[best]), f"{promise} of {current}")

    def progress(self, sizes: IntArray, scale: float) -> FloatArray:
        """Return ``B / seconds(B) × (N + B0) / (N + B)`` for a noise scale ``N``."""
        return sizes / self.time.seconds(sizes) * ((scale + self.base_size) / (scale + sizes))

    def arguments(self) -> list[str]:
        """Return the arguments of the call; the candidates follow from their limits and number."""
        return [
            *self.time.arguments(),
            f"base_size={self.base_size}",
            *options(
                smallest=(self.candidates[0], self.base_size),
                largest=(self.candidates[-1], 64 * self.base_size),
                num_candidates=(self.num_candidates, _NUM_CANDIDATES),
                horizon=(self.horizon, HORIZON),
                gain=(self.gain, 1.05),
            ),
        ]


def goodput(
    time_model: TimePrediction | None = None,
    *,
    length: SupportsIndex | Sequence[SupportsIndex] | None = None,
    base_size: SupportsIndex | None = None,
    smallest: SupportsIndex | None = None,
    largest: SupportsIndex | None = None,
    num_candidates: SupportsIndex = _NUM_CANDIDATES,
    world_size: SupportsIndex = 1,
    max_items: SupportsIndex | None = None,
    horizon: float | None = None,
    gain: float = 1.05,
    unit: SizeUnit = "examples",
) -> Policy:
    """Ask for the batch that makes the most progress per second (Pollux, Qiao et al. 2021).

    For ``B`` examples per update, a noise scale ``N = S / G2`` and a base size ``B0``::

        goodput(B) = throughput(B) · efficiency(B)
        throughput(B) = B / seconds(B)            efficiency(B) = (N + B0) / (N + B)

    A larger batch runs more examples per second, but each of them is worth less. The size changes only for a goodput of
    more than ``gain`` times the goodput of the size in force, so it does not swing.

    Without a ``time_model`` the seconds are learned from the updates themselves. Where updates tell their tokens, the
    time is learned as a function of them, and a size is expected to take the mean over the tokens per example of recent
    updates; lengths that differ by a factor of 4 give the whole curve while the base runs. Otherwise the base and twice
    the base run for a few updates each, then every update that runs is read. A size has at most twice as much work, or
    half as much, as what was timed. Padding takes time too: let ``Stepper(tokens_of=…)`` count it, if batches differ in
    it.

    Until the noise is reliable, the noise scale is taken to be the base size, or the least that is likely,
    ``S / (G2 + 2 standard errors)``, if that is more: whoever chose the base tried not to waste examples. A size below
    the base is not taken before. Where ``G2`` has surely left its average, as it does early in training, the newest
    twelve measured updates count alone. A noise scale below the base is drawn to it until 32 updates were measured.

    Couple the learning rate to the size, e.g. ``Stepper(lr_rule="sqrt", beta2_rule="half_life", base_size=…)`` for
    Adam: the formula of the efficiency assumes a rate that follows.

    Args:
        time_model: predicts seconds from shapes ``(num_items, length)``, such as a ``TimeModel``; None learns them.
        length: with a time model: the padded length of a typical batch, one number per axis; None takes the tokens per
            example that are observed.
        base_size: ``B0``, the size that the learning rate was chosen for, and the first size; None takes the first size
            in force.
        smallest: the smallest size to consider; None is ``base_size`` if a time model, a length and a base size are
            given, else an eighth of the base, or ``largest`` if that is less.
        largest: the largest; None is 64 × the base.
        num_candidates: how many sizes between them to compare, spaced by equal factors.
        world_size: with a time model: ranks that share an update.
        max_items: with a time model: the most examples that a rank runs at once; more are run in pieces. None runs all
            at once.
        horizon: examples over which the averages of the noise forget; well above four times the largest batch. None is
            100,000 if a time model, a length and a base size are given, else half of the updates that were measured so
            far, 12 to 64, of the size in force.
        gain: how many times better another size must be, 1 or more.
        unit: what sizes count: ``"examples"``, or ``"tokens"`` per update; the noise scale is converted by the tokens
            per example that are observed.

    Returns:
        A policy that needs ``noise_s``, ``noise_g2`` and ``batch_size``; ``seconds`` without a time model; and tokens
        if it counts in them or asks a time model without a length. It uses ``batch_tokens`` wherever they come.

    >>> class Seconds:
    ...     def predict(self, shapes):
    ...         return 0.1 + 0.001 * np.asarray(shapes)[:, 0]
    >>> policy = goodput(Seconds(), length=128, base_size=64)
    >>> state = policy.init()
    >>> for _ in range(10):
    ...     size, state = policy.update(state, Observation(batch_size=64, noise_s=800.0, noise_g2=2.0))
    >>> size  # the candidate nearest to sqrt(400 × 0.1 / 0.001) = 200
    193.0

    The same device, whose seconds nobody knows:

    >>> from ..controller import BatchSizeController
    >>> controller = BatchSizeController(goodput(), min_size=16, max_size=4096, initial=64)
    >>> for _ in range(40):
    ...     size = controller.size
    ...     _ = controller.observe(batch_size=size, noise_s=1600.0, noise_g2=2.0, seconds=0.1 + 0.001 * size)
    >>> print(*(decision.new for decision in controller.history))
    128 249
    """
    check_choice("unit", unit, get_args(SizeUnit))
    first = None if base_size is None else _as_count("base_size", base_size)
    num_candidates = as_whole("num_candidates", num_candidates, least=2)
    time = _as_time(time_model, length, _as_count("world_size", world_size), max_items)
    gain = as_number("gain", gain, least=1)
    memory = None if horizon is None else as_horizon(horizon)
    is_online = time is None or not time.lengths or first is None or unit == "tokens"
    low, high = _as_limits(first, smallest, largest, is_online=is_online)
    if time is None or first is None or is_online:
        return OnlineGoodput(time, first, low, high, num_candidates, memory, gain, unit)
    steps = np.geomspace(first if low is None else low, 64 * first if high is None else high, num_candidates)
    candidates = tuple(sorted(set(np.rint(steps).astype(np.int64).tolist())))
    time.seconds(np.array(candidates, dtype=np.int64))  # a model that cannot predict these fails now, not in training
    return Goodput(time, first, candidates, HORIZON if memory is None else memory, gain, num_candidates)


def _as_limits(
    first: int | None, smallest: SupportsIndex | None, largest: SupportsIndex | None, *, is_online: bool
) -> tuple[int | None, int | None]:
    """Return the limits as they were given; None stands for the usual ones, which follow from the base."""
    low = None if smallest is None else _as_count("smallest", smallest)
    high = None if largest is None else _as_count("largest", largest)
    least = first if low is None and not is_online else low
    most = high if high is not None or first is None else 64 * first
    if least is not None and most is not None:
        check_order("smallest", least, "largest", most)
    return low, high


def _as_time(
    model: TimePrediction | None,
    length: SupportsIndex | Sequence[SupportsIndex] | None,
    world_size: int,
    max_items: SupportsIndex | None,
) -> StepTime | None:
    if model is None:
        given = {"length": length, "world_size": None if world_size == 1 else world_size, "max_items": max_items}
        refuse_given(given, belong_to="a time_model")
        return None
    if not callable(getattr(model, "predict", None)):
        raise ArgumentError(
            f"time_model must predict seconds from shapes, as a TimeModel does, got {model!r}; leave it out to learn "
            "them, goodput()"
        )
    most = None if max_items is None else _as_count("max_items", max_items)
    if length is None:
        _check_one_axis(model)
    return StepTime(model, () if length is None else _lengths(length), world_size, most)


def _check_one_axis(model: TimePrediction) -> None:
    """Refuse a model that cannot be asked at tokens per example, which are one number."""
    try:
        StepTime(model, (128,)).seconds(np.array([1], dtype=np.int64))
    except ArgumentError as error:
        raise ArgumentError(
            f"time_model cannot be asked at the tokens per example that are observed: {error}; give length, one number "
            "per axis"
        ) from error


def _lengths(length: SupportsIndex | Sequence[SupportsIndex]) -> tuple[int, ...]:
    axes = length if isinstance(length, Sequence) else (length,)
    if not axes:
        raise ArgumentError(f"length must be a whole number, or one per axis, got {length!r}")
    return tuple(_as_count("length", axis) for axis in axes)


def _as_count(name: str, value: SupportsIndex) -> int:
    """Return a whole number of 1 or more that is exact as a ``float`` too."""
    count = as_whole(name, value, least=1)
    if count > _MOST:
        raise ArgumentError(f"{name} must be at most {_MOST}, got {value!r}")
    return count
