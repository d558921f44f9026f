"""Run by test_auto in two processes: controller="auto" on DDP, whose clocks disagree."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from batchwright.integrations.huggingface._figures import TrainingFigures

from ...processes import act_as_torchrun, leave_group
from .trainers import flat, flat_parameters, make_trainer, numbered, quick

NUM = 320


def main(rank, world_size, folder):
    act_as_torchrun(rank, world_size, folder / "store")
    # The second rank is the slower one, and an update ends when it does.
    TrainingFigures.seconds = property(lambda self: 0.05 + 0.01 * rank)
    with quick():
        trainer, seen, _ = make_trainer(
            "t5",
            folder,
            examples=numbered(NUM),
            controller="auto",
            budget=None,
            per_device_train_batch_size=2,
            learning_rate=1e-3,
            optim="adamw_torch",
            ddp_backend="gloo",
        )
        assert trainer._batching.settings.base_size == 4
        trainer.train()
    sizes = [entry["batch_size"] for entry in trainer.state.log_history if "loss" in entry]
    everyone = [None, None]
    mine = (flat(seen), trainer._batching.settings.controller.state_dict(), flat_parameters(trainer.model))
    dist.all_gather_object(everyone, mine)
    shares, states, weights = zip(*everyone, strict=True)
    assert sorted(flat(shares)) == list(range(NUM))
    assert states[0] == states[1]
    assert states[0]["policy_state"]["readings"][0][1] > 0.059, states[0]["policy_state"]["readings"]
    assert torch.equal(*weights)
    if rank == 0:
        assert sizes[0] == 4, sizes
        assert 12 <= max(sizes) <= NUM // 20, sizes
    leave_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
