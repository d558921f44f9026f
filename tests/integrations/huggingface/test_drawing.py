"""Random numbers in workers: those of a batch are the same wherever its epoch was begun."""

import random

import numpy as np
import pytest
import torch

import batchwright as bw
from batchwright.integrations.huggingface._batches import PlannedBatches
from batchwright.integrations.huggingface._drawing import SeededData, SeededItems

from .test_streams import Plain
from .trainers import collate, flat_parameters, make_controller, make_trainer, numbered


class Masking:
    """Hides tokens by three sources of random numbers, as a collator of a masked language model does with one."""

    def __call__(self, examples):
        batch = collate(examples)
        drawn = torch.rand(batch["input_ids"].shape) * random.random() * np.random.rand()
        batch["input_ids"] = torch.where(drawn < 0.1, 3, batch["input_ids"])
        return batch


def train(folder, source, *, checkpoint=None, workers=2, **options):
    examples = numbered()
    if source == "stream":
        options |= {"examples": Plain(examples), "max_steps": 8}
    if source == "controller":
        options["controller"] = make_controller(3, 6, 9)
    options |= {"learning_rate": 0.05, "num_train_epochs": 2, "dataloader_num_workers": workers}
    trainer, *_ = make_trainer("t5", folder, data_collator=Masking(), save_strategy="steps", save_steps=1, **options)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(folder / f"checkpoint-{checkpoint}"))
    return flat_parameters(trainer.model)


@pytest.mark.parametrize(("source", "stop"), [("planned", 2), ("controller", 2), ("stream", 7)])
def test_a_run_resumed_within_an_epoch_draws_in_workers_what_one_without_a_break_draws(source, stop, tmp_path):
    whole = train(tmp_path, source)
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    assert torch.equal(train(tmp_path, source, checkpoint=stop), whole)


def test_a_batch_draws_the_same_numbers_whichever_worker_gets_it(tmp_path):
    assert torch.equal(train(tmp_path, "planned", workers=1), train(tmp_path, "planned", workers=2))


def test_every_batch_of_every_epoch_and_rank_draws_other_numbers():
    seeds = []
    for rank in range(2):
        sampler = bw.BatchSampler([3, 1, 4, 1, 5, 9, 2, 6], bw.MaxItems(2), rank=rank, world_size=2)
        batches = PlannedBatches(sampler, [3, 1, 4, 1, 5, 9, 2, 6], 1)
        for epoch in range(2):
            batches.set_epoch(epoch)
            seeds += [given.seed for given in SeededItems(batches, 0)]
    assert len(seeds) == len(set(seeds)) == 8


def test_without_workers_a_batch_draws_from_the_random_state_of_the_process(tmp_path):
    loaders = [make_trainer("t5", tmp_path, dataloader_num_workers=num)[0].get_train_dataloader() for num in (0, 1)]
    assert [isinstance(loader.dataset, SeededData) for loader in loaders] == [False, True]
    assert len(loaders[1].dataset) == 24
    torch.manual_seed(5)
    (given, *_) = SeededItems(loaders[1].batches, 0)
    assert SeededData(numbered()).__getitems__(given) == [numbered()[place] for place in given.item]
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), drawn)
