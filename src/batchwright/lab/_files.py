"""A user's own file as a data set: CSV, tab-separated, JSON lines or NumPy arrays."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .._files import Record, read_records
from ..errors import ArgumentError
from ._assemble import MIN_EXAMPLES, assemble_arrays, assemble_texts
from ._columns import Columns, FileTask, encode_target
from ._records import Array, Dataset
from ._text import VOCABULARY_SIZE, hash_ids

_SUFFIXES = (".csv", ".tsv", ".jsonl", ".npz")


def load_file(
    name: str,
    path: Path,
    *,
    target: str,
    columns: Sequence[str] | None = None,
    task: FileTask | None = None,
    limit: int | None = None,
    max_length: int,
) -> Dataset:
    """Return the data set of a file; see ``datasets.load``."""
    if task not in (None, "classification", "regression"):
        raise ArgumentError(f"task of a file must be 'classification', 'regression' or None, got {task!r}")
    table = _read(path)
    if len(table.where) < MIN_EXAMPLES:
        raise ArgumentError(f"{path} has {len(table.where)} rows; the lab needs {MIN_EXAMPLES} or more")
    labels, task, num_classes = encode_target(table, target, task)
    names = table.feature_names(target, columns)
    blocks = [name for name in names if isinstance(table.take(name), np.ndarray)]
    if not blocks and any(table.is_text(name) for name in names):
        texts = _ids(table, _only_text(table, names), max_length)
        return assemble_texts(
            name,
            texts,
            labels,
            task=task,
            num_classes=num_classes,
            vocabulary_size=VOCABULARY_SIZE,
            limit=limit,
        )
    features = _block(table, names) if blocks else np.stack([table.numbers(name) for name in names], axis=1)
    return assemble_arrays(name, features, labels, task=task, num_classes=num_classes, limit=limit)


def _read(path: Path) -> Columns:
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix.lower() not in _SUFFIXES or (suffix.lower() == ".npz" and path.suffix == ".gz"):
        raise ArgumentError(
            f"cannot tell the format of {path.name}; the name must end in {', '.join(_SUFFIXES)}, or, but for .npz, "
            "that and .gz"
        )
    return _read_arrays(path) if suffix.lower() == ".npz" else _read_records(path)


def _read_records(path: Path) -> Columns:
    rows = [(where, record) for where, record in read_records(path, tsv_header=True) if record is not None]
    if not rows:
        raise ArgumentError(f"{path} holds no rows")
    names = list(rows[0][1])
    values = {name: [_value(record, name, where) for where, record in rows] for name in names}
    return Columns(name=str(path), values=values, where=[where for where, _ in rows])


def _value(record: Record, name: str, where: str) -> Any:
    if name not in record:
        raise ArgumentError(f"{where}: no column {name!r}, which the first row has; columns here: {', '.join(record)}")
    return record[name]


def _read_arrays(path: Path) -> Columns:
    arrays = _load_npz(path)
    sizes = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
    if len(set(sizes.values())) > 1 or 0 in sizes.values():
        raise ArgumentError(f"{path}: arrays must have one row an example, got rows {sizes}")
    num_rows = next(iter(sizes.values()), 0)
    values: dict[str, Any] = {
        # Values of one column as Python's own numbers and texts, as from the other formats.
        name: array.tolist() if array.ndim == 1 else array
        for name, array in arrays.items()
    }
    return Columns(name=str(path), values=values, where=[f"{path} row {row}" for row in range(num_rows)])


def _load_npz(path: Path) -> dict[str, Array]:
    try:
        # Opened here: of a damaged file NumPy would leave it open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except FileNotFoundError:
        raise ArgumentError(f"no such file: {path}") from None
    except (OSError, EOFError, ValueError, AttributeError, zipfile.BadZipFile, zlib.error) as error:
        raise ArgumentError(
            f"{path} is not a readable .npz of plain arrays: {error}; write it with np.savez(path, x=…, y=…)"
        ) from None


def _only_text(table: Columns, names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    texts = [name for name in names if table.is_text(name)]
    raise ArgumentError(
        f"{table.name}: the columns {', '.join(texts)} hold text and there are {len(names)} columns; name the one "
        f"text to learn from, columns=[{texts[0]!r}], or the columns of numbers"
    )


def _ids(table: Columns, name: str, max_length: int) -> list[Array]:
    """Return the ids of each text; none is empty, since a missing value is refused before."""
    return [hash_ids(text, max_length=max_length) for text in table.texts(name)]


def _block(table: Columns, names: Sequence[str]) -> Array:
    """Return rows ``(N, columns)`` or images ``(N, channels, height, width)`` out of one array."""
    if len(names) > 1:
        raise ArgumentError(
            f"{table.name}: {', '.join(names)} are several arrays, of which one has more than one axis; "
            f"name one to learn from, columns=[{names[0]!r}]"
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
    bad = ~(np.abs(array.astype(np.float64)) <= float(np.finfo(np.float32).max))
    if bad.any():
        place = tuple(int(axis[0]) for axis in np.nonzero(bad))
        raise ArgumentError(
            f"{table.where[place[0]]}: array {name!r} holds {array[place]} at column {', '.join(map(str, place[1:]))}, "
            "which is no 32-bit number; fill it in or drop the row"
        )
