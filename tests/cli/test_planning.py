"""The commands ``plan`` and ``advise`` as a user runs them."""

import json
import os
import re
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import batchwright as bw
from batchwright.cli import main

CORPORA = Path(os.environ.get("BATCHWRIGHT_CORPORA", "corpora"))  # a folder of real texts, where there is one


@pytest.fixture
def heavy(tmp_path):
    """A file of 2,000 lengths with a heavy tail, as numbers."""
    path = tmp_path / "lengths.txt"
    lengths = np.clip(np.random.default_rng(0).lognormal(3, 1, 2000).astype(int), 1, 500)
    path.write_text("\n".join(map(str, lengths)) + "\n")
    return str(path)


@pytest.fixture
def pairs(tmp_path):
    """A file of 1,000 pairs whose two lengths do not go together."""
    path = tmp_path / "pairs.csv"
    sides = np.clip(np.random.default_rng(0).lognormal(3, 1, (1000, 2)).astype(int), 1, 300)
    path.write_text("prompt,response\n" + "".join(f"{a},{b}\n" for a, b in sides))
    return [str(path), "--pairs", "--field", "prompt,response", "--tokenizer", "lengths"]


def run_json(capsys, *arguments):
    code = main([*arguments, "--json"])
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    return json.loads(captured.out)


def agree(capsys, *arguments):
    """Say whether both commands give the same figures for the plan that they recommend and the fixed sizes."""
    plan, advice = run_json(capsys, "plan", *arguments), run_json(capsys, "advise", *arguments)
    entries = {entry["name"]: entry for entry in plan["entries"]}
    figures = [advice["planned"], advice["shuffled"], advice["sorted"]]
    assert plan["settings"] == advice["settings"]
    return all(figure == entries[figure["name"]] for figure in figures)


@pytest.mark.parametrize(
    "options",
    [[], ["--max-tokens", "4000"], ["--pad-multiple-of", "8"], ["--max-items", "32"], ["--world-size", "4"]],
    ids=" ".join,
)
def test_plan_and_advise_agree_on_padding(heavy, capsys, options):
    assert agree(capsys, heavy, "--tokenizer", "lengths", *options)


@pytest.mark.parametrize("options", [[], ["--model-kind", "decoder"], ["--task", "generate"]], ids=" ".join)
def test_plan_and_advise_agree_on_pairs(pairs, capsys, options):
    assert agree(capsys, *pairs, *options)


@pytest.mark.parametrize(
    "name", ["banking77.jsonl.gz", "sentence-polarity.jsonl.gz", "wikitext2-raw-test.txt.gz", "movie-reviews.jsonl.gz"]
)
def test_plan_and_advise_agree_on_real_texts(capsys, name):
    if not (CORPORA / name).exists():
        pytest.skip(f"{name} is not in {CORPORA}; BATCHWRIGHT_CORPORA names a folder of texts")
    assert agree(capsys, str(CORPORA / name))


def test_the_padding_that_is_printed_is_the_same(heavy, capsys):
    main(["advise", heavy, "--tokenizer", "lengths", "--quiet"])
    advised = next(line for line in capsys.readouterr().out.split("\n") if line.startswith(("WindowSort", "Buckets")))
    main(["plan", heavy, "--tokenizer", "lengths", "--quiet"])
    name, padding, _, num_batches, *_ = advised.split()
    planned = [line.split() for line in capsys.readouterr().out.split("\n")]
    assert [name, padding, "%", num_batches] in [line[:4] for line in planned]


def test_outputs_that_inputs_do_not_tell_are_found(pairs, capsys):
    found = run_json(capsys, "advise", *pairs, "--task", "generate")
    assert found["verdict"] == "depends"
    assert abs(found["outputs"]["correlation"]) < 0.2
    assert found["question"]["task"] == "generate"


def test_pairs_of_a_decoder_are_packed_together(pairs, capsys):
    main(["advise", *pairs, "--model-kind", "decoder"])
    out = " ".join(capsys.readouterr().out.split())
    assert "planned by source and target together, as a decoder-only model reads them" in out
    assert "Pack instead. A decoder-only model can read several examples in one row" in out


def test_the_answer_says_against_what(heavy, capsys):
    for order, words in (("shuffled", "in random order"), ("sorted", "sorted by length")):
        main(["advise", heavy, "--tokenizer", "lengths", "--max-tokens", "4000", "--quiet", "--against", order])
        first = " ".join(capsys.readouterr().out.split("\n\n")[0].split())
        assert f"gainst fixed-size batches of 9 examples {words}" in first
        assert first.startswith("Yes, ") == (order == "shuffled")


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_plan_and_advise_recommend_the_same(heavy, capsys, kind):
    options = [heavy, "--tokenizer", "lengths", "--model-kind", kind, "--max-tokens", "8000"]
    advice, plan = run_json(capsys, "advise", *options), run_json(capsys, "plan", *options)
    assert advice["verdict"] == ("pack" if kind == "decoder" else "yes")
    used = advice["packed"] if kind == "decoder" else advice["planned"]
    assert plan["recommendation"].startswith(f"Use {used['name']}")


def test_a_small_gain_is_not_called_none(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("\n".join(["100", "104"] * 500))
    plan = run_json(capsys, "plan", str(tmp_path / "a.txt"), "--tokenizer", "lengths", "--max-tokens", "2000")
    assert plan["recommendation"].startswith("Planned batches gain less than 10.0 % here: keep a fixed size of 19 ")


@pytest.mark.parametrize("options", ["--model-kind decoder", "--task generate", "", "--pad-multiple-of 8"])
def test_the_hint_to_cut_texts_helps(tmp_path, capsys, options):
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 80, "b": 50}\n{"a": 4, "b": 4}\n' * 3)
    command = ["plan", str(path), "--tokenizer", "lengths", "--pairs", "--field", "a,b", "--max-tokens", "64"]
    command += options.split()
    assert main(command) == 2
    hint = capsys.readouterr().err.rpartition("--max-length ")[2].split()[0]
    assert hint == ("64" if "generate" in options else "32")
    assert main([*command, "--max-length", hint]) == 0


def test_what_is_said_of_multiples_of_8_comes_true_with_that_option(tmp_path, capsys):
    # The budget that is chosen without --max-tokens grows with the padded lengths.
    path = tmp_path / "a.txt"
    path.write_text("\n".join(map(str, np.random.default_rng(10).normal(300, 80, 5000).astype(int).clip(1))))
    options = [str(path), "--tokenizer", "lengths"]
    before = run_json(capsys, "advise", *options)
    assert any("--pad-multiple-of 8 has" in note for note in before["caveats"])
    after = run_json(capsys, "advise", *options, "--pad-multiple-of", "8")
    assert before["settings"]["max_tokens"] < after["settings"]["max_tokens"]
    assert before["rounded"] == after["planned"]


def test_the_help_and_the_budget_say_that_packed_rows_are_items(heavy, capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    assert "examples per batch, or rows of Packed (default: no limit)" in " ".join(capsys.readouterr().out.split())
    main(["plan", heavy, "--tokenizer", "lengths", "--max-tokens", "4000", "--max-items", "5"])
    assert "budget: 4,000 padded tokens and 5 examples (rows of Packed) per batch\n" in capsys.readouterr().out


def on_a_terminal(*arguments):
    """Run a command whose standard error is a terminal; return its standard output and what the terminal showed."""
    pty, fcntl, termios = map(pytest.importorskip, ("pty", "fcntl", "termios"))
    terminal, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))  # a new terminal has no width
    command = [sys.executable, "-m", "batchwright", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=inside) as process:
        os.close(inside)
        shown = b""
        while chunk := read(terminal):
            shown += chunk
        out = process.stdout.read().decode()
    os.close(terminal)
    assert process.returncode == 0, shown
    return out, shown.decode()


def read(terminal):
    try:
        return os.read(terminal, 65536)
    except OSError:  # the other end is closed
        return b""


@pytest.mark.parametrize("command", ["plan", "advise"])
def test_every_phase_is_shown_on_a_terminal(tmp_path, command):
    path = tmp_path / "texts.txt"
    path.write_text("a few words\nmore\n" * 500)
    out, shown = on_a_terminal(command, str(path), "--json")
    assert json.loads(out)["data"]["num_examples"] == 1000
    for line in ("reading texts.txt: 1,000 in ", "measuring lengths: 1,000 in ", "planning: 8 in "):
        assert line in shown


def test_a_live_bar_names_the_grouping_that_is_planned(tmp_path):
    pytest.importorskip("tqdm")
    path = tmp_path / "texts.txt"
    path.write_text("a few words\nmore\n" * 500)
    _, shown = on_a_terminal("plan", str(path))
    for name in ("WindowSort()", "Buckets(count=64)", "Packed(capacity=3)"):
        assert f", {name}]" in shown


def test_a_quiet_command_shows_no_phase(heavy):
    assert on_a_terminal("plan", heavy, "--tokenizer", "lengths", "--quiet")[1] == ""


def test_loading_a_tokenizer_is_a_phase_of_its_own(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    saved = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(saved))
    (tmp_path / "texts.txt").write_text("a\na\n")
    _, shown = on_a_terminal("plan", str(tmp_path / "texts.txt"), "--tokenizer", str(saved))
    assert "loading the tokenizer: 1 in " in shown


def test_standard_input_is_read_like_a_file(tmp_path, capsys):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "a b"}\n{"text": "a"}\n{"text": "a b c"}\n')
    with path.open("rb") as file:
        command = [sys.executable, "-m", "batchwright", "plan", "-", "--format", "jsonl", "--json"]
        done = subprocess.run(command, stdin=file, capture_output=True, check=True)
    assert json.loads(done.stdout) == run_json(capsys, "plan", str(path))


def test_few_batches_that_keep_their_neighbours_are_told_with_a_grouping_that_does_not(heavy, capsys):
    command = ["plan", heavy, "--tokenizer", "lengths", "--model-kind", "encoder", "--max-tokens"]
    few, many = (run_json(capsys, *command, limit)["recommendation"] for limit in ("4000", "600"))
    assert "new neighbours" not in many
    told = re.search(r"WindowSort\((\d+)\) pads more and gives new neighbours", few)
    lengths, budget = [int(line) for line in Path(heavy).read_text().split()], bw.MaxTokens(4000)
    now, then = (
        bw.plan_batches(lengths, budget, grouping=grouping).report()
        for grouping in (bw.WindowSort(), bw.WindowSort(int(told[1])))
    )
    assert then.recurrence < 0.5 <= now.recurrence
    assert then.padding > now.padding
