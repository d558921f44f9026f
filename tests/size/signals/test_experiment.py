"""measured: a paired test of what is not worse after the same seconds, its errors by simulation, and what it says."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import ArgumentError
from batchwright.size import BatchSizeController, Observation, measured
from batchwright.size.signals.experiment import t_quantile
from batchwright.testing import check_policy

# What Student's table says at 0.05 and 0.01, one-sided.
TABLE = {(0.05, 1): 6.314, (0.05, 3): 2.353, (0.05, 9): 1.833, (0.05, 30): 1.697, (0.01, 2): 6.965, (0.01, 5): 3.365}


def make(losses, *, before=None, seconds=None, on_the_way=None):
    """Return an experiment; the loss fell from 3 to 2 at the size in force, unless ``before`` says otherwise.

    ``on_the_way`` has evaluations by factor before the last one: seconds and losses.
    """
    factors = list(losses)
    before = [3.0] * len(losses[1]) if before is None else before
    seconds = {factor: 8.0 / factor for factor in factors} if seconds is None else seconds
    found = {"factors": factors, "losses": losses, "seconds": seconds, "examples": 4096, "before": before}
    if on_the_way is not None:
        found["curve"] = {
            factor: [*on_the_way.get(factor, []), [seconds[factor], losses[factor]]] for factor in factors
        }
    return found


def answer(experiment, size=64, **settings):
    return measured(**settings).update(None, Observation(size=size, experiment=experiment))[0]


BASE = [2.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize(("level", "freedom"), TABLE)
def test_quantiles_are_those_of_the_table(level, freedom):
    assert t_quantile(level, freedom) == pytest.approx(TABLE[level, freedom], abs=6e-4)


def test_the_largest_factor_that_is_not_worse_is_taken():
    assert answer(make({1: BASE, 2: BASE, 4: BASE})) == 256
    assert answer(make({1: BASE, 2: BASE, 4: [2.5] * 4})) == 128
    assert answer(make({1: BASE, 2: [2.5] * 4, 4: [2.6] * 4})) == 64


def test_the_limit_is_the_tolerated_share_of_the_fall_plus_the_error():
    # The fall is 1, so 0.2 may be given up; t(0.05, 3) is 2.353.
    worse = [2.05, 2.05, 2.05, 2.25]  # mean 0.1, sd 0.1, error of the mean 0.05: 0.1 + 0.1177 > 0.2
    assert answer(make({1: BASE, 2: worse})) == 64
    nearer = [2.06, 2.06, 2.06, 2.22]  # mean 0.1, sd 0.08, error 0.04: 0.1 + 0.0941 < 0.2
    assert answer(make({1: BASE, 2: nearer})) == 128
    assert answer(make({1: BASE, 2: worse}), tolerance=0.25) == 128
    assert answer(make({1: BASE, 2: worse}), level=0.2) == 128


def test_few_noisy_pairs_do_not_make_every_size_not_worse():
    rng = np.random.default_rng(0)
    noisy = {factor: (2 + rng.normal(size=5)).tolist() for factor in (1, 2, 4)}
    assert answer(make(noisy)) == 64


def test_batches_that_differ_far_more_than_branches_are_paired():
    hard = np.array([1.0, 2.0, 4.0, 8.0])
    losses = {1: (0.8 * hard).tolist(), 2: (0.81 * hard).tolist()}
    assert answer(make(losses, before=hard.tolist())) == 128  # gives up 0.01 of 0.2 on every batch
    losses = {1: (0.8 * hard).tolist(), 2: (0.85 * hard).tolist()}
    assert answer(make(losses, before=hard.tolist())) == 64  # a quarter of the fall, on every batch


def test_a_larger_factor_after_one_that_failed_is_not_taken():
    assert answer(make({1: BASE, 2: [2.5] * 4, 4: BASE})) == 64


def test_a_factor_that_took_longer_is_not_taken():
    assert answer(make({1: BASE, 2: BASE}, seconds={1: 8.0, 2: 8.1})) == 64


# After the same seconds


def test_a_larger_size_is_compared_with_what_the_smaller_had_reached_by_then():
    # Twice the size ends after 4 of 8 seconds, at 2.4. By then the size in force was at 2.5, and at 2 in the end.
    larger, on_the_way = [2.4] * 4, {1: [[4.0, [2.5] * 4]]}
    assert answer(make({1: BASE, 2: larger}, on_the_way=on_the_way)) == 128
    assert answer(make({1: BASE, 2: larger})) == 64  # without a curve only the end is known
    assert answer(make({1: BASE, 2: [2.7] * 4}, on_the_way=on_the_way)) == 64


def test_a_straight_line_joins_two_evaluations():
    # 2.5 after 4 s and 2 after 8 s: 2.25 after 6 s. The fall by then is 0.75, and 0.15 of it may be given up.
    on_the_way, seconds = {1: [[4.0, [2.5] * 4]]}, {1: 8.0, 2: 6.0}
    assert answer(make({1: BASE, 2: [2.399] * 4}, seconds=seconds, on_the_way=on_the_way)) == 128
    assert answer(make({1: BASE, 2: [2.401] * 4}, seconds=seconds, on_the_way=on_the_way)) == 64


def test_before_the_first_evaluation_its_loss_counts():
    on_the_way, seconds = {1: [[4.0, [2.5] * 4]]}, {1: 8.0, 2: 3.0}
    # A line from 3 before the experiment would say 2.625 after 3 s, and let 2.65 pass.
    assert answer(make({1: BASE, 2: [2.65] * 4}, seconds=seconds, on_the_way=on_the_way)) == 64
    assert answer(make({1: BASE, 2: [2.59] * 4}, seconds=seconds, on_the_way=on_the_way)) == 128
    experiment = make({1: BASE, 2: [2.65] * 4}, seconds=seconds, on_the_way=on_the_way)
    assert "2.5 at 1 after 4 s (" in measured().explain(None, Observation(size=64, experiment=experiment))


def test_a_branch_that_ends_sooner_gains_nothing_by_a_fall_that_slows_down():
    # Only the number of updates matters, and the loss falls as its root: a larger batch is of no use.
    few, many = 3 - math.sqrt(1 / 2), 2.0  # after 8 and 16 updates
    seconds, on_the_way = {1: 8.0, 2: 6.4}, {1: [[4.0, [few] * 4]]}
    experiment = make({1: [many] * 4, 2: [few] * 4}, seconds=seconds, on_the_way=on_the_way)
    # Each fall by its own seconds: 0.110 against 0.125, only 12 % less. By 6.4 s: 0.71 against 0.88, 20 % less.
    assert answer(experiment, tolerance=0.15) == 64


def test_a_larger_factor_must_not_be_worse_than_a_smaller_one_that_passed():
    # Four times the size is better than the size in force, and worse than twice the size.
    on_the_way = {1: [[2.0, [2.8] * 4], [4.0, [2.6] * 4]], 2: [[2.0, [2.2] * 4]]}
    losses = {1: BASE, 2: [2.0] * 4, 4: [2.5] * 4}
    assert answer(make(losses, on_the_way=on_the_way)) == 128
    assert answer(make({**losses, 4: [2.2] * 4}, on_the_way=on_the_way)) == 256  # as good: the larger is kept


def test_where_the_loss_did_not_fall_a_larger_size_must_be_surely_better():
    on_the_way = {1: [[4.0, [3.1] * 4]]}
    better, unsure = [2.9, 2.95, 2.9, 2.95], [2.5, 3.5, 2.5, 3.5]
    assert answer(make({1: [3.1] * 4, 2: better}, on_the_way=on_the_way)) == 128
    assert answer(make({1: [3.1] * 4, 2: unsure}, on_the_way=on_the_way)) == 64
    assert answer(make({1: [3.1] * 4, 2: [3.1] * 4}, on_the_way=on_the_way)) == 64


def test_a_smaller_size_that_diverged_or_an_infinite_loss_before_decides_nothing():
    words = "the loss was not finite before or at a smaller size, nothing to compare: holds 64"
    for experiment in (make({1: [math.inf] * 4, 2: BASE}), make({1: BASE, 2: BASE}, before=[math.inf] * 4)):
        assert words in measured().explain(None, Observation(size=64, experiment=experiment))


def explained(experiment):
    return measured().explain(None, Observation(size=64, experiment=experiment))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_no_number_is_called_not_finite(bad):
    words = "4 pairs at level 0.05: the loss was not finite before or at a smaller size, nothing to compare: holds 64"
    assert explained(make({1: BASE, 2: BASE}, before=[3.0, 3.0, 3.0, bad])) == words
    assert explained(make({1: [2.0, 2.0, 2.0, bad], 2: BASE})) == words


def test_losses_whose_differences_overflow_are_not_compared():
    experiment = make({1: [1.7e308] * 4, 2: [-1.7e308] * 4}, before=[1e308] * 4)
    words = "the losses are too large to compare, their differences are not finite: holds 64"
    assert explained(experiment) == f"4 pairs at level 0.05: {words}"


@pytest.mark.parametrize("factors", [(1,), (1, 0.5)], ids=["one", "a smaller one"])
def test_without_a_factor_above_1_the_reason_says_so(factors):
    words = "4 pairs at level 0.05: no factor above 1 was tried, nothing to compare: holds 64"
    assert explained(make(dict.fromkeys(factors, BASE))) == words


def simulated(*, lr, noise, seconds_of, rule, num_batches=64, curvature=1.0, seed=0):
    """Return an experiment on a noisy quadratic: SGD, with the seconds of an update as a function of its factor."""
    rng = np.random.default_rng(seed)
    shifts = 0.02 * rng.normal(size=(12, 50))  # held-out batches have slightly other minima

    def losses(point):
        return (curvature * np.square(point - shifts).sum(1) / 100).tolist()

    start = 1 + 0.1 * rng.normal(size=50)
    gradients = noise * rng.normal(size=(num_batches, 50))
    ends, seconds, on_the_way = {}, {}, {}
    for factor in (1, 2, 4):
        point, marks = start, [num_batches // other for other in (4, 2, 1) if other >= factor]
        found = {}
        for number, drawn in enumerate(gradients.reshape(-1, factor, 50).mean(1), start=1):
            point = point - lr * rule(factor) * (curvature * point + drawn)
            found[number] = losses(point)
        ends[factor], seconds[factor] = found[marks[-1]], marks[-1] * seconds_of(factor)
        on_the_way[factor] = [[mark * seconds_of(factor), found[mark]] for mark in marks[:-1]]
    return make(ends, before=losses(start), seconds=seconds, on_the_way=on_the_way)


SEEDS = range(20)


def test_a_batch_that_is_all_noise_and_costs_only_launches_grows():
    sizes = [
        answer(simulated(lr=0.01, noise=5.0, seconds_of=lambda factor: 0.01, rule=math.sqrt, seed=seed))
        for seed in SEEDS
    ]
    assert sizes == [256] * len(SEEDS)


def test_a_batch_whose_every_example_costs_does_not_grow():
    # Twice the size takes twice the time; with the root of two times the rate it goes 0.71 of the way.
    sizes = [
        answer(simulated(lr=0.002, noise=1.0, seconds_of=lambda factor: 0.01 * factor, rule=math.sqrt, seed=seed))
        for seed in SEEDS
    ]
    assert sizes == [64] * len(SEEDS)


def test_a_batch_whose_rate_the_curvature_limits_stays_even_if_only_launches_cost():
    # At the rate 0.95 an update goes nearly to the minimum; at 1.9 it goes nearly as far beyond it.
    sizes = [
        answer(simulated(lr=0.95, noise=0.01, seconds_of=lambda _: 0.01, rule=float, num_batches=8, seed=seed))
        for seed in SEEDS
    ]
    assert sizes == [64] * len(SEEDS)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_branch_that_diverged_is_infinitely_bad(bad):
    experiment = make({1: BASE, 2: [2.0, 2.0, bad, 2.0]})
    assert answer(experiment) == 64
    assert "2 times the size diverged: holds 64" in measured().explain(
        None, Observation(size=64, experiment=experiment)
    )


def false_accepts(harm, *, num_pairs, num=2000, spread=0.1):
    """Return how often a factor that gives up a share ``harm`` of a fall of 1 is taken."""
    rng = np.random.default_rng(1)
    base = 2 + rng.normal(size=(num, num_pairs))  # batches differ; the branches differ by much less
    before, larger = base + 1, base + harm + spread * rng.normal(size=(num, num_pairs))
    runs = zip(base, before, larger, strict=True)
    # By the end of the larger branch the loss had fallen by 1, after that it fell by another 1.
    experiments = [
        make({1: (one - 1).tolist(), 2: two.tolist()}, before=old.tolist(), on_the_way={1: [[4.0, one.tolist()]]})
        for one, old, two in runs
    ]
    return float(np.mean([answer(experiment) > 64 for experiment in experiments]))


@pytest.mark.parametrize("num_pairs", [4, 12])
def test_harm_at_the_limit_passes_as_often_as_the_level_says(num_pairs):
    # 2,000 experiments: 0.05 ± 3 · sqrt(0.05 · 0.95 / 2000).
    assert false_accepts(0.2, num_pairs=num_pairs) == pytest.approx(0.05, abs=0.015)
    assert false_accepts(0.4, num_pairs=num_pairs) < 0.01


def test_what_does_no_harm_passes_if_the_pairs_can_show_it():
    # The error of a mean of 12 pairs is 0.03, and the limit is 0.2.
    assert false_accepts(0.0, num_pairs=12) > 0.99
    assert false_accepts(0.0, num_pairs=12, spread=1.0) < 0.2  # the error is 0.3: it cannot be told


def test_it_holds_without_an_experiment_and_explains_itself():
    policy = measured()
    assert policy.explain(None, Observation(size=64, batch_size=64)) == (
        "no experiment was made since the last observation: holds 64"
    )
    few = make({1: BASE[:3], 2: BASE[:3]})
    assert policy.explain(None, Observation(size=64, experiment=few)) == (
        "3 pairs of losses cannot show what is not worse, 4 are the fewest: holds 64"
    )
    slow = make({1: BASE, 2: BASE}, seconds={1: 8.0, 2: 8.1})
    assert policy.explain(None, Observation(size=64, experiment=slow)) == (
        "4 pairs at level 0.05: 2 times the size took longer for the same examples, 8.1 s and not 8 s at 1: holds 64"
    )
    rising = make({1: BASE, 2: BASE}, before=[1.5] * 4, on_the_way={1: [[4.0, BASE]]})
    assert policy.explain(None, Observation(size=64, experiment=rising)) == (
        "4 pairs at level 0.05: after 4 s: 2 at 2 times the size, 2 at 1 (at least 0 lower, as the loss did not fall, "
        "it must be lower): holds 64"
    )


def test_the_evidence_is_in_the_history():
    controller = BatchSizeController(measured(), min_size=16, max_size=4096, initial=64)
    controller.observe(batch_size=64, loss=2.5)
    on_the_way = {1: [[2.0, [2.5] * 4], [4.0, [2.25] * 4]], 2: [[2.0, [2.4] * 4]]}
    experiment = make({1: BASE, 2: [2.2] * 4, 4: [2.75] * 4}, on_the_way=on_the_way)
    assert controller.observe(experiment=json.loads(json.dumps(experiment))) == 128  # JSON makes texts of the factors
    assert controller.history[-1].reason == (
        "4 pairs at level 0.05: after 4 s: 2.2 at 2 times the size, 2.25 at 1 (at least 0.05 lower, 0.15 allowed); "
        "after 2 s: 2.75 at 4 times the size, 2.5 at 1 (at most 0.25 higher, 0.1 allowed), 2.4 at 2 (at most 0.35 "
        "higher, 0.12 allowed): 64 \N{MULTIPLICATION SIGN} 2 = 128"
    )
    assert controller.history[-1].step == 1  # an experiment is no update
    assert controller.observe(batch_size=128, loss=2.5) == 128


def test_the_contract_of_policies_is_kept():
    course = [{"batch_size": 64}, {"experiment": make({1: BASE, 2: BASE})}, {"batch_size": 64}]
    check_policy(measured(), observations=course)
    assert repr(measured()) == "measured()"
    assert repr(measured(level=np.float64(0.1), tolerance=0.5)) == "measured(level=0.1, tolerance=0.5)"


@given(st.lists(st.floats(1, 3), min_size=4, max_size=8), st.floats(0.01, 0.9), st.floats(0.01, 0.4))
def test_a_larger_tolerance_or_level_never_takes_a_smaller_size(losses, tolerance, level):
    experiment = make({1: [2.0] * len(losses), 2: losses, 4: losses})
    sizes = [
        answer(experiment, tolerance=t, level=a) for t, a in ((tolerance, level), (0.95, level), (tolerance, 0.45))
    ]
    assert sizes[0] <= min(sizes[1:])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"before": None}, "the losses before must be a list of numbers, got None"),
        ({"factors": [2, 4]}, "must have 1, the size in force"),
        ({"factors": []}, "the factors of an experiment must be a list"),
        ({"factors": [1, -2]}, "a factor of the experiment must be a number above 0, got -2"),
        ({"losses": {1: BASE}}, "the losses of an experiment must be a dict by factor, one for each of"),
        ({"losses": {1: BASE, 2: "abc"}}, "the losses of factor 2 must be a list of numbers, got 'abc'"),
        ({"losses": {1: BASE, 2: BASE[:3]}}, "every factor needs as many losses, paired by what they were measured on"),
        ({"losses": {1: BASE, 2: [10**400] * 4}}, "the losses of factor 2 must be numbers within the range of a float"),
        ({"before": [-(10**400)] * 4}, "the losses before must be numbers within the range of a float"),
        ({"losses": {1: BASE, 10**400: BASE}}, "the losses of an experiment must be a dict by factor, one for each"),
        ({"seconds": {1: 8.0, 10**400: 4.0}}, "the seconds of an experiment must be a dict by factor, one for each"),
        ({"seconds": {1: 1.0, 2: 0.0}}, "the seconds of factor 2 must be a number above 0, got 0.0"),
        ({"seconds": None}, "the seconds of an experiment must be a dict by factor"),
        ({"curve": None}, "the curve of an experiment must be a dict by factor"),
        (
            {"curve": {1: [], 2: [[4.0, BASE]]}},
            r"the curve of factor 1 must rise in seconds and end with .* 8\.0, got \[\]",
        ),
        ({"curve": {1: [8.0, BASE], 2: []}}, r"the curve of factor 1 must be a list of \[seconds, losses\], got"),
        ({"curve": {1: [[9.0, BASE], [8.0, BASE]], 2: []}}, "the curve of factor 1 must rise in seconds"),
        ({"curve": {1: [[7.0, BASE]], 2: []}}, r"end with those of the factor, 8\.0, got \[7\.0\]"),
        ({"curve": {1: [[4.0, BASE[:2]], [8.0, BASE]], 2: []}}, "the curve of factor 1 must have the factor's pairs"),
        ({"curve": {1: [[8.0, [1.0] * 4]], 2: []}}, "the curve of factor 1 must have .* and end with its losses"),
        ({"curve": {1: [[4.0, "abc"], [8.0, BASE]], 2: []}}, "the losses of the curve of factor 1 must be a list of"),
        (
            {"curve": {1: [[-4.0, BASE], [8.0, BASE]], 2: []}},
            "the seconds of the curve of factor 1 must be a number above 0",
        ),
    ],
)
def test_a_damaged_experiment_is_refused(changed, message):
    with pytest.raises(ArgumentError, match=message):
        answer({**make({1: BASE, 2: BASE}), **changed})


def test_something_else_is_no_experiment():
    with pytest.raises(ArgumentError, match="experiment must be a dict with factors, losses, seconds, before"):
        answer({"factors": [1]})
    with pytest.raises(ArgumentError, match=r"level must be a number above 0 and below 0\.5, got 0\.5"):
        measured(level=0.5)
    with pytest.raises(ArgumentError, match="tolerance must be a number above 0 and below 1, got 0"):
        measured(tolerance=0)
