"""The benchmark that counts batches: its pure parts, a plan of drawn lengths, and a trial run of the measuring."""

import json
import sys

import numpy as np
import pytest


@pytest.fixture
def batches(script):
    return script("dynabatch_batches")


def test_a_word_is_1_3_tokens_and_texts_are_cut(script):
    corpus = script("_corpora").of_texts("some", ["a b c", "", " ".join(["word"] * 500)])
    # 3.9 and 1.3 tokens rounded up; 393 words are the most within 512 tokens.
    assert corpus.tokens.tolist() == [4, 2, 511]
    assert corpus.words.tolist() == [3, 1, 393]
    assert corpus.chars.tolist() == [5, 1, 2499 * 393 // 500]


def test_a_large_corpus_is_thinned_evenly(script):
    texts = ["a " * number for number in range(1, 101)]
    assert script("_corpora").of_texts("some", texts, 4).words.tolist() == [1, 26, 51, 76]


def test_drawn_lengths_are_the_same_every_time(script):
    corpora = script("_corpora").load_corpora(None, 200)
    again = script("_corpora").load_corpora(None, 200)
    assert [corpus.describe() for corpus in corpora] == [corpus.describe() for corpus in again]
    assert all(len(corpus.tokens) == 200 and corpus.longest <= 512 for corpus in corpora)


def test_shapes_are_counted_and_rows_are_judged(batches):
    # 8 examples in twos are 4 batches; 3 × 8 tokens are 1.5 times the 2 × 8 of the first batch.
    plans = {
        "dynabatch": batches.counted([(2, 8), (3, 8), (3, 2)]),
        "train": batches.counted([(2, 8), (2, 8), (3, 2), (1, 2)]),
    }
    row = batches.judge(plans, 8, 2, 8)
    assert (row["static"], row["batches"], row["mark"]) == (4, {"dynabatch": 3, "train": 4}, "memory")
    assert row["largest"] == pytest.approx({"dynabatch": 1.5, "train": 1.0}, rel=0.01)
    plans["dynabatch"] = batches.counted([(2, 8), (2, 8), (4, 2)])
    assert batches.judge(plans, 8, 2, 8)["mark"] == "more"


def test_of_many_shapes_the_largest_and_a_spread_are_measured(script):
    shapes = [(number, 100 // number) for number in range(2, 50)]
    chosen = script("_plan_peaks").choose_shapes(shapes, (1, 200), 10)
    assert (len(chosen), chosen[0]) == (10, (1, 200))
    assert max(shapes, key=lambda shape: shape[0] * shape[1]) in chosen


@pytest.fixture
def planned(batches, monkeypatch, tmp_path, capsys):
    """A function that plans drawn lengths, with a stand-in for dynabatch that is counted."""
    calls = []

    def theirs(corpus, arguments):
        calls.append(corpus.name)
        size = arguments["batch_size"]
        widths = np.sort(corpus.tokens)[::-1][::size]
        return [(size, int(width)) for width in widths]

    corpora = [replace_tokens(corpus, 40) for corpus in batches.load_corpora(None, 120)]
    monkeypatch.setattr(batches, "load_corpora", lambda folder: corpora)
    monkeypatch.setattr(batches, "theirs", theirs)

    def run(*options):
        calls.clear()
        path = tmp_path / "plans.json"
        monkeypatch.setattr(sys, "argv", ["dynabatch_batches", "--output", str(path), *options])
        assert batches.main() == 0
        return json.loads(path.read_text()), len(calls), capsys.readouterr().out

    return run


def replace_tokens(corpus, longest):
    import dataclasses

    return dataclasses.replace(corpus, tokens=np.minimum(corpus.tokens, longest))


def test_a_second_run_plans_only_what_the_first_did_not(planned, batches):
    report, calls, said = planned("--minutes", "0")
    assert (report["rows"], calls) == ([], 0)
    assert "out of time" in said
    report, calls, said = planned()
    assert len(report["rows"]) == calls == 2 * len(batches.SETTINGS)
    assert said.count("\n| ") == calls + 1  # a line each, and the one below the titles
    again, calls, _ = planned()
    assert calls == 0
    assert again["rows"] == report["rows"]
    for row in again["rows"]:
        assert row["batches"]["train"] <= row["static"]
        assert row["batches"]["generate"] <= row["static"]


def test_measuring_reads_the_plans_and_compares_with_the_first_batch(planned, batches, monkeypatch, tmp_path):
    planned()
    options = ["--measure-memory", "--smoke", "--plans", str(tmp_path / "plans.json"), "--corpora", "lognormal"]
    options += ["--peaks", str(tmp_path / "peaks.json"), "--max-shapes", "3", "--cap-gib", "1"]
    monkeypatch.setattr(sys, "argv", ["dynabatch_batches", *options])
    assert batches.main() == 0
    rows = json.loads((tmp_path / "peaks.json").read_text())["rows"]
    assert [(row["run"].split(",")[0], row["plan"]) for row in rows] == [
        ("train", "dynabatch"),
        ("train", "train"),
        ("generate", "dynabatch"),
        ("generate", "generate"),
        ("generate", "dynabatch"),
        ("generate", "generate"),
        ("generate", "generate, output given"),
    ]
    assert all(row["ratios"][0] == [16, 40, 1.0] and row["num_measured"] == 3 for row in rows)
    assert all(row["largest"] >= 1 for row in rows)


def test_the_commands_in_the_description_are_taken(batches, monkeypatch):
    lines = [line.partition("#")[0].split() for line in batches.__doc__.splitlines() if "dynabatch_batches.py" in line]
    assert len(lines) == 2
    for _, *words in lines:
        plain = [word.strip("[]") for word in words]
        monkeypatch.setattr(sys, "argv", plain)
        assert batches._options().measure_memory == ("--measure-memory" in plain)


def test_measuring_refuses_the_option_for_plans(batches, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["dynabatch_batches", "--measure-memory", "--output", "peaks.json"])
    with pytest.raises(SystemExit):
        batches._options()
    assert "--output is for the plans; with --measure-memory use --peaks" in capsys.readouterr().err


def test_measuring_without_plans_says_so(batches, monkeypatch, tmp_path):
    options = ["--measure-memory", "--smoke", "--plans", str(tmp_path / "none.json"), "--cap-gib", "1"]
    monkeypatch.setattr(sys, "argv", ["dynabatch_batches", *options])
    with pytest.raises(SystemExit, match="no plan of 'instruct-mix' under 'range 5'"):
        batches.main()
