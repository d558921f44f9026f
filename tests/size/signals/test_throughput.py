"""goodput: the formula by hand, the optimum in closed form, and no change without a gain."""

import json
import math

import numpy as np
import pytest

from batchwright.errors import ArgumentError, MissingSignalError
from batchwright.plan import TimeModel
from batchwright.size.controller import BatchSizeController
from batchwright.size.observation import Observation
from batchwright.size.signals import goodput
from batchwright.size.signals.throughput import StepTime


class Seconds:
    """``constant + each × num_items`` seconds."""

    def __init__(self, constant=0.1, each=0.001):
        self.constant, self.each = constant, each

    def predict(self, shapes):
        return self.constant + self.each * np.asarray(shapes)[:, 0]


def observed(scale, size, batch_size=64):
    return Observation(batch_size=batch_size, noise_s=scale, noise_g2=1.0, size=size)


def after(policy, observation, num=10):
    state, size = policy.init(), None
    for _ in range(num):
        size, state = policy.update(state, observation)
        state = json.loads(json.dumps(state, allow_nan=False))
    return size


def test_goodput_is_throughput_times_efficiency():
    policy = goodput(Seconds(), length=8, base_size=64)
    progress = policy.progress(np.array([64, 100]), scale=36.0)
    # 64 / 0.164 · 100/100 and 100 / 0.2 · 100/136
    assert progress.tolist() == pytest.approx([64 / 0.164, 500 * 100 / 136])


@pytest.mark.parametrize("scale", [50.0, 400.0, 5000.0])
def test_the_best_size_is_where_the_derivative_vanishes(scale):
    # B / ((c + gB)(N + B)) is largest at B = sqrt(N·c/g).
    policy = goodput(Seconds(), length=8, base_size=8, largest=4096, num_candidates=200, gain=1.0)
    assert after(policy, observed(scale, 8)) == pytest.approx(math.sqrt(scale * 100), rel=0.04)


def test_more_noise_or_a_slower_start_ask_for_a_larger_batch():
    calm, noisy = (after(goodput(Seconds(), length=8, base_size=16), observed(scale, 16)) for scale in (100.0, 10_000))
    assert calm < noisy
    slow = after(goodput(Seconds(constant=1.0), length=8, base_size=16), observed(100.0, 16))
    assert calm < slow


def test_a_size_nearly_as_good_is_kept():
    policy = goodput(Seconds(), length=8, base_size=64, gain=1.05)
    best = after(policy, observed(400.0, 64))
    # At the flat top 20 % more or less costs less than 1 %.
    assert after(policy, observed(400.0, round(best * 1.2))) == round(best * 1.2)
    eager = goodput(Seconds(), length=8, base_size=64, gain=1.0)
    assert after(eager, observed(400.0, round(best * 1.2))) == best


def test_it_does_not_swing():
    policy = goodput(Seconds(), length=8, base_size=64, gain=1.0)
    controller = BatchSizeController(policy, min_size=1, max_size=10_000)
    sizes = [controller.observe(batch_size=controller.size, noise_s=400.0, noise_g2=1.0) for _ in range(60)]
    assert controller.size != 64
    assert len(set(sizes[20:])) == 1


def test_it_begins_with_the_base_size_and_holds_until_the_noise_is_known():
    policy = goodput(Seconds(), length=8, base_size=64)
    assert policy.start() == 64
    assert after(policy, observed(400.0, 64), num=7) == 64
    assert after(policy, Observation(batch_size=64, noise_s=400.0, noise_g2=-1.0, size=64)) == 64
    assert after(policy, Observation(batch_size=64, noise_s=math.nan, noise_g2=1.0, size=64)) == 64


def test_candidates_stay_within_their_limits():
    policy = goodput(Seconds(), length=8, base_size=64, smallest=32, largest=128)
    assert policy.candidates[0] == 32
    assert policy.candidates[-1] == 128
    assert after(policy, observed(1e9, 64)) == 128
    # Every candidate is one size; 50 of them between 1 and 4 are 1, 2, 3, 4.
    assert goodput(Seconds(), length=8, base_size=1, largest=4).candidates == (1, 2, 3, 4)


def test_ranks_share_an_update_and_pieces_follow_each_other():
    sizes = np.array([64, 65, 100])
    assert StepTime(Seconds(), (8,), 1, None).seconds(sizes).tolist() == pytest.approx([0.164, 0.165, 0.2])
    # Four ranks run 16, 17 and 25 examples.
    assert StepTime(Seconds(), (8,), 4, None).seconds(sizes).tolist() == pytest.approx([0.116, 0.117, 0.125])
    # In pieces of 32: two, two and one example, three and four examples.
    pieces = [2 * 0.132, 2 * 0.132 + 0.101, 3 * 0.132 + 0.104]
    assert StepTime(Seconds(), (8,), 1, 32).seconds(sizes).tolist() == pytest.approx(pieces)


def test_a_fitted_time_model_will_do():
    shapes = [[1, 64], [8, 64], [8, 128], [4, 256], [2, 512]]
    model = TimeModel.fit(shapes, [0.08 + 1e-5 * items * length for items, length in shapes])
    # c / g = 0.08 / (1e-5 · 100) = 80: the best size is sqrt(400 · 80) = 179.
    policy = goodput(model, length=100, base_size=16, num_candidates=200, gain=1.0)
    assert after(policy, observed(400.0, 16)) == pytest.approx(179, rel=0.04)


def test_lengths_of_several_axes_reach_the_model():
    seen = []

    class TwoAxes:
        def predict(self, shapes):
            seen.append(np.asarray(shapes)[0].tolist())
            return np.ones(len(shapes))

    goodput(TwoAxes(), length=(10, 20), base_size=4, largest=8)
    assert seen == [[4, 10, 20]]


def test_it_explains_itself():
    policy = goodput(Seconds(), length=8, base_size=64)
    state = policy.init()
    for _ in range(10):
        _, state = policy.update(state, observed(400.0, 64))
    # 193 / 0.293 / 593 against 64 / 0.164 / 464 is 1.321.
    words = "noise scale 400 over 11 updates, 193 promises 1.321 of the goodput of 64: 193"
    assert policy.explain(state, observed(400.0, 64)) == words
    held = policy.explain(state, observed(400.0, 200))
    assert held == "noise scale 400 over 11 updates, 200 promises 1.000 of the goodput, not above 1.05: holds 200"


def test_what_is_missing_is_named():
    policy = goodput(Seconds(), length=8, base_size=64)
    with pytest.raises(MissingSignalError, match="goodput needs noise_s"):
        policy.update(policy.init(), Observation(batch_size=8))
    assert policy.update(policy.init(), Observation(batch_size=1))[0] == 2


class Broken:
    def predict(self, shapes):
        return np.zeros(len(shapes))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"base_size": 0}, "base_size must be a whole number of 1 or more, got 0"),
        ({"smallest": 64, "largest": 64}, "smallest must be below largest"),
        ({"gain": 0.9}, "gain must be a number of 1 or more, got 0.9"),
        ({"num_candidates": 1}, "num_candidates must be a whole number of 2 or more, got 1"),
        ({"length": 0}, "length must be a whole number of 1 or more, got 0"),
        ({"length": ()}, "length must be a whole number, or one per axis"),
        ({"world_size": 0}, "world_size must be a whole number of 1 or more, got 0"),
        ({"max_items": 0}, "max_items must be a whole number of 1 or more, got 0"),
        ({"horizon": 0}, "horizon must be a number above 0"),
        ({"base_size": 10**400}, "base_size must be at most 9007199254740992"),
        ({"length": 10**30}, "length must be at most 9007199254740992"),
        ({"time_model": Broken()}, "must predict seconds above 0"),
    ],
)
def test_nonsense_is_refused_when_the_policy_is_made(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        goodput(**{"time_model": Seconds(), "length": 8, "base_size": 16, **arguments})


def test_a_number_in_place_of_a_time_model_is_refused():
    with pytest.raises(ArgumentError, match=r"time_model must predict seconds from shapes, .* got 5; leave it out"):
        goodput(5)
