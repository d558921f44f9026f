"""budget="auto" of an adaptive trainer on unusual data, models and ends: right, or refused with the reason."""

import logging

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from batchwright.errors import ArgumentError, BudgetError
from batchwright.integrations.huggingface import _probing
from batchwright.step import MemoryMonitor

from ...thorough import crossed
from .test_auto_budget import auto_trainer, cache, count_forwards, with_memory
from .trainers import collate, flat, flat_parameters, make_model, numbered

__all__ = ["cache"]  # a fixture

PAIRS = [f"pair {place % 12}" for place in range(24)]


def run_out(model, most_tokens, where):
    """Let a model run out of memory beyond some tokens, in its forward or its backward pass."""

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(context, values, num):
            context.num = num
            if where == "forward" and num > most_tokens:
                raise torch.OutOfMemoryError("in the forward pass")
            return values.view_as(values)

        @staticmethod
        def backward(context, gradient):
            if where == "backward" and context.num > most_tokens:
                raise torch.OutOfMemoryError("in the backward pass")
            return gradient, None

    num = [0]
    model.register_forward_pre_hook(
        lambda module, args, kwargs: num.__setitem__(0, kwargs["input_ids"].numel()), with_kwargs=True
    )
    model.lm_head.register_forward_hook(lambda module, args, output: Failing.apply(output, num[0]))


@pytest.mark.parametrize(("where", "is_measured"), crossed(["forward", "backward"], [True, False]))
def test_running_out_of_memory_in_either_pass_bounds_the_batches(where, is_measured, tmp_path):
    model, memory = with_memory(40_000)
    run_out(model, 100, where)
    monitor = MemoryMonitor(source=memory) if is_measured else None
    trainer, seen, _ = auto_trainer(tmp_path, model=model, memory=monitor, examples=numbered(60))
    trainer.get_train_dataloader()
    seen.clear()
    trainer.train()
    # Of shapes between those that ran and failed nobody knows: one may still be cut, exactly, and then none.
    assert trainer._batching.updates.figures.num_ooms <= 1
    assert sorted(flat(seen)) == list(range(60))


def test_an_optimizer_that_runs_out_of_memory_in_its_step_says_so_and_nothing_has_changed(tmp_path):
    class Failing(torch.optim.AdamW):
        def step(self, *args, **kwargs):
            raise torch.OutOfMemoryError("in the step")

    model = make_model("t5")
    before = flat_parameters(model)
    trainer, *_ = auto_trainer(tmp_path, model=model, optimizers=(Failing(model.parameters(), lr=0.1), None))
    with pytest.raises(torch.OutOfMemoryError, match="in the step"):
        trainer.train()
    assert torch.equal(flat_parameters(model), before)
    assert len(trainer.optimizer.state) == 0


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_or_an_interrupt_in_the_middle_is_raised_as_it_is_and_leaves_no_trace(kind, tmp_path):
    trainer, *_ = auto_trainer(tmp_path, examples=numbered(60))
    model, calls = trainer.model, count_forwards(trainer.model)
    weights, state, names = flat_parameters(model), torch.get_rng_state(), set(vars(model))

    def fail(module, args):
        if len(calls) >= 9:
            raise kind("from the ninth pass on")

    hook = model.register_forward_pre_hook(fail)
    with pytest.raises(kind, match="from the ninth pass on"):
        trainer.get_train_dataloader()
    hook.remove()
    assert torch.equal(flat_parameters(model), weights)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert (set(vars(model)), len(trainer.optimizer.state)) == (names, 0)
    trainer.train()
    assert trainer.state.global_step > 0


def equal(num):
    return [{**numbered(4)[3], "number": place} for place in range(num)]


@pytest.mark.parametrize("examples", [numbered(1), equal(24)], ids=["one", "equal"])
@pytest.mark.parametrize("is_measured", [True, False])
def test_one_example_and_examples_of_one_length_are_trained_on(examples, is_measured, tmp_path):
    model, memory = with_memory(12_000)
    monitor = MemoryMonitor(source=memory) if is_measured else None
    trainer, seen, _ = auto_trainer(tmp_path, model=model, examples=examples, memory=monitor)
    trainer.get_train_dataloader()
    seen.clear()
    memory.reset_peak()
    trainer.train()
    assert sorted(flat(seen)) == list(range(len(examples)))
    assert memory.peak_bytes <= 0.9 * 12_000 or not is_measured


@pytest.mark.parametrize("column", ["input_ids", "labels"])
def test_examples_without_a_token_are_trained_on(column, tmp_path):
    examples = numbered(24)
    examples[5] = {**examples[5], column: []}
    trainer, seen, _ = auto_trainer(tmp_path, examples=examples)
    trainer.get_train_dataloader()
    seen.clear()
    trainer.train()
    assert sorted(flat(seen)) == list(range(24))


def test_a_collator_that_lengthens_examples_is_measured_as_it_is(tmp_path):
    def longer(examples):
        batch = collate(examples)
        for name in ("input_ids", "attention_mask"):
            batch[name] = torch.nn.functional.pad(batch[name], (0, 20), value=1)
        return batch

    model, memory = with_memory(12_000)
    trainer, *_ = auto_trainer(
        tmp_path, model=model, memory=MemoryMonitor(source=memory), examples=numbered(60), data_collator=longer
    )
    trainer.get_train_dataloader()
    memory.reset_peak()
    trainer.train()
    assert memory.peak_bytes <= 0.9 * 12_000
    assert trainer._batching.updates.figures.num_ooms == 0


def test_groups_stay_together_within_the_memory(tmp_path):
    model, memory = with_memory(9_000)
    trainer, seen, _ = auto_trainer(
        tmp_path, model=model, memory=MemoryMonitor(source=memory), plan_options={"groups": PAIRS}, on_oom="split"
    )
    trainer.get_train_dataloader()
    seen.clear()
    memory.reset_peak()
    trainer.train()
    assert all({(place + 12) % 24 for place in batch} == set(batch) for batch in seen)
    assert memory.peak_bytes <= 0.9 * 9_000


def test_a_group_that_does_not_fit_is_refused(tmp_path):
    model, memory = with_memory(9_000)
    groups = [place % 2 for place in range(24)]
    trainer, *_ = auto_trainer(
        tmp_path, model=model, memory=MemoryMonitor(source=memory), plan_options={"groups": groups}
    )
    with pytest.raises(BudgetError, match=r"group 0 of 12 examples .* make the group smaller"):
        trainer.train()


class Stop(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = True


def test_a_callback_stops_a_training_and_the_trainer_trains_again_without_looking(tmp_path, monkeypatch):
    model, memory = with_memory(6_000)
    options = {"memory": MemoryMonitor(source=memory), "callbacks": [Stop()], "data_collator": collate}
    trainer, *_ = auto_trainer(tmp_path, model=model, **options)
    trainer.train()
    assert trainer.state.global_step == 1
    trainer.remove_callback(Stop)
    found = trainer.found_budget
    monkeypatch.setattr(_probing, "find_budget", None)
    trainer.train()
    assert trainer.found_budget == found
    assert trainer.state.global_step > 1


def test_a_model_in_evaluation_mode_with_frozen_parts_is_trained(tmp_path):
    model = make_model("t5", dropout=0.1)
    model.encoder.requires_grad_(False)
    model.eval()
    trainer, *_ = auto_trainer(tmp_path, model=model, max_steps=3)
    trainer.get_train_dataloader()
    assert not model.training
    trainer.train()
    assert trainer.state.global_step == 3


def test_a_model_without_trained_parameters_is_refused(tmp_path):
    model = make_model("t5").requires_grad_(False)
    with pytest.raises(ArgumentError, match="no parameter is trained"):
        auto_trainer(tmp_path, model=model)[0].train()


def test_evaluation_between_updates_does_not_change_the_training(tmp_path):
    def train(**options):
        # Without dropout: a loader of evaluation draws a seed, as in any trainer.
        trainer, *_ = auto_trainer(tmp_path, dropout=0.0, num_train_epochs=4, **options)
        trainer.train()
        return flat_parameters(trainer.model)

    between = {"eval_dataset": numbered(10), "eval_strategy": "steps", "eval_steps": 1}
    assert torch.equal(train(), train(**between))


@pytest.mark.parametrize("on_oom", ["split", "skip", "raise"])
def test_a_resume_with_less_memory_says_what_happens_to_batches_that_do_not_fit(on_oom, tmp_path, caplog):
    def make(total_bytes, folder, **options):
        model, memory = with_memory(total_bytes, dropout=0.0)
        monitor = MemoryMonitor(source=memory)
        return auto_trainer(tmp_path / folder, model=model, memory=monitor, num_train_epochs=2, **options)[0]

    make(12_000, "first", save_strategy="steps", save_steps=1).train()
    later = make(5_000, "later", on_oom=on_oom)
    ends = {"split": "run in pieces", "skip": "are left out", "raise": "fail"}
    later._finder.checkpoint = str(tmp_path / "first" / "checkpoint-1")
    with caplog.at_level(logging.WARNING, logger="batchwright"):
        later.get_train_dataloader()
    assert f"batches that do not fit {ends[on_oom]}" in caplog.text


@pytest.mark.parametrize("total_bytes", [5_000, 3_600])
def test_a_resume_with_less_memory_runs_batches_in_pieces_that_make_the_same_updates(total_bytes, tmp_path):
    """On the smaller device the first look at the loss has no room for two rows."""

    def train(total_bytes, folder, checkpoint=None, **options):
        model, memory = with_memory(total_bytes, dropout=0.0)
        monitor = MemoryMonitor(source=memory)
        trainer, *_ = auto_trainer(tmp_path / folder, model=model, memory=monitor, num_train_epochs=2, **options)
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    whole = train(12_000, "first", save_strategy="steps", save_steps=1)
    later = train(total_bytes, "later", str(tmp_path / "first" / "checkpoint-1"), logging_steps=1)
    assert later.state.global_step == whole.state.global_step
    assert later.state.log_history[-2]["ooms"] > 0
    torch.testing.assert_close(flat_parameters(later.model), flat_parameters(whole.model), rtol=1e-4, atol=1e-5)


# The learning rate


@pytest.mark.parametrize(("rule", "power"), [("sqrt", 0.5), ("linear", 1.0)])
def test_the_rate_follows_the_mean_size_of_the_plan_by_one_factor(rule, power, tmp_path, caplog):
    model, memory = with_memory(6_000)
    trainer, seen, _ = auto_trainer(
        tmp_path, model=model, memory=MemoryMonitor(source=memory), lr_rule=rule, base_size=2, logging_steps=1
    )
    trainer.get_train_dataloader()
    seen.clear()
    with caplog.at_level(logging.INFO, logger="batchwright"):
        trainer.train()
    mean = round(24 / len(seen))
    logs = [log for log in trainer.state.log_history if "lr_factor" in log]
    assert len({len(batch) for batch in seen}) > 1  # updates of several sizes
    assert [log["lr_factor"] for log in logs] == pytest.approx([(mean / 2) ** power] * len(seen))
    assert f"updates have {mean} examples on average, base_size is 2" in caplog.text
    assert np.isclose(logs[0]["learning_rate"], 1e-2, rtol=0.2)  # the schedule's own


def test_without_a_rule_the_rate_stays_and_the_log_says_how_to_scale_it(tmp_path, caplog):
    trainer, *_ = auto_trainer(tmp_path)
    with caplog.at_level(logging.INFO, logger="batchwright"):
        trainer.train()
    assert "the learning rate stays as it is; lr_rule='sqrt' with base_size" in caplog.text
    assert not any("lr_factor" in log for log in trainer.state.log_history)


@pytest.mark.parametrize(
    ("options", "is_said"), [({}, True), ({"num_train_epochs": 20}, False), ({"max_steps": 2}, False)]
)
def test_a_training_of_few_updates_is_warned_about_with_what_to_write(options, is_said, tmp_path, caplog):
    trainer, *_ = auto_trainer(tmp_path, per_device_train_batch_size=4, **options)
    with caplog.at_level(logging.WARNING, logger="batchwright"):
        trainer.train()
    num, warned = (
        trainer.state.global_step,
        "give a budget such as MaxItems(4), or train for more epochs" in caplog.text,
    )
    assert warned == is_said
    assert f"makes only {num} updates" in caplog.text or not is_said
