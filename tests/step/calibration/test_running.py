"""calibrate: order, limits, exact fits of made-up costs, held-out errors, and no trace left behind."""

import copy
import gc
import io

import numpy as np
import pytest
import torch
from torch import nn

from batchwright.errors import ArgumentError, BudgetError, DoesNotFitError
from batchwright.plan import MaxTokens
from batchwright.step.calibration.result import Calibration
from batchwright.step.calibration.running import calibrate
from batchwright.step.calibration.shapes import default_shapes
from batchwright.step.memory.monitor import MemoryMonitor
from batchwright.testing import FakeClock, FakeMemory

SHAPES = [(1, 16), (4, 16), (4, 32), (8, 32), (8, 64), (16, 64), (16, 128), (32, 128)]


class Machine:
    """A device with 1000 bytes taken and 3 per token; a step is 0.1 s and 1 ms per token, a first visit 0.5 s more."""

    def __init__(self, total_bytes=1_000_000):
        self.memory = FakeMemory(total_bytes, used_bytes=1000, bytes_of=lambda num, length: 3 * num * length)
        self.clock = FakeClock()
        self.model = nn.Linear(1, 1)
        self.ran = []

    def run(self, shape):
        self.clock.advance(0.1 + 0.001 * shape[0] * shape[1] + (0.5 if shape not in self.ran else 0))
        self.ran.append(shape)
        self.memory.run_batch(*shape)

    def calibrate(self, shapes=SHAPES, **options):
        options = {"monitor": MemoryMonitor(source=self.memory), "clock": self.clock, "progress": False, **options}
        return calibrate(self.run, shapes, restore=self.model, **options)


def test_costs_that_follow_the_formula_are_found_exactly():
    found = Machine().calibrate()
    assert found.memory.predict([[10, 100]]) == pytest.approx([4000], rel=1e-6)
    assert found.time.predict([[10, 100]]) == pytest.approx([1.1], rel=1e-6)
    assert found.time.first_visit_seconds == pytest.approx(0.5)
    assert found.peak_bytes == tuple(1000 + 3 * b * length for b, length in SHAPES)
    assert max(map(abs, found.errors.memory + found.errors.time)) < 1e-6
    assert found.stopped is None


def test_a_device_whose_small_steps_take_their_launches_is_calibrated_so():
    clock = FakeClock()

    def run(shape):
        clock.advance(max(0.4, 0.02 + 0.001 * shape[0] * shape[1]))

    found = calibrate(run, [*SHAPES, (64, 64), (64, 128)], restore=nn.Linear(1, 1), clock=clock, progress=False)
    assert found.time.launch_seconds == pytest.approx(0.4)
    assert found.time.predict([[2, 100], [50, 64]]) == pytest.approx([0.4, 3.22], rel=1e-6)
    # 95 % of the best is 0.95 / 0.001 tokens a second: 0.95·0.02 / (0.05·0.001) = 380 tokens for the constant, and
    # 0.95·0.4 / 0.001 = 380 for the launches.
    assert (128 * found.time.knee([128])).tolist() == [384]
    assert Calibration.from_json(found.to_json()) == found


def test_shapes_run_cheapest_first_each_once_and_then_repeated():
    machine = Machine()
    found = machine.calibrate([(8, 32), (1, 16), (4, 16), (1, 64), (4, 16)], repeats=2)
    # Both (4, 16) and (1, 64) have 64 tokens: the longer row is last.
    order = [(1, 16), (4, 16), (1, 64), (8, 32)]
    assert machine.ran == [shape for shape in order for _ in range(3)]
    assert found.shapes == tuple(order)


def test_the_median_of_the_repeats_counts_and_the_first_visit_is_kept_apart():
    clock, model = FakeClock(), nn.Linear(1, 1)
    delays = iter([9.0, 1.0, 5.0, 2.0] * 4)  # a first visit, then three of which the median is 2
    found = calibrate(lambda shape: clock.advance(next(delays)), SHAPES[:4], restore=model, repeats=3, clock=clock)
    assert found.seconds == (2.0,) * 4
    assert found.first_visit_seconds == (9.0,) * 4


def test_no_shape_predicted_over_the_limit_is_run():
    machine = Machine()
    found = machine.calibrate(max_bytes=7145)  # 1000 + 3 × 16 × 128 = 7144; (32, 128) needs 13288
    assert machine.ran[-1] == (16, 128)
    assert found.stopped == "(32, 128) is predicted over 7145 bytes"
    assert found.max_bytes == 7145
    assert found.budget().max_items(np.array([[128]])).tolist() == [15]  # 16 need all of it, the margin is 0.5 %


def test_without_a_limit_nine_tenths_of_the_memory_are_used():
    machine = Machine(total_bytes=10_000)
    found = machine.calibrate()
    assert found.max_bytes == 9000
    assert found.shapes == tuple(SHAPES[:-1])


def test_running_out_of_memory_ends_the_list():
    machine = Machine(total_bytes=10_000)
    found = machine.calibrate(max_bytes=1e9)
    assert found.stopped == "(32, 128) ran out of memory"
    assert found.shapes == tuple(SHAPES[:-1])
    assert machine.ran.count((32, 128)) == 1


def test_fewer_than_four_shapes_that_fit_are_an_error():
    with pytest.raises(
        DoesNotFitError, match=r"\(4, 32\) ran out of memory, and only 2 smaller shapes fit; 4 are needed"
    ):
        Machine(total_bytes=1300).calibrate(max_bytes=1e9)
    with pytest.raises(BudgetError, match=r"\(8, 32\) is predicted over 1500 bytes, and only 3 smaller shapes fit"):
        Machine().calibrate(max_bytes=1500)


def test_fewer_than_four_different_shapes_are_refused():
    with pytest.raises(ArgumentError, match="at least 4 different shapes, got 3"):
        Machine().calibrate([*SHAPES[:3], *SHAPES[:3]])


@pytest.mark.parametrize("restore", [None, (), "model", (torch.optim.SGD(nn.Linear(1, 1).parameters()),)])
def test_without_a_model_to_put_back_nothing_runs(restore):
    with pytest.raises(ArgumentError, match=r"restore must be \(model, optimizer\) or \(model, None\)"):
        calibrate(lambda shape: None, SHAPES, restore=restore)


def test_no_repeats_are_refused():
    with pytest.raises(ArgumentError, match="repeats must be a whole number of 1 or more, got 0"):
        Machine().calibrate(repeats=0)


def test_on_the_cpu_time_is_fitted_and_memory_is_none():
    model = nn.Linear(8, 8)
    found = calibrate(lambda s: model(torch.ones(*s, 8)).sum().backward(), SHAPES, restore=model, progress=False)
    assert (found.memory, found.peak_bytes, found.errors.memory, found.max_bytes) == (None, None, None, None)
    assert found.time.predict([[4, 16]]) > 0
    with pytest.raises(ArgumentError, match="no memory was measured"):
        found.budget()


def test_an_error_of_run_is_handed_on_and_everything_is_put_back():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    before, random = copy.deepcopy(model.state_dict()), torch.get_rng_state()

    def run(shape):
        model(torch.randn(max(2, shape[0]), 2)).sum().backward()
        optimizer.step()
        if shape == (4, 32):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        calibrate(run, SHAPES, restore=(model, optimizer), progress=False)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random)
    assert len(optimizer.state) == 0
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_optimizer_has_its_state_before_the_first_shape():
    model = nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    seen = []
    calibrate(lambda shape: seen.append(len(optimizer.state)), SHAPES[:4], restore=(model, optimizer))
    assert set(seen) == {2}  # weight and bias
    assert len(optimizer.state) == 0


@pytest.mark.parametrize("accumulate", [True, False])
def test_gradients_are_there_or_not_as_in_training(accumulate):
    model = nn.Linear(2, 1)
    seen = []

    def run(shape):
        seen.append(model.weight.grad is not None)
        model(torch.ones(2, 2)).sum().backward()

    calibrate(run, SHAPES[:4], restore=(model, torch.optim.SGD(model.parameters())), accumulate=accumulate)
    assert set(seen) == {accumulate}
    assert model.weight.grad is None


def test_few_probes_are_left_out_one_by_one_and_many_every_third():
    few, many = Machine().calibrate(SHAPES[:6]), Machine().calibrate(SHAPES)
    assert few.errors.shapes == tuple(SHAPES[:6])
    assert many.errors.shapes == (SHAPES[1], SHAPES[4])  # the smallest and the largest stay in
    assert len(many.errors.memory) == len(many.errors.time) == 2


def test_held_out_errors_are_below_zero_where_too_little_was_predicted():
    machine = Machine()
    machine.memory = FakeMemory(10**6, bytes_of=lambda num, length: 1000 * (2 if (num, length) == (4, 16) else 1))
    found = machine.calibrate()
    assert found.errors.memory[0] == pytest.approx(-0.5)  # (4, 16) took 2000, the others say 1000


def test_json_gives_an_equal_calibration():
    for found in (Machine().calibrate(max_bytes=7144), Machine().calibrate(SHAPES[:5], monitor=None)):
        assert Calibration.from_json(found.to_json()) == found
    for text, complaint in [
        ("{", "not the JSON of a Calibration"),
        ("[]", r"expected the JSON of a batchwright.Calibration, got '\[\]'"),
        ('{"kind": "batchwright.Calibration", "version": 2}', "has version 2, not 1"),
        ('{"kind": "batchwright.Calibration", "version": 1}', r"needs \['errors', 'first_visit_seconds'"),
    ]:
        with pytest.raises(ArgumentError, match=complaint):
            Calibration.from_json(text)


def test_a_bar_is_shown_for_more_than_four_shapes(monkeypatch):
    for num, shown in [(4, ""), (5, "calibrating: 5 in")]:
        stream = io.StringIO()
        monkeypatch.setattr("sys.stderr", stream)
        Machine().calibrate(SHAPES[:num], progress=True)
        assert stream.getvalue().startswith(shown)
        assert bool(stream.getvalue()) == bool(shown)


class OnTheDevice:
    """A small transformer on the GPU; it has run once, since libraries keep a workspace from the first run on."""

    def __init__(self):
        gc.collect()  # what earlier tests left in reference cycles would be freed while memory is compared
        layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.model = nn.Sequential(nn.Linear(8, 128), encoder).cuda()
        self.run((4, 32))
        self.model.zero_grad()

    def run(self, shape):
        self.model(torch.randn(*shape, 8, device="cuda")).sum().backward()


@pytest.mark.needs_cuda
def test_on_the_device_held_out_peaks_are_foretold_and_nothing_is_left_behind():
    device = OnTheDevice()
    optimizer = torch.optim.AdamW(device.model.parameters())
    before = copy.deepcopy(device.model.state_dict())
    held, random = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    shapes = default_shapes(np.arange(32, 1024), MaxTokens(2**16), num=12)
    found = calibrate(device.run, shapes, restore=(device.model, optimizer))
    assert found.stopped is None
    assert max(map(abs, found.errors.memory)) < 0.1
    torch.testing.assert_close(device.model.state_dict(), before, rtol=0, atol=0)
    assert torch.equal(torch.cuda.get_rng_state(), random)
    assert torch.cuda.memory_allocated() == held


@pytest.mark.needs_cuda
def test_on_the_device_the_state_of_the_optimizer_is_part_of_the_peak():
    device = OnTheDevice()
    optimizer = torch.optim.AdamW(device.model.parameters())
    bare = calibrate(device.run, SHAPES[:4], restore=device.model)
    full = calibrate(device.run, SHAPES[:4], restore=(device.model, optimizer))
    moments = 2 * sum(parameter.nbytes for parameter in device.model.parameters())
    extra = np.subtract(full.peak_bytes, bare.peak_bytes)
    assert extra == pytest.approx(moments, rel=0.1)


@pytest.mark.needs_cuda
def test_on_the_device_a_batch_at_the_edge_of_the_budget_keeps_it():
    device = OnTheDevice()
    shapes = default_shapes(np.arange(32, 1024), MaxTokens(2**16), num=12)
    found = calibrate(device.run, shapes, restore=device.model)
    max_bytes = found.peak_bytes[-1]
    for length in (100, 300, 777):
        num_items = int(found.budget(max_bytes).max_items(np.array([[length]]))[0])
        torch.cuda.reset_peak_memory_stats()
        device.run((num_items, length))
        assert 0.5 * max_bytes < torch.cuda.max_memory_allocated() <= max_bytes


@pytest.mark.needs_cuda
def test_on_the_device_running_out_of_memory_ends_the_list_and_a_cap_is_kept():
    device = OnTheDevice()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(2**31 / torch.cuda.mem_get_info()[1])
    shapes = [(1, 64), (8, 64), (8, 128), (32, 128), (64, 256), (4096, 1024)]
    try:
        found = calibrate(device.run, shapes, restore=device.model, max_bytes=1e15)
        assert found.stopped == "(4096, 1024) ran out of memory"
        assert MemoryMonitor("cuda").fraction < 0.1
        capped = calibrate(device.run, shapes, restore=device.model)
        assert capped.max_bytes == pytest.approx(0.9 * 2**31, rel=0.01)
        assert capped.stopped.startswith("(4096, 1024) is predicted over")
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
