"""How many runs a plan has and about how long they take, before the first one."""

import json

import pytest

from batchwright.errors import ArgumentError, StateMismatchError
from batchwright.lab.runner import Cell, Lab, LabPlan
from batchwright.lab.runner.forecast import Forecast

WINE = Cell(dataset="wine", model="logistic", num_epochs=2)
PLAN = LabPlan(name="tiny", cells=(WINE,), strategies=("constant", "linear"), seeds=(0, 1, 2), tuning_rounds=0)


def test_runs_are_counted_without_writing_anything(tmp_path):
    found = Lab(tmp_path / "lab").forecast(PLAN, num_workers=2)
    # 2 strategies, 4 rates, 2 seeds; then 3 seeds.
    assert (found.num_tuning_runs, found.num_runs, found.num_workers) == (16, 6, 2)
    assert found.seconds > 0
    assert not (tmp_path / "lab").exists()


def test_only_runs_that_are_left_are_counted(tmp_path):
    lab = Lab(tmp_path)
    records = lab.run(PLAN, num_workers=0, progress=False)
    done = lab.forecast(num_workers=0)
    assert (done.num_tuning_runs, done.num_runs, done.seconds, str(done)) == (0, 0, 0, "every run is recorded already")
    lines = (tmp_path / "runs.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "runs.jsonl").write_text("".join(lines[:4]))
    assert lab.forecast(PLAN).num_runs == len(records) - 4


def test_the_forecast_counts_what_the_lab_runs(tmp_path):
    names = ("constant", "entropy", "cyclic_linear", "linear", "replay_linear")
    cells = (WINE, Cell(dataset="diabetes", model="linear", num_epochs=2, lr=0.01))
    plan = LabPlan(name="tiny", cells=cells, strategies=names, seeds=(0, 1), tuning_rounds=1, tuning_seeds=(7,))
    found = Lab(tmp_path).forecast(plan)
    # Cycles need more epochs, and entropy needs classes.
    assert (found.num_tuning_runs, found.num_runs) == (4 * 6, 2 * (4 + 3))
    assert len(Lab(tmp_path).run(plan, num_workers=0, progress=False)) == found.num_runs
    assert len((tmp_path / "tuning.jsonl").read_text().splitlines()) == found.num_tuning_runs


def test_another_plan_is_refused_before_a_trial(tmp_path):
    Lab(tmp_path).run(PLAN, num_workers=0, progress=False)
    with pytest.raises(StateMismatchError, match="choose another folder"):
        Lab(tmp_path).forecast("quick")
    with pytest.raises(ArgumentError, match="has no plan to continue"):
        Lab(tmp_path / "empty").forecast()


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ((98, 35, 61.0, 2), "98 runs to choose learning rates, then 35 to compare: about 1 minute with 2 processes"),
        ((0, 1200, 2401.0, 1), "1,200 runs to compare: about 41 minutes with 1 process"),
        ((0, 4, 3.0, 0), "4 runs to compare: less than a minute with 1 process"),
    ],
)
def test_a_forecast_in_words(figures, words):
    names = ("num_tuning_runs", "num_runs", "seconds", "num_workers")
    assert str(Forecast(**dict(zip(names, figures, strict=True)))) == words


def test_failed_runs_that_are_to_be_repeated_are_counted(tmp_path):
    lab = Lab(tmp_path)
    lab.run(PLAN, num_workers=0, progress=False)
    lines = (tmp_path / "runs.jsonl").read_text().splitlines()
    lines[0] = json.dumps(json.loads(lines[0]) | {"status": "failed", "error": "out of memory", "final": None})
    (tmp_path / "runs.jsonl").write_text("\n".join(lines) + "\n")
    assert lab.forecast().num_runs == 0
    assert lab.forecast(retry_failed=True).num_runs == 1
