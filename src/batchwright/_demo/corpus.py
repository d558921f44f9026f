"""A corpus that every machine has: the functions of Python's standard library."""

from __future__ import annotations

import ast
import os
import random
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from ..errors import ArgumentError
from .settings import DemoSettings

Ids = npt.NDArray[np.int64]

# Names, numbers, single symbols and line ends; blanks carry nothing that the symbols do not.
_TOKEN = re.compile(r"[^\W\d]\w*|\d+|\n|[^\w\s]")
_SPECIAL = ("<padding>", "<rare>", "<start>", "<end>")
PADDING, RARE, START, END = range(4)
# Folders of other people's packages, and of tests, some of which hold broken code on purpose.
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
# One file in this many is kept for validation, so that no validated function has a sibling in training.
_VALID_EVERY = 10


@final
@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Token ids of each function, the start mark first; ``vocabulary[i]`` is the text of id ``i``."""

    train: list[Ids]
    valid: list[Ids]
    vocabulary: tuple[str, ...]


def load_corpus(settings: DemoSettings, *, root: Path | None = None) -> Corpus:
    """Read functions until there are enough, from files in a random order that the seed fixes.

    Args:
        settings: how many functions, how long, how many different tokens.
        root: a folder of Python files; None takes the standard library.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    files = python_files(root)
    random.Random(settings.seed).shuffle(files)
    valid_files = files[::_VALID_EVERY]
    train_files = [file for i, file in enumerate(files) if i % _VALID_EVERY]
    if not valid_files or not train_files:
        raise ArgumentError(f"too few Python files under {root} for the demo: {len(files)}")
    train = _take(train_files, settings.num_train)
    valid = _take(valid_files, settings.num_valid)
    counts = Counter(token for tokens in train for token in tokens)
    vocabulary = (
        *_SPECIAL,
        *(token for token, _ in counts.most_common(settings.vocabulary_size - len(_SPECIAL))),
    )
    ids = {token: i for i, token in enumerate(vocabulary)}
    return Corpus(
        train=[encode(tokens, ids, settings.max_length) for tokens in train],
        valid=[encode(tokens, ids, settings.max_length) for tokens in valid],
        vocabulary=vocabulary,
    )


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


def encode(tokens: Sequence[str], ids: dict[str, int], max_length: int) -> Ids:
    """Return start mark, tokens and end mark as ids: ``max_length`` to read at most, one more to predict."""
    known = [START, *(ids.get(token, RARE) for token in tokens), END]
    return np.array(known[: max_length + 1], dtype=np.int64)


def lengths_of(examples: Sequence[Ids]) -> npt.NDArray[np.int64]:
    """Return how many tokens the model reads of each example: all but the last, which is only predicted."""
    return np.array([len(ids) - 1 for ids in examples], dtype=np.int64)


def _take(files: Sequence[Path], count: int) -> list[list[str]]:
    found: list[list[str]] = []
    for file in files:
        found += [tokenize(text) for text in _functions_in(file)]
        if len(found) >= count:
            break
    return found[:count]


def _functions_in(file: Path) -> list[str]:
    try:
        return list(functions_of(file.read_text(encoding="utf-8")))
    except (SyntaxError, ValueError, OSError):  # an encoding of its own, or a template that is no Python
        return []
