"""The stated time of an update, and how well it describes what was measured."""

import pytest

from batchwright.errors import ArgumentError
from batchwright.lab.update_time import EAGER, GRAPHS, UpdateTime, named

# Real tokens per second and updates in 28 s, measured on an H200; an example has 88 real tokens.
SECONDS, TOKENS = 28, 88
MEASURED = {
    EAGER: [(18_000, 359), (38_000, 377), (117_000, 431), (174_000, 333), (289_000, 288)],
    GRAPHS: [(327_000, 2992), (485_000, 2119), (622_000, 1312)],
}


@pytest.mark.parametrize(("model", "tolerance"), [(EAGER, 0.2), (GRAPHS, 0.03)], ids=["eager", "graphs"])
def test_the_ready_models_describe_what_was_measured(model, tolerance):
    for tokens_per_second, num_updates in MEASURED[model]:
        examples = round(tokens_per_second * SECONDS / num_updates / TOKENS)
        measured_ms = 1000 * SECONDS / num_updates
        assert 1000 * model.seconds(passes=1, examples=examples) == pytest.approx(measured_ms, rel=tolerance)


def test_seconds_by_hand():
    model = UpdateTime(fixed_ms=20, per_example_ms=0.25)
    assert model.seconds(passes=10, examples=400) == pytest.approx(0.3)
    assert UpdateTime.from_dict(model.to_dict()) == model


def test_a_model_by_name_or_by_two_numbers():
    assert named("eager") is EAGER
    assert named("graphs") is GRAPHS
    assert named("7,0.5") == UpdateTime(fixed_ms=7, per_example_ms=0.5)


@pytest.mark.parametrize("text", ["fast", "70", "70,", "1,2,3"])
def test_what_is_no_model_is_refused(text):
    with pytest.raises(ArgumentError, match=rf"eager, graphs, or two numbers of milliseconds.*got '{text}'"):
        named(text)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"fixed_ms": -1, "per_example_ms": 1}, "fixed_ms must be .* 0 or more, got -1"),
        ({"fixed_ms": 1, "per_example_ms": float("nan")}, "per_example_ms must be"),
        ({"fixed_ms": 0, "per_example_ms": 0}, "must not both be 0"),
        ({"fixed_ms": 1, "per_example_ms": 0, "about": 3}, "about must be a text, got 3"),
    ],
)
def test_figures_that_are_no_times_are_refused(options, match):
    with pytest.raises(ArgumentError, match=match):
        UpdateTime(**options)
