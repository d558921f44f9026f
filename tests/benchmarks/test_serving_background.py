"""The benchmark of offline work beside requests: pairs of the same requests, on the same machine."""

import json
import sys

import numpy as np
import pytest


@pytest.fixture
def simulation(script):
    return script("serving_background_simulation")


def test_a_call_takes_as_long_as_the_machine_is_slow(simulation):
    machine = simulation.Machine("none", 1.0, seed=1)
    assert machine.end(0.01, 0.1) == pytest.approx(0.11)
    machine._factors[:4] = [1.0, 3.0, 3.0, 1.0]  # of 25 ms each
    # 15 ms of work until 25 ms, 2 × 8.33 until 75 ms, and the other 8.33 after it.
    assert machine.end(0.01, 0.04) == pytest.approx(0.075 + 0.04 - 0.015 - 0.05 / 3)


def test_both_arms_see_the_same_machine(simulation):
    one, other = (simulation.Machine("measured", 5.0, seed=3) for _ in range(2))
    assert one._factors == other._factors
    assert one._factors != simulation.Machine("measured", 5.0, seed=4)._factors


def test_the_noise_has_the_quantiles_that_were_measured(simulation):
    factors = np.array(simulation.Machine("measured", 4000.0, seed=1)._factors)
    found = np.quantile(factors, [0.1, 0.5, 0.9, 0.95])
    assert found == pytest.approx([0.894, 0.971, 1.428, 1.685], rel=0.08)


def test_a_short_simulation_tells_what_offline_work_adds_and_gains(simulation, monkeypatch, tmp_path):
    output = tmp_path / "out.json"
    for label in ("one", "other", "one"):
        monkeypatch.setattr(sys, "argv", ["simulation", "--smoke", "--label", label, "--output", str(output)])
        simulation.main()
    rows = json.loads(output.read_text())["rows"]
    assert [row["label"] for row in rows] == ["other", "one"]  # each label once
    (first,) = rows[0]["rounds"]
    assert rows[0]["rounds"] == rows[1]["rounds"]  # no clock but the simulated one
    assert first["num_requests"] > 300
    assert first["added_points"] == pytest.approx(
        100 * (first["only_beside"] - first["only_alone"]) / first["num_requests"]
    )
    assert 0.3 < first["share"] < 1.2
    assert first["waits"]["part_ms"] > 0


def test_misses_are_compared_request_by_request(simulation):
    benchmark = pytest.importorskip("serving_background")
    load = benchmark.Load("few", np.array([1.0, 11.0, 12.0, 13.0, 14.0]), np.full(5, 32))
    arm = {"busy": 0.2, "offline_tokens_per_s": 400.0, "p99_ms": 1.0}
    late = {"live only": [True, True, False, False, False], "both": [False, False, True, True, False]}
    row = benchmark.compare(load, {name: {**arm, "late": late[name]} for name in late}, alone=1000.0)
    assert (row["num_requests"], row["only_beside"], row["only_alone"]) == (4, 2, 1)  # the first is of the warm-up
    assert row["added_points"] == pytest.approx(25.0)
    assert row["share"] == pytest.approx(0.5)
    added, error = benchmark._pooled_added([row])
    assert (added, error) == (pytest.approx(25.0), pytest.approx(100 * (3 - 1 / 4) ** 0.5 / 4))
