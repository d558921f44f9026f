"""Experiments that hold numbers beyond every float, or nothing to test."""

from __future__ import annotations

from typing import Any

import pytest

from batchwright import size
from batchwright.errors import ArgumentError
from batchwright.size import Observation

EXPERIMENT: dict[str, Any] = {
    "factors": [1, 2],
    "before": [2.5, 2.7, 2.4, 2.6],
    "losses": {1: [2.0, 2.2, 1.9, 2.1], 2: [2.0, 2.21, 1.9, 2.1]},
    "seconds": {1: 8.0, 2: 5.0},
    "examples": 4096,
}


@pytest.mark.parametrize(
    "losses",
    [{1: [10**400] * 4, 2: [1.0] * 4}, {1: [1.0] * 4, 10**400: [1.0] * 4}],
    ids=["a loss", "a factor"],
)
def test_a_whole_number_beyond_every_float_is_refused_in_words(losses: Any) -> None:
    # Expected: ArgumentError. Found: OverflowError: int too large to convert to float.
    with pytest.raises(ArgumentError):
        size.measured().update(None, Observation(size=64, experiment={**EXPERIMENT, "losses": losses}))


def test_an_experiment_without_a_larger_factor_says_so() -> None:
    # Expected: words that say that there was no larger factor to test. Found: "4 pairs at level 0.05: : holds 64".
    only = {"factors": [1], "losses": {1: [2.0, 2.2, 1.9, 2.1]}, "seconds": {1: 8.0}}
    reason = size.measured().explain(None, Observation(size=64, experiment={**EXPERIMENT, **only}))
    assert ": :" not in reason


def test_losses_at_the_size_in_force_that_are_not_numbers_are_named() -> None:
    # Expected: a reason that says that training at the size in force diverged.
    # Found: "the loss did not fall in the experiment (2.55 before), nothing to compare", which nobody can know of NaN.
    losses = {1: [float("nan")] * 4, 2: [2.0, 2.21, 1.9, 2.1]}
    reason = size.measured().explain(None, Observation(size=64, experiment={**EXPERIMENT, "losses": losses}))
    assert "nan" in reason.lower() or "diverged" in reason
