"""Run by test_several_ranks in several processes: DDP on gloo, each rank replays its own graphs."""

import copy
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from batchwright.step import Stepper

from ...processes import leave_group
from . import models
from .tape import TapeGraphs
from .twins import distance, sgd

SHAPES, NUM_UPDATES = ((4, 6), (6, 6)), 8


def make_batch(rows, seed):
    """Return rows of other weights, so that the mean of the ranks' means is not the mean."""
    generator = torch.Generator().manual_seed(seed)
    return {**models.tables((rows, 6), seed=seed), models.ROW_WEIGHT: torch.rand(rows, generator=generator) + 0.1}


def share(batch, rank, rows):
    return {name: value[rows * rank : rows * (rank + 1)] for name, value in batch.items()}


def main(rank, world_size, path, kind):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    model = models.make_mlp().to(device)
    alone = copy.deepcopy(model)
    reference = Stepper(alone, sgd(alone.parameters()), models.table_loss, clip_norm=1.0)
    ddp = DistributedDataParallel(model)
    stepper = Stepper(
        ddp, sgd(model.parameters()), models.table_loss, clip_norm=1.0,
        graphs=True if kind == "cuda" else TapeGraphs(), shapes=SHAPES,
    )  # fmt: skip
    for number in range(NUM_UPDATES):
        rows = SHAPES[number % 2][0]
        batch = models.to(make_batch(rows * world_size, seed=number), device)
        report = stepper.step(share(batch, rank, rows))
        expected = reference.step(batch)
        assert report.batch_size == rows * world_size
        assert abs(report.weight - expected.weight) < 1e-5 * expected.weight
        assert abs(report.loss - expected.loss) < 1e-5 * abs(expected.loss)
        error = distance(list(model.parameters()), list(alone.parameters()))
        assert error < 1e-5, (number, error)
    assert report.graphed
    mine = torch.cat([value.detach().flatten().cpu() for value in model.parameters()])
    first = mine.clone()
    dist.broadcast(first, src=0)
    assert torch.equal(mine, first), f"rank {rank} differs from rank 0"
    print(f"rank {rank}: {stepper.graph_summary().hit_rate:.2f}")
    leave_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4])
