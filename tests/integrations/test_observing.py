"""Which figures a policy reads, and what a decision looks like as a line."""

from types import SimpleNamespace

import pytest
import torch

import batchwright as bw
from batchwright import size
from batchwright.errors import MissingSignalError
from batchwright.integrations._observing import monitor_for, observe, reads, with_memory
from batchwright.size import Observation, Policy
from batchwright.step import MemoryMonitor
from batchwright.testing import FakeMemory

ENTROPY = size.entropy_driven(10, smallest=2, largest=8)


class Own(Policy):
    """A policy of a user, which holds another one and says what it needs."""

    needs = ("entropy",)

    def __init__(self, inner=None):
        self.inner = inner

    def init(self):
        return None

    def update(self, state, observation: Observation):
        return 4.0, state


@pytest.mark.parametrize(
    ("policy", "entropy", "memory"),
    [
        (size.constant(4), False, False),
        (ENTROPY, True, False),
        (size.memory_driven(), False, True),
        (size.chain(ENTROPY, size.multiple_of(2)), True, False),
        (size.maximum(size.constant(4), size.memory_driven()), False, True),
        (size.minimum(size.memory_driven(per="epoch"), size.speed_driven()), False, True),
        (size.switch({0: size.constant(4), 3: ENTROPY}), True, False),
        (size.cyclic(size.chain(size.memory_driven(), size.smooth(0.5)), 4), False, True),
        (size.track(lambda o: 4), False, False),
        (size.track(lambda o: 4, needs=["entropy", "memory_fraction"]), True, True),
        (Own(), True, False),
        (Own(size.memory_driven()), True, True),
    ],
    ids=[
        *("constant", "entropy", "memory", "chain", "maximum", "minimum"),
        *("switch", "cyclic", "track", "needs", "own", "nested"),
    ],
)
def test_what_a_policy_reads_is_found_in_its_parts(policy, entropy, memory):
    controller = SimpleNamespace(policy=policy)
    assert reads(controller, "entropy") == entropy
    assert reads(controller, "memory_fraction") == memory
    assert (monitor_for(controller, "cpu") is not None) == memory


def test_a_controller_without_a_policy_reads_nothing():
    assert not reads(SimpleNamespace(size=4), "entropy")
    assert not reads(None, "entropy")


def test_a_monitor_that_is_given_stays():
    controller = SimpleNamespace(policy=size.memory_driven())
    given = MemoryMonitor(source=FakeMemory(1000))
    assert with_memory({"memory": given}, controller, "cpu") == {"memory": given}
    assert list(with_memory({}, SimpleNamespace(policy=size.constant(4)), "cpu")) == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_monitor_is_that_of_the_device():
    assert "CudaMemory" in repr(monitor_for(SimpleNamespace(policy=size.memory_driven()), torch.device("cuda")))


def test_a_change_tells_step_examples_sizes_and_reason():
    controller = bw.BatchSizeController(size.linear(4, 2, per="step"), min_size=4, max_size=8)
    change = observe(controller, batch_size=4)
    assert change.line == "Batch size: step 1, examples 4: 4 -> 6 (linear: 4 + 2 \xd7 1 = 6 at step 1)"
    assert change.figures() == {"batch_size_old": 4, "batch_size_new": 6, "examples": 4}
    observe(controller, batch_size=6)
    assert observe(controller, batch_size=8) is None  # held at 8


def test_a_controller_that_keeps_no_history_is_still_told_with_its_reason():
    policy = size.linear(4, 2, per="step")
    controller = bw.BatchSizeController(policy, min_size=4, max_size=8, max_history=0)
    change = observe(controller, step=1, examples=4)
    assert change.line == "Batch size: step 1, examples 4: 4 -> 6 (linear: 4 + 2 \xd7 1 = 6 at step 1)"


def test_a_controller_of_ones_own_needs_neither_history_nor_reasons():
    class Doubling:
        size = 2

        def observe(self, **figures):
            self.size *= 2
            return self.size

    assert observe(Doubling(), step=3).line == "Batch size: step 3: 2 -> 4 (Doubling says no reason)"


def test_a_missing_figure_is_told_in_the_words_of_the_framework():
    controller = bw.BatchSizeController(size.noise_driven(), min_size=4, max_size=8)
    with pytest.raises(MissingSignalError, match="measure_noise=True; here, say it to the trainer"):
        observe(controller, hints={"noise": "say it to the trainer"}, batch_size=4)
    with pytest.raises(MissingSignalError, match=r"measure_noise=True$"):
        observe(controller, batch_size=4)
