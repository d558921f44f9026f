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

from ...processes import leave_group
from ..dynabatch.trainer.ranks import agree_on_port
from .trainers import collate, flat_parameters, make_model, make_trainer, numbered, quick

NUM = 60
TOTAL = 20_000


def make(rank, folder, case):
    memory = FakeMemory(TOTAL // 2 if (case, rank) == ("less", 1) else TOTAL, used_bytes=1000)
    model = make_model("t5", dropout=0.1)

    def take(module, args, kwargs):
        tokens = kwargs["input_ids"].numel() + kwargs["labels"].numel()
        if case == "oom" and rank == 1 and tokens > 60:
            raise torch.OutOfMemoryError("fragments")
        if case == "error" and rank == 1 and tokens > 60:
            raise ZeroDivisionError("in the model")
        if case == "less" and rank == 1:
            time.sleep(0.002)
        memory.run_batch(tokens, 100)

    def load(examples):
        if case == "collator" and rank == 1 and len(examples) > 2:
            raise KeyError("no such column")
        if any("number" not in example for example in examples):
            raise AssertionError(examples)
        return collate(examples)

    model.register_forward_pre_hook(take, with_kwargs=True)
    trainer, *_ = make_trainer(
        "t5",
        folder,
        model=model,
        examples=numbered(NUM),
        budget="auto",
        data_collator=load,
        memory=MemoryMonitor(source=memory),
        learning_rate=1e-2,
        optim="adamw_torch",
        ddp_backend="gloo",
    )
    return trainer


def main(rank, world_size, folder, case):
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "XDG_CACHE_HOME": str(folder / f"cache{rank}"),
    }
    os.environ["MASTER_PORT"] = agree_on_port(folder / "store", rank)
    with quick():
        trainer = make(rank, folder, case)
        if case in ("error", "collator"):
            kind = ZeroDivisionError if case == "error" else KeyError
            with pytest.raises(kind) as raised:
                trainer.train()
            assert (rank == 1) != ("rank 1" in str(raised.value)), raised.value
            leave_group()
            return
        trainer.train()
    budget = trainer.found_budget
    everyone = [None, None]
    dist.all_gather_object(everyone, (budget.to_json(), flat_parameters(trainer.model)))
    budgets, weights = zip(*everyone, strict=True)
    assert budgets[0] == budgets[1]
    assert torch.equal(*weights)
    # DDP takes buckets of the size of all gradients, which is more than there is to plan with on so small a device.
    assert budget.memory.max_bytes <= 0.9 * TOTAL / 2 or case == "oom"
    assert trainer._batching.updates.figures.num_ooms == 0
    leave_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
