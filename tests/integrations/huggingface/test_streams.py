"""Adaptive trainers on streams: every example once per pass, exact updates, exact resume, and what is refused."""

import json

import pytest
import torch
from datasets import Dataset
from datasets import IterableDataset as HubStream
from datasets.distributed import split_dataset_by_node
from torch.utils.data import IterableDataset
from transformers import Trainer

import batchwright as bw
from batchwright.errors import ArgumentError, LengthsError, StateMismatchError
from batchwright.integrations.huggingface._lengths import StreamLengths
from batchwright.testing import EagerGraphs

from ...processes import run_ranks
from .trainers import (
    MODELS,
    check,
    collate,
    flat,
    flat_parameters,
    make_controller,
    make_model,
    make_trainer,
    numbered,
    windows,
)

NUM = 24


class Plain(IterableDataset):
    """A stream of torch that counts what was read of it."""

    def __init__(self, examples):
        self.examples = examples
        self.num_read = 0

    def __iter__(self):
        for example in self.examples:
            self.num_read += 1
            yield example


class Pipeline:
    """An iterable that is no data set of torch, as a pipeline of shards is where torch is not asked for."""

    def __init__(self, examples):
        self.shards = [examples[:10], examples[10:]]

    def __iter__(self):
        for shard in self.shards:
            yield from shard


class Resumable(Plain):
    """A stream of torch that goes on from its state."""

    def __init__(self, examples):
        super().__init__(examples)
        self.place = 0

    def __iter__(self):
        while self.place < len(self.examples):
            self.place += 1
            self.num_read += 1
            yield self.examples[self.place - 1]
        self.place = 0

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.place = state["place"]


def hub(examples, num_shards=1):
    return Dataset.from_list(examples).to_iterable_dataset(num_shards=num_shards)


def shuffled(examples):
    return hub(examples, 4).shuffle(seed=5, buffer_size=10)


def mapped(examples):
    return hub(examples).map(lambda example: {**example, "input_ids": list(example["input_ids"])})


def generated(examples):
    return HubStream.from_generator(lambda: iter(examples))


STREAMS = {
    "torch": Plain,
    "pipeline": Pipeline,
    "resumable": Resumable,
    "hub": hub,
    "shuffled": shuffled,
    "mapped": mapped,
    "generated": generated,
}
every_stream = pytest.mark.parametrize("kind", STREAMS)
OPTIONS = {"plan_options": {"buffer_size": 10}}


def stream(kind, name="t5", num=NUM):
    return STREAMS[kind](numbered(num, causal=MODELS[name][3]))


def passes(seen, num=NUM):
    """Return the micro-batches of every pass over so many examples."""
    found, taken = [[]], 0
    for batch in seen:
        found[-1].append(batch)
        taken += len(batch)
        if taken % num == 0:
            found.append([])
    return [batches for batches in found if batches]


@every_stream
@pytest.mark.parametrize("name", ["t5", "llama"])
def test_every_example_comes_once_per_pass_and_updates_are_exact(kind, name, tmp_path):
    trainer, seen, gradients = make_trainer(name, tmp_path, examples=stream(kind, name), max_steps=9, **OPTIONS)
    trainer.train()
    assert trainer.state.global_step == 9
    check(name, trainer, gradients, seen)
    whole = [sorted(flat(batches)) for batches in passes(seen) if len(flat(batches)) == NUM]
    assert whole
    assert all(numbers == list(range(NUM)) for numbers in whole)


def test_batches_are_those_of_a_stream_batcher_with_both_lengths(tmp_path):
    trainer, seen, _ = make_trainer("t5", tmp_path, examples=stream("torch"), max_steps=8, seed=3, **OPTIONS)
    trainer.train()
    expected = bw.StreamBatcher(
        numbered(),
        length_of=lambda example: (len(example["input_ids"]), len(example["labels"])),
        budget=bw.MaxTokens(80),
        buffer_size=10,
        seed=3,
    )
    batches = [[example["number"] for example in batch] for _ in range(2) for batch in expected]
    assert seen == batches[:8]


@pytest.mark.parametrize("num", [2, 3])
def test_the_last_update_of_a_pass_may_have_fewer_batches(num, tmp_path):
    trainer, seen, gradients = make_trainer(
        "llama", tmp_path, examples=stream("torch", "llama"), max_steps=7, gradient_accumulation_steps=num,
        budget=bw.MaxTokens(50), **OPTIONS,
    )  # fmt: skip
    trainer.train()
    found = passes(seen)
    assert sorted(flat(found[0])) == list(range(NUM))
    assert any(len(batches) % num for batches in found[:-1])
    updates = [update for batches in found for update in windows(batches, num)]
    check("llama", trainer, gradients, updates)
    assert trainer.args.gradient_accumulation_steps == num
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["batch_size"] for entry in logs] == [len(update) for update in updates]


def test_weights_count_examples_where_asked(tmp_path):
    trainer, seen, gradients = make_trainer(
        "llama", tmp_path, examples=stream("hub", "llama"), max_steps=4, weighting="examples",
        gradient_accumulation_steps=2, **OPTIONS,
    )  # fmt: skip
    trainer.train()
    updates = [update for batches in passes(seen) for update in windows(batches, 2)]
    check("llama", trainer, gradients, updates, "examples")


@pytest.mark.parametrize("kind", ["torch", "shuffled"])
@pytest.mark.parametrize("num", [1, 2])
def test_workers_change_nothing(kind, num, tmp_path):
    results = []
    for workers in (0, 2):
        trainer, _, gradients = make_trainer(
            "t5", tmp_path, examples=stream(kind), max_steps=9, dataloader_num_workers=workers,
            gradient_accumulation_steps=num, **OPTIONS,
        )  # fmt: skip
        trainer.train()
        results.append(torch.stack(gradients.seen))
    assert torch.equal(*results)


def train(folder, kind, *, checkpoint=None, dropout=0.2, examples=None, **options):
    settings = {"max_steps": 11, "learning_rate": 0.05, "lr_scheduler_type": "linear", **OPTIONS, **options}
    trainer, seen, _ = make_trainer(
        "t5",
        folder,
        model=make_model("t5", dropout=dropout),
        examples=stream(kind) if examples is None else examples,
        **settings,
    )
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(folder / checkpoint))
    return trainer, seen


@pytest.mark.parametrize("kind", ["torch", "resumable", "hub", "shuffled"])
def test_resuming_equals_a_run_without_a_break(kind, tmp_path):
    # A pass has 8 updates of 3, 3 and 2 per buffer.
    check_resume(tmp_path, kind, stops=(1, 3, 5, 8, 9))


@pytest.mark.parametrize("kind", ["mapped", "generated", "pipeline"])
def test_resuming_is_exact_with_accumulation(kind, tmp_path):
    check_resume(tmp_path, kind, stops=(1, 4), gradient_accumulation_steps=2, max_steps=6)


@pytest.mark.parametrize("kind", ["torch", "hub"])
def test_resuming_is_exact_with_workers(kind, tmp_path):
    check_resume(tmp_path, kind, stops=(2, 8), dataloader_num_workers=2)


def check_resume(folder, kind, *, stops, **options):
    straight, whole = train(folder, kind, save_strategy="steps", save_steps=1, **options)
    for stop in stops:
        resumed, after = train(folder, kind, checkpoint=f"checkpoint-{stop}", **options)
        assert resumed.state.global_step == straight.state.global_step
        assert torch.equal(flat_parameters(resumed.model), flat_parameters(straight.model))
        if "dataloader_num_workers" not in options:  # where the collator's notes stay with the workers
            assert after == whole[-len(after) :]
            assert len(whole) > len(after) >= 11 - 9
        shown = [[entry["epoch"] for entry in t.state.log_history if "loss" in entry] for t in (resumed, straight)]
        assert shown[0] == shown[1]


def test_a_stream_with_a_state_goes_on_and_another_is_read_again(tmp_path):
    numbers = {}
    for kind in ("torch", "resumable"):
        train(tmp_path / kind, kind, save_strategy="steps", save_steps=5, max_steps=5)
        examples = stream(kind)
        train(tmp_path / kind, kind, checkpoint="checkpoint-5", examples=examples, max_steps=6)
        numbers[kind] = examples.num_read
    # The fifth update lies in the second buffer of 10, where a stream with a state continues.
    assert numbers == {"torch": 20, "resumable": 10}


def test_a_checkpoint_holds_the_place_and_the_users_own_arguments(tmp_path):
    train(tmp_path, "hub", max_steps=3, save_strategy="steps", save_steps=2, gradient_accumulation_steps=2)
    state = json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())
    feed = state["stateful_callbacks"]["batchwright"]["feed"]
    assert feed["num_items"] == 2
    assert feed["axes"] == 2
    args = torch.load(tmp_path / "checkpoint-2" / "training_args.bin", weights_only=False)
    assert args.gradient_accumulation_steps == 2


def test_ignore_data_skip_begins_the_pass_again(tmp_path):
    _, before = train(tmp_path, "hub", max_steps=2, save_strategy="steps", save_steps=2)
    _, after = train(tmp_path, "hub", checkpoint="checkpoint-2", ignore_data_skip=True, max_steps=4)
    assert after == before


def test_a_second_training_of_a_stream_that_was_resumed_begins_at_its_start(tmp_path):
    train(tmp_path, "hub", max_steps=4, save_strategy="steps", save_steps=4)
    examples = stream("hub")
    train(tmp_path, "hub", checkpoint="checkpoint-4", examples=examples, max_steps=5)
    _, again = train(tmp_path / "again", "hub", examples=examples, max_steps=5)
    assert again == train(tmp_path / "new", "hub", max_steps=5)[1]


def test_a_callback_that_ends_an_epoch_begins_the_next_pass(tmp_path):
    trainer, seen, _ = make_trainer("t5", tmp_path, examples=stream("torch"), max_steps=4, **OPTIONS)

    def on_step_end(args, state, control, **kwargs):
        control.should_epoch_stop = state.global_step == 2

    trainer.callback_handler.callbacks[-1].on_step_end = on_step_end
    trainer.train()
    expected = bw.StreamBatcher(
        numbered(),
        length_of=lambda example: (len(example["input_ids"]), len(example["labels"])),
        budget=bw.MaxTokens(80),
        buffer_size=10,
        seed=42,
    )
    first = [[example["number"] for example in batch] for batch in expected]
    second = [[example["number"] for example in batch] for batch in expected]
    assert seen == first[:2] + second[:2]


def test_a_stream_that_is_set_later_is_trained_on(tmp_path):
    trainer, seen, _ = make_trainer("t5", tmp_path, max_steps=3, **{**OPTIONS, "plan_options": {}})
    trainer.train_dataset = stream("torch")
    trainer.train()
    assert len(seen) == 3


def test_a_column_of_lengths_is_taken(tmp_path):
    examples = [{**example, "length": 20} for example in numbered()]
    trainer, seen, _ = make_trainer("t5", tmp_path, examples=Plain(examples), max_steps=6)
    trainer.train()
    assert [len(batch) for batch in seen] == [4] * 6  # 80 tokens


def test_evaluation_on_a_stream_is_left_to_the_trainer(tmp_path):
    examples = numbered(10)
    options = {"data_collator": collate, "max_steps": 1, "remove_unused_columns": False}
    trainer, *_ = make_trainer("t5", tmp_path, examples=stream("torch"), eval_dataset=Plain(examples), **options)
    found = trainer.evaluate()
    plain = Trainer(model=trainer.model, args=trainer.args, data_collator=collate, eval_dataset=Plain(examples))
    assert found["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"])


@pytest.mark.parametrize("kind", ["torch", "resumable", "shuffled"])
def test_the_budget_is_found_on_the_first_buffer_and_the_stream_stays_unread(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    options = {"max_steps": 6, "learning_rate": 0.05, **OPTIONS}
    found, seen, _ = make_trainer("t5", tmp_path, examples=stream(kind), budget="auto", **options)
    found.train()
    budget = found.found_budget
    given, expected, _ = make_trainer("t5", tmp_path, examples=stream(kind), budget=budget, **options)
    given.train()
    assert seen[-len(expected) :] == expected  # after the batches that were measured
    assert torch.equal(flat_parameters(found.model), flat_parameters(given.model))
    assert sorted(flat(passes(expected)[0])) == list(range(NUM))


def test_a_stream_that_looking_would_move_has_no_auto_budget(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    class Once(IterableDataset):
        def __init__(self):
            self.examples = iter(numbered())

        def __iter__(self):
            return self.examples

    trainer, *_ = make_trainer("t5", tmp_path, examples=Once(), budget="auto", max_steps=2, **OPTIONS)
    with pytest.raises(ArgumentError, match="it does not begin anew with them; give a budget"):
        trainer.train()


def test_a_stream_that_was_split_for_another_rank_is_refused(tmp_path):
    examples = split_dataset_by_node(hub(numbered(), 2), rank=0, world_size=2)
    trainer, *_ = make_trainer("t5", tmp_path, examples=examples, max_steps=2)
    with pytest.raises(ArgumentError, match="split for rank 0 of 2, this process is rank 0 of 1"):
        trainer.train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"controller": make_controller(4)}, "a controller draws examples by their number"),
        ({"controller": "auto"}, "a controller draws examples by their number"),
        ({"lengths": [3] * 24}, "the lengths of a stream are measured as it is read"),
        ({"dataloader_drop_last": True}, "dataloader_drop_last"),
        ({"plan_options": {"keep_first": 3}}, "'keep_first': …} needs the whole epoch"),
        ({"plan_options": {"balance_over": 3}}, "'balance_over': …} needs the whole epoch"),
        ({"plan_options": {"groups": [0] * 25}}, "'groups': …} needs the whole epoch"),
        ({"graphs": EagerGraphs()}, "shapes of a stream are not known"),
    ],
)
def test_what_a_stream_cannot_do_is_refused(options, message, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        make_trainer("t5", tmp_path, examples=stream("torch"), max_steps=2, **options)


class Sized(Plain):
    """A stream that knows how many examples it has."""

    def __len__(self):
        return len(self.examples)


def test_a_stream_needs_a_number_of_steps_even_if_it_has_a_length(tmp_path):
    with pytest.raises(ArgumentError, match="a stream needs max_steps"):
        make_trainer("t5", tmp_path, examples=Sized(numbered()))
    trainer, seen, _ = make_trainer("t5", tmp_path, examples=Sized(numbered()), max_steps=2)
    trainer.train()
    assert len(seen) == 2


@pytest.mark.parametrize("name", ["buffer_size", "sharded"])
def test_options_of_streams_are_refused_for_other_data(name, tmp_path):
    trainer, *_ = make_trainer("t5", tmp_path, plan_options={name: 10})
    with pytest.raises(ArgumentError, match=f"'{name}': …}} belongs to streams"):
        trainer.train()


def test_a_state_that_a_checkpoint_cannot_hold_is_refused(tmp_path):
    class Odd(Resumable):
        def state_dict(self):
            return {"place": {self.place}}

    with pytest.raises(ArgumentError, match=r"Odd.*cannot be saved in a checkpoint"):
        train(tmp_path, "", examples=Odd(numbered()), max_steps=2, save_strategy="steps", save_steps=1)


def test_a_checkpoint_of_a_data_set_with_a_length_is_refused_for_a_stream(tmp_path):
    train(tmp_path, "", examples=numbered(), max_steps=2, save_strategy="steps", save_steps=2, plan_options={})
    with pytest.raises(StateMismatchError):
        train(tmp_path, "torch", checkpoint="checkpoint-2")


def test_an_example_over_the_budget_is_named_or_left_out(tmp_path):
    examples = numbered()
    examples[13] = {**examples[13], "input_ids": [5] * 90}
    trainer, *_ = make_trainer("t5", tmp_path, examples=Plain(examples), max_steps=20, **OPTIONS)
    with pytest.raises(bw.errors.BudgetError, match="in the buffer that begins at example 10"):
        trainer.train()
    options = {"plan_options": {"buffer_size": 10, "oversize": "drop"}}
    trainer, seen, _ = make_trainer("t5", tmp_path, examples=Plain(examples), max_steps=8, **options)
    trainer.train()
    assert sorted(flat(passes(seen, NUM - 1)[0])) == [number for number in range(NUM) if number != 13]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            {"input_ids": [1, 2], "labels": [1, 2]},
            {"input_ids": [1], "labels": [1, 2]},
            "had the lengths of the inputs",
        ),
        ({"input_ids": [1, 2], "labels": [1]}, {"input_ids": [1]}, "1 input_ids and no labels.*lengths of their own"),
        ({"input_ids": [1, 2]}, {"text": "a b"}, "has text, but neither 'length' nor token ids"),
        ({"input_ids": [1, 2]}, [1, 2], "must be mappings, got list"),
    ],
)
def test_examples_without_lengths_are_refused(first, second, message):
    lengths = StreamLengths("length", has_decoder=False)
    lengths(first)
    with pytest.raises(LengthsError, match=message):
        lengths(second)


def test_labels_have_their_own_lengths_where_the_model_has_a_decoder():
    example = {"input_ids": [1, 2], "labels": [1, 2]}
    assert StreamLengths("length", has_decoder=True)(example) == (2, 2)
    assert StreamLengths("length", has_decoder=False)(example) == (2,)
    assert StreamLengths("length", has_decoder=False)({"input_ids": [1, 2], "labels": 3}) == (2,)


def test_two_ranks_train_on_a_stream_as_one_would(tmp_path):
    run_ranks("tests.integrations.huggingface.stream_ranks", 2, tmp_path, python=("-W", "error"))
