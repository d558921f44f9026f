"""What differs between ranks, or fails on one of them: exact on all ranks, or an error on all; see rank_cases.py."""

import pytest

from ...processes import run_ranks
from .rank_cases import CASES


@pytest.mark.parametrize("part", range(3))
def test_all_ranks_are_exact_or_all_raise(part, tmp_path):
    run_ranks("tests.step.exactness.rank_cases", 2, tmp_path / "store", *list(CASES)[part::3])
