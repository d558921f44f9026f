"""measured: a paired test of what is not worse, its rates of error by simulation, and what it says."""

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


def make(losses, *, before=None, seconds=None):
    """Return an experiment; the loss fell from 3 to 2 at the size in force, unless ``before`` says otherwise."""
    factors = list(losses)
    before = [3.0] * len(losses[1]) if before is None else before
    seconds = {factor: 8.0 / factor for factor in factors} if seconds is None else seconds
    return {"factors": factors, "losses": losses, "seconds": seconds, "examples": 4096, "before": before}


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


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_a_branch_that_diverged_is_infinitely_bad(bad):
    experiment = make({1: BASE, 2: [2.0, 2.0, bad, 2.0]})
    assert answer(experiment) == 64
    assert "2 diverged: holds 64" in measured().explain(None, Observation(size=64, experiment=experiment))


def false_accepts(harm, *, num_pairs, num=2000, spread=0.1):
    """Return how often a factor that gives up a share ``harm`` of a fall of 1 is taken."""
    rng = np.random.default_rng(1)
    base = 2 + rng.normal(size=(num, num_pairs))  # batches differ; the branches differ by much less
    before, larger = base + 1, base + harm + spread * rng.normal(size=(num, num_pairs))
    runs = zip(base, before, larger, strict=True)
    taken = [answer(make({1: one.tolist(), 2: two.tolist()}, before=old.tolist())) > 64 for one, old, two in runs]
    return float(np.mean(taken))


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
    rising = make({1: BASE, 2: BASE}, before=[1.5] * 4)
    assert policy.explain(None, Observation(size=64, experiment=rising)) == (
        "the loss did not fall in the experiment (1.5 before), nothing to compare: holds 64"
    )


def test_the_evidence_is_in_the_history():
    controller = BatchSizeController(measured(), min_size=16, max_size=4096, initial=64)
    controller.observe(batch_size=64, loss=2.5)
    experiment = make({1: BASE, 2: [2.1] * 4, 4: [2.5] * 4})
    assert controller.observe(experiment=json.loads(json.dumps(experiment))) == 128  # JSON makes texts of the factors
    assert controller.history[-1].reason == (
        "4 pairs at level 0.05: 2 gives up 10.0 % of the fall of the loss (at most 10.0 %, allowed 20.0 %) at 2.00 "
        "times the speed; 4 gives up 50.0 % of the fall of the loss (at most 50.0 %, allowed 20.0 %) at 4.00 times the "
        "speed: 64 \N{MULTIPLICATION SIGN} 2 = 128"
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
        ({"seconds": {1: 1.0, 2: 0.0}}, "the seconds of factor 2 must be a number above 0, got 0.0"),
        ({"seconds": None}, "the seconds of an experiment must be a dict by factor"),
    ],
)
def test_a_damaged_experiment_is_refused(changed, message):
    with pytest.raises(ArgumentError, match=message):
        answer({**make({1: BASE, 2: BASE}), **changed})


def test_something_else_is_no_experiment():
    with pytest.raises(ArgumentError, match="experiment must be a dict with factors, losses, seconds, before"):
        answer({"factors": [1]})
    with pytest.raises(ArgumentError, match="level must be a number above 0 and below 0.5, got 0.5"):
        measured(level=0.5)
    with pytest.raises(ArgumentError, match="tolerance must be a number above 0 and below 1, got 0"):
        measured(tolerance=0)
