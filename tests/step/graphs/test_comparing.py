"""Comparing: a replay may differ from an eager run by rounding, or by as much as dropout makes two replays differ."""

import pytest
import torch

from batchwright.step.graphs._comparing import are_alike, outcome_of
from batchwright.step.report import MicroSums

torch.set_num_threads(1)


def outcome(loss=2.0, weight=4.0, gradients=((3.0, 4.0), None, (1.0,)), **metrics):
    sums = MicroSums.of_replay(torch.tensor(loss), torch.tensor(weight), metrics)
    return outcome_of(sums, [None if one is None else torch.tensor(one) for one in gradients])


def test_an_outcome_has_the_norms_of_the_gradients_that_are_there():
    found = outcome()
    assert found.touched == [0, 2]
    assert found.norms.tolist() == [5, 1]
    assert outcome_of(found.sums, [None]).norms.tolist() == []


@pytest.mark.parametrize(
    ("other", "is_alike"),
    [
        (outcome(), True),
        (outcome(loss=2.0001, weight=4.0001), True),
        (outcome(gradients=((3.0001, 4.0), None, (1.0005,))), True),
        (outcome(loss=2.1), False),
        (outcome(weight=5.0), False),
        (outcome(gradients=((3.1, 4.0), None, (1.0,))), False),
        (outcome(gradients=((3.0, 4.0), None, (1.1,))), False),
        (outcome(gradients=((3.0, 4.0), (0.0,), (1.0,))), False),
        (outcome(gradients=((3.0, 4.0), None, None)), False),
        (outcome(hits=1.0), False),
        (outcome(loss=float("nan")), False),
        (outcome(gradients=((3.0, float("inf")), None, (1.0,))), False),
    ],
    ids=[
        "same", "rounded", "rounded-gradients", "loss", "weight", "gradient", "small-gradient", "more-gradients",
        "fewer-gradients", "metric", "no-number", "infinite",
    ],
)  # fmt: skip
def test_outcomes_without_dropout_are_alike_exactly_when_they_differ_by_rounding(other, is_alike):
    assert are_alike((other, other), outcome(), is_half=False) is is_alike
    assert are_alike((outcome(), outcome()), other, is_half=False) is is_alike


def test_with_dropout_an_eager_run_may_be_about_as_far_away_as_two_replays_are():
    replays = outcome(loss=2.0), outcome(loss=2.2)
    assert are_alike(replays, outcome(loss=2.5), is_half=False)
    assert not are_alike(replays, outcome(loss=3.0), is_half=False)


def test_half_precision_may_differ_by_more():
    assert are_alike((outcome(), outcome()), outcome(loss=2.05), is_half=True)
    assert not are_alike((outcome(), outcome()), outcome(loss=2.05), is_half=False)


def test_metrics_are_compared_by_name_in_any_order():
    found = outcome(hits=1.0, misses=2.0)
    assert are_alike((found, found), outcome(misses=2.0, hits=1.0), is_half=False)
    assert not are_alike((found, found), outcome(hits=2.0, misses=1.0), is_half=False)


def test_results_that_are_no_numbers_on_both_sides_are_alike():
    spoiled = outcome(loss=float("nan"), gradients=((float("nan"),),))
    assert are_alike((spoiled, spoiled), spoiled, is_half=False)
