"""Random numbers in workers: those of a batch are the same wherever its epoch was begun."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler
from transformers import Trainer

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.integrations.huggingface import adaptive
from batchwright.integrations.huggingface._batches import PlannedBatches
from batchwright.integrations.huggingface._drawing import SeededData, SeededItems

from .test_streams import OPTIONS, Plain, stream
from .trainers import collate, flat, flat_parameters, make_controller, make_trainer, numbered


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


# Orders of the user


class Weighted(Trainer):
    def _get_train_sampler(self, *args):
        return SubsetRandomSampler([0, 1, 2])


class Loading(Trainer):
    def get_train_dataloader(self):
        order = SubsetRandomSampler([0, 1, 2]) if hasattr(self.train_dataset, "__len__") else None
        return DataLoader(self.train_dataset, 2, sampler=order, collate_fn=self.data_collator)


class OtherData(Trainer):
    def get_train_dataloader(self):
        order = self._get_train_sampler()
        return DataLoader(numbered(3), 2, sampler=order, collate_fn=self.data_collator)


class Above(adaptive(Trainer)):
    get_train_dataloader = Loading.get_train_dataloader


class AboveWeighted(adaptive(Trainer)):
    _get_train_sampler = Weighted._get_train_sampler


class Watching(Trainer):
    """Looks at the trainer's own loader, and leaves it."""

    def get_train_dataloader(self):
        loader = super().get_train_dataloader()
        self.collates = loader.collate_fn
        return loader


@pytest.mark.parametrize("budget", [bw.MaxTokens(80), "auto"], ids=["given", "auto"])
@pytest.mark.parametrize("kind", [Weighted, Loading, OtherData, Above, AboveWeighted])
def test_an_order_of_its_own_is_refused_and_not_replaced(kind, budget, tmp_path):
    with pytest.raises(ArgumentError, match=r"decides which examples are drawn, and so does the plan.*train_dataset"):
        make_trainer("t5", tmp_path, trainer_cls=kind, budget=budget)[0].train()


def test_an_order_that_is_set_by_hand_is_refused(tmp_path):
    trainer, *_ = make_trainer("t5", tmp_path)
    trainer._get_train_sampler = lambda *args: SubsetRandomSampler([0, 1, 2])
    with pytest.raises(ArgumentError, match="set by hand decides which examples are drawn"):
        trainer.train()


def test_a_stream_of_its_own_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"Loading.get_train_dataloader decides"):
        make_trainer("t5", tmp_path, trainer_cls=Loading, examples=stream("torch"), max_steps=1, **OPTIONS)[0].train()


def test_a_class_that_only_looks_at_the_loader_trains_on_all_examples(tmp_path):
    trainer, seen, _ = make_trainer("t5", tmp_path, trainer_cls=Watching)
    trainer.train()
    assert sorted(flat(seen)) == list(range(24))
    assert trainer.collates is not None
