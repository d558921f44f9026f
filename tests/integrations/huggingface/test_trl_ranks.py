"""Trainers of TRL and of sentence-transformers, and packed rows, on two ranks."""

import pytest

from ...processes import run_ranks

pytest.importorskip("trl", reason="trl is not installed; it is in the group dev")
pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed; it is in the group dev")


def test_two_ranks_train_as_one_would(tmp_path):
    outputs = run_ranks("tests.integrations.huggingface.trl_ranks", 2, tmp_path)
    assert all(output.count("updates exact") == 16 for output in outputs)
