"""Kernels that give the same bits twice, where CUDA has them: the tests compare two runs to seven digits."""

import pytest
import torch


@pytest.fixture(autouse=True)
def exact_kernels():
    cudnn = torch.backends.cudnn
    before = cudnn.deterministic, cudnn.allow_tf32
    cudnn.deterministic, cudnn.allow_tf32 = True, False
    yield
    cudnn.deterministic, cudnn.allow_tf32 = before
