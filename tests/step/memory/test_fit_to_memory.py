"""FitToMemory: the three ways to follow memory, run on a real model whose memory is made up."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from batchwright.errors import ArgumentError
from batchwright.step.memory.fit_to_memory import FORGET_AFTER, FitToMemory, MemoryRule
from batchwright.step.memory.monitor import MemoryMonitor
from batchwright.step.stepper import Stepper
from batchwright.testing import FakeMemory


class Training:
    """A small regression; its memory is 100 bytes of parameters and 10 per example, of 1000."""

    def __init__(self, *, fit):
        torch.manual_seed(0)
        self.x, self.y = torch.randn(64, 3), torch.randn(64, 1)
        self.model = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.memory = FakeMemory(1000, used_bytes=100, bytes_of=lambda num_items: 10 * num_items)
        self.monitor = MemoryMonitor(source=self.memory)
        self.fit = fit

    def loss_sum(self, model, batch):
        x, y = batch
        self.memory.run_batch(len(x))
        return (model(x) - y).square().sum(), len(x)

    def observe(self, **options):
        size = self.fit.observe(self.monitor.peak_fraction, **options)
        self.monitor.reset_peak()
        return size


def one_update_of_all(training):
    """The parameters after one update on all 64 examples at once."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 3), torch.randn(64, 1)
    model = nn.Linear(3, 1)
    model.load_state_dict(training.model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (model(x) - y).square().mean().backward()
    optimizer.step()
    return model.weight.detach()


def test_gradual_scaling_doubles_the_batch_while_memory_is_low_and_halves_it_when_it_is_high():
    training = Training(fit=FitToMemory(64, initial=4))

    def one_step():
        size = training.fit.size
        loss, num = training.loss_sum(training.model, (training.x[:size], training.y[:size]))
        training.optimizer.zero_grad()
        (loss / num).backward()
        training.optimizer.step()
        return training.observe()

    # 0.14, 0.18 and 0.26 of memory are low; at 32 it is 0.42, and 64 is predicted at 0.84.
    assert [one_step() for _ in range(5)] == [8, 16, 32, 32, 32]
    training.memory.used_bytes = 500  # another process comes: 32 examples now need 0.82
    assert [one_step() for _ in range(3)] == [16, 16, 16]


def test_micro_batching_follows_memory_and_leaves_the_update_alone():
    training = Training(fit=FitToMemory(64, initial=4))
    stepper = Stepper(training.model, training.optimizer, training.loss_sum, micro_batch=training.fit)
    counts = []
    for _ in range(5):
        expected = one_update_of_all(training)
        counts.append(stepper.step((training.x, training.y)).num_micro_batches)
        torch.testing.assert_close(training.model.weight.detach(), expected)
        training.observe()
    assert counts == [16, 8, 4, 2, 2]


def test_adaptive_accumulation_keeps_the_logical_batch():
    training = Training(fit=FitToMemory(64, initial=64))
    training.memory.used_bytes = 300
    num_steps = []
    for _ in range(3):
        expected = one_update_of_all(training)
        count = training.fit.num_micro_batches(64)
        training.optimizer.zero_grad()
        for x, y in zip(training.x.chunk(count), training.y.chunk(count), strict=True):
            loss, _ = training.loss_sum(training.model, (x, y))
            (loss / 64).backward()
        training.optimizer.step()
        num_steps.append(count)
        torch.testing.assert_close(training.model.weight.detach(), expected)
        training.observe(baseline=0.3)
    # 64 at once need 0.94, 32 then 0.62; with 0.3 for parameters that is no reason to change again.
    assert num_steps == [1, 2, 2]


def test_what_is_known_not_to_grow_allows_a_larger_size():
    rule = MemoryRule(max_size=64)
    assert rule.next_size(32, 0.42) == 32  # 0.84 if all of it doubles
    assert rule.next_size(32, 0.42, baseline=0.1) == 64  # 0.1 + 2 × 0.32 = 0.74


def test_a_batch_smaller_than_the_size_does_not_make_it_grow():
    fit = FitToMemory(256, initial=64)
    assert fit.observe(0.1, num_items=3) == 64  # 128 items predicted at 0.1 × 128 / 3 = 4.3
    assert fit.observe(0.1, num_items=50) == 128  # 0.1 × 128 / 50 = 0.26


def test_a_small_batch_that_fills_the_memory_shrinks_the_size_below_it():
    assert FitToMemory(256, initial=64).observe(0.9, num_items=10) == 5


def test_sizes_stay_within_their_bounds():
    fit = FitToMemory(12, min_size=3, initial=4)
    assert [fit.observe(0.1) for _ in range(3)] == [8, 12, 12]
    assert [fit.observe(0.95) for _ in range(3)] == [6, 3, 3]


def test_a_size_that_was_too_large_is_forgotten_in_the_end():
    fit = FitToMemory(64, initial=32)
    fit.observe(0.9)
    sizes = [fit.observe(0.3) for _ in range(FORGET_AFTER)]
    assert sizes[:-1] == [16] * (FORGET_AFTER - 1)
    assert sizes[-1] == 32


def test_at_the_smallest_size_growth_is_not_blocked_by_itself():
    fit = FitToMemory(64, min_size=8)
    assert [fit.observe(0.9), fit.observe(0.1)] == [8, 16]


def test_a_size_just_below_the_one_that_failed_is_not_tried():
    fit = FitToMemory(1000, initial=1000, factor=3.0)
    assert [fit.observe(0.9), fit.observe(0.2), fit.observe(0.2)] == [333, 333, 333]  # 999 would fail as 1000 did


def test_a_size_well_below_the_one_that_failed_is_tried():
    fit = FitToMemory(64, initial=5)
    assert [fit.observe(0.9), fit.observe(0.1), fit.observe(0.1)] == [2, 4, 4]


@given(
    constant=st.floats(0, 0.7),
    per_item=st.floats(1e-4, 0.5),
    power=st.sampled_from([1.0, 1.3, 2.0]),
    initial=st.integers(1, 1000),
    factor=st.sampled_from([2.0, 3.0]),
)
def test_sizes_never_swing(constant, per_item, power, initial, factor):
    """Memory linear in the items is never overrun by growing; memory that grows faster at most once."""
    fit = FitToMemory(1000, initial=initial, factor=factor)
    sizes = [initial] + [fit.observe(constant + per_item * fit.size**power) for _ in range(50)]
    changes = np.sign(np.diff(sizes))
    after_growing = changes[np.argmax(changes > 0) :] if (changes > 0).any() else changes[:0]
    assert (after_growing < 0).sum() <= (0 if power == 1 else 1)
    assert len(set(sizes[-20:])) == 1


@given(st.floats(0, 0.7), st.floats(1e-4, 0.5), st.floats(1, 2), st.integers(1, 1000), st.floats(1.1, 4))
def test_sizes_settle_whatever_the_factor(constant, per_item, power, initial, factor):
    fit = FitToMemory(1000, initial=initial, factor=factor)
    sizes = [fit.observe(constant + per_item * fit.size**power) for _ in range(200)]
    assert len(set(sizes[-50:])) == 1


def test_the_state_survives_json_and_continues():
    fit = FitToMemory(64, initial=32)
    fit.observe(0.9)
    fit.observe(0.3)
    state = json.loads(json.dumps(fit.state_dict()))
    other = FitToMemory(64)
    other.load_state_dict(state)
    assert [other.observe(0.3) for _ in range(FORGET_AFTER)] == [fit.observe(0.3) for _ in range(FORGET_AFTER)]
    narrow = FitToMemory(10)
    narrow.load_state_dict(state)
    assert narrow.size == 10  # 16 is beyond its limits
    with pytest.raises(ArgumentError, match="version 1, got 2"):
        fit.load_state_dict({**state, "version": 2})


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"max_size": 0}, "max_size must be a whole number of 1 or more, got 0"),
        ({"max_size": 4, "min_size": 8}, "max_size must be a whole number of 8 or more, got 4"),
        ({"max_size": 4, "initial": 8}, "initial must be from 1 to 4, got 8"),
        ({"max_size": 4, "low": 0.9}, "low <= high"),
        ({"max_size": 4, "factor": 1}, "factor must be a number above 1, got 1"),
    ],
)
def test_impossible_settings_are_refused(settings, complaint):
    with pytest.raises(ArgumentError, match=complaint):
        FitToMemory(**settings)


@pytest.mark.parametrize("fraction", [-0.1, math.nan, math.inf])
def test_a_fraction_that_is_not_a_share_is_refused(fraction):
    with pytest.raises(ArgumentError, match="fraction must be a number of 0 or more"):
        FitToMemory(4).observe(fraction)
