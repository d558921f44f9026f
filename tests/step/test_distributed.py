import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from batchwright.errors import ArgumentError
from batchwright.step.distributed import Ranks

SCRIPT = Path(__file__).parent / "ranks.py"


@pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_run_out_of_memory_on_their_own_neither_hang_nor_drift(world_size, tmp_path):
    command = [sys.executable, str(SCRIPT)]
    num_steps = 300 if world_size == 2 else 40
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(world_size), str(tmp_path / "store"), str(num_steps)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * world_size, "\n".join(outputs)


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
