"""Load a data set by name: real tables and images, tables of a formula, Python's own source, and your own files.

The data sets of Python's source depend on its version; compare results only within one version.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..._checks import as_whole, check_choice
from ..._files import Record, read_lines, read_records
from ..._optional import require
from ...errors import ArgumentError
from ._assemble import MIN_EXAMPLES, assemble, assemble_texts
from ._columns import MAX_FLOAT32, Columns, FileTask, encode_target, odd_spelling
from .built_in import load_fashion, load_formula, load_texts, load_windows
from .built_in.fashion import BLOCKS
from .built_in.formulas import NAMES as FORMULAS
from .built_in.language import WINDOWS
from .built_in.texts import CORPORA
from .dataset import Array, Dataset, Task

# Task, number of classes, and options of the loader.
_SKLEARN: dict[str, tuple[Task, int | None, dict[str, Any]]] = {
    "breast_cancer": ("classification", 2, {}),  # 569 tumours measured in 30 columns
    "diabetes": ("regression", None, {"scaled": False}),  # 442 patients in 10 columns; how far their illness progressed
    "digits": ("classification", 10, {}),  # 1,797 handwritten digits of 8 × 8 pixels
    "wine": ("classification", 3, {}),  # 178 wines measured in 13 columns
}
_NAMES = tuple(sorted([*_SKLEARN, *BLOCKS, *FORMULAS, *CORPORA, *WINDOWS]))
_TEXT_SUFFIXES = (".csv", ".tsv", ".jsonl")
# What separates columns, and what it is called, by the end of the name.
_SEPARATORS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
_EXPECTED = {".csv": ",", ".tsv": "\t"}


def names() -> tuple[str, ...]:
    """Return the names of the built-in data sets.

    >>> len(names()), names()[:3]
    (15, ('breast_cancer', 'diabetes', 'digits'))
    """
    return _NAMES


def load(
    name: str,
    *,
    path: str | os.PathLike[str] | None = None,
    target: str | None = None,
    columns: Sequence[str] | None = None,
    task: FileTask | None = None,
    limit: int | None = None,
    max_length: int = 256,
) -> Dataset:
    """Load a data set and split it, one example in five for validation, the same at every call.

    Args:
        name: one of ``names()``, or any other name for your own file.
        path: your ``.csv``, ``.tsv``, ``.jsonl`` or ``.npz`` file; for ``fashion_mnist`` and
            ``fashion_mnist_7x7`` the folder of the four files.
        target: the column of your file to predict.
        columns: the columns of your file to learn from: numbers, columns of at most 20 different words, which become
            columns of 0 and 1, or one column of texts. None takes the column ``text`` if there is one and it holds
            texts, else all columns except the target.
        task: what the target of your file is. None treats texts, and whole numbers with at most 20 different values,
            as classes, and everything else as numbers to predict.
        limit: the most examples to use, both parts together, chosen at random; no example changes its part with the
            limit. None uses all examples, 12,500 images of Fashion-MNIST, 2,000 functions, 3,000 docstrings, and
            10,000 paragraphs or windows of Python's source.
        max_length: texts are cut to this many tokens, those of ``python_paragraphs`` to this many characters.

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
        return _load_built_in(name, None if path is None else Path(path), limit=limit, max_length=max_length)
    if path is None or target is None:
        raise ArgumentError(
            f"no data set {name!r}; there are {', '.join(_NAMES)}; "
            "your own file needs path= and target=, e.g. load('mine', path='data.csv', target='label')"
        )
    return _load_file(name, Path(path), target=target, columns=columns, task=task, limit=limit, max_length=max_length)


def _check_built_in(name: str, path: object, **options: object) -> None:
    """Refuse options that only files take: ignored silently, they would seem to work."""
    given = [option for option, value in options.items() if value is not None]
    if path is not None and name not in BLOCKS:
        given.insert(0, "path")
    if given:
        raise ArgumentError(f"{name} is built in and does not take {', '.join(given)}; give your file another name")


def _load_built_in(name: str, folder: Path | None, *, limit: int | None, max_length: int) -> Dataset:
    if name in BLOCKS:
        return load_fashion(name, folder=folder, limit=limit)
    if name in FORMULAS:
        return load_formula(name, limit=limit)
    if name in CORPORA:
        return load_texts(name, limit=limit, max_length=max_length)
    if name in WINDOWS:
        return load_windows(name, limit=limit)
    return _load_sklearn(name, limit=limit)


def _load_sklearn(name: str, *, limit: int | None) -> Dataset:
    """Return a data set that comes with scikit-learn: real, small, nothing to download."""
    require("sklearn", extra="lab")  # by its short name, for the message
    task, num_classes, options = _SKLEARN[name]
    loaded = getattr(require("sklearn.datasets", extra="lab"), f"load_{name}")(**options)
    features = loaded.images[:, None] if name == "digits" else loaded.data
    return assemble(
        name, features, loaded.target, task=task, num_classes=num_classes, limit=limit, source="scikit-learn"
    )


def _load_file(
    name: str,
    path: Path,
    *,
    target: str,
    columns: Sequence[str] | None,
    task: FileTask | None,
    limit: int | None,
    max_length: int,
) -> Dataset:
    """Return the data set of a file; see ``datasets.load``."""
    check_choice("task", task, (None, "classification", "regression"))
    table = _read(path)
    if len(table.where) < MIN_EXAMPLES:
        raise ArgumentError(
            f"{path} has {len(table.where)} rows; a data set needs at least {MIN_EXAMPLES}, and a lab about 40"
        )
    labels, task, num_classes = encode_target(table, target, task)
    options: dict[str, Any] = {
        "task": task,
        "num_classes": num_classes,
        "limit": limit,
        "source": f"your file {path.name}",
    }
    names = table.feature_names(target, columns)
    blocks = [name for name in names if isinstance(table.take(name), np.ndarray)]
    if blocks:
        return assemble(name, _block(table, names), labels, **options)
    words = [name for name in names if table.is_text(name)]
    kinds = {name: table.kinds(name) for name in words} if len(names) > 1 else {}
    if not all(kinds.values()) or len(kinds) < len(words):
        # No text is empty: a missing value was refused before.
        texts = table.texts(_only_text(table, names))
        return assemble_texts(name, texts, labels, max_length=max_length, **options)
    if kinds:
        told = ", ".join(f"{name} as {len(found)} columns of 0 and 1" for name, found in kinds.items())
        options["source"] += f", {told}"
    features = [_one_hot(table, name, kinds[name]) if name in kinds else table.numbers(name) for name in names]
    return assemble(name, np.column_stack(features), labels, **options)


def _one_hot(table: Columns, name: str, kinds: Sequence[str]) -> Array:
    """Return a column of 0 and 1 for each of the few words of a column."""
    _refuse_odd(table, name, "")
    values = np.array([text.strip() for text in table.texts(name)])
    return (values[:, None] == np.array(kinds)).astype(np.float64)


def _read(path: Path) -> Columns:
    if path.suffix.lower() == ".npz":
        return _read_arrays(path)
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix.lower() not in _TEXT_SUFFIXES:
        raise ArgumentError(
            f"cannot tell the format of {path.name}; the name must end in {', '.join(_TEXT_SUFFIXES)}, .npz, and all "
            "but .npz may be followed by .gz"
        )
    _check_separator(path, suffix.lower())
    rows = [(where, record) for where, record in read_records(path, tsv_header=True) if record is not None]
    if not rows:
        raise ArgumentError(f"{path} holds no rows")
    names = _stripped(rows[0][1], rows[0][0])
    values = {name: [_value(record, written, where) for where, record in rows] for name, written in names.items()}
    for where, record in rows:
        _refuse_further(record, rows[0][1], where)
    return Columns(name=str(path), values=values, where=[where for where, _ in rows])


def _check_separator(path: Path, suffix: str) -> None:
    """Refuse a first line that something else separates: all of it would be the name of one column."""
    expected = _EXPECTED.get(suffix)
    first = next((line for _, line in read_lines(path) if line.strip()), "")
    if expected is None or expected in first:
        return
    for other, name in _SEPARATORS.items():
        if other in first:
            raise ArgumentError(
                f"{path}: its columns are separated by {name}; write it again with {_SEPARATORS[expected]}, as the "
                f"name {suffix} asks, and with a point in decimal numbers, such as 2.5"
            )


def _stripped(record: Record, where: str) -> dict[str, str]:
    """Return the names of columns without blanks around them, and how each is written: ``a, b`` is a common header."""
    names: dict[str, str] = {}
    for written in record:
        if written.strip() in names:
            raise ArgumentError(
                f"{where}: two columns are called {written.strip()!r}, apart from blanks; give each a name of its own"
            )
        names[written.strip()] = written
    return names


def _value(record: Record, name: str, where: str) -> Any:
    if name not in record:
        raise ArgumentError(f"{where}: no column {name!r}, which the first row has; columns here: {', '.join(record)}")
    return record[name]


def _refuse_further(record: Record, first: Record, where: str) -> None:
    further = [name for name in record if name not in first]
    if further:
        raise ArgumentError(f"{where}: column {further[0]!r} is not in the first row; give every row the same columns")


def _read_arrays(path: Path) -> Columns:
    arrays = _load_npz(path)
    sizes = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(sizes.values())) > 1 or 0 in sizes.values():
        raise ArgumentError(f"{path}: arrays must have one row per example, got rows {sizes}")
    num_rows = next(iter(sizes.values()), 0)
    values: dict[str, Any] = {
        # A single column as Python's own numbers and texts, as the other formats give it.
        name: array.tolist() if array.ndim == 1 else array
        for name, array in arrays.items()
    }
    return Columns(name=str(path), values=values, where=[f"{path} row {row}" for row in range(num_rows)])


def _load_npz(path: Path) -> dict[str, Array]:
    try:
        # Opened here, since NumPy leaves a damaged file open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except FileNotFoundError:
        raise ArgumentError(f"no such file: {path}") from None
    except (OSError, EOFError, ValueError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise ArgumentError(
            f"{path} is not a readable .npz of plain arrays: {error}; write it with np.savez(path, x=…, y=…)"
        ) from None


def _only_text(table: Columns, names: Sequence[str]) -> str:
    texts = [name for name in names if table.is_text(name)]
    numbers = [name for name in names if name not in texts]
    only = f", or choose only columns of numbers, columns={numbers}" if numbers else ""
    for name in texts:
        _refuse_odd(table, name, only)
    if len(names) == 1:
        return names[0]
    long = [name for name in texts if not table.kinds(name)]
    others = [name for name in names if name not in long]
    only = f", or choose only columns of numbers or of few different words, columns={others}" if others else ""
    raise ArgumentError(
        f"{table.name}: text in {', '.join(long)}, among {len(names)} columns; name the one column of texts to learn "
        f"from, columns=[{long[0]!r}]{only}"
    )


def _refuse_odd(table: Columns, name: str, only: str) -> None:
    example, advice = odd_spelling(table.take(name))
    if example is not None:
        raise ArgumentError(f"{table.name}: column {name!r} holds {example!r}, {advice}{only}")


def _block(table: Columns, names: Sequence[str]) -> Array:
    """Return rows ``(N, columns)`` or images ``(N, channels, height, width)`` out of one array."""
    if len(names) > 1:
        raise ArgumentError(
            f"{table.name} has several arrays, {', '.join(names)}, one of them with more than one axis; "
            f"name the one to learn from, columns=[{names[0]!r}]"
        )
    array = np.asarray(table.values[names[0]])
    if array.ndim > 4 or 0 in array.shape or array.dtype.kind not in "biuf":
        raise ArgumentError(
            f"{table.name}: array {names[0]!r} must hold numbers of shape (N, columns), (N, height, width) or "
            f"(N, channels, height, width), got {array.dtype} {array.shape}"
        )
    _check_finite(table, names[0], array)
    return array[:, None] if array.ndim == 3 else array


def _check_finite(table: Columns, name: str, array: Array) -> None:
    bad = ~(np.abs(array.astype(np.float64)) <= MAX_FLOAT32)
    if bad.any():
        place = tuple(int(axis[0]) for axis in np.nonzero(bad))
        raise ArgumentError(
            f"{table.where[place[0]]}: array {name!r} holds {array[place]} at column {', '.join(map(str, place[1:]))}, "
            "which is not a 32-bit number; fill it in or drop the row"
        )
