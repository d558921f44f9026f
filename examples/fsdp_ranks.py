"""FSDP2: parameters in shards, the same number of micro-batches on every rank, and the update of one large batch.

    torchrun --nproc-per-node 2 examples/fsdp_ranks.py

Each rank holds half of every parameter. You see that, and that the weights are those of one process that trains on the
texts of all ranks, up to rounding. Change ``"cpu"`` to ``"cuda"`` and ``"gloo"`` to ``"nccl"``, and the budgets to
calibrated ones: under FSDP2 running out of memory is an error. It needs torch 2.11 or newer.
"""

import copy
import sys
import time

import torch
import torch.distributed as dist
from texts import VOCABULARY, read_examples
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import batchwright as bw
from batchwright.step import PadCollator, Stepper


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the summed loss of the next words, and how many they are."""
    logits, targets = model(batch["input_ids"][:, :-1].flatten()), batch["labels"][:, 1:].flatten()
    return nn.functional.cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum()


def main(quick: bool = False) -> None:
    """Train this rank's shards on its share of the texts, compare with one process."""
    dist.init_process_group("gloo")
    data, collate = read_examples(120 if quick else 1200), PadCollator()
    ranks = {"rank": dist.get_rank(), "world_size": dist.get_world_size()}
    sampler = bw.BatchSampler([len(example["input_ids"]) for example in data], bw.MaxTokens(1024), seed=0, **ranks)
    torch.manual_seed(0)  # the same model on every rank
    model = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, VOCABULARY))
    twin = copy.deepcopy(model)
    for part in (model[1], model[3], model):  # layers reduce their own gradients; the rest goes with the whole
        fully_shard(part, mesh=init_device_mesh("cpu", (sampler.world_size,)))
    stepper = Stepper(model, torch.optim.SGD(model.parameters(), lr=0.5), loss_fn, micro_batch=8, collate=collate)
    reference = Stepper(twin, torch.optim.SGD(twin.parameters(), lr=0.5), loss_fn, collate=collate)
    plan = list(sampler.plan)
    for step, batch in enumerate(sampler):
        stepper.step([data[index] for index in batch])
        everyone = plan[step * sampler.world_size : (step + 1) * sampler.world_size]
        reference.step([data[index] for other in everyone for index in other])
    pairs = list(zip(model.state_dict().values(), twin.state_dict().values(), strict=True))
    apart = max(float((shard.full_tensor() - value).abs().max()) for shard, value in pairs)
    held = sum(shard.to_local().numel() for shard, _ in pairs) / sum(value.numel() for _, value in pairs)
    if sampler.rank == 0:
        print(f"{sampler.world_size} ranks, {len(sampler)} steps each; rank 0 holds {held:.0%} of the numbers")
        print(f"weights differ from those of one process with all texts by {apart:.0e} at most")
    dist.destroy_process_group()
    time.sleep(0.2)  # gloo's threads let go of their tensors before Python ends


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
