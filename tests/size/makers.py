"""Calls of every factory of ``batchwright.size``, and a course of training to run them on."""

import math
from dataclasses import dataclass

import numpy as np

from batchwright import size
from batchwright.size import Policy


def halving(index):
    return 0.5 ** (index // 2)


def scale(observation):
    return observation.noise_s / observation.noise_g2


class Seconds:
    """``0.1 + 0.001 × num_items`` seconds."""

    def predict(self, shapes):
        return 0.1 + 0.001 * np.asarray(shapes)[:, 0]


@dataclass(frozen=True)
class Own(Policy):
    """A policy of a user."""

    ratio: float = 1.5
    sizes: tuple = (1, 2.0)

    def init(self):
        return None

    def update(self, state, observation):
        return self.ratio * 8, state


NAMES = {
    **{name: getattr(size, name) for name in size.__all__},
    "halving": halving,
    "scale": scale,
    "Seconds": Seconds,
    "Own": Own,
    "np": np,
}


def make(call):
    """Return what a call in words makes."""
    return eval(call, dict(NAMES))


def figures(step):
    """Return what is observed after an update of a made-up run."""
    wave = math.sin(1.7 * step)
    return {
        "epoch": (step + 1) // 4,
        "batch_size": 60 + step,
        "loss": 2 * 0.95**step + 0.1 * wave,
        "lr": 0.1,
        "entropy": 2 * 0.9**step,
        "noise_s": 100 + 10 * wave,
        "noise_g2": 0.5 + 0.1 * wave,
        "noise_parts": 4,
        "seconds": 0.1 + 0.01 * wave,
        "memory_fraction": 0.6 + 0.35 * wave,
    }
