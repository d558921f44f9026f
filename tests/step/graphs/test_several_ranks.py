"""Graphed steps on several ranks: the program is in ranks.py."""

import pytest

from ...processes import run_ranks


@pytest.mark.parametrize("kind", ["tape", pytest.param("cuda", marks=pytest.mark.needs_cuda)])
def test_two_ranks_with_graphs_train_as_one_process_without(kind, tmp_path):
    run_ranks("tests.step.graphs.ranks", 2, tmp_path / "store", kind)
