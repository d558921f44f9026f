"""Steps that take as long as their launches, however small they are: the time model tells that time apart."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import batchwright as bw
from batchwright.errors import ArgumentError, StateMismatchError
from batchwright.plan.models._terms import Terms, fit_terms, num_told_apart
from batchwright.plan.models.time import TimeModel, fit_launch

PROBES = np.array([[items, length] for length in (16, 64, 256) for items in (1, 4, 16, 64, 256)])
HELD_OUT = np.array([[items, length] for length in (32, 128) for items in (2, 8, 32, 128)])
PAIRS = np.array([[n, a, b] for n in (1, 8, 64, 256) for a in (8, 64, 200) for b in (8, 100)])
H200 = Path(__file__).parents[3] / "benchmarks" / "results" / "doctor_h200.json"


def launch_model(launch, constant, per_token, per_square=0.0):
    return TimeModel(Terms(1, (constant, 0.0, per_token, per_square)), launch_seconds=launch)


@st.composite
def planted(draw, *, has_launch=True):
    """A launch time that each length has a probe beyond, or terms alone with a constant of that size."""
    per_token, corner = draw(st.floats(1e-8, 1e-4)), draw(st.floats(128, 3500))
    per_square = per_token / 500 * draw(st.sampled_from([0, 1]))
    if not has_launch:
        return launch_model(0.0, per_token * corner, per_token, per_square)
    constant = per_token * corner * draw(st.one_of(st.just(0.0), st.floats(0.01, 0.5)))
    return launch_model(constant + per_token * corner, constant, per_token, per_square)


def off(found, truth, shapes=HELD_OUT):
    return np.abs(found.predict(shapes) / truth.predict(shapes) - 1).max()


def noisy(model, seed):
    return model.predict(PROBES) * (1 + 0.03 * np.random.default_rng(seed).uniform(-1, 1, len(PROBES)))


def best_batch(model, length, max_items, tolerance):
    """Return the knee by trying every number of items."""
    items = np.arange(1, max_items + 1)
    throughput = items / model.predict(np.column_stack([items, np.full(max_items, length)]))
    return int(items[np.argmax(throughput >= (1 - tolerance) * throughput[-1])])


# the fit


@settings(deadline=None, max_examples=60)
@given(planted())
def test_planted_launch_times_are_predicted_within_two_percent(truth):
    assert off(TimeModel.fit(PROBES, truth.predict(PROBES)), truth) <= 0.02


@settings(deadline=None, max_examples=60)
@given(planted(), st.integers(0, 10**6))
def test_with_three_percent_of_noise_they_are_predicted_within_ten(truth, seed):
    assert off(TimeModel.fit(PROBES, noisy(truth, seed)), truth) <= 0.1


@settings(deadline=None, max_examples=60)
@given(planted(has_launch=False))
def test_times_that_only_add_up_get_no_launch_time(truth):
    seconds = truth.predict(PROBES)
    assert TimeModel.fit(PROBES, seconds) == TimeModel(fit_terms(PROBES, seconds))


@settings(deadline=None, max_examples=60)
@given(planted(has_launch=False), st.integers(0, 10**6))
def test_noisy_times_that_only_add_up_are_predicted_about_as_well_as_by_terms_alone(truth, seed):
    seconds = noisy(truth, seed)
    assert off(TimeModel.fit(PROBES, seconds), truth) <= off(TimeModel(fit_terms(PROBES, seconds)), truth) + 0.05


def test_two_axes_have_one_launch_time():
    def seconds_of(shapes):
        return np.maximum(0.06, 0.01 + shapes[:, 0] * (4e-6 * shapes[:, 1] + 9e-6 * shapes[:, 2]))

    found = TimeModel.fit(PAIRS, seconds_of(PAIRS))
    held_out = np.array([[2, 30, 30], [32, 30, 30], [200, 30, 30], [128, 150, 20]])
    assert found.launch_seconds == pytest.approx(0.06)
    assert found.predict(held_out) == pytest.approx(seconds_of(held_out), rel=1e-6)


def test_a_step_timed_on_one_length_is_told_apart_too():
    shapes = [[items, 64] for items in (1, 2, 4, 8, 16, 32, 64)]
    found = TimeModel.fit(shapes, [max(0.04, 0.002 * items) for items, _ in shapes])
    # Terms that one length cannot tell apart share what was found, so that only this length is exact.
    assert found.predict([[10, 64], [50, 64]]) == pytest.approx([0.04, 0.1])
    assert found.launch_seconds == pytest.approx(0.04)


def test_terms_that_probes_above_the_launch_time_cannot_tell_apart_share_equally():
    shapes = [[2, 32], [8, 32], [2, 128], [8, 128], [16, 64], [4, 256], [32, 32], [8, 256], [64, 256], [256, 256]]
    found = TimeModel.fit(shapes, [max(0.04, 0.008 + 3e-6 * items * length) for items, length in shapes])
    assert found.launch_seconds == pytest.approx(0.04)
    # A token takes 3e-6 s; a third of it is given to the item, to the token and to the square of the length.
    shares = {"1": 0.008, "b": 3e-6 * 256 / 3, "b*L0": 1e-6, "b*L0^2": 1e-6 / 256}
    assert found.coefficients == pytest.approx(shares, rel=1e-6)


def test_as_many_terms_as_probes_do_not_count_as_a_good_fit_of_a_launch_time():
    shapes = np.array([[1, 8], [8, 8], [8, 64], [64, 64]])
    seconds = np.array([0.01 + 1e-4 * b + 1e-5 * b * length + 1e-7 * b * length**2 for b, length in shapes])
    assert fit_launch(shapes, seconds)[0] == 0


@pytest.mark.parametrize("seconds", [[2.0, 2.0, 2.0, 2.0], [2.0, 2.1, 1.9, 2.0], [2.0, 2.3, 1.9, 1.4]])
def test_times_that_do_not_grow_are_one_time(seconds):
    found = TimeModel.fit([[1, 16], [4, 16], [4, 32], [8, 32]], seconds)
    assert found.predict([[1, 16], [2, 32], [8, 32]]) == pytest.approx([np.mean(seconds)] * 3, rel=0.15)


def test_a_small_batch_that_took_forever_beside_a_large_one_leaves_a_model():
    found = TimeModel.fit([[1, 1], [1, 1], [191, 2390]], [1152.0, 0.0078125, 0.0078125])
    assert found.predict([[1, 1]])[0] > 0


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 4000), st.floats(1e-6, 1e4)), min_size=3, max_size=14))
def test_whatever_was_measured_a_larger_batch_never_takes_less(rows):
    shapes, seconds = [[items, length] for items, length, _ in rows], [time for *_, time in rows]
    assume(len(set(map(tuple, shapes))) > 1)
    found = TimeModel.fit(shapes, seconds)
    grown = found.predict([[items, length] for items in (1, 2, 100, 10_000) for length in (1, 50, 5000)]).reshape(4, 3)
    assert (grown > 0).all()
    assert (np.diff(grown, axis=0) >= 0).all()
    assert (np.diff(grown, axis=1) >= 0).all()


def test_hundreds_of_probes_are_fitted_as_well():
    rng = np.random.default_rng(0)
    truth = launch_model(0.04, 0.005, 3e-6)
    shapes = np.column_stack([rng.integers(1, 300, 400), rng.integers(8, 300, 400)])
    found = TimeModel.fit(shapes, truth.predict(shapes) * (1 + 0.05 * rng.standard_normal(400)))
    assert off(found, truth) <= 0.05


def test_numbers_below_rounding_and_terms_of_one_length_count_once():
    shapes = np.array([[1, 64], [2, 64], [4, 64]])
    assert num_told_apart(Terms(1, (5.0, 1.0, 1.0, 1e-18)), shapes) == 2
    assert num_told_apart(Terms(1, (5.0, 1.0, 1.0, 0.0)), PROBES) == 3


@pytest.mark.skipif(not H200.exists(), reason="needs the stored figures of benchmarks/results")
def test_the_knee_of_an_h200_lies_where_it_was_measured():
    rows = json.loads(H200.read_text(encoding="utf-8"))["launch"]["rows"]
    tokens, seconds = np.array([row["tokens"] for row in rows]), np.array([row["seconds"] for row in rows])
    shapes = np.column_stack([tokens // 64, np.full(len(tokens), 64)])
    found = TimeModel.fit(shapes, seconds)
    knee = 64 * found.knee([64], max_items=shapes[-1, 0])[0]
    # 95 % of the throughput of 65,536 tokens: 16,384 tokens have 90 %, 32,768 have 96 %.
    reached = tokens[np.argmax(tokens / seconds >= 0.95 * (tokens / seconds)[-1])]
    assert reached == 32_768
    assert 16_384 < knee <= 32_768
    assert found.launch_seconds == pytest.approx(0.040, rel=0.05)


# what is read from it


def test_a_small_step_takes_its_launches_and_a_large_one_its_terms():
    model = launch_model(0.08, 0.01, 1e-5)
    # 0.01 + 1e-5·7000 = 0.08
    assert model.predict([[1, 10], [7, 1000], [14, 1000]]) == pytest.approx([0.08, 0.08, 0.15])
    assert model.cost(np.array([1, 14]), np.array([[10], [1000]])) == pytest.approx([0.08, 0.15])
    assert model.predict_plan([[1, 10], [14, 1000], [14, 1000]]) == pytest.approx(0.38)


@settings(deadline=None, max_examples=200)
@given(
    st.floats(0, 1),
    st.floats(0, 1),
    st.floats(0, 1e-2),
    st.integers(1, 300),
    st.integers(1, 5000),
    st.floats(0.01, 0.9),
)
def test_the_knee_is_the_smallest_batch_near_the_best(launch, constant, per_token, length, max_items, tolerance):
    model = launch_model(launch, constant + 1e-6, per_token)
    knee = int(model.knee([length], max_items=max_items, tolerance=tolerance)[0])
    # Rounding may move either across a whole number.
    assert abs(knee - best_batch(model, length, max_items, tolerance)) <= 1


def test_without_a_limit_the_knee_leaves_the_launches_behind():
    # The best is 1 / (1e-5·30) a second: 95 % of it at 0.08 s needs 0.95·0.08 / 3e-4 = 253.3 items.
    assert launch_model(0.08, 0.0, 1e-5).knee([30]).tolist() == [254]
    # A constant of 0.01 s asks for 0.95·0.01 / (0.05·3e-4) = 633.3.
    assert launch_model(0.08, 0.01, 1e-5).knee([30]).tolist() == [634]


def test_where_even_the_largest_batch_is_launch_bound_the_knee_is_its_share():
    model = launch_model(1.0, 0.01, 1e-5)
    assert model.knee([30], max_items=100).tolist() == [95]
    assert model.knee([30], max_items=0).tolist() == [0]


def test_a_longer_batch_never_takes_less():
    model = launch_model(0.04, 0.01, 3e-6, 1e-9)
    shapes = np.column_stack([np.full(2000, 7), np.arange(1, 2001)])
    assert (np.diff(model.predict(shapes)) >= 0).all()


def test_few_shapes_are_chosen_by_seconds_with_launches():
    lengths = np.random.default_rng(0).integers(1, 200, size=(5000, 2))
    model = TimeModel(Terms(2, (1e-3, 0.0, 1e-5, 1e-7, 0.0, 0.0, 0.0)), launch_seconds=0.004)
    tokens, seconds = (
        bw.plan_batches(lengths, bw.MaxTokens(4000), grouping=bw.Buckets(8), cost=cost) for cost in (None, model.cost)
    )
    assert sorted(seconds.indices.tolist()) == list(range(5000))
    assert len(set(map(tuple, seconds.shapes[:, 1:].tolist()))) <= 8
    assert model.predict_plan(seconds.shapes) < model.predict_plan(tokens.shapes)


def test_a_plan_by_seconds_knows_a_launch_time_from_none():
    lengths = np.random.default_rng(0).integers(1, 200, size=200)
    budget = bw.MaxTokens(1000)
    with_launch, without = (launch_model(launch, 0.01, 1e-5).cost for launch in (0.04, 0.0))
    state = bw.BatchSampler(lengths, budget, grouping=bw.Buckets(4), cost=with_launch).state_dict()
    bw.BatchSampler(lengths, budget, grouping=bw.Buckets(4), cost=with_launch).load_state_dict(state)
    with pytest.raises(StateMismatchError, match="cost had other values"):
        bw.BatchSampler(lengths, budget, grouping=bw.Buckets(4), cost=without).load_state_dict(state)


# text


def test_a_launch_time_survives_json_to_the_last_bit():
    model = TimeModel(Terms(1, (0.1, 0.0, 1e-5 / 3, 0.0)), first_visit_seconds=0.4, launch_seconds=0.1 / 3)
    again = TimeModel.from_json(model.to_json())
    assert again == model
    assert hash(again) == hash(model)
    assert repr(again) == repr(model)
    assert repr(model).endswith("first_visit_seconds=0.4, launch_seconds=0.03333333333333333)")


def test_a_model_with_a_launch_time_is_of_a_version_that_earlier_readers_refuse():
    assert json.loads(launch_model(0.04, 0.1, 1e-5).to_json())["version"] == 2
    assert json.loads(launch_model(0.0, 0.1, 1e-5).to_json())["version"] == 1


def test_a_model_from_before_launch_times_has_none():
    state = json.loads(launch_model(0.0, 0.1, 1e-5).to_json())
    assert "launch_seconds" not in state
    assert TimeModel.from_json(json.dumps(state)).launch_seconds == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 3}, "this TimeModel is of version 3, not 1 or 2; fit it again"),
        ({"launch_seconds": -0.1}, "needs launch_seconds, a number of 0 or more, got -0.1"),
        ({"launch_seconds": None}, "needs launch_seconds, a number of 0 or more, got None"),
    ],
)
def test_json_of_another_launch_time_is_refused(change, words):
    state = {**json.loads(launch_model(0.04, 0.1, 1e-5).to_json()), **change}
    with pytest.raises(ArgumentError, match=words):
        TimeModel.from_json(json.dumps(state))


@pytest.mark.parametrize("launch", [-1, float("nan"), float("inf"), True, "0.1"])
def test_an_impossible_launch_time_is_refused(launch):
    with pytest.raises(ArgumentError, match=r"launch_seconds must be a .*number"):
        launch_model(launch, 0.1, 1e-5)
