"""A lab in its folder: resume, failures, dead processes, full disks, replays, learning rates."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from batchwright._files import write_atomic
from batchwright.errors import ArgumentError, StateMismatchError
from batchwright.lab import presets
from batchwright.lab._records import RunStore, finite, read_records
from batchwright.lab.datasets import load
from batchwright.lab.report import read_lab, write_report
from batchwright.lab.report.folder import progress_of
from batchwright.lab.runner import Cell, Lab, LabPlan, StoreError, _training
from batchwright.lab.runner._choice import Choice
from batchwright.lab.runner._jobs import arms_of, plan_jobs
from batchwright.lab.runner._training import execute, load_data
from batchwright.lab.runner._workers import Workers
from batchwright.lab.strategies import GROUPS, get, names

EARLIER = Path(__file__).parents[1] / "data" / "earlier_labs" / "1"
WINE = Cell(dataset="wine", model="logistic", num_epochs=1, lr=0.01)
FREE = Cell(dataset="wine", model="mlp", num_epochs=1)
DIABETES = Cell(dataset="diabetes", model="linear", num_epochs=1, lr=0.01)


def plan(*cells, strategies=("constant", "linear"), seeds=(0, 1), **options):
    return LabPlan(name="tiny", cells=cells or (WINE,), strategies=strategies, seeds=seeds, **options)


def run(folder, given=None, **options):
    return Lab(folder).run(given, **{"num_workers": 0, "progress": False, **options})


def places(records):
    return [(record["strategy"], record["seed"]) for record in records]


def write_csv(path, num_rows, seed):
    rng = np.random.default_rng(seed)
    rows = [f"{a:.3f},{b:.3f},{i % 2}\n" for i, (a, b) in enumerate(rng.normal(size=(num_rows, 2)))]
    path.write_text("a,b,label\n" + "".join(rows))
    return path


def plan_of_file(path, **options):
    data = {"path": str(path), "target": "label"}
    return plan(Cell(dataset="mine", model="mlp", num_epochs=1, lr=0.01, data=data), **options)


def change_line(path, place, **fields):
    lines = path.read_text().splitlines()
    lines[place] = json.dumps(json.loads(lines[place]) | fields)
    path.write_text("\n".join(lines) + "\n")


def jobs_of(given, lr=0.01):
    datasets = [load_data(cell.dataset, cell.data) for cell in given.cells]
    return plan_jobs(given, datasets, {arm: Choice(lr=lr, losses={}) for arm in arms_of(given, datasets)})


def run_jobs(jobs, *, num_workers):
    with Workers(num_workers) as workers:
        yield from workers.run(jobs, finished={})


def record(name, **more):
    return {"id": name, "status": "ok", **more}


# The store


def test_records_come_back_in_the_order_they_were_written(tmp_path):
    with RunStore(tmp_path / "runs.jsonl") as store:
        store.append(record("b", seed=1))
        store.append(record("a", seed=2))
    with RunStore(tmp_path / "runs.jsonl") as store:
        assert list(store.records.values()) == [record("b", seed=1), record("a", seed=2)]


def test_a_half_line_is_dropped_and_the_next_record_is_whole(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_bytes(b'{"id":"a","status":"ok"}\n{"id":"b","sta')
    assert [found["id"] for found in read_records(path)] == ["a"]
    with RunStore(path) as store:
        assert list(store.records) == ["a"]
        store.append(record("c"))
    assert path.read_bytes() == b'{"id":"a","status":"ok"}\n{"id":"c","status":"ok"}\n'


def test_every_cut_of_a_file_can_be_opened_again(tmp_path):
    path = tmp_path / "runs.jsonl"
    whole = b'{"id":"a","status":"ok"}\n{"id":"b","status":"ok"}\n'
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        with RunStore(path) as store:
            assert list(store.records) == ["a", "b"][: whole[:length].count(b"\n")]
            store.append(record("c"))
        assert [found["id"] for found in read_records(path)][-1] == "c"


def test_a_damaged_line_is_left_out_with_a_warning(tmp_path):
    path = tmp_path / "runs.jsonl"
    path.write_bytes(b'{"id":"a","status":"ok"}\nrubbish\n{"id":"b","status":"ok"}\n[1]\n')
    with pytest.warns(UserWarning, match=r"runs.jsonl:[24] is not the record"), RunStore(path) as store:
        assert list(store.records) == ["a", "b"]


def test_a_second_writer_is_refused(tmp_path):
    path = tmp_path / "runs.jsonl"
    with RunStore(path), pytest.raises(StoreError, match="another process is writing"), RunStore(path):
        pass
    with RunStore(path):
        pass


def test_a_number_that_json_cannot_hold_is_not_written(tmp_path):
    path = tmp_path / "runs.jsonl"
    with RunStore(path) as store, pytest.raises(ValueError, match="JSON"):
        store.append(record("a", loss=float("nan")))
    assert path.read_bytes() == b""
    assert finite({"loss": float("inf"), "curve": [{"x": 1}]}) == {"loss": None, "curve": [{"x": 1}]}


FULL_DISK = """
import resource, sys
from pathlib import Path
from batchwright.errors import StoreError
from batchwright.lab._records import RunStore

resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))  # as a disk on which 100 bytes are left
with RunStore(Path(sys.argv[1])) as store:
    store.append({"id": "a", "status": "ok"})
    try:
        store.append({"id": "b", "status": "ok", "curve": "x" * 200})
    except StoreError as error:
        print(error)
    store.append({"id": "c", "status": "ok"})
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs a limit on the size of files")
def test_a_full_disk_says_so_and_loses_nothing(tmp_path):
    path = tmp_path / "runs.jsonl"
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=True)
    assert "the 1 runs before this one are kept" in done.stdout
    assert [found["id"] for found in read_records(path)] == ["a", "c"]


def test_a_folder_that_cannot_be_written_is_an_error_in_words(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="choose another"):
        run(tmp_path / "file", plan())
    with pytest.raises(StoreError, match="cannot write"):
        write_atomic(tmp_path / "missing" / "lab.json", "{}")


def test_a_file_is_replaced_whole_and_leaves_nothing_beside_it(tmp_path):
    for text in ("one", "two"):
        write_atomic(tmp_path / "lab.json", text)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("lab.json", "two")]


# The matrix


def test_a_plan_makes_every_strategy_in_every_cell_with_every_seed():
    jobs = jobs_of(plan(WINE, DIABETES, strategies=("constant", "entropy")))
    # Entropy is not for regression: 2 seeds × (2 constants + 1 entropy).
    assert [(job.seed, job.strategy, job.cell.dataset) for job in jobs] == [
        *[(0, "constant", "wine"), (0, "constant", "diabetes"), (0, "entropy", "wine")],
        *[(1, "constant", "wine"), (1, "constant", "diabetes"), (1, "entropy", "wine")],
    ]
    assert len({job.id for job in jobs}) == 6


def test_a_replay_follows_the_run_of_another_seed():
    jobs = jobs_of(plan(strategies=("constant", "noise", "replay_noise"), seeds=(3, 5, 9)))
    by_id = {job.id: job for job in jobs}
    replays = [job for job in jobs if job.strategy == "replay_noise"]
    assert [(job.seed, by_id[job.after].seed) for job in replays] == [(3, 5), (5, 9), (9, 3)]
    assert {by_id[job.after].strategy for job in replays} == {"noise"}
    assert replays[0].notes["replays"] == {"strategy": "noise", "seed": 5, "id": replays[0].after}


def test_one_seed_has_nothing_to_replay():
    jobs = jobs_of(plan(strategies=("constant", "noise", "replay_noise"), seeds=(0,)))
    assert [job.strategy for job in jobs] == ["constant", "noise"]


def test_a_plan_survives_json():
    given = plan(Cell(dataset="digits", model="cnn", num_epochs=4, options={"decay_at": (0.25, 0.5)}), seeds=(0,))
    back = LabPlan.from_dict(json.loads(json.dumps(given.to_dict())))
    digits = load("digits", limit=300)
    assert back.cells[0].settings(digits) == given.cells[0].settings(digits)
    assert LabPlan.from_dict(back.to_dict()) == back


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"strategies": ("linear",)}, "need constant as well"),
        ({"strategies": ("constant", "replay_noise")}, "need noise as well"),
        ({"strategies": ("constant", "constant")}, "constant more than once"),
        ({"seeds": ()}, "seeds of a plan must not be empty"),
        ({"seeds": 3}, "seeds must be a list of numbers, got 3"),
        ({"seeds": "3"}, "seeds must be a list of numbers, got '3'"),
        ({"tuning_seeds": (1.5,)}, "tuning_seeds must be a whole number of 0 or more, got 1.5"),
        ({"grids": {"sgd": 0.1}}, r"grids\['sgd'\] must be a list of numbers, got 0.1"),
        ({"grids": {"sgd": (0,)}}, r"grids\['sgd'\] must be a number above 0, got 0"),
        ({"seeds": (0, 1000)}, "seeds and tuning_seeds must differ"),
        ({"strategies": ("constant", "magic")}, "no strategy 'magic'"),
        ({"tuning_seeds": (1000, 1000)}, "the tuning_seeds of a plan must differ, got 1000 more than once"),
        ({"tuning_rounds": -1}, "tuning_rounds must be a whole number of 0 or more, got -1"),
        ({"grids": {"sgd": (0.1, 0.1)}}, r"the grids\['sgd'\] of a plan must differ, got 0.1 more than once"),
        (
            {"cells": (FREE,), "grids": {"adam": (0.1,)}},
            "no learning rate for sgd; give some, or give wine · mlp an lr",
        ),
        ({"update_time": 70}, "update_time must be an UpdateTime, got 70"),
    ],
)
def test_a_plan_that_cannot_be_compared_is_refused(change, match):
    with pytest.raises(ArgumentError, match=match):
        LabPlan(**{**vars(plan()), **change})


@pytest.mark.parametrize("name", presets.names())
def test_a_preset_has_known_strategies_and_settings_that_fit(name):
    given = presets.get(name)
    assert LabPlan.from_dict(given.to_dict()).to_dict() == given.to_dict()
    assert len(given.strategies) == len(set(given.strategies))
    assert set(given.strategies) <= set(names()) if name != "full" else given.strategies == names()
    for cell in given.cells:
        assert cell.num_epochs % 4 == 0  # milestones on whole epochs
        # The first validation comes no later than the end of a run that makes a sixteenth of the updates.
        assert cell.options["num_evaluations"] >= 16
    if name == "course":
        assert len({cell.dataset for cell in given.cells}) >= 5
        assert len({cell.model for cell in given.cells}) >= 4
        assert len(given.seeds) >= 5
        # One per idea of the documents: growth is there once, and a replay is no idea of its own. The time of an update
        # on this machine says nothing about a GPU.
        assert {get(one).group for one in given.strategies} >= {*GROUPS} - {"linear", "replay", "time"}


def test_an_unknown_preset_is_refused_with_those_there_are():
    with pytest.raises(ArgumentError, match="quick, course, full"):
        presets.get("slow")


# Running


def test_a_lab_writes_its_plan_and_every_run(tmp_path):
    records = run(tmp_path, plan())
    assert places(records) == [("constant", 0), ("linear", 0), ("constant", 1), ("linear", 1)]
    assert [line["id"] for line in read_records(tmp_path / "runs.jsonl")] == [found["id"] for found in records]
    written = json.loads((tmp_path / "lab.json").read_text())
    assert (written["version"], written["preset"], written["plan"]["seeds"]) == (2, "tiny", [0, 1])
    assert Lab(tmp_path).records() == records
    assert Lab(tmp_path).plan.to_dict() == plan().to_dict()


def test_run_again_a_lab_repeats_nothing(tmp_path):
    first = run(tmp_path, plan())
    before = (tmp_path / "runs.jsonl").read_bytes()
    assert run(tmp_path) == first
    assert run(tmp_path, plan()) == first
    assert (tmp_path / "runs.jsonl").read_bytes() == before


def test_a_lab_goes_on_where_it_stopped(tmp_path):
    first = run(tmp_path, plan())
    path = tmp_path / "runs.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1] + lines[2][:50])  # killed while the third was written
    again = run(tmp_path)
    assert [found["id"] for found in again] == [found["id"] for found in first]
    assert again[:2] == first[:2]  # with their seconds: these were not repeated
    assert [found["final"]["metric"] for found in again] == [found["final"]["metric"] for found in first]


def test_a_plan_is_known_again_after_it_was_written(tmp_path):
    cell = Cell(dataset="wine", model="logistic", num_epochs=2, lr=0.01, options={"decay_at": (0.5,)})
    first = run(tmp_path, plan(cell, seeds=(0,)))
    assert run(tmp_path, plan(cell, seeds=(0,))) == run(tmp_path) == first


def test_another_plan_in_the_same_folder_is_refused(tmp_path):
    run(tmp_path, plan(seeds=(0,)))
    with pytest.raises(StateMismatchError, match="choose another folder"):
        run(tmp_path, plan(seeds=(1,)))


def test_a_folder_of_the_earlier_version_is_refused_by_name_and_left_alone(tmp_path):
    folder = shutil.copytree(EARLIER, tmp_path / "lab")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for attempt in (lambda: run(folder), lambda: run(folder, plan()), lambda: Lab(folder).plan):
        with pytest.raises(StateMismatchError, match=r"another version of the lab \(1, this is 2\).*another folder"):
            attempt()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    # It can still be read.
    assert len(Lab(folder).records()) == len(read_lab(folder).records) == 16


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("{", "cannot read .*lab.json: .*put it back as it was"),
        ("[]", "lab.json is damaged: it holds no plan"),
        ('{"version": 2}', "lab.json is damaged: it holds no plan"),
        ('{"version": 2, "plan": {"name": "tiny"}}', "lab.json is damaged: its plan cannot be read .*'strategies'"),
    ],
)
def test_a_damaged_plan_is_refused_by_name(tmp_path, content, match):
    (tmp_path / "lab.json").write_text(content)
    with pytest.raises(StoreError, match=match):
        run(tmp_path, plan())
    assert (tmp_path / "lab.json").read_text() == content


def test_runs_whose_plan_is_gone_are_not_mixed_with_others(tmp_path):
    run(tmp_path, plan(seeds=(0,)))
    (tmp_path / "lab.json").unlink()
    with pytest.raises(StoreError, match=r"runs.jsonl holds runs, but lab.json beside it.*is missing"):
        run(tmp_path, plan(seeds=(0, 1)))
    assert not (tmp_path / "lab.json").exists()


def test_a_folder_without_a_plan_asks_for_one(tmp_path):
    with pytest.raises(ArgumentError, match="has no plan"):
        run(tmp_path)


def test_a_run_that_fails_is_recorded_and_the_rest_go_on(tmp_path, monkeypatch):
    real = _training.run_one

    def breaks_for_linear(dataset, model, strategy, *rest, **options):
        if strategy == "linear":
            raise RuntimeError("the flux is gone")
        return real(dataset, model, strategy, *rest, **options)

    monkeypatch.setattr(_training, "run_one", breaks_for_linear)
    records = run(tmp_path, plan(seeds=(0,), strategies=("constant", "linear", "exponential")))
    assert [found["status"] for found in records] == ["ok", "failed", "ok"]
    assert records[1]["error"] == "RuntimeError: the flux is gone"
    assert records[1]["group"] == "linear"
    assert records[1]["final"] is None
    monkeypatch.undo()
    assert run(tmp_path)[1]["status"] == "failed"
    again = run(tmp_path, retry_failed=True)
    assert [found["status"] for found in again] == ["ok"] * 3
    assert again[0] == records[0]
    assert len(Lab(tmp_path).records()) == 3


def test_a_replay_of_a_run_that_failed_fails_with_the_reason(monkeypatch):
    jobs = jobs_of(plan(strategies=("constant", "noise", "replay_noise")))
    source = {"status": "failed", "strategy": "noise", "seed": 1}
    [replay] = [job for job in jobs if job.strategy == "replay_noise" and job.seed == 0]
    found = execute(replay, source)
    assert found["status"] == "failed"
    assert "it repeats the run of noise with seed 1, which failed" in found["error"]
    assert found["id"] == replay.id


def test_a_replay_waits_for_its_run_whatever_the_order():
    jobs = jobs_of(plan(strategies=("constant", "linear", "replay_linear")))
    records = list(run_jobs(jobs[::-1], num_workers=0))
    assert len(records) == len(jobs)
    ends = [found["id"] for found in records]
    for job in jobs:
        assert job.after is None or ends.index(job.after) < ends.index(job.id)


@pytest.mark.skipif(sys.platform != "linux", reason="finds the process under /proc")
def test_a_process_that_dies_costs_its_run_alone():
    slow = Cell(dataset="wine", model="mlp", num_epochs=40, lr=0.01)
    jobs = jobs_of(plan(slow, seeds=(0, 1, 2), strategies=("constant",)))
    found = run_jobs(jobs, num_workers=1)
    first = next(found)
    os.kill(_child_of(os.getpid()), signal.SIGKILL)
    rest = list(found)
    assert first["status"] == "ok"
    assert [one["status"] for one in rest] == ["failed", "ok"]
    assert "ended with exit code -9" in rest[0]["error"]


def _child_of(parent):
    """The newest process started by this one that is no helper of multiprocessing."""
    children = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                command = (entry / "cmdline").read_text()
            except OSError:
                continue
            if int(fields[1]) == parent and "spawn_main" in command:
                children.append(int(entry.name))
    return max(children)


KILLED = """
import sys
from batchwright.lab.report import read_lab
from batchwright.lab.runner import Cell, Lab, LabPlan

if __name__ == "__main__":
    cell = Cell(dataset="wine", model="logistic", num_epochs=4, lr=0.01)
    plan = LabPlan(name="tiny", cells=(cell,), strategies=("constant", "linear"), seeds=tuple(range(200)))
    Lab(sys.argv[1]).run(plan, num_workers=int(sys.argv[2]), progress=False)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_a_lab_that_was_killed_keeps_whole_records_and_goes_on(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(KILLED)
    process = subprocess.Popen([sys.executable, str(script), str(tmp_path / "lab"), "0"])
    try:
        while len(list(read_records(tmp_path / "lab" / "runs.jsonl"))) < 3 and process.poll() is None:
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    kept = Lab(tmp_path / "lab").records()
    assert 3 <= len(kept) < 400
    # Going on does not repeat them: with all others pretended to be done only the missing ones run.
    given = Lab(tmp_path / "lab").plan
    jobs = jobs_of(given)
    assert {found["id"] for found in kept} <= {job.id for job in jobs}
    with RunStore(tmp_path / "lab" / "runs.jsonl") as store:
        for job in jobs[len(kept) : -1]:
            store.append({"id": job.id, "status": "ok"})
    records = run(tmp_path / "lab")
    assert records[: len(kept)] == kept
    assert records[-1]["final"]["examples"] == 4 * 142


UNGUARDED = KILLED.replace('if __name__ == "__main__":', "if True:")


def test_a_script_without_a_guard_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    command = [sys.executable, str(script), str(tmp_path / "lab"), "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "a script must run a lab under if __name__ == '__main__':" in done.stderr


def test_progress_is_shown_once_a_phase(tmp_path, capsys):
    run(tmp_path, plan(seeds=(0,)), progress=True)
    assert "lab: 2 in" in capsys.readouterr().err


# --- numbers of NumPy


def test_whole_rates_keep_the_ids_of_their_runs():
    cell = Cell(dataset="wine", model="logistic", num_epochs=2, lr=1, options={"momentum": 0})
    settings = cell.settings(load("wine"))
    assert json.dumps([settings.lr, settings.momentum, cell.lr]) == "[1, 0, 1]"


@pytest.mark.parametrize("name", ["progress", "retry_failed", "num_workers"])
def test_a_lab_refuses_what_is_not_a_flag_or_a_number_before_it_begins(tmp_path, name):
    with pytest.raises(ArgumentError, match=f"{name} must be .*, got 'yes'"):
        Lab(tmp_path / "lab").run(plan(), **{name: "yes"})
    assert not (tmp_path / "lab").exists()


def test_numbers_of_numpy_make_the_same_runs_as_plain_ones():
    def jobs(whole, real):
        cell = Cell(
            dataset="wine",
            model="logistic",
            num_epochs=whole(2),
            lr=real(0.25),
            data={"limit": whole(100)},
            options={"base_size": whole(8), "decay_at": [real(0.5)]},
        )
        made = plan(cell, seeds=(whole(0), whole(1)), tuning_seeds=(whole(7),), grids={"sgd": (real(0.5),)})
        return made, jobs_of(made, lr=0.25)

    made, found = jobs(np.int64, np.float32)
    expected, plain = jobs(int, float)
    assert json.dumps(made.to_dict()) == json.dumps(expected.to_dict())
    assert [job.id for job in found] == [job.id for job in plain]


# Data that change


def test_a_lab_whose_file_was_changed_is_not_continued_as_if_it_were_the_same_data(tmp_path):
    path = write_csv(tmp_path / "mine.csv", 60, seed=0)
    run(tmp_path / "out", plan_of_file(path))
    runs = tmp_path / "out" / "runs.jsonl"
    runs.write_text("".join(runs.read_text().splitlines(keepends=True)[:2]))
    write_csv(path, 60, seed=1)
    _training._load.cache_clear()  # as in a new process
    for go_on in (run, lambda folder: Lab(folder).forecast()):
        with pytest.raises(StateMismatchError, match=r"mine\.csv gives other numbers than when the lab in .* began"):
            go_on(tmp_path / "out")
    write_csv(path, 60, seed=0)
    _training._load.cache_clear()
    assert len(run(tmp_path / "out")) == 4


def test_a_process_that_finds_other_data_than_the_lab_began_with_makes_no_run(tmp_path):
    path = write_csv(tmp_path / "mine.csv", 60, seed=0)
    [job, *_] = jobs_of(plan_of_file(path))
    write_csv(path, 60, seed=1)
    _training._load.cache_clear()
    assert "the data of mine changed while the lab ran" in execute(job, None)["error"]


def test_a_folder_that_does_not_say_which_data_it_was_made_on_is_refused(tmp_path):
    run(tmp_path, plan())
    found = json.loads((tmp_path / "lab.json").read_text())
    del found["data"]
    (tmp_path / "lab.json").write_text(json.dumps(found))
    with pytest.raises(StoreError, match="does not say which data its runs were made on"):
        run(tmp_path)


# Damaged lines


@pytest.mark.parametrize(
    "fields",
    [{"final": "x"}, {"curve": [1, 2]}, {"settings": "x"}, {"seed": "one"}, {"seed": [1]}, {"id": ["x"]}],
    ids=str,
)
def test_a_line_with_a_field_of_another_type_is_skipped_and_its_run_made_again(tmp_path, fields):
    run(tmp_path, plan())
    change_line(tmp_path / "runs.jsonl", 0, **fields)
    with pytest.warns(UserWarning, match=r"runs\.jsonl:1 is not the record of a run and is skipped"):
        records = run(tmp_path)
    assert len(records) == 4
    write_report(tmp_path)
    assert read_lab(tmp_path).num_unreadable == 1


def test_deep_brackets_in_a_damaged_line_are_skipped(tmp_path):
    run(tmp_path, plan())
    with (tmp_path / "runs.jsonl").open("a") as file:
        file.write("[" * 100_000 + "\n")
    with pytest.warns(UserWarning, match="is skipped"):
        run(tmp_path)


def test_a_complete_lab_with_cycles_in_few_epochs_is_not_shown_as_running(tmp_path):
    names = ("constant", "linear", "cyclic_linear")
    cell = Cell(dataset="wine", model="logistic", num_epochs=4, lr=0.01)
    run(tmp_path, plan(cell, strategies=names))
    # Cycles need 6 epochs and are left out.
    assert progress_of(read_lab(tmp_path)).text == ""


# Few rows


@pytest.mark.parametrize("num_rows", [10, 20, 30, 39])
def test_a_file_of_too_few_rows_is_refused_before_anything_runs(tmp_path, num_rows):
    path = write_csv(tmp_path / "mine.csv", num_rows, seed=0)
    with pytest.raises(ArgumentError, match=rf"mine\.csv gives {num_rows} rows, .* a lab needs at least 32 of those"):
        run(tmp_path / "out", plan_of_file(path))
    assert not (tmp_path / "out").exists()


def test_a_file_of_forty_rows_runs(tmp_path):
    path = write_csv(tmp_path / "mine.csv", 40, seed=0)
    assert [one["status"] for one in run(tmp_path / "out", plan_of_file(path))] == ["ok"] * 4
