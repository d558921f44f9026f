import json

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from batchwright._types import MAX_INT32
from batchwright.errors import ArgumentError, BudgetError
from batchwright.plan.budget import MaxItems
from batchwright.plan.models._terms import Terms, fit_terms
from batchwright.plan.models.memory import MaxBytes, MemoryModel
from batchwright.plan.models.time import TimeModel, _first_to_reach

from ...thorough import num_cases

GIB = 2**30
ONE_AXIS = np.array([[1, 64], [8, 64], [8, 128], [4, 256], [2, 512], [6, 300], [1, 512], [16, 100]])
# fmt: off
TWO_AXES = np.array([
    [1, 32, 32], [16, 32, 48], [4, 256, 64], [4, 64, 256], [8, 128, 128], [2, 512, 300],
    [2, 300, 512], [1, 512, 512], [24, 64, 64], [12, 200, 100], [3, 100, 400], [6, 400, 20],
])
# fmt: on

coefficients = st.one_of(st.just(0.0), st.floats(1e-6, 1e12))
some_lengths = st.lists(st.integers(1, 5000), min_size=1, max_size=6).map(lambda found: np.array(found)[:, None])


def encoder(b, length):
    """A 340M encoder with eager attention and Adam: static, per token, per pair of tokens."""
    return 340e6 * 16 + b * length * 24 * 34 * 1024 + b * length**2 * 24 * 16 * 5


def decoder(b, length):
    """A 1B decoder without stored attention, and logits over 128,256 words."""
    return 0.95e9 * 16 + b * length * 16 * 34 * 2048 + b * length * 128_256 * 10


def translator(b, source, target):
    """A 600M translator; the logits over 256,206 words outweigh the rest."""
    attention = 12 * 16 * 5 * b * (source**2 + target**2 + source * target)
    tokens = 12 * 1024 * b * (34 * source + 50 * target)
    return 615e6 * 16 + tokens + attention + b * target * 256_206 * 10


ARCHITECTURES = [(encoder, ONE_AXIS), (decoder, ONE_AXIS), (translator, TWO_AXES)]


def held_out(num_axes, seed=0):
    rng = np.random.default_rng(seed)
    return np.column_stack([rng.integers(1, 25, 200), rng.integers(32, 513, (200, num_axes))])


def linear_memory(constant=100.0, per_token=3.0, margin=0.0):
    return MemoryModel(Terms(1, (constant, 0.0, per_token, 0.0)), margin)


# MemoryModel


def test_a_linear_cost_is_recovered():
    model = MemoryModel.fit(ONE_AXIS, 100 + 3 * ONE_AXIS[:, 0] * ONE_AXIS[:, 1])
    assert model.coefficients == pytest.approx({"1": 100, "b": 0, "b*L0": 3, "b*L0^2": 0}, abs=1e-9)
    # 100 + 3 × 10 × 1000, and the least margin of 0.5 % since the fit is exact
    assert model.predict([[10, 1000]]) == pytest.approx([30_100])
    assert model.margin == 0.005
    assert model.upper([[10, 1000]]) == pytest.approx([30_250.5])


def test_every_term_of_two_axes_is_recovered():
    expected = {"1": 1e9, "b": 2e5, "b*L0": 3e4, "b*L1": 4e4, "b*L0^2": 50, "b*L1^2": 60, "b*L0*L1": 70}
    truth = Terms(2, tuple(expected.values()))
    model = MemoryModel.fit(TWO_AXES, truth.predict(TWO_AXES))
    assert model.coefficients == pytest.approx(expected, rel=1e-6)
    assert model.num_axes == 2


def test_terms_are_summed_as_written():
    terms = Terms(2, (1000.0, 100.0, 10.0, 20.0, 1.0, 2.0, 3.0))
    # 1000 + 2 × (100 + 10·5 + 20·7 + 1·25 + 2·49 + 3·35) = 1000 + 2 × 518
    assert terms.predict([[2, 5, 7]]).tolist() == [2036]


@pytest.mark.parametrize(("architecture", "probes"), ARCHITECTURES)
def test_without_noise_a_few_probes_predict_other_shapes(architecture, probes):
    model = MemoryModel.fit(probes, architecture(*probes.T))
    others = held_out(model.num_axes)
    np.testing.assert_allclose(model.predict(others), architecture(*others.T), rtol=1e-9)


@pytest.mark.parametrize(("architecture", "probes"), ARCHITECTURES)
def test_with_one_per_cent_noise_the_error_stays_near_one_per_cent(architecture, probes):
    others = held_out(probes.shape[1] - 1)
    errors, covered = [], []
    for seed in range(num_cases(6, thorough=20)):
        rng = np.random.default_rng(seed)
        noisy = architecture(*probes.T) * (1 + 0.01 * rng.standard_normal(len(probes)))
        model = MemoryModel.fit(probes, noisy)
        errors.append(np.abs(model.predict(others) / architecture(*others.T) - 1).mean())
        covered.append((architecture(*others.T) <= model.upper(others)).mean())
    assert np.mean(errors) < 0.015
    assert np.mean(covered) > 0.95


def test_errors_are_relative_so_a_small_batch_counts_as_much_as_a_large_one():
    # One length, items 1, 2, 3 and 1000 times as many. In bytes the large shapes alone would decide: 2 an item.
    shapes = np.array([[1, 1], [2, 1], [3, 1], [1000, 1], [2000, 1], [3000, 1]])
    model = MemoryModel.fit(shapes, np.array([3, 6, 9, 2000, 4000, 6000]))
    # By percentage all six weigh the same. c + d·b: the small three pull c above 0 and are met within 25 %.
    np.testing.assert_allclose(model.predict(shapes[:3]), [3, 6, 9], rtol=0.25)


@settings(deadline=None, max_examples=num_cases(25, thorough=250))
@given(st.integers(3, 30), st.integers(1, 2), st.integers(0, 2**32 - 1))
def test_at_quantile_one_every_measured_peak_is_covered(num_rows, num_axes, seed):
    rng = np.random.default_rng(seed)
    shapes = rng.integers(1, 6, (num_rows, 1 + num_axes))
    assume((shapes != shapes[0]).any())
    peaks = np.exp(rng.normal(20, rng.choice([0.01, 1, 5]), num_rows))
    model = MemoryModel.fit(shapes, peaks, quantile=1.0)
    assert (peaks <= model.upper(shapes)).all()
    assert model.margin >= 0.005


def test_the_margin_is_the_error_of_a_shape_left_out():
    # One length, so the model is c + d·b. Left out in turn, each of 1, 2, 3 items is predicted from the other
    # two: 120 - (140 - 120) = 100 for 110 measured, (110 + 140) / 2 = 125 for 120, 120 + 10 = 130 for 140.
    # The worst is 110 / 100 - 1 = 10 %, times (3 + 1) / 3.
    model = MemoryModel.fit([[1, 8], [2, 8], [3, 8]], [110, 120, 140])
    assert model.margin == pytest.approx(0.1 * 4 / 3)


def test_with_many_shapes_the_margin_is_a_quantile():
    rng = np.random.default_rng(0)
    shapes = np.column_stack([rng.integers(1, 65, 200), rng.integers(16, 513, 200)])
    noise = rng.uniform(-0.04, 0.04, 200)
    low, high = (MemoryModel.fit(shapes, encoder(*shapes.T) * (1 + noise), quantile=q).margin for q in (0.5, 0.95))
    # |error| is uniform up to 4 %: half of them are below 2 %, 95 % below 3.8 %.
    assert low == pytest.approx(0.02, abs=0.004)
    assert high == pytest.approx(0.038, abs=0.004)


def test_repeated_probes_do_not_narrow_the_margin():
    peaks = encoder(*ONE_AXIS.T) * np.array([1.03, 0.98, 1.01, 0.97, 1.02, 1, 0.99, 1.01])
    once = MemoryModel.fit(ONE_AXIS, peaks)
    thrice = MemoryModel.fit(np.tile(ONE_AXIS, (3, 1)), np.tile(peaks, 3))
    assert thrice.margin == pytest.approx(once.margin, rel=1e-6)


def test_one_length_alone_still_gives_a_model_that_grows_with_length():
    shapes = np.array([[1, 100], [2, 100], [4, 100], [8, 100]])
    model = MemoryModel.fit(shapes, 1000 + 300 * shapes[:, 0])
    # Found: 300 an item at length 100, shared by b, b·L and b·L²: 100 + 1·L + 0.01·L².
    assert model.predict([[10, 100]]) == pytest.approx([4000])
    assert model.predict([[10, 200]]) == pytest.approx([1000 + 10 * (100 + 200 + 400)])
    assert model.predict([[10, 50]]) == pytest.approx([1000 + 10 * (100 + 50 + 25)])


def test_an_axis_with_one_length_leaves_the_other_axis_as_good_as_before():
    shapes = np.array([[1, 64, 32], [8, 64, 32], [4, 64, 128], [2, 64, 512], [6, 64, 300], [12, 64, 100]])
    model = MemoryModel.fit(shapes, translator(*shapes.T))
    others = held_out(2)
    others[:, 1] = 64
    np.testing.assert_allclose(model.predict(others), translator(*others.T), rtol=1e-9)


def test_fewer_probes_than_terms_fit_exactly():
    shapes = TWO_AXES[:4]
    model = MemoryModel.fit(shapes, translator(*shapes.T))
    np.testing.assert_allclose(model.predict(shapes), translator(*shapes.T), rtol=1e-9)


@settings(deadline=None, max_examples=60)
@given(st.integers(3, 12), st.integers(0, 2**32 - 1))
def test_a_larger_batch_is_never_predicted_smaller(num_rows, seed):
    rng = np.random.default_rng(seed)
    shapes = rng.integers(1, 100, (num_rows, 3))
    assume((shapes != shapes[0]).any())
    model = MemoryModel.fit(shapes, np.exp(rng.normal(20, 2, num_rows)))
    here = rng.integers(1, 1000, (50, 3))
    assert (model.predict(here) > 0).all()
    for column in range(3):
        larger = here + rng.integers(0, 50, (50, 1)) * (np.arange(3) == column)
        assert (model.predict(larger) >= model.predict(here)).all()


def test_the_same_shape_gives_the_same_bits_alone_and_among_others():
    model = MemoryModel.fit(TWO_AXES, translator(*TWO_AXES.T) * (1 + 0.01 * np.sin(np.arange(12))))
    shapes = held_out(2)
    assert model.predict(shapes).tolist() == [model.predict(shape[None])[0] for shape in shapes]


def test_no_shapes_predict_nothing():
    assert linear_memory().predict(np.zeros((0, 2), dtype=int)).shape == (0,)


# what both models refuse


@pytest.mark.parametrize("model", [MemoryModel, TimeModel])
@pytest.mark.parametrize(
    ("shapes", "values", "words"),
    [
        ([[1, 8], [2, 8]], [1, 2], "at least 3"),
        ([[1, 8]] * 4, [1, 2, 3, 4], r"all shapes are \[1, 8\]"),
        ([[1, 8], [2, 8], [3, 8]], [1, 2], r"\(3,\), got \(2,\)"),
        ([[1, 8], [2, 8], [3, 8]], [1, 2, 0], "above 0, got 0.0 at 2"),
        ([[1, 8], [2, 8], [3, 8]], [1, float("nan"), 2], "got nan at 1"),
        ([[1, 8], [2, 8], [3, 8]], [float("inf"), 1, 2], "got inf at 0"),
        ([[1, 8], [2, 8], [3, 8]], ["a", "b", "c"], "must be numbers"),
        ([[1, 8], [2, 0], [3, 8]], [1, 2, 3], r"1 or more, got \[2, 0\] in row 1"),
        ([[1.0, 8.0], [2.0, 8.0], [3.0, 8.0]], [1, 2, 3], "integers, got float64"),
        ([[True, True]] * 3, [1, 2, 3], "integers, got bool"),
        ([1, 2, 3], [1, 2, 3], r"\(M, 1 \+ axes\), got \(3,\)"),
        ([[1], [2], [3]], [1, 2, 3], r"got \(3, 1\)"),
        ([[1, 8], [2], [3, 8]], [1, 2, 3], "must form an array"),
    ],
)
def test_probes_that_cannot_be_fitted_are_refused(model, shapes, values, words):
    with pytest.raises(ArgumentError, match=words):
        model.fit(shapes, values)


@pytest.mark.parametrize("quantile", [0, 1.5, -1, float("nan"), True, "high", None])
def test_a_quantile_outside_zero_to_one_is_refused(quantile):
    with pytest.raises(ArgumentError, match="quantile must be a number above 0 and at most 1, got"):
        MemoryModel.fit(ONE_AXIS, encoder(*ONE_AXIS.T), quantile=quantile)


@pytest.mark.parametrize("model", [linear_memory(), TimeModel(Terms(1, (1.0, 0.0, 0.0, 0.0)))])
def test_shapes_with_another_number_of_axes_are_refused(model):
    with pytest.raises(ArgumentError, match="1 length axes, got shapes with 2"):
        model.predict([[8, 64, 64]])


@pytest.mark.parametrize("values", [(1.0,), (1.0, 0.0, 0.0, -1.0), (0.0,) * 4, (float("nan"),) + (0.0,) * 3])
def test_impossible_coefficients_are_refused(values):
    with pytest.raises(ArgumentError, match="coefficients"):
        Terms(1, values)


# JSON


def fitted_models():
    rng = np.random.default_rng(3)
    noisy = translator(*TWO_AXES.T) * (1 + 0.01 * rng.standard_normal(len(TWO_AXES)))
    return [MemoryModel.fit(TWO_AXES, noisy), TimeModel.fit(TWO_AXES, noisy / 1e10, first_visit_seconds=9.1)]


@pytest.mark.parametrize("model", fitted_models(), ids=["memory", "time"])
def test_a_model_survives_json_to_the_last_bit(model):
    again = type(model).from_json(model.to_json())
    assert again == model
    assert hash(again) == hash(model)
    assert repr(again) == repr(model)
    shapes = held_out(2)
    assert again.predict(shapes).tolist() == model.predict(shapes).tolist()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"kind": "batchwright.TimeModel"},
            "expected the JSON of a batchwright.MemoryModel, got .*TimeModel",
        ),
        ({"version": 2}, "version 2, not 1; fit it again"),
        ({"version": None}, "version None"),
        ({"num_axes": 0}, "num_axes, 1 to 100, got 0"),
        ({"num_axes": 2}, "needs coefficients"),
        ({"coefficients": [1, 2]}, "needs coefficients"),
        ({"coefficients": {"1": 1.0, "b": 0.0, "b*L0": "3", "b*L0^2": 0.0}}, r"needs b\*L0, .* got '3'"),
        ({"coefficients": {"1": 1.0, "b": True, "b*L0": 3.0, "b*L0^2": 0.0}}, "got True"),
        ({"margin": -0.1}, "needs margin"),
        ({"margin": float("nan")}, "needs margin"),
        ({"margin": 10**400}, "needs margin"),
    ],
)
def test_json_of_something_else_is_refused(change, words):
    state = {**json.loads(linear_memory().to_json()), **change}
    with pytest.raises(ArgumentError, match=words):
        MemoryModel.from_json(json.dumps(state))


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "null", "[" * 100_000, None, b"\xff"])
@pytest.mark.parametrize("model", [MemoryModel, TimeModel])
def test_garbage_is_no_model(model, text):
    with pytest.raises(ArgumentError, match=f"JSON of a (batchwright.)?{model.__name__}"):
        model.from_json(text)


# MaxBytes


def test_the_number_of_items_is_what_is_left_over_the_cost_of_one():
    budget = linear_memory(constant=100, per_token=3).budget(5000)
    # (5000 - 100) / 3 / 10 = 163.3; / 100 = 16.3; / 1633 = 1.0002; / 1634 = 0.9996
    assert budget.max_items(np.array([[10], [100], [1633], [1634]])).tolist() == [163, 16, 1, 0]
    # (100 + 3·16·100) / 5000
    assert budget.fraction(np.array([16]), np.array([[100]])).tolist() == [0.98]


def test_the_margin_is_kept_free():
    budget = linear_memory(constant=0, per_token=1, margin=0.25).budget(1000)
    # 1000 / 1.25 = 800 tokens
    assert budget.max_items(np.array([[1], [100], [800], [801]])).tolist() == [800, 8, 1, 0]


def test_the_share_is_the_upper_bound_over_the_limit():
    model = fitted_models()[0]
    shapes = held_out(2)
    share = model.budget(8 * GIB).fraction(shapes[:, 0], shapes[:, 1:])
    assert share.tolist() == (model.upper(shapes) / (8 * GIB)).tolist()


def test_nothing_fits_where_the_constant_alone_is_too_much():
    lengths = np.array([[1], [500]])
    assert linear_memory(constant=100).budget(99).max_items(lengths).tolist() == [0, 0]
    assert linear_memory(constant=100, per_token=0).budget(99).max_items(lengths).tolist() == [0, 0]


def test_items_that_cost_nothing_are_limited_by_thirty_two_bits():
    lengths = np.array([[1], [500]])
    assert linear_memory(constant=100, per_token=0).budget(100).max_items(lengths).tolist() == [MAX_INT32] * 2
    assert linear_memory(constant=100, per_token=1e-9).budget(101).max_items(lengths)[0] == 10**9
    assert linear_memory(constant=100, per_token=1e-9).budget(200).max_items(lengths)[0] == MAX_INT32


@settings(deadline=None, max_examples=300)
@given(
    st.tuples(coefficients, coefficients, coefficients, coefficients),
    st.floats(0, 1),
    st.one_of(st.floats(1e-3, 1e15), st.floats(0, 1e-9)),
    some_lengths,
)
def test_the_number_of_items_is_exact_despite_rounding(values, margin, limit, lengths):
    assume(any(values))
    # A limit below 1e-9 stands for one barely above the constant, where the quotient loses its digits.
    barely = max(values[0], 1.0) * (1 + margin) * (1 + limit)
    budget = MemoryModel(Terms(1, values), margin).budget(limit if limit > 1e-9 else barely)
    most = budget.max_items(lengths)
    assert most.dtype.kind == "i"
    assert ((most >= 0) & (most <= MAX_INT32)).all()
    assert ((most == 0) | (budget.fraction(most, lengths) <= 1)).all()
    assert ((most == MAX_INT32) | (budget.fraction(most + 1, lengths) > 1)).all()


def test_a_memory_budget_combines_with_others():
    budget = linear_memory(constant=100, per_token=3).budget(5000) & MaxItems(20)
    assert budget.max_items(np.array([[10], [100]])).tolist() == [20, 16]


def test_planned_shapes_in_thirty_two_bits_do_not_overflow():
    budget = linear_memory(constant=0, per_token=1).budget(1e12)
    lengths = np.array([[100_000]], dtype=np.int32)
    assert budget.max_items(lengths).tolist() == [10_000_000]
    assert budget.fraction(np.array([10_000_000], dtype=np.int32), lengths).tolist() == [1.0]


def test_the_repr_tells_budgets_apart_and_is_the_same_after_json():
    model = linear_memory(constant=100, per_token=3, margin=0.005)
    budget = model.budget(8 * GIB)
    assert repr(budget) == "MaxBytes(8.0 GiB, MemoryModel(1: 100.0, b*L0: 3.0, num_axes=1, margin=0.005))"
    assert repr(MemoryModel.from_json(model.to_json()).budget(float(8 * GIB))) == repr(budget)
    nearly = linear_memory(constant=100, per_token=np.nextafter(3.0, 4.0).item(), margin=0.005)
    others = [model.budget(8 * GIB + 1), nearly.budget(8 * GIB), linear_memory(margin=0.006).budget(8 * GIB)]
    assert len({repr(budget), *map(repr, others)}) == 4


@pytest.mark.parametrize("max_bytes", [0, -1, float("nan"), True, "8 GiB", None])
def test_an_impossible_number_of_bytes_is_refused(max_bytes):
    with pytest.raises(BudgetError, match="MaxBytes needs a finite limit above 0"):
        linear_memory().budget(max_bytes)


def test_a_budget_without_a_model_is_refused():
    with pytest.raises(ArgumentError, match=r"needs a MemoryModel, got 8.*MemoryModel\.fit"):
        MaxBytes(8, 1000)


@pytest.mark.parametrize("lengths", [np.ones((3, 2), dtype=int), np.ones(3, dtype=int)])
def test_lengths_with_another_number_of_axes_are_refused(lengths):
    budget = linear_memory().budget(1000)
    with pytest.raises(BudgetError, match=r"1 length axes, got lengths of shape \(3,"):
        budget.max_items(lengths)
    with pytest.raises(BudgetError, match=r"1 length axes, got lengths of shape \(3,"):
        budget.fraction(np.ones(3, dtype=int), lengths)


# TimeModel


def linear_time(constant=0.08, per_token=1e-5, first_visit_seconds=0.0):
    return TimeModel(Terms(1, (constant, 0.0, per_token, 0.0)), first_visit_seconds)


def throughput(model, num_items, lengths):
    return num_items / model.predict(np.column_stack([num_items, lengths]))


def test_a_time_model_recovers_the_time_of_a_step_and_of_a_token():
    model = TimeModel.fit(ONE_AXIS, 0.08 + 1e-5 * ONE_AXIS[:, 0] * ONE_AXIS[:, 1])
    assert model.coefficients == pytest.approx({"1": 0.08, "b": 0, "b*L0": 1e-5, "b*L0^2": 0}, abs=1e-12)
    assert model.first_visit_seconds == 0


@pytest.mark.parametrize(
    ("first_visit_seconds", "extra"),
    [
        ([1.5, 2.1, 3.9], 0.5),  # over 1, 2, 3 seconds: 0.5, 0.1, 0.9, the median 0.5
        (2.25, 0.25),  # one time for all: 1.25, 0.25, -0.75
        ([0.9, 1.9, 2.9], 0.0),  # faster than steady: nothing to add
        (None, 0.0),
    ],
)
def test_a_first_visit_costs_the_median_of_what_it_took_longer(first_visit_seconds, extra):
    shapes = [[1, 8], [2, 8], [3, 8]]
    model = TimeModel.fit(shapes, [1, 2, 3], first_visit_seconds=first_visit_seconds)
    assert model.first_visit_seconds == pytest.approx(extra)


@pytest.mark.parametrize(
    ("first_visit_seconds", "words"),
    [
        ([1, 2], r"\(3,\), got \(2,\)"),
        (-1, "above 0"),
        ([1, 2, float("nan")], "got nan at 2"),
        ("x", "numbers"),
    ],
)
def test_impossible_first_visits_are_refused(first_visit_seconds, words):
    with pytest.raises(ArgumentError, match=f"first_visit_seconds .*{words}"):
        TimeModel.fit([[1, 8], [2, 8], [3, 8]], [1, 2, 3], first_visit_seconds=first_visit_seconds)


def test_a_plan_pays_for_each_distinct_shape_once():
    model = linear_time(constant=0.5, per_token=0.01, first_visit_seconds=10)
    # 0.5 + 0.01·2·5 = 0.6 twice, 0.5 + 0.01·5·2 = 0.6 once, and two distinct shapes
    assert model.predict_plan([[2, 5], [5, 2], [2, 5]]) == pytest.approx(21.8)
    assert model.predict_plan(np.zeros((0, 2), dtype=int)) == 0


def test_the_knee_is_where_the_fixed_part_of_a_step_no_longer_shows():
    model = linear_time()
    # n·g·0.05 >= 0.95·0.08 with g = 1e-5·30: n >= 5066.7
    assert model.knee([30]).tolist() == [5067]
    # tolerance one half: n·g >= c, n >= 266.7
    assert model.knee([[30]], tolerance=0.5).tolist() == [267]
    # At most 400 items: 0.95·400·0.08 / (0.08 + 0.05·400·g) = 30.4 / 0.086 = 353.5
    assert model.knee([30], max_items=400).tolist() == [354]


@settings(deadline=None, max_examples=200)
@given(st.floats(1e-4, 10), st.floats(1e-9, 1e-2), some_lengths, st.integers(1, 10**6), st.floats(0.001, 0.999))
def test_the_knee_is_the_smallest_batch_near_the_best(constant, per_token, lengths, max_items, tolerance):
    model = linear_time(constant, per_token)
    limits = np.full(len(lengths), max_items)
    knee = model.knee(lengths, max_items=limits, tolerance=tolerance)
    wanted = (1 - tolerance) * throughput(model, limits, lengths)
    assert ((knee >= 1) & (knee <= max_items)).all()
    assert (throughput(model, knee, lengths) >= wanted * (1 - 1e-12)).all()
    one_less = np.maximum(knee - 1, 1)
    assert ((knee == 1) | (throughput(model, one_less, lengths) < wanted * (1 + 1e-12))).all()


@settings(deadline=None, max_examples=100)
@given(st.floats(1e-4, 10), st.floats(1e-6, 1e-2), some_lengths, st.floats(0.01, 0.9))
def test_without_a_limit_the_best_is_that_of_an_endless_batch(constant, per_token, lengths, tolerance):
    model = linear_time(constant, per_token)
    knee = model.knee(lengths, tolerance=tolerance)
    wanted = (1 - tolerance) / (per_token * lengths[:, 0])
    assert (throughput(model, knee, lengths) >= wanted * (1 - 1e-12)).all()
    one_less = np.maximum(knee - 1, 1)
    assert ((knee == 1) | (throughput(model, one_less, lengths) < wanted * (1 + 1e-12))).all()


@settings(deadline=None, max_examples=300)
@given(st.integers(1, 10**7), st.floats(1e-6, 1e6), st.sampled_from([1 - 2**-53, 1.0, 1 + 2**-52, 1.3]))
def test_the_first_count_to_reach_a_goal_is_exact_at_whole_quotients(count, step, nudge):
    goal, steps = count * step * nudge, np.array([step])
    found = _first_to_reach(goal, steps)
    assert (found * steps >= goal).all()
    assert ((found - 1) * steps < goal).all()


def test_the_knee_at_the_edges():
    free_items, free_steps = linear_time(per_token=0.0), linear_time(constant=0.0)
    assert free_items.knee([7]).tolist() == [MAX_INT32]  # throughput grows for ever
    assert free_items.knee([7], max_items=64).tolist() == [61]  # 0.95 × 64 = 60.8
    assert free_steps.knee([7]).tolist() == [1]  # nothing to share between items
    assert linear_time().knee([30, 30], max_items=[0, 1]).tolist() == [0, 1]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tolerance": 0}, "tolerance must be a number above 0 and below 1, got 0"),
        ({"tolerance": 1}, "below 1, got 1"),
        ({"max_items": -1}, "0 or more, got -1"),
        ({"max_items": 2.5}, "whole number"),
        ({"max_items": True}, "whole number"),
        ({"max_items": [1, 2, 3]}, "one for each of 2 lengths"),
    ],
)
def test_impossible_options_of_the_knee_are_refused(options, words):
    with pytest.raises(ArgumentError, match=words):
        linear_time().knee([10, 20], **options)


def test_the_knee_needs_the_axes_of_the_model():
    with pytest.raises(ArgumentError, match="1 length axes, got 2"):
        linear_time().knee([[10, 20]])


def test_terms_that_probes_cannot_tell_apart_share_equally():
    # One number of items: the constant and b have the same column.
    terms = fit_terms(np.array([[1, 1], [1, 2], [1, 4]]), np.array([12.0, 14.0, 18.0]))
    assert terms.named() == pytest.approx({"1": 5, "b": 5, "b*L0": 2, "b*L0^2": 0}, abs=1e-9)
