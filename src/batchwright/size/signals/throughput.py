"""goodput: the batch that makes the most progress per second."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, SupportsIndex, final

import numpy as np
import numpy.typing as npt

from ..._checks import as_number, as_whole, check_order
from ..._types import FloatArray, IntArray
from ...errors import ArgumentError
from ..observation import Observation
from ..policy import Answer, Part, Policy, State, ask, hold, options, show, word
from .noise_scale import HORIZON, ScalePolicy, as_horizon

_NUM_CANDIDATES = 50
_MOST = 2**53


class TimePrediction(Protocol):
    """Predicts the seconds of a step, as ``TimeModel`` does."""

    def predict(self, shapes: npt.ArrayLike, /) -> FloatArray:
        """Return the seconds of each shape ``(num_items, length, …)``."""


@final
@dataclass(frozen=True)
class StepTime(Part):
    """The seconds of an update of ``B`` examples: shared by ranks, in pieces of at most ``max_items``."""

    model: TimePrediction
    lengths: tuple[int, ...]
    world_size: int = 1
    max_items: int | None = None

    def seconds(self, sizes: IntArray) -> FloatArray:
        """Return the seconds of an update of each size."""
        share = -(-sizes // self.world_size)
        if self.max_items is None:
            return self._predict(share)
        num_full, rest = np.divmod(share, self.max_items)
        full = self._predict(np.full_like(share, self.max_items))
        return num_full * full + np.where(rest > 0, self._predict(np.maximum(rest, 1)), 0.0)

    def _predict(self, num_items: IntArray) -> FloatArray:
        lengths = np.broadcast_to(np.array(self.lengths, dtype=np.int64), (len(num_items), len(self.lengths)))
        seconds = np.asarray(self.model.predict(np.column_stack([num_items, lengths])), dtype=np.float64)
        if seconds.shape != num_items.shape or not (np.isfinite(seconds) & (seconds > 0)).all():
            raise ArgumentError(f"time_model must predict seconds above 0, one number per shape, got {seconds}")
        return seconds

    def arguments(self) -> list[str]:
        """Return the arguments of the call."""
        length = self.lengths[0] if len(self.lengths) == 1 else self.lengths
        split = options(world_size=(self.world_size, 1), max_items=(self.max_items, None))
        return [word(self.model), f"length={length}", *split]


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
    time_model: TimePrediction,
    *,
    length: SupportsIndex | Sequence[SupportsIndex],
    base_size: SupportsIndex,
    smallest: SupportsIndex | None = None,
    largest: SupportsIndex | None = None,
    num_candidates: SupportsIndex = _NUM_CANDIDATES,
    world_size: SupportsIndex = 1,
    max_items: SupportsIndex | None = None,
    horizon: float = HORIZON,
    gain: float = 1.05,
) -> Policy:
    """Ask for the batch that makes the most progress per second (Pollux, Qiao et al. 2021).

    For ``B`` examples per update, a noise scale ``N = S / G2`` and a base size ``B0``::

        goodput(B) = throughput(B) · efficiency(B)
        throughput(B) = B / seconds(B)            efficiency(B) = (N + B0) / (N + B)

    A larger batch runs more examples per second, but each of them is worth less. The size changes only for a goodput of
    more than ``gain`` times the goodput of the size in force, so it does not swing. It holds until the noise is
    reliable.

    Couple the learning rate to the size, e.g. ``Stepper(lr_rule="adascale", base_size=…)``: the formula of the
    efficiency assumes a rate that follows.

    Args:
        time_model: predicts seconds from shapes ``(num_items, length)``, such as a ``TimeModel``.
        length: the padded length of a typical batch, one number per axis.
        base_size: ``B0``, the size that the learning rate was chosen for, and the first size.
        smallest: the smallest size to consider; None is ``base_size``.
        largest: the largest; None is 64 × ``base_size``.
        num_candidates: how many sizes between them to compare, spaced by equal factors.
        world_size: ranks that share an update.
        max_items: the most examples that a rank runs at once; more are run in pieces. None runs all at once.
        horizon: examples over which the averages of the noise forget; well above four times the largest batch.
        gain: how many times better another size must be, 1 or more.

    Returns:
        A policy that needs ``noise_s``, ``noise_g2`` and ``batch_size``.

    >>> class Seconds:
    ...     def predict(self, shapes):
    ...         return 0.1 + 0.001 * np.asarray(shapes)[:, 0]
    >>> policy = goodput(Seconds(), length=128, base_size=64)
    >>> state = policy.init()
    >>> for _ in range(10):
    ...     size, state = policy.update(state, Observation(batch_size=64, noise_s=800.0, noise_g2=2.0))
    >>> size  # the candidate nearest to sqrt(400 × 0.1 / 0.001) = 200
    193.0
    """
    first = _as_count("base_size", base_size)
    low = first if smallest is None else _as_count("smallest", smallest)
    high = 64 * first if largest is None else _as_count("largest", largest)
    check_order("smallest", low, "largest", high)
    num_candidates = as_whole("num_candidates", num_candidates, least=2)
    steps = np.geomspace(low, high, num_candidates)
    candidates = tuple(sorted(set(np.rint(steps).astype(np.int64).tolist())))
    most = None if max_items is None else _as_count("max_items", max_items)
    time = StepTime(time_model, _lengths(length), _as_count("world_size", world_size), most)
    time.seconds(np.array(candidates, dtype=np.int64))  # a model that cannot predict these fails now, not in training
    gain = as_number("gain", gain, least=1)
    return Goodput(time, first, candidates, as_horizon(horizon), gain, num_candidates)


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
