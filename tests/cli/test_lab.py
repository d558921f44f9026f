import argparse
import json
import re
import signal
import subprocess
import sys
import urllib.request
from contextlib import suppress

import numpy as np
import pytest

from batchwright.cli import main
from batchwright.cli.lab import DATASETS, MODELS, add_lab, chosen_strategies, dataset_name, default_epochs, make_plan
from batchwright.lab import Lab, datasets, presets
from batchwright.lab.models import networks
from batchwright.lab.strategies import HANDFUL, names
from batchwright.lab.update_time import GRAPHS

from ..lab.fabricated import fabricate, write_folder


def run(capsys, *arguments):
    """Return exit code, standard output and standard error of a command."""
    code = main(["lab", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A file of 60 rows whose label is the sign of a column, and a working folder of its own."""
    monkeypatch.chdir(tmp_path)
    rows = np.random.default_rng(0).standard_normal((60, 3)).round(3)
    lines = [f"{a},{b},{c},{'yes' if a > 0 else 'no'}" for a, b, c in rows]
    (tmp_path / "my.csv").write_text("\n".join(["a,b,c,label", *lines]) + "\n")
    return tmp_path / "my.csv"


SHORT = ("--strategies", "linear", "--seeds", 2, "--epochs", 2, "--models", "logistic", "--workers", 0, "--quiet")


def test_two_commands_lead_from_a_file_to_a_report(table, tmp_path, capsys):
    code, out, err = run(capsys, "run", "--data", table, "--target", "label", *SHORT)
    assert (code, err) == (0, "")
    assert "1 data set, 1 model and 2 seeds. 4 of 4 runs ended well." in " ".join(out.split())
    assert out.rstrip().endswith("to look at it: batchwright lab show")
    folder = tmp_path / "lab_out"
    assert {"lab.json", "runs.jsonl", "report.html", "report.md", "report.csv"} <= {
        path.name for path in folder.iterdir()
    }
    assert "Which batch size strategy" in (folder / "report.html").read_text(encoding="utf-8")


def test_runs_and_minutes_are_stated_before_anything_is_written(table, tmp_path, capsys, monkeypatch):
    said = []

    def stop(lab, *arguments, **options):
        said.append((capsys.readouterr().err, [path.name for path in tmp_path.iterdir()]))
        raise KeyboardInterrupt

    monkeypatch.setattr(Lab, "run", stop)
    with suppress(KeyboardInterrupt, SystemExit):
        main(["lab", "run", "--data", str(table), "--target", "label", "--workers", "0"])
    num_arms = len(HANDFUL)
    # 4 rates and twice 2 more, on 2 seeds; then 6 seeds. One model.
    words = f"lab: {16 * num_arms} runs to choose learning rates, then {6 * num_arms} to compare: "
    [(err, files)] = said
    assert err.startswith(words)
    assert re.search(r"(about \d+ minutes?|less than a minute) with 1 process\n", err)
    assert files == ["my.csv"]


def test_a_file_is_compared_with_a_handful_of_strategies_and_one_model(table):
    def made(*options):
        parser = argparse.ArgumentParser()
        add_lab(parser.add_subparsers())
        return make_plan(parser.parse_args(["lab", "run", "--data", str(table), "--target", "label", *options]))

    plan = made()
    assert plan.strategies == HANDFUL
    assert [cell.model for cell in plan.cells] == ["mlp"]
    assert len(plan.seeds) >= 5
    more = made("--models", "all", "--strategies", "all", "--seeds", "9", "--time-model", "graphs")
    assert [cell.model for cell in more.cells] == ["logistic", "mlp"]
    assert (more.strategies, len(more.seeds), more.update_time) == (names(), 9, GRAPHS)
    assert [cell.model for cell in made("--models", "logistic").cells] == ["logistic"]


def test_a_data_set_of_a_preset_can_be_left_out(tmp_path):
    parser = argparse.ArgumentParser()
    add_lab(parser.add_subparsers())
    plan = make_plan(parser.parse_args(["lab", "run", "course", "--leave-out", "fashion_mnist"]))
    assert "fashion_mnist" not in {cell.dataset for cell in plan.cells}
    assert len(plan.cells) == len(presets.get("course").cells) - 1


def test_a_lab_goes_on_where_it_stopped(table, tmp_path, capsys):
    run(capsys, "run", "--data", table, "--target", "label", *SHORT)
    runs = tmp_path / "lab_out" / "runs.jsonl"
    lines = runs.read_text().splitlines()
    runs.write_text("\n".join(lines[:3]) + "\n")
    code, _, _ = run(capsys, "run", "--workers", 0, "--quiet")
    again = [json.loads(line) for line in runs.read_text().splitlines()]
    assert code == 0
    assert sorted(one["id"] for one in again) == sorted(json.loads(line)["id"] for line in lines)


def test_another_plan_in_the_same_folder_is_refused(table, capsys):
    run(capsys, "run", "--data", table, "--target", "label", *SHORT)
    code, _, err = run(capsys, "run", "--data", table, "--target", "label", "--quiet", "--seeds", 3)
    assert code == 2
    assert "choose another folder" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["report", "nowhere"], "no folder nowhere; run a lab first"),
        (["show", "nowhere"], "no folder nowhere; run a lab first"),
        (["run"], "name a preset, one of quick, course, full, or give a file of your own"),
        (["run", "--seeds", "5"], "name a preset"),
        (["run", "huge"], "no preset 'huge'; there are quick, course, full"),
        (["run", "quick", "--strategies", "linear,magic"], "no strategy 'magic'; there are constant, "),
        (
            ["run", "quick", "--strategies", "entropi"],
            "no strategy 'entropi'; did you mean 'entropy'? there are constant",
        ),
        (["run", "quick", "--strategies", "group:entropi"], "no group 'entropi'; there are constant, "),
        (["run", "quick", "--target", "label"], "--target is for a file of your own; add --data FILE"),
        (["run", "quick", "--data", "my.csv"], "give a preset or --data, not both"),
        (["run", "--data", "my.csv"], "needs --target COLUMN"),
        (["run", "--data", "my.csv", "--target", "labels"], "has no column 'labels'; columns here: a, b, c, label"),
        (["run", "--data", "my.csv", "--target", "label", "--models", "gru"], "my.csv takes logistic, mlp"),
        (["run", "--data", "my.csv", "--target", "label", "--strategies", "magic"], "no strategy 'magic'"),
        (["run", "--data", "none.csv", "--target", "label"], "none.csv"),
        (["run", "quick", "--time-model", "fast"], "two numbers of milliseconds, per update and per example"),
        (["run", "quick", "--leave-out", "iris"], "--leave-out iris: the data sets are digits, wine, diabetes"),
        (["run", "--data", "my.parquet", "--target", "label"], "cannot tell the format of my.parquet"),
    ],
)
def test_a_mistake_ends_with_a_sentence_and_code_2(table, tmp_path, capsys, arguments, words):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("batchwright: error: ")
    assert words in err
    # Nothing is left behind that a corrected command would stumble over.
    assert [path.name for path in tmp_path.iterdir()] == ["my.csv"]


def test_an_unreadable_file_ends_with_a_sentence_and_code_2(table, capsys):
    table.write_bytes(b"a,label\n\xff\xfe\x00,1\n")
    code, _, err = run(capsys, "run", "--data", table, "--target", "label")
    assert code == 2
    assert "my.csv" in err


def test_a_report_is_written_again_and_says_what_it_found(tmp_path, capsys):
    folder = write_folder(tmp_path / "lab", fabricate(effects={"exponential": -0.2}))
    code, out, _ = run(capsys, "report", folder)
    assert code == 0
    said = " ".join(out.split())
    assert said.startswith(
        "After the same examples, better than a constant batch of 32: exponential, whose loss ended "
    )
    assert "What was compared: " in said
    assert "How sure: " in said
    assert "p <" not in said
    assert f"batchwright lab show {folder}" in out


def test_a_terminal_without_unicode_reads_plain_text(tmp_path, capsys, monkeypatch):
    folder = write_folder(tmp_path / "lab", fabricate(effects={"exponential": -0.2}))
    monkeypatch.setattr(type(sys.stdout), "encoding", "ascii", raising=False)
    _, out, _ = run(capsys, "report", folder)
    assert out.isascii()
    assert "whose loss ended 20 % lower" in " ".join(out.split())
    assert "?" not in out


def test_show_serves_until_it_is_interrupted(tmp_path):
    folder = write_folder(tmp_path / "lab", fabricate(seeds=2))
    command = [sys.executable, "-m", "batchwright", "lab", "show", str(folder), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        address = process.stdout.readline().split()[0]
        with urllib.request.urlopen(address, timeout=20) as answer:
            assert b"Which batch size strategy" in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0


def test_the_list_has_a_line_for_everything_and_needs_no_torch():
    code = "import sys; from batchwright.cli import main; main(['lab', 'list']); assert 'torch' not in sys.modules"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    firsts = {line.split()[0] for line in out.splitlines() if line.strip()}
    assert {*datasets.names(), *MODELS, *names(), "quick", "course", "full"} <= firsts


def test_the_list_knows_every_data_set_and_model():
    assert tuple(DATASETS) == datasets.names()
    assert set(MODELS) == set(networks._MAKERS)


def test_strategies_are_chosen_by_name_and_by_group():
    assert chosen_strategies(["linear"]) == ("constant", "linear")
    assert chosen_strategies(["entropy"]) == ("constant", "entropy")
    per_batch = ("entropy_per_batch", "entropy_threshold_per_batch")
    assert chosen_strategies(["group:entropy"]) == ("constant", "entropy", "entropy_threshold", *per_batch)
    assert chosen_strategies(["cyclical"]) == ("constant", "cyclic_linear", "cyclic_exponential")
    # A replay brings what it replays.
    assert chosen_strategies(["replay_entropy"]) == ("constant", "entropy", "replay_entropy")
    assert chosen_strategies(["all"]) == names()


def test_a_file_with_the_name_of_a_ready_data_set_gets_another(tmp_path):
    assert dataset_name(tmp_path / "wine.csv.gz", datasets.names()) == "wine_file"
    assert dataset_name(tmp_path / "my.data.csv", datasets.names()) == "my"


@pytest.mark.parametrize(("num_train", "epochs"), [(100, 16), (20_000, 8), (1_000_000, 4)])
def test_large_data_get_fewer_epochs(num_train, epochs):
    # 200,000 / 20,000 = 10, of which the multiple of 4 is 8.
    assert default_epochs(num_train) == epochs


def test_help_teaches_the_two_commands(capsys):
    with pytest.raises(SystemExit) as end:
        main(["lab", "--help"])
    out = capsys.readouterr().out
    assert end.value.code == 0
    assert "batchwright lab run --data my.csv --target label\n  batchwright lab show" in out


@pytest.mark.parametrize("num_rows", [10, 39])
def test_a_file_of_few_rows_is_refused_by_its_number_of_rows(tmp_path, capsys, num_rows):
    rows = np.random.default_rng(0).standard_normal((num_rows, 2)).round(3)
    path = tmp_path / "mine.csv"
    path.write_text("a,b,label\n" + "".join(f"{a},{b},{i % 2}\n" for i, (a, b) in enumerate(rows)))
    options = ("--data", path, "--target", "label", "--folder", tmp_path / "out", *SHORT)
    code, out, err = run(capsys, "run", *options)
    assert (code != 0, out) == (True, "")
    assert f"gives {num_rows} rows" in err
    assert "max_size" not in err


def test_errors_about_a_file_name_the_options_of_the_command_line(tmp_path, capsys):
    path = tmp_path / "mine.csv"
    path.write_text("city,age,label\n" + "".join(f"a town {i},{i},{i % 2}\n" for i in range(60)))
    code, _, err = run(capsys, "run", "--data", path, "--target", "label", "--folder", tmp_path / "out")
    assert code != 0
    assert "--columns city, or choose only columns of numbers or of few different words, --columns age" in err
    assert "columns=" not in err
