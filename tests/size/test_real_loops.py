"""Every policy that reads training, in a real loop: a model, a Stepper and a sampler that forms batches of its size."""

import itertools
import json

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

import batchwright as bw  # noqa: E402
from batchwright import size  # noqa: E402
from batchwright.step import Stepper, entropy_sum  # noqa: E402

NUM, NUM_EPOCHS, NUM_PARTS = 192, 8, 4


def loss_fn(model, batch):
    x, y = batch
    logits = model(x)
    return nn.functional.cross_entropy(logits, y, reduction="sum"), len(x), {"entropy": entropy_sum(logits)}


class Run:
    """A small training run: what is measured comes from the run itself, seconds and memory from a made-up device."""

    def __init__(self, policy, *, max_size=96, noisy=True):
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(NUM, 6, generator=generator)
        self.data = TensorDataset(x, (x[:, 0] + 0.3 * torch.randn(NUM, generator=generator) > 0).long())
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.2)
        self.stepper = Stepper(self.model, optimizer, loss_fn, measure_noise=True, noise_parts=NUM_PARTS)
        self.controller = bw.BatchSizeController(policy, min_size=8, max_size=max_size, initial=16)
        self.sampler = bw.ResizableBatchSampler(NUM, self.controller, seed=1)
        self.swing = itertools.cycle([1.2, 0.8, 1.1, 0.9] if noisy else [1.0])
        self.sizes, self.losses, self.epoch = [], [], 0

    def figures(self, report):
        """Return a report's figures on a device of 20 ms and 1 ms per example, ± 20 %, and memory for 128 examples."""
        ran = report.batch_size
        seconds = (0.02 + 0.001 * ran) * next(self.swing)
        return {**report.observation(), "seconds": seconds, "memory_fraction": ran / 128}

    def train(self, num_epochs=NUM_EPOCHS):
        for _ in range(num_epochs):
            seen = 0
            for batch in DataLoader(self.data, batch_sampler=self.sampler):
                report = self.stepper.step(batch)
                seen += len(batch[0])
                self.losses.append(report.loss)
                self.controller.observe(epoch=self.epoch, **self.figures(report))
                self.sizes.append(self.controller.size)
            self.epoch += 1
            assert seen == NUM
            self.controller.observe(epoch=self.epoch)
            self.sizes.append(self.controller.size)
        return self


EPOCH_POLICIES = {
    "loss difference": size.loss_driven(per="epoch"),
    "loss gain": size.loss_driven(gain=1, per="epoch"),
    "loss ema": size.loss_driven("ema", alpha=0.5, per="epoch"),
    "loss variance": size.loss_driven("variance", window=3, steady=0.01, fluctuating=0.1, per="epoch"),
    "variance with gain": size.loss_driven("variance", window=2, gain=20, fluctuating=1.0, per="epoch"),
    "variance with gain, linear": size.loss_driven("variance", window=2, gain=500, mode="linear", fluctuating=1.0),
    "loss below": size.loss_below(0.5, per="epoch"),
    "loss settled": size.loss_settled(tolerance=0.1, window=2, per="epoch"),
    "entropy": size.entropy_driven(2, smallest=8, largest=64, per="epoch"),
    "entropy threshold": size.entropy_driven(2, mode="threshold", low=0.7, high=0.95, per="epoch"),
    "noise": size.noise_driven(0.5, per="epoch"),
    "noise ratio of four": size.noise_driven(estimator="ratio", high=0.5, num_parts=NUM_PARTS, per="epoch"),
    "memory": size.memory_driven(per="epoch"),
    "speed": size.speed_driven(per="epoch"),
    "memory and speed": size.minimum(size.memory_driven(per="epoch"), size.speed_driven(per="epoch")),
    "step time": size.step_time(60, per="epoch"),
}
STEP_POLICIES = {
    "loss difference": size.loss_driven(gain=0.2, per="step"),
    "loss ema": size.loss_driven("ema", mode="linear", up=1, down=1, per="step"),
    "variance with gain": size.loss_driven("variance", window=4, gain=2, fluctuating=1.0, per="step"),
    "loss below": size.loss_below(0.5, up=1.1, per="step"),
    "loss settled": size.loss_settled(tolerance=0.1, window=3, up=1.2, per="step"),
    "entropy": size.entropy_driven(2, smallest=8, largest=64, per="step"),
    "noise ratio of four": size.noise_driven(estimator="ratio", high=0.8, up=1.1, num_parts=NUM_PARTS, per="step"),
    "speed": size.speed_driven(per="step", every=8),
    "step time": size.step_time(60, per="step", every=8),
}


@pytest.mark.parametrize("name", EPOCH_POLICIES)
def test_per_epoch_the_size_changes_between_epochs_only_and_training_learns(name):
    run = Run(EPOCH_POLICIES[name]).train()
    assert run.controller.history, "the policy has moved"
    assert all(decision.reason for decision in run.controller.history)
    assert all(decision.examples % NUM == 0 for decision in run.controller.history)
    assert all(8 <= found <= 96 for found in run.sizes)
    assert sum(run.losses[-4:]) / 4 < run.losses[0]


@pytest.mark.parametrize("name", STEP_POLICIES)
def test_per_step_the_size_changes_within_an_epoch_and_training_learns(name):
    run = Run(STEP_POLICIES[name]).train()
    assert any(decision.examples % NUM for decision in run.controller.history)
    assert all(decision.reason for decision in run.controller.history)
    assert all(8 <= found <= 96 for found in run.sizes)
    assert sum(run.losses[-4:]) / 4 < run.losses[0]


@pytest.mark.parametrize(
    "policy",
    [*EPOCH_POLICIES.values(), *STEP_POLICIES.values()],
    ids=[*EPOCH_POLICIES, *map("{} per step".format, STEP_POLICIES)],
)
def test_a_run_that_was_saved_after_two_epochs_goes_on_with_the_same_sizes(policy):
    whole, first = Run(policy).train(4), Run(policy).train(2)
    second = Run(policy)
    states = json.loads(json.dumps([part.state_dict() for part in (first.controller, first.stepper, first.sampler)]))
    for part, state in zip((second.controller, second.stepper, second.sampler), states, strict=True):
        part.load_state_dict(state)
    second.model.load_state_dict(first.model.state_dict())
    second.swing, second.epoch = first.swing, first.epoch
    second.train(2)
    assert first.sizes + second.sizes == whole.sizes
    assert second.losses == whole.losses[len(first.losses) :]


def test_memory_low_and_a_plateau_of_speed_grow_the_batch_until_memory_holds_it():
    run = Run(EPOCH_POLICIES["memory and speed"], noisy=False).train(12)
    # 64 examples fill half of the memory, which is above low.
    assert run.controller.size == 64
    assert "examples per second" in run.controller.history[-1].reason or "memory" in run.controller.history[-1].reason


def test_step_time_holds_the_updates_of_a_run_at_its_target():
    run = Run(size.step_time(60, every=8)).train(12)
    seconds_ms = 20 + run.controller.size  # 20 ms and 1 ms per example
    assert 0.8 * 60 <= seconds_ms <= 1.2 * 60
