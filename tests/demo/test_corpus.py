import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest

from batchwright._demo.corpus import END, RARE, START, encode, lengths_of, load_corpus
from batchwright._demo.settings import QUICK
from batchwright._stdlib_source import functions_of, python_files, tokenize
from batchwright.errors import ArgumentError

SOURCE = """
def first(x):
    def inner():
        pass
    return x

class A:
    async def second(self): ...
"""


def test_functions_and_methods_are_found_and_inner_ones_stay_inside():
    found = list(functions_of(SOURCE))
    assert [text.split("(")[0].split()[-1] for text in found] == ["first", "second"]
    assert "def inner" in found[0]


def test_tokens_are_names_numbers_symbols_and_line_ends():
    assert tokenize("x = 12\ny+=é_1") == ["x", "=", "12", "\n", "y", "+", "=", "é_1"]


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


def test_tests_and_installed_packages_are_left_out():
    root = Path(sysconfig.get_paths()["stdlib"])
    parts = {part for path in python_files(root) for part in path.relative_to(root).parts}
    assert not parts & {"site-packages", "test", "tests"}
    assert "argparse.py" in parts


def test_a_file_that_is_no_python_is_passed_over(tmp_path):
    (tmp_path / "a.py").write_text("def broken(:\n")
    for i in range(12):
        (tmp_path / f"b{i}.py").write_text("def f(x):\n    return x\n" * 10)
    corpus = load_corpus(replace(QUICK, num_train=20, num_valid=5), root=tmp_path)
    assert (len(corpus.train), len(corpus.valid)) == (20, 5)


def test_a_folder_without_python_is_refused(tmp_path):
    with pytest.raises(ArgumentError, match="too few Python files"):
        load_corpus(QUICK, root=tmp_path)
