"""Python's own source as text that every machine has: the files of the standard library, their functions, their tokens.

The demo and the lab build their data from it, so what these functions return for a version of Python must not change.
"""

from __future__ import annotations

import ast
import os
import re
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Names, numbers, single symbols and line ends; blanks carry nothing that the symbols do not.
_TOKEN = re.compile(r"[^\W\d]\w*|\d+|\n|[^\w\s]")
# Folders of other people's packages, and of tests, some of which hold broken code on purpose.
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})


def stdlib_folder() -> Path:
    """Return the folder of the standard library of this Python."""
    return Path(sysconfig.get_paths()["stdlib"])


def python_files(root: Path) -> list[Path]:
    """Return the Python files of a folder in a fixed order, without tests and installed packages."""
    found = []
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in _SKIPPED]  # not even looked into: they can be huge
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found)


def functions_in(file: Path) -> list[str]:
    """Return the source of each function in a file; nothing for a file that cannot be read as Python."""
    try:
        return list(functions_of(file.read_text(encoding="utf-8")))
    except (SyntaxError, ValueError, OSError):  # another encoding, or a template that is not Python
        return []


def functions_of(source: str) -> Iterator[str]:
    """Yield the source of each function and method; a function inside another one belongs to the outer one.

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
