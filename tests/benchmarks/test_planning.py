"""The planning benchmark itself, in small: arms in turn, medians with their spread, two axes, a run broken off."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from batchwright._optional import is_installed

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "planning.py"


def bench(folder, *options):
    """Run the benchmark; return its result, the table and what it said."""
    output = folder / "planning.json"
    command = [sys.executable, str(SCRIPT), "--num-examples", "1500", "--output", str(output), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text()), done.stdout, done.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    arms = "random,lhotse,window-sort,buckets-64"
    return bench(tmp_path_factory.mktemp("bench"), "--arms", arms, "--distributions", "ones,pairs,few")


@pytest.mark.parametrize(
    ("options", "file"),
    [([], "benchmarks/results/planning.json"), (["--quick"], "build/planning_quick.json"), (["--output", "a"], "a")],
)
def test_a_smoke_test_leaves_the_results_alone_that_the_documents_are_written_from(script, monkeypatch, options, file):
    monkeypatch.setattr(sys, "argv", ["planning.py", *options])
    assert script("planning")._options().output.endswith(file)


def rows_of(result, distribution):
    return {row["arm"]: row for row in result["rows"] if row["distribution"] == distribution}


def test_every_arm_is_timed_five_times_in_turn(run):
    rows = rows_of(run[0], "ones")
    assert list(rows) == ["random", "window-sort", "buckets-64"]
    turns = sorted((began, arm) for arm, row in rows.items() for began in row["turns_began"])
    assert [arm for _, arm in turns] == ["random", "window-sort", "buckets-64"] * 5


def test_a_ratio_is_the_median_of_those_within_a_turn(run):
    row = rows_of(run[0], "few")["window-sort"]
    ratios = sorted(p / a for p, a in zip(row["plan_seconds_all"], row["argsort_seconds_all"], strict=True))
    found = [row[f"argsort_ratio{end}"] for end in ("_min", "", "_max")]
    assert found == pytest.approx([ratios[0], ratios[2], ratios[4]])


def test_batches_of_one_hold_one(run):
    assert {row["batches"] for row in rows_of(run[0], "ones").values()} == {1500}


def test_two_axes_have_rows_within_the_budget(run):
    rows = rows_of(run[0], "pairs")
    assert list(rows) == ["window-sort", "buckets-64"]
    assert all(row["largest"] <= 1 and row["missing"] == row["repeated"] == 0 for row in rows.values())


def test_the_table_shows_the_spread(run):
    row = rows_of(run[0], "pairs")["buckets-64"]
    low, middle, high = (format(row[f"argsort_ratio{end}"], ".1f") for end in ("_min", "", "_max"))
    if row["argsort_ratio"] < 100:
        assert f"| {middle} ({low} to {high}) |" in run[1]
    assert "### Two axes: pairs of short texts; budget 16,384, 1,500 examples" in run[1]


@pytest.mark.skipif(is_installed("lhotse"), reason="shows what is said where it is absent")
def test_a_peer_that_is_not_there_gives_a_row_that_says_so(tmp_path):
    result, table, _ = bench(tmp_path, "--arms", "lhotse,random", "--distributions", "short", "--repeats", "1")
    assert rows_of(result, "short")["lhotse"]["error"] == "lhotse is not installed"
    assert "did not run: lhotse is not installed" in table


def test_a_run_that_was_broken_off_goes_on(tmp_path):
    options = ("--arms", "random", "--distributions", "ones,few", "--repeats", "1")
    result, _, _ = bench(tmp_path, *options)
    (kept,) = rows_of(result, "ones").values()
    # As if it had ended after the first distribution.
    key = {"num_examples": 1500, "repeats": 1, "arms": ["random"], "distributions": ["ones", "few"]}
    key |= {name: result[name] for name in ("commit", "cpu", "versions")}
    env = {name: value for name, value in result.items() if name not in ("rows", "repeats")}
    partial = tmp_path / "planning.partial.json"
    state = {"key": key, "env": env, "blocks": {"ones 1500": [kept]}}
    partial.write_text(json.dumps(state))
    again, _, said = bench(tmp_path, *options)
    assert "continue after ones 1500" in said
    assert list(rows_of(again, "ones").values()) == [kept]
    assert rows_of(again, "few")["random"]["turns_began"] != rows_of(result, "few")["random"]["turns_began"]
    assert not partial.exists()
    # Of another commit, or when told so, it begins anew.
    for change, more in (({"commit": "another"}, ()), ({}, ("--fresh",))):
        partial.write_text(json.dumps({**state, "key": {**key, **change}}))
        anew, _, said = bench(tmp_path, *options, *more)
        assert "continue" not in said
        assert list(rows_of(anew, "ones").values()) != [kept]
