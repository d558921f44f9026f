"""Run by test_auto_budget in two processes: ranks whose memory, speed or luck differ find one budget."""

import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from batchwright.step import MemoryMonitor
from batchwright.testing import FakeMemory

from ...processes import act_as_torchrun, leave_group
from .trainers import collate, flat_parameters, make_model, make_trainer, numbered, quick

NUM = 24
TOTAL, PER_TOKEN, MOST_TOKENS = 400_000, 2_000, 60


def make(rank, folder, case):
    memory = FakeMemory(TOTAL * 2 // 3 if (case, rank) == ("less", 1) else TOTAL, used_bytes=1000)
    model = make_model("t5", dropout=0.1)

    def take(module, args, kwargs):
        tokens = kwargs["input_ids"].numel() + kwargs["labels"].numel()
        if case == "oom" and rank == 1 and tokens > MOST_TOKENS:
            raise torch.OutOfMemoryError("fragments")
        if case == "error" and rank == 1 and tokens > MOST_TOKENS:
            raise ZeroDivisionError("in the model")
        if case == "less" and rank == 1:
            time.sleep(0.002)
        memory.run_batch(tokens, PER_TOKEN)

    class Broken(torch.optim.AdamW):
        def step(self, *args, **kwargs):
            if rank == 1:
                raise torch.OutOfMemoryError("no room for the state")

    examples = numbered(NUM)
    if (case, rank) == ("lengths", 1):
        examples[3] = {"number": 3}

    def load(examples):
        if case == "collator" and rank == 1 and len(examples) > 2:
            raise KeyError("no such column")
        if any("number" not in example for example in examples):
            raise AssertionError(examples)
        return collate(examples)

    if case == "secret" and rank == 1:
        load.secret = (number for number in [1])  # so that this rank cannot tell its job from another one
    model.register_forward_pre_hook(take, with_kwargs=True)
    trainer, *_ = make_trainer(
        "t5",
        folder,
        model=model,
        examples=examples,
        optimizers=(Broken(model.parameters()) if case == "state" else None, None),
        budget="auto",
        data_collator=load,
        memory=MemoryMonitor(source=memory),
        learning_rate=1e-2,
        optim="adamw_torch",
        ddp_backend="gloo",
    )
    return trainer


def fails(rank, folder, case, kind):
    """All ranks raise what one of them did, and can go on."""
    trainer = make(rank, folder, case)
    with pytest.raises(kind) as raised:
        trainer.train()
    assert (rank == 1) != ("rank 1" in str(raised.value)), raised.value


def agrees(rank, folder, case):
    """All ranks find one budget, which holds on the rank with the least."""
    trainer = make(rank, folder, case)
    trainer.train()
    budget, everyone = trainer.found_budget, [None, None]
    dist.all_gather_object(everyone, (budget.to_json(), flat_parameters(trainer.model)))
    budgets, weights = zip(*everyone, strict=True)
    assert budgets[0] == budgets[1]
    assert torch.equal(*weights)
    # DDP takes buckets of the size of all gradients besides.
    buckets = sum(parameter.numel() * parameter.element_size() for parameter in trainer.model.parameters())
    if case == "less":
        assert budget.memory.max_bytes == int(0.9 * (TOTAL * 2 // 3) - buckets)
    # What ran out of memory in the search does not in training.
    assert trainer._batching.updates.figures.num_ooms == 0


def main(rank, world_size, folder):
    act_as_torchrun(rank, world_size, folder / "store")
    os.environ["XDG_CACHE_HOME"] = str(folder / f"cache{rank}")
    with quick():
        fails(rank, folder, "collator", KeyError)
        fails(rank, folder, "error", ZeroDivisionError)
        fails(rank, folder, "lengths", KeyError)  # before anything is measured
        fails(rank, folder, "state", torch.OutOfMemoryError)  # in the first step of the optimizer
        agrees(rank, folder, "secret")
        assert not (folder / f"cache{rank}").exists()
        agrees(rank, folder, "less")
        agrees(rank, folder, "oom")  # with so much more memory than is kept on disk, batches are measured again
        assert (folder / f"cache{rank}").exists() is (rank == 0)
    leave_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
