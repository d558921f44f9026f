"""The seconds of a step by its amount of work: what was planted is found again."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright._step_seconds import StepSeconds, fit_step_seconds
from batchwright.errors import ArgumentError

SIZES = 16.0 * 2.0 ** np.arange(9)


@st.composite
def planted(draw):
    """Steps that are launch-bound up to a corner between two sizes, with at least two on either side of it."""
    last_flat = draw(st.integers(1, len(SIZES) - 3))
    per_unit = draw(st.floats(1e-7, 1e-2))
    corner = SIZES[last_flat] * draw(st.floats(1, 1.9))
    constant = per_unit * corner * draw(st.one_of(st.just(0.0), st.floats(0, 0.7)))
    return StepSeconds(constant + per_unit * corner, constant, per_unit)


lines = st.builds(StepSeconds, st.just(0.0), st.floats(1e-4, 10), st.floats(1e-6, 1e-2))


def off(found, truth, work=SIZES):
    return np.abs(found.predict(work) / truth.predict(work) - 1).max()


def line_off(seconds, truth):
    """Return how far off the least squares line is, in relative errors: the fit without a corner."""
    columns = np.column_stack([1 / seconds, SIZES / seconds])
    return np.abs(np.linalg.lstsq(columns, np.ones(len(SIZES)), rcond=None)[0] @ [np.ones(9), SIZES] / truth - 1).max()


def noise(seed):
    return 1 + 0.03 * np.random.default_rng(seed).uniform(-1, 1, len(SIZES))


@settings(deadline=None, max_examples=100)
@given(planted())
def test_planted_launch_times_are_found_within_two_percent(truth):
    assert off(fit_step_seconds(SIZES, truth.predict(SIZES)), truth) <= 0.02


@settings(deadline=None, max_examples=100)
@given(planted(), st.integers(0, 10**6))
def test_with_three_percent_of_noise_they_are_found_within_ten(truth, seed):
    assert off(fit_step_seconds(SIZES, truth.predict(SIZES) * noise(seed)), truth) <= 0.1


@settings(deadline=None, max_examples=100)
@given(lines)
def test_a_line_is_found_as_a_line(truth):
    assert off(fit_step_seconds(SIZES, truth.predict(SIZES)), truth) <= 0.002


@settings(deadline=None, max_examples=100)
@given(lines, st.integers(0, 10**6))
def test_a_noisy_line_is_found_about_as_well_as_least_squares_finds_it(truth, seed):
    seconds = truth.predict(SIZES) * noise(seed)
    assert off(fit_step_seconds(SIZES, seconds), truth) <= line_off(seconds, truth.predict(SIZES)) + 0.05


@settings(deadline=None, max_examples=100)
@given(planted(), st.integers(2, len(SIZES) - 3), st.sampled_from([0.3, 3.0, 20.0]))
def test_one_reading_far_off_hardly_moves_repeats(truth, row, factor):
    work = np.repeat(SIZES, 3)
    seconds = truth.predict(work)
    seconds[3 * row] *= factor
    assert off(fit_step_seconds(work, seconds), truth) <= 0.02


@settings(deadline=None, max_examples=100)
@given(lines, st.integers(1, len(SIZES) - 2), st.sampled_from([3.0, 20.0]))
def test_one_slow_size_hardly_moves_a_line(truth, row, factor):
    seconds = truth.predict(SIZES)
    seconds[row] *= factor
    assert off(fit_step_seconds(SIZES, seconds), truth) <= 0.05


readings = st.lists(st.tuples(st.floats(1e-3, 1e9), st.floats(1e-6, 1e6)), min_size=2, max_size=80)


@settings(deadline=None, max_examples=100)
@given(readings.filter(lambda rows: len({work for work, _ in rows}) > 1))
def test_more_work_never_takes_less_whatever_was_measured(rows):
    found = fit_step_seconds(*zip(*rows, strict=True))
    seconds = found.predict(np.geomspace(1e-3, 1e10, 200))
    assert min(found) >= 0
    assert (seconds > 0).all()
    assert (np.diff(seconds) >= 0).all()


@settings(deadline=None, max_examples=100)
@given(planted(), st.integers(0, 10**6), st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_other_units_change_nothing(truth, seed, unit, second):
    seconds = truth.predict(SIZES) * noise(seed)
    found, scaled = fit_step_seconds(SIZES, seconds), fit_step_seconds(SIZES * unit, seconds * second)
    assert scaled.predict(SIZES * unit) == pytest.approx(found.predict(SIZES) * second, rel=1e-6)


@pytest.mark.parametrize(
    ("work", "seconds", "expected"),
    [
        ([1, 3], [2, 4], (0, 1, 1)),  # the line through both
        ([10, 100], [1, 11], (1, 0, 0.11)),  # that line is below 0 at no work
        ([1, 3], [4, 2], (0, 3, 0)),  # more work took less: no growth is seen
        ([3, 3, 3, 1, 1, 1], [4, 4, 90, 2, 2, 0.1], (0, 1, 1)),  # medians of repeats
    ],
)
def test_two_amounts_give_the_line_through_them(work, seconds, expected):
    assert fit_step_seconds(work, seconds) == pytest.approx(expected)


def test_three_sizes_are_enough_to_see_that_small_steps_are_launch_bound():
    # A line through 1, 1, 1.5 would promise 0.21 seconds per unit from the first size on.
    assert fit_step_seconds([1, 2, 4], [1, 1, 1.5]) == pytest.approx((1, 0, 0.375))


def test_four_sizes_are_enough_for_all_three_numbers():
    assert fit_step_seconds([1, 2, 4, 8], [1, 1, 1.5, 2.5]) == pytest.approx((1, 0.5, 0.25))


def test_thousands_of_different_amounts_are_fitted_as_well():
    rng = np.random.default_rng(0)
    truth, work = StepSeconds(0.04, 0.01, 3e-6), rng.uniform(100, 60_000, 5000)
    found = fit_step_seconds(work, truth.predict(work) * (1 + 0.1 * rng.standard_normal(5000)))
    assert off(found, truth, np.geomspace(100, 60_000, 100)) <= 0.05


@pytest.mark.parametrize(
    ("work", "seconds", "words"),
    [
        ([1, 2], [1], r"one number per step, got shapes \(2,\) and \(1,\)"),
        ([[1], [2]], [[1], [2]], r"got shapes \(2, 1\)"),
        ([1, 0], [1, 1], "work must be finite and above 0, got 0.0 at 1"),
        ([1, 2], [float("nan"), 1], "seconds must be finite and above 0, got nan at 0"),
        ([5, 5, 5], [1, 2, 3], r"two different amounts of work, got \[5.0\]; time more"),
        ([], [], r"two different amounts of work, got \[\]"),
    ],
)
def test_readings_that_cannot_be_fitted_are_refused(work, seconds, words):
    with pytest.raises(ArgumentError, match=words):
        fit_step_seconds(work, seconds)


@pytest.mark.parametrize("last", [0.01, 0.01006, 0.0102])
def test_a_rise_within_the_error_of_a_clock_is_no_corner(last):
    # A corner at the last size would make 128 take twice as long as 64, which nothing has shown.
    fit = fit_step_seconds([16, 32, 64], [0.0100, 0.0100, last])
    assert fit.predict([128])[0] < 1.05 * last
