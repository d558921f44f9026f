"""The table of strategies: every name, option and test in it exists, and every strategy of the lab is in it."""

import ast
import importlib
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("torch")

from batchwright.lab import strategies

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "strategies.md").read_text(encoding="utf-8")


def rows():
    lines = [line for line in TEXT.splitlines() if line.startswith("| ") and "The document says" not in line]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]


ROWS = [pytest.param(*cells, id=f"{place:02}") for place, cells in enumerate(rows(), start=1)]


def codes(cell):
    return re.findall(r"`([^`]+)`", cell)


def resolve(name):
    """Return the object that a dotted name below the package stands for."""
    found = importlib.import_module("batchwright")
    path = "batchwright"
    for part in name.split("."):
        path = f"{path}.{part}"
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(path)
    return found


@cache
def read_tests(path):
    tree = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_there_is_a_row_for_every_document():
    assert [len(cells) for cells in rows()] == [4] * len(rows())
    assert len(re.findall(r"^\| The document says", TEXT, flags=re.MULTILINE)) == 4
    assert len(rows()) > 80


@pytest.mark.parametrize(("sentence", "package", "lab", "shown"), ROWS)
def test_a_row_quotes_little_and_names_what_exists(sentence, package, lab, shown):
    quoted = re.findall(r'"([^"]+)"', sentence)
    assert 1 <= len(" ".join(quoted).split()) <= 10
    last = None
    assert codes(package)
    for code in codes(package):
        if code.endswith(".py"):
            assert (ROOT / "examples" / code).is_file()
        elif "=" in code:
            assert code.partition("=")[0] in inspect.signature(last).parameters
        elif code.startswith('"'):
            assert code.strip('"') in inspect.getdoc(last)
        else:
            last = resolve(code)
    assert {strategies.get(name).name for name in codes(lab)} <= set(strategies.names())
    assert codes(shown)
    for test in codes(shown):
        path, name = test.split("::")
        assert name in read_tests(path)


def test_every_strategy_of_the_lab_is_in_the_table():
    assert {name for cells in rows() for name in codes(cells[2])} == set(strategies.names())
