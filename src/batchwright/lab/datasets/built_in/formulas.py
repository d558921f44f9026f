"""Tables made from published formulas: as large and as wide as wanted, the same on every machine.

Each formula comes narrow and wide. The wide one has the same rows and targets and many more columns of noise, so that
only the dimension differs.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ...._random import words
from .._assemble import assemble
from ..dataset import Dataset, Ids

Floats = npt.NDArray[np.float64]

NUM_ROWS = 10_000
NUM_WIDE_COLUMNS = 500
_SEED = 20_240_301
_NUM_WAVE_COLUMNS = 21
# Each class mixes two of the three waves.
_MIXED = np.array([[0, 1], [0, 2], [1, 2]])
NAMES = ("friedman", "friedman_wide", "waveform", "waveform_wide")


def load_formula(name: str, *, limit: int | None) -> Dataset:
    """Return one of the tables; see ``friedman`` and ``waveform``."""
    is_wide = name.endswith("_wide")
    if name.startswith("friedman"):
        features, targets = friedman(NUM_ROWS, NUM_WIDE_COLUMNS if is_wide else 10)
        about = "Friedman's formula of 1991, 5 columns that count and noise"
        return assemble(
            name, features, targets, task="regression", num_classes=None, limit=limit, source=_source(about)
        )
    features, classes = waveform(NUM_ROWS, NUM_WIDE_COLUMNS if is_wide else _NUM_WAVE_COLUMNS)
    about = "the waveform formula of Breiman and others of 1984, 21 columns that count" + " and noise" * is_wide
    made = assemble(name, features, classes, task="classification", num_classes=3, limit=limit, source=_source(about))
    # Among hundreds of columns of noise the nearest row is nearest by chance, however clean the labels are.
    return replace(made, num_signal_columns=_NUM_WAVE_COLUMNS)


def _source(about: str) -> str:
    return f"{about}; drawn here from a fixed seed"


def friedman(num_rows: int, num_columns: int) -> tuple[Floats, Floats]:
    """Return columns between 0 and 1, of which five count, and the target.

    ``y = 10 sin(π x₁ x₂) + 20 (x₃ − ½)² + 10 x₄ + 5 x₅ + e``, with ``e`` normal of variance 1. Without the noise ``y``
    has a variance of about 23.8, so that no model explains more than 96 % of it.

    >>> features, targets = friedman(4, 10)
    >>> features.shape, targets.shape
    ((4, 10), (4,))
    """
    stream = np.random.PCG64(_SEED)
    x = uniform(num_rows * 5, stream).reshape(num_rows, 5)
    noise = normal(num_rows, stream)
    y = 10 * np.sin(np.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2 + 10 * x[:, 3] + 5 * x[:, 4] + noise
    others = uniform(num_rows * (num_columns - 5), stream).reshape(num_columns - 5, num_rows).T
    return np.concatenate([x, others], axis=1), y


def waveform(num_rows: int, num_columns: int) -> tuple[Floats, Ids]:
    """Return rows that mix two of three waves, with noise, and which two: 3 classes of a third each.

    ``xᵢ = u hₐ(i) + (1 − u) h_b(i) + eᵢ`` for i from 1 to 21, with ``u`` uniform, ``e`` normal of variance 1, and
    triangles ``h(i) = max(6 − |i − centre|, 0)`` about 11, 15 and 7. Further columns are normal noise. The classes
    overlap: even the best classifier errs on about 14 % of the rows.

    >>> features, classes = waveform(6, 21)
    >>> features.shape, sorted(set(classes.tolist()))
    ((6, 21), [0, 1, 2])
    """
    stream = np.random.PCG64(_SEED)
    places = np.arange(1, _NUM_WAVE_COLUMNS + 1)
    waves = np.maximum(6 - np.abs(places - np.array([[11], [15], [7]])), 0).astype(np.float64)
    classes = np.arange(num_rows) % 3
    first, second = waves[_MIXED[classes, 0]], waves[_MIXED[classes, 1]]
    share = uniform(num_rows, stream)[:, None]
    mixed = share * first + (1 - share) * second
    mixed += normal(mixed.size, stream).reshape(mixed.shape)
    others = normal(num_rows * (num_columns - _NUM_WAVE_COLUMNS), stream).reshape(-1, num_rows).T
    return np.concatenate([mixed, others], axis=1), classes


def uniform(num: int, stream: np.random.PCG64) -> Floats:
    """Return numbers of 0 or more and below 1: the upper 53 bits of each word of the stream, divided by ``2**53``."""
    return (words(num, stream) >> np.uint64(11)) / 2.0**53


def normal(num: int, stream: np.random.PCG64) -> Floats:
    """Return normal numbers by Box and Muller: ``sqrt(−2 log(1 − u)) cos(2 π v)`` and the same with the sine."""
    half = (num + 1) // 2
    radius = np.sqrt(-2 * np.log1p(-uniform(half, stream)))
    angle = 2 * np.pi * uniform(half, stream)
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:num]
