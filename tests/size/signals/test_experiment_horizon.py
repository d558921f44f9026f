"""measured on short experiments: what they take, and what is best for the rest of a run whose rate falls to 0.

The expected loss of SGD on a noisy quadratic is known exactly (Wu et al. 2018, who found that short horizons choose
rates that are too small): along a curvature ``h`` the mean square of a parameter goes on as
``(1 − ηh)² m + η² s h / B``. No draw is needed, so pairs agree and only the horizon and the tolerance decide.
"""

import math

import numpy as np

from batchwright.size import Observation, measured

CURVATURES = 1 / np.arange(1, 301)
BASE, RATE, SECONDS = 16, 0.1, 5.4
SIZES = (16, 32, 64, 128, 256)


def seconds_of(size):
    """Return the seconds of an update on a GPU that is bound by launches."""
    return 0.0058 + 0.0001 * size


def train(squares, size, rate, noise):
    return (1 - rate * CURVATURES) ** 2 * squares + rate**2 * noise * CURVATURES / size


def loss_of(squares):
    return float((CURVATURES * squares).sum() / 2)


def decay(share):
    return min(share / 0.05, (1 - share) / 0.95)


def go_on(squares, size, rule, noise, *, begin, end):
    """Return the mean squares after updates of one size from a share of the run to another."""
    gone = begin * SECONDS
    while gone < end * SECONDS:
        squares = train(squares, size, RATE * rule(size / BASE) * decay(gone / SECONDS), noise)
        gone += seconds_of(size)
    return squares


def taken(squares, rule, noise, *, at, num_batches, tolerance=0.2):
    """Return the size that experiments lead to, one after the other from one state until one holds the size."""
    size, rate = BASE, RATE * decay(at)
    while True:
        curves = {factor: branch(squares, size, factor, rule, rate, noise, num_batches) for factor in (1, 2)}
        experiment = {
            "factors": [1, 2],
            "before": [loss_of(squares)] * 4,
            "losses": {factor: curve[-1][1] for factor, curve in curves.items()},
            "seconds": {factor: curve[-1][0] for factor, curve in curves.items()},
            "curve": curves,
            "examples": num_batches * size,
        }
        policy = measured(tolerance=tolerance)
        wanted = round(policy.update(None, Observation(size=size, experiment=experiment))[0])
        if wanted == size or wanted > SIZES[-1]:
            return size
        size = wanted


def branch(squares, size, factor, rule, rate, noise, num_batches):
    curve = []
    for number in range(1, num_batches // factor + 1):
        squares = train(squares, factor * size, rate * rule(factor * size / BASE), noise)
        curve.append([number * seconds_of(factor * size), [loss_of(squares)] * 4])
    return curve


def best_for_the_rest(squares, rule, noise, *, at):
    ends = {size: loss_of(go_on(squares, size, rule, noise, begin=at, end=1)) for size in SIZES}
    return min(ends, key=ends.get)


def test_with_a_rate_in_proportion_a_short_experiment_errs_towards_a_small_size():
    """Noise that the falling rate will take away counts in full, as it did for the rates of Wu et al."""
    noise = 1.0
    squares = go_on(np.full(300, 0.01), BASE, float, noise, begin=0, end=0.3)
    best = best_for_the_rest(squares, float, noise, at=0.3)
    found = [taken(squares, float, noise, at=0.3, num_batches=num) for num in (4, 32, 128)]
    assert found == sorted(found)  # the longer the experiment, the smaller the bias
    assert found[0] < found[-1] <= best


def test_with_its_root_less_noise_at_once_makes_an_experiment_err_towards_a_large_size():
    """A larger size has less noise for its rate, which the falling rate would have taken away in any case."""
    squares = go_on(np.full(300, 0.01), BASE, math.sqrt, 1.0, begin=0, end=0.3)
    assert best_for_the_rest(squares, math.sqrt, 1.0, at=0.3) == 128
    for num_batches in (8, 128):
        assert taken(squares, math.sqrt, 1.0, at=0.3, num_batches=num_batches, tolerance=0.01) == 256


def test_with_its_root_and_hardly_any_noise_the_tolerance_alone_errs():
    """At 256 the root of 16 is made in 31 ms for 7: 0.94 of the way, within what may be given up."""
    squares = go_on(np.full(300, 0.01), BASE, math.sqrt, 0.01, begin=0, end=0.3)
    assert best_for_the_rest(squares, math.sqrt, 0.01, at=0.3) == 64
    for num_batches in (8, 128):
        assert taken(squares, math.sqrt, 0.01, at=0.3, num_batches=num_batches) == 256
        assert taken(squares, math.sqrt, 0.01, at=0.3, num_batches=num_batches, tolerance=0.01) == 64
