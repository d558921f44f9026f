"""The source code of Python's standard library: a corpus that every machine has."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Names, numbers, single symbols and line ends; blanks carry nothing that the symbols do not.
_TOKEN = re.compile(r"[^\W\d]\w*|\d+|\n|[^\w\s]")
# Folders of other people's packages, and of tests, some of which hold broken code on purpose.
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def python_files(root: Path) -> list[Path]:
    """Return the Python files of a folder in a fixed order, without tests and installed packages."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED]  # not even looked into: they can be huge
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found)


def functions_of(source: str) -> Iterator[str]:
    """Yield the source of each function and method; one inside another function belongs to that one.

    >>> list(functions_of("x = 1\\nclass A:\\n    def f(self):\\n        return 1\\n"))
    ['    def f(self):\\n        return 1']
    """
    lines = source.split("\n")
    waiting: list[Any] = list(ast.parse(source).body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield "\n".join(lines[node.lineno - 1 : node.end_lineno])
        elif isinstance(node, ast.ClassDef):
            waiting = [*node.body, *waiting]


def tokenize(text: str) -> list[str]:
    r"""Split source into names, numbers, symbols and line ends.

    >>> tokenize("def f(x1):\n    return 'a'")
    ['def', 'f', '(', 'x1', ')', ':', '\n', 'return', "'", 'a', "'"]
    """
    return _TOKEN.findall(text)
