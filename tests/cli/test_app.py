import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import batchwright as bw
from batchwright.cli import main

# Twelve texts of 1 to 12 words and one of 100: a heavy tail.
TEXTS = ["w " * num for num in [*range(1, 13), 100]]


def jsonl(path, texts=TEXTS):
    content = "".join(json.dumps({"text": text.strip(), "label": 0}) + "\n" for text in texts)
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    return str(path)


def run(capsys, *arguments):
    """Return exit code, standard output and standard error of a command."""
    code = main([*map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def heavy(tmp_path):
    """A file of 2,000 lengths with a heavy tail, as numbers."""
    path = tmp_path / "lengths.txt"
    lengths = np.clip(np.random.default_rng(0).lognormal(3, 1, 2000).astype(int), 1, 500)
    path.write_text("\n".join(map(str, lengths)) + "\n")
    return str(path)


def test_plan_shows_histogram_table_and_recommendation(tmp_path, capsys):
    code, out, err = run(capsys, "plan", jsonl(tmp_path / "data.jsonl"), "--max-tokens", 200)
    assert (code, err) == (0, "")
    assert "data.jsonl: 13 examples" in out
    # 13 lengths, 1 to 12 and 100: the seventh is 7, the twelfth 12.
    assert "words: median 7 · p90 12 · p99 100 · max 100" in out
    assert "64-95" in out
    for name in ("fixed 2, shuffled", "fixed 2, sorted", "InOrder()", "Sorted()", "WindowSort()", "Buckets(count=16)"):
        assert name in out
    assert "Use WindowSort():" in out


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "tsv", "txt"])
@pytest.mark.parametrize("zipped", [False, True])
def test_every_format_gives_the_same_lengths(tmp_path, capsys, suffix, zipped):
    texts = ["a b c", "d"]
    content = {
        "jsonl": "".join(json.dumps({"text": text}) + "\n" for text in texts),
        "csv": "text\n" + "\n".join(texts) + "\n",
        "tsv": "\n".join(f"{text}\tother" for text in texts),
        "txt": "\n".join(texts),
    }[suffix].encode()
    path = tmp_path / (f"data.{suffix}.gz" if zipped else f"data.{suffix}")
    path.write_bytes(gzip.compress(content) if zipped else content)
    code, out, _ = run(capsys, "plan", path, "--json")
    assert code == 0
    assert json.loads(out)["data"]["lengths"][0]["mean"] == 2.0


def test_json_holds_what_the_planner_says(heavy, capsys):
    code, out, _ = run(capsys, "plan", heavy, "--tokenizer", "lengths", "--max-tokens", 4000, "--seed", 3, "--json")
    entries = {entry["name"]: entry for entry in json.loads(out)["entries"]}
    lengths = [int(line) for line in Path(heavy).read_text().split()]
    report = bw.plan_batches(lengths, bw.MaxTokens(4000), seed=3).report()
    assert code == 0
    assert entries["WindowSort()"]["padding"] == report.padding
    assert entries["WindowSort()"]["num_batches"] == report.num_batches


def test_pairs_have_two_histograms(tmp_path, capsys):
    path = tmp_path / "en-de.tsv"
    path.write_text("one two\teins zwei drei\nthree\tvier\n")
    code, out, _ = run(capsys, "plan", path, "--pairs", "--max-tokens", 10)
    assert code == 0
    assert "source words: median 1 · p90 2 · p99 2 · max 2" in out
    assert "target words: median 1 · p90 3 · p99 3 · max 3" in out


def test_what_was_left_out_is_counted(tmp_path, capsys):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a b c d"}\n\n{"text": "  "}\n{"text": "a b"}\n')
    code, out, _ = run(capsys, "plan", path, "--max-length", 3)
    assert code == 0
    assert "2 examples (1 blank line skipped, 1 empty example skipped, 1 cut to --max-length)" in out
    assert "max 3" in out


def test_a_chosen_budget_says_where_it_comes_from(heavy, capsys):
    _, out, _ = run(capsys, "plan", heavy, "--tokenizer", "lengths")
    assert "padded tokens per batch (" in out
    assert "set your own with --max-tokens" in out
    _, out, _ = run(capsys, "plan", heavy, "--tokenizer", "lengths", "--max-tokens", "4,000")
    assert "budget: 4,000 padded tokens per batch\n" in out


def test_quiet_prints_the_result_alone(heavy, capsys):
    _, out, _ = run(capsys, "plan", heavy, "--tokenizer", "lengths", "--quiet")
    assert out.startswith("grouping")
    assert "median" not in out


def test_several_ranks_show_how_long_they_wait(heavy, capsys):
    _, out, _ = run(capsys, "plan", heavy, "--tokenizer", "lengths", "--world-size", 4, "--quiet")
    assert "ranks wait" in out


def test_the_histogram_fits_the_terminal(heavy, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = run(capsys, "plan", heavy, "--tokenizer", "lengths")
    bars = [line for line in out.splitlines() if "█" in line]
    assert {len(line) for line in bars} == {60}


def test_advise_says_yes_with_numbers_and_a_snippet(heavy, capsys):
    code, out, _ = run(capsys, "advise", heavy, "--tokenizer", "lengths", "--max-tokens", 4000)
    assert code == 0
    assert "Yes, against fixed-size batches of 9 examples in random order" in out
    assert "bw.BatchSampler(lengths, bw.MaxTokens(4000)" in out
    assert "compute-bound: the time of a step grows" in out


def test_advise_says_no_for_constant_lengths(tmp_path, capsys):
    path = tmp_path / "same.txt"
    path.write_text("one two three four\n" * 400)
    code, out, _ = run(capsys, "advise", path, "--max-tokens", 80)
    assert code == 0
    # 80 padded tokens hold 20 texts of 4 words.
    assert "The lengths hardly vary: keep DataLoader(batch_size=20)." in " ".join(out.split())
    assert out.count("No, not against fixed-size batches of 20 examples in random order") == 1
    assert "BatchSampler" not in out


def test_advise_as_json(heavy, capsys):
    code, out, _ = run(capsys, "advise", heavy, "--tokenizer", "lengths", "--max-tokens", 4000, "--json")
    found = json.loads(out)
    assert (code, found["verdict"]) == (0, "yes")
    assert found["against_shuffled"]["launch_bound"] > found["against_shuffled"]["compute_bound"] > 1
    assert "BatchSampler" in found["snippet"]


@pytest.mark.parametrize(
    ("name", "content", "options", "message"),
    [
        ("empty.jsonl", b"", [], "empty.jsonl holds no examples"),
        ("data.bin", b"", [], "cannot tell the format of data.bin; the name must end in .jsonl, .csv, .tsv or .txt"),
        (
            "data.json",
            b"[]",
            [],
            "may be one document; if it has one object per line, rename it to data.jsonl, else write it so",
        ),
        ("data.jsonl", b'{"text": "a"}\n{oops\n', [], "data.jsonl:2: not JSON: Expecting property name enclosed in"),
        ("data.jsonl", b'{"text": "a"}\noops\n', [], "data.jsonl:2: not JSON: Expecting value at column 1; got oops\n"),
        ("data.jsonl", b'{"body": "a", "title": "b"}\n', ["--field", "text"], "fields here: body, title"),
        ("data.txt", b"a\xff\n", [], "data.txt:1: not UTF-8 (byte 2 of the line); convert the file first, for example"),
        ("data.txt.gz", b"no gzip", [], "copy it again, or rename it without .gz if it is plain"),
        (
            "data.txt",
            b"3\n 500\n",
            [],
            "is a number, the first is 3, and would count as one word; if",
        ),
        ("data.csv", b"length\n3.0\n5.0\n", [], "add --tokenizer lengths, and if they are texts, --tokenizer chars"),
        ("data.csv", b"text;label\na b;1\n", [], "the only column is called 'text;label', and seems to be several"),
        (
            "data.jsonl",
            b'{"text": "a"}\n{"text": null}\n',
            [],
            "field 'text' holds null, not text; fill it in",
        ),
        ("data.jsonl", b'{"n": 3.0}\n', [], "if they hold lengths, for example --field n --tokenizer lengths"),
        ("data.jsonl", b'{"ids": [5, 7]}\n', [], "if they hold lengths, for example --field ids --tokenizer lengths"),
        ("data.txt", b" a b c\n", ["--max-tokens", "2"], "raise --max-tokens, or cut texts with --max-length 2"),
        ("data.txt", b"a\n", ["--tokenizer", "./gpt2"], "no such file or folder"),
        ("data.txt", b"a\n", ["--world-size", "2"], "--world-size 2 is more than the examples, 1; lower it"),
        ("data.txt", b"a\n", ["--format", "txt"], "--format is for standard input"),
        ("notes", b"a\n", [], "the name must end in .jsonl, .csv, .tsv or .txt, each also as .gz, or .parquet; or say"),
        (
            "data.jsonl",
            b'{"en": "a", "de": "b"}\n',
            ["--field", "en,de"],
            "for two texts per example add --pairs --fie",
        ),
        (
            "data.jsonl",
            b'{"messages": [{"role": "user", "content": "a"}]}\n',
            ["--field", "messages"],
            """jq -c '{text: ([.messages[].content] | join(" "))}' FILE > texts.jsonl""",
        ),
        ("data.jsonl", b'{"d": {"text": "a"}}\n', ["--field", "d"], "jq -c '{text: (.d.text)}' FILE > texts.jsonl"),
        ("data.jsonl", b'{"d": {"text": "a"}}\n', ["--field", "d.text"], "fields inside a field are not read: take"),
        ("data.jsonl", b'{"d": 3}\n', ["--field", "d.text"], "fields here: d; fields inside a field are not read\n"),
        ("data.txt", b"a\n", ["--pairs"], "no fields"),
        ("data.txt", b"\x00\x01\n", ["--tokenizer", "lengths"], "data.txt:1: --tokenizer lengths needs"),
        ("data.txt", b"5\n-3\n", ["--tokenizer", "lengths"], "data.txt:2: --tokenizer lengths needs a whole number"),
        ("data.txt", b"9" * 20, ["--tokenizer", "lengths"], "a whole number from 0 to 2,147,483,647 or a list"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "advise"])
def test_unusable_input_is_one_line_and_exit_code_2(tmp_path, capsys, command, name, content, options, message):
    (tmp_path / name).write_bytes(content)
    code, out, err = run(capsys, command, tmp_path / name, *options)
    assert (code, out) == (2, "")
    assert err.startswith("batchwright: error: ")
    assert err.count("\n") == 1
    assert message in err


def test_a_missing_file_is_named(tmp_path, capsys):
    code, _, err = run(capsys, "plan", tmp_path / "absent.jsonl")
    assert code == 2
    assert err == f"batchwright: error: no such file: {tmp_path / 'absent.jsonl'}\n"


def test_a_text_without_any_token_is_not_planned(tmp_path, capsys):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": " "}\n')
    code, _, err = run(capsys, "plan", path)
    assert code == 2
    assert "is empty when counted in words" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "the following arguments are required: FILE"),
        (["plan", ""], "needs a file, a folder or - for standard input"),
        (["plan", "a.txt", "--max-tokens", "0"], "--max-tokens: needs a whole number of 1 or more, got '0'"),
        (["plan", "a.txt", "--max-tokens", "nan"], "--max-tokens: needs a whole number of 1 or more, got 'nan'"),
        (["plan", "a.txt", "--max-tokens", "-5"], "--max-tokens: needs a whole number of 1 or more, got '-5'"),
        (["plan", "a.txt", "--max-items", "1e400"], "--max-items: needs a whole number of 1 or more, got '1e400'"),
        (["plan", "a.txt", "--max-items", "1,5"], "--max-items: needs a whole number of 1 or more, got '1,5'"),
        (["plan", "a.txt", "--limit", "9" * 20], "--limit: needs a whole number of at most 2,147,483,647"),
        (["plan", "a.txt", "--seed", "-1"], "--seed: needs a whole number of 0 or more"),
        (["advise", "a.txt", "--model-kind", "rnn"], "invalid choice: 'rnn' (choose from"),
        (["advise", "a.txt", "--against", "luck"], "invalid choice: 'luck' (choose from"),
        (["nonsense"], "invalid choice: 'nonsense'"),
        (["advice", "a.txt"], "; did you mean 'advise'?"),
        (
            ["plan", "a.txt", "--max_tokens", "9"],
            "unrecognized arguments: --max_tokens 9; did you mean '--max-tokens'?",
        ),
        (["plan", "a.jsonl", "--pairs", "en,de"], "unrecognized arguments: en,de; --pairs takes no value; see"),
        (["--verison"], "unrecognized arguments: --verison; did you mean '--version'?"),
        ([__file__], f"; to look at a file: batchwright plan {__file__}"),
        (["advise", "a.txt", "--task", "trian"], "; did you mean 'train'?"),
        (["serve", "a:b", "--port", "80000"], "--port: needs a number from 0 to 65535, got '80000'"),
        (["lab", "show", "--port", "-1"], "--port: needs a whole number of 0 or more, got '-1'"),
        (["lab"], "the following arguments are required: COMMAND"),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_wrong_options_are_one_line_and_exit_code_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert message in err
    assert err.count("\n") == 1
    assert err.endswith("--help\n")


def test_no_words_at_all_show_the_help(capsys):
    code, out, err = run(capsys)
    assert (code, err) == (0, "")
    assert out.startswith("usage: batchwright ")
    assert "batchwright advise train.jsonl" in out


def test_ctrl_c_ends_quietly(tmp_path, capsys, monkeypatch):
    # A tokenizer is the user's own code: what interrupts it interrupts the command.
    (tmp_path / "interrupting_rule.py").write_text("def count(text):\n    raise KeyboardInterrupt\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = jsonl(tmp_path / "data.jsonl")
    assert run(capsys, "plan", path, "--tokenizer", "interrupting_rule:count") == (130, "", "")


@pytest.mark.parametrize("command", ["plan", "advise"])
def test_a_tokenizer_that_raises_is_one_line_and_exit_code_2(tmp_path, capsys, monkeypatch, command):
    (tmp_path / "raising_rule.py").write_text("def count(text):\n    return 1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    path = jsonl(tmp_path / "data.jsonl")
    code, out, err = run(capsys, command, path, "--tokenizer", "raising_rule:count")
    assert (code, out) == (2, "")
    message = "--tokenizer raising_rule:count failed at text 1: ZeroDivisionError: division by zero"
    assert err == f"batchwright: error: {message}; mend it, or leave such texts out\n"


AWKWARD = {
    "windows.txt": b"one two\r\nthree\r\n",
    "windows.csv": b"text,n\r\none two,1\r\nthree,2\r\n",
    "windows.jsonl": b'{"text": "one two"}\r\n{"text": "three"}\r\n',
    "mark.csv": b"\xef\xbb\xbftext,n\none two,1\nthree,2\n",
    "mark.jsonl": b'\xef\xbb\xbf{"text": "one two"}\n{"text": "three"}\n',
    "open.txt": b"one two\nthree",
}


@pytest.mark.parametrize("name", AWKWARD)
def test_line_ends_and_marks_are_no_words(tmp_path, capsys, name):
    (tmp_path / name).write_bytes(AWKWARD[name])
    code, out, _ = run(capsys, "plan", tmp_path / name, "--json")
    assert (code, json.loads(out)["data"]["lengths"][0]["mean"]) == (0, 1.5)


@pytest.mark.parametrize("command", ["plan", "advise"])
def test_one_line_is_nothing_to_plan(tmp_path, capsys, command):
    (tmp_path / "one.txt").write_text("one line\n")
    code, out, _ = run(capsys, command, tmp_path / "one.txt")
    assert code == 0
    assert "one.txt: 1 example\n" in out
    assert "All examples fit in one batch of 64 padded tokens" in " ".join(out.split())
    assert "hardly vary" not in out


@pytest.mark.parametrize("command", ["plan", "advise"])
def test_one_huge_line_is_counted(tmp_path, capsys, command):
    (tmp_path / "huge.txt").write_text("w " * 300_000 + "\nshort\n")
    code, out, _ = run(capsys, command, tmp_path / "huge.txt")
    assert code == 0
    assert "max 300,000" in out


@pytest.mark.parametrize("command", ["plan", "advise", "doctor", "demo"])
def test_help_teaches_with_examples(capsys, command):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert f"examples:\n  batchwright {command}" in out


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"batchwright {bw.__version__}\n"


def test_planning_needs_numpy_alone(tmp_path):
    path = jsonl(tmp_path / "data.jsonl.gz")
    code = (
        "import sys; from batchwright.cli import main; main(['advise', sys.argv[1]]); "
        "assert not {'torch', 'transformers', 'tokenizers'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_demo_without_torch_says_how_to_get_it(tmp_path):
    # None in sys.modules makes the import fail as if the package were absent.
    code = (
        "import sys; sys.modules['torch'] = None; from batchwright.cli import main; "
        "sys.exit(main(['demo', '--output', sys.argv[1]]))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "batchwright: error: torch is not installed; run: pip install 'batchwright[torch]'\n"


def test_a_closed_pipe_ends_quietly(tmp_path):
    path = jsonl(tmp_path / "data.jsonl")
    command = [sys.executable, "-m", "batchwright", "plan", path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()  # as `head` does once it has seen enough
        assert process.stderr.read() == b""
    assert process.returncode == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("option", ["--json", "--quiet"])
def test_a_full_disk_is_told_in_one_line(tmp_path, option):
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "batchwright", "plan", jsonl(tmp_path / "data.jsonl"), option]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "batchwright: error: reading or writing failed: No space left on device\n"


@pytest.mark.parametrize(("stream", "code"), [(1, 2), (2, 0)])
def test_a_closed_stream_is_no_traceback(tmp_path, stream, code):
    command = [sys.executable, "-m", "batchwright", "plan", jsonl(tmp_path / "data.jsonl"), "--quiet"]
    done = subprocess.run(command, preexec_fn=lambda: os.close(stream), capture_output=True, text=True, check=False)
    message = "batchwright: error: standard output is closed; send it to a file, or to /dev/null\n"
    assert (done.returncode, done.stderr) == (code, message if stream == 1 else "")
    assert done.stdout.startswith("grouping") == (stream == 2)
