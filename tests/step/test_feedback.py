"""Measured peaks correct the budget of the batches that follow."""

import json

import pytest
import torch
from torch import nn

import batchwright as bw
from batchwright.plan.models._terms import Terms
from batchwright.step import MemoryMonitor, Stepper
from batchwright.step.memory.budget_tracker import RELAX_AFTER
from batchwright.testing import FakeMemory

# 100 bytes and one a token, 10 % to spare: a budget of 330 bytes lets 200 tokens through.
MODEL = bw.MemoryModel(Terms(1, (100.0, 0.0, 1.0, 0.0)), margin=0.1)
LENGTH = 10


def make_stepper(memory, bytes_a_token):
    """Return a Stepper whose loss takes memory as a device would: 100 bytes and some a token."""
    model = nn.Linear(1, 1)

    def loss_fn(model, batch):
        memory.run_batch(len(batch), bytes_a_token)
        return model(batch[:, :1]).sum(), len(batch)

    return Stepper(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        loss_fn,
        micro_batch=MODEL.budget(330),
        lengths=lambda batch: [LENGTH] * len(batch),
        memory=MemoryMonitor(source=memory),
    )


def make_memory(total_bytes=10_000):
    return FakeMemory(
        total_bytes, used_bytes=100, bytes_of=lambda num_items, bytes_a_token: num_items * LENGTH * bytes_a_token
    )


def test_a_peak_above_the_prediction_makes_the_next_micro_batches_smaller():
    stepper = make_stepper(make_memory(), bytes_a_token=2.0)
    batch = torch.ones(40, LENGTH)
    # 20 rows of 10 tokens are predicted at 300 bytes and take 500: ratio 5/3, factor 1.1 / (5/3) = 0.66.
    assert stepper.step(batch).num_micro_batches == 2
    # 330 × 0.66 = 217.8 bytes let (217.8 / 1.1 − 100) / 10 = 9 rows through: 40 rows in 5 parts.
    assert stepper.step(batch).num_micro_batches == 5


def test_peaks_as_predicted_open_most_of_the_margin_after_a_while():
    stepper = make_stepper(make_memory(), bytes_a_token=1.0)
    batch = torch.ones(42, LENGTH)
    parts = [stepper.step(batch).num_micro_batches for _ in range(RELAX_AFTER + 1)]
    # 42 rows need three micro-batches of at most 20. With 330 × 1.1 / 1.02 = 355.9 bytes 22 rows fit, and two do.
    assert parts == [3] * RELAX_AFTER + [2]


def test_the_report_gives_the_share_of_memory_at_the_peak():
    report = make_stepper(make_memory(total_bytes=1000), bytes_a_token=1.0).step(torch.ones(20, LENGTH))
    assert report.peak_bytes == 300
    assert report.observation()["memory_fraction"] == pytest.approx(0.3)


def test_what_was_learned_is_saved_and_loaded():
    memory = make_memory()
    stepper = make_stepper(memory, bytes_a_token=2.0)
    stepper.step(torch.ones(40, LENGTH))
    other = make_stepper(memory, bytes_a_token=2.0)
    other.load_state_dict(json.loads(json.dumps(stepper.state_dict())))
    assert other.step(torch.ones(40, LENGTH)).num_micro_batches == 5


def test_a_budget_of_tokens_has_nothing_to_correct():
    model = nn.Linear(1, 1)
    stepper = Stepper(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        lambda model, batch: (model(batch).sum(), len(batch)),
        micro_batch=bw.MaxTokens(8),
        lengths=lambda batch: [1] * len(batch),
    )
    assert stepper.step(torch.ones(16, 1)).num_micro_batches == 2
    assert stepper.state_dict()["memory"] is None
