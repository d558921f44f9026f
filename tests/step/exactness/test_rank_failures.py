"""Ranks that fail in every way at random: no rank waits for ever, and all have the same parameters after each step."""

import pytest

from ...processes import run_ranks
from ...thorough import num_cases

NUM_STEPS = num_cases(150, thorough=500)


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_ranks_succeed_or_all_raise_and_their_parameters_stay_equal(world_size, tmp_path):
    run_ranks("tests.step.exactness.rank_failures", world_size, tmp_path / "store", NUM_STEPS)
