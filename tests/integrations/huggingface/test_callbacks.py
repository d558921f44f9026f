"""What happens around the optimizer's step and after an update; the callback for a plain ``Trainer``."""

import math
from functools import partial

import pytest
import torch
from transformers import Trainer, TrainerCallback

import batchwright as bw
from batchwright import size
from batchwright.integrations.huggingface import BatchSizeCallback
from batchwright.size.noise import NoiseAverage
from batchwright.step import MemoryMonitor
from batchwright.testing import FakeMemory

from ..dynabatch.trainer.training import make_args
from .trainers import (
    collate,
    flat_parameters,
    make_controller,
    make_model,
    make_trainer,
    numbered,
    recording,
    relative_error,
)


@pytest.mark.parametrize(("rule", "factor"), [("none", 1.0), ("linear", 2.5), ("sqrt", math.sqrt(2.5))])
def test_the_rate_follows_the_batch_in_the_step_of_the_optimizer_alone(rule, factor, tmp_path):
    model = make_model("t5")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    # Such a schedule continues from the rate it finds: a factor left in it would be in all later rates.
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    options = {"optimizers": (optimizer, schedule), "max_steps": 2, "lr_rule": rule, "base_size": 4}
    trainer, _, gradients = make_trainer("t5", tmp_path, model=model, controller=make_controller(10), **options)
    before = flat_parameters(trainer.model)
    moved = []

    class Watch(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            moved.append(flat_parameters(trainer.model))

    trainer.add_callback(Watch())
    trainer.train()
    # SGD: 10 examples are 2.5 times 4. The schedule halves the rate after every update.
    assert relative_error(before - moved[0], 0.5 * factor * gradients.seen[0]) < 1e-12
    assert relative_error(moved[0] - moved[1], 0.25 * factor * gradients.seen[1]) < 1e-12
    assert [entry["learning_rate"] for entry in trainer.state.log_history[:2]] == [0.5, 0.25]
    if rule != "none":
        assert trainer.state.log_history[0]["lr_factor"] == pytest.approx(factor)


def test_an_error_in_the_step_of_the_optimizer_leaves_the_rate_as_it_was(tmp_path):
    options = {"learning_rate": 0.5, "lr_scheduler_type": "constant", "lr_rule": "linear", "base_size": 1}
    trainer, *_ = make_trainer("t5", tmp_path, **options)
    trainer.create_optimizer()
    trainer.optimizer.register_step_post_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert trainer.optimizer.param_groups[0]["lr"] == 0.5


def test_a_policy_sees_the_course_of_training(tmp_path):
    observed = []
    controller = bw.BatchSizeController(size.track(lambda o: observed.append(o) or 10), min_size=10, max_size=10)
    trainer, _, gradients = make_trainer(
        "t5", tmp_path, controller=controller, num_train_epochs=2, learning_rate=0.1, lr_scheduler_type="constant",
        lr_rule="linear", base_size=5,
    )  # fmt: skip
    trainer.train()
    counts = [(o.epoch, o.step, o.examples, o.batch_size) for o in observed]
    assert counts == [(0, 1, 10, 10), (0, 2, 20, 10), (1, 3, 24, 4), (1, 4, 34, 10), (1, 5, 44, 10), (2, 6, 48, 4)]
    tokens = sum(len(example["input_ids"]) + len(example["labels"]) for example in trainer.train_dataset)
    assert observed[-1].tokens == 2 * tokens
    assert observed[0].lr == pytest.approx(0.1 * 10 / 5)
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [o.loss for o in observed] == pytest.approx(logged, rel=1e-5)
    assert len(gradients.seen) == 6


def test_memory_is_read_for_policies_that_follow_it(tmp_path):
    observed, memory = [], FakeMemory(1000, used_bytes=200)

    def collate_in_memory(examples):
        memory.run_batch(len(examples), 50)
        return collate(examples)

    controller = bw.BatchSizeController(size.track(lambda o: observed.append(o) or 4), min_size=4, max_size=4)
    options = {"memory": MemoryMonitor(source=memory), "data_collator": collate_in_memory}
    make_trainer("t5", tmp_path, controller=controller, **options)[0].train()
    assert observed[0].memory_fraction == 0.2  # the batch was loaded before the update began
    assert observed[0].seconds > 0


def test_adascale_waits_for_a_reliable_average(tmp_path):
    options = {"controller": make_controller(8), "measure_noise": True, "lr_rule": "adascale", "base_size": 4}
    trainer, *_ = make_trainer("t5", tmp_path, **options)
    trainer.train()
    assert [entry["lr_factor"] for entry in trainer.state.log_history[:3]] == [1, 1, 1]
    average = NoiseAverage()
    for _ in range(10):
        average = average.update(40.0, 10.0, num_examples=8)
    trainer._batching.updates.noise.meter.average = average
    # (S / 4 + G2) / (S / 8 + G2) = (10 + 10) / (5 + 10)
    assert trainer._batching.callback.lr_factor() == pytest.approx(20 / 15)


def test_a_plain_trainer_can_drive_a_controller(tmp_path):
    observed = []
    policy = size.track(lambda o: observed.append((o.epoch, o.step, o.examples, o.loss, o.lr)) or 10 * o.step)
    controller = bw.BatchSizeController(policy, min_size=1, max_size=50)
    args = make_args(tmp_path, num_train_epochs=2, per_device_train_batch_size=8, learning_rate=0.1)
    callback = BatchSizeCallback(controller, batch_size=8)
    trainer = Trainer(make_model("t5"), args, collate, numbered(), callbacks=[callback])
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["batch_size_wanted"] for entry in logs] == [10, 20, 30, 40, 50, 50]
    observed = list(dict.fromkeys(observed))  # a policy is asked again for its reason
    assert [row[:3] for row in observed] == [(0, 1, 8), (0, 2, 16), (1, 3, 24), (1, 4, 32), (1, 5, 40), (2, 6, 48)]
    assert [row[3:] for row in observed] == [(entry["loss"], entry["learning_rate"]) for entry in logs]


def test_the_callback_continues_with_the_controller_of_a_checkpoint(tmp_path):
    args = {"per_device_train_batch_size": 8, "save_strategy": "steps", "save_steps": 2}

    def train(checkpoint, **options):
        controller = bw.BatchSizeController(size.loss_driven("ema", per="step"), min_size=4, max_size=64)
        settings = make_args(tmp_path, **{**args, "num_train_epochs": 2, "learning_rate": 0.1, **options})
        trainer = Trainer(make_model("t5"), settings, collate, numbered(), callbacks=[BatchSizeCallback(controller)])
        trainer.train(resume_from_checkpoint=checkpoint)
        return controller.state_dict()

    options = {"lr_scheduler_type": "constant"}
    straight = train(None, **options)
    train(None, max_steps=4, **options)
    assert train(str(tmp_path / "checkpoint-4"), restore_callback_states_from_checkpoint=True, **options) == straight


def test_the_callback_follows_a_loader_of_the_users_own(tmp_path):
    controller = make_controller(3, 6, 9)

    class Resizing(Trainer):
        def get_train_dataloader(self):
            sampler = bw.ResizableBatchSampler(24, controller)
            return torch.utils.data.DataLoader(self.train_dataset, batch_sampler=sampler, collate_fn=self.data_collator)

    seen, args = [], make_args(tmp_path, max_steps=3)
    Resizing(
        make_model("t5"), args, partial(recording, seen), numbered(), callbacks=[BatchSizeCallback(controller)]
    ).train()
    assert [len(batch) for batch in seen] == [3, 6, 9]
