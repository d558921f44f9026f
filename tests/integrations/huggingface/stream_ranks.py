"""Run by test_streams in two processes: streams that both ranks read, and streams that were divided beforehand."""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch.utils.data import IterableDataset

import batchwright as bw
from batchwright.errors import ArgumentError, BudgetError, RankError

from ...processes import act_as_torchrun, leave_group
from .ranks import check_gradients, everyone
from .trainers import MODELS, collate, flat, flat_parameters, make_model, make_trainer, numbered, quick

NUM = 25


class Plain(IterableDataset):
    def __init__(self, examples):
        self.examples = examples

    def __iter__(self):
        return iter(self.examples)


def main(rank, world_size, folder):
    act_as_torchrun(rank, world_size, folder / "store")
    with quick():
        for name, options in (
            ("t5", {}),
            ("llama", {"gradient_accumulation_steps": 2, "weighting": "examples"}),
            ("llama", {"on_oom": "raise", "gradient_accumulation_steps": 2}),
        ):
            check_whole(name, folder, **options)
        check_workers(folder)
        check_shards(rank, folder)
        check_refusals(rank, folder)
        check_alike(rank, folder)
        check_failure(rank, folder)
        check_auto(rank, folder)
        check_resume(folder / "whole", lambda: hub("t5"))
        check_resume(folder / "shards", lambda: split_dataset_by_node(hub("t5"), rank, 2))
    leave_group()


def hub(name, num=NUM):
    return Dataset.from_list(numbered(num, causal=MODELS[name][3])).to_iterable_dataset(num_shards=2)


def make(name, folder, examples, **options):
    settings = {"ddp_backend": "gloo", "plan_options": {"buffer_size": 10}, "budget": bw.MaxTokens(60), **options}
    return make_trainer(name, folder, examples=examples, **settings)


def once(shares):
    """Return the batches of every step over both ranks; an example that both run in one step counts once."""
    assert len(shares[0]) == len(shares[1])
    return [sorted(set(flat(step))) for step in zip(*shares, strict=True)]


def check_whole(name, folder, **options):
    """Both ranks read the whole stream: every example once per pass, equally many steps, exact updates."""
    examples = Plain(numbered(NUM, causal=MODELS[name][3]))
    num = options.get("gradient_accumulation_steps", 1)
    trainer, seen, gradients = make(name, folder, examples, max_steps=12 // num, **options)
    trainer.train()
    steps = once(everyone(seen))
    found, taken = [[]], 0
    for step in steps:
        found[-1].append(step)
        taken += len(step)
        if taken == NUM:
            taken = 0
            found.append([])
    assert len(found) > 1
    for batches in found[:-1]:
        assert sorted(flat(batches)) == list(range(NUM))
    updates = [flat(batches[n : n + num]) for batches in found for n in range(0, len(batches), num)]
    check_gradients(name, trainer, gradients, updates, options.get("weighting", "tokens"))
    print(f"whole {name} {options}: {len(updates)} updates exact")


def check_workers(folder):
    results = []
    for workers in (0, 2):
        options = {"max_steps": 9, "dataloader_num_workers": workers, "learning_rate": 0.1}
        trainer, _, gradients = make("llama", folder, hub("llama"), data_collator=collate_ids, **options)
        trainer.train()
        results.append((torch.stack(gradients.seen), flat_parameters(trainer.model)))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    print("workers: equal")


def collate_ids(examples):
    return collate(examples)


def check_shards(rank, folder):
    """Every rank reads its own: exact updates, no example twice, both end a pass at the shorter one."""
    examples = numbered(NUM, causal=True)
    mine = examples[:17] if rank == 0 else examples[17:]
    for stream, options in (
        (Plain(mine), {"plan_options": {"buffer_size": 10, "sharded": True}}),
        (split_dataset_by_node(hub("llama"), rank, 2), {}),
    ):
        trainer, seen, gradients = make("llama", folder, stream, max_steps=8, **options)
        trainer.train()
        shares = everyone(seen)
        assert not set(flat(shares[0])) & set(flat(shares[1]))
        check_gradients("llama", trainer, gradients, once(shares))
        assert trainer.state.global_step == 8
    # Rank 1 has 8 examples, which it sees all in each pass; rank 0 stops with it.
    trainer, seen, _ = make(
        "llama", folder, Plain(mine), max_steps=6, plan_options={"buffer_size": 10, "sharded": True}
    )
    trainer.train()
    shares = everyone(seen)
    num = next(n for n in range(1, 7) if len(flat(shares[1][:n])) == 8)
    assert sorted(flat(shares[1][:num])) == list(range(17, 25))
    assert len(flat(shares[0][:num])) < 17
    assert set(flat(shares[0][num : 2 * num])) & set(flat(shares[0][:num]))  # the next pass, from the start
    print("shards: exact")


def check_refusals(rank, folder):
    examples = numbered(NUM)
    mine = examples[:13] if rank == 0 else examples[13:]
    for stream, options, message in (
        (Plain(mine), {}, "ranks read different examples"),
        (Plain(examples), {"sharded": True}, "every rank reads the same examples"),
        (split_dataset_by_node(hub("t5"), 1 - rank, 2), {}, f"split for rank {1 - rank} of 2, this process is rank"),
        (split_dataset_by_node(hub("t5"), rank, 2), {"sharded": False}, "must not say sharded=False"),
    ):
        trainer, *_ = make("t5", folder, stream, max_steps=3, plan_options={"buffer_size": 10, **options})
        with pytest.raises(ArgumentError, match=message):
            trainer.train()
    print("refused")


def check_alike(rank, folder):
    """Parts of a stream whose examples begin alike, or have no token ids, are told apart all the same."""
    mine = range(13) if rank == 0 else range(12, 25)
    alike = [{"input_ids": [4] * 9 + [4 + place % 2, 6, 7 + place], "labels": [5] * 3} for place in mine]
    sounds = [{"length": 8, "sound": torch.full((8,), 0.5), "number": place} for place in mine]
    for examples in (alike, sounds):
        trainer, *_ = make("t5", folder, Plain(examples), max_steps=3)
        with pytest.raises(ArgumentError, match="ranks read different examples"):
            trainer.train()
    print("alike: told apart")


def check_failure(rank, folder):
    """An example that only one rank meets ends the training of both."""
    examples = numbered(NUM)
    mine = examples[:13] if rank == 0 else examples[13:]
    if rank == 1:
        mine[11] = {**mine[11], "input_ids": [4] * 99}
    for workers in (0, 1):
        options = {"plan_options": {"buffer_size": 10, "sharded": True}, "dataloader_num_workers": workers}
        trainer, *_ = make("t5", folder, Plain(mine), max_steps=20, data_collator=collate_ids, **options)
        with pytest.raises((BudgetError, RankError), match="in the buffer that begins at example 10"):
            trainer.train()
    print("failed together")


def check_auto(rank, folder):
    """Both ranks find one budget on the first buffer; streams of their own would show them different batches."""
    os.environ["XDG_CACHE_HOME"] = str(folder / f"cache{rank}")
    trainer, *_ = make("t5", folder, hub("t5"), max_steps=3, budget="auto")
    trainer.train()
    assert len({str(state) for state in everyone(trainer.found_budget.to_state())}) == 1
    examples = numbered(NUM)
    mine = examples[:13] if rank == 0 else examples[13:]
    for stream, message in (
        (split_dataset_by_node(hub("t5"), rank, 2), "would measure different batches; give a budget"),
        (Plain(mine), "ranks read different examples"),
    ):
        trainer, *_ = make("t5", folder, stream, max_steps=3, budget="auto")
        with pytest.raises(ArgumentError, match=message):
            trainer.train()
    print("auto: agreed")


def check_resume(folder, new_stream):
    def train(checkpoint=None, **options):
        trainer, seen, _ = make(
            "t5", folder, new_stream(), model=make_model("t5", dropout=0.2), max_steps=9, learning_rate=0.05, **options
        )
        trainer.train(resume_from_checkpoint=checkpoint and str(folder / checkpoint))
        return trainer, seen

    straight, whole = train(save_strategy="steps", save_steps=1)
    dist.barrier()
    for stop in (2, 5, 7):
        resumed, after = train(f"checkpoint-{stop}")
        assert after == whole[stop:]
        assert torch.equal(flat_parameters(resumed.model), flat_parameters(straight.model))
    print(f"resumed {folder.name}: equal")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
