"""The seconds of an update are those of the device, read late, and the tokens are those of the batch."""

import time

import pytest
import torch
from torch import nn

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.step import Stepper
from batchwright.step.measuring._stopwatch import Lap
from batchwright.testing import FakeClock

from ...processes import run_ranks

torch.set_num_threads(1)
DEVICE = torch.device("cuda", 0)


class FakeDevice:
    """A queue of work: marks are reached when the work before them is done, long after they were put there."""

    def __init__(self):
        self.queued_seconds = 0.0
        self.num_waits = 0

    def launch(self, seconds):
        self.queued_seconds += seconds

    def mark(self, device):
        return FakeEvent(self, self.queued_seconds)


class FakeEvent:
    def __init__(self, device, at):
        self.device, self.at = device, at

    def synchronize(self):
        self.device.num_waits += 1

    def elapsed_time(self, other):
        return 1000 * (other.at - self.at)


def test_the_time_of_work_that_is_only_launched_is_that_of_the_device():
    device = FakeDevice()
    device.launch(7.0)  # of updates before
    lap = Lap([DEVICE], mark=device.mark)
    device.launch(0.05)
    lap.stop()
    device.launch(3.0)  # of what follows
    assert device.num_waits == 0
    assert float(lap) == pytest.approx(0.05)
    assert float(lap) == pytest.approx(0.05)
    assert device.num_waits == 1


def test_the_slowest_of_several_devices_counts():
    devices = [FakeDevice(), FakeDevice()]
    places = [torch.device("cuda", place) for place in (0, 1)]
    lap = Lap(places, mark=lambda device: devices[device.index].mark(device))
    devices[0].launch(0.1)
    devices[1].launch(0.4)
    lap.stop()
    assert float(lap) == pytest.approx(0.4)
    assert [device.num_waits for device in devices] == [1, 1]


# Stepper


def batch_of(num=4):
    return torch.ones(num, 3), torch.ones(num, 1)


def loss_fn(model, batch):
    x, y = batch
    return (model(x) - y).square().sum(), len(x)


def make_stepper(loss_fn=loss_fn, device="cpu", **options):
    model = nn.Linear(3, 1).to(device)
    return Stepper(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, **options)


def test_a_report_waits_for_the_device_only_when_its_seconds_are_read():
    device = FakeDevice()

    def launches(model, batch):
        device.launch(0.02)
        return loss_fn(model, batch)

    stepper = make_stepper(launches, micro_batch=2)
    stepper._gatherer.start_lap = lambda: Lap([DEVICE], mark=device.mark)
    reports = [stepper.step(batch_of(4)), stepper.step(batch_of(6))]
    assert device.num_waits == 0
    assert [report.seconds for report in reports] == pytest.approx([0.04, 0.06])
    assert reports[1].observation()["seconds"] == pytest.approx(0.06)


def test_an_update_of_several_batches_is_timed_from_the_first():
    clock = FakeClock()
    stepper = make_stepper()
    stepper._gatherer.clock = clock
    stepper.accumulate(batch_of())
    clock.advance(1.0)
    stepper.accumulate(batch_of())
    clock.advance(0.5)
    assert stepper.update().seconds == 1.5


@pytest.mark.needs_cuda
@pytest.mark.filterwarnings("ignore:forward and backward are replayed, the update runs eagerly")
@pytest.mark.parametrize("options", [{}, {"graphs": True, "shapes": [(4, 3)]}], ids=["eager", "graphs"])
def test_a_step_of_50_ms_on_the_device_says_so(options):
    def slow(model, batch):
        torch.cuda._sleep(cycles)
        return loss_fn(model, batch)

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(10_000_000)
    begin.record()
    torch.cuda._sleep(10_000_000)
    end.record()
    torch.cuda.synchronize()
    cycles = round(10_000_000 * 50 / begin.elapsed_time(end))
    stepper = make_stepper(slow, "cuda", **options)
    batch = tuple(value.cuda() for value in batch_of())
    for _ in range(6):
        stepper.step(batch)
    torch.cuda.synchronize()
    start = time.perf_counter()
    reports = [stepper.step(batch) for _ in range(3)]
    launched = time.perf_counter() - start
    assert [45 <= 1000 * report.seconds <= 60 for report in reports] == [True] * 3
    assert launched < 0.1  # the host did not wait


# Tokens


def test_tokens_are_the_lengths_of_the_examples_over_all_axes():
    collate = lambda examples: torch.tensor([[float(len(one))] * 3 for one in examples])  # noqa: E731
    options = {"collate": collate, "lengths": lambda one: (len(one), 2), "micro_batch": bw.MaxTokens(100)}
    stepper = make_stepper(lambda model, x: (model(x).sum(), len(x)), **options)
    report = stepper.step(["abc", "de", "f"])
    assert report.tokens == 3 + 2 + 1 + 3 * 2
    assert report.observation()["batch_tokens"] == 12


def test_a_function_counts_tokens_of_every_batch_of_an_update():
    stepper = make_stepper(tokens_of=lambda batch: batch[0].sum().long())
    stepper.accumulate(batch_of(4))
    stepper.accumulate(batch_of(2))
    assert stepper.update().tokens == 18
    assert stepper.step(batch_of(1)).tokens == 3


def test_without_lengths_nobody_knows_the_tokens():
    report = make_stepper().step(batch_of())
    assert report.tokens is None
    assert report.observation()["batch_tokens"] is None


def test_a_batch_that_ran_out_of_memory_counts_its_tokens_once():
    failures = [True]

    def fails_once(model, batch):
        if failures and len(batch[0]) > 2:
            failures.pop()
            raise torch.OutOfMemoryError("no")
        return loss_fn(model, batch)

    report = make_stepper(fails_once, tokens_of=lambda batch: batch[0].numel()).step(batch_of(4))
    assert (report.ooms, report.tokens) == (1, 12)


def test_a_controller_counts_tokens_from_reports():
    stepper = make_stepper(tokens_of=lambda batch: batch[0].numel())
    controller = bw.BatchSizeController(bw.size.linear(4, 4, per="tokens", every=12), min_size=1, max_size=64)
    for _ in range(2):
        controller.observe(**stepper.step(batch_of(4)).observation())
    assert controller.size == 12


@pytest.mark.parametrize("answer", [-1, 2.5, "3", None])
def test_a_count_that_is_no_number_of_tokens_is_refused(answer):
    stepper = make_stepper(tokens_of=lambda batch: answer)
    with pytest.raises(ArgumentError, match=r"tokens_of\(batch\) must be a whole number of 0 or more, got"):
        stepper.step(batch_of())


def test_a_count_that_is_no_function_is_refused():
    with pytest.raises(ArgumentError, match="tokens_of must be a function of a batch, got 3"):
        make_stepper(tokens_of=3)


def test_ranks_report_the_slowest_seconds_and_the_tokens_of_all(tmp_path):
    outputs = run_ranks("tests.step.measuring.ranks", 2, tmp_path / "store", "report")
    assert all("seconds 3.0, tokens 18, beta2 0.9801" in output for output in outputs)
