"""The training data of an adaptive trainer: batches, epochs, and where a checkpoint continues."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import batchwright as bw
from batchwright import size
from batchwright.errors import ArgumentError, BudgetError, LengthsError, StateMismatchError

from ...processes import run_ranks
from ..dynabatch.trainer.training import make_args
from .trainers import (
    BUDGET,
    collate,
    flat,
    flat_parameters,
    make_model,
    make_trainer,
    numbered,
)


def make_controller(slope=3):
    return bw.BatchSizeController(size.linear(3, slope, per="step"), min_size=3, max_size=9)


def planned(examples, num_epochs, **options):
    """Return the batches that a sampler of the same data gives out."""
    lengths = [(len(example["input_ids"]), len(example["labels"])) for example in examples]
    sampler = bw.BatchSampler(lengths, BUDGET, seed=42, **options)
    return [batch for _ in range(num_epochs) for batch in sampler]


@pytest.mark.parametrize("options", [{}, {"grouping": bw.Sorted()}, {"plan_options": {"size_multiple_of": 2}}])
def test_every_epoch_trains_on_the_planned_batches(options, tmp_path):
    trainer, seen, _ = make_trainer("t5", tmp_path, num_train_epochs=3, **options)
    trainer.train()
    expected = {**options, **options.pop("plan_options", {})}
    expected.pop("plan_options", None)
    assert seen == planned(trainer.train_dataset, 3, **expected)
    assert seen[: len(seen) // 3] != seen[-(len(seen) // 3) :]  # epochs differ
    assert trainer.state.epoch == 3


def test_training_twice_begins_at_the_first_epoch_again(tmp_path):
    trainer, seen, _ = make_trainer("t5", tmp_path)
    trainer.train()
    trainer.train()
    assert seen[: len(seen) // 2] == seen[len(seen) // 2 :]


@pytest.mark.parametrize("budget", [bw.MaxTokens(64), "auto"], ids=str)
def test_a_collator_that_was_forgotten_is_asked_for(tmp_path, budget):
    data = [{"input_ids": [5] * length, "labels": [5] * length} for length in range(3, 20)]
    trainer, _, _ = make_trainer("t5", tmp_path, examples=data, budget=budget, data_collator=None)
    with pytest.raises(ArgumentError, match=r"pass data_collator=PadCollator\(\) of batchwright\.step"):
        trainer.train()


def test_the_order_follows_the_seed_of_the_data(tmp_path):
    seen = [make_trainer("t5", tmp_path, **options) for options in ({"seed": 1}, {"data_seed": 1}, {"data_seed": 2})]
    for trainer, _, _ in seen:
        trainer.train()
    assert seen[0][1] == seen[1][1] != seen[2][1]


def test_sequential_data_stay_in_order(tmp_path):
    trainer, seen, _ = make_trainer("t5", tmp_path, train_sampling_strategy="sequential", grouping=bw.InOrder())
    trainer.train()
    assert flat(seen) == list(range(24))


# Two lengths per example, cut in small windows: 9, 10 and 9 batches in the first three epochs.
UNEVEN = {"budget": bw.MaxTokens(60), "grouping": bw.WindowSort(batches_per_window=1)}


@pytest.mark.parametrize("window", [1, 2])
def test_epochs_of_unequal_numbers_of_batches_end_where_the_data_end(window, tmp_path):
    options = {"num_train_epochs": 3, "gradient_accumulation_steps": window, "lr_scheduler_type": "linear", **UNEVEN}
    trainer, seen, gradients = make_trainer("t5", tmp_path, learning_rate=0.1, **options)
    trainer.train()
    assert len(seen) == 9 + 10 + 9
    for batches in (seen[:9], seen[9:19], seen[19:]):
        assert sorted(flat(batches)) == list(range(24))
    updates = 28 if window == 1 else 5 + 5 + 5
    assert trainer.state.global_step == trainer.state.max_steps == len(gradients.seen) == updates
    assert set(trainer.lr_scheduler.get_last_lr()) == {0}  # the schedule ends with training, not before or after


def test_part_of_an_epoch_can_be_asked_for(tmp_path):
    trainer, seen, _ = make_trainer("t5", tmp_path, num_train_epochs=1.5)
    trainer.train()
    per_epoch = len(planned(trainer.train_dataset, 1))
    assert len(seen) == per_epoch + -(-per_epoch // 2)


@pytest.mark.parametrize("controller", [None, make_controller()])
def test_max_steps_are_run_over_as_many_epochs_as_it_takes(controller, tmp_path):
    trainer, seen, gradients = make_trainer("t5", tmp_path, max_steps=11, controller=controller)
    trainer.train()
    assert len(gradients.seen) == trainer.state.global_step == 11
    assert trainer.state.epoch > 1
    assert 1 < trainer.state.num_train_epochs <= 11  # callbacks read it
    assert sorted(set(flat(seen))) == list(range(24))


@pytest.mark.parametrize("slope", [0, 3, -1])
def test_epochs_end_with_the_data_whatever_the_controller_does(slope, tmp_path, caplog):
    start = bw.BatchSizeController(size.linear(9 if slope < 0 else 3, slope, per="step"), min_size=2, max_size=9)
    trainer, seen, _ = make_trainer("t5", tmp_path, num_train_epochs=2, controller=start)
    trainer.train()
    assert np.bincount(flat(seen)).tolist() == [2] * 24
    assert trainer.state.epoch == 2
    assert trainer.state.max_steps == trainer.state.global_step
    assert "set max_steps for a schedule that ends with training" in caplog.text


def test_part_of_an_epoch_with_a_controller(tmp_path):
    trainer, *_ = make_trainer("t5", tmp_path, num_train_epochs=1.5, controller=make_controller(0))
    trainer.train()
    assert trainer.state.global_step == 12  # 36 examples, 3 per update


class Stop(TrainerCallback):
    """Ends an epoch after some updates."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 2:
            control.should_epoch_stop = True


@pytest.mark.parametrize("controller", [None, make_controller(0)])
def test_an_epoch_that_a_callback_ends_is_followed_by_the_next(controller, tmp_path):
    trainer, seen, _ = make_trainer("t5", tmp_path, num_train_epochs=2, controller=controller, callbacks=[Stop()])
    trainer.train()
    whole = flat(seen)[-24:]
    assert sorted(whole) == list(range(24))
    assert len(flat(seen)) < 48


@pytest.mark.parametrize(("window", "stop"), [(1, 4), (1, 9), (1, 12), (2, 5), (2, 7)])
def test_resuming_gives_the_batches_and_weights_of_a_run_without_a_break(window, stop, tmp_path):
    # 9 and 10 batches; with one per update step 9 ends the first epoch, with two it is step 5.
    options = {"learning_rate": 0.05, "lr_scheduler_type": "constant", "num_train_epochs": 2, **UNEVEN}
    options |= {"gradient_accumulation_steps": window}
    check_resume(tmp_path, stop, options, lambda: {"model": make_model("t5", dropout=0.2)})


@pytest.mark.parametrize(("stop", "workers"), [(2, 0), (4, 0), (6, 0), (2, 1), (4, 1)])
def test_resuming_with_a_controller_gives_the_same_batches(stop, workers, tmp_path):
    # 3, 6, 9 and 6 examples: with no workers step 4 ends the first epoch, with one the sizes follow two updates later.
    options = {"learning_rate": 0.05, "lr_scheduler_type": "constant", "num_train_epochs": 2}
    options |= {"dataloader_num_workers": workers, "measure_noise": True}
    check_resume(
        tmp_path, stop, options, lambda: {"model": make_model("t5", dropout=0.2), "controller": make_controller()}
    )


@pytest.mark.parametrize("stop", [1, 3, 5])
def test_a_resumed_run_of_fewer_updates_per_epoch_ends_where_the_data_end(stop, tmp_path):
    """As on more ranks: updates that ran count as examples, not as a share of the updates that there are now."""
    options = {"save_strategy": "steps", "save_steps": 1, "num_train_epochs": 2, "lr_scheduler_type": "linear"}
    before, seen, _ = make_trainer("t5", tmp_path, **options)
    before.train()
    trainer, after, _ = make_trainer("t5", tmp_path, gradient_accumulation_steps=2, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{stop}"))
    assert sorted(flat(seen[:stop] + after)) == sorted([*range(24)] * 2)
    assert trainer.state.global_step == trainer.state.max_steps
    assert trainer.state.epoch == 2


@pytest.mark.parametrize("is_controlled", [False, True])
def test_resuming_after_an_epoch_begins_the_next(is_controlled, tmp_path):
    def make():
        return {"controller": make_controller()} if is_controlled else {}

    options = {"num_train_epochs": 2, "save_strategy": "epoch"}
    _, whole = run(tmp_path, {**options, **make()})
    first = min(tmp_path.glob("checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1]))
    _, after = run(tmp_path, {**options, **make()}, checkpoint=first.name)
    assert sorted(flat(after)) == list(range(24))
    assert after == whole[-len(after) :]


def check_resume(folder, stop, options, make):
    """Train without a break, and with one after some updates, from a checkpoint on; compare everything."""
    straight, whole = run(folder / "whole", {**options, **make()})
    _, before = run(
        folder / "part", {**options, **make(), "max_steps": stop, "save_strategy": "steps", "save_steps": stop}
    )
    resumed, after = run(folder / "part", {**options, **make()}, checkpoint=f"checkpoint-{stop}")
    assert resumed.state.global_step == straight.state.global_step
    assert before + after == whole
    assert torch.equal(flat_parameters(resumed.model), flat_parameters(straight.model))
    logs = [entry for entry in straight.state.log_history if "loss" in entry]
    again = [entry for entry in resumed.state.log_history if "loss" in entry]
    assert [entry["epoch"] for entry in again] == [entry["epoch"] for entry in logs]
    assert [entry["batch_size"] for entry in again] == [entry["batch_size"] for entry in logs]
    assert [entry.get("noise_scale") for entry in again] == [entry.get("noise_scale") for entry in logs]


def run(folder, options, checkpoint=None):
    """Train, and return the examples of every micro-batch in the order they were trained on."""
    trained = []
    trainer, *_ = make_trainer("t5", folder, **options)
    trainer.data_collator = with_numbers
    trainer.model.register_forward_pre_hook(partial(take_numbers, trained), with_kwargs=True)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(folder / checkpoint))
    return trainer, trained


def with_numbers(examples):
    return {**collate(examples), "number": torch.tensor([example["number"] for example in examples])}


def take_numbers(trained, module, args, kwargs):
    numbers = kwargs.pop("number")
    if torch.is_grad_enabled():
        trained.append(numbers.tolist())
    return args, kwargs


def test_the_place_is_saved_with_the_state_of_the_trainer_as_plain_json(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2, "controller": make_controller()}
    make_trainer("t5", tmp_path, **options)[0].train()
    saved = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    state = saved["stateful_callbacks"]["batchwright"]
    assert state["feed"]["sampler"]["position"] == 3 + 6
    assert state["course"]["examples"] == 3 + 6
    assert state["controller"]["size"] == 9


def test_a_checkpoint_of_another_trainer_is_refused_unless_data_need_not_be_skipped(tmp_path):
    args = {"max_steps": 3, "save_strategy": "steps", "save_steps": 3}
    Trainer(make_model("t5"), make_args(tmp_path, **args), collate, numbered()).train()
    checkpoint = str(tmp_path / "checkpoint-3")
    with pytest.raises(StateMismatchError, match="ignore_data_skip=True"):
        make_trainer("t5", tmp_path)[0].train(resume_from_checkpoint=checkpoint)
    trainer, seen, _ = make_trainer("t5", tmp_path, ignore_data_skip=True, max_steps=9)
    trainer.train(resume_from_checkpoint=checkpoint)
    assert seen == planned(trainer.train_dataset, 1)  # 6 more updates, from the start of the epoch


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    make_trainer("t5", tmp_path, max_steps=2, save_strategy="steps", save_steps=2)[0].train()
    trainer, *_ = make_trainer("t5", tmp_path, budget=bw.MaxTokens(90))
    with pytest.raises(StateMismatchError, match=r"MaxTokens\(80\)"):
        trainer.train(resume_from_checkpoint=True)


def test_unused_columns_are_removed_as_the_trainer_does(tmp_path):
    for remove, expected in ((True, ["input_ids", "labels"]), (False, ["input_ids", "labels", "number"])):
        for options in ({}, {"controller": make_controller()}):
            names = []

            def note(examples, names=names):
                names.append(sorted(examples[0]))
                return collate(examples)

            trainer, *_ = make_trainer("t5", tmp_path, remove_unused_columns=remove, data_collator=note, **options)
            next(iter(trainer.get_train_dataloader()))
            assert names[0] == expected


@pytest.mark.parametrize("controller", [None, make_controller()])
def test_the_options_of_the_trainer_for_loaders_hold(controller, tmp_path):
    options = {
        "dataloader_num_workers": 2,
        "dataloader_persistent_workers": True,
        "dataloader_prefetch_factor": 3,
        "dataloader_multiprocessing_context": "spawn",
    }
    if "dataloader_multiprocessing_context" not in TrainingArguments.__dataclass_fields__:
        del options["dataloader_multiprocessing_context"]  # as in transformers 5.3
    loader = make_trainer("t5", tmp_path, controller=controller, **options)[0].get_train_dataloader()
    assert (loader.num_workers, loader.persistent_workers, loader.prefetch_factor) == (2, True, 3)
    if "dataloader_multiprocessing_context" in options:
        assert loader.multiprocessing_context.get_start_method() == "spawn"
    assert loader.worker_init_fn.func.__name__ == "seed_worker"
    assert not loader.pin_memory


def test_persistent_workers_load_every_epoch(tmp_path):
    options = {"num_train_epochs": 2, "dataloader_num_workers": 1, "dataloader_persistent_workers": True}
    _, trained = run(tmp_path, options)
    assert trained == planned(numbered(), 2)


def test_drop_last_of_the_trainer_leaves_out_the_short_batch(tmp_path):
    options = {"budget": bw.MaxItems(5), "grouping": bw.InOrder()}  # 24 examples: 5, 5, 5, 5, 4
    assert len(make_trainer("t5", tmp_path, **options)[0].get_train_dataloader()) == 5
    assert len(make_trainer("t5", tmp_path, dataloader_drop_last=True, **options)[0].get_train_dataloader()) == 4


@pytest.mark.parametrize("options", [{"num_train_epochs": 2}, {"max_steps": 3}])
def test_data_that_drop_last_leaves_nothing_of_are_refused(options, tmp_path):
    """All examples fit into one batch, which ends because the data do: no update would come, and no error."""
    trainer, *_ = make_trainer("llama", tmp_path, budget=bw.MaxItems(100), dataloader_drop_last=True, **options)
    with pytest.raises(ArgumentError, match="no batch is left of 24 examples, as dataloader_drop_last"):
        trainer.train()


def test_data_that_are_all_over_the_budget_are_refused(tmp_path):
    options = {"budget": bw.MaxTokens(2), "plan_options": {"oversize": "drop"}, "max_steps": 2}
    with pytest.raises(ArgumentError, match="every example is over MaxTokens"):
        make_trainer("llama", tmp_path, **options)[0].train()


def test_the_padding_of_the_collator_counts_in_the_budget(tmp_path):
    class Padder:
        pad_to_multiple_of = 16

        def __call__(self, examples):
            return collate(examples)

    for options in ({}, {"controller": make_controller()}):
        trainer, *_ = make_trainer("t5", tmp_path, data_collator=Padder(), **options)
        # 16 + 16 tokens per example, so two fit into 80.
        for item in trainer.get_train_dataloader():
            assert max(len(part["input_ids"]) for part in (item if isinstance(item, list) else [item])) <= 2


def test_another_way_of_sampling_is_warned_about(tmp_path):
    with pytest.warns(UserWarning, match="train_sampling_strategy has no effect"):
        make_trainer("t5", tmp_path, train_sampling_strategy="group_by_length")


def test_an_example_over_the_budget_is_named_before_training(tmp_path):
    for options in ({}, {"controller": make_controller()}):
        with pytest.raises(BudgetError, match="example"):
            make_trainer("t5", tmp_path, budget=bw.MaxTokens(12), **options)[0].train()
    with pytest.raises(BudgetError, match="a trainer takes it as plan_options="):
        make_trainer("t5", tmp_path, budget=bw.MaxTokens(12))[0].train()


def test_texts_without_tokens_are_refused_with_what_to_do(tmp_path):
    texts = [{"text": "not yet", "labels": 0}] * 4
    with pytest.raises(LengthsError, match=r"make tokens of texts first, .* length_column_name, or pass lengths="):
        make_trainer("t5", tmp_path, examples=texts)[0].train()


def test_lengths_of_another_data_set_are_refused(tmp_path):
    trainer, *_ = make_trainer("t5", tmp_path, lengths=[3] * 20)
    with pytest.raises(LengthsError, match="24, got 20"):
        trainer.train()


def test_two_ranks_see_every_example_once_and_train_as_one_would(tmp_path):
    run_ranks("tests.integrations.huggingface.ranks", 2, tmp_path, python=("-W", "error"))
