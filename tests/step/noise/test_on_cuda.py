"""Noise from vectors where a GPU differs: half precision, graphs and kernels."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from batchwright.step.noise._taps import _norms_of

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
def test_wide_rows_launch_no_more_kernels_than_narrow_ones():
    # On a CPU rows of so many numbers are read one by one: a copy of them costs more than a call.
    rows = [torch.randn(256, 512, device="cuda") for _ in range(8)]
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
        _norms_of(rows, [one.sum(0) for one in rows])
    kernels = sum(event.count for event in found.key_averages() if "LaunchKernel" in event.key)
    assert kernels - len(rows) <= 12


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
    # A sum per norm, of which there are five; three stacks, a sum and a difference over all vectors, three norms, their
    # squares in float64 and a factor: 16 operators, as test_cost.py counts. A reduction may be two kernels.
    assert 0 < counts["vectors"] - counts["plain"] <= 20
