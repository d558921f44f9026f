"""find_budget: few batches of real examples, the knee and the memory of made-up machines, ranks, and no trace left."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import batchwright as bw
from batchwright.errors import ArgumentError, DoesNotFitError
from batchwright.plan import MaxTokens, MemoryModel, TimeModel
from batchwright.step import FoundBudget
from batchwright.step.calibration._searching import probe_rows
from batchwright.step.calibration.finding import Agreement, Probe, find_budget
from batchwright.step.memory.monitor import MemoryMonitor
from batchwright.testing import FakeClock, FakeMemory

CPU = torch.device("cpu")


class Machine(Probe):
    """A device with 1000 bytes taken; a step takes ``max(launch, constant + per_token × tokens)`` seconds."""

    def __init__(self, lengths, *, total_bytes=10**9, bytes_per_token=3, launch=0.0, constant=0.01, per_token=1e-5):
        self.lengths = np.array(lengths).reshape(len(lengths), -1)
        bytes_of = lambda num, *sides: num * bytes_per_token * sum(sides)  # noqa: E731
        self.memory = FakeMemory(total_bytes, used_bytes=1000, bytes_of=bytes_of)
        self.clock = FakeClock()
        self.costs = launch, constant, per_token
        self.model = nn.Linear(2, 1)
        self.loaded, self.ran = [], []

    def load(self, indices):
        self.loaded.append(indices)
        return (len(indices), *map(int, self.lengths[indices].max(axis=0)))

    def run(self, batch):
        self.ran.append(batch)
        self.memory.run_batch(*batch)
        launch, constant, per_token = self.costs
        self.clock.advance(max(launch, constant + per_token * batch[0] * sum(batch[1:])))

    @property
    def shapes(self):
        return list(dict.fromkeys(self.ran))

    def find(self, *, monitored=True, **options):
        monitor = MemoryMonitor(source=self.memory) if monitored else None
        options = {"modules": [self.model], "optimizers": [], "device": CPU, "progress": False, **options}
        return find_budget(self, self.lengths, monitor=monitor, clock=self.clock, **options)


def data(axes=1, num=5000, longest=512):
    return np.clip(np.random.default_rng(0).lognormal(3, 1, (num, axes)), 3, longest).astype(int)


def items(budget, *lengths):
    return int(budget.max_items(np.array([lengths]))[0])


def test_without_memory_the_budget_is_the_knee_of_throughput():
    machine = Machine(data(), launch=0.0, constant=0.01, per_token=1e-5)
    budget = machine.find(monitored=False)
    # 0.95 × 0.01 / (0.05 × 1e-5) = 19,000 tokens.
    assert items(budget, 100) == pytest.approx(190, abs=1)
    assert items(budget, 500) == pytest.approx(38, abs=1)
    assert budget.memory is None


class BusyMachine(Machine):
    """A CPU where another program takes its turn, 0.4 s, in some of the runs: ``is_interrupted(batch, how often)``."""

    def __init__(self, is_interrupted, *args, **options):
        super().__init__(*args, **options)
        self.is_interrupted = is_interrupted

    def run(self, batch):
        super().run(batch)
        if self.is_interrupted(batch, self.ran.count(batch)):
            self.clock.advance(0.4)


def test_on_a_cpu_a_step_that_was_interrupted_is_timed_again():
    machine = BusyMachine(lambda batch, run: run == 2, data(), constant=0.01, per_token=1e-5)
    assert items(machine.find(monitored=False), 100) == pytest.approx(190, abs=1)


def test_on_a_cpu_a_small_batch_takes_no_longer_than_one_that_holds_more():
    # Taken as they are, these two hide the 0.01 s of every step, and batches of one example would be as fast as any.
    slow = ((1, 5), (4, 512))
    machine = BusyMachine(lambda batch, run: batch in slow, data(), constant=0.01, per_token=1e-5)
    assert items(machine.find(monitored=False), 100) == pytest.approx(190, rel=0.05)
    assert set(slow) < set(machine.shapes)


def test_a_device_that_waits_for_launches_gets_batches_that_fill_them():
    budget = Machine(data(), launch=0.08, constant=0.002, per_token=1e-5).find()
    # 0.95 × 0.08 / 1e-5 = 7,600 tokens for the launches, 0.95 × 0.002 / (0.05 × 1e-5) = 3,800 for the constant.
    assert items(budget, 100) == pytest.approx(76, rel=0.05)


@pytest.mark.parametrize("axes", [1, 2])
def test_memory_is_filled_to_nine_tenths_and_never_beyond(axes):
    machine = Machine(data(axes), total_bytes=200_000, bytes_per_token=3)
    budget = machine.find(wants_knee=False)
    for length in (20, 100, 500):
        sides = [length] * axes
        peak = 1000 + 3 * items(budget, *sides) * sum(sides)
        assert peak <= 180_000
    assert 1000 + 3 * items(budget, *[20] * axes) * 20 * axes > 0.75 * 180_000
    assert budget.time is None
    assert machine.memory.peak_bytes <= 200_000


def test_the_smaller_of_memory_and_throughput_counts():
    small = Machine(data(), total_bytes=20_000, constant=0.01, per_token=1e-5).find()
    large = Machine(data(), total_bytes=10**9, constant=0.01, per_token=1e-5).find()
    assert 1000 + 3 * items(small, 100) * 100 <= 18_000
    assert items(large, 100) == pytest.approx(190, rel=0.05)
    assert items(small, 100) < 60


@pytest.mark.parametrize(("axes", "most"), [(1, 8), (2, 10)])
@pytest.mark.parametrize("total_bytes", [30_000, 10**6, 10**9])
def test_few_batches_are_measured_and_small_ones_first(axes, most, total_bytes):
    machine = Machine(data(axes), total_bytes=total_bytes, constant=0.01, per_token=1e-5)
    machine.find()
    assert 4 <= len(machine.shapes) <= most
    tokens = [num * sum(sides) for num, *sides in machine.shapes]
    assert tokens[0] == min(tokens)


def test_no_larger_batch_is_measured_once_memory_and_knee_are_known():
    """At 10 ms for a launch and 10 ms per item of any length, four items show all there is to see."""
    machine = Machine(data(longest=40), constant=0.0001, per_token=1e-3)
    machine.find()
    assert max(num for num, *_ in machine.shapes) <= 16


def test_probes_are_real_examples_and_repeat_them_where_there_are_few():
    machine = Machine([7, 3, 5])
    machine.find(monitored=False)
    assert {index for indices in machine.loaded for index in indices} == {0, 1, 2}
    assert max(map(len, machine.loaded)) == 8
    for indices, shape in zip(machine.loaded, machine.shapes, strict=True):
        assert len(indices) == shape[0]


def test_data_of_one_length_and_of_one_example_will_do():
    for lengths in ([9] * 50, [12]):
        assert items(Machine(lengths).find(), lengths[0]) >= 1


def test_a_batch_of_long_rows_has_as_many_tokens_as_it_is_counted_for():
    """Of one long text among short ones, collators without padding ran batches of hardly any tokens."""
    lengths = [16] * 200 + [512]
    machine = Machine(lengths, constant=0.01, per_token=1e-5)
    machine.find()
    assert max(shape[1] for shape in machine.shapes) == 512
    for indices, (num, length) in zip(machine.loaded, machine.shapes, strict=True):
        assert sum(lengths[index] for index in indices) >= 0.9 * num * length


def test_a_batch_holds_the_longest_of_every_axis():
    rows = probe_rows(np.array([[8, 9], [64, 9], [9, 64], [60, 60]]))
    corner = next(row for row in rows if row.lengths == (64, 64))
    assert set(corner.examples(4, np.array([[8, 9], [64, 9], [9, 64], [60, 60]]))) == {0, 1, 2, 3}
    assert set(corner.examples(2, np.array([[8, 9], [64, 9], [9, 64], [60, 60]]))) == {1, 2}


def test_an_example_that_does_not_fit_by_itself_is_an_error_that_says_what_to_do():
    message = r"one example of length \(512,\); shorten it, train with gradient_checkpointing=True, or give a budget"
    with pytest.raises(DoesNotFitError, match=message):
        Machine(data(), total_bytes=2000).find()


@pytest.mark.parametrize("lengths", [[9] * 50, [9, 8], [9, 7, 5, 3] * 10], ids=["one", "two", "many"])
def test_where_one_example_fits_and_no_more_a_batch_is_one_example(lengths):
    machine = Machine(lengths, total_bytes=1000 + 3 * 9)
    budget = machine.find()
    assert items(budget, 9) == 1
    assert 3 * 5 * items(budget, 5) <= 3 * 9


def test_memory_that_runs_out_before_the_model_says_so_lowers_the_limit():
    class Fragmented(Machine):
        def run(self, batch):
            if 3 * batch[0] * sum(batch[1:]) > 50_000:
                raise torch.OutOfMemoryError("fragments")
            super().run(batch)

    budget = Fragmented(data(), total_bytes=200_000).find(wants_knee=False)
    assert 3 * items(budget, 100) * 100 <= 50_000
    assert 3 * items(budget, 20) * 20 <= 50_000


def test_short_examples_that_run_out_of_memory_leave_long_ones_their_batches():
    class DearItems(Machine):
        def run(self, batch):
            if batch[0] > 300:
                raise torch.OutOfMemoryError("too many")
            super().run(batch)

    machine = DearItems(data(), total_bytes=400_000)
    budget = machine.find(wants_knee=False)
    # 0.9 of the memory holds 233 of them, with a margin of 2 % 229.
    assert 220 <= items(budget, 512) <= 233
    assert bw.plan_batches(machine.lengths, budget).shapes[:, 0].max() <= 300


def test_an_error_of_a_batch_is_raised_as_it_is():
    class Broken(Machine):
        def load(self, indices):
            raise KeyError("no such column")

    with pytest.raises(KeyError, match="no such column"):
        Broken(data()).find()


def test_model_optimizer_gradients_and_random_state_are_as_before():
    machine = Machine(data())
    model = machine.model
    optimizer = torch.optim.AdamW(model.parameters())
    weights, held = copy.deepcopy(model.state_dict()), []

    class Training(Machine):
        def run(self, batch):
            super().run(batch)
            held.append(len(optimizer.state))
            model(torch.randn(batch[0], 2)).sum().backward()
            with torch.no_grad():
                model.weight.add_(1)

    training = Training(data())
    before = torch.get_rng_state()
    training.find(modules=[model], optimizers=[optimizer])
    assert min(held) == 2  # the state was there while batches ran
    assert len(optimizer.state) == 0
    assert model.weight.grad is None
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(model.state_dict()[name], value) for name, value in weights.items())


@pytest.mark.parametrize("accumulates", [False, True])
def test_gradients_are_there_while_a_batch_runs_only_if_updates_have_several(accumulates):
    found = []

    class Training(Machine):
        def run(self, batch):
            super().run(batch)
            found.append(self.model.weight.grad is not None)
            self.model(torch.ones(1, 2)).sum().backward()

    Training(data()).find(accumulates=accumulates)
    assert any(found) is accumulates


def test_what_training_needs_besides_is_left_free():
    budget = Machine(data(), total_bytes=200_000).find(wants_knee=False, reserved_bytes=80_000)
    assert 1000 + 3 * items(budget, 20) * 20 <= 100_000


def test_the_fullest_rank_counts():
    """The other rank has a quarter of the memory, and runs out of it earlier."""

    def largest(values):
        other = list(values)
        if len(values) == 1:
            other = [-0.9 * 50_000]
        return [max(pair) for pair in zip(values, other, strict=True)]

    def settle(error):
        assert error is None

    budget = Machine(data(), total_bytes=200_000).find(wants_knee=False, agreement=Agreement(largest, settle))
    assert 1000 + 3 * items(budget, 20) * 20 <= 45_000


TIME = TimeModel.fit([(1, 64), (8, 64), (8, 128), (4, 256)], [0.2, 0.3, 0.4, 0.42])
MEMORY = MemoryModel.fit([(1, 64), (8, 64), (8, 128), (4, 256)], [100.0, 800.0, 1600.0, 1640.0]).budget(10_000)


@pytest.mark.parametrize(
    "budget",
    [
        FoundBudget(MEMORY, TIME, MaxTokens(9000), 100),
        FoundBudget(MEMORY, None),
        FoundBudget(None, TIME, least_tokens=64),
    ],
    ids=["all", "memory", "time"],
)
def test_a_found_budget_survives_json_and_is_a_budget_like_any_other(budget):
    again = FoundBudget.from_json(budget.to_json())
    assert again == budget
    assert again.to_state() == budget.to_state()
    plan = bw.plan_batches([3, 9, 27, 81] * 20, budget)
    assert plan.report().largest <= 1
    assert sorted(plan.indices) == list(range(80))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 4000), min_size=2, max_size=6), st.booleans(), st.booleans())
def test_longer_examples_never_get_larger_batches(lengths, has_memory, has_time):
    if not has_memory and not has_time:
        return
    budget = FoundBudget(MEMORY if has_memory else None, TIME if has_time else None)
    found = budget.max_items(np.array(sorted(lengths))[:, None])
    assert (np.diff(found) <= 0).all()
    assert (found >= 1).all()
    assert (budget.fraction(found, np.array(sorted(lengths))[:, None]) <= 1).all()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not the JSON of a FoundBudget"),
        ("[]", "find the budget again"),
        ('{"kind": "batchwright.FoundBudget", "version": 9}', "find the budget again"),
        (FoundBudget(None, TIME).to_json().replace('"memory": null', '"memory": {}'), "needs a model and max_bytes"),
    ],
)
def test_other_json_is_refused(text, message):
    with pytest.raises(ArgumentError, match=message):
        FoundBudget.from_json(text)


def test_a_found_budget_needs_something():
    with pytest.raises(ArgumentError, match="a budget of memory, a model of time, or the most tokens"):
        FoundBudget(None, None)
