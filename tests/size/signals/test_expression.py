"""track: published rules as one line, averaged noise, and expressions that cannot be computed."""

import json
import math

import pytest

from batchwright.errors import ArgumentError, MissingSignalError
from batchwright.size.observation import Observation
from batchwright.size.signals import track


def after(policy, observations):
    state, size = policy.init(), None
    for observation in observations:
        size, state = policy.update(state, observation)
        state = json.loads(json.dumps(state, allow_nan=False))
    return size


def steady(num=10, **figures):
    return [Observation(**{"batch_size": 64, "noise_s": 90.0, "noise_g2": 0.5, **figures})] * num


def test_the_published_rules_are_one_line():
    # S = 90, G2 = 0.5: a noise scale of 180.
    assert after(track(lambda o: o.noise_s / o.noise_g2 / 0.5**2), steady()) == pytest.approx(720)
    assert after(track(lambda o: 0.1 * (1 + o.noise_s / o.noise_g2)), steady()) == pytest.approx(18.1)
    assert after(track(lambda o: o.lr * o.noise_s / o.loss), steady(lr=0.5, loss=1.5)) == pytest.approx(30)


def test_the_expression_sees_averages():
    def scale(o):
        return o.noise_s / o.noise_g2

    crossed = steady(1, noise_s=50.0, noise_g2=1.5) + steady(1, noise_s=150.0, noise_g2=0.5)
    assert after(track(scale, horizon=1e9), crossed * 50) == pytest.approx(100, rel=1e-4)
    assert after(track(scale, horizon=None), crossed) == pytest.approx(300)


def test_an_unreliable_quotient_holds():
    assert after(track(lambda o: o.noise_s / o.noise_g2), steady(7)) == 64
    assert after(track(lambda o: o.need("noise_s") / o.need("noise_g2")), steady(7)) == 64
    swinging = steady(1, noise_g2=5.0) + steady(1, noise_g2=-4.9)
    assert after(track(lambda o: o.noise_s / o.noise_g2), swinging * 20) == 64


def test_the_noise_alone_does_not_wait_for_the_quotient():
    assert after(track(lambda o: 0.5 * o.noise_s), steady(1)) == pytest.approx(45)
    assert after(track(lambda o: 100 + o.noise_s), steady(1, noise_s=-1.0)) == 64


def test_an_expression_without_noise_does_not_wait_for_it():
    assert after(track(lambda o: 32 + o.epoch), steady(1, epoch=3)) == 35


def test_raw_values_hold_where_the_gradient_is_not_above_zero():
    raw = track(lambda o: o.noise_s / o.noise_g2, horizon=None)
    assert after(raw, steady(1, noise_g2=0.0)) == 64
    assert after(raw, steady(1, noise_g2=-0.5)) == 64
    assert after(track(lambda o: 100 + o.noise_g2, horizon=None), steady(1, noise_g2=-0.5)) == 64


@pytest.mark.parametrize(
    "expression",
    [
        lambda o: o.loss / 0,
        lambda o: math.exp(1e9),
        lambda o: math.nan,
        lambda o: math.inf,
        lambda o: -3.0,
        lambda o: 0,
        lambda o: 10**400,
    ],
)
def test_a_value_that_is_no_size_holds(expression):
    assert after(track(expression), steady(1, loss=1.0)) == 64


def test_the_root_of_a_negative_estimate_holds_and_other_errors_are_shown():
    assert after(track(lambda o: math.sqrt(o.noise_g2)), steady(1, noise_g2=-1.0)) == 64
    with pytest.raises(ValueError, match=r"expected a|math domain"):
        after(track(lambda o: math.sqrt(-o.loss)), steady(1, loss=1.0))


def test_figures_that_are_missing_are_named():
    with pytest.raises(MissingSignalError, match=r"track reads loss, lr, not observed; loss: .*; lr: "):
        after(track(lambda o: [o.lr, o.loss] and o.lr * o.loss), steady(1))
    with pytest.raises(MissingSignalError, match=r"track reads noise_s, noise_g2.*measure_noise=True"):
        after(track(lambda o: [o.noise_g2] and o.noise_s / 2), [Observation(batch_size=8)])
    with pytest.raises(MissingSignalError, match="track needs loss"):
        after(track(lambda o: 64, needs=["loss"]), steady(1))
    with pytest.raises(MissingSignalError, match="track needs loss"):
        after(track(lambda o: o.need("loss")), steady(1))


def test_a_mistake_in_the_expression_is_shown_as_it_is():
    with pytest.raises(TypeError, match="unsupported operand"):
        after(track(lambda o: o.loss + "1"), steady(1, loss=1.0))
    with pytest.raises(AttributeError, match="noise_scale"):
        after(track(lambda o: o.noise_scale), steady(1))
    with pytest.raises(ArgumentError, match="must return a number of examples, got None"):
        after(track(lambda o: None), steady(1))


def test_one_example_alone_asks_for_two():
    policy = track(lambda o: o.noise_s / o.noise_g2)
    assert policy.update(policy.init(), Observation(batch_size=1))[0] == 2
    assert policy.update(policy.init(), Observation(batch_size=1, size=64))[0] == 64


def test_it_explains_itself():
    def scale(o):
        return o.noise_s / o.noise_g2

    policy = track(scale)
    assert policy.explain(policy.init(), steady()[0]) == (
        "the noise that the expression reads is not reliable: holds 64"
    )
    fixed = track(lambda o: 48)
    assert fixed.explain(fixed.init(), steady()[0]) == "<lambda>: 48"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"expression": 64}, "track needs a function of an observation, got 64"),
        ({"needs": ["noise"]}, "needs must be names of figures, .*, got 'noise'"),
        ({"needs": "speed"}, "got 'speed'"),
        ({"horizon": -1}, "horizon must be a number above 0"),
    ],
)
def test_nonsense_is_refused_when_the_policy_is_made(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        track(**{"expression": lambda o: 64, **arguments})
