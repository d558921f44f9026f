"""Stepper in several processes: the programs are in ranks.py and shards.py."""

import pytest

from ..processes import run_ranks


@pytest.mark.parametrize(("world_size", "num_steps"), [(2, 300), (3, 40)])
def test_ranks_that_run_out_of_memory_on_their_own_neither_hang_nor_drift(world_size, num_steps, tmp_path):
    run_ranks("tests.step.ranks", world_size, tmp_path / "store", num_steps)


def test_sharded_ranks_with_uneven_lengths_train_as_one_process_would(tmp_path):
    run_ranks("tests.step.shards", 2, tmp_path / "store")


@pytest.mark.parametrize("world_size", [2, 4])
def test_wrappers_parameters_and_failures_give_one_outcome_on_all_ranks(world_size, tmp_path):
    run_ranks("tests.step.wrapped", world_size, tmp_path / "store")
