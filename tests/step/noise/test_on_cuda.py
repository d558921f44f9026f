"""Noise from vectors where a GPU differs: half precision, graphs and kernels."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from .models import Transformer, exact_noise, make_stepper, measured, spread_out, token_loss, tokens_of

pytestmark = pytest.mark.needs_cuda


def make(num=9):
    torch.manual_seed(0)
    return spread_out(Transformer()).cuda(), tuple(field.cuda() for field in tokens_of(num))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_noise_is_that_of_one_backward_pass_per_example(autocast):
    model, batch = make()
    found, names, _ = measured(make_stepper(model, token_loss, autocast=autocast), batch)
    assert len(names) == 5
    expected = exact_noise(model, token_loss, batch, names)
    assert found == pytest.approx(expected, rel=1e-3 if autocast is None else 0.03)


@pytest.mark.filterwarnings("ignore:forward and backward are replayed, the update runs eagerly")
def test_measured_updates_run_eagerly_beside_graphs():
    model, batch = make(8)
    stepper = make_stepper(model, token_loss, measure_noise=4, graphs=True, weight_of=lambda b: (b[1] >= 0).sum())
    reports = [stepper.step(batch) for _ in range(13)]
    assert not any(reports[place].graphed for place in (0, 4, 8, 12))
    assert reports[11].graphed
    found = stepper.state_dict()["vectors"]
    assert found["average"]["s"] == pytest.approx(exact_noise(model, token_loss, batch, found["names"])[0], rel=1e-3)


@pytest.mark.filterwarnings("ignore:Warning. Profiler clears events")
def test_an_update_of_vectors_launches_few_kernels_more():
    model, batch = make(8)
    counts = {}
    for name, options in (("plain", {"measure_noise": False, "noise_from": "all"}), ("vectors", {})):
        stepper = make_stepper(model, token_loss, **options)
        for _ in range(4):
            stepper.step(batch)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            stepper.step(batch)
        counts[name] = sum(event.count for event in found.key_averages() if "LaunchKernel" in event.key)
    # A sum per norm, of which there are five, and a few for the norm of all rows and of all gradients.
    assert 0 < counts["vectors"] - counts["plain"] <= 25
