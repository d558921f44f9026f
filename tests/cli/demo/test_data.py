from dataclasses import replace

import pytest

pytest.importorskip("torch")

from batchwright.cli.demo.data import END, RARE, START, encode, lengths_of, load_corpus
from batchwright.cli.demo.records import QUICK
from batchwright.errors import ArgumentError


def test_unknown_tokens_are_rare_and_the_end_is_marked():
    assert encode(["a", "z"], {"a": 7}, 10).tolist() == [START, 7, RARE, END]


def test_a_long_function_is_cut_to_what_the_model_reads_and_one_more():
    ids = encode(["a"] * 50, {"a": 7}, 10)
    assert ids.tolist() == [START] + [7] * 10
    assert lengths_of([ids]).tolist() == [10]


def test_the_standard_library_gives_a_heavy_tailed_corpus():
    settings = replace(QUICK, num_train=200, max_length=512)
    corpus = load_corpus(settings)
    lengths = lengths_of(corpus.train)
    assert (len(corpus.train), len(corpus.valid), len(corpus.vocabulary)) == (200, 16, 500)
    assert lengths.max() > 3 * lengths.mean()
    assert max(ids.max() for ids in corpus.train + corpus.valid) < 500


def test_the_corpus_is_the_same_every_time():
    first, second = load_corpus(QUICK), load_corpus(QUICK)
    assert all((a == b).all() for a, b in zip(first.train, second.train, strict=True))


def test_a_file_that_is_no_python_is_passed_over(tmp_path):
    (tmp_path / "a.py").write_text("def broken(:\n")
    for i in range(12):
        (tmp_path / f"b{i}.py").write_text("def f(x):\n    return x\n" * 10)
    corpus = load_corpus(replace(QUICK, num_train=20, num_valid=5), root=tmp_path)
    assert (len(corpus.train), len(corpus.valid)) == (20, 5)


def test_a_folder_without_python_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="needs at least 2 Python files, found 0"):
        load_corpus(QUICK, root=tmp_path)
