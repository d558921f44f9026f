"""Numbers of a report are on their way when it comes: reading one never waits for work that was queued later."""

import numpy as np
import pytest
import torch
from torch import nn

from batchwright.step import Stepper
from batchwright.step._copies import copied_numbers, copied_row, sent


def loss_fn(model, batch):
    x, y = batch
    gap = (model(x) - y).square().sum()
    return gap, len(x), {"twice": 2 * gap.detach()}


def make_stepper(device, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 1)).to(device)
    return Stepper(model, torch.optim.SGD(model.parameters(), lr=0.01), loss_fn, clip_norm=1.0, **options)


def batch_on(device):
    return torch.arange(32.0, device=device).reshape(8, 4) / 32, torch.ones(8, 1, device=device)


def test_numbers_of_the_host_stay_as_they_are():
    row = torch.tensor([1.0, 2.0])
    assert copied_numbers([2.5, row[0]]) == [2.5, row[0]]
    assert copied_row(row) is row


@pytest.mark.needs_cuda
def test_numbers_of_several_types_come_over_exactly():
    loss, norm = torch.tensor(1 / 3, dtype=torch.float64, device="cuda"), torch.tensor([0.1], device="cuda")
    numbers = copied_numbers([loss, 7.0, norm])
    assert [float(number) for number in numbers] == [1 / 3, 7.0, float(norm)]


@pytest.mark.needs_cuda
@pytest.mark.parametrize("noise_from", ["all", "vectors"])
def test_a_report_is_read_while_later_work_still_runs(noise_from):
    stepper = make_stepper("cuda", measure_noise=True, noise_from=noise_from, micro_batch=4)
    for _ in range(3):
        report = stepper.step(batch_on("cuda"))
    torch.cuda.synchronize()
    report = stepper.step(batch_on("cuda"))
    torch.cuda._sleep(2_000_000_000)  # about a second
    end = torch.cuda.Event()
    end.record()
    found = report.observation() | {"norm": report.grad_norm, "metrics": report.metrics}
    assert not end.query()
    assert found["noise_s"] is not None
    assert found["metrics"]["twice"] == pytest.approx(2 * found["loss"])


@pytest.mark.needs_cuda
def test_a_report_says_the_same_on_both_devices():
    here, there = (make_stepper(device).step(batch_on(device)) for device in ("cpu", "cuda"))
    assert there.loss == pytest.approx(here.loss, rel=1e-5)
    assert there.grad_norm == pytest.approx(here.grad_norm, rel=1e-5)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.needs_cuda)])
def test_numbers_of_the_host_are_sent_as_they_are(device):
    values = np.array([[3, 1], [4, 1]])
    found = sent(values, torch.device(device))
    assert found.device.type == device
    assert found.tolist() == values.tolist()
