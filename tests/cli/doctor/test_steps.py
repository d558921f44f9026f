"""Training steps from small to large, and what graphs save, with time and memory that are made up."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from batchwright.cli.doctor.advice import advise
from batchwright.cli.doctor.passes import CudaSteps, Decoding, decoding, encoding
from batchwright.cli.doctor.records import CPU, GPU
from batchwright.cli.doctor.steps import measure_graphs, measure_launch
from batchwright.errors import DoesNotFitError

from .made import H200, LAPTOP, ON_H200

DEVICE = torch.device("cpu")
TINY = replace(CPU, width=16, num_layers=1, num_shapes=2, repeats=1, rounds=2, length=4, max_items=4)


class World:
    """Time that passes only in steps: ``seconds(num_items)`` each, stretched by other work now and then."""

    def __init__(self, seconds, *, noise=0.0, seed=0):
        self.now = 0.0
        self.steps = []
        self._seconds, self._noise = seconds, noise
        self._random = np.random.default_rng(seed)

    def clock(self):
        return self.now

    def run(self, shape):
        self.steps.append(shape[0])
        self.now += self._seconds(shape[0]) * (1 + self._noise * self._random.exponential())

    def measure(self, **effort):
        return measure_launch(DEVICE, replace(LARGER, **effort), run=self.run, clock=self.clock)


# A step takes at least 10 s, and 2 s per example from five on.
def grown(num_items):
    return max(10.0, 2.0 * num_items)


LARGER = replace(TINY, max_items=64, rounds=5, most_seconds=1e9)


def sizes_advice(launch):
    return next(advice for advice in advise(replace(ON_H200, machine=LAPTOP, launch=launch)) if advice.topic == "sizes")


def test_every_size_is_timed_in_turn_round_after_round():
    world = World(grown)
    found = world.measure(max_items=4, rounds=3)
    assert [row.tokens for row in found.rows] == [4, 8, 16]
    # A warm-up, each size once, then three rounds of all sizes; a measurement is two steps.
    assert world.steps == [1, 1] + [1, 1, 2, 2, 4, 4] * 4
    assert len(found.rounds) == 3
    assert found.model == "1 layers of width 16"


def test_without_noise_all_rounds_agree():
    found = World(grown).measure()
    assert (found.noise, found.spread) == (1.0, 0.0)
    # 4 examples take 10 s, 8 take 16; at 8 the throughput, 0.5 examples a second, is the best.
    assert found.flat_range == (16, 16)
    assert found.knee_range == (32, 32)
    assert sizes_advice(found).code == "bw.MaxTokens(32)"


@pytest.mark.parametrize("noise", [0.02, 0.3, 2.0])
def test_no_two_runs_contradict_each_other_however_noisy(noise):
    ranges = []
    for seed in range(40):
        found = World(grown, noise=noise, seed=seed).measure()
        advice = sizes_advice(found)
        if advice.code:
            ranges.append(found.knee_range)
            assert advice.code == f"bw.MaxTokens({found.knee_range[1]})"
        else:
            assert advice.text.startswith("Too busy to say which batches are too small")
    # What is stated contains the truth, 32, so any two of the answers have it in common.
    assert all(low <= 32 <= high for low, high in ranges)
    if noise < 0.1:
        assert len(ranges) == 40
    if noise > 1:
        assert len(ranges) < 40


def test_one_disturbed_round_is_not_hidden_by_the_median():
    # While all but the two largest sizes ran for the second time, in steps 30 to 43, something else ran too.
    world = World(grown)
    numbers = iter(range(10**6))

    def run(shape):
        world.run(shape)
        world.now += 1000.0 * (30 <= next(numbers) < 44 and shape[0] <= 16)

    found = measure_launch(DEVICE, LARGER, run=run, clock=world.clock)
    # The median of the rounds is right, but that round alone says 32 examples.
    assert found.knee_tokens == 32
    assert found.knee_range is None
    assert sizes_advice(found).text.startswith("Too busy to say which batches are too small")


def test_a_size_that_takes_longer_than_a_larger_one_is_noise():
    found = World(lambda num_items: {1: 3.0, 2: 2.0, 4: 8.0}[num_items]).measure(max_items=4)
    assert [row.seconds for row in found.rows] == [2.0, 2.0, 8.0]
    assert found.noise == 1.5


def test_a_long_step_is_the_last():
    done = []
    world = World(grown)
    effort = replace(LARGER, most_seconds=15.0, rounds=2)
    found = measure_launch(DEVICE, effort, run=world.run, clock=world.clock, done=lambda: done.append(1))
    # 8 examples take 16 s.
    assert [row.tokens for row in found.rows] == [4, 8, 16, 32]
    assert len(done) == 4 + 2


def test_memory_that_runs_out_ends_the_sizes():
    def full_above(most):
        def run(shape):
            if shape[0] > most:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        return run

    assert [row.tokens for row in measure_launch(DEVICE, TINY, run=full_above(2)).rows] == [4, 8]
    with pytest.raises(DoesNotFitError, match="one example of 4 tokens does not fit cpu"):
        measure_launch(DEVICE, TINY, run=full_above(0))


def test_memory_that_runs_out_later_drops_the_size():
    calls = []

    def run(shape):
        calls.append(shape)
        if shape[0] == 4 and len(calls) > 12:  # others have taken the memory since
            raise torch.OutOfMemoryError("CUDA out of memory.")

    found = measure_launch(DEVICE, TINY, run=run)
    assert [row.tokens for row in found.rows] == [4, 8]
    assert {len(seconds) for seconds in found.rounds} == {2}


# CUDA graphs


class GraphWorld:
    """Time that passes only in steps, which a graph can replay, unless memory or a capture says no."""

    def __init__(self, eager, replayed, *, errors=()):
        self.now = 0.0
        self.did = []
        self._eager, self._replayed, self._errors = eager, replayed, dict(errors)

    def clock(self):
        return self.now

    def run(self, shape):
        self._do("run", shape, self._eager(shape[0]))

    def warm_up(self, shape):
        self._do("warm up", shape, 1.0)

    def capture(self, shape):
        self._do("capture", shape, 2.0)
        return lambda: self._do("replay", shape, self._replayed(shape[0]))

    def _do(self, what, shape, seconds):
        self.did.append((what, shape[0]))
        error = self._errors.get((what, shape[0]))
        if error is not None:
            raise error
        self.now += seconds

    def measure(self, **effort):
        effort = {"graph_items": (1, 2, 4), "most_seconds": 1e9, "rounds": 2, **effort}
        return measure_graphs(DEVICE, replace(TINY, **effort), make_steps=lambda: self, clock=self.clock)


def full(message="CUDA out of memory. Tried to allocate 2 GiB."):
    return torch.OutOfMemoryError(message)


# Without a graph a step takes 10 s at least, with one what its examples take.
def launched(num_items):
    return max(10.0, 4.0 * num_items)


def computed(num_items):
    return 4.0 * num_items


def test_passes_are_timed_before_and_replays_after_the_captures():
    world = GraphWorld(launched, computed)
    world.measure()
    # A measurement is two steps: one to see that it fits, and two rounds.
    runs = [("run", num) for _ in range(3) for num in (1, 1, 2, 2, 4, 4)]
    captures = [("warm up", 1), ("capture", 4), ("capture", 2), ("capture", 1)]
    assert world.did == runs + captures + [("replay", num) for _ in range(2) for num in (1, 1, 2, 2, 4, 4)]


def test_the_gain_is_the_time_without_over_the_time_with_a_graph():
    found = GraphWorld(launched, computed).measure()
    assert [(row.tokens, row.eager_seconds, row.replay_seconds) for row in found.rows] == [
        (4, 10.0, 4.0), (8, 10.0, 8.0), (16, 16.0, 16.0),
    ]  # fmt: skip
    assert [row.gain for row in found.rows] == [2.5, 1.25, 1.0]
    assert found.rounds == ((2.5, 1.25, 1.0), (2.5, 1.25, 1.0))
    # A tenth is gained up to 2 examples of 4 tokens.
    assert (found.paying_tokens, found.paying_range) == (8, (8, 8))
    # The warm-up takes 1 s, each of three captures 2 s.
    assert (found.capture_seconds, found.problem, found.model) == (7.0, "", "1 layers of width 16")


def test_a_pass_that_takes_long_is_the_largest_that_is_captured():
    found = GraphWorld(launched, computed).measure(graph_items=(1, 2, 4, 8, 16), most_seconds=15.0)
    assert [row.tokens for row in found.rows] == [4, 8, 16]


def test_memory_that_runs_out_in_a_capture_leaves_the_smaller_sizes():
    world = GraphWorld(launched, computed, errors={("capture", 4): full()})
    found = world.measure()
    assert [row.tokens for row in found.rows] == [4, 8]
    assert found.problem == "a step of 16 tokens could not be captured: out of memory"


def test_memory_that_runs_out_before_the_end_of_a_capture_is_seen():
    # Ending the broken capture fails as well, and hides the first error.
    class Hidden(GraphWorld):
        def capture(self, shape):
            try:
                return super().capture(shape)
            except RuntimeError:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")  # noqa: B904

    assert [row.tokens for row in Hidden(launched, computed, errors={("capture", 4): full()}).measure().rows] == [4, 8]
    found = Hidden(launched, computed, errors={("capture", 4): RuntimeError("operation not permitted\nmore")}).measure()
    assert (found.rows, found.problem) == ((), "a step of 16 tokens could not be captured: operation not permitted")


def test_a_capture_that_cannot_be_is_named_and_ends_the_captures():
    error = RuntimeError(
        "CUDA error: operation not permitted when stream is capturing.\nCompile with TORCH_USE_CUDA_DSA"
    )
    world = GraphWorld(launched, computed, errors={("capture", 4): error})
    found = world.measure()
    assert found.rows == ()
    assert found.problem == (
        "a step of 16 tokens could not be captured: CUDA error: operation not permitted when stream is capturing"
    )
    assert ("capture", 2) not in world.did
    assert found.paying_tokens == 0


def test_passes_that_do_not_fit_are_not_captured():
    found = GraphWorld(launched, computed, errors={("run", 4): full()}).measure()
    assert [row.tokens for row in found.rows] == [4, 8]
    nothing = GraphWorld(launched, computed, errors={("run", 1): full()}).measure()
    assert (nothing.rows, nothing.problem) == ((), "a step of 4 tokens does not fit cpu")


@pytest.mark.parametrize("what", ["run", "warm up", "replay"])
def test_any_other_error_of_the_device_is_a_finding(what):
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    found = GraphWorld(launched, computed, errors={(what, 1): error}).measure()
    assert found.rows == ()
    assert found.problem == (
        "the measurement ended with an error: CUDA error: an illegal memory access was encountered"
    )


def test_an_error_that_is_not_of_the_device_is_raised():
    with pytest.raises(KeyError):
        GraphWorld(launched, computed, errors={("run", 1): KeyError("a bug")}).measure()


def test_without_cuda_nothing_is_run():
    found = measure_graphs(DEVICE, GPU)
    assert (found.rows, found.problem) == ((), "CUDA graphs need a CUDA device, and torch sees none")


@pytest.mark.parametrize("noise", [0.02, 0.3, 2.0])
def test_what_is_said_of_graphs_holds_however_noisy_the_launches(noise):
    said = []
    for seed in range(5):
        random = np.random.default_rng(seed)
        # 10 s of launches, stretched now and then; up to 4 examples the gain is at least 1.25, from 8 on there is none.
        world = GraphWorld(
            lambda num, random=random: max(10.0 * (1 + noise * random.exponential()), 2.0 * num), lambda num: 2.0 * num
        )
        found = world.measure(graph_items=(1, 2, 4, 8, 16, 32), rounds=5)
        advice = {advice.topic: advice for advice in advise(replace(ON_H200, machine=H200, graphs=found))}["graphs"]
        if advice.code:
            said.append(found.paying_range)
        else:
            assert advice.text.startswith("Too busy to say for which steps CUDA graphs pay")
    # Launches that take longer only move the border up.
    assert all(16 <= low <= high <= 2 * low for low, high in said)
    if noise < 0.1:
        assert said == [(16, 16)] * 5


@pytest.mark.needs_cuda
def test_a_replayed_pass_gives_the_gradients_of_the_pass():
    device = torch.device("cuda")
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0, batch_first=True, device=device)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).train()
    effort = replace(GPU, width=64, num_layers=2, length=16, graph_items=(2, 8))
    steps = CudaSteps(model, effort, device)
    wanted = {}
    for num_items in (2, 8):
        steps.run((num_items, 16))
        wanted[num_items] = [parameter.grad.clone() for parameter in model.parameters()]
    steps.warm_up((2, 16))
    replays = {num_items: steps.capture((num_items, 16)) for num_items in (8, 2)}
    for num_items in (2, 8, 8, 2):
        replays[num_items]()
        torch.cuda.synchronize()
        for parameter, gradient in zip(model.parameters(), wanted[num_items], strict=True):
            assert (parameter.grad - gradient).norm() <= 1e-2 * gradient.norm()  # bfloat16 has 8 bits


@pytest.mark.needs_cuda
def test_a_pass_that_reads_a_value_cannot_be_captured_and_the_next_one_runs():
    class Reading(nn.Linear):
        def forward(self, x):
            return super().forward(x) * x.sum().item()

    device = torch.device("cuda")
    effort = replace(GPU, width=64, length=16, graph_items=(2, 8), rounds=2)
    before = torch.cuda.current_stream()
    found = measure_graphs(device, effort, make_steps=lambda: CudaSteps(Reading(64, 64).to(device), effort, device))
    assert found.rows == ()
    assert found.problem.startswith("a step of 128 tokens could not be captured: ")
    assert torch.cuda.current_stream() == before
    assert torch.ones(2, device=device).sum().item() == 2


@pytest.mark.needs_cuda
def test_a_gpu_says_what_its_graphs_save():
    effort = replace(GPU, width=256, num_layers=4, rounds=3, graph_items=(2, 16, 128))
    found = measure_graphs(torch.device("cuda"), effort)
    assert found.problem == ""
    assert [row.tokens for row in found.rows] == [128, 1024, 8192]
    assert all(row.replay_seconds > 0 and row.eager_seconds > 0 for row in found.rows)
    assert len(found.rounds) == 3
    # Launches bind a step of 128 tokens on every GPU.
    assert found.rows[0].gain > 1


@pytest.mark.needs_cuda
def test_a_gpu_says_what_graphs_save_of_encoding():
    effort = replace(GPU, width=256, num_layers=4, rounds=3, graph_items=(2, 16, 128))
    device = torch.device("cuda")
    found = measure_graphs(device, effort, make_steps=lambda: encoding(device, effort))
    assert (found.problem, len(found.rounds)) == ("", 3)
    assert [row.tokens for row in found.rows] == [128, 1024, 8192]
    assert found.rows[0].gain > 1


@torch.no_grad()
def test_a_step_of_decoding_reads_the_keys_of_the_rows_before():
    effort = replace(GPU, width=128, num_layers=2).of_decoding()
    assert (effort.length, effort.graph_items) == (1, (16, 64, 256, 1024))
    torch.manual_seed(0)
    model = Decoding(effort, 4)
    x = torch.randn(3, 1, 128)
    first = model(x)
    assert first.shape == (3, 1, 128)
    assert torch.equal(model(x), first)  # its own key is written over, so a step can be repeated
    model.keys[:, :, :, :-1] = 3.0
    assert not torch.equal(model(x), first)


def test_where_no_graphs_are_measured_none_of_decoding_are():
    assert replace(GPU, graph_items=()).of_decoding().graph_items == ()


@pytest.mark.needs_cuda
def test_a_gpu_says_what_graphs_save_of_decoding():
    device, effort = torch.device("cuda"), replace(GPU, width=256, num_layers=4, rounds=3).of_decoding()
    found = measure_graphs(device, effort, make_steps=lambda: decoding(device, effort))
    assert (found.problem, len(found.rounds)) == ("", 3)
    assert [row.tokens for row in found.rows] == [16, 64, 256, 1024]
    assert found.rows[0].gain > 1
