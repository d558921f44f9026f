"""What policies read in an adaptive trainer: losses, entropy, memory, the examples of a curriculum; live lines."""

import logging
import math
import re

import numpy as np
import pytest
import torch
from transformers import Trainer

import batchwright as bw
from batchwright import size
from batchwright.errors import ArgumentError, MissingSignalError, StateMismatchError
from batchwright.integrations.huggingface import BatchSizeCallback
from batchwright.step import MemoryMonitor
from batchwright.step.huggingface import huggingface_loss
from batchwright.step.memory.sources import CpuMemory
from batchwright.testing import FakeMemory

from ..dynabatch.failing import fail_above
from ..dynabatch.trainer.training import make_args
from .test_data import run
from .trainers import (
    by_update,
    collate,
    counts_after_shift,
    exact,
    flat,
    flat_parameters,
    make_controller,
    make_model,
    make_trainer,
    mean_entropy,
    numbered,
    watching,
)

# Losses.


def test_updates_that_ran_out_of_memory_do_not_look_like_a_loss_of_zero(tmp_path):
    model = make_model("t5")
    fail_above(model, 2, "backward")
    controller = bw.BatchSizeController(size.loss_below(1.0, per="step"), min_size=3, max_size=24)
    options = {"controller": controller, "on_oom": "skip", "budget": bw.MaxItems(3), "model": model}
    make_trainer("t5", tmp_path, **options)[0].train()
    assert controller.history == ()
    assert controller.explain() == "loss is nan and left out of the step: holds 3"


@pytest.mark.parametrize("name", ["t5", "llama"])
def test_the_loss_of_an_update_is_the_mean_over_what_ran(name, tmp_path):
    model, observed = make_model(name), []
    fail_above(model, 2, "backward")
    options = {"controller": watching(observed, [5], needs=("loss",)), "on_oom": "skip", "budget": bw.MaxItems(3)}
    trainer, seen, _ = make_trainer(name, tmp_path, model=model, learning_rate=0.0, **options)
    trainer.train()
    # Updates of 5, 5, 5, 5 and 4 examples; the micro-batch of 3, if there is one, is left out.
    assert [len(part) for part in seen[:4]] == [3, 2, 3, 2]
    expected = [exact(name, part)[1] for part in seen[1:8:2]]
    assert [o.loss for o in by_update(observed)[:4]] == pytest.approx(expected, rel=1e-6)


def test_a_policy_that_takes_over_in_a_trainer_waits_for_an_epoch_of_its_own(tmp_path):
    policy = size.switch({0: size.constant(4), 1: size.loss_below(99.0)})
    controller = bw.BatchSizeController(policy, min_size=2, max_size=24)
    make_trainer("t5", tmp_path, controller=controller, num_train_epochs=2)[0].train()
    assert [decision.epoch for decision in controller.history] == [2]


# Entropy.


@pytest.mark.parametrize("fails", [False, True], ids=["whole", "out-of-memory"])
@pytest.mark.parametrize("budget", [80, 400])
@pytest.mark.parametrize("name", ["t5", "llama"])
def test_entropy_is_the_mean_over_the_labels_of_an_update_whatever_its_micro_batches(name, budget, fails, tmp_path):
    model, observed = make_model(name), []
    if fails:
        fail_above(model, 2, "backward")  # pieces that ran before a failure must not count twice
    controller = watching(observed, [3, 7, 10])
    options = {"controller": controller, "budget": bw.MaxTokens(budget), "model": model}
    trainer, seen, _ = make_trainer(name, tmp_path, **options)
    trainer.train()
    numbers = iter(flat(seen))
    updates = [[next(numbers) for _ in range(o.batch_size)] for o in by_update(observed)]
    assert [len(update) for update in updates] == [3, 7, 10, 4]
    expected = [mean_entropy(name, update) for update in updates]
    assert [o.entropy for o in by_update(observed)] == pytest.approx(expected, rel=1e-6)
    logged = [entry["entropy"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(expected, rel=1e-6)


def test_entropy_needs_no_second_forward_pass_and_changes_no_bit(tmp_path):
    results = []
    for measure in (False, True):
        model, calls = make_model("llama", dropout=0.2), []
        model.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        options = {"controller": make_controller(8), "measure_entropy": measure, "learning_rate": 0.1}
        trainer, *_ = make_trainer("llama", tmp_path, model=model, **options)
        trainer.train()
        results.append((len(calls), flat_parameters(trainer.model)))
        assert ("entropy" in trainer.state.log_history[0]) == measure
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


def test_masked_labels_are_left_out_and_a_batch_without_labels_holds_the_size(tmp_path):
    observed = []
    masked = [
        {**example, "labels": [-100 if place < 2 else label for place, label in enumerate(example["labels"])]}
        for example in numbered(causal=True)
    ]
    for example in masked[8:16]:
        example["labels"] = [-100] * len(example["labels"])
    options = {"train_sampling_strategy": "sequential", "lengths": [1] * 24, "budget": bw.MaxItems(8)}
    controller = watching(observed, [8])
    make_trainer("llama", tmp_path, examples=masked, controller=controller, **options)[0].train()
    model, sums = make_model("llama"), []
    for example in masked[:8]:
        logits = model(**collate([example])).logits.detach()[0]
        p = logits.softmax(dim=-1)
        sums.append(-(p * p.log()).sum(dim=-1)[1:-1])  # the token before a label predicts it
    first, second, third = by_update(observed)
    assert first.entropy == pytest.approx(float(torch.cat(sums).mean()), rel=1e-6)
    assert math.isnan(second.entropy)
    assert math.isfinite(third.entropy)


def test_an_entropy_driven_policy_grows_the_batch_of_a_trainer(tmp_path):
    policy = size.entropy_driven(23, smallest=2, largest=22, reference=6.0, per="step")
    controller = bw.BatchSizeController(policy, min_size=2, max_size=22)
    trainer, seen, _ = make_trainer("llama", tmp_path, controller=controller, max_steps=2)
    trainer.train()
    h = mean_entropy("llama", flat(seen)[:2]) / 6.0
    assert h == pytest.approx(0.52, abs=0.01)  # an untrained model knows nothing: log 23 = 3.14
    (decision,) = controller.history
    assert decision.new == round(2 * 11 ** (1 - h)) == 6
    assert f"h = {h:.4g}" in decision.reason


class Output(torch.nn.Module):
    """A model that returns what a test wants."""

    def __init__(self, make):
        super().__init__()
        self.layer = torch.nn.Linear(2, 3)
        self.make = make

    def forward(self, x, labels=None):
        logits = self.layer(x)
        loss = torch.nn.functional.cross_entropy(logits, labels) if not labels.is_floating_point() else logits.mean()
        return self.make(loss, logits)


@pytest.mark.parametrize(
    ("make", "floats", "message"),
    [
        (lambda loss, logits: {"loss": loss}, False, "but the model returns only loss; let it return 'logits'"),
        (lambda loss, logits: (loss,), False, "but the model returns a tuple without them"),
        (lambda loss, logits: {"loss": loss, "logits": logits[:, :1]}, False, r"logits of shape \(4, 1\)"),
        (lambda loss, logits: {"loss": loss, "logits": logits[:2]}, False, r"labels are \(4,\) and logits \(2, 3\)"),
        (lambda loss, logits: {"loss": loss, "logits": logits}, True, "needs labels that are classes, got floats"),
    ],
    ids=["no-logits", "tuple", "one-class", "too-few", "floats"],
)
def test_outputs_without_an_entropy_are_refused_in_words(make, floats, message, tmp_path):
    labels = [0.5, 1.5, 2.5, 3.5] if floats else [0, 1, 2, 1]
    examples = [{"x": torch.tensor([1.0, place]), "labels": label} for place, label in enumerate(labels)]

    def stack(chosen):
        return {"x": torch.stack([e["x"] for e in chosen]), "labels": torch.tensor([e["labels"] for e in chosen])}

    options = {"controller": make_controller(4), "budget": bw.MaxItems(4), "data_collator": stack, "lengths": [1] * 4}
    options |= {"model": Output(make), "examples": examples, "weighting": "examples"}
    trainer, *_ = make_trainer("t5", tmp_path, measure_entropy=True, **options)
    with pytest.raises(ArgumentError, match=message):
        trainer.train()


def test_the_loss_of_a_stepper_says_the_same_about_missing_logits():
    batch = {"x": torch.randn(4, 2), "labels": torch.tensor([0, 1, 2, 1])}
    with pytest.raises(ArgumentError, match="the model returns only loss; let it return 'logits'"):
        huggingface_loss(with_entropy=True)(Output(lambda loss, logits: {"loss": loss}), batch)


def test_a_policy_of_ones_own_is_told_how_a_trainer_measures(tmp_path):
    for name, where in (("entropy", "measure_entropy=True"), ("noise_s", "measure_noise=True")):
        controller = bw.BatchSizeController(size.track(lambda o, name=name: o.need(name)), min_size=4, max_size=4)
        with pytest.raises(MissingSignalError, match=f"here, pass {where} to the trainer"):
            make_trainer("t5", tmp_path, controller=controller)[0].train()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"measure_entropy": True}, "measure_entropy needs a controller"),
        ({"history": True}, "history needs a controller"),
        ({"curriculum": size.Curriculum(range(24), start_fraction=0.5, full_at=2)}, "curriculum needs a controller"),
        ({"controller": make_controller(4), "history": 3}, "history must be True, False or a function that takes"),
        ({"controller": make_controller(4), "measure_entropy": "yes"}, "measure_entropy must be True or False"),
    ],
    ids=["entropy", "history", "curriculum", "history-3", "entropy-yes"],
)
def test_options_that_do_nothing_are_refused(options, message, tmp_path):
    with pytest.raises(ArgumentError, match=message):
        make_trainer("t5", tmp_path, **options)


# A curriculum chooses the examples.


def make_curriculum(num=24):
    difficulty = np.random.default_rng(1).permutation(num)
    return difficulty, size.Curriculum(difficulty, start_fraction=0.25, full_at=3)


def test_a_curriculum_trains_on_the_easiest_examples_and_the_prefix_grows(tmp_path):
    difficulty, curriculum = make_curriculum()
    controller = bw.BatchSizeController(curriculum.policy(2), min_size=2, max_size=8)
    options = {"controller": controller, "curriculum": curriculum, "num_train_epochs": 4}
    trainer, seen, gradients = make_trainer("t5", tmp_path, **options)
    trainer.train()
    numbers = flat(seen)
    for num in (6, 12, 18, 24):  # a quarter, a half, three quarters, all
        epoch, numbers = numbers[:num], numbers[num:]
        assert sorted(difficulty[epoch]) == list(range(num))
    assert numbers == []
    assert len(gradients.seen) == 3 + 3 + 3 + 3  # batches of 2, 4, 6 and 8
    assert trainer.state.epoch == 4
    assert trainer.state.max_steps == trainer.state.global_step == 12


def test_part_of_an_epoch_of_a_curriculum_can_be_asked_for(tmp_path):
    _, curriculum = make_curriculum()
    options = {"controller": make_controller(3), "curriculum": curriculum, "num_train_epochs": 2.5}
    trainer, seen, _ = make_trainer("t5", tmp_path, **options)
    trainer.train()
    assert len(flat(seen)) == 6 + 12 + 9  # half of the third epoch's 18
    assert trainer.state.global_step == 9


@pytest.mark.parametrize("stop", [2, 3, 5])
def test_a_curriculum_resumes_with_the_very_next_batch(stop, tmp_path):
    def options():
        _, curriculum = make_curriculum()
        controller = bw.BatchSizeController(curriculum.policy(2), min_size=2, max_size=8)
        fixed = {"learning_rate": 0.05, "lr_scheduler_type": "constant", "num_train_epochs": 3}
        return {**fixed, "controller": controller, "curriculum": curriculum}

    straight, whole = run(tmp_path / "whole", options())
    part = {"max_steps": stop, "save_strategy": "steps", "save_steps": stop}
    _, before = run(tmp_path / "part", {**options(), **part})
    resumed, after = run(tmp_path / "part", options(), checkpoint=f"checkpoint-{stop}")
    assert before + after == whole
    assert torch.equal(flat_parameters(resumed.model), flat_parameters(straight.model))


def test_another_curriculum_does_not_resume(tmp_path):
    _, curriculum = make_curriculum()
    part = {"controller": make_controller(3), "max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    make_trainer("t5", tmp_path, curriculum=curriculum, **part)[0].train()
    other = size.Curriculum(range(24), start_fraction=0.25, full_at=3)
    trainer, *_ = make_trainer("t5", tmp_path, curriculum=other, **{**part, "max_steps": 3})
    with pytest.raises(StateMismatchError, match="curriculum"):
        trainer.train(resume_from_checkpoint=True)


def test_a_curriculum_of_other_data_is_refused(tmp_path):
    _, curriculum = make_curriculum(20)
    with pytest.raises(ArgumentError, match="the curriculum has 20 examples but num_examples is 24"):
        make_trainer("t5", tmp_path, controller=make_controller(4), curriculum=curriculum)[0].train()


# Memory without an argument.


def test_a_policy_that_follows_memory_finds_the_memory_of_the_process_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setattr(CpuMemory, "total_bytes", property(lambda self: 1 << 50))  # next to nothing is in use
    policy = size.chain(size.memory_driven(), size.multiple_of(2))
    controller = bw.BatchSizeController(policy, min_size=2, max_size=16, initial=4)
    make_trainer("t5", tmp_path, controller=controller)[0].train()
    assert [decision.new for decision in controller.history[:2]] == [8, 16]
    assert "memory 0.0 % full" in controller.history[0].reason


def test_a_monitor_that_is_given_is_the_one_that_is_read(tmp_path):
    controller = bw.BatchSizeController(size.memory_driven(), min_size=2, max_size=16, initial=8)
    memory = MemoryMonitor(source=FakeMemory(1000, used_bytes=900))
    make_trainer("t5", tmp_path, controller=controller, memory=memory)[0].train()
    assert [decision.new for decision in controller.history] == [4, 2]


# Live lines.


def test_history_prints_and_logs_a_line_per_decision(tmp_path, capsys):
    trainer, *_ = make_trainer("t5", tmp_path, controller=make_controller(3, 7, 7, 10), history=True)
    trainer.train()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Batch size:")]
    assert [re.sub(r", tokens \d+", "", line) for line in lines] == [
        "Batch size: epoch 0, step 1, examples 3: 3 -> 7 (milestones: 7 from milestone 1, at step 1)",
        "Batch size: epoch 0, step 3, examples 17: 7 -> 10 (milestones: 10 from milestone 3, at step 3)",
    ]
    logged = [entry for entry in trainer.state.log_history if "batch_size_new" in entry]
    figures = [(e["step"], e["examples"], e["batch_size_old"], e["batch_size_new"]) for e in logged]
    assert figures == [(1, 3, 3, 7), (3, 17, 7, 10)]
    assert logged[1]["batch_size_reason"] == "milestones: 10 from milestone 3, at step 3"


def test_a_function_gets_the_lines_and_without_history_nothing_is_printed(tmp_path, capsys, caplog):
    lines = []
    make_trainer("t5", tmp_path, controller=make_controller(3, 7), history=lines.append)[0].train()
    assert [line.split(": ")[2] for line in lines] == ["3 -> 7 (milestones"]
    with caplog.at_level(logging.INFO, logger="batchwright"):
        make_trainer("t5", tmp_path, controller=make_controller(3, 7))[0].train()
    assert "Batch size:" not in capsys.readouterr().out
    assert "3 -> 7" in caplog.text  # as before, for those who read this logger


def test_the_callback_of_a_plain_trainer_prints_lines_too(tmp_path, capsys):
    callback = BatchSizeCallback(make_controller(3, 7), batch_size=8, history=True)
    args = make_args(tmp_path, per_device_train_batch_size=8)
    Trainer(make_model("t5"), args, collate, numbered(), callbacks=[callback]).train()
    assert "Batch size: epoch 0, step 1, examples 8: 3 -> 7 (milestones" in capsys.readouterr().out


# A policy that never changes the size.


def still(policy):
    return bw.BatchSizeController(policy, min_size=8, max_size=8)


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"controller": still(size.constant(8))},
        lambda: {"controller": still(size.loss_driven(per="step")), "history": print},
        lambda: {"controller": still(size.entropy_driven(23, smallest=2, largest=64, per="step"))},
        lambda: {"controller": still(size.memory_driven())},
        lambda: {
            "controller": still(size.constant(8)),
            "curriculum": size.Curriculum(range(24), start_fraction=1, full_at=1),
        },
    ],
    ids=["constant", "loss", "entropy", "memory", "curriculum"],
)
def test_training_with_a_policy_that_never_moves_is_training_without_one_to_the_bit(make, tmp_path):
    found = trained(tmp_path, dropout=0.1, **make())
    assert torch.equal(found, trained(tmp_path, dropout=0.1, grouping=bw.InOrder()))


@counts_after_shift
@pytest.mark.parametrize("measure_entropy", [False, True])
def test_a_size_that_stays_trains_as_the_trainer_itself_does_to_the_bit(measure_entropy, tmp_path):
    found = trained(tmp_path, controller=still(size.constant(8)), measure_entropy=measure_entropy)
    model, args = make_model("llama"), make_args(tmp_path, per_device_train_batch_size=8, **SAME)
    Trainer(model, args, collate, numbered(causal=True)).train()
    assert torch.equal(found, flat_parameters(model))


SAME = {"learning_rate": 0.1, "train_sampling_strategy": "sequential", "num_train_epochs": 2, "optim": "adamw_torch"}


def trained(folder, *, dropout=0.0, **options):
    """Return the weights after two epochs of three batches in the order of the data."""
    options |= {"model": make_model("llama", dropout=dropout), "lengths": [1] * 24, "budget": bw.MaxItems(8)}
    trainer, *_ = make_trainer("llama", folder, **options, **SAME)
    trainer.train()
    return flat_parameters(trainer.model)
