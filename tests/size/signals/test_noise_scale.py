"""noise_driven: the set-point, the textbook ratio against its definition, and estimates that cannot be trusted."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import ArgumentError, MissingSignalError
from batchwright.size.controller import BatchSizeController
from batchwright.size.noise import estimate_noise
from batchwright.size.observation import Observation
from batchwright.size.policy import TIMES
from batchwright.size.signals import noise_driven


def after(policy, observations, state=None):
    """Return the last size and state."""
    state, size = policy.init() if state is None else state, None
    for observation in observations:
        size, state = policy.update(state, observation)
    return size, state


def steady(s, g2, *, num=10, batch_size=64, **figures):
    return [Observation(batch_size=batch_size, noise_s=s, noise_g2=g2, **figures)] * num


def test_a_reliable_noise_scale_is_asked_for():
    size, _ = after(noise_driven(), steady(90.0, 0.5))
    assert size == pytest.approx(180)  # 90 / 0.5
    size, _ = after(noise_driven(0.5), steady(90.0, 0.5))
    assert size == pytest.approx(90)


def test_eight_updates_are_not_enough():
    # Older updates weigh a little less, so that eight count for a little under eight.
    size, state = after(noise_driven(), steady(90.0, 0.5, num=8))
    assert size == 64
    size, _ = after(noise_driven(), steady(90.0, 0.5, num=1), state)
    assert size == pytest.approx(180)


def test_a_gradient_lost_in_its_noise_holds():
    swinging = steady(90.0, 5.0, num=1) + steady(90.0, -4.9, num=1)  # mean 0.05, standard deviation 5
    size, state = after(noise_driven(), swinging * 20)
    assert size == 64
    words = noise_driven().explain(state, swinging[0])
    assert words.startswith("noise scale not reliable after 4")
    assert words.endswith("updates: holds 64")


def test_means_are_divided_last():
    # S alternates 50, 150 and G2 alternates 0.5, 1.5: the ratio of means is 100, with the weights of the average.
    pairs = steady(50.0, 0.5, num=1) + steady(150.0, 1.5, num=1)
    size, _ = after(noise_driven(horizon=1e9), pairs * 50)
    assert size == pytest.approx(100)
    crossed = steady(50.0, 1.5, num=1) + steady(150.0, 0.5, num=1)
    size, _ = after(noise_driven(horizon=1e9), crossed * 50)
    assert size == pytest.approx(100, rel=1e-4)  # the mean of the ratios would be (33 + 300) / 2


def test_a_finite_training_set_is_measured_against_its_own_gradient():
    # G2 + S / N = 0.5 + 90 / 300 = 0.8, and 90 / 0.8 = 112.5. The noise never asks for more than the set.
    size, _ = after(noise_driven(num_examples=300), steady(90.0, 0.5))
    assert size == pytest.approx(112.5)
    size, _ = after(noise_driven(num_examples=300), steady(90.0, 1e-9))
    assert size == pytest.approx(300)


def test_the_correction_is_that_of_sampling_without_replacement():
    s, batch_size, num_examples, gb = 8.0, 4, 16, 5.0
    g2 = gb - s / batch_size
    corrected = gb - (1 - batch_size / num_examples) * s / batch_size  # 5 − 0.75 · 2 = 3.5
    size, _ = after(noise_driven(num_examples=num_examples), steady(s, g2, batch_size=batch_size))
    assert size == pytest.approx(s / corrected)


def test_the_noise_of_real_gradients_is_found():
    rng = np.random.default_rng(0)
    dims, parts, part = 20, 4, 16
    mean, policy = np.full(dims, 0.5), noise_driven()  # |G|² = 5, tr(Σ) = 20·25 = 500: a noise scale of 100
    state = policy.init()
    for _ in range(300):
        means = (mean + 5 * rng.standard_normal((parts, part, dims))).mean(axis=1)
        q, gb = part * (means**2).sum(), (means.mean(axis=0) ** 2).sum()
        s, g2 = estimate_noise(q, gb, num_examples=parts * part, num_parts=parts)
        size, state = policy.update(state, Observation(batch_size=parts * part, noise_s=s, noise_g2=g2))
    # A coordinate of the gradient of 64 has variance v = 25/64, so G2 = 5 has one of about 4·5·v + 2·20·v² = 14. The
    # mean of 300 is known to 4 %.
    assert size == pytest.approx(100, rel=0.15)


def ratio_by_definition(gradients):
    mean = gradients.mean(axis=0)
    return ((gradients - mean) ** 2).sum(axis=1).mean() / (mean**2).sum()


def test_the_ratio_is_the_textbook_one():
    gradients = np.array([[3.0, 0.0], [1.0, 2.0], [2.0, 1.0]])  # g_m = (2, 1); squares 2, 2, 0: 4/3 over 5
    assert ratio_by_definition(gradients) == pytest.approx(4 / 15)
    part, parts = 4, 3
    q, gb = part * (gradients**2).sum(), (gradients.mean(axis=0) ** 2).sum()
    s, g2 = estimate_noise(q, gb, num_examples=part * parts, num_parts=parts)
    observation = Observation(batch_size=12, noise_s=s, noise_g2=g2, noise_parts=parts)
    state = after(noise_driven(estimator="ratio", per="step", every=2), [observation])[1]
    assert state["mean"] == pytest.approx(4 / 15)


@pytest.mark.parametrize(
    ("s", "size"),
    [
        (64.0, 64),  # noise scale 64, batch 64: ratio 3 · 64 / 128 = 1.5, in the middle
        (64.0 * 3, 128),  # 3 · 192 / 256 = 2.25, above 3 / (1 + 1/√2) = 1.757
        (64.0 / 3, 32),  # 3 · 21.3 / 85.3 = 0.75, below 3 / (1 + √2) = 1.243
    ],
)
def test_the_ratio_without_limits_aims_at_the_target(s, size):
    observations = steady(s, 1.0, num=1, noise_parts=4, epoch=1)
    assert after(noise_driven(estimator="ratio"), observations)[0] == size


def test_the_limits_of_the_ratio_can_be_given():
    observations = steady(64.0, 1.0, num=1, noise_parts=4, epoch=1)  # ratio 1.5
    assert after(noise_driven(estimator="ratio", high=1.4), observations)[0] == 128
    assert after(noise_driven(estimator="ratio", low=1.6), observations)[0] == 32
    assert after(noise_driven(estimator="ratio", low=1.4, high=1.6), observations)[0] == 64
    assert after(noise_driven(estimator="ratio", low=1.6, high=1.7, down=0.25), observations)[0] == 16


def test_the_ratio_of_an_epoch_is_gathered_over_its_updates():
    low, high = ([Observation(epoch=0, batch_size=64, noise_s=s, noise_g2=1.0, noise_parts=2)] for s in (0.0, 640.0))
    last = [Observation(epoch=1, batch_size=64, noise_s=640.0, noise_g2=1.0, noise_parts=2)]
    # Ratios 0, 10/11 and 10/11 average to 0.606, above 1 / (1 + 1/√2) = 0.586; two of 0 and one would not.
    assert after(noise_driven(estimator="ratio"), low + high + last)[0] == 128
    assert after(noise_driven(estimator="ratio"), low + low + last)[0] == 32


def test_the_ratio_does_not_swing_at_a_fixed_noise_scale():
    policy, size, sizes = noise_driven(estimator="ratio", per="step"), 16, []
    for _ in range(12):
        wanted, _ = policy.update(
            policy.init(), Observation(batch_size=size, noise_s=300.0, noise_g2=1.0, noise_parts=8)
        )
        size = round(wanted)
        sizes.append(size)
    assert sizes == [32, 64, 128, 256] + [256] * 8  # the power of two next to 300, in factors


@pytest.mark.parametrize("s", [math.nan, math.inf, -math.inf, 1e300, -1.0])
@pytest.mark.parametrize("g2", [math.nan, math.inf, 1e300, 0.0, -1.0, 1e-320])
def test_noise_that_makes_no_sense_holds(s, g2):
    size, state = after(noise_driven(), steady(s, g2))
    assert size == 64
    json.dumps(state, allow_nan=False)


@given(st.lists(st.tuples(st.floats(), st.floats(), st.integers(1, 10**9)), max_size=20))
def test_any_noise_leaves_a_size_and_a_state_that_can_be_saved(updates):
    for policy in (noise_driven(), noise_driven(estimator="ratio", per="step")):
        state = policy.init()
        for s, g2, batch_size in updates:
            seen = Observation(batch_size=batch_size, noise_s=s, noise_g2=g2, noise_parts=4)
            size, state = policy.update(state, seen)
            assert math.isfinite(size)
            assert size > 0
            state = json.loads(json.dumps(state, allow_nan=False))


@pytest.mark.parametrize("estimator", ["unbiased", "ratio"])
def test_one_example_alone_asks_for_two(estimator):
    policy = noise_driven(estimator=estimator)
    assert policy.update(policy.init(), Observation(batch_size=1, size=1, epoch=1))[0] == 2
    # The last batch of an epoch may have one example too; that says nothing.
    assert policy.update(policy.init(), Observation(batch_size=1, size=64, epoch=1))[0] == 64


def test_what_is_missing_is_named():
    for policy, figures, name in [
        (noise_driven(), {"batch_size": 8}, "noise_s"),
        (noise_driven(), {"size": 8, "noise_s": 1.0, "noise_g2": 1.0}, "batch_size"),
        (noise_driven(estimator="ratio"), {"batch_size": 8, "noise_s": 1.0, "noise_g2": 1.0}, "noise_parts"),
    ]:
        with pytest.raises(MissingSignalError, match=f"noise_driven needs {name}"):
            policy.update(policy.init(), Observation(**figures))


def test_it_explains_itself():
    policy = noise_driven(2.0)
    _, state = after(policy, steady(90.0, 0.5))
    assert policy.explain(state, steady(90.0, 0.5)[0]) == "noise scale 180 over 11 updates, target 2: 360"
    ratio = noise_driven(estimator="ratio", high=1.0, low=0.5)
    words = ratio.explain(ratio.init(), steady(64.0, 1.0, noise_parts=4, epoch=1)[0])
    assert words == f"noise ratio 1.5 over the epoch of 4 parts (low 0.5, high 1): 64 {TIMES} 2 = 128"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"target": 0}, "target must be a number above 0, got 0"),
        ({"estimator": "biased"}, "estimator must be one of 'unbiased', 'ratio', got 'biased'"),
        ({"horizon": 0}, r"horizon must be a number above 0 and at most 1e\+12, got 0"),
        ({"horizon": math.inf}, "horizon must be a number above 0 .*, got inf"),
        ({"num_examples": 0}, "num_examples must be a whole number of 1 or more, got 0"),
        ({"high": 1.0}, "high=1.0 belongs to estimator='ratio'"),
        ({"estimator": "ratio", "horizon": 10}, "horizon=10 belongs to estimator='unbiased'"),
        ({"estimator": "ratio", "low": 2, "high": 1}, "low must be below high, got low=2.0, high=1.0"),
        ({"estimator": "ratio", "high": -1}, "high must be a number of 0 or more, got -1"),
        ({"estimator": "ratio", "up": 0.5}, "got up=0.5"),
    ],
)
def test_nonsense_is_refused_when_the_policy_is_made(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        noise_driven(**arguments)


def noisy(controller, num, epoch=0, **figures):
    """Observe updates of noise scale 90 / 0.5 = 180; return the sizes."""
    usual = {"batch_size": 64, "noise_s": 90.0, "noise_g2": 0.5, "noise_parts": 4}
    return [controller.observe(epoch=epoch, **{**usual, **figures}) for _ in range(num)]


def control(policy):
    return BatchSizeController(policy, min_size=1, max_size=4096, initial=64)


def test_the_noise_scale_per_epoch_decides_at_the_end_of_an_epoch():
    controller = control(noise_driven(per="epoch"))
    assert set(noisy(controller, 20)) == {64}
    assert controller.explain() == "gathering the noise of the epoch: holds 64"
    assert controller.observe(epoch=1) == 180
    assert set(noisy(controller, 20, epoch=1, noise_s=900.0)) == {180}


def test_the_noise_scale_every_few_steps():
    controller = control(noise_driven(per="step", every=10))
    assert noisy(controller, 20) == [64] * 9 + [180] * 11
    assert noise_driven(per="step") == noise_driven()


@pytest.mark.parametrize(
    "policy", [noise_driven(), noise_driven(per="epoch"), noise_driven(estimator="ratio")], ids=repr
)
def test_updates_between_two_measurements_hold_the_size(policy):
    controller = control(policy)
    with pytest.raises(MissingSignalError, match="noise_driven needs noise_s"):
        controller.observe(epoch=0, batch_size=64)
    noisy(controller, 1)
    assert controller.observe(epoch=0, batch_size=64) == 64
    assert "no" in controller.explain()
    controller.observe(epoch=1)


def test_a_ratio_is_of_so_many_parts_as_were_asked_for():
    # S = 90, B = 64, |g_m|² = 0.5 + 90 / 64 = 1.906; 4 parts: 3 · 1.406 / 1.906 = 2.213; 8 parts: 7 · … = 5.164
    for num_parts, figures, size in [(None, 8, 128), (4, 8, 64), (4, 4, 64), (8, 8, 128)]:
        controller = control(noise_driven(estimator="ratio", high=3, num_parts=num_parts, per="step"))
        assert noisy(controller, 1, noise_parts=figures) == [size]
    controller = control(noise_driven(estimator="ratio", high=3, num_parts=4, per="step"))
    noisy(controller, 1, noise_parts=8)
    assert controller.explain() == "noise of 8 parts, not of 4, is left out: holds 64"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_parts": 4}, "num_parts=4 belongs to estimator='ratio'"),
        ({"num_parts": 1, "estimator": "ratio"}, "num_parts must be a whole number of 2 or more, got 1"),
        ({"per": "examples"}, "noise_driven per examples needs every"),
    ],
)
def test_parts_and_periods_of_nonsense_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        noise_driven(**options)


@pytest.mark.parametrize("estimator", ["unbiased", "ratio"])
def test_a_unit_without_a_name_is_refused(estimator):
    with pytest.raises(ArgumentError, match="per must be one of"):
        noise_driven(estimator=estimator, per="")


def at_scale(controller, batch_size, noise_parts, **figures):
    """Observe an update of a gradient whose noise scale is 64."""
    controller.observe(batch_size=batch_size, noise_s=128.0, noise_g2=2.0, noise_parts=noise_parts, **figures)


@pytest.mark.parametrize("per", ["epoch", "step"])
@pytest.mark.parametrize("last_parts", [2, 8])
def test_the_small_last_batch_of_an_epoch_does_not_change_the_size(per, last_parts):
    controller = BatchSizeController(noise_driven(estimator="ratio", per=per), min_size=1, max_size=4096, initial=64)
    for epoch in range(3):
        for _ in range(9):
            at_scale(controller, 64, 8, epoch=epoch)
        at_scale(controller, 6, last_parts, epoch=epoch + 1)
    assert controller.num_changes == 0


def test_ratios_of_other_numbers_of_parts_are_compared_as_of_those_before():
    """7 · 64 / 128 = 3.5 of 8 parts and 3 · 64 / 128 = 1.5 of 4: both are half of what they tend to."""
    policy = noise_driven(estimator="ratio", per="step", every=2)
    seen = [*steady(128.0, 2.0, num=1, noise_parts=8), *steady(128.0, 2.0, num=1, noise_parts=4)]
    size, state = after(policy, seen[:1])
    assert (state["mean"], state["num_parts"]) == (pytest.approx(3.5), 8)
    assert policy.explain(state, seen[1]).startswith("noise ratio 3.5 over 2 steps of 8 parts")
    assert policy.update(state, seen[1])[0] == size == 64


def test_noise_of_a_single_part_leaves_a_state_that_can_be_loaded():
    policy = noise_driven(estimator="ratio", per="step")
    size, state = after(policy, steady(128.0, 2.0, num=1, noise_parts=1))
    policy.check_state(json.loads(json.dumps(state)))
    assert size == 64


def test_a_state_whose_size_that_ran_is_none_is_refused():
    policy = noise_driven(estimator="ratio")
    with pytest.raises(ArgumentError, match="policy_state\\['followed'\\] must be"):
        policy.check_state({**policy.init(), "followed": 0})


@pytest.mark.parametrize("every", [1, 3])
def test_batches_formed_before_the_size_changed_do_not_change_it_again(every):
    """A loader six batches ahead, at a noise scale of 64: the size goes there, and stays."""
    policy = noise_driven(estimator="ratio", per="step", every=every)
    controller, ahead = BatchSizeController(policy, min_size=1, max_size=4096, initial=16), [16] * 6
    for _ in range(60):
        ahead.append(controller.size)
        at_scale(controller, ahead.pop(0), 8)
    assert [decision.new for decision in controller.history] == [32, 64]
