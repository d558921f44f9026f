"""Losses over the whole batch in several processes: the program is in ranks.py."""

import pytest

from ...processes import run_ranks


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_with_uneven_shares_train_as_one_process_with_the_joined_batch(world_size, tmp_path):
    run_ranks("tests.step.whole_batches.ranks", world_size, tmp_path / "store")
