"""The loader of a trainer: its own options, our batches; epochs, resuming, ranks."""

from functools import partial

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import Trainer

from batchwright.errors import ArgumentError, LengthsError
from batchwright.integrations.dynabatch import DynaBatchSampler, DynabatchTrainerMixin, make_dynabatch_trainer

from ....processes import run_ranks
from ..models import collate, make_examples, make_model
from .training import make_sampler, make_task_dependent, make_trainer


def recording(seen, examples):
    """Collate, and remember which examples a batch has."""
    seen.append([example["number"] for example in examples])
    return collate(examples)


def numbered(num=24):
    return [{**example, "number": index} for index, example in enumerate(make_examples(num, causal=False))]


def make(folder, examples=None, seen=None, **options):
    examples = numbered() if examples is None else examples
    settings = {"remove_unused_columns": False, "num_train_epochs": 3, "examples": examples}
    trainer, _ = make_trainer("t5", folder, **{**settings, **options})
    trainer.data_collator = partial(recording, [] if seen is None else seen)
    return trainer


def test_the_class_is_made_once_and_named_after_its_trainer():
    made = make_dynabatch_trainer(Trainer)
    assert made is make_dynabatch_trainer(Trainer)
    assert made.__name__ == "DynabatchTrainer"
    assert issubclass(made, DynabatchTrainerMixin)
    assert issubclass(made, Trainer)


@pytest.mark.parametrize("trainer", ["x", ["x"]], ids=["text", "list"])
def test_what_is_no_class_is_refused(trainer):
    with pytest.raises(ArgumentError, match=r"trainer_cls must be a class such as transformers.Trainer, got"):
        make_dynabatch_trainer(trainer)


@pytest.mark.parametrize("shuffle", [False, True])
def test_every_epoch_trains_on_its_own_batches(shuffle, tmp_path):
    seen, sampler = [], make_sampler(numbered(), shuffle=shuffle)
    trainer = make(tmp_path, seen=seen, sampler=sampler)
    trainer.train()
    expected = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        expected += sampler.batches
    assert seen == expected
    assert trainer.state.global_step == 3 * len(sampler)


@pytest.mark.parametrize(("task", "expected"), [(None, "train"), ("generate", "generate")])
def test_a_sampler_without_a_task_is_planned_for_training(task, expected, tmp_path):
    examples, lengths = make_task_dependent()
    options = {"threshold": 0.9, "max_batch_range": 4.0, "shuffle": True}
    sampler = DynaBatchSampler(lengths, None, None, 4, task=task, **options)
    planned = DynaBatchSampler(lengths, None, None, 4, task=expected, **options)
    other = DynaBatchSampler(lengths, None, None, 4, task="train" if expected == "generate" else "generate", **options)
    assert len(other) != len(planned)
    mine, seen = sampler.batches, []
    trainer = make(tmp_path, examples, seen, sampler=sampler, num_train_epochs=2)
    assert len(trainer.get_train_dataloader()) == len(planned)
    trainer.train()
    assert seen == list(planned) + list(planned)  # the second iterator is the second epoch
    assert trainer.state.global_step == 2 * len(planned)
    assert sampler.batches == mine  # what others iterate over stays


def test_a_sampler_without_a_task_resumes_in_the_middle_of_an_epoch(tmp_path):
    examples, lengths = make_task_dependent()
    sampler = DynaBatchSampler(lengths, None, None, 4, threshold=0.9, max_batch_range=4.0, shuffle=True)
    whole, before, after = [], [], []
    options = {"sampler": sampler, "num_train_epochs": 2, "gradient_accumulation_steps": 2}
    make(tmp_path / "whole", examples, whole, **options).train()
    stopped = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3}
    make(tmp_path / "part", examples, before, **options, **stopped).train()
    resumed = make(tmp_path / "part", examples, after, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "part" / "checkpoint-3"))
    assert before + after == whole
    assert sorted(index for batch in whole for index in batch) == sorted([*range(120)] * 2)


def test_training_twice_begins_at_the_first_epoch_again(tmp_path):
    seen = []
    trainer = make(tmp_path, seen=seen, sampler=make_sampler(numbered(), shuffle=True), num_train_epochs=1)
    trainer.train()
    trainer.train()
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize("stop", [2, 5])
def test_resume_in_the_middle_of_an_epoch_is_exact(window, stop, tmp_path):
    options = {
        "sampler": make_sampler(numbered(), shuffle=True),
        "learning_rate": 0.05,
        "lr_scheduler_type": "constant",  # others look at the number of steps, which the interrupted run has fewer of
        "gradient_accumulation_steps": window,
    }
    whole, before, after = [], [], []
    straight = make(tmp_path / "whole", seen=whole, **options)
    straight.train()
    total = straight.state.global_step
    make(tmp_path / "part", seen=before, **options, max_steps=stop, save_strategy="steps", save_steps=stop).train()
    resumed = make(tmp_path / "part", seen=after, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "part" / f"checkpoint-{stop}"))
    assert resumed.state.global_step == total
    assert before + after == whole
    for mine, other in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_unused_columns_are_removed_as_the_trainer_does(tmp_path):
    names = []

    def collate_names(examples):
        names.append(sorted(examples[0]))
        return collate(examples)

    for remove in (True, False):
        trainer = make(tmp_path, remove_unused_columns=remove, num_train_epochs=1)
        trainer.data_collator = collate_names
        next(iter(trainer.get_train_dataloader()))
    assert names == [["input_ids", "labels"], ["input_ids", "labels", "number"]]


def test_the_options_of_the_trainer_for_loaders_hold(tmp_path):
    options = {
        "dataloader_num_workers": 2,
        "dataloader_persistent_workers": True,
        "dataloader_prefetch_factor": 3,
        "dataloader_multiprocessing_context": "spawn",
    }
    loader = make(tmp_path, **options).get_train_dataloader()
    assert (loader.num_workers, loader.persistent_workers, loader.prefetch_factor) == (2, True, 3)
    assert loader.multiprocessing_context.get_start_method() == "spawn"
    assert loader.worker_init_fn.func.__name__ == "seed_worker"


def test_worker_processes_load_the_same_batches(tmp_path):
    options = {"sampler": make_sampler(numbered(), shuffle=True), "dataloader_persistent_workers": True}
    loader = make(tmp_path, dataloader_num_workers=1, **options).get_train_dataloader()
    plain = make(tmp_path, sampler=options["sampler"]).get_train_dataloader()
    for epoch in range(2):
        for each in (loader, plain):
            each.set_epoch(epoch)
        for mine, other in zip(loader, plain, strict=True):
            assert torch.equal(mine["input_ids"], other["input_ids"])


def test_drop_last_of_the_trainer_leaves_out_the_short_batch(tmp_path):
    sampler = make_sampler(numbered(), 5, dynamic_batch_mode=False)  # 24 examples: 5, 5, 5, 5, 4
    assert len(make(tmp_path, sampler=sampler).get_train_dataloader()) == 5
    assert len(make(tmp_path, sampler=sampler, dataloader_drop_last=True).get_train_dataloader()) == 4


def test_another_way_of_sampling_is_warned_about(tmp_path):
    trainer = make(tmp_path, train_sampling_strategy="group_by_length")
    with pytest.warns(UserWarning, match="train_sampling_strategy has no effect"):
        trainer.get_train_dataloader()


def test_a_data_set_of_another_length_is_refused(tmp_path):
    trainer = make(tmp_path, sampler=make_sampler(numbered(20)))
    with pytest.raises(LengthsError, match="24 examples but dynabatch_sampler was made for 20"):
        trainer.get_train_dataloader()


def test_a_stream_is_sent_to_the_stream_batcher(tmp_path):
    class Stream(IterableDataset):
        def __iter__(self):
            yield from numbered()

    trainer = make(tmp_path, examples=Stream(), sampler=make_sampler(numbered()), max_steps=1)
    with pytest.raises(ArgumentError, match="StreamBatcher"):
        trainer.get_train_dataloader()


def test_the_mixin_can_be_inherited_from_directly(tmp_path):
    class Mine(DynabatchTrainerMixin, Trainer):
        pass

    examples = make_examples(causal=False)
    args = make(tmp_path).args
    sampler = make_sampler(examples)
    Mine(make_model("t5"), args, collate, examples, dynabatch_sampler=sampler).train()


def test_two_ranks_see_every_example_once_and_train_as_one_would(tmp_path):
    outputs = run_ranks("tests.integrations.dynabatch.trainer.ranks", 2, tmp_path / "store")
    assert all(output.count("updates exact") == 4 for output in outputs)


def test_another_kind_of_sampler_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match=r"must be a DynaBatchSampler, got list; make one with dynabatch_sampler"):
        make(tmp_path, sampler=[[0, 1], [2]])


def test_a_sampler_of_dynabatch_itself_is_refused_with_the_import_to_change(tmp_path):
    original = pytest.importorskip("dynabatch.sampler")
    lengths = [len(example["input_ids"]) for example in numbered()]
    sampler = original.DynaBatchSampler(lengths, lengths, lengths, 3, dynamic_batch_mode=False)
    with pytest.raises(ArgumentError, match=r"from batchwright.integrations.dynabatch import dynabatch_sampler"):
        make(tmp_path, sampler=sampler)
