"""A rank of the test of noise from exactly k micro-batches on ranks with uneven shares."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from batchwright.step import Stepper

from ..processes import leave_group


def main(rank, world_size, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    for shares in ((1, 7), (5, 11), (8, 8)):
        sizes = []

        def loss_fn(model, batch, sizes=sizes):
            sizes.append(len(batch))
            return model(batch).square().sum(), len(batch)

        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        stepper = Stepper(DistributedDataParallel(model), optimizer, loss_fn, measure_noise=True, noise_parts=4)
        num = stepper.step(torch.randn(shares[rank], 3)).noise.num_parts
        all_sizes = [None] * world_size
        dist.all_gather_object(all_sizes, sizes)
        flat = [num for sizes in all_sizes for num in sizes]
        print(f"{shares[0]} and {shares[1]}: {num} parts from {min(flat)} to {max(flat)}")
    leave_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
