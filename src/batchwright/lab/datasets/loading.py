"""Load a data set by name: those of scikit-learn, Fashion-MNIST, Python's own source, and your own files.

The two data sets of Python's source depend on its version; compare results only within one version.
"""

from __future__ import annotations

import gzip
import os
import random
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..._checks import as_whole
from ..._optional import require
from ..._stdlib_source import functions_in, python_files, stdlib_folder
from ...errors import ArgumentError
from ._assemble import MIN_EXAMPLES, SPLIT_SEED, VALIDATION_EVERY, assemble, assemble_texts, standardise
from ._own_file import load_file
from .dataset import Array, Dataset, Ids, Split, Task

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
# The third byte of an idx file says that values are unsigned bytes.
_UNSIGNED_BYTE = 0x08
# Task, number of classes, and options of the loader.
_SKLEARN: dict[str, tuple[Task, int | None, dict[str, Any]]] = {
    "breast_cancer": ("classification", 2, {}),  # 569 tumours measured in 30 columns
    "diabetes": ("regression", None, {"scaled": False}),  # 442 patients in 10 columns; how far their illness progressed
    "digits": ("classification", 10, {}),  # 1,797 handwritten digits of 8 × 8 pixels
    "wine": ("classification", 3, {}),  # 178 wines measured in 13 columns
}
_NAMES = tuple(sorted([*_SKLEARN, "fashion_mnist", "python_chars", "python_functions"]))
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
# The id after those of the line end and of the 95 printable ASCII characters.
_OTHER = 96


def names() -> tuple[str, ...]:
    """Return the names of the built-in data sets.

    >>> names()
    ('breast_cancer', 'diabetes', 'digits', 'fashion_mnist', 'python_chars', 'python_functions', 'wine')
    """
    return _NAMES


def load(
    name: str,
    *,
    path: str | os.PathLike[str] | None = None,
    target: str | None = None,
    columns: Sequence[str] | None = None,
    task: Literal["classification", "regression"] | None = None,
    limit: int | None = None,
    max_length: int = 256,
) -> Dataset:
    """Load a data set and split it, one example in five for validation, the same at every call.

    Args:
        name: one of ``names()``, or any other name for your own file.
        path: your ``.csv``, ``.tsv``, ``.jsonl`` or ``.npz`` file; for ``fashion_mnist`` the folder of its four files.
        target: the column of your file to predict.
        columns: the columns of your file to learn from: numbers, or one column of texts. None takes the column
            ``text`` if there is one and it holds texts, else all columns except the target.
        task: what the target of your file is. None treats texts, and whole numbers with at most 20 different values,
            as classes, and everything else as numbers to predict.
        limit: the most examples to use, both parts together, chosen at random. None uses all examples, and 2,000 of
            the two data sets of Python's source.
        max_length: texts are cut to this many tokens.

    Returns:
        The data set, standardised by the mean and spread of its training part.

    >>> load("digits")
    Dataset(digits: images, classification, 1438 + 359 examples)
    """
    if limit is not None:
        limit = as_whole("limit", limit, least=MIN_EXAMPLES)
    max_length = as_whole("max_length", max_length, least=1)
    if name in _NAMES:
        _check_built_in(name, path, target=target, columns=columns, task=task)
        if name == "fashion_mnist":
            return _load_fashion_mnist(folder=None if path is None else Path(path), limit=limit)
        if name == "python_functions":
            return load_python_functions(limit=limit, max_length=max_length)
        if name == "python_chars":
            return load_python_chars(limit=limit)
        return _load_sklearn(name, limit=limit)
    if path is None or target is None:
        raise ArgumentError(
            f"no data set {name!r}; there are {', '.join(_NAMES)}; "
            "your own file needs path= and target=, e.g. load('mine', path='data.csv', target='label')"
        )
    return load_file(name, Path(path), target=target, columns=columns, task=task, limit=limit, max_length=max_length)


def _check_built_in(name: str, path: object, **options: object) -> None:
    """Refuse options that only files take: ignored silently, they would seem to work."""
    given = [option for option, value in options.items() if value is not None]
    if path is not None and name != "fashion_mnist":
        given.insert(0, "path")
    if given:
        raise ArgumentError(f"{name} is built in and does not take {', '.join(given)}; give your file another name")


def _load_sklearn(name: str, *, limit: int | None) -> Dataset:
    """Return a data set that comes with scikit-learn: real, small, nothing to download."""
    require("sklearn", extra="lab")  # by its short name, for the message
    task, num_classes, options = _SKLEARN[name]
    loaded = getattr(require("sklearn.datasets", extra="lab"), f"load_{name}")(**options)
    features = loaded.images[:, None] if name == "digits" else loaded.data
    return assemble(name, features, loaded.target, task=task, num_classes=num_classes, limit=limit)


def _load_fashion_mnist(*, folder: Path | None = None, limit: int | None = None) -> Dataset:
    """Return Fashion-MNIST, 60,000 + 10,000 images of 28 × 28 pixels, 10 classes; its test part is for validation.

    Args:
        folder: the folder of its four files; None for the folder of the Debian package.
        limit: the most images, both parts together; None for all.
    """
    folder = folder or DEBIAN_FOLDER
    kept = 0 if limit is None else limit // VALIDATION_EVERY
    num_train, num_validation = (None, None) if limit is None else (limit - kept, kept)
    train_images, train_labels = _part(folder, "train", num_train)
    validation_images, validation_labels = _part(folder, "t10k", num_validation)
    train_features, validation_features = standardise(train_images, validation_images)
    return Dataset(
        name="fashion_mnist",
        task="classification",
        train=Split(features=train_features, labels=train_labels),
        validation=Split(features=validation_features, labels=validation_labels),
        num_classes=10,
    )


def read_idx(path: Path) -> Array:
    """Return the array of unsigned bytes in a gzip idx file, which holds a magic number, sizes and values."""
    try:
        content = gzip.decompress(path.read_bytes())
        num_axes = content[3]
        shape = struct.unpack_from(f">{num_axes}I", content, 4)
        if content[:3] != bytes([0, 0, _UNSIGNED_BYTE]):
            raise ValueError("it does not begin as an idx file of bytes does")
        return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * num_axes).reshape(shape)
    except (OSError, EOFError, zlib.error, struct.error, IndexError, ValueError) as error:
        raise ArgumentError(f"{path} is not a readable idx file: {error}; install or download it again") from None


def _part(folder: Path, name: str, count: int | None) -> tuple[Array, Array]:
    images = read_idx(_existing(folder / f"{name}-images-idx3-ubyte.gz"))
    labels = read_idx(_existing(folder / f"{name}-labels-idx1-ubyte.gz"))
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise ArgumentError(
            f"{folder}: the {name} files hold images {images.shape} and labels {labels.shape}; "
            "they must be (N, height, width) and (N,) of the same N"
        )
    rows = np.random.default_rng(SPLIT_SEED).permutation(len(images))[:count]
    return images[rows][:, None], labels[rows].astype(np.int64)


def _existing(path: Path) -> Path:
    if path.is_file():
        return path
    raise ArgumentError(
        f"no Fashion-MNIST in {path.parent}: {path.name} is missing; on Debian and Ubuntu run: apt install "
        "dataset-fashion-mnist; elsewhere download the four .gz files of github.com/zalandoresearch/fashion-mnist and "
        "pass their folder as path="
    )


def load_python_functions(*, limit: int | None = None, max_length: int, root: Path | None = None) -> Dataset:
    """Return functions of Python's standard library; the class of each is the group of modules it comes from.

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
    """Return windows of 64 characters of Python's standard library, each with the characters that follow.

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
