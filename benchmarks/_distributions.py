"""The length distributions every arm is measured on. Seed 0, so that each run sees the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Draw = Callable[[np.random.Generator, int], npt.NDArray[np.float64]]


@final
@dataclass(frozen=True)
class Distribution:
    """Lengths of one kind of data and the padded-token budget they are batched under.

    Args:
        name: what the command line calls it.
        title: what the table calls it.
        budget: the largest number of padded tokens per batch.
        shortest: lengths below are raised to it.
        longest: lengths above are cut to it.
        draw: takes a generator and a number of examples, returns lengths before rounding; one column per axis.
        arms: the arms that are measured on it; None for all.
    """

    name: str
    title: str
    budget: int
    shortest: int
    longest: int
    draw: Draw
    arms: tuple[str, ...] | None = None

    def takes(self, arm: str) -> bool:
        """Return whether an arm is measured on it."""
        return self.arms is None or arm in self.arms

    def lengths(self, num_examples: int) -> IntArray:
        """Return ``num_examples`` lengths ``(N,)`` or ``(N, axes)``, rounded and clipped, the same ones every time."""
        drawn = self.draw(np.random.default_rng(0), num_examples)
        return np.clip(np.rint(drawn).astype(np.int64), self.shortest, self.longest)


def _short(rng: np.random.Generator, num_examples: int) -> npt.NDArray[np.float64]:
    return rng.lognormal(np.log(24), 0.8, num_examples)


def _chat(rng: np.random.Generator, num_examples: int) -> npt.NDArray[np.float64]:
    is_turn = rng.random(num_examples) < 0.75
    return rng.lognormal(np.log(np.where(is_turn, 64, 800)), np.where(is_turn, 0.8, 0.6))


def _audio(rng: np.random.Generator, num_examples: int) -> npt.NDArray[np.float64]:
    return rng.uniform(1, 35, num_examples) * 100


def _constant(rng: np.random.Generator, num_examples: int) -> npt.NDArray[np.float64]:
    return np.full(num_examples, 128.0)


def _large(rng: np.random.Generator, num_examples: int) -> npt.NDArray[np.float64]:
    return rng.uniform(1751, 3500, num_examples)


def _pairs(draw: Draw) -> Draw:
    """Return lengths of which the second follows the first, as a translation does."""

    def both(rng: np.random.Generator, num_examples: int) -> npt.NDArray[np.float64]:
        first = draw(rng, num_examples)
        return np.stack([first, first * rng.lognormal(0, 0.3, num_examples)], axis=1)

    return both


# Arms that take several axes, and those that show what batches of one cost.
_TWO_AXES = ("window-sort", "buckets-64", "sorted", "in-order")
_ONES = ("random", "numpy-sort", *_TWO_AXES)


DISTRIBUTIONS = {
    distribution.name: distribution
    for distribution in (
        Distribution("short", "Short texts: lognormal, median 24, sigma 0.8", 8_192, 1, 512, _short),
        Distribution("chat", "Chat: 75 % turns (median 64), 25 % documents (median 800)", 65_536, 1, 4_096, _chat),
        Distribution("audio", "Audio: uniform 1 to 35 s at 100 frames a second", 120_000, 100, 3_500, _audio),
        Distribution("pairs", "Two axes: pairs of short texts", 16_384, 1, 512, _pairs(_short), _TWO_AXES),
        Distribution("pairs-audio", "Two axes: audio and target", 240_000, 100, 3_500, _pairs(_audio), _TWO_AXES),
        Distribution("ones", "Batches of one: no two examples fit together", 3_500, 1_751, 3_500, _large, _ONES),
        Distribution("few", "Batches of one to 35: audio, small budget", 3_500, 100, 3_500, _audio, _ONES),
        Distribution("pairs-ones", "Two axes, batches of one", 7_000, 1_751, 3_500, _pairs(_large), _TWO_AXES),
        Distribution("constant", "Control: every length is 128", 8_192, 128, 128, _constant),
    )
}

QUICK_DISTRIBUTIONS = ("short", "chat")
