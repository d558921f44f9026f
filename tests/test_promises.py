"""Every promise of ``docs/promises.md`` names files and tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "promises.md").read_text(encoding="utf-8")
ROWS = [line.split(" | ") for line in TEXT.splitlines() if line.startswith("| ") and "`" in line]
KEPT = sorted({place for *_, last in ROWS for place in re.findall(r"`([\w/.:]+)`", last)})


@cache
def names_in(path):
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    return {name for name in names if name.startswith("test_")}


@pytest.mark.parametrize("place", KEPT)
def test_what_keeps_a_promise_exists(place):
    path, _, name = place.partition("::")
    assert (ROOT / path).is_file()
    if name:
        assert name in names_in(path)
    elif path.startswith("tests/"):
        assert names_in(path)


def test_every_promise_has_something_that_keeps_it():
    assert len(ROWS) >= 25
    for promise, *_, kept in ROWS:
        assert re.search(r"`(tests|tools)/[\w/]+\.py", kept), promise
