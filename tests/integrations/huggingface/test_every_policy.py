"""Every kind of policy drives ``adaptive(Trainer)`` once, on examples that are all alike, so that sizes are known."""

import pytest

import batchwright as bw
from batchwright import size
from batchwright.integrations.huggingface._updates import TrainingFigures
from batchwright.step import MemoryMonitor
from batchwright.testing import FakeMemory

from .trainers import make_examples, make_trainer, numbered

STEP = {"per": "step"}


def halving(step):
    return 0.5 ** (step // 2)


SPEED = size.speed_driven(every=1, **STEP)
CURRICULUM = size.Curriculum(range(96), start_fraction=0.25, full_at=1)

# name: the policy, options of the trainer, and the size after each of six updates; the first batch has 4 examples.
CASES = {
    "constant": (size.constant(4), {}, [4, 4, 4, 4, 4, 4]),
    "linear": (size.linear(4, 2, **STEP), {}, [6, 8, 10, 12, 14, 16]),
    "exponential": (size.exponential(4, 2, **STEP), {}, [8, 16, 16, 16, 16, 16]),
    "warm_up": (size.warm_up(4, 12, 4, **STEP), {}, [6, 8, 10, 12, 12, 12]),
    "milestones": (size.milestones({0: 4, 2: 8}, **STEP), {}, [4, 8, 8, 8, 8, 8]),
    "cyclic": (size.cyclic(size.linear(4, 4, **STEP), 3, **STEP), {}, [8, 12, 4, 8, 12, 4]),
    "from_lr": (size.from_lr(halving, start=4, **STEP), {}, [4, 8, 8, 16, 16, 16]),
    "seesaw": (size.seesaw(halving, start=4, **STEP)[0], {}, [4, 8, 8, 16, 16, 16]),
    "switch": (size.switch({0: size.constant(4), 3: size.constant(9)}, **STEP), {}, [4, 4, 9, 9, 9, 9]),
    "maximum": (size.maximum(size.constant(7), size.linear(4, 2, **STEP)), {}, [7, 8, 10, 12, 14, 16]),
    "minimum": (size.minimum(size.constant(9), size.linear(4, 2, **STEP)), {}, [6, 8, 9, 9, 9, 9]),
    "chain": (size.chain(size.exponential(4, 4, **STEP), size.rate_limit(1.5)), {}, [6, 9, 14, 16, 16, 16]),
    "track": (size.track(lambda o: 4 + 2 * o.step), {}, [6, 8, 10, 12, 14, 16]),
    "curriculum": (CURRICULUM.policy(4), {"curriculum": CURRICULUM}, [4, 4, 4, 4, 4, 16]),
    # The loss falls with every update.
    "loss_driven": (size.loss_driven(**STEP), {}, [4, 8, 16, 16, 16, 16]),
    "loss_driven-ema": (size.loss_driven("ema", **STEP), {}, [4, 8, 16, 16, 16, 16]),
    "loss_below": (size.loss_below(100.0, **STEP), {}, [8, 16, 16, 16, 16, 16]),
    "loss_below-never": (size.loss_below(0.1, **STEP), {}, [4, 4, 4, 4, 4, 4]),
    "loss_settled": (size.loss_settled(**STEP), {"learning_rate": 0.0}, [4, 4, 8, 8, 8, 16]),
    "loss_driven-variance": (
        size.loss_driven("variance", window=3, **STEP),
        {"learning_rate": 0.0},
        [4, 4, 8, 16, 16, 16],
    ),
    # An untrained model has an entropy of log 23, and learns little in six updates.
    "entropy_driven": (
        size.entropy_driven(23, mode="threshold", low=0.99, high=0.995, reference=100.0, **STEP),
        {},
        [8, 16, 16, 16, 16, 16],
    ),
    # Examples that are all alike have no noise.
    "noise_driven-ratio": (size.noise_driven(estimator="ratio", **STEP), {"measure_noise": True}, [2, 1, 2, 1, 2, 1]),
    "memory_driven": (size.memory_driven(**STEP), {"memory": 0.3}, [8, 16, 16, 16, 16, 16]),
    "memory_driven-full": (size.memory_driven(**STEP), {"memory": 0.9}, [2, 1, 1, 1, 1, 1]),
    # An update takes 50 ms per example: 8 examples take 400 ms, and more are no faster.
    "step_time": (size.step_time(400, every=1), {}, [4, 8, 8, 8, 8, 8]),
    "speed_driven": (SPEED, {}, [4, 4, 8, 8, 16, 16]),
    "memory-and-speed": (size.minimum(size.memory_driven(**STEP), SPEED), {"memory": 0.3}, [4, 4, 8, 8, 16, 16]),
    "full-and-speed": (size.minimum(size.memory_driven(**STEP), SPEED), {"memory": 0.9}, [2, 1, 1, 1, 1, 1]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_policy_drives_the_trainer(name, tmp_path, monkeypatch):
    policy, options, expected = CASES[name]
    monkeypatch.setattr(TrainingFigures, "seconds", property(lambda self: 0.05 * self.batch_size))
    if "memory" in options:
        memory = FakeMemory(1000, used_bytes=round(1000 * options["memory"]))
        options = {**options, "memory": MemoryMonitor(source=memory)}
    alike = [{**make_examples(1, causal=False)[0], "number": place} for place in range(96)]
    controller = bw.BatchSizeController(policy, min_size=1, max_size=16, initial=4)
    settings = {"controller": controller, "examples": alike, "max_steps": 6, "learning_rate": 0.1, **options}
    trainer, *_ = make_trainer("t5", tmp_path, **{**settings, "budget": bw.MaxItems(8)})
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    found = [entry["batch_size_wanted"] for entry in logs]
    assert found == expected
    assert [entry["batch_size"] for entry in logs] == [4, *expected[:-1]]
    assert all(decision.reason for decision in controller.history)


class Seconds:
    """A model of time in which an update takes a second, whatever its size."""

    def predict(self, shapes):
        return [1.0] * len(shapes)


@pytest.mark.parametrize("name", ["noise_driven", "goodput"])
def test_a_policy_follows_the_noise_that_the_trainer_measures_and_logs(name, tmp_path):
    policy = size.noise_driven(4) if name == "noise_driven" else size.goodput(Seconds(), length=8, base_size=8)
    controller = bw.BatchSizeController(policy, min_size=2, max_size=64, initial=8)
    options = {"controller": controller, "measure_noise": True, "max_steps": 16, "budget": bw.MaxItems(8)}
    similar = [{**example, "labels": [7] * len(example["labels"])} for example in numbered(96)]
    trainer, *_ = make_trainer("t5", tmp_path, examples=similar, **options)
    trainer.train()
    first = controller.history[0]
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    scale = logs[first.step - 1]["noise_scale"]
    # Time that does not depend on the size makes the largest batch the best one.
    assert first.new == (round(4 * scale) if name == "noise_driven" else 64)
