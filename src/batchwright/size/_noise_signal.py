"""The average of observed gradient noise that policies keep in their state."""

from __future__ import annotations

import math

from ..errors import ArgumentError
from ._numbers import as_number, show
from .noise import NoiseAverage
from .observation import Observation
from .policy import State

# Squares of these still fit a float.
_LARGEST = 1e150


def check_horizon(horizon: float) -> None:
    """Refuse a horizon that is no number of examples, or so long that one example does not count in it."""
    if not 0 < as_number("horizon", horizon) <= 1e12:
        raise ArgumentError(f"horizon must be a number of examples above 0 and at most 1e12, got {horizon!r}")


def has_noise(observation: Observation, *, by: str) -> bool:
    """Return whether noise was observed; one example alone has none, and any other batch must have it."""
    if observation.noise_s is None and observation.batch_size == 1:
        return False
    observation.need("noise_s", by=by)
    observation.need("noise_g2", by=by)
    return True


def add_noise(state: State, observation: Observation, *, by: str, num_examples: int | None = None) -> NoiseAverage:
    """Return the average with the noise of one more update.

    Drawn without replacement from ``N`` examples, the squared norm of the gradient of all of them is
    ``GB − (1 − B/N)·S/B``, which is ``G2 + S/N``.

    Args:
        state: of the average so far.
        observation: with noise.
        by: who asks, for the message.
        num_examples: ``N``; None takes examples as drawn from an endless source.
    """
    s, g2 = float(observation.need("noise_s", by=by)), float(observation.need("noise_g2", by=by))
    average, batch_size = NoiseAverage(**state), int(observation.need("batch_size", by=by))
    corrected = g2 if num_examples is None else g2 + s / num_examples
    if not (abs(s) < _LARGEST and abs(corrected) < _LARGEST) or batch_size < 1:
        return average
    return average.update(s, corrected, num_examples=batch_size)


def scale_of(average: NoiseAverage) -> float | None:
    """Return the noise scale in examples, None while it is not reliable."""
    scale = average.scale if average.is_reliable else None
    return scale if scale is not None and math.isfinite(scale) else None


def scale_words(average: NoiseAverage) -> str:
    """Return the noise scale in words."""
    updates = f"{average.num_updates:.0f} updates"
    scale = scale_of(average)
    return f"noise scale not reliable after {updates}" if scale is None else f"noise scale {show(scale)} over {updates}"
