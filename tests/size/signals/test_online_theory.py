"""goodput against the best constant size, where theory says how long training takes.

McCandlish et al. 2018: a run at a constant size ``B`` and noise scale ``N`` takes ``S_min · (1 + N / B)`` updates, so
that an update makes ``1 / (S_min · (1 + N / B))`` of the progress. The device takes
``max(launch, constant + each × B)`` seconds per update. The best constant size is found by a scan; goodput knows
nothing of all this.
"""

import math

import numpy as np
import pytest

from batchwright.size import BatchSizeController, goodput

from .drawn import noise

LEAST_UPDATES = 400
DEVICES = {  # launch, constant, seconds of an example
    "launch-bound": (0.05, 0.01, 0.0001),
    "compute-bound": (0.0, 0.02, 0.001),
    "mixed": (0.03, 0.01, 0.0002),
    "additive": (0.0, 0.03, 0.0002),
}
SCALES = {"constant noise": lambda done: 500.0, "growing noise": lambda done: 100.0 * 30.0**done}


def seconds_of(device, size):
    launch, constant, each = device
    return max(launch, constant + each * size)


def time_at(device, scale, size):
    """Return the seconds of training at one size, the mean over the progress."""
    done = (np.arange(200) + 0.5) / 200
    return LEAST_UPDATES * np.mean([1 + scale(share) / size for share in done]) * seconds_of(device, size)


def best_constant(device, scale):
    sizes = np.unique(np.rint(np.geomspace(2, 20_000, 150)).astype(int)).tolist()
    times = [time_at(device, scale, size) for size in sizes]
    return sizes[int(np.argmin(times))], min(times)


def train(device, scale, base, *, seed, every=1):
    """Return the seconds until training is done, and the controller; clocks are off by 5 %."""
    rng = np.random.default_rng(seed)
    controller = BatchSizeController(goodput(), min_size=2, max_size=20_000, initial=base)
    done = clock = 0.0
    step = 0
    while done < 1:
        size = controller.size
        seconds = seconds_of(device, size) * math.exp(0.05 * rng.normal())
        measured = noise(rng, scale(done), size) if step % every == 0 else {}
        done += 1 / (LEAST_UPDATES * (1 + scale(done) / size))
        clock, step = clock + seconds, step + 1
        controller.observe(batch_size=size, seconds=seconds, **measured)
    return clock, controller


CASES = [(device, scale) for device in DEVICES for scale in SCALES]


@pytest.mark.parametrize(("device", "scale"), CASES, ids=[" ".join(case) for case in CASES])
@pytest.mark.parametrize(
    ("part", "limit"), [(0.25, 1.06), (1, 1.06), (4, 1.12)], ids=["too small", "right", "too large"]
)
def test_goodput_takes_hardly_longer_than_the_best_constant_size(device, scale, part, limit):
    best, least = best_constant(DEVICES[device], SCALES[scale])
    clock, controller = train(DEVICES[device], SCALES[scale], max(2, round(part * best)), seed=0)
    assert clock <= limit * least
    assert controller.num_changes <= 20  # it does not swing


@pytest.mark.parametrize("device", DEVICES)
def test_a_base_eight_times_off_costs_less_than_staying_there(device):
    best, _ = best_constant(DEVICES[device], SCALES["growing noise"])
    for base in (max(2, best // 8), 8 * best):
        clock, _ = train(DEVICES[device], SCALES["growing noise"], base, seed=1)
        assert clock < time_at(DEVICES[device], SCALES["growing noise"], base)


def test_noise_of_every_eighth_update_is_enough():
    best, least = best_constant(DEVICES["mixed"], SCALES["growing noise"])
    clock, _ = train(DEVICES["mixed"], SCALES["growing noise"], best // 4, seed=0, every=8)
    assert clock <= 1.1 * least
