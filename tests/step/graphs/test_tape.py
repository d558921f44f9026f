"""The stand-in for CUDA graphs is as blind as they are; otherwise the tests that use it would show nothing."""

import copy

import pytest
import torch
from torch import nn

from . import models
from .tape import Tape
from .twins import distance


@pytest.mark.parametrize("architecture", models.ARCHITECTURES, ids=str)
def test_a_replay_of_forward_and_backward_gives_the_bits_of_eager(architecture):
    model, shape = architecture.make(), architecture.shapes[0]
    twin, static = copy.deepcopy(model), architecture.make_batch(shape, seed=0)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def run():
        for parameter in model.parameters():
            parameter.grad.zero_()
        loss, weight = architecture.loss_fn(model, static)
        (loss / weight).backward()

    tape = Tape()
    tape.record(run)
    batch = architecture.make_batch(shape, seed=1)
    for name, value in batch.items():
        static[name].copy_(value)
    tape.replay()
    loss, weight = architecture.loss_fn(twin, batch)
    (loss / weight).backward()
    assert distance([one.grad for one in model.parameters()], [one.grad for one in twin.parameters()]) == 0


def test_a_replay_runs_no_python():
    calls, x, y = [], torch.ones(2), torch.zeros(2)

    def run():
        calls.append(1)
        y.copy_(x * len(calls))

    tape = Tape()
    tape.record(run)
    x.fill_(3)
    tape.replay()
    tape.replay()
    assert (len(calls), y.tolist()) == (1, [3, 3])


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda x: x * x.sum().item(), "a value of the device was read"),
        (lambda x: x[x > 0], "depends on values"),
        (lambda x: x.nonzero(), "depends on values"),
    ],
    ids=["item", "mask", "nonzero"],
)
def test_what_a_capture_on_cuda_refuses_is_refused(function, why):
    x = torch.ones(3)
    with pytest.raises(RuntimeError, match=why):
        Tape().record(lambda: function(x))


def test_a_draw_for_the_host_is_frozen():
    layer, x, y = nn.Linear(2, 2), torch.ones(1, 2), torch.zeros(1, 2)

    def run():
        y.copy_(layer(x) if torch.rand([]) < 0.5 else x)

    tape = Tape()
    torch.manual_seed(0)
    tape.record(run)
    first = y.clone()
    for _ in range(20):
        tape.replay()
        assert torch.equal(y, first)
