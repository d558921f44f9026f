"""The table of GPU measurements, what runs them within a time, and what is kept of them."""

import json
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MACHINE = "NVIDIA H200"
GPU = (MACHINE, "GPU-1")


@pytest.fixture
def entries(script):
    return script("_gpu_all.entries")


@pytest.fixture
def running(script):
    return script("_gpu_all.running")


@pytest.fixture
def results(script):
    return script("_gpu_all.results")


# The table


def names():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from _gpu_all.entries import ENTRIES
    finally:
        sys.path.pop(0)
    return [(entry.name, is_smoke) for entry in ENTRIES if not entry.is_tests for is_smoke in (False, True)]


@pytest.mark.parametrize(("name", "is_smoke"), names())
def test_every_command_is_one_that_its_script_understands(script, entries, monkeypatch, tmp_path, name, is_smoke):
    (entry,) = entries.chosen(name)
    for file in entry.data:
        (tmp_path / file).touch()
    command = entries.command_of(entry, tmp_path / entry.result, tmp_path, seconds=99.5, smoke=is_smoke)
    assert Path(command[1]) == ROOT / "benchmarks" / entry.script
    monkeypatch.setattr(sys, "argv", command[1:])
    options = script(Path(entry.script).stem).parse()
    assert options.output == tmp_path / entry.result
    assert options.smoke is is_smoke
    if not is_smoke:
        assert getattr(options, "budget_seconds", 99) == 99
        for file in entry.data:
            assert options.data == tmp_path / file
        if "arm" in entry.rows:
            given = options.arms.split(",") if isinstance(options.arms, str) else list(options.arms)
            assert sorted(given) == sorted(entry.rows["arm"])


def test_arms_are_known_to_their_scripts(script, entries):
    by_name = {entry.name: entry for entry in entries.ENTRIES}
    for arm in by_name["trainer"].rows["arm"]:
        script("_trainer_arms").Name.parse(arm)
    for name in ("sizes-translation", "sizes-decoder", "levels-translation"):
        for arm in by_name[name].rows["arm"]:
            script("_quality.arms").Arm.parse(arm)
    benchmark = script("gpu_generate")
    model = benchmark.make_model(benchmark.Device(1e9, smoke=True))
    lengths = benchmark.make_lengths(benchmark.NUM, longest=512)
    pairs = benchmark.np.stack([lengths, benchmark.np.minimum(lengths, benchmark.MOST_NEW)], axis=1)
    device, examples = benchmark.Device(1e9, smoke=True), benchmark.make_examples(lengths)
    arms = benchmark.make_arms(model, device, examples, pairs, benchmark.bw.MaxItems(8), None)
    assert set(by_name["generate"].rows["arm"]) <= arms.keys()


def test_what_the_page_of_measurements_reads_has_its_name(entries):
    known = {path.name for path in (ROOT / "benchmarks" / "results").glob("gpu_*.json")}
    found = [entry.result for entry in entries.ENTRIES if not entry.is_tests]
    # The engine has a file of its own, as it may take down what ran before it; the other rates are not on the page.
    assert set(found) - known <= {"gpu_decoder_engine.json", "gpu_trainer_rates.json"}
    assert (
        len({entry.result for entry in entries.ENTRIES})
        == len({entry.name for entry in entries.ENTRIES})
        == len(entries.ENTRIES)
    )


def test_every_test_for_a_cuda_device_belongs_to_one_measurement(entries):
    found = [path for entry in entries.ENTRIES if entry.is_tests for path in entries.cuda_tests(entry.arguments)]
    assert sorted(found) == entries.cuda_tests(("tests",))
    assert "tests/step/whole_batches/test_on_cuda.py" in found


def test_an_unknown_name_is_answered_with_all_names(entries):
    assert [entry.name for entry in entries.chosen("encoder,trainer")] == ["trainer", "encoder"]
    with pytest.raises(SystemExit, match=r"--only takes tests-inference, .*engine; got translator"):
        entries.chosen("encoder,translator")


def test_a_trial_run_without_prepared_data_lets_the_script_draw_some(entries, tmp_path):
    (entry,) = entries.chosen("noise-decoder")
    command = entries.command_of(entry, tmp_path / "r.json", tmp_path, seconds=9, smoke=True)
    assert command[2:] == ["--smoke", "--output", str(tmp_path / "r.json")]


# Time and what is done


class Machine:
    """A clock, and a runner that writes results and lets the clock go on."""

    def __init__(self, running, takes, write=None):
        self.now, self.ran = 0.0, []
        self._running, self._takes, self._write = running, takes, write or (lambda name: {"rows": [{"arm": "a"}]})

    def clock(self):
        return self.now

    def run(self, command, limit, log):
        name = Path(command[-1]).stem
        seconds = self._takes[name]
        self.ran.append((name, round(limit)))
        log.write_text(f"{name} says hello\n")
        written = self._write(name)
        if written is not None:
            Path(command[-1]).write_text(written if isinstance(written, str) else json.dumps(written))
        self.now += min(seconds, limit)
        return self._running.Ended(None if seconds > limit else 0, min(seconds, limit))


@pytest.fixture
def some(entries):
    """Three measurements of 100, 50 and 10 seconds."""

    def make(name, seconds, least):
        return entries.Entry(name, "", "none.py", (), (), seconds, least, f"{name}.json", rows={"arm": ("a",)})

    return make("first", 100, 30), make("second", 50, 40), make("third", 10, 10)


@pytest.fixture
def setting(running, tmp_path):
    return running.Setting(tmp_path / "out", tmp_path / "data", running.Gpu(*GPU), 200.0)


def run(running, some, setting, machine):
    return running.run_all(some, setting, run=machine.run, clock=machine.clock, started=0.0, say=lambda text: None)


def test_measurements_run_in_their_order_while_the_time_suffices(running, some, setting):
    machine = Machine(running, {"first": 120, "second": 50, "third": 10})
    said = []
    running.run_all(some, setting, run=machine.run, clock=machine.clock, started=0.0, say=said.append)
    # 15 s are kept for the end. After the first one 65 s are left, after the second 15 s.
    assert machine.ran == [("first", 185), ("second", 65), ("third", 15)]
    assert "first: done after 120 s (expected 100)\n   first says hello" in said[0]
    machine = Machine(running, {"first": 160, "second": 50, "third": 10})
    run(running, some, replace(setting, output=setting.output / "other"), machine)
    # 25 s are left: too few to begin the second.
    assert [name for name, _ in machine.ran] == ["first", "third"]


def test_what_hangs_leaves_time_for_the_others(running, some, setting):
    machine = Machine(running, {"first": 10_000, "second": 50, "third": 10})
    status = run(running, some, replace(setting, budget_seconds=600.0), machine)
    assert machine.ran == [("first", 260), ("second", 160), ("third", 80)]  # twice what is expected, and a minute
    assert [status[name]["state"] for name in ("first", "second", "third")] == ["done", "done", "done"]
    assert status["first"]["status"] is None  # its rows were complete when it was cut off


def test_what_is_done_is_not_run_again_and_what_was_cut_off_goes_on(running, some, setting):
    takes = {"first": 300, "second": 50, "third": 10}
    machine = Machine(running, takes, lambda name: {"rows": [] if name == "first" else [{"arm": "a"}]})
    status = run(running, some, setting, machine)
    assert (status["first"]["state"], status["first"]["missing"]) == ("cut off", ["rows", "a"])
    machine, takes["first"] = Machine(running, takes), 20
    status = run(running, some, setting, machine)
    assert [name for name, _ in machine.ran] == ["first", "second", "third"]
    assert {row["state"] for row in status.values()} == {"done"}
    assert run(running, some, setting, Machine(running, {})).keys() == status.keys()  # nothing runs
    (setting.output / "second.json").unlink()
    machine = Machine(running, takes)
    run(running, some, setting, machine)
    assert [name for name, _ in machine.ran] == ["second"]


def test_a_script_that_goes_on_finds_its_file_and_one_of_another_machine_does_not(running, some, setting):
    def write(name):
        path = setting.output / f"{name}.json"
        seen.append(path.exists())
        return {"rows": []}

    seen = []
    for gpu in (GPU, GPU, ("NVIDIA L4", "GPU-1"), ("NVIDIA L4", "GPU-2")):
        run(running, some[:1], replace(setting, gpu=running.Gpu(*gpu)), Machine(running, {"first": 5}, write))
    assert seen == [False, True, False, False]
    kept = sorted(path.name for path in (setting.output / "earlier").iterdir())
    assert kept == ["000_first.json", "001_first.json"]


def test_what_is_complete_counts_on_another_machine_of_its_kind(running, some, setting):
    run(running, some[:1], setting, Machine(running, {"first": 5}))
    machine = Machine(running, {"first": 5})
    run(running, some[:1], replace(setting, gpu=running.Gpu(MACHINE, "GPU-2")), machine)
    assert machine.ran == []
    run(running, some[:1], replace(setting, gpu=running.Gpu("NVIDIA L4", "GPU-1")), machine)
    assert len(machine.ran) == 1


def test_another_source_of_the_package_or_of_the_script_is_measured_again(results, tmp_path):
    package = tmp_path / "src" / "batchwright"
    package.mkdir(parents=True)
    (tmp_path / "benchmarks").mkdir()
    digests = []
    for file in ("src/batchwright/a.py", "benchmarks/one.py", "benchmarks/other.py"):
        (tmp_path / file).write_text("x = 1\n")
        digests.append(results.source_digest("one.py", tmp_path))
    assert digests[0] != digests[1] == digests[2]


def test_what_failed_is_tried_again_after_the_others(running, some, setting):
    def write(name):
        return {"rows": [{"arm": "a", "error": "RuntimeError: no"}]} if name == "first" else None

    takes = {"first": 20, "second": 20, "third": 10}
    status = run(running, some[:1], setting, Machine(running, takes, write))
    assert (status["first"]["state"], status["first"]["errors"]) == ("failed", ["a: RuntimeError: no"])
    machine = Machine(running, takes)
    status = run(running, some, setting, machine)
    assert [name for name, _ in machine.ran] == ["second", "third", "first"]
    assert status["first"]["state"] == "done"


def test_rows_that_are_left_for_another_command_make_a_part(running, some, setting):
    wants_two = replace(some[0], rows={"arm": ("a", "b")})
    status = run(running, [wants_two], setting, Machine(running, {"first": 20}))
    assert (status["first"]["state"], status["first"]["missing"]) == ("partial", ["b"])


def test_the_status_says_how_each_ended_and_the_archive_holds_everything(running, some, setting, tmp_path):
    archive = tmp_path / "gone" / "all.zip"
    run(running, some[:1], replace(setting, archive=archive), Machine(running, {"first": 20}))
    status = json.loads((setting.output / "status.json").read_text())
    assert status["machine"] == MACHINE
    row = status["entries"]["first"]
    assert (row["state"], row["seconds"], row["status"], row["machine"], row["unit"]) == ("done", 20.0, 0, *GPU)
    assert row["command"].endswith(f"--output {setting.output / 'first.json'}")
    with zipfile.ZipFile(archive) as file:
        assert sorted(file.namelist()) == ["first.json", "logs/first.log", "status.json"]


def test_a_status_of_something_else_is_refused(results, tmp_path):
    (tmp_path / "status.json").write_text("[]")
    with pytest.raises(SystemExit, match=r"is no status of gpu_all\.py"):
        results.read_status(tmp_path)


# What results lack


def test_turns_that_are_missing_are_counted_and_a_row_that_ran_later_is_no_error(results, entries, tmp_path):
    entry = entries.Entry("x", "", "x.py", (), (), 1, 1, "x.json", rows={"arm": ("a", "b")}, num_turns=3)
    path = tmp_path / "x.json"
    assert results.look(entry, path).missing == ("no x.json",)
    rows = [{"arm": "a", "error": "no"}, {"arm": "a"}, {"arm": "b", "error": "never"}]
    path.write_text(json.dumps({"rows": rows, "turns": [1]}))
    assert results.look(entry, path) == (("2 turns",), ("b: never",))
    assert results.look(replace(entry, cpu_error="never"), path, smoke=True) == ((), ())
    path.write_text("{")
    assert results.look(entry, path).missing == ("x.json is no JSON",)


JUNIT = """<testsuites><testsuite><testcase classname="tests.a" name="one"/>
<testcase classname="tests.a" name="two"><failure message="assert 1 == 2&#10;more">trace</failure></testcase>
<testcase classname="tests.b" name=""><error message="collection failure">ModuleNotFoundError</error></testcase>
<testcase classname="tests.a" name="three"><skipped message="needs"/></testcase></testsuite></testsuites>"""


def test_failed_tests_are_a_result_and_are_named(running, results, entries, script, tmp_path):
    (entry,) = entries.chosen("tests-inference")
    path = tmp_path / entry.result
    path.write_text(JUNIT)
    found = results.read_tests(path)
    assert (found.passed, found.skipped) == (1, 1)
    assert found.failed == ("tests.a::two: assert 1 == 2", "tests.b::: collection failure")
    assert results.look(entry, path) == ((), ())
    assert results.look(entry, path, smoke=True).errors == found.failed  # where none runs, none may fail
    assert running._state(entry, running.Ended(1, 9.0), False, False) == "done"
    assert running._state(entry, running.Ended(2, 9.0), False, False) == "failed"
    setting = running.Setting(tmp_path, tmp_path, running.Gpu(*GPU), 1.0)
    said = script("gpu_all").failures([entry], setting).splitlines()
    assert said == ["tests-inference: 1 passed, 2 failed, 1 skipped", *found.failed]


def test_tests_that_were_all_skipped_did_not_run(results, entries, tmp_path):
    (entry,) = entries.chosen("tests-inference")
    path = tmp_path / entry.result
    path.write_text('<testsuites><testcase name="a"><skipped/></testcase></testsuites>')
    assert results.look(entry, path).missing == ("tests that ran: all were skipped",)
    assert results.look(entry, path, smoke=True) == ((), ())


# Commands


def test_data_and_packages_that_are_missing_are_named_before_anything_runs(script, entries, tmp_path):
    preparing = script("_gpu_all.preparing")
    with pytest.raises(SystemExit, match=r"lacks pairs\.npz, translation\.npz; make it with --prepare"):
        preparing.check(entries.chosen("trainer,sizes-translation,encoder"), tmp_path)
    preparing.check(entries.chosen("encoder,tests-inference"), tmp_path)
    assert not preparing._is_at_hand("pytest_of_nobody", tmp_path)
    (tmp_path / "pytest_of_nobody.py").touch()
    assert preparing._is_at_hand("pytest_of_nobody", tmp_path)


def test_a_command_that_takes_too_long_is_ended_with_its_workers(running, tmp_path):
    worker, program = tmp_path / "worker.py", tmp_path / "program.py"
    worker.write_text(f"import pathlib, time; time.sleep(4); pathlib.Path({str(tmp_path / 'late')!r}).touch()")
    program.write_text(
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, {str(worker)!r}])\n"
        "print('begun', flush=True); time.sleep(60)"
    )
    log = tmp_path / "x.log"
    ended = running.run_process([sys.executable, str(program)], 2.0, log, variables={})
    assert ended.status is None
    assert ended.seconds < 20
    assert log.read_text().splitlines()[1] == "begun"
    time.sleep(3)
    assert not (tmp_path / "late").exists()
    assert running.run_process([sys.executable, "-c", "raise SystemExit(3)"], 30, log, variables={}).status == 3


def test_the_rehearsal_runs_a_measurement_and_a_script_that_fails_ends_it_with_1(script, monkeypatch, tmp_path, capsys):
    command = ["gpu_all", "--rehearse", "--only", "decoder", "--data", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", command)
    benchmark = script("gpu_all")
    with pytest.raises(SystemExit) as ended:
        benchmark.main()
    assert ended.value.code == 0
    assert "1 of 1 measurements ran to their end" in capsys.readouterr().out
    entries = script("_gpu_all.entries")
    (entry,) = entries.chosen("decoder")
    broken = replace(entry, smoke=("--no-such-option",))
    assert benchmark.rehearse([broken], benchmark.parse(command[1:])) == 1
    assert "decoder: failed, status 2; lacks ['no gpu_decoder_generate.json']" in capsys.readouterr().out


def test_without_a_gpu_nothing_begins(script, monkeypatch, tmp_path):
    benchmark = script("gpu_all")
    monkeypatch.setattr(sys, "argv", ["gpu_all", "--output", str(tmp_path)])
    monkeypatch.setattr(benchmark, "find_gpu", lambda: None)
    with pytest.raises(SystemExit, match="nvidia-smi shows no GPU; --rehearse"):
        benchmark.main()


def test_the_list_shows_how_far_each_is(script, running, some, setting, monkeypatch):
    run(running, some[:2], replace(setting, budget_seconds=100), Machine(running, {"first": 20, "second": 50}))
    lines = script("gpu_all").table(some, setting).splitlines()
    assert lines[2] == "| first | 100 | 30 | done | 20 | first.json |  |"
    assert lines[3] == "| second | 50 | 40 | done | 50 | second.json |  |"
    assert lines[4] == "| third | 10 | 10 | new |  | third.json |  |"
    assert lines[-1] == "160 s in all, on NVIDIA H200"


def test_the_command_itself_needs_no_package_so_that_it_starts_at_once(tmp_path):
    program = "import sys; sys.argv = ['gpu_all', '--list']; import gpu_all; gpu_all.main()\n"
    program += "print(sorted({'torch', 'numpy', 'batchwright'} & sys.modules.keys()))"
    variables = {"PYTHONPATH": str(ROOT / "benchmarks"), "PATH": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=variables, cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert ended.stdout.splitlines()[-1] == "[]"


def test_the_driver_is_asked_for_the_gpu(results, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'NVIDIA H200, GPU-12ab'\n")
    program.chmod(0o755)
    assert results.find_gpu() == ("NVIDIA H200", "GPU-12ab")
    program.write_text("#!/bin/sh\necho failed >&2; exit 9\n")
    assert results.find_gpu() is None
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    assert results.find_gpu() is None
