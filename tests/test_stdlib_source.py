"""The standard library as a corpus: its files, functions and tokens."""

import sysconfig
from pathlib import Path

from batchwright._stdlib_source import functions_of, python_files, tokenize

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


def test_tests_and_installed_packages_are_left_out():
    root = Path(sysconfig.get_paths()["stdlib"])
    parts = {part for path in python_files(root) for part in path.relative_to(root).parts}
    assert not parts & {"site-packages", "test", "tests"}
    assert "argparse.py" in parts
