import pytest
import torch.distributed as dist
from torch import nn

from batchwright._ranks import Ranks
from batchwright.errors import ArgumentError

from ..processes import run_ranks


@pytest.mark.parametrize(("world_size", "num_steps"), [(2, 300), (3, 40)])
def test_ranks_that_run_out_of_memory_on_their_own_neither_hang_nor_drift(world_size, num_steps, tmp_path):
    run_ranks("tests.step.ranks", world_size, tmp_path / "store", num_steps)


def test_sharded_ranks_with_uneven_lengths_train_as_one_process_would(tmp_path):
    run_ranks("tests.step.shards", 2, tmp_path / "store")


def test_a_plain_model_is_a_world_of_one():
    ranks = Ranks(nn.Linear(2, 1))
    assert (ranks.world_size, ranks.maximum(5, next(ranks.module.parameters()).device)) == (1, 5)


def test_a_static_graph_is_refused(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1), static_graph=True)
        with pytest.raises(ArgumentError, match="static_graph"):
            Ranks(model)
    finally:
        dist.destroy_process_group()
