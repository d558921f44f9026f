"""What goodput knows of the noise: averages that grow with the run, and how far they count."""

from __future__ import annotations

import math
from dataclasses import replace

from ..noise import Evidence, NoiseAverage, RecentNoise, add_recent
from ..observation import Observation
from ..policy import State, show
from .noise_scale import add_noise, lacks_noise

# Measured updates over which averages of the noise forget, if no horizon in examples is given: half of those so far,
# within bounds. Early in training the noise scale grows as fast as the run does; a longer average would be behind it.
_SHARE, FEWEST_NOISE, _MOST = 0.5, 12.0, 64.0
# Measured updates until a noise scale below the base counts as it is.
EARLY = 32
# Updates of several examples that may lack noise after a single one, which cannot say whether noise is measured at all.
_GRACE = 256


def take_noise(state: State, observation: Observation, *, horizon: float | None, by: str) -> State:
    """Return the state of ``OnlineGoodput`` with the noise of an update, if it has any.

    Args:
        state: before the update.
        observation: of the update.
        horizon: examples over which averages forget, None for a number of measured updates.
        by: who asks, for the message.
    """
    if observation.noise_s is None and (state["has_noise"] or state["grace"] > 0 or lacks_noise(observation)):
        return {**state, "grace": _GRACE if lacks_noise(observation) else max(0, state["grace"] - 1)}
    average = NoiseAverage(**state["average"])
    if horizon is None:
        # The average forgets after so many updates of the size that runs, and an update counts by its examples.
        num = min(max(_SHARE * state["measured"], FEWEST_NOISE), _MOST)
        own = num * int(observation.need("batch_size", by=by))
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
