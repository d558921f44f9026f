import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from batchwright.errors import ArgumentError
from batchwright.step.distributed import Ranks

FOLDER = Path(__file__).parent


def run_ranks(script, world_size, path, *arguments):
    """Run a script once for every rank; fail with all outputs if one of them does."""
    processes = [
        subprocess.Popen(
            [sys.executable, str(FOLDER / script), str(rank), str(world_size), str(path), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * world_size, "\n".join(outputs)


@pytest.mark.parametrize(("world_size", "num_steps"), [(2, 300), (3, 40)])
def test_ranks_that_run_out_of_memory_on_their_own_neither_hang_nor_drift(world_size, num_steps, tmp_path):
    run_ranks("ranks.py", world_size, tmp_path / "store", str(num_steps))


def test_sharded_ranks_with_uneven_lengths_train_as_one_process_would(tmp_path):
    run_ranks("shards.py", 2, tmp_path / "store")


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
