"""Experiments beside CUDA graphs: what a graph draws and where it writes is not put back by copying alone."""

import pytest
import torch
from torch import nn

from batchwright.step import Stepper, measure_size

pytestmark = pytest.mark.needs_cuda


def loss_fn(model, batch):
    x, y = batch
    return (model(x).squeeze(-1) - y).square().sum(), len(x)


def batch_of(number, size=8):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(size, 4, generator=generator).cuda(), torch.randn(size, generator=generator).cuda()


def make(rate=1e-2, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.3), nn.Tanh(), nn.Linear(32, 1)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, fused=True)
    return Stepper(model, optimizer, loss_fn, clip_norm=1.0, graphs=True, shapes=[(8, 4)], **options), model


def trained(*, at, options):
    stepper, model = make(**options)
    losses = []
    for number in range(12):
        if number == at:
            measure_size(stepper, [batch_of(100 + number) for number in range(12)])
        losses.append(float(stepper.step(batch_of(number)).loss))
    return losses, [value.detach().cpu() for value in model.parameters()]


@pytest.mark.parametrize("options", [{}, {"beta2_rule": "half_life", "base_size": 8}], ids=["plain", "beta2"])
@pytest.mark.parametrize("at", [0, 1, 2, 6])
def test_graphed_training_with_dropout_goes_on_to_the_bit(at, options):
    losses, parameters = trained(at=None, options=options)
    found, values = trained(at=at, options=options)
    assert found == losses
    assert all(torch.equal(one, other) for one, other in zip(values, parameters, strict=True))


def test_replays_after_an_experiment_draw_anew():
    stepper, _ = make(rate=0.0)
    batch = batch_of(0)
    before = [float(stepper.step(batch).loss) for _ in range(8)]
    measure_size(stepper, [batch_of(100 + number) for number in range(12)])
    after = [float(stepper.step(batch).loss) for _ in range(8)]
    assert len(set(before[2:])) == 6
    assert len(set(after)) == 8
