"""The noise of the newest updates: a gradient that falls is told from one that nobody can measure."""

import math

import numpy as np
import pytest

from batchwright.errors import ArgumentError
from batchwright.size import BatchSizeController, goodput
from batchwright.size.noise import NoiseAverage, RecentNoise, add_recent, check_recent


def weigh_all(squares, *, s=50.0):
    """Return what is known after each update: with the newest ones, and whether the long average alone was reliable."""
    average, readings, known = NoiseAverage(64 * 32.0), [], []
    for g2 in squares:
        average, readings = average.update(s, g2, num_examples=32), add_recent(readings, s, g2)
        known.append((RecentNoise.of(readings).weigh(average), average.is_reliable))
    return known


def scattered(seed, means, by=0.3):
    return [
        mean * (1 + by * value)
        for mean, value in zip(means, np.random.default_rng(seed).normal(size=len(means)), strict=True)
    ]


def test_a_squared_gradient_that_falls_tenfold_in_a_hundred_updates_is_reliable_after_ten():
    for seed in range(50):
        known = weigh_all(scattered(seed, [10 ** (-step / 100) for step in range(100)]))
        assert all(found.is_sure for found, _ in known[9:])
        scales = [found.scale for found, _ in known]
        assert scales[99] == pytest.approx(50 * 10**0.99, rel=0.5)  # the average alone would say half of it


def test_a_squared_gradient_far_above_the_rest_at_first_is_soon_forgotten():
    # As in the first updates of a decoder: the long average is lost in their spread for the rest of its memory.
    for seed in range(50):
        known = weigh_all(scattered(seed, [1000.0] * 3 + [1.0] * 97))
        assert not any(was_reliable for _, was_reliable in known)
        assert all(found.is_sure for found, _ in known[15:])
        assert known[40][0].scale == pytest.approx(50, rel=0.4)


def test_a_squared_gradient_that_is_noise_around_zero_is_hardly_ever_reliable():
    # Two standard errors of the average are exceeded by chance in 2.9 % of these; the newest updates add 0.6 %.
    known = [found for seed in range(100) for found in weigh_all(np.random.default_rng(seed).normal(size=100))[8:]]
    assert np.mean([found.is_sure for found, _ in known]) < 0.06


def test_goodput_grows_in_the_first_updates_of_a_gradient_that_falls():
    # 10 ms whatever the size, a noise scale of 3000 examples, measured at every second update as on a real device.
    rng, controller = np.random.default_rng(0), BatchSizeController(goodput(), min_size=32, max_size=2048)
    at_base = 0
    for step in range(214):
        g2 = (1000 * math.exp(-step / 2) + 1) * (1 + 0.3 * rng.normal())
        noise = {"noise_s": 3000.0, "noise_g2": float(g2)} if step % 2 == 0 else {}
        at_base += controller.size == 32
        controller.observe(batch_size=controller.size, seconds=0.01 * math.exp(0.02 * rng.normal()), **noise)
    assert at_base < 60
    assert controller.size >= 1024


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({}, "recent must be a list of at most 12 pairs"),
        ([[1.0, 2.0]] * 13, "recent must be a list of at most 12 pairs"),
        ([[1.0]], r"recent\[0\] must hold s and g2, got \[1.0\]"),
        ([[1.0, "x"]], r"recent\[0\]\[1\] must be a number"),
    ],
    ids=["no list", "too many", "half a pair", "a text"],
)
def test_a_saved_list_that_is_none_is_refused(saved, said):
    with pytest.raises(ArgumentError, match=said):
        check_recent("recent", saved)
