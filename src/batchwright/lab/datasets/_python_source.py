"""Two data sets that every machine has: the source of Python's standard library, by function and by character.

They depend on the version of Python; compare results within one.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ..._stdlib_source import functions_in, python_files, stdlib_folder
from ...errors import ArgumentError
from ._assemble import SPLIT_SEED, VALIDATION_EVERY, assemble_texts
from .dataset import Dataset, Ids, Split

# Modules that Python 3.10 and later have, also where a distribution leaves out tkinter, idlelib or distutils.
GROUPS = {
    "concurrency": ("asyncio", "concurrent", "multiprocessing", "queue", "selectors", "subprocess", "threading"),
    "files": ("fileinput", "glob", "gzip", "lzma", "os", "pathlib", "shutil", "tarfile", "tempfile", "zipfile"),
    "language": ("ast", "dis", "enum", "functools", "importlib", "inspect", "tokenize", "types", "typing"),
    "mail": ("email", "imaplib", "mailbox", "mimetypes", "poplib", "smtplib"),
    "markup": ("html", "plistlib", "xml"),
    "network": ("ftplib", "http", "ipaddress", "socket", "socketserver", "ssl", "urllib", "wsgiref", "xmlrpc"),
    "numbers": ("_pydecimal", "calendar", "datetime", "_pydatetime", "fractions", "numbers", "random", "statistics"),
    "testing": ("bdb", "cProfile", "doctest", "pdb", "profile", "pstats", "timeit", "trace", "unittest"),
}
NUM_FUNCTIONS = 2000
NUM_WINDOWS = 2000
WINDOW = 64
# Few per file, so that both parts see many files.
_WINDOWS_PER_FILE = 64
_ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
_OTHER = len(_ALPHABET)


def load_python_functions(*, limit: int | None = None, max_length: int, root: Path | None = None) -> Dataset:
    """Return functions of the standard library; the class of each is the group of modules it comes from.

    The next file always comes from the group with the fewest functions so far, so that a small data set holds every
    group. A text that occurs twice counts once, for the group that had it first.

    Args:
        limit: the most functions, both parts together; None for 2,000.
        max_length: functions are cut to this many tokens.
        root: a folder with the modules; None for the standard library of this Python.
    """
    count = NUM_FUNCTIONS if limit is None else limit
    found = _functions(_files_by_group(root), count)
    return assemble_texts(
        "python_functions",
        list(found),
        np.array(list(found.values())),
        task="classification",
        num_classes=len(GROUPS),
        max_length=max_length,
        limit=count,
    )


def load_python_chars(*, limit: int | None = None, root: Path | None = None) -> Dataset:
    """Return windows of 64 characters of the standard library, each with the characters that follow.

    The two parts come from different files. The line end and each printable ASCII character have their own id; all
    other characters share one.

    Args:
        limit: the most windows, both parts together; None for 2,000.
        root: a folder with the modules; None for the standard library of this Python.
    """
    count = NUM_WINDOWS if limit is None else limit
    files = [file for group in _files_by_group(root) for file in group]
    random.Random(SPLIT_SEED).shuffle(files)
    kept = files[::VALIDATION_EVERY]
    others = [file for place, file in enumerate(files) if place % VALIDATION_EVERY]
    return Dataset(
        name="python_chars",
        task="language",
        train=_windows(others, count - count // VALIDATION_EVERY),
        validation=_windows(kept, count // VALIDATION_EVERY),
        num_classes=_OTHER + 1,
        vocabulary_size=_OTHER + 1,
    )


def char_ids(text: str) -> Ids:
    r"""Return the id of each character.

    >>> char_ids("\n A~é").tolist()
    [0, 1, 34, 95, 96]
    """
    codes = np.array([ord(char) for char in text], dtype=np.int64)
    ids = np.where((codes >= 32) & (codes < 127), codes - 31, _OTHER)
    return np.where(codes == ord("\n"), 0, ids)


def _files_by_group(root: Path | None) -> list[list[Path]]:
    """Return the files of each group in a fixed random order."""
    root = root or stdlib_folder()
    group_of = {module: place for place, modules in enumerate(GROUPS.values()) for module in modules}
    groups: list[list[Path]] = [[] for _ in GROUPS]
    for file in python_files(root):
        place = group_of.get(file.relative_to(root).parts[0].removesuffix(".py"))
        if place is not None:
            groups[place].append(file)
    for name, group in zip(GROUPS, groups, strict=True):
        if not group:
            raise ArgumentError(
                f"no source of the modules {', '.join(GROUPS[name])} under {root}; "
                "the data sets of source code need a Python installed with its standard library as .py files"
            )
        random.Random(SPLIT_SEED).shuffle(group)
    return groups


def _functions(groups: Sequence[Sequence[Path]], count: int) -> dict[str, int]:
    """Return functions and their groups, read from the group with the fewest so far."""
    waiting = [iter(group) for group in groups]
    num_found = dict.fromkeys(range(len(groups)), 0)
    found: dict[str, int] = {}
    while num_found and len(found) < count:
        place = min(num_found, key=num_found.__getitem__)
        file = next(waiting[place], None)
        if file is None:
            del num_found[place]
            continue
        num_before = len(found)
        for text in functions_in(file):
            found.setdefault(text, place)
        num_found[place] += len(found) - num_before
    return found


def _windows(files: Sequence[Path], count: int) -> Split:
    rng = np.random.default_rng(SPLIT_SEED)
    found = np.empty((0, WINDOW + 1), dtype=np.int64)
    for file in files:
        if len(found) >= count:
            break
        ids = char_ids(file.read_text(encoding="utf-8", errors="replace"))
        starts = WINDOW * rng.permutation(max(0, len(ids) - 1) // WINDOW)[:_WINDOWS_PER_FILE]
        found = np.concatenate([found, ids[starts[:, None] + np.arange(WINDOW + 1)]])
    chosen = rng.permutation(len(found))[:count]
    return Split(features=found[chosen, :-1], labels=found[chosen, 1:])
