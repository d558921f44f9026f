"""Noise from vectors of models that are compiled, whole or in part."""

import pytest
import torch
from torch import nn

from batchwright.errors import ArgumentError

from .models import class_loss, exact_noise, make_stepper, measured, rows_of, spread_out


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def net():
    return nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 5))


def compiled_model():
    return torch.compile(net(), backend="aot_eager", dynamic=False), class_loss


def compiled_before():
    model, _ = compiled_model()
    for num in (5, 6, 8, 11, 16):
        model(rows_of(num)[0])
    return model, class_loss


def compiled_in_place():
    model = net()
    model.compile(backend="aot_eager", dynamic=False)
    return model, class_loss


def compiled_loss():
    return net(), torch.compile(class_loss, backend="aot_eager", dynamic=False)


@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("make", [compiled_model, compiled_before, compiled_in_place, compiled_loss])
def test_compiled_norms_are_refused_at_the_first_update(make):
    torch._dynamo.reset()
    model, loss_fn = make()
    stepper = make_stepper(model, loss_fn, measure_noise=2)
    with pytest.raises(ArgumentError, match=r"1.bias: torch.compile runs its module without hooks; use noise_from='a"):
        stepper.step(rows_of(16))


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_norms_outside_of_compiled_parts_are_measured():
    torch._dynamo.reset()
    block = torch.compile(nn.Sequential(nn.Linear(6, 12), nn.LayerNorm(12), nn.Tanh()), backend="aot_eager")
    model, batch = spread_out(nn.Sequential(block, nn.LayerNorm(12), nn.Linear(12, 5))), rows_of(16)
    found, names, _ = measured(make_stepper(model, class_loss, measure_noise=True), batch, num_steps=5)
    assert names == ["1.bias"]
    assert found == pytest.approx(exact_noise(model, class_loss, batch, names), rel=1e-4)
