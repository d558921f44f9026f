"""Loss against seconds: diverged runs, curves of several seeds, resumed commands and wrong arguments."""

import importlib
import json
import math
import sys
from argparse import Namespace
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
NAN = float("nan")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


def row(arm, lr, seed, curve, **more):
    found = {"task": "translation", "arm": arm, "lr": lr, "seed": seed, "curve": curve, "loss": curve[-1][1]}
    figures = {"command": "c", "tokens_per_second": 10.0, "updates": 3, "padding": 0.1, "shapes": 2, "seconds": 28.0}
    return {**found, **figures, **more}


# Figures


def test_a_learning_rate_at_which_an_arm_diverged_is_not_its_best(script):
    # Expected: 5e-4 with a loss of 3. Found: min() keeps a NaN that comes first, so the diverged rate "wins": the arm
    # counts with a loss of nan, its seeds run at that rate, and as the only peer it leaves "s to best peer" empty.
    results = script("quality.results")
    rows = [row("fixed-16", 1e-3, 0, [(0.0, 9.0), (28.0, NAN)]), row("fixed-16", 5e-4, 0, [(0.0, 9.0), (28.0, 3.0)])]
    assert results.best_rate(rows, "translation", "fixed-16") == 5e-4
    (found,) = results.summarize(rows, "translation")
    assert found["loss"] == 3.0


def test_a_diverged_arm_is_last_and_the_plot_is_drawn(script, tmp_path):
    # Expected: a table from the best to the worst, and a plot of what can be drawn. Found: ValueError: cannot convert
    # float NaN to integer, after all runs; the arm without a loss stands first.
    rows = [row("fixed-16", 1e-3, 0, [(0.0, 9.0), (28.0, NAN)]), row("grouped-8", 1e-3, 0, [(0.0, 9.0), (28.0, 3.0)])]
    found = script("quality.results").summarize(rows, "translation")
    assert [one["arm"] for one in found] == ["grouped-8", "fixed-16"]
    script("gpu_quality").report(rows, ["translation"], tmp_path / "q.svg")


def test_seeds_whose_capture_passed_other_marks_have_the_mean_of_equal_times(script):
    # Capture takes longer than the first marks, in one seed longer than in the other, so one curve lacks a point.
    # Expected: the mean curve ends at 28 s with the mean loss of 2.0, and passes 5.0 between 9.25 and 9.55 s, as both
    # do. Found: points are paired by their number: the curve ends at (15.5 s, 4.0) and passes 5.0 at 11.25 s.
    rows = [
        row("graphs-16-8192", 1e-3, 0, [(0.0, 9.0), (2.1, 8.0), (3.0, 6.0), (28.0, 2.0)]),
        row("graphs-16-8192", 1e-3, 1, [(0.0, 9.0), (3.4, 6.0), (28.0, 2.0)]),
        row("fixed-16", 1e-3, 0, [(0.0, 9.0), (28.0, 5.0)]),
    ]
    best, _ = script("quality.results").summarize(rows, "translation")
    assert best["curve"][-1] == (28.0, 2.0)
    assert 9.25 <= best["to_peer"] <= 9.55


def test_the_time_of_the_best_peer_is_that_of_its_whole_run(script):
    # Expected: its 28 s divided by the 7 s in which the other has its loss: 4. Found: the mean curve of a peer with
    # curves of 3 and 2 points ends at 16 s, and the ratio is 2.3.
    rows = [
        row("dynabatch-16", 1e-3, 0, [(0.0, 9.0), (4.0, 8.0), (28.0, 5.0)]),
        row("dynabatch-16", 1e-3, 1, [(0.0, 9.0), (28.0, 5.0)]),
        row("graphs-16-8192", 1e-3, 0, [(0.0, 9.0), (7.0, 5.0), (28.0, 2.0)]),
    ]
    best, _ = script("quality.results").summarize(rows, "translation")
    assert best["times_peer"] == pytest.approx(4.0)


def test_every_arm_has_the_same_grid_of_rates(script):
    # Expected: the docstring: "every arm has the same grid of rates, and counts at its best one"; the note in the plot
    # says the same. Found: arms of torch.compile run at the first rate only, and never with several seeds.
    options = Namespace(
        arms="graphs-16-8192,compile_dynamic-16-8192", lrs="1e-3,5e-4", seeds="0", leading=None, control="none"
    )
    units = [unit for unit, _ in script("gpu_quality").units(options, "translation", [])]
    rates = {arm: {unit.lr for unit in units if unit.arm == arm} for arm in options.arms.split(",")}
    assert rates["compile_dynamic-16-8192"] == rates["graphs-16-8192"]


# Resuming


@pytest.fixture
def run_script(script, monkeypatch, capsys):
    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["gpu_quality", *map(str, arguments)])
        script("gpu_quality").main()
        return capsys.readouterr().out

    return run


def test_runs_of_other_seconds_are_not_taken_for_finished(run_script, tmp_path):
    # Expected: "the same seconds for every arm": the run is made again at its new length, or the file is refused.
    # Found: a run of 0.02 s counts as the finished run of 0.1 s, and stands beside the others in one table. A file of
    # --smoke is taken for results of the real data in the same way.
    path = tmp_path / "q.json"
    try:
        run_script("--smoke", "--arms", "fixed-4", "--seconds", 0.02, "--output", path)
        run_script("--smoke", "--arms", "fixed-4,grouped-8", "--seconds", 0.1, "--output", path)
    except SystemExit:
        return
    report = json.loads(path.read_text())
    seconds_of = {command["id"]: command["seconds_a_run"] for command in report["commands"]}
    newest = {row["arm"]: seconds_of[row["command"]] for row in report["rows"]}
    assert newest == {"fixed-4": 0.1, "grouped-8": 0.1}


def test_a_command_that_is_killed_while_it_writes_loses_no_finished_run(script, monkeypatch, tmp_path):
    # Expected: "Finished runs are kept in --output after each of them"; commands are killed after 600 s. Found: the
    # file is written in place, so it is cut, and the next command ends with a JSONDecodeError: all runs are lost.
    gpu, path = script("_gpu"), tmp_path / "q.json"
    gpu.write(path, {"commands": [], "rows": [{"arm": "fixed-4"}]})
    write_text = Path.write_text

    def killed(self, text, *args, **kwargs):
        write_text(self, text[: len(text) // 2], *args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        gpu.write(path, {"commands": [], "rows": [{"arm": "fixed-4"}, {"arm": "grouped-8"}]})
    assert json.loads(path.read_text())["rows"]


# Wrong arguments


def test_results_to_resume_that_do_not_exist_are_named(run_script, tmp_path):
    # Expected: a refusal. Found: a wrong name after --resume is passed over, and everything runs again.
    with pytest.raises(SystemExit, match=r"typo\.json"):
        run_script("--smoke", "--arms", "fixed-4", "--resume", tmp_path / "typo.json")


def test_a_plot_without_any_run_is_refused_in_a_sentence(run_script, tmp_path):
    # Expected: the table, or one sentence. Found: ValueError: max() iterable argument is empty, out of report; the same
    # for --report of another task, and where every run has failed.
    run_script("--smoke", "--arms", "fixed-4", "--budget-seconds", 1, "--plot", tmp_path / "q.svg")


def test_results_to_report_that_do_not_exist_are_named(run_script, tmp_path):
    # Expected: one sentence. Found: a traceback with FileNotFoundError.
    with pytest.raises(SystemExit, match=r"typo\.json"):
        run_script("--report", tmp_path / "typo.json")


@pytest.mark.parametrize(
    "curve", [[(0.0, 9.0), (300.0, 3.0), (600.0, 2.4)], [(0.0, 9.0), (1.0, 2.0), (2.0, 2.0)]], ids=["long", "even"]
)
def test_a_chart_of_long_runs_or_of_one_loss_is_drawn(script, tmp_path, curve):
    # Expected: a chart. Found: StopIteration for runs of more than 540 s, as no step of the axis is larger than 60; and
    # ZeroDivisionError where all losses are the same multiple of a half.
    script("quality.chart").draw(tmp_path / "c.svg", [("fixed-16", curve, "peer")], title="t", note="n")
    assert (tmp_path / "c.svg").exists()


def test_ratios_are_added_where_no_dense_shape_fits(script):
    # Expected: a table without ratios to the limit. Found: KeyError: 'tokens_per_second' after all arms have run.
    limit = {"arm": "limit: no padding, best dense shape", "padding": 0.0, "steady_per_second": 0.0}
    arm = {"arm": "fixed 10, shuffled", "steady_per_second": 2.0, "tokens_per_second": 5.0}
    script("gpu_training").add_ratios([arm, limit])
    assert math.isclose(arm["to_fixed"], 1.0)
