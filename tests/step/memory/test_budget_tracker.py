"""BudgetTracker: a peak too high tightens at once, good news counts slowly; and how it corrects a Stepper's budget."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.plan import MemoryModel
from batchwright.plan.models._terms import Terms
from batchwright.step import MemoryMonitor, Stepper
from batchwright.step.memory.budget_tracker import RELAX_AFTER, BudgetTracker, Feedback
from batchwright.testing import FakeMemory

# 100 bytes and one per token, 10 % to spare.
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
    with pytest.raises(ArgumentError, match="peak_bytes must be a number above 0"):
        BudgetTracker(MODEL).observe(SHAPE, peak)


@pytest.mark.parametrize("release", [0, 1.5])
def test_a_release_that_is_no_share_is_refused(release):
    with pytest.raises(ArgumentError, match="release must be a number above 0 and at most 1"):
        BudgetTracker(MODEL, release=release)


# Feedback: a budget of 330 bytes lets 200 tokens through.
LENGTH = 10


def make_stepper(memory, bytes_a_token):
    """Return a Stepper whose loss takes memory as a device would: 100 bytes and some per token."""
    model = nn.Linear(1, 1)

    def loss_fn(model, batch):
        memory.run_batch(len(batch), bytes_a_token)
        return model(batch[:, :1]).sum(), len(batch)

    return Stepper(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        loss_fn,
        micro_batch=MODEL.budget(330),
        lengths=lambda batch: [LENGTH] * len(batch),
        memory=MemoryMonitor(source=memory),
    )


def make_memory(total_bytes=10_000):
    return FakeMemory(
        total_bytes, used_bytes=100, bytes_of=lambda num_items, bytes_a_token: num_items * LENGTH * bytes_a_token
    )


def test_a_peak_above_the_prediction_makes_the_next_micro_batches_smaller():
    stepper = make_stepper(make_memory(), bytes_a_token=2.0)
    batch = torch.ones(40, LENGTH)
    # 20 rows of 10 tokens are predicted at 300 bytes and take 500: ratio 5/3, factor 1.1 / (5/3) = 0.66.
    assert stepper.step(batch).num_micro_batches == 2
    # 330 × 0.66 = 217.8 bytes let (217.8 / 1.1 − 100) / 10 = 9 rows through: 40 rows in 5 parts.
    assert stepper.step(batch).num_micro_batches == 5


def test_peaks_as_predicted_open_most_of_the_margin_after_a_while():
    stepper = make_stepper(make_memory(), bytes_a_token=1.0)
    batch = torch.ones(42, LENGTH)
    parts = [stepper.step(batch).num_micro_batches for _ in range(RELAX_AFTER + 1)]
    # 42 rows need three micro-batches of at most 20. With 330 × 1.1 / 1.02 = 355.9 bytes 22 rows fit, and two do.
    assert parts == [3] * RELAX_AFTER + [2]


def test_the_report_gives_the_share_of_memory_at_the_peak():
    report = make_stepper(make_memory(total_bytes=1000), bytes_a_token=1.0).step(torch.ones(20, LENGTH))
    assert report.peak_bytes == 300
    assert report.observation()["memory_fraction"] == pytest.approx(0.3)


def test_what_was_learned_is_saved_and_loaded():
    memory = make_memory()
    stepper = make_stepper(memory, bytes_a_token=2.0)
    stepper.step(torch.ones(40, LENGTH))
    other = make_stepper(memory, bytes_a_token=2.0)
    other.load_state_dict(json.loads(json.dumps(stepper.state_dict())))
    assert other.step(torch.ones(40, LENGTH)).num_micro_batches == 5


def test_a_budget_of_tokens_has_nothing_to_correct():
    model = nn.Linear(1, 1)
    stepper = Stepper(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        lambda model, batch: (model(batch).sum(), len(batch)),
        micro_batch=bw.MaxTokens(8),
        lengths=lambda batch: [1] * len(batch),
    )
    assert stepper.step(torch.ones(16, 1)).num_micro_batches == 2
    assert stepper.state_dict()["memory"] is None


def test_the_peak_of_a_failed_attempt_does_not_count_for_the_smaller_pieces_after_it():
    """Before, the full memory at the failure was taken for the peak of the pieces: a ratio of 1.75 for 1.0."""
    memory = make_memory(total_bytes=350)
    feedback = Feedback.of(MODEL.budget(330), MemoryMonitor(source=memory), torch.device("cpu"))
    feedback.begin()
    with pytest.raises(MemoryError):
        memory.run_batch(30, 1.0)
    feedback.failed(30)
    memory.run_batch(10, 1.0)  # 200 bytes, as predicted
    feedback.end([10], [(10, LENGTH)])
    assert feedback.to_state() == {"version": 1, "ratio": 1.0, "num_observed": 1}


def test_a_budget_in_bytes_is_not_corrected_where_nobody_reads_peaks():
    assert Feedback.of(MODEL.budget(330), None, torch.device("cpu")) is None
    assert Feedback.of(8, MemoryMonitor(source=make_memory()), torch.device("cpu")) is None


def test_a_tracker_leaves_the_state_of_a_size_alone():
    feedback = Feedback.of(MODEL.budget(330), MemoryMonitor(source=make_memory()), torch.device("cpu"))
    for state in (None, {"version": 1, "size": 8, "too_large": None, "num_clean": 0}):
        feedback.load_state(state)
    assert feedback.factor == 1.0
