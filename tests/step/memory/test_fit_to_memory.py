"""FitToMemory and MicroLimit: the ways to follow memory, run on a real model whose memory is made up."""

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from batchwright.errors import ArgumentError
from batchwright.step.memory.fit_to_memory import CLEAN_STEPS, FORGET_AFTER, FitToMemory, MemoryRule, MicroLimit
from batchwright.step.memory.monitor import MemoryMonitor
from batchwright.step.splitting import TensorBatch, split
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

    def make_stepper(self, **options):
        options = {"memory": self.monitor, **options}
        return Stepper(self.model, self.optimizer, self.loss_sum, micro_batch=self.fit, **options)

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


# What a Stepper observes by itself.


def test_a_stepper_observes_every_batch_and_leaves_the_update_alone():
    """Before, nothing called ``observe``: the counts were 16, 16, 16, 16, 16."""
    training = Training(fit=FitToMemory(64, initial=4))
    stepper = training.make_stepper()
    counts = []
    for _ in range(6):
        expected = one_update_of_all(training)
        counts.append(stepper.step((training.x, training.y)).num_micro_batches)
        torch.testing.assert_close(training.model.weight.detach(), expected)
    # 0.14, 0.18, 0.26 and 0.42 of memory are low. 100 bytes are there before each batch and do not grow with it, so 64
    # examples are predicted at 0.1 + 2 × 0.32 = 0.74, which is what they take.
    assert counts == [16, 8, 4, 2, 1, 1]
    training.memory.used_bytes = 300  # another process comes: 64 examples now need 0.94, 32 need 0.62
    assert [stepper.step((training.x, training.y)).num_micro_batches for _ in range(3)] == [1, 2, 2]


def test_observing_a_step_that_the_stepper_has_observed_changes_nothing():
    training = Training(fit=FitToMemory(64, initial=4))
    stepper = training.make_stepper()
    sizes = []
    for _ in range(3):
        stepper.step((training.x, training.y))
        sizes.append(training.fit.observe(0.1, num_items=training.fit.size))
    assert sizes == [8, 16, 32]
    assert training.fit.observe(0.85) == 16  # one that no Stepper has seen counts


def test_batches_that_form_one_update_are_observed_one_by_one():
    training = Training(fit=FitToMemory(64, initial=4))
    stepper = training.make_stepper()
    for half in (slice(0, 32), slice(32, 64)):
        stepper.accumulate((training.x[half], training.y[half]))
    assert training.fit.size == 16
    assert stepper.update().num_micro_batches == 8 + 4


def test_running_out_of_memory_shrinks_the_size_once_and_its_peak_is_not_that_of_the_smaller_pieces():
    training = Training(fit=FitToMemory(64, initial=64))
    training.memory.used_bytes = 500  # room for 50
    report = training.make_stepper().step((training.x, training.y))
    assert (report.ooms, report.num_micro_batches) == (1, 2)
    # 32 examples took 0.82 of the memory and are too many for the rule; the full memory of the failure is not theirs.
    assert training.fit.size == 16
    assert report.memory_fraction == pytest.approx(0.82)


def test_a_size_that_ran_out_of_memory_is_not_tried_again_soon():
    training = Training(fit=FitToMemory(64, initial=64))
    training.memory.used_bytes = 400  # room for 60
    stepper = training.make_stepper()
    assert stepper.step((training.x, training.y)).ooms == 1
    training.memory.used_bytes = 0
    sizes = []
    for _ in range(FORGET_AFTER + 1):
        stepper.step((training.x, training.y))
        sizes.append(training.fit.size)
    # The step that failed has counted as well, after its smaller pieces fitted.
    assert sizes == [32] * (FORGET_AFTER - 2) + [64] * 3


def test_where_no_peak_can_be_read_only_failures_and_the_user_teach():
    training = Training(fit=FitToMemory(64, initial=64))
    training.memory.used_bytes = 500
    stepper = training.make_stepper(memory=None)
    assert stepper.step((training.x, training.y)).ooms == 1
    assert training.fit.observe(1.0) == 32, "the failure of that step has counted already"
    training.memory.used_bytes = 100
    stepper.step((training.x, training.y))
    assert training.fit.observe(0.85) == 16, "no Stepper has observed this step"


def test_the_size_is_saved_with_the_stepper_and_a_state_without_it_loads():
    training = Training(fit=FitToMemory(64, initial=4))
    stepper = training.make_stepper()
    stepper.step((training.x, training.y))
    state = json.loads(json.dumps(stepper.state_dict()))
    other = Training(fit=FitToMemory(64))
    other.make_stepper().load_state_dict(state)
    assert other.fit.state_dict() == training.fit.state_dict()
    other.make_stepper().load_state_dict({**state, "memory": None})  # as it was saved before Steppers observed
    other.make_stepper().load_state_dict({**state, "memory": {"version": 1, "ratio": 2.0, "num_observed": 3}})
    assert other.fit.size == 8


@pytest.mark.needs_cuda
def test_on_cuda_the_peak_is_read_without_a_monitor():
    training = Training(fit=FitToMemory(64, initial=4))
    training.model.to("cuda")
    stepper = training.make_stepper(memory=None)
    for _ in range(4):
        stepper.step((training.x.to("cuda"), training.y.to("cuda")))
    assert training.fit.size == 64


# Accumulation.


def test_accumulation_steps_double_above_nine_tenths_and_halve_below_seven():
    training = Training(fit=FitToMemory.accumulating(64, max_steps=4))
    stepper = training.make_stepper()
    counts = []
    for used in (100, 300, 300, 550, 600, 600):
        training.memory.used_bytes = used
        expected = one_update_of_all(training)
        counts.append(stepper.step((training.x, training.y)).num_micro_batches)
        torch.testing.assert_close(training.model.weight.detach(), expected)
    # Whole, the batch needs 0.74 and then 0.94 of the memory. Two steps need 0.62, then 0.87 and 0.92; four 0.76.
    assert counts == [1, 1, 2, 2, 2, 4]
    training.memory.used_bytes = 100
    counts = [stepper.step((training.x, training.y)).num_micro_batches for _ in range(FORGET_AFTER)]
    assert counts == [4] * (FORGET_AFTER - 1) + [2]  # four need 0.26 now, but two were too few not long ago


def test_accumulation_steps_stay_within_their_limit():
    fit = FitToMemory.accumulating(100, max_steps=6)
    steps = [fit.num_micro_batches(100)]
    for _ in range(4):
        fit.observe(0.95)
        steps.append(fit.num_micro_batches(100))
    assert steps == [1, 2, 4, 6, 6]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"batch_size": 0, "max_steps": 2}, "batch_size must be a whole number of 1 or more, got 0"),
        ({"batch_size": 4, "max_steps": 0.5}, "max_steps must be a whole number of 1 or more, got 0.5"),
    ],
)
def test_accumulation_that_cannot_be_is_refused(arguments, complaint):
    with pytest.raises(ArgumentError, match=complaint):
        FitToMemory.accumulating(**arguments)


# The limit of micro_batch="auto".


def follow_limit(capacity_at, num_steps, *, batch_size=64):
    """Return the micro-batches of every step and the steps of all failures, for a memory of so many examples."""
    batch = TensorBatch(torch.zeros(batch_size, 1), lengths=None, trim=None)
    limit, counts, failures = MicroLimit(), [], []
    for step in range(num_steps):
        parts = split(batch, budget=None, limit=limit.ceiling)
        while len(parts[0]) > capacity_at(step):
            failures.append(step)
            limit = limit.after_failure(len(parts[0]))
            parts = split(batch, budget=None, limit=limit.ceiling)
        limit = limit.after_success(len(parts[0]), is_cut=len(parts) > 1)
        counts.append(len(parts))
    return counts, failures


def test_a_constant_batch_runs_in_one_piece_again_after_memory_was_short_for_a_while():
    """Before, it ran in 4 pieces for ever: 16 of 64 stayed below the ceiling of 19.36 by more than a tenth."""
    counts, failures = follow_limit(lambda step: 16 if step < 10 else 64, 1000)
    assert counts[:10] == [4] * 10
    assert counts.index(1) == 736  # 7 rises to just below 32, 512 steps until that is forgotten, 7 rises more
    assert counts == sorted(counts, reverse=True)
    assert failures == [0, 0]  # 64 and 32, and none on the way back


@pytest.mark.parametrize("capacity", [16, 20, 33, 50])
def test_a_memory_that_stays_small_is_probed_about_twice_in_a_thousand_steps(capacity):
    counts, failures = follow_limit(lambda step: capacity, 10_000)
    assert sum(step >= 1000 for step in failures) <= 2 * 9
    # A probe that fails costs a tenth or two of the ceiling, not half of it: the split is that of before.
    assert set(counts[1000:]) == {math.ceil(64 / capacity)}


def test_a_step_that_is_neither_cut_nor_near_the_ceiling_teaches_nothing():
    limit = MicroLimit().after_failure(64)
    for _ in range(10 * FORGET_AFTER):
        limit = limit.after_success(20)
    assert limit == MicroLimit().after_failure(64)
    assert MicroLimit().after_success(20, is_cut=True) == MicroLimit()


def test_memory_that_shrinks_after_a_failure_was_forgotten_is_found_by_halving_again():
    limit = MicroLimit().after_failure(64)
    for _ in range(FORGET_AFTER + 20 * CLEAN_STEPS):
        limit = limit.after_success(32, is_cut=True)
    assert limit.learned.failed_at == math.inf
    first = limit.after_failure(60)
    assert first.ceiling == pytest.approx(60 / 1.21)
    assert first.after_failure(32).ceiling == 16
