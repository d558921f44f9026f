"""BudgetTracker: under-prediction tightens at once, good news counts slowly and never beyond the margin."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import ArgumentError
from batchwright.plan import MemoryModel
from batchwright.plan.models._terms import Terms
from batchwright.step.memory.budget_tracker import RELAX_AFTER, BudgetTracker

# 100 bytes and one a token, 10 % to spare.
MODEL = MemoryModel(Terms(1, (100.0, 0.0, 1.0, 0.0)), margin=0.1)
SHAPE = (10, 90)  # 1000 bytes predicted


def test_under_prediction_tightens_the_budget_at_once():
    tracker = BudgetTracker(MODEL).observe(SHAPE, 900).observe(SHAPE, 1375)
    assert tracker.ratio == pytest.approx(1.375)
    assert tracker.factor == pytest.approx(0.8)  # 1.1 / 1.375
    # Of 2000 bytes 1600 are left: 1600 / 1.1 = 1454.5, less 100 is 1354 tokens; 13 items of 100.
    assert tracker.budget(2000).max_items(np.array([[100]])).tolist() == [13]


def test_a_peak_within_the_margin_changes_nothing():
    tracker = BudgetTracker(MODEL).observe(SHAPE, 1100)
    assert tracker.factor == pytest.approx(1.0)
    assert tracker.budget(2000) == MODEL.budget(2000)


def test_good_news_relaxes_slowly_and_at_first_never_beyond_the_model():
    tracker = BudgetTracker(MODEL, release=0.5).observe(SHAPE, 1500)
    factors = []
    for _ in range(4):
        tracker = tracker.observe(SHAPE, 500)
        factors.append(round(tracker.factor, 4))
    # The ratio goes 1.5, 1.0, 0.75, …: 1.1 / 1.0 is more than the model gave, so 1.
    assert factors == [1.0, 1.0, 1.0, 1.0]
    slow = BudgetTracker(MODEL, release=0.1).observe(SHAPE, 1500).observe(SHAPE, 500)
    assert slow.ratio == pytest.approx(1.4)
    assert slow.factor == pytest.approx(1.1 / 1.4)


def test_a_model_that_was_right_for_long_may_use_its_margin():
    tracker = BudgetTracker(MODEL)
    factors = []
    for _ in range(RELAX_AFTER):
        tracker = tracker.observe(SHAPE, 1000)
        factors.append(tracker.factor)
    assert factors[:-1] == [1.0] * (RELAX_AFTER - 1)
    assert factors[-1] == pytest.approx(1.1 / 1.02)
    # Far below the prediction earns no more: the margin is all there is.
    assert BudgetTracker(MODEL, ratio=0.5, num_observed=99).factor == pytest.approx(1.1 / 1.02)


def test_the_first_observation_counts_in_full():
    assert BudgetTracker(MODEL).observe(SHAPE, 500).ratio == pytest.approx(0.5)


def test_of_several_micro_batches_the_largest_made_the_peak():
    assert BudgetTracker(MODEL).observe([(2, 10), SHAPE, (3, 20)], 1200).ratio == pytest.approx(1.2)


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=20))
def test_the_last_peak_would_fit_and_the_budget_is_never_raised_beyond_the_margin(peaks):
    tracker = BudgetTracker(MODEL)
    for peak in peaks:
        tracker = tracker.observe(SHAPE, peak)
        # A shape with the same error, at the edge of the new budget, stays within the bytes.
        assert tracker.factor / 1.1 * peak / 1000 <= 1 + 1e-9
        assert 0 < tracker.factor <= 1.1


def test_the_state_survives_json():
    tracker = BudgetTracker(MODEL).observe(SHAPE, 1375)
    state = json.loads(json.dumps(tracker.to_state()))
    assert BudgetTracker(MODEL).with_state(state) == tracker
    with pytest.raises(ArgumentError, match="version 1, got None"):
        tracker.with_state({})


@pytest.mark.parametrize("peak", [0, -5, float("nan"), float("inf")])
def test_a_peak_that_is_none_is_refused(peak):
    with pytest.raises(ArgumentError, match="peak_bytes must be finite and above 0"):
        BudgetTracker(MODEL).observe(SHAPE, peak)


@pytest.mark.parametrize("release", [0, 1.5])
def test_a_release_that_is_no_share_is_refused(release):
    with pytest.raises(ArgumentError, match="release must be above 0 and at most 1"):
        BudgetTracker(MODEL, release=release)
