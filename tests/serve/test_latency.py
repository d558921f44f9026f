"""LatencyModel: it finds the coefficients, follows changes, and is not fooled by first calls."""

import json
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import ArgumentError, StateMismatchError
from batchwright.serve import LatencyModel
from batchwright.serve.latency import MIN_OBSERVATIONS, fit_non_negative

SHAPES = [(n, length) for n in (1, 2, 5, 16, 40) for length in (8, 30, 100, 400)]


def teach(model, seconds_of, rounds=3, noise=0.0, seed=0):
    rng = random.Random(seed)
    for _ in range(rounds):
        for n, length in SHAPES:
            model.observe(n, length, seconds_of(n, length) * (1 + noise * rng.random()))
    return model


def linear(n, length):
    return 0.004 + 4e-6 * n * length


def test_it_recovers_the_time_of_a_linear_device():
    model = teach(LatencyModel(), linear)
    assert model.predict(10, 64) == pytest.approx(0.004 + 4e-6 * 640, rel=1e-3)
    assert model.coefficients["n*L^2"] == 0.0


def test_it_recovers_a_quadratic_term_where_there_is_one():
    model = teach(LatencyModel(), lambda n, length: linear(n, length) + 3e-8 * n * length**2)
    assert model.coefficients["n*L^2"] == pytest.approx(3e-8, rel=1e-2)


def test_noise_alone_brings_no_quadratic_term():
    models = [teach(LatencyModel(), linear, noise=0.1, seed=seed) for seed in range(10)]
    assert [model.coefficients["n*L^2"] for model in models] == [0.0] * 10


def test_it_predicts_one_length_only():
    model = LatencyModel()
    for _ in range(5):
        for n in (1, 2, 3, 8, 20):
            model.observe(n, 1, 0.004 + 0.001 * n)
    assert model.predict(10, 1) == pytest.approx(0.014, rel=1e-3)


def test_noise_up_to_a_tenth_gives_a_margin_that_covers_it():
    model = teach(LatencyModel(), linear, rounds=10, noise=0.1)
    # Times are 1 to 1.1 times the truth, the fit lies at about 1.05: 95 % stay below 1.045 of it, none above 1.06.
    assert 1.02 < model.margin < 1.07
    assert model.upper(10, 64) == model.predict(10, 64) * model.margin


def test_it_follows_a_device_that_becomes_three_times_slower():
    model = teach(LatencyModel(), linear)
    teach(model, lambda n, length: 3 * linear(n, length), rounds=15)
    assert model.predict(10, 64) == pytest.approx(3 * linear(10, 64), rel=0.1)


def test_it_follows_a_slower_device_even_if_no_shape_comes_twice():
    model = teach(LatencyModel(), linear)
    for length in range(11, 400):
        model.observe(3, length, 3 * linear(3, length))
    assert model.predict(3, 200) == pytest.approx(3 * linear(3, 200), rel=0.1)


def test_the_first_call_of_a_shape_is_ignored_when_it_compiles():
    model = teach(LatencyModel(), linear)
    before = model.predict(7, 77)
    model.observe(7, 77, 0.5)
    assert model.predict(7, 77) == before
    model.observe(7, 77, linear(7, 77))
    # Three rounds, of which the first is the first call of every size; then one call that counts.
    assert model.num_observed == 2 * len(SHAPES) + 1


def test_a_start_in_which_every_call_compiles_teaches_nothing():
    model = LatencyModel()
    for power in range(7):
        model.observe(2**power, 2**power, 0.5)
    assert model.num_observed == 0
    assert not model.is_ready


def test_one_hiccup_moves_the_prediction_little():
    model = teach(LatencyModel(), linear)
    before = model.predict(16, 100)
    model.observe(16, 100, 5.0)
    for _ in range(8):  # the fit is renewed with every eighth batch
        model.observe(16, 100, before)
    assert model.predict(16, 100) == pytest.approx(before, rel=0.1)


def test_it_is_ready_after_enough_batches_and_not_before():
    model = LatencyModel()
    for count in range(MIN_OBSERVATIONS + 1):
        assert model.is_ready == (count > MIN_OBSERVATIONS)
        model.observe(1, 10, 0.004)  # the first call is ignored
    assert model.is_ready


def test_a_time_that_is_no_time_is_ignored():
    model = teach(LatencyModel(), linear)
    known = model.to_json()
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        model.observe(1, 8, seconds)
    assert model.to_json() == known


def test_json_brings_back_the_same_model():
    model = teach(LatencyModel(decay=0.98), linear, noise=0.1)
    again = LatencyModel.from_json(model.to_json())
    assert again.predict(9, 99) == model.predict(9, 99)
    assert (again.margin, again.num_observed) == (model.margin, model.num_observed)
    model.observe(9, 99, 0.007)
    again.observe(9, 99, 0.007)  # new to both; a shape of the old process would be new to the second alone
    assert again.to_json() == model.to_json()


def test_json_of_another_version_is_refused():
    state = json.loads(LatencyModel().to_json()) | {"version": 99}
    with pytest.raises(StateMismatchError, match="version = 99"):
        LatencyModel.from_json(json.dumps(state))


def test_a_fixed_model_learns_nothing():
    model = LatencyModel.fixed(0.004, 4e-6)
    teach(model, lambda n, length: 1.0)
    assert model.is_ready
    assert model.predict(10, 64) == pytest.approx(linear(10, 64))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ((-1.0, 0.0, 0.0), "constant must be a number of 0 or more, got -1.0"),
        ((0.0, 0.0, 0.0), "give at least one coefficient above 0"),
        ((float("nan"), 1.0, 0.0), "constant must be"),
        ((1.0, "2"), "per_token must be"),
        ((1.0, 0.0, float("inf")), "per_square must be"),
    ],
)
def test_impossible_coefficients_are_refused(wrong, message):
    with pytest.raises(ArgumentError, match=message):
        LatencyModel.fixed(*wrong)


def test_numbers_of_numpy_are_learned_and_saved_as_plain_ones():
    plain, numpy = LatencyModel(decay=0.5), LatencyModel(decay=np.float32(0.5))
    for n, length in SHAPES * 2:
        plain.observe(n, length, 0.5 * n)
        numpy.observe(np.int64(n), np.int64(length), np.float32(0.5 * n))
    assert numpy.to_json() == plain.to_json()


def test_a_time_beyond_every_float_is_left_out_and_an_empty_item_is_learned_from():
    model = LatencyModel()
    model.observe(1, 8, 10**400)
    assert model.num_observed == 0
    for _ in range(3):
        model.observe(1, 0, 0.5)
    assert model.num_observed > 0


def test_an_impossible_decay_is_refused():
    with pytest.raises(ArgumentError, match="decay"):
        LatencyModel(decay=0)


def test_a_device_whose_times_vary_is_predicted_by_their_mean():
    model, rng = LatencyModel(), np.random.default_rng(0)
    for _ in range(2_000):
        num, length = int(rng.integers(1, 9)), int(rng.integers(8, 65))
        # One in two calls takes nine times as long: 10 ms on average beside 10 µs a token.
        model.observe(num, length, (0.002 if rng.random() < 0.5 else 0.018) + 1e-5 * num * length)
    assert model.predict(4, 32) == pytest.approx(0.010 + 1e-5 * 4 * 32, rel=0.25)


def test_a_hiccup_counts_as_three_times_the_prediction():
    calm, shaken = LatencyModel(), LatencyModel()
    for model, longest in ((calm, 0.03), (shaken, 40.0)):
        for _ in range(104):  # the first is ignored; the fit is renewed with every eighth batch, the 104th the last
            model.observe(1, 32, 0.01)
        model.observe(1, 32, longest)
    assert shaken.predict(1, 32) == pytest.approx(calm.predict(1, 32), rel=1e-9)
    assert shaken.predict(1, 32) > 0.01


def test_slow_calls_are_believed_even_if_no_shape_comes_twice():
    model, rng = LatencyModel(), np.random.default_rng(0)
    for place in range(1_000):
        # Two in five calls take eight times as long: 57 ms on average.
        model.observe(1 + place % 64, 1 + place // 4, 0.12 if rng.random() < 0.4 else 0.015)
    assert 0.035 < model.predict(32, 100) < 0.065  # four of 32 calls are taken for first ones


def new_shapes_are_slow(model, num_calls, seed=0):
    """Let a device serve that takes 7 ms, and 75 ms more for a shape that it has not seen; return what it has."""
    rng, seen = random.Random(seed), set()
    for _ in range(num_calls):
        shape = (rng.randint(1, 12), rng.randint(8, 60))
        model.observe(*shape, 0.007 + 1e-6 * shape[0] * shape[1] + 0.075 * (shape not in seen))
        seen.add(shape)
    return seen


def test_what_new_shapes_take_longer_is_no_time_of_their_tokens():
    model = LatencyModel()
    for length in (8, 16, 32, 64, 128) * 2:  # single texts, seen before: fast
        model.observe(1, length, 0.007)
    seen = new_shapes_are_slow(model, 200)
    assert model.coefficients["new"] == pytest.approx(0.075, rel=0.1)
    assert model.per_item(32) < 1e-3
    assert len(seen) > 150


def test_a_prediction_has_new_shapes_as_often_as_of_late():
    model = LatencyModel()
    seen = sorted(new_shapes_are_slow(model, 400))
    for shape in seen[:16] + [(13, length) for length in range(100, 116)]:  # 16 known, 16 new
        model.observe(*shape, 0.007 + 0.075 * (shape[0] == 13))
    assert model.constant == pytest.approx(0.007 + 0.075 / 2, rel=0.1)
    for shape in seen[:32]:
        model.observe(*shape, 0.007)
    assert model.constant == pytest.approx(0.007, rel=0.1)


def sums(rows, values):
    rows, values = np.array(rows, dtype=float), np.array(values, dtype=float)
    return rows.T @ rows, rows.T @ values, float(values @ values)


def test_a_coefficient_that_would_be_negative_is_zero():
    # 10 - x: the best constant and slope are 10 and -1; without a negative slope the mean is best, (9 + 8 + 6) / 3.
    fit = fit_non_negative(*sums([[1, 1, 1, 0], [1, 2, 4, 0], [1, 4, 16, 0]], [9, 8, 6]))
    assert fit.tolist() == pytest.approx([23 / 3, 0, 0, 0])


def test_a_term_that_holds_for_some_rows_alone_is_found():
    # 2 + x, and 5 more in the second and the fourth row.
    fit = fit_non_negative(*sums([[1, 1, 1, 0], [1, 2, 4, 1], [1, 4, 16, 0], [1, 3, 9, 1]], [3, 9, 6, 10]))
    assert fit.tolist() == pytest.approx([2, 1, 0, 5])


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 500)), min_size=3, max_size=20), st.integers(0, 2**31))
def test_no_other_answer_without_negatives_is_better(shapes, seed):
    rng = np.random.default_rng(seed)
    rows = np.array([[1.0, n * length, n * length * length, n % 2] for n, length in shapes])
    rows /= np.maximum(rows.max(axis=0), 1.0)
    values = rows @ rng.uniform(0, 1, 4) + 0.1 * rng.normal(size=len(rows))
    found = fit_non_negative(*sums(rows, values))
    assert (found >= 0).all()

    def error(answer):
        return float(((rows @ answer - values) ** 2).sum())

    # A tenth: so much the third and the fourth term must each remove before they are taken.
    for answer in np.abs(found + rng.normal(scale=0.1, size=(50, 4))):
        assert error(found) <= error(answer) / 0.9**2 + 1e-9


def stub(n, length):
    return 0.004 + 0.00025 / 64 * n * length


def draw(rng):
    return rng.randint(1, 40), max(1, min(512, int(rng.lognormvariate(3.5, 0.8))))


CHECKED = ((1, 32), (8, 64), (24, 40), (40, 100))


@pytest.mark.parametrize("factor", [1 / 20, 1 / 8, 1 / 3, 1 / 1.5, 1.5, 3, 8, 20])
@pytest.mark.parametrize("seed", range(3))
def test_a_change_of_speed_is_followed_within_forty_batches(factor, seed):
    model, rng = LatencyModel(), random.Random(seed)
    for _ in range(300):
        shape = draw(rng)
        model.observe(*shape, stub(*shape) * rng.uniform(1, 1.04))
    for number in range(200):
        shape = draw(rng)
        model.observe(*shape, factor * stub(*shape) * rng.uniform(1, 1.04))
        if number >= 40:
            assert all(model.predict(*one) == pytest.approx(1.02 * factor * stub(*one), rel=0.2) for one in CHECKED)
    assert model.margin < 1.1  # the calls of the change do not count as noise


@pytest.mark.parametrize(("share", "times"), [(0.05, 10), (0.05, 100), (0.02, 20)])
@pytest.mark.parametrize("seed", range(3))
def test_rare_slow_calls_do_not_make_the_prediction_jump(share, times, seed):
    model, rng = LatencyModel(), random.Random(seed)
    for number in range(1000):
        shape = draw(rng)
        is_slow = rng.random() < share
        model.observe(*shape, stub(*shape) * rng.uniform(1, 1.04) * (times if is_slow else 1))
        if number >= 100:
            assert all(0.9 < model.predict(*one) / stub(*one) < 1.3 for one in CHECKED)


def test_a_change_is_followed_among_rare_slow_calls_too():
    model, rng = LatencyModel(), random.Random(0)
    for number in range(360):
        shape = draw(rng)
        seconds = stub(*shape) * (8 if number >= 300 else 1) * (10 if rng.random() < 0.05 else 1)
        model.observe(*shape, seconds)
    assert model.predict(24, 40) == pytest.approx(8 * stub(24, 40), rel=0.25)
