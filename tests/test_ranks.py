"""Ranks: the process group of a model."""

import pytest
import torch.distributed as dist
from torch import nn

from batchwright._ranks import Ranks
from batchwright.errors import ArgumentError


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
