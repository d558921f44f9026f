"""Texts out of Python's own source, which every installation has: functions, docstrings and paragraphs of code.

The class of a text is the group of modules it comes from.
"""

from __future__ import annotations

import ast
import random
import textwrap
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, final

import numpy as np

from ..._stdlib_source import functions_in, python_files, stdlib_folder
from ...errors import ArgumentError
from ._assemble import SPLIT_SEED, VALIDATION_EVERY, VOCABULARY_SIZE, hash_ids, shares
from .dataset import PADDING, Dataset, Ids, Split

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
# The id after those of the line end and of the 95 printable ASCII characters.
OTHER_CHAR = 96
# Shorter texts say nothing about where they come from.
_MIN_TOKENS = 4
_MIN_CHARS = 16


@final
@dataclass(frozen=True, kw_only=True)
class _Corpus:
    """How texts are found in a file and turned into ids.

    Args:
        about: where the texts come from, in words.
        num_texts: how many to take by default, both parts together.
        find: the texts of a file.
        encode: the ids of a text, cut to a length.
        vocabulary_size: how many ids there are, with that of the padding.
        min_length: texts of fewer ids are left out.
    """

    about: str
    num_texts: int
    find: Callable[[Path], Iterable[str]]
    encode: Callable[[str, int], Ids]
    vocabulary_size: int = VOCABULARY_SIZE
    min_length: int = 1


def load_texts(name: str, *, limit: int | None = None, max_length: int, root: Path | None = None) -> Dataset:
    """Return texts of Python's standard library; the class of each is the group of modules it comes from.

    The next file always comes from the group with the fewest texts so far, so that a small data set holds every
    group. Whether a text is kept for validation follows from its checksum alone. Two texts whose ids are equal, once
    they are cut, count as one, of the group and the part that had it first.

    Args:
        name: one of ``CORPORA``.
        limit: the most texts, both parts together; None for the usual number.
        max_length: texts are cut to this many tokens or characters.
        root: a folder with the modules; None for the standard library of this Python.
    """
    corpus = CORPORA[name]
    wanted = corpus.num_texts if limit is None else limit
    found = _gather(corpus, files_by_group(root), wanted, max_length)
    counts = shares(wanted, len(found[0]), len(found[1]))
    if 0 in counts:
        raise ArgumentError(
            f"{name}: only {len(found[0])} + {len(found[1])} texts to train on and to validate; it needs a Python "
            "installed with its standard library as .py files"
        )
    train, validation = (_split(part, count) for part, count in zip(found, counts, strict=True))
    return Dataset(
        name=name,
        task="classification",
        train=train,
        validation=validation,
        num_classes=len(GROUPS),
        vocabulary_size=corpus.vocabulary_size,
        source=f"{corpus.about} in the standard library of this Python",
    )


_Part: TypeAlias = list[tuple[Ids, int]]


def _gather(corpus: _Corpus, groups: Sequence[Sequence[Path]], wanted: int, max_length: int) -> tuple[_Part, _Part]:
    """Return ids and groups of both parts, read file by file until there are enough of both."""
    waiting = [iter(group) for group in groups]
    num_found = dict.fromkeys(range(len(groups)), 0)
    parts: tuple[_Part, _Part] = ([], [])
    seen: set[bytes] = set()
    enough = shares(wanted, wanted, wanted)
    while num_found and any(len(part) < count for part, count in zip(parts, enough, strict=True)):
        place = min(num_found, key=num_found.__getitem__)
        file = next(waiting[place], None)
        if file is None:
            del num_found[place]
            continue
        for text in corpus.find(file):
            ids = corpus.encode(text, max_length)
            if len(ids) < min(corpus.min_length, max_length) or ids.tobytes() in seen:
                continue
            seen.add(ids.tobytes())
            parts[is_kept(text)].append((ids, place))
            num_found[place] += 1
    return parts


def is_kept(text: str) -> bool:
    """Say whether a text is kept for validation: one in five, by its checksum, whatever else is read."""
    return zlib.crc32(text.encode("utf-8", "surrogatepass")) % VALIDATION_EVERY == 0


def _split(part: _Part, count: int) -> Split:
    order = np.random.default_rng(SPLIT_SEED).permutation(len(part))[:count]
    return Split(features=[part[row][0] for row in order], labels=np.array([part[row][1] for row in order]))


def files_by_group(root: Path | None) -> list[list[Path]]:
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


def docstrings_in(file: Path) -> list[str]:
    """Return the docstrings of a file, its own first; nothing for a file that cannot be read as Python."""
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, ValueError, OSError):  # another encoding, or a template that is not Python
        return []
    return [text for node in _documented(tree) if (text := ast.get_docstring(node))]


_Documented: TypeAlias = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def _documented(node: _Documented) -> Iterator[_Documented]:
    # Only through bodies: expressions are most of a tree, and none has a docstring.
    yield node
    for inner in node.body:
        if isinstance(inner, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _documented(inner)


def paragraphs_in(file: Path) -> Iterator[str]:
    """Yield the blocks of lines between blank lines, without the indentation that all lines of a block share."""
    try:
        source = file.read_text(encoding="utf-8")
    except (ValueError, OSError):
        return
    block: list[str] = []
    for line in [*source.split("\n"), ""]:
        if line.strip():
            block.append(line)
        elif block:
            yield textwrap.dedent("\n".join(block))
            block = []


def char_ids(text: str) -> Ids:
    r"""Return the id of each character: the line end, each printable ASCII character, and one id for all others.

    >>> char_ids("\n A~é").tolist()
    [0, 1, 34, 95, 96]
    """
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4").astype(np.int64)
    ids = np.where((codes >= 32) & (codes < 127), codes - 31, OTHER_CHAR)
    return np.where(codes == ord("\n"), 0, ids)


def _hashed(text: str, max_length: int) -> Ids:
    return hash_ids(text, max_length=max_length)


def _chars(text: str, max_length: int) -> Ids:
    # One further on, since texts of different lengths are padded.
    return char_ids(text[:max_length]) + PADDING + 1


CORPORA = {
    "python_docstrings": _Corpus(
        about="docstrings", num_texts=3000, find=docstrings_in, encode=_hashed, min_length=_MIN_TOKENS
    ),
    "python_functions": _Corpus(about="functions", num_texts=2000, find=functions_in, encode=_hashed),
    "python_paragraphs": _Corpus(
        about="paragraphs of source, as characters,",
        num_texts=10_000,
        find=paragraphs_in,
        encode=_chars,
        vocabulary_size=OTHER_CHAR + 2,
        min_length=_MIN_CHARS,
    ),
}
