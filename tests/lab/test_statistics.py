"""Statistics against values from tables and by hand."""

import math
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright import lab
from batchwright.errors import ArgumentError
from batchwright.lab.statistics import (
    equivalence,
    examples_to_reach,
    holm,
    paired_difference,
    pooled_difference,
    smallest_detectable,
    t_cdf,
    t_quantile,
)

numbers = st.floats(-100, 100)


@pytest.mark.parametrize(
    ("probability", "freedom", "expected"),
    [
        (0.975, 1, 12.7062),
        (0.975, 2, 4.3027),
        (0.975, 4, 2.7764),
        (0.975, 9, 2.2622),
        (0.95, 4, 2.1318),
        (0.995, 29, 2.7564),
    ],
)
def test_quantiles_are_those_of_printed_tables(probability, freedom, expected):
    assert t_quantile(probability, freedom) == pytest.approx(expected, abs=5e-5)


def test_one_degree_of_freedom_is_the_cauchy_distribution():
    # P(T <= t) = 1/2 + arctan(t)/pi
    for t in (-3.0, -0.5, 0.0, 2.0, 100.0):
        assert t_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, abs=1e-12)


def test_two_degrees_of_freedom_have_a_closed_form():
    # P(T <= t) = 1/2 + t / (2 sqrt(2 + t^2))
    for t in (-7.0, 0.1, 1.0, 30.0):
        assert t_cdf(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-12)


def test_many_degrees_of_freedom_come_near_the_normal_distribution():
    assert t_quantile(0.975, 1e6) == pytest.approx(1.959964, abs=1e-5)


@given(st.floats(0.001, 0.999), st.integers(1, 200))
def test_a_quantile_turns_the_distribution_around(probability, freedom):
    assert t_cdf(t_quantile(probability, freedom), freedom) == pytest.approx(probability, abs=1e-9)


def test_infinity_and_far_tails_are_certain():
    assert (t_cdf(math.inf, 4), t_cdf(-math.inf, 4), t_cdf(1e200, 4)) == (1.0, 0.0, 1.0)


def test_a_paired_difference_by_hand():
    # Differences 1, 2, 3: mean 2, s = 1, error 1/sqrt(3); t = 4.302653 for 2 degrees of freedom.
    found = paired_difference([3, 5, 7], [2, 3, 4])
    reach = 4.302653 / math.sqrt(3)
    assert (found.num_pairs, found.mean) == (3, 2)
    assert (found.low, found.high) == pytest.approx((2 - reach, 2 + reach), abs=1e-5)
    # t = 2·sqrt(3), and by the closed form p = 1 − t/sqrt(2 + t²).
    assert found.p_value == pytest.approx(1 - math.sqrt(12) / math.sqrt(14), abs=1e-10)
    assert not found.is_clear


def test_pairing_takes_out_what_a_seed_does_to_both():
    # Seeds differ by tens, the strategy is better by about 1 on each.
    found = paired_difference([11.0, 31.1, 50.9], [10.0, 30.0, 50.0])
    assert found.is_clear
    assert found.low > 0.5


def test_a_single_pair_has_no_interval():
    found = paired_difference([3.0], [1.0])
    assert (found.mean, found.low, found.high, found.p_value, found.is_clear) == (2.0, None, None, None, False)
    assert equivalence([3.0], [1.0], margin=1) is None


def test_differences_that_are_all_the_same_are_certain():
    # Subtractions round differently, which is no spread.
    baseline = [count / 359 for count in (350, 351, 352, 353, 354)]
    found = paired_difference([value - 1 / 359 for value in baseline], baseline)
    assert (found.low, found.mean, found.high, found.p_value) == (found.mean, found.mean, found.mean, 0)
    assert equivalence([2.0, 3.0], [1.0, 2.0], margin=0.5) == 1
    assert equivalence([2.0, 3.0], [1.0, 2.0], margin=1.5) == 0


def test_coarse_figures_have_at_least_the_spread_of_their_steps():
    # One of 10 examples on both seeds: s = 0.1/sqrt(6), error s/sqrt(2), t = 12.7062 for one degree of freedom.
    found = paired_difference([0.6, 0.8], [0.5, 0.7], resolution=0.1)
    assert found.high - found.mean == pytest.approx(12.7062 * 0.1 / math.sqrt(12), abs=1e-5)
    assert not found.is_clear
    assert 0.04 < equivalence([0.6, 0.8], [0.5, 0.7], margin=0.3, resolution=0.1) < 0.06
    # A spread that is wider than the steps stays.
    wide = [0.9, 0.2, 0.5], [0.1, 0.3, 0.5]
    assert paired_difference(*wide, resolution=0.1) == paired_difference(*wide)


def test_results_that_are_all_the_same_do_not_differ():
    found = paired_difference([1.0, 2.0], [1.0, 2.0])
    assert (found.mean, found.low, found.high, found.p_value) == (0, 0, 0, 1)


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=8))
def test_exchanging_the_sides_turns_the_sign(pairs):
    values, baseline = zip(*pairs, strict=True)
    one, other = paired_difference(values, baseline), paired_difference(baseline, values)
    assert one.mean == pytest.approx(-other.mean)
    assert one.low == pytest.approx(-other.high, abs=1e-9)
    assert one.p_value == pytest.approx(other.p_value)


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=8))
def test_an_interval_leaves_out_zero_where_the_test_rejects(pairs):
    found = paired_difference(*zip(*pairs, strict=True))
    if abs(found.p_value - 0.05) > 1e-6:
        assert found.is_clear == (found.p_value < 0.05)


def test_a_wider_confidence_gives_a_wider_interval():
    pairs = [1.0, 2.0, 4.0], [0.0, 0.0, 0.0]
    assert paired_difference(*pairs, confidence=0.99).low < paired_difference(*pairs, confidence=0.9).low


def test_holm_multiplies_by_what_is_left_and_never_falls():
    # Sorted 0.01·4, 0.02·3, 0.03·2 = 0.06, 0.04·1 raised to 0.06.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_never_lowers_and_keeps_the_order(p_values):
    corrected = holm(p_values)
    assert all(new >= old for new, old in zip(corrected, p_values, strict=True))
    ranked = [corrected[i] for i in sorted(range(len(p_values)), key=p_values.__getitem__)]
    assert ranked == sorted(ranked)


def test_equivalence_by_hand():
    # Differences 0, 1, −1: mean 0, error 1/sqrt(3). Margin 3: t = 3·sqrt(3), 2 degrees of freedom.
    t = 3 * math.sqrt(3)
    assert equivalence([1, 3, 2], [1, 2, 3], margin=3) == pytest.approx(0.5 - t / (2 * math.sqrt(2 + t * t)), abs=1e-10)


def test_a_difference_beyond_the_margin_is_not_equivalent():
    assert equivalence([5.0, 6.0, 7.1], [0.0, 0.0, 0.0], margin=1) > 0.95


def test_a_pooled_difference_by_hand():
    # Two cells of differences 0, 2 and 4, 8: means 1 and 6, variances of the means 1 and 4, error sqrt(5)/2.
    # One cell has four fifths of the variance: its one degree of freedom counts, t = 12.7062.
    found = pooled_difference([[0.0, 2.0], [4.0, 8.0]])
    assert (found.mean, found.num_pairs, found.freedom) == (3.5, 4, 1)
    assert found.error == pytest.approx(math.sqrt(5) / 2)
    assert found.high - found.mean == pytest.approx(12.7062 * math.sqrt(5) / 2, abs=1e-4)


def test_cells_of_equal_spread_add_their_degrees_of_freedom():
    # Welch: (4 v)^2 / (4 v^2 / 2) = 8 for four cells of three seeds.
    assert pooled_difference([[1.0, 2.0, 3.0]] * 4).freedom == pytest.approx(8)


def test_differences_between_cells_are_no_noise():
    # The same spread in each cell, around 0 and around 100: the interval is as wide.
    near, far = pooled_difference([[0.0, 1.0, 2.0]] * 2), pooled_difference([[0.0, 1.0, 2.0], [100.0, 101.0, 102.0]])
    assert far.high - far.low == pytest.approx(near.high - near.low)
    assert far.mean == 51


@given(st.lists(numbers, min_size=2, max_size=8))
def test_one_cell_pooled_is_the_paired_test(changes):
    assert pooled_difference([changes]) == paired_difference(changes, [0.0] * len(changes))


def test_a_cell_with_one_pair_has_no_spread_to_pool():
    assert pooled_difference([[1.0, 2.0], [1.0]]) is None


@pytest.mark.parametrize(
    ("spreads", "num_seeds"), [((1, 1, 1), 5), ((10, 1, 1, 1, 1, 1, 1), 3), ((10, 1, 1, 1, 1, 1, 1), 5)], ids=str
)
def test_luck_is_not_shown_however_much_spreads_differ(spreads, num_seeds):
    rng = np.random.default_rng(0)
    labs = [[spread * rng.standard_normal(num_seeds) for spread in spreads] for _ in range(1000)]
    found = [pooled_difference(cells) for cells in labs]
    # At the level of one in a hundred, as after a correction: at most ten of a thousand on average.
    assert sum(one.p_value < 0.01 for one in found) <= 12
    assert 930 <= sum(one.low <= 0 <= one.high for one in found) <= 980


def test_opposite_effects_have_a_mean_that_is_shown():
    # −0.3 in one cell and +0.1 in two: the mean, −1/30, is far from 0 by its spread.
    cells = [[-0.3, -0.301, -0.299, -0.3], [0.1, 0.101, 0.099, 0.1], [0.1, 0.1, 0.101, 0.099]]
    found = pooled_difference(cells)
    assert found.mean == pytest.approx(-1 / 30)
    assert found.p_value < 1e-6


def test_the_smallest_detectable_change_by_hand():
    # t(0.975; 4) = 2.7764 and t(0.8; 4) = 0.9410.
    assert smallest_detectable(0.1, 4) == pytest.approx(0.1 * (2.7764 + 0.9410), abs=1e-5)
    assert smallest_detectable(0.1, 4, level=0.01) > smallest_detectable(0.1, 4)


def test_a_change_of_the_detectable_size_is_found_in_four_of_five_cases():
    rng = np.random.default_rng(0)
    size = smallest_detectable(1 / math.sqrt(6), 5)
    found = [paired_difference(list(size + rng.standard_normal(6)), [0.0] * 6).is_clear for _ in range(1000)]
    assert 0.76 <= sum(found) / 1000 <= 0.86


def test_a_curve_reaches_its_target_between_two_points():
    curve = [(0, 0.25), (100, 0.5), (200, 0.25), (300, 0.75)]
    assert examples_to_reach(curve, 0.375) == 50
    assert examples_to_reach(curve, 0.625) == 275  # three quarters of the way from 200 to 300
    assert examples_to_reach(curve, 0.1) == 0
    assert examples_to_reach(curve, 0.9) is None


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: paired_difference([1.0], [1.0, 2.0]), "the same length, at least 1; got 1 and 2"),
        (lambda: paired_difference([], []), "at least 1; got 0 and 0"),
        (lambda: paired_difference([math.nan], [1.0]), "finite"),
        (lambda: paired_difference([1.0], [1.0], confidence=1), "confidence"),
        (lambda: equivalence([1.0], [1.0], margin=0), "margin"),
        (lambda: paired_difference([1.0], [1.0], resolution=-1), "resolution"),
        (lambda: paired_difference(["3"], [1.0]), "finite"),
        (lambda: paired_difference([1.0], [True]), "finite"),
        (lambda: holm([1.2]), "from 0 to 1"),
        (lambda: pooled_difference([]), "at least one cell, got none"),
        (lambda: pooled_difference([[1.0, math.nan]]), "finite"),
        (lambda: pooled_difference([[]]), "at least 1; got 0 and 0"),
        (lambda: smallest_detectable(-1, 4), "error"),
        (lambda: smallest_detectable(1, 4, power=0.3), "power"),
        (lambda: holm(["1"]), "from 0 to 1"),
        (lambda: holm([math.nan]), "from 0 to 1"),
        (lambda: examples_to_reach([(0, None)], 1), r"two numbers, got \(0, None\)"),
        (lambda: t_quantile(1, 3), "probability"),
        (lambda: t_cdf(1, 0), "freedom"),
    ],
)
def test_what_cannot_be_compared_is_refused(call, match):
    with pytest.raises(ArgumentError, match=match):
        call()


def test_the_front_loads_its_modules_when_they_are_asked_for():
    code = "import sys, batchwright.lab as lab; print(lab.statistics.holm([0.5]), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[0.5] False\n"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = lab.nothing
