"""What differs between ranks, or fails on one of them: exact on all ranks, or an error on all; see rank_cases.py."""

import inspect

import pytest
from torch.distributed.fsdp import FSDPModule

from ...processes import run_ranks
from .rank_cases import CASES

# Before torch 2.11 models of FSDP2 are refused, whatever else a case has.
HAS_FSDP2 = hasattr(FSDPModule, "set_gradient_divide_factor")
NAMES = [name for name, case in CASES.items() if HAS_FSDP2 or "shard" not in inspect.getsource(case)]


@pytest.mark.parametrize("part", range(3))
def test_all_ranks_are_exact_or_all_raise(part, tmp_path):
    run_ranks("tests.step.exactness.rank_cases", 2, tmp_path / "store", *NAMES[part::3])
