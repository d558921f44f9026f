"""loss_driven: the three measures by hand, periods, responses, and what holds the size."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import ArgumentError, MissingSignalError
from batchwright.size.controller import BatchSizeController
from batchwright.size.observation import Observation
from batchwright.size.policy import TIMES
from batchwright.size.signals import loss_driven
from batchwright.size.signals.loss import Difference, Variance

NAN, INF = math.nan, math.inf


def sizes_of(policy, losses, size=64):
    """Return the size after each epoch, observed once an epoch."""
    state, sizes = policy.init(), []
    for epoch, loss in enumerate(losses, start=1):
        wanted, state = policy.update(state, Observation(epoch=epoch, loss=loss, size=size))
        size = round(wanted)
        sizes.append(size)
    return sizes


def test_a_falling_loss_doubles_and_a_rising_loss_halves():
    # Δ = 1.0 − 2.0 < 0, then 1.5 − 1.0 > 0, then 0.
    assert sizes_of(loss_driven(), [2.0, 1.0, 1.5, 1.5]) == [64, 128, 64, 64]


def test_a_change_within_the_tolerance_holds():
    # 2.0 → 1.9 is 5 % of 2.0, just within; 1.9 → 1.8 is 5.26 % of 1.9.
    assert sizes_of(loss_driven(tolerance=0.0500001), [2.0, 1.9, 1.8]) == [64, 64, 128]


def test_a_change_of_just_the_tolerance_holds():
    assert sizes_of(loss_driven(tolerance=0.25, relative=False), [2.0, 1.75, 2.0]) == [64, 64, 64]


def test_an_absolute_tolerance_is_in_units_of_the_loss():
    # Both steps are 0.25: 12.5 % of 2, 14 % of 1.75.
    assert sizes_of(loss_driven(tolerance=0.2, relative=False), [2.0, 1.75, 1.5]) == [64, 128, 256]
    assert sizes_of(loss_driven(tolerance=0.2, relative=True), [2.0, 1.75, 1.5]) == [64, 64, 64]


def test_the_moving_average_begins_with_the_first_loss_and_smooths_the_rest():
    # alpha 0.5: averages 4, 3 (falls), 3.5 (rises), and a loss equal to the average leaves it.
    assert sizes_of(loss_driven("ema", alpha=0.5), [4.0, 2.0, 4.0, 3.5]) == [64, 128, 64, 64]


def test_the_moving_average_is_the_formula():
    verdict, past = Difference(0.0, alpha=0.1).take([2.0], 1.0, str)
    # 0.1·1 + 0.9·2 = 1.9, a fall of 5 % from 2.
    assert past == [pytest.approx(1.9)]
    assert verdict.variation == pytest.approx(0.05)


def test_the_variance_waits_for_a_full_window_and_then_slides():
    # Windows of 3: {1, 1, 1} has variance 0 and grows; {1, 1, 4}: mean 2, squares 1 + 1 + 4 over 3 = 2, over 2² = 0.5.
    assert sizes_of(loss_driven("variance", window=3), [1.0, 1.0, 1.0, 4.0]) == [64, 64, 128, 64]
    # {9, 1, 1} fluctuates; once 9 has left the window the loss is steady.
    assert sizes_of(loss_driven("variance", window=3), [9.0, 1.0, 1.0, 1.0]) == [64, 64, 32, 64]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 0.5),  # (1 + 1 + 4) / 3 = 2, over the squared mean 4
        ({"relative": False}, 2.0),
        ({"divide": False}, 1.5),  # 6 / 4
        ({"relative": False, "divide": False}, 6.0),
        # The line through 1, 1, 4 has slope 1.5 and residuals 0.5, −1, 0.5: 1.5 / 3 / 4.
        ({"detrend": True}, 0.125),
    ],
)
def test_the_variance_in_every_reading(options, expected):
    variance, _ = Variance(3, 0.0, 1.0, **options)._measure([1.0, 1.0, 4.0])
    assert variance == pytest.approx(expected)


def test_a_variance_between_the_limits_holds():
    # {0.95, 1.05}: mean 1, variance 0.0025, between 1e-4 and 1e-2.
    assert sizes_of(loss_driven("variance", window=2), [0.95, 1.05]) == [64, 64]


def test_a_steady_fall_is_fluctuation_unless_the_trend_is_taken_out():
    fall = [3.0, 2.0, 1.0]  # variance 2/3 of a squared mean of 4
    assert sizes_of(loss_driven("variance", window=3), fall) == [64, 64, 32]
    assert sizes_of(loss_driven("variance", window=3, detrend=True), fall) == [64, 64, 128]
    assert sizes_of(loss_driven("variance", window=3, detrend=True), fall[::-1]) == [64, 64, 32]


def test_around_a_line_the_tolerance_is_of_one_period():
    # The line falls by 1 a period, half of the mean 2.
    assert sizes_of(loss_driven("variance", window=3, detrend=True, tolerance=0.51), [3.0, 2.0, 1.0])[-1] == 64
    assert sizes_of(loss_driven("variance", window=3, detrend=True, tolerance=0.49), [3.0, 2.0, 1.0])[-1] == 128


def test_linear_mode_adds_and_subtracts_examples():
    assert sizes_of(loss_driven(mode="linear", up=16, down=4), [2.0, 1.0, 3.0]) == [64, 80, 76]
    assert sizes_of(loss_driven(mode="linear"), [2.0, 1.0, 3.0]) == [64, 72, 64]


def test_no_step_goes_below_one_example():
    assert sizes_of(loss_driven(mode="linear", up=1, down=100), [1.0, 2.0]) == [64, 1]
    assert sizes_of(loss_driven(), [1.0, 2.0], size=1) == [1, 1]


def test_a_gain_makes_the_step_follow_the_variation():
    policy = loss_driven(gain=2.0)
    state = {"period": policy.init()["period"], "past": [1.0]}
    # A fall of 10 % at gain 2: 100 × e^0.2. A fall of 90 % would be e^1.8, above up = 2.
    assert policy.update(state, Observation(epoch=1, loss=0.9, size=100))[0] == pytest.approx(100 * math.exp(0.2))
    assert policy.update(state, Observation(epoch=1, loss=0.1, size=100))[0] == pytest.approx(200)
    assert policy.update(state, Observation(epoch=1, loss=9e9, size=100))[0] == pytest.approx(50)


def test_a_gain_in_linear_mode_counts_examples():
    # 300 examples for a fall of 1: a fall of 2 % adds 6; the rise of 100 % takes away no more than down.
    assert sizes_of(loss_driven(mode="linear", gain=300, up=16, down=16), [1.0, 0.98, 1.96]) == [64, 70, 54]


def test_the_other_direction_grows_where_the_loss_rises():
    assert sizes_of(loss_driven(direction=-1), [2.0, 1.0, 3.0]) == [64, 32, 64]


def test_observed_every_update_the_mean_of_the_epoch_decides():
    controller = BatchSizeController(loss_driven(), min_size=1, max_size=1000, initial=8)
    # Epoch 0: (8·3 + 8·3 + 4·1) / 20 = 2.6. The update after which the epoch is complete belongs to it.
    for epoch, batch_size, loss in [(0, 8, 3.0), (0, 8, 3.0), (1, 4, 1.0), (1, 8, 0.5), (1, 8, 9.0)]:
        assert controller.observe(epoch=epoch, batch_size=batch_size, loss=loss) == 8
    assert controller._state["past"] == [pytest.approx(2.6)]
    # Epoch 1: (0.5 + 9 + 1) / 3 = 3.5, above 2.6.
    assert controller.observe(epoch=2, batch_size=8, loss=1.0) == 4


def test_an_epoch_can_be_ended_without_a_loss():
    controller = BatchSizeController(loss_driven(), min_size=1, max_size=1000, initial=8)
    for epoch, loss in [(0, 2.0), (1, 1.0)]:
        controller.observe(epoch=epoch, batch_size=8, loss=loss)
        size = controller.observe(epoch=epoch + 1)
    assert size == 16
    assert controller.observe(epoch=3) == 16
    assert controller.explain() == "no loss since the last period: holds 16"


def test_examples_make_windows_of_equal_size():
    policy, sizes = loss_driven(per="examples", every=100), []
    state = policy.init()
    for loss in [4.0, 2.0, 1.0, 1.0]:  # two batches of 50 a window: means 3 and 1
        size, state = policy.update(state, Observation(batch_size=50, loss=loss))
        sizes.append(size)
    assert sizes == [50, 50, 50, 100]


def test_every_update_can_decide():
    policy = loss_driven(per="step")
    _, state = policy.update(policy.init(), Observation(batch_size=10, loss=2.0))
    assert policy.update(state, Observation(batch_size=10, loss=1.0))[0] == 20


def test_several_epochs_make_a_period():
    # Means of two epochs: 3 and 2.
    assert sizes_of(loss_driven(every=2), [4.0, 2.0, 3.0, 1.0]) == [64, 64, 64, 128]


def test_an_epoch_count_that_begins_again_is_followed():
    controller = BatchSizeController(loss_driven(), min_size=1, max_size=1000, initial=8)
    # The second run's epoch 0 has a mean of (3 + 1) / 2, below 3.
    sizes = [controller.observe(epoch=epoch, loss=loss) for epoch, loss in [(1, 4.0), (2, 3.0), (0, 3.0), (1, 1.0)]]
    assert sizes == [8, 16, 16, 32]


@pytest.mark.parametrize("measure", ["difference", "ema", "variance"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_loss_that_is_not_finite_holds_and_is_forgotten(measure, bad):
    policy = loss_driven(measure, window=2)
    with_bad = sizes_of(policy, [2.0, bad, 2.0, 1.0])
    without = sizes_of(policy, [2.0, 2.0, 1.0])
    assert with_bad[1] == with_bad[0]
    assert with_bad[2:] == without[1:]


@pytest.mark.parametrize("measure", ["difference", "ema", "variance"])
@pytest.mark.parametrize("options", [{}, {"relative": False}, {"mode": "linear"}])
def test_huge_losses_do_not_overflow(measure, options):
    policy = loss_driven(measure, window=2, **options)
    state = policy.init()
    for epoch, loss in enumerate([1e308, -1e308, 1e308, 0.0, 5e-324, -1e308], start=1):
        size, state = policy.update(state, Observation(epoch=epoch, loss=loss, size=64))
        assert math.isfinite(size)
        assert math.isfinite(sum(json.loads(json.dumps(state, allow_nan=False))["past"]) / 1e9)


def test_the_mean_of_huge_losses_of_both_signs_is_finite():
    policy = loss_driven()
    state = policy.init()
    for loss in (1.7e308, -1.7e308):
        _, state = policy.update(state, Observation(epoch=0, loss=loss, batch_size=8))
    assert state["period"]["mean"] == 0.0


def test_the_average_of_huge_losses_of_both_signs_is_finite():
    _, past = Difference(0.0, alpha=0.1).take([1.7e308], -1.7e308, str)
    assert past == [pytest.approx(0.8 * 1.7e308)]  # 0.9 · 1.7e308 − 0.1 · 1.7e308


@pytest.mark.parametrize("measure", ["difference", "ema"])
def test_a_constant_loss_holds_for_ever(measure):
    # 0.1 · 0.3 + 0.9 · 0.3 is not 0.3 in floating point; that must not look like a change.
    assert set(sizes_of(loss_driven(measure), [0.3] * 50)) == {64}


def test_the_same_losses_in_another_order_are_no_change():
    controller = BatchSizeController(loss_driven(), min_size=1, max_size=1000, initial=8)
    # In floating point the means come out as 0.44 and 0.43999999999999995.
    for epoch, losses in enumerate([[0.1, 0.7, 0.2, 0.9, 0.3], [0.1, 0.2, 0.7, 0.3, 0.9]]):
        for loss in losses:
            controller.observe(epoch=epoch, batch_size=3, loss=loss)
        assert controller.observe(epoch=epoch + 1) == 8


@given(st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=12), st.sampled_from([1, -1]))
def test_any_losses_keep_the_size_within_one_step(losses, direction):
    for measure in ("difference", "ema", "variance"):
        policy = loss_driven(measure, window=3, direction=direction)
        state = policy.init()
        for epoch, loss in enumerate(losses, start=1):
            size, state = policy.update(state, Observation(epoch=epoch, loss=loss, size=64))
            assert size in (32.0, 64.0, 128.0)
            json.dumps(state, allow_nan=False)


def test_it_explains_what_it_saw_and_what_it_did():
    policy = loss_driven()
    state = {"period": policy.init()["period"], "past": [1.0]}
    words = policy.explain(state, Observation(epoch=1, loss=0.968, size=64))
    assert words == f"loss fell 3.2 % over the epoch (tolerance 0 %): 64 {TIMES} 2 = 128"
    words = policy.explain(state, Observation(epoch=0, loss=1.0, size=64))
    assert words == "gathering the loss of the epoch: holds 64"
    words = policy.explain(policy.init(), Observation(epoch=1, loss=NAN, size=64))
    assert words == "loss is nan and left out of the epoch: holds 64"


def test_it_explains_a_variance():
    policy = loss_driven("variance", window=2)
    state = {"period": policy.init()["period"], "past": [1.0]}
    words = policy.explain(state, Observation(epoch=1, loss=3.0, size=64))
    # Mean 2, variance 1, over 4.
    assert words == f"variance of the loss over 2 epochs is 0.25, above 0.01: 64 {TIMES} 0.5 = 32"


def test_what_is_missing_is_named():
    with pytest.raises(MissingSignalError, match="loss_driven needs loss"):
        loss_driven().update(loss_driven().init(), Observation(epoch=1, size=8))
    with pytest.raises(MissingSignalError, match="loss_driven needs epoch"):
        loss_driven().update(loss_driven().init(), Observation(loss=1.0, size=8))
    policy = loss_driven(per="examples", every=10)
    with pytest.raises(MissingSignalError, match="loss_driven needs batch_size"):
        policy.update(policy.init(), Observation(loss=1.0, size=8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"measure": "median"}, "measure must be one of 'difference', 'ema', 'variance', got 'median'"),
        ({"mode": "cubic"}, "mode must be one of 'exponential', 'linear', got 'cubic'"),
        ({"per": "batch"}, "per must be one of 'epoch', 'step', 'examples', 'tokens', got 'batch'"),
        ({"per": "examples"}, "needs every"),
        ({"every": 0}, "every must be a whole number of 1 or more, got 0"),
        ({"alpha": 1.0}, "alpha must be a number above 0 and below 1, got 1.0"),
        ({"measure": "ema", "alpha": 0.0}, "alpha must be a number above 0 and below 1, got 0.0"),
        ({"window": 1}, "window must be a whole number of 2 or more, got 1"),
        ({"measure": "variance", "window": 2, "detrend": True}, "window must be a whole number of 3 or more, got 2"),
        ({"tolerance": -0.1}, "tolerance must be a number of 0 or more, got -0.1"),
        ({"tolerance": NAN}, "tolerance must be a number of 0 or more, got nan"),
        ({"measure": "variance", "tolerance": 0.1}, "a variance has no sign"),
        ({"steady": 0.1, "fluctuating": 0.1}, "steady must be below fluctuating"),
        ({"up": 0.5}, "takes factors, up of 1 or more .* got up=0.5, down=0.5"),
        ({"down": 0.0}, "got up=2.0, down=0.0"),
        ({"down": 2.0}, "got up=2.0, down=2.0"),
        ({"up": 1, "down": 1}, "never change the size"),
        ({"mode": "linear", "up": -1}, "takes numbers of examples, got up=-1"),
        ({"mode": "linear", "up": 0, "down": 0}, "never change the size"),
        ({"up": INF}, "up must be a number, got inf"),
        ({"gain": 0}, "gain must be a number above 0, got 0"),
        ({"measure": "variance", "gain": 0}, "gain must be a number above 0, got 0"),
        ({"direction": 0}, "direction must be 1 or -1, got 0"),
        ({"relative": "yes"}, "relative must be True or False, got 'yes'"),
    ],
)
def test_nonsense_is_refused_when_the_policy_is_made(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        loss_driven(**arguments)


def follow_losses(policy, losses):
    controller = BatchSizeController(policy, min_size=1, max_size=4096, initial=64)
    return [controller.observe(epoch=epoch, loss=loss) for epoch, loss in enumerate(losses, start=1)], controller


# Losses 1.2, 1.0, 0.8 have the mean 1 and the variance (0.04 + 0 + 0.04) / 3 = 0.02667.
FALLING, RISING = [1.2, 1.0, 0.8], [0.8, 1.0, 1.2]


@pytest.mark.parametrize(
    ("losses", "options", "size"),
    [
        (FALLING, {"gain": 300, "mode": "linear"}, 72),  # 64 + 300 · 0.02667
        (FALLING, {"gain": 150, "mode": "linear"}, 68),
        (RISING, {"gain": 300, "mode": "linear"}, 56),
        (FALLING, {"gain": 10}, 84),  # 64 · exp(0.2667) = 83.56
        (RISING, {"gain": 10}, 49),  # 64 · exp(−0.2667) = 49.02
        (FALLING, {"gain": 10, "divide": False}, 128),  # 64 · exp(0.8) = 142, at most twice
        (FALLING, {"gain": 5, "divide": False}, 95),  # 64 · exp(0.4) = 95.48
        ([2.4, 2.0, 1.6], {"gain": 10}, 84),  # relative: the same shares
        ([2.4, 2.0, 1.6], {"gain": 10, "relative": False}, 128),  # 0.10667: 64 · exp(1.0667), at most twice
        (FALLING, {"gain": 10, "fluctuating": 0.02}, 49),  # it fluctuates: down, although it falls
        (FALLING, {"gain": 10, "direction": -1}, 49),
        (FALLING, {"gain": 10, "tolerance": 0.3}, 64),  # a fall of 0.2 per epoch does not count
        ([1.0, 1.0, 1.0], {"gain": 10}, 64),
    ],
)
def test_a_variance_with_gain_by_hand(losses, options, size):
    policy = loss_driven("variance", window=3, **{"fluctuating": 1.0, **options})
    assert follow_losses(policy, losses)[0] == [64, 64, size]


def test_a_variance_with_gain_grows_with_the_variance():
    found = []
    for spread in (0.05, 0.1, 0.2):
        policy = loss_driven("variance", window=2, gain=1, fluctuating=1.0)
        state = policy.update(policy.init(), Observation(epoch=1, loss=1 + spread, size=1000))[1]
        wanted, _ = policy.update(state, Observation(epoch=2, loss=1 - spread, size=1000))
        found.append(math.log(wanted / 1000))
    # The variance is the square of the spread.
    assert found == pytest.approx([0.0025, 0.01, 0.04])


def test_a_variance_with_gain_explains_itself():
    _, controller = follow_losses(loss_driven("variance", window=3, gain=10, fluctuating=1.0), FALLING)
    assert controller.history[-1].reason == (
        "variance of the loss over 3 epochs is 0.02667 while it fell 20 % per period (tolerance 0 %): "
        f"64 {TIMES} 1.306 = 83.56"
    )
    _, controller = follow_losses(loss_driven("variance", window=3, gain=10), FALLING)
    assert controller.history[-1].reason.startswith("variance of the loss over 3 epochs is 0.02667, above 0.01: 64")
