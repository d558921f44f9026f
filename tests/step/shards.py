"""Run by test_several_ranks in two processes: FSDP2 on gloo, uneven numbers of examples and micro-batches."""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import batchwright as bw
from batchwright.step import Stepper

from ..processes import leave_group


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def make_examples(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(1, 12, (4 + 3 * rank + step % 3,), generator=generator).tolist()
    return [torch.randint(1, 20, (length,), generator=generator).tolist() for length in lengths]


def collate(examples):
    width = max(len(ids) for ids in examples)
    return torch.tensor([ids + [0] * (width - len(ids)) for ids in examples])


def loss_fn(model, ids):
    mask = ids != 0
    return (model(ids)[..., 0].square() * mask).sum(), mask.sum()


def main(rank, world_size, path):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=world_size)
    model, twin = make_model(), make_model()
    mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(model[1], mesh=mesh)  # parts reduce their own gradients
    fully_shard(model, mesh=mesh)
    stepper = Stepper(
        model, torch.optim.AdamW(model.parameters(), lr=0.01), loss_fn,
        micro_batch=bw.MaxTokens(20), lengths=len, collate=collate, clip_norm=1.0,
    )  # fmt: skip
    reference = Stepper(twin, torch.optim.AdamW(twin.parameters(), lr=0.01), loss_fn, collate=collate, clip_norm=1.0)
    for step in range(20):
        report = stepper.step(make_examples(step, rank))
        everything = [example for other in range(world_size) for example in make_examples(step, other)]
        expected = reference.step(everything)
        assert abs(report.loss - expected.loss) < 1e-10
        assert report.batch_size == expected.batch_size
    for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(parameter.full_tensor(), other, rtol=1e-9, atol=1e-12)
    leave_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
