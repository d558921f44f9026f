"""``prepare`` with graphs keeps what the guide says about ``"auto"`` and about the number of shapes."""

import numpy as np
import pytest
from accelerate.state import AcceleratorState, GradientState

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.testing import EagerGraphs

from .test_graphs import prepared, train


@pytest.fixture(autouse=True)
def _forget_the_accelerator():
    yield
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def test_auto_on_a_cpu_warns_once():
    # Expected: docs/trainers.md: '"auto" runs eagerly and warns once: everywhere: a model that is not on a CUDA
    # device'. Found: no warning.
    with pytest.warns(UserWarning, match="CUDA"):
        train("auto", 1)


def test_more_than_64_shapes_are_refused_where_shapes_are_given():
    # Expected: docs/trainers.md: "more than 64 are refused", "everywhere". Found: with shapes= nothing is counted.
    lengths = np.random.default_rng(0).integers(2, 200, size=400)
    many = bw.BatchSampler(lengths, bw.MaxTokens(300))
    with pytest.raises(ArgumentError, match="shapes"):
        prepared(EagerGraphs(), shapes=many)
