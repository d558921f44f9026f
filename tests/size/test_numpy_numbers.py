"""NumPy's numbers are numbers: every option of every factory takes them, and nothing of them is left afterwards."""

import inspect
import json
from dataclasses import dataclass, fields, is_dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright import size
from batchwright.size.controller import BatchSizeController, describe
from batchwright.size.learning_rate import adascale, linear, none, sqrt
from batchwright.size.noise import NoiseAverage
from batchwright.size.policy import Transform

from .makers import NAMES, figures, halving, scale


@dataclass(frozen=True)
class Timer:
    """A time model with a text of its own."""

    def predict(self, shapes):
        return 0.1 + 0.001 * np.asarray(shapes)[:, 0]


def numbers(low, high, *, open_low=False, open_high=False):
    """Draw numbers that a float of 32 bits holds exactly, whole ones among them."""
    floats = st.floats(low, high, width=32, exclude_min=open_low, exclude_max=open_high, allow_subnormal=False)
    first, last = int(low) + 1, int(high) - open_high
    return floats | st.integers(first, last) if first <= last else floats


sizes, counts = numbers(1, 2048), st.integers(1, 1000)
factors, shares = numbers(1, 8, open_low=True), numbers(0, 1, open_low=True, open_high=True)
UNIT = {"per": st.sampled_from(["epoch", "step", "examples"]), "every": counts}
STEPS = {"up": factors, "down": shares}


def cooled(unit, pause):
    return size.cooldown(**{unit: pause})


# For each factory, ways to call it: the words and functions that stay, and the numbers that are drawn.
CALLS = {
    "constant": [(size.constant, {}, {"size": sizes})],
    "linear": [(size.linear, {}, {"start": sizes, "slope": numbers(-64, 64), **UNIT})],
    "exponential": [(size.exponential, {}, {"start": sizes, "factor": numbers(0, 4, open_low=True), **UNIT})],
    "milestones": [
        (lambda first, at, then, **unit: size.milestones({first * 0: first, at: then}, **unit), {}, {
            "first": counts, "at": counts, "then": sizes, **UNIT,
        })
    ],
    "warm_up": [
        (size.warm_up, {"mode": mode}, {"start": sizes, "end": sizes, "over": counts, **UNIT})
        for mode in ("linear", "geometric")
    ],
    "cyclic": [(size.cyclic, {"inner": size.constant(8)}, {"period": counts, **UNIT})],
    "from_lr": [
        (size.from_lr, {"schedule": halving}, {
            "start": sizes, "power": factors, "after": counts, "max_factor": factors, **UNIT,
        })
    ],
    "seesaw": [
        (lambda **options: size.seesaw(halving, **options)[0], {}, {
            "start": sizes, "after": counts, "max_factor": factors, **UNIT,
        })
    ],
    "clamp": [(lambda low, more: size.clamp(low, low + more), {}, {"low": counts, "more": counts})],
    "multiple_of": [(size.multiple_of, {}, {"number": counts})],
    "smooth": [(size.smooth, {}, {"keep": shares})],
    "rate_limit": [(size.rate_limit, {}, {"factor": factors})],
    "hysteresis": [(size.hysteresis, {}, {"fraction": shares})],
    "cooldown": [(cooled, {"unit": unit}, {"pause": counts}) for unit in ("examples", "steps", "epochs", "tokens")],
    "switch": [
        (lambda at, **unit: size.switch({at * 0: size.constant(8), at: size.constant(16)}, **unit), {}, {
            "at": counts, **UNIT,
        })
    ],
    "loss_driven": [
        (size.loss_driven, {"measure": measure, "detrend": measure == "variance"}, {
            "alpha": shares, "window": st.integers(3, 9), "tolerance": shares, "steady": shares,
            "fluctuating": factors, "direction": st.sampled_from([1, -1]), **STEPS, **UNIT, **gain,
        })
        for measure in ("difference", "ema", "variance") for gain in ({}, {"gain": factors})
    ] + [(size.loss_driven, {"mode": "linear"}, {"up": factors, "down": factors, "gain": factors})],
    "loss_below": [
        (size.loss_below, {"mode": mode}, {"threshold": numbers(-4, 4), "up": factors, **UNIT})
        for mode in ("linear", "exponential")
    ],
    "loss_settled": [
        (size.loss_settled, {}, {"tolerance": shares, "window": st.integers(2, 9), "up": factors, **UNIT})
    ],
    "speed_driven": [
        (size.speed_driven, {}, {"plateau": shares, "factor": factors, "patience": counts, **UNIT})
    ],
    "step_time": [
        (size.step_time, {}, {"target_ms": numbers(1, 500), "tolerance": shares, "max_factor": factors, **UNIT})
    ],
    "entropy_driven": [
        (size.entropy_driven, {}, {
            "num_classes": st.integers(2, 100), "smallest": numbers(1, 16), "largest": numbers(17, 512),
            "reference": factors, **UNIT,
        }),
        (size.entropy_driven, {"mode": "threshold"}, {
            "num_classes": st.integers(2, 100), "low": numbers(0.125, 0.25), "high": numbers(0.5, 0.75),
            **STEPS, **UNIT,
        }),
    ],
    "noise_driven": [
        (size.noise_driven, {}, {"target": factors, "horizon": numbers(64, 65536), "num_examples": counts, **UNIT}),
        (size.noise_driven, {"estimator": "ratio"}, {
            "target": factors, "low": shares, "high": factors, "num_parts": st.integers(2, 9), **STEPS, **UNIT,
        }),
    ],
    "memory_driven": [
        (size.memory_driven, {}, {
            "high": numbers(0.5, 1), "low": numbers(0.125, 0.25), "factor": factors, "patience": counts, **UNIT,
        })
    ],
    "goodput": [
        (size.goodput, {"time_model": Timer()}, {
            "length": counts, "base_size": st.integers(1, 64), "smallest": st.integers(1, 64),
            "largest": st.integers(65, 999), "num_candidates": st.integers(2, 99), "world_size": st.integers(1, 8),
            "max_items": counts, "horizon": numbers(64, 65536), "gain": numbers(1, 2),
        }),
        (size.goodput, {"unit": "tokens"}, {
            "base_size": st.integers(1, 64), "smallest": st.integers(1, 64), "largest": st.integers(65, 999),
            "num_candidates": st.integers(2, 99), "horizon": numbers(64, 65536), "gain": numbers(1, 2),
        }),
        (size.goodput, {"time_model": Timer()}, {"length": counts, "world_size": st.integers(1, 8)}),
        (size.goodput, {}, {"gain": numbers(1, 2)}),
    ],
    "measured": [(size.measured, {}, {"level": numbers(0.125, 0.375), "tolerance": numbers(0.125, 0.875)})],
    "track": [(size.track, {"expression": scale}, {"horizon": numbers(64, 65536)})],
    "Curriculum": [
        (lambda start, **options: size.Curriculum(range(100), **options).policy(start), {"shape": "sqrt"}, {
            "start": sizes, "start_fraction": shares, "full_at": factors,
        })
    ],
}  # fmt: skip
WITHOUT_NUMBERS = {
    "Decision",
    "Observation",
    "Policy",
    "Transform",
    "chain",
    "learning_rate",
    "momentum",
    "maximum",
    "minimum",
    "monotone",
}


def numpy_kinds(value):
    """Return NumPy's kinds that hold a number exactly."""
    kinds = (np.float64, np.float32, np.int64, np.int32) if isinstance(value, float) else (np.int64, np.int32)
    return [kind for kind in kinds if kind(value) == value and np.isfinite(kind(value))]


@st.composite
def calls(draw, name):
    """Draw a call of a factory with Python's numbers, and the same call with NumPy's."""
    make, fixed, drawn = draw(st.sampled_from(CALLS[name]))
    plain = {option: draw(values) for option, values in drawn.items()}
    other = {
        option: value if isinstance(value, str) else draw(st.sampled_from(numpy_kinds(value)))(value)
        for option, value in plain.items()
    }
    return make(**fixed, **plain), make(**fixed, **other)


def plain_values(settings):
    """Yield every value inside settings."""
    if is_dataclass(settings):
        settings = [getattr(settings, item.name) for item in fields(settings)]
    if isinstance(settings, (tuple, list)):
        for value in settings:
            yield from plain_values(value)
    else:
        yield settings


def run(policy, kind=None):
    """Return the state of a controller after some updates, as JSON; its own numbers may be NumPy's."""
    number = kind or int
    policy = size.chain(size.constant(64), policy) if isinstance(policy, Transform) else policy
    controller = BatchSizeController(policy, min_size=number(1), max_size=number(4096), initial=number(8))
    for step in range(12):
        controller.observe(**{
            name: value if kind is None else (np.float64(value) if isinstance(value, float) else kind(value))
            for name, value in {**figures(step), "batch_tokens": 600 + step}.items()
        })  # fmt: skip
    return json.dumps(controller.state_dict(), allow_nan=False)


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_call_with_numpy_numbers_is_the_call_with_plain_ones(name, data):
    plain, other = data.draw(calls(name))
    assert plain == other
    assert repr(plain) == repr(other)
    assert describe(plain) == describe(other)
    assert "np." not in repr(other) + describe(other)
    assert not any(isinstance(value, np.generic) for value in plain_values(other))
    assert run(plain) == run(other, np.int64)


@pytest.mark.parametrize("name", CALLS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_is_shown_is_the_call_that_makes_it_again(name, data):
    made, _ = data.draw(calls(name))
    again = eval(repr(made), {**NAMES, "Timer": Timer, "difficulty": range(100)})
    assert again == made
    assert repr(again) == repr(made)


def test_every_factory_and_every_number_of_it_is_tried():
    names = set(size.__all__) - WITHOUT_NUMBERS - {"BatchSizeController", "ExperimentBudget", "noise"}
    assert set(CALLS) == names
    for name in names - {"milestones", "clamp", "cooldown", "switch", "Curriculum"}:  # called through a function here
        parameters = inspect.signature(getattr(size, name)).parameters.values()
        taken = {
            item.name for item in parameters if any(kind in item.annotation for kind in ("float", "SupportsIndex"))
        }
        tried = {option for _, _, drawn in CALLS[name] for option in drawn}
        assert taken - {"schedule", "expression"} <= tried, name


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.int64])
def test_the_average_of_noise_keeps_plain_numbers(kind):
    average = NoiseAverage(kind(1000)).update(kind(90), kind(2), num_examples=np.int64(64))
    plain = NoiseAverage(1000).update(90.0, 2.0, num_examples=64)
    assert average == plain
    assert repr(average) == repr(plain)
    assert json.dumps(average.to_state()) == json.dumps(plain.to_state())


def test_a_budget_of_experiments_keeps_plain_numbers():
    budget = size.ExperimentBudget(np.float32(0.25), num_held=np.int64(1)).after_update(np.float64(2.0))
    budget = budget.after_experiment(np.float32(8), num_batches=np.int64(4), has_grown=False)
    plain = size.ExperimentBudget(0.25, num_held=1).after_update(2.0)
    assert repr(budget) == repr(plain.after_experiment(8.0, num_batches=4, has_grown=False))
    json.dumps(budget.to_state())


@pytest.mark.parametrize("rule", [linear, sqrt, none])
def test_the_factor_of_a_rate_is_a_plain_number(rule):
    assert type(rule(np.int64(256), np.int64(64))) is float
    assert type(adascale(np.int64(256), np.int64(64), s=np.float64(3), g2=np.float64(1))) is float


def test_the_factor_of_seesaw_is_a_plain_number():
    _, lr_factor = size.seesaw(lambda index: np.float64(0.25) ** index, after=np.int64(1), max_factor=np.float32(2))
    assert [type(lr_factor(index)) for index in (np.int64(0), 1, np.int64(5))] == [float] * 3


def test_flags_may_be_numpy_ones():
    options = {"relative": np.False_, "divide": np.True_, "detrend": np.True_}
    assert repr(size.loss_driven("variance", **options)) == "loss_driven('variance', relative=False, detrend=True)"
    assert size.memory_driven(remember=np.False_) == size.memory_driven(remember=False)


def test_a_curriculum_shows_plain_numbers():
    curriculum = size.Curriculum([3, 1], start_fraction=np.float64(0.5), full_at=np.int64(2))
    assert repr(curriculum) == "Curriculum(start_fraction=0.5, full_at=2.0, shape='linear')"
    assert type(curriculum.fraction(np.float64(1))) is float
