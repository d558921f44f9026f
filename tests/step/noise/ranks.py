"""A rank of the test of noise from vectors on ranks with uneven shares."""

import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from batchwright.errors import ArgumentError, BatchwrightError
from batchwright.step import Stepper

from ...processes import leave_group
from .models import Transformer, exact_noise, spread_out, token_loss, tokens_of


class Turned(nn.Module):
    """A model whose examples lie along the second axis on the second rank."""

    def __init__(self, is_turned):
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(17, 12), nn.LayerNorm(12), nn.Linear(12, 17)
        self.is_turned = is_turned

    def forward(self, tokens):
        x = self.embed(tokens)
        x = self.norm(x.transpose(0, 1)).transpose(0, 1) if self.is_turned else self.norm(x)
        return self.head(x)


def make(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    return Stepper(
        DistributedDataParallel(model), optimizer, token_loss, micro_batch=4, measure_noise=True, noise_from="vectors"
    )


def measure(rank, shares):
    torch.manual_seed(0)
    model = spread_out(Transformer())
    batch = tokens_of(sum(shares))
    start = sum(shares[:rank])
    stepper = make(model)
    reports = [stepper.step(tuple(field[start : start + shares[rank]] for field in batch)) for _ in range(5)]
    assert [report.noise.num_parts for report in reports] == [sum(shares)] * 5
    found = stepper.state_dict()["vectors"]
    assert len(found["names"]) == 5
    expected = exact_noise(model, token_loss, batch, found["names"])
    assert (found["average"]["s"], found["average"]["g2"]) == pytest.approx(expected, rel=1e-4)
    everywhere = [None, None]
    dist.all_gather_object(everywhere, (found, [(report.noise.s, report.noise.g2) for report in reports]))
    assert everywhere[0] == everywhere[1]
    print(f"{shares[0]} and {shares[1]}: as one process")


def refuse(rank):
    torch.manual_seed(0)
    stepper = make(Turned(is_turned=rank == 1))
    with pytest.raises(BatchwrightError) as caught:
        stepper.step(tokens_of(6))
    print(f"refused: {caught.value}")
    stepper = make(Turned(is_turned=False))
    for _ in range(2):
        stepper.step(tokens_of(6))
    stepper._gatherer.runner._ranks.module.is_turned = rank == 1
    with pytest.raises(BatchwrightError) as caught:
        stepper.step(tokens_of(6))
    print(f"later: {caught.value}")


def refuse_parts(rank, world_size):
    """Tensor parallelism: each rank holds some rows of a weight."""
    mesh = init_device_mesh("cpu", (world_size,))
    for noise_from in ("all", "vectors"):
        model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 1))
        parallelize_module(model, mesh, {"1": ColwiseParallel(), "2": RowwiseParallel()})
        with pytest.raises(ArgumentError) as caught:
            Stepper(model, torch.optim.SGD(model.parameters()), token_loss, measure_noise=True, noise_from=noise_from)
        print(f"{noise_from}: {caught.value}")


def main(rank, world_size, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    torch.set_num_threads(1)
    for shares in ((5, 7), (1, 7), (4, 4)):
        measure(rank, shares)
    refuse(rank)
    refuse_parts(rank, world_size)
    leave_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
