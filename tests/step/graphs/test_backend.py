"""Backends: which one a choice means, and what every backend promises."""

import pytest
import torch

from batchwright.errors import ArgumentError
from batchwright.step.graphs import CudaGraphs, GraphBackend
from batchwright.step.graphs.backend import make_backend
from batchwright.testing import EagerGraphs

from .tape import TapeGraphs

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BACKENDS = [
    pytest.param(EagerGraphs, "cpu", id="again"),
    pytest.param(TapeGraphs, "cpu", id="tape"),
    pytest.param(lambda: CudaGraphs(CUDA), "cuda", id="cuda", marks=pytest.mark.needs_cuda),
]


def test_true_and_auto_mean_cuda_graphs_on_cuda():
    assert isinstance(make_backend(True, CUDA), CudaGraphs)
    assert isinstance(make_backend("auto", CUDA), CudaGraphs)


def test_auto_finds_nothing_elsewhere_and_true_is_refused():
    assert make_backend("auto", CPU) is None
    with pytest.raises(ArgumentError, match=r"needs a model on a CUDA device, but it lies on cpu; move the model"):
        make_backend(True, CPU)


def test_a_backend_is_taken_as_it_is():
    backend = EagerGraphs()
    assert make_backend(backend, CPU) is backend


@pytest.mark.parametrize("choice", ["Auto", "yes", 1, 0, None, [], EagerGraphs, CudaGraphs], ids=repr)
def test_any_other_choice_is_refused(choice):
    with pytest.raises(ArgumentError, match="graphs must be False, 'auto' or True, got"):
        make_backend(choice, CPU)


@pytest.mark.parametrize(("make", "device"), BACKENDS)
def test_a_capture_changes_nothing_and_a_replay_computes_on_the_values_of_now(make, device):
    backend = make()
    assert isinstance(backend, GraphBackend)
    x, total = torch.ones(3, device=device), torch.zeros(3, device=device)
    replay = backend.capture(lambda: total.add_(x * 2), writes=[total])
    assert total.tolist() == [0, 0, 0]
    replay()
    x.fill_(5)
    replay()
    assert total.tolist() == [12, 12, 12]


@pytest.mark.parametrize(("make", "device"), BACKENDS)
def test_a_capture_that_fails_changes_nothing_and_others_go_on(make, device):
    backend = make()
    total = torch.zeros(2, device=device)

    def fail():
        total.add_(1)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        backend.capture(fail, writes=[total])
    assert total.tolist() == [0, 0]
    backend.capture(lambda: total.add_(1), writes=[total])()
    assert total.tolist() == [1, 1]


@pytest.mark.parametrize(("make", "device"), BACKENDS)
def test_time_goes_on_and_only_counts_on_the_device_can_be_captured(make, device):
    backend = make()
    assert backend.seconds() <= backend.seconds()
    assert backend.can_capture_update({"fused": True})
    assert not backend.can_capture_update({"fused": None, "capturable": False})
    assert not backend.can_capture_update({})
    backend.prepare()
    backend.release()
