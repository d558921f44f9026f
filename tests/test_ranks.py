"""Ranks: the process group of a model."""

import pytest
import torch.distributed as dist
from torch import nn

from batchwright._ranks import Ranks
from batchwright.errors import ArgumentError, MissingDependencyError


def test_a_plain_model_is_a_world_of_one():
    ranks = Ranks(nn.Linear(2, 1))
    device = next(ranks.module.parameters()).device
    assert (ranks.world_size, ranks.largest([5.0], device), ranks.sum([2.0], device)) == (1, [5.0], [2.0])
    assert ranks.agree(None, device, marks=[7]) == [True]


def test_a_static_graph_is_refused(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(nn.Linear(2, 1), static_graph=True)
        with pytest.raises(ArgumentError, match="static_graph"):
            Ranks(model)
    finally:
        dist.destroy_process_group()


def test_a_torch_that_divides_the_gradients_of_shards_itself_is_refused(monkeypatch):
    monkeypatch.setattr("batchwright._ranks.sharded_parts", lambda model: [model])  # without the method of newer ones
    with pytest.raises(MissingDependencyError, match=r"FSDP2\) need torch 2.11 or newer, got .*; run: pip install -U"):
        Ranks(nn.Linear(2, 1))
