"""A user's own file as a data set: CSV, tab-separated, JSON lines or NumPy arrays."""

from __future__ import annotations

import math
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

import numpy as np

from ..._checks import check_choice
from ..._files import Record, read_records
from ...errors import ArgumentError
from ._assemble import MIN_EXAMPLES, assemble, assemble_texts
from .dataset import Array, Dataset

FileTask: TypeAlias = Literal["classification", "regression"]
_TEXT_SUFFIXES = (".csv", ".tsv", ".jsonl")
# Whole numbers with at most this many different values count as classes.
_MAX_NUMERIC_CLASSES = 20
# Features are kept in 32 bits.
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
# Ways to write that a number is missing; as a class or a text each of them may be meant.
_MISSING_NUMBERS = frozenset({"na", "n/a", "nan", "null", "none", "?", "-"})


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
    check_choice("task", task, (None, "classification", "regression"))
    table = _read(path)
    if len(table.where) < MIN_EXAMPLES:
        raise ArgumentError(f"{path} has {len(table.where)} rows; the lab needs at least {MIN_EXAMPLES}")
    labels, task, num_classes = encode_target(table, target, task)
    options: dict[str, Any] = {"task": task, "num_classes": num_classes, "limit": limit}
    names = table.feature_names(target, columns)
    blocks = [name for name in names if isinstance(table.take(name), np.ndarray)]
    if not blocks and any(table.is_text(name) for name in names):
        # No text is empty: a missing value was refused before.
        texts = table.texts(_only_text(table, names))
        return assemble_texts(name, texts, labels, max_length=max_length, **options)
    features = _block(table, names) if blocks else np.stack([table.numbers(name) for name in names], axis=1)
    return assemble(name, features, labels, **options)


def _read(path: Path) -> Columns:
    if path.suffix.lower() == ".npz":
        return _read_arrays(path)
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix.lower() not in _TEXT_SUFFIXES:
        raise ArgumentError(
            f"cannot tell the format of {path.name}; the name must end in {', '.join(_TEXT_SUFFIXES)}, .npz, and all "
            "but .npz may be followed by .gz"
        )
    rows = [(where, record) for where, record in read_records(path, tsv_header=True) if record is not None]
    if not rows:
        raise ArgumentError(f"{path} holds no rows")
    values = {name: [_value(record, name, where) for where, record in rows] for name in rows[0][1]}
    return Columns(name=str(path), values=values, where=[where for where, _ in rows])


def _value(record: Record, name: str, where: str) -> Any:
    if name not in record:
        raise ArgumentError(f"{where}: no column {name!r}, which the first row has; columns here: {', '.join(record)}")
    return record[name]


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
    if len(names) == 1:
        return names[0]
    texts = [name for name in names if table.is_text(name)]
    raise ArgumentError(
        f"{table.name}: text in {', '.join(texts)}, among {len(names)} columns; name the one column of texts to learn "
        f"from, columns=[{texts[0]!r}], or only columns of numbers"
    )


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
    bad = ~(np.abs(array.astype(np.float64)) <= _MAX_FLOAT32)
    if bad.any():
        place = tuple(int(axis[0]) for axis in np.nonzero(bad))
        raise ArgumentError(
            f"{table.where[place[0]]}: array {name!r} holds {array[place]} at column {', '.join(map(str, place[1:]))}, "
            "which is not a 32-bit number; fill it in or drop the row"
        )


@final
@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of a file.

    Args:
        name: the file, for messages.
        values: the values of each column, equally many in each.
        where: the place of each row, for messages, e.g. ``data.csv:2``.
    """

    name: str
    values: Mapping[str, Sequence[Any]]
    where: Sequence[str]

    def take(self, name: str) -> Sequence[Any]:
        """Return the values of a column, or say which columns there are, or where a value is missing."""
        if name not in self.values:
            raise ArgumentError(f"{self.name} has no column {name!r}; columns here: {', '.join(self.values)}")
        for value, where in zip(self.values[name], self.where, strict=True):
            if _is_missing(value):
                raise ArgumentError(f"{where}: column {name!r} has no value, got {value!r}; fill it in or drop the row")
        return self.values[name]

    def numbers(self, name: str) -> Array:
        """Return the values of a column as float64, or say which one is not a number."""
        return np.array([self._number(name, row) for row in range(len(self.take(name)))], dtype=np.float64)

    def texts(self, name: str) -> Sequence[str]:
        """Return the values of a column of texts, or say which one is not a text."""
        for value, where in zip(self.take(name), self.where, strict=True):
            if not isinstance(value, str):
                raise ArgumentError(f"{where}: column {name!r} holds {str(value)[:40]}, where most rows hold a text")
        return self.values[name]

    def feature_names(self, target: str, chosen: Sequence[str] | None) -> list[str]:
        """Return the columns to learn from: the chosen ones, or ``text``, or all but the target."""
        if chosen is not None:
            return _checked_choice(chosen, target)
        if target != "text" and "text" in self.values and self.is_text("text"):
            return ["text"]
        names = [name for name in self.values if name != target]
        if not names:
            raise ArgumentError(f"{self.name} has only the target column {target!r}; add features")
        return names

    def is_text(self, name: str) -> bool:
        """Say whether most values of a column are texts; the few others are then reported as mistakes."""
        return 2 * sum(map(_is_text, self.take(name))) > len(self.where)

    def _number(self, name: str, row: int) -> float:
        value = self.values[name][row]
        number = parse_number(value)
        if number is None:
            raise ArgumentError(
                f"{self.where[row]}: column {name!r} holds {str(value)[:40]!r}, not a number; correct it, or leave the "
                "column out with columns="
            )
        if not abs(number) <= _MAX_FLOAT32:
            raise ArgumentError(f"{self.where[row]}: column {name!r} holds {value}, which is not a 32-bit number")
        return number


def parse_number(value: Any) -> float | None:
    """Return the number that a value is or spells, None for anything else.

    >>> parse_number(" 2.5"), parse_number(True), parse_number("two"), parse_number([1])
    (2.5, 1.0, None, None)
    """
    if not isinstance(value, str | int | float):
        return None
    try:
        return float(value)
    except ValueError:
        return None
    except OverflowError:  # a whole number of more than 308 digits
        return math.inf


def encode_target(columns: Columns, name: str, task: FileTask | None) -> tuple[Array, FileTask, int | None]:
    """Return the target as classes or numbers, the task, and the number of classes.

    Without a task, texts are classes, and so are whole numbers with at most 20 different values; everything else is a
    number to predict.
    """
    numbers = [parse_number(value) for value in columns.take(name)]
    task = task or _guess(numbers)
    if task == "regression":
        target = columns.numbers(name)
        _check_target(columns, name, len(np.unique(target)), most=len(target))
        return target, task, None
    has_text = any(number is None for number in numbers)
    values = np.array(_as_labels(columns, name)) if has_text else columns.numbers(name)
    classes, labels = np.unique(values, return_inverse=True)
    _check_target(columns, name, len(classes), most=len(labels) // 2)
    return labels, task, len(classes)


def _guess(numbers: Sequence[float | None]) -> FileTask:
    if any(number is None for number in numbers):
        return "classification"
    is_whole = all(number is not None and number.is_integer() for number in numbers)
    return "classification" if is_whole and len(set(numbers)) <= _MAX_NUMERIC_CLASSES else "regression"


def _as_labels(columns: Columns, name: str) -> list[str]:
    for value, where in zip(columns.values[name], columns.where, strict=True):
        if parse_number(value) is None and not isinstance(value, str):
            raise ArgumentError(f"{where}: the target {name!r} holds {str(value)[:40]}, not a number or a text")
    return [str(value) for value in columns.values[name]]


def _check_target(columns: Columns, name: str, num_values: int, *, most: int) -> None:
    num_rows = len(columns.where)
    if num_values == 1:
        raise ArgumentError(
            f"{columns.name}: the target {name!r} is {columns.values[name][0]!r} in all {num_rows} rows; "
            "there is nothing to learn"
        )
    if num_values > most:
        raise ArgumentError(
            f"{columns.name}: the target {name!r} has {num_values} different values in {num_rows} rows, too many to "
            "be classes; name another column, or pass task='regression' to predict a number"
        )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and parse_number(value) is None and value.strip().lower() not in _MISSING_NUMBERS


def _is_missing(value: Any) -> bool:
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value))


def _checked_choice(chosen: Sequence[str], target: str) -> list[str]:
    if isinstance(chosen, str) or not chosen:
        raise ArgumentError(f"columns must be a list of names, got {chosen!r}; write columns=['a', 'b']")
    if target in chosen:
        raise ArgumentError(f"columns must not name the target {target!r}: it would be predicted from itself")
    return list(chosen)
