"""budget="auto" of an adaptive trainer: found on its own steps, without a trace, kept on disk and in checkpoints."""

import json
import random
import threading
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import Seq2SeqTrainer

import batchwright as bw
from batchwright.errors import ArgumentError, DoesNotFitError, StateMismatchError
from batchwright.integrations.huggingface import _probing
from batchwright.step import FoundBudget, MemoryMonitor
from batchwright.testing import FakeMemory

from ...processes import run_ranks
from .trainers import collate, flat, flat_parameters, make_controller, make_model, make_trainer, numbered

TRAINED = {"learning_rate": 1e-2, "optim": "adamw_torch", "lr_scheduler_type": "linear"}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Keep budgets of this test apart."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "batchwright" / "budgets"


def auto_trainer(folder, *, name="t5", dropout=0.1, **options):
    model = options.pop("model", None)
    model = make_model(name, dropout=dropout) if model is None else model
    return make_trainer(name, folder, model=model, budget="auto", **{**TRAINED, **options})


def count_forwards(model):
    """Return a list that grows with every forward pass."""
    found = []
    model.register_forward_pre_hook(lambda *_: found.append(1))
    return found


def with_memory(total_bytes, *, bytes_per_token=100, used_bytes=1000, dropout=0.1):
    """Return a model that takes made-up memory in every forward pass, and the memory."""
    memory = FakeMemory(total_bytes, used_bytes=used_bytes)
    model = make_model("t5", dropout=dropout)

    held = threading.local()  # what a hook holds is part of the key, except what belongs to a thread
    held.memory = memory

    def take(module, args, kwargs):
        held.memory.run_batch(kwargs["input_ids"].numel() + kwargs["labels"].numel(), bytes_per_token)

    model.register_forward_pre_hook(take, with_kwargs=True)
    return model, memory


CASES = {
    "plain": {},
    "controller": {"controller": partial(make_controller, 4, 8, 12)},
    "accumulation": {"gradient_accumulation_steps": 2},
    "raise": {"on_oom": "raise"},
    "skip": {"on_oom": "skip"},
    "bf16": {"bf16": True},
    "checkpointing": {"gradient_checkpointing": True},
    "examples": {"weighting": "examples"},
}


@pytest.mark.parametrize("case", CASES)
def test_training_is_that_with_the_found_budget_given_by_hand(case, tmp_path):
    """To the bit: dropout and the collator draw the same numbers, and no moment has moved."""

    def train(budget):
        options = {name: value() if callable(value) else value for name, value in CASES[case].items()}
        trainer, seen, _ = make_trainer(
            "t5", tmp_path, model=make_model("t5", dropout=0.1), budget=budget, num_train_epochs=2, **TRAINED, **options
        )
        trainer.train()
        return trainer, seen

    trainer, seen = train("auto")
    again, seen_again = train(trainer.found_budget)
    assert isinstance(trainer.found_budget, FoundBudget)
    assert seen == seen_again
    assert torch.equal(flat_parameters(trainer.model), flat_parameters(again.model))
    states = [
        {name: value for name, value in one.state.log_history[0].items() if name != "train_runtime"}
        for one in (trainer, again)
    ]
    assert states[0] == states[1]
    assert torch.equal(
        *(torch.cat([v["exp_avg"].flatten() for v in one.optimizer.state.values()]) for one in (trainer, again))
    )


def test_finding_leaves_no_trace(tmp_path):
    trainer, seen, gradients = auto_trainer(tmp_path)
    model = trainer.model
    forwards, weights = count_forwards(model), flat_parameters(model)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    attributes, names = dict(vars(trainer)), set(vars(model))
    model.eval()
    trainer.get_train_dataloader()
    assert len(forwards) > 8
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert torch.equal(flat_parameters(model), weights)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training
    assert set(vars(model)) == names
    assert len(trainer.optimizer.state) == 0
    assert (seen, gradients.seen, trainer.state.log_history) == ([], [], [])
    changed = {name for name, value in vars(trainer).items() if value is not attributes.get(name)}
    assert changed - {"_batching", "optimizer"} <= {name for name in changed if vars(trainer)[name] == attributes[name]}
    assert set(vars(trainer)) == set(attributes)


def test_an_optimizer_that_has_a_state_keeps_it(tmp_path):
    model = make_model("t5")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(**collate(numbered(2))).loss.backward()
    optimizer.step()
    gradient = model.shared.weight.grad.clone()
    before = [value["exp_avg"].clone() for value in optimizer.state.values()]
    trainer, *_ = auto_trainer(tmp_path, model=model, optimizers=(optimizer, None))
    trainer.get_train_dataloader()
    assert trainer.optimizer is optimizer
    assert all(map(torch.equal, before, (value["exp_avg"] for value in optimizer.state.values())))
    assert [float(value["step"]) for value in optimizer.state.values()] == [1.0] * len(before)
    assert torch.equal(model.shared.weight.grad, gradient)


def test_memory_limits_the_batches_and_nothing_runs_out_of_it(tmp_path):
    model, memory = with_memory(12_000)
    trainer, *_ = auto_trainer(tmp_path, model=model, memory=MemoryMonitor(source=memory), examples=numbered(60))
    trainer.get_train_dataloader()
    assert trainer.found_budget.memory.max_bytes <= 0.9 * 12_000
    memory.reset_peak()
    trainer.train()
    assert 5_000 < memory.peak_bytes <= 0.9 * 12_000
    assert {log["ooms"] for log in trainer.state.log_history if "loss" in log} == {0}


def test_with_a_controller_only_memory_counts(tmp_path):
    model, memory = with_memory(12_000)
    trainer, *_ = auto_trainer(
        tmp_path, model=model, memory=MemoryMonitor(source=memory), controller=make_controller(4, 8, 12)
    )
    trainer.train()
    assert trainer.found_budget.time is None
    assert memory.peak_bytes <= 0.9 * 12_000 or trainer.found_budget.memory is not None


@pytest.mark.parametrize("on_oom", ["split", "skip", "raise"])
def test_running_out_of_memory_while_looking_is_no_failure_of_training(on_oom, tmp_path):
    """The device says that it has twice the memory that can be had."""
    model, memory = with_memory(6_000)
    memory.total_bytes, fits = 12_000, 6_000
    run = memory.run_batch

    def run_batch(*shape):
        if memory.used_bytes + np.prod(shape) > fits:
            raise torch.OutOfMemoryError("fragments")
        run(*shape)

    memory.run_batch = run_batch
    trainer, *_ = auto_trainer(
        tmp_path, model=model, memory=MemoryMonitor(source=memory), examples=numbered(60), on_oom=on_oom
    )
    trainer.train()
    assert trainer._batching.updates.figures.num_ooms == 0
    assert memory.peak_bytes <= fits


def test_one_example_that_does_not_fit_is_an_error_that_says_what_to_do(tmp_path):
    model, memory = with_memory(1_500)
    trainer, *_ = auto_trainer(tmp_path, model=model, memory=MemoryMonitor(source=memory))
    with pytest.raises(DoesNotFitError, match=r"one example of .* gradient_checkpointing=True, or give a budget"):
        trainer.train()


def test_source_and_target_have_axes_of_their_own(tmp_path):
    trainer, seen, _ = auto_trainer(tmp_path, trainer_cls=Seq2SeqTrainer)
    trainer.train()
    assert sorted(flat(seen)) == list(range(24))
    assert trainer.found_budget.max_items(np.array([[14, 9]]))[0] >= 1


def test_a_causal_model_has_one_axis(tmp_path):
    trainer, seen, _ = auto_trainer(tmp_path, name="llama")
    trainer.train()
    assert sorted(flat(seen)) == list(range(24))


def test_few_examples_come_several_times(tmp_path):
    trainer, seen, _ = auto_trainer(tmp_path, examples=numbered(2))
    trainer.train()
    assert sorted(flat(seen)) == [0, 1]


def test_a_collator_that_fails_raises_its_own_error(tmp_path):
    def broken(examples):
        raise KeyError("no such column")

    trainer, *_ = auto_trainer(tmp_path, data_collator=broken)
    with pytest.raises(KeyError, match="no such column"):
        trainer.train()
    assert trainer._batching.settings.budget == "auto"


def test_an_error_of_the_model_is_raised_and_leaves_no_trace(tmp_path):
    trainer, *_ = auto_trainer(tmp_path)
    hook = trainer.model.register_forward_pre_hook(lambda *_: 1 / 0)
    weights = flat_parameters(trainer.model)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    hook.remove()
    assert torch.equal(flat_parameters(trainer.model), weights)
    trainer.train()
    assert trainer.state.global_step > 0


# The cache


def test_a_budget_that_is_known_is_not_looked_for_again(cache, tmp_path, monkeypatch):
    first, *_ = auto_trainer(tmp_path)
    first.get_train_dataloader()
    (path,) = cache.iterdir()
    assert json.loads(path.read_text())["key"]["ranks"][0]["model"]["class"].endswith("T5ForConditionalGeneration")
    second, *_ = auto_trainer(tmp_path)
    monkeypatch.setattr(_probing, "find_budget", None)
    second.get_train_dataloader()
    assert second.found_budget == first.found_budget


def frozen():
    model = make_model("t5", dropout=0.1)
    model.shared.requires_grad_(False)
    return model


CHANGES = {
    "frozen": lambda: {"model": frozen()},
    "dropout": lambda: {"dropout": 0.2},
    "data": lambda: {"examples": numbered(24)[:6]},
    "accumulation": lambda: {"gradient_accumulation_steps": 2},
    "checkpointing": lambda: {"gradient_checkpointing": True},
    "optimizer": lambda: {"optim": "sgd"},
    "precision": lambda: {"bf16": True},
    "on_oom": lambda: {"on_oom": "raise"},
    "controller": lambda: {"controller": make_controller(4)},
    "smoothing": lambda: {"label_smoothing_factor": 0.1},
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_or_setting_is_another_key(change, cache, tmp_path, monkeypatch):
    found = FoundBudget(None, bw.TimeModel.fit([(1, 8), (2, 8), (4, 8)], [0.1, 0.2, 0.3]))
    searches = []
    monkeypatch.setattr(_probing, "find_budget", lambda *args, **kwargs: searches.append(args) or found)
    for options in ({}, {}, CHANGES[change]()):
        auto_trainer(tmp_path, **options)[0].get_train_dataloader()
    assert len(searches) == len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"kind": 1}', "null", "\x00\xff"])
def test_a_broken_file_is_written_anew(content, cache, tmp_path):
    first, *_ = auto_trainer(tmp_path)
    first.get_train_dataloader()
    (path,) = cache.iterdir()
    path.write_text(content)
    second, *_ = auto_trainer(tmp_path)
    second.get_train_dataloader()
    assert json.loads(path.read_text())["budget"] == json.loads(second.found_budget.to_json())


def test_a_cache_that_cannot_be_written_is_no_error(cache, tmp_path, monkeypatch):
    cache.parent.parent.mkdir()
    cache.parent.write_text("a file where the folder would be")
    trainer, *_ = auto_trainer(tmp_path, data_collator=collate)
    trainer.train()
    found = trainer.found_budget
    monkeypatch.setattr(_probing, "find_budget", None)  # known in this process
    trainer.get_train_dataloader()
    assert trainer.found_budget == found


def test_less_memory_than_before_is_kept_to_and_more_is_looked_at_again(cache, tmp_path):
    def find(total_bytes):
        model, memory = with_memory(total_bytes)
        forwards = count_forwards(model)
        trainer, *_ = auto_trainer(tmp_path, model=model, memory=MemoryMonitor(source=memory))
        trainer.get_train_dataloader()
        return trainer.found_budget, len(forwards)

    first, num = find(12_000)
    less, num_less = find(8_000)
    more, num_more = find(40_000)
    assert (num > 0, num_less, num_more > 0) == (True, 0, True)
    assert less.memory.max_bytes == 7_200
    assert less.memory.model == first.memory.model
    assert more.memory.max_bytes > first.memory.max_bytes


# Checkpoints


@pytest.mark.parametrize("has_controller", [False, True])
def test_a_resumed_run_plans_the_same_batches(has_controller, cache, tmp_path, monkeypatch):
    def make(folder, **options):
        controller = make_controller(6) if has_controller else None
        model, memory = with_memory(6_000)
        return auto_trainer(
            folder, model=model, memory=MemoryMonitor(source=memory), controller=controller, save_steps=2, **options
        )

    whole, seen, _ = make(tmp_path / "whole", save_strategy="steps", num_train_epochs=2)
    whole.train()
    for path in cache.iterdir():
        path.unlink()
    resumed, seen_later, _ = make(tmp_path / "later", num_train_epochs=2)
    monkeypatch.setattr(_probing, "find_budget", None)  # nothing is looked for
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    assert resumed.found_budget == whole.found_budget
    assert seen_later == seen[len(seen) - len(seen_later) :]
    assert 0 < len(seen_later) < len(seen)
    assert list(cache.iterdir()) == []
    assert torch.equal(flat_parameters(resumed.model), flat_parameters(whole.model))


def test_a_checkpoint_with_a_given_budget_is_not_continued(tmp_path):
    given, *_ = make_trainer("t5", tmp_path, save_strategy="steps", save_steps=2, **TRAINED)
    given.train()
    trainer, *_ = auto_trainer(tmp_path)
    with pytest.raises(StateMismatchError, match=r"saved with a budget that was given.*give the same budget"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


# Evaluation


@pytest.mark.parametrize("options", [{"budget": "auto"}, {"eval_budget": "auto"}], ids=["budget", "eval_budget"])
def test_evaluation_finds_a_budget_of_its_own(options, tmp_path):
    def make(**more):
        return make_trainer("t5", tmp_path, eval_dataset=numbered(20), **{**TRAINED, **more})[0]

    plain, trainer = make(), make(**options)
    torch.manual_seed(0)
    expected, state = plain.evaluate()["eval_loss"], torch.get_rng_state()
    torch.manual_seed(0)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    assert torch.equal(torch.get_rng_state(), state)
    forwards = count_forwards(trainer.model)
    trainer.evaluate()
    num_batches = len(trainer.get_eval_dataloader())
    assert len(forwards) <= num_batches + 1  # the batches themselves, what the loss is a mean over, and no more looking
    ours, theirs = (one.predict(numbered(20)) for one in (trainer, plain))
    counts = ours.label_ids != -100
    np.testing.assert_array_equal(ours.label_ids, theirs.label_ids)
    np.testing.assert_allclose(ours.predictions[0][counts], theirs.predictions[0][counts], rtol=1e-5, atol=1e-6)


def test_evaluation_may_be_larger_than_training(tmp_path):
    """Memory that a backward pass takes as well: nothing of it in evaluation."""
    memory, model = FakeMemory(12_000, used_bytes=1000), make_model("t5")

    def take(module, args, kwargs):
        times = 4 if torch.is_grad_enabled() else 1
        memory.run_batch(times * (kwargs["input_ids"].numel() + kwargs["labels"].numel()), 25)

    model.register_forward_pre_hook(take, with_kwargs=True)
    trainer, *_ = auto_trainer(
        tmp_path, model=model, memory=MemoryMonitor(source=memory), examples=numbered(60), eval_dataset=numbered(60)
    )
    trainer.train()
    trainer.evaluate()
    (budget,) = trainer._finder.evaluation.values()
    longest = np.array([[14, 9]])
    assert budget.max_items(longest)[0] > 2 * trainer.found_budget.max_items(longest)[0]
    assert memory.peak_bytes <= 0.9 * 12_000 + 1


# Refusals


class Stream(IterableDataset):
    def __iter__(self):
        return iter(numbered(4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "automatic"}, "budget must be a budget such as MaxTokens.*, or 'auto', got 'automatic'"),
        ({"eval_budget": "automatic"}, "or 'auto', got 'automatic'"),
        ({"grouping": bw.Packed(capacity=32)}, "Packed|packed rows"),
    ],
    ids=["word", "eval", "packed"],
)
def test_what_cannot_be_found_is_refused_at_once(options, message, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        make_trainer("t5", tmp_path, **{"budget": "auto", **options})


def test_parameters_that_are_updated_inside_the_backward_pass_are_refused(tmp_path):
    trainer, *_ = auto_trainer(tmp_path)
    next(trainer.model.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    with pytest.raises(ArgumentError, match=r"register_post_accumulate_grad_hook.*give a budget such as"):
        trainer.train()


def test_a_divided_model_is_refused(tmp_path, monkeypatch):
    from batchwright.integrations.huggingface import _settings

    monkeypatch.setattr(_settings, "is_divided", lambda trainer: True)
    with pytest.raises(ArgumentError, match=r"budget='auto' measures every rank by itself.*give a budget such as"):
        auto_trainer(tmp_path, on_oom="raise")


def test_a_model_on_several_devices_is_refused(tmp_path):
    trainer, *_ = auto_trainer(tmp_path)
    trainer.model.extra = nn.Linear(1, 1, device="meta")
    with pytest.raises(ArgumentError, match="one device, but the model lies on cpu, meta; give a budget"):
        trainer.train()


# Ranks


def test_ranks_agree_on_a_budget_or_on_an_error(tmp_path):
    """One has less memory, is slower, runs out of memory while looking, or fails in a batch or in its collator."""
    run_ranks("tests.integrations.huggingface.budget_ranks", 2, tmp_path)
