"""DistributedDataParallel: equal steps on every rank, batches of similar cost, and the update of one large batch.

    torchrun --nproc-per-node 2 examples/ddp_ranks.py

Every rank also trains a copy on the batches of all ranks at once. You see that both end with the same weights, up to
rounding, although ranks have different numbers of texts and words: the mean is over all words, not over ranks.
Change ``"gloo"`` to ``"nccl"`` and move the model to ``cuda:{rank}``. A rank that runs out of memory splits its batch.
"""

import copy
import sys
import time

import torch
import torch.distributed as dist
from texts import VOCABULARY, read_examples
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import batchwright as bw
from batchwright.step import PadCollator, Stepper


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the summed loss of the next words, and how many they are."""
    logits, targets = model(batch["input_ids"][:, :-1]).flatten(0, 1), batch["labels"][:, 1:].flatten()
    return nn.functional.cross_entropy(logits, targets, reduction="sum"), (targets != -100).sum()


def main(quick: bool = False) -> None:
    """Train on this rank's share, compare with one process."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    data, collate = read_examples(200 if quick else 2000), PadCollator()
    lengths = [len(example["input_ids"]) for example in data]
    sampler = bw.BatchSampler(lengths, bw.MaxTokens(1024), seed=0, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY))
    twin = copy.deepcopy(model)
    optimizer, whole = (torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, twin))
    stepper = Stepper(DistributedDataParallel(model), optimizer, loss_fn, micro_batch=8)
    plan = list(sampler.plan)  # every rank plans the same epoch, without a word to the others
    for step, batch in enumerate(sampler):  # or a DataLoader with batch_sampler=sampler
        stepper.step(collate([data[index] for index in batch]))
        everyone = [data[index] for other in plan[step * world_size : (step + 1) * world_size] for index in other]
        loss_sum, weight = loss_fn(twin, collate(everyone))
        whole.zero_grad()
        (loss_sum / weight).backward()
        whole.step()
    pairs = zip(model.state_dict().values(), twin.state_dict().values(), strict=True)
    apart = max(float((mine - other).abs().max()) for mine, other in pairs)
    if rank == 0:
        print(f"{world_size} ranks, {len(sampler)} steps each, {sampler.report().straggler_waste:.1%} spent waiting")
        print(f"weights differ from those of one process with all texts by {apart:.0e} at most")
    dist.destroy_process_group()
    time.sleep(0.2)  # gloo's threads let go of their tensors before Python ends


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
