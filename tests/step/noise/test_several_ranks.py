"""Noise from vectors in several processes: the program is in ranks.py."""

from ...processes import run_ranks


def test_ranks_with_uneven_shares_measure_what_one_process_would_and_refuse_alike(tmp_path):
    outputs = run_ranks("tests.step.noise.ranks", 2, tmp_path / "store")
    for output in outputs:
        assert "5 and 7: as one process" in output
        assert "1 and 7: as one process" in output
        assert "4 and 4: as one process" in output
        assert "refused: noise_from='vectors' cannot be measured in this model" in output
        assert "norm.bias was measured before, but now its output" in output
        for noise_from in ("all", "vectors"):
            assert f"{noise_from}: measure_noise needs whole gradients, but every rank holds a part of 1." in output
