"""Stepper in several processes: the programs are in ranks.py, shards.py, wrapped.py and noise_ranks.py."""

import pytest
from torch.distributed.fsdp import FSDPModule

from ..processes import run_ranks

needs_fsdp2 = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_gradient_divide_factor"), reason="this torch divides the gradients of FSDP2 itself"
)


@pytest.mark.parametrize(("world_size", "num_steps"), [(2, 300), (3, 40)])
def test_ranks_that_run_out_of_memory_on_their_own_neither_hang_nor_drift(world_size, num_steps, tmp_path):
    run_ranks("tests.step.ranks", world_size, tmp_path / "store", num_steps)


@needs_fsdp2
def test_sharded_ranks_with_uneven_lengths_train_as_one_process_would(tmp_path):
    run_ranks("tests.step.shards", 2, tmp_path / "store")


@needs_fsdp2
@pytest.mark.parametrize("world_size", [2, 4])
def test_wrappers_parameters_and_failures_give_one_outcome_on_all_ranks(world_size, tmp_path):
    run_ranks("tests.step.wrapped", world_size, tmp_path / "store")


def test_each_rank_cuts_its_own_share_into_its_part_of_the_noise_parts(tmp_path):
    # Two of four parts per rank: 1 example is one part, 7 are two; 5 examples are 2 and 3, 11 are 5 and 6.
    (output, _) = run_ranks("tests.step.noise_ranks", 2, tmp_path / "store")
    assert "1 and 7: 3 parts" in output
    assert "5 and 11: 4 parts from 2 to 6" in output
    assert "8 and 8: 4 parts from 4 to 4" in output
