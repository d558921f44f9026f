"""What ``measure_lengths`` is given: one column of a table, texts or token ids, one by one or in pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from ..._checks import is_whole
from ...errors import ArgumentError, LengthsError

Column = str | tuple[str, str] | None


def choose(texts: Any, column: Column) -> Iterable[Any]:
    """Return the examples to measure: those of the named column or of a pair of columns, or all that came.

    Args:
        texts: texts, ids, a table of pandas, polars, pyarrow or datasets, a mapping of columns, or rows by name.
        column: a name, a pair of names, or None, for which a table must have a single column.

    >>> list(choose({"id": [1, 2], "text": ["a", "b"]}, "text"))
    ['a', 'b']
    >>> list(choose([{"source": "a", "target": "b"}], ("source", "target")))
    [('a', 'b')]
    """
    _check_column(column)
    names = _column_names(texts)
    if names is not None:
        return _choose_from_table(texts, column, names)
    _check_iterable(texts)
    ordered = _in_order(texts)
    return _plain(ordered) if column is None else Rows(ordered, column, type(texts).__name__)


def num_sides_of_text(example: Any) -> int:
    """Return 1 for a text, 2 for a pair of texts, 0 for anything else."""
    if isinstance(example, str):
        return 1
    is_pair = isinstance(example, tuple | list) and len(example) == 2 and all(isinstance(x, str) for x in example)
    return 2 if is_pair else 0


def num_sides_of_ids(example: Any) -> int:
    """Return 1 for token ids, 2 for a tuple of two sequences of ids, 0 for anything else.

    >>> num_sides_of_ids([5, 7]), num_sides_of_ids((5, 7)), num_sides_of_ids(([5, 7], [])), num_sides_of_ids([[5], [7]])
    (1, 1, 2, 0)
    """
    if _is_ids(example):
        return 1
    return 2 if isinstance(example, tuple) and len(example) == 2 and all(map(_is_ids, example)) else 0


def describe(example: Any) -> str:
    """Say of what type an example is."""
    if sides := num_sides_of_ids(example):
        return "token ids" if sides == 1 else "a pair of token ids"
    if isinstance(example, tuple | list) and len(example) <= 3:
        return f"{type(example).__name__} of ({', '.join(type(side).__name__ for side in example)})"
    return type(example).__name__ + (f" of {len(example)} items" if isinstance(example, tuple | list) else "")


def _is_ids(value: Any) -> bool:
    if hasattr(value, "dtype") and hasattr(value, "ndim"):  # an array or a tensor
        return bool(value.ndim == 1) and "int" in str(value.dtype)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes | bytearray):
        return False
    if isinstance(value, range) or len(value) == 0:
        return True
    if not (is_whole(value[0]) and is_whole(value[-1])):
        return False
    try:
        math.gcd(*value)  # the fastest that refuses all but whole numbers: 4 ns per id, where asking types takes 20
    except TypeError:
        return False
    return True


def _column_names(table: Any) -> list[Any] | None:
    """Return the names of a table's columns, None for what is no table."""
    if isinstance(table, Mapping):
        return list(table)
    if isinstance(table, np.ndarray):
        return None if table.dtype.names is None else list(table.dtype.names)
    for name in ("column_names", "columns"):
        found = getattr(table, name, None)
        if found is not None and not callable(found) and isinstance(found, Iterable):
            return list(found)
    return None


def _choose_from_table(table: Any, column: Column, names: list[Any]) -> Iterable[Any]:
    shown = ", ".join(map(repr, names[:20])) + (", …" if len(names) > 20 else "") or "no column"
    kind = type(table).__name__
    if column is None and len(names) != 1:
        raise LengthsError(
            f"{kind} has {'the columns ' if names else ''}{shown}; name the one to measure, e.g. column='text', or a "
            "pair of them"
        )
    wanted = (names[0],) if column is None else (column,) if isinstance(column, str) else column
    missing = [name for name in wanted if name not in names]
    if missing:
        raise LengthsError(f"{kind} has no column {missing[0]!r}; it has {shown}")
    found = _columns(table, wanted)
    if found is None:
        return Rows(_in_order(table), names[0] if column is None else column, kind)
    columns = [_checked(table, name, values) for name, values in zip(wanted, found, strict=True)]
    return columns[0] if len(columns) == 1 else _zip(columns, wanted)


def _columns(table: Any, names: Sequence[Any]) -> list[Any] | None:
    """Return columns by their names, None from what gives rows only, in order or by number."""
    if not hasattr(table, "__getitem__"):
        return None
    try:
        return [table[name] for name in names]
    except (TypeError, IndexError):  # a data set that names its columns and is read by number
        return None


def _checked(table: Any, name: Any, values: Any) -> Iterable[Any]:
    if _column_names(values) is not None:
        raise LengthsError(f"{type(table).__name__}[{name!r}] is a table itself; measure it and name a column of it")
    if not isinstance(values, Iterable) or isinstance(values, str | bytes):
        raise LengthsError(
            f"column {name!r} must hold one text per example, got {type(values).__name__}; wrap one text in a list"
        )
    return _plain(values)


def _pick(row: Any, column: str | tuple[str, str]) -> Any:
    try:
        return row[column] if isinstance(column, str) else (row[column[0]], row[column[1]])
    except (KeyError, TypeError):
        shown = ", ".join(map(repr, row)) if isinstance(row, Mapping) else type(row).__name__
        raise LengthsError(f"a row has no column {column!r}; it has {shown}") from None


@final
@dataclass(frozen=True)
class Examples:
    """Values and what is made of each as it is read; as long as the values."""

    values: Any
    make: Callable[[Any], Any]

    def __iter__(self) -> Iterator[Any]:
        return map(self.make, self.values)

    def __len__(self) -> int:
        return len(self.values)


@final
@dataclass(frozen=True)
class Rows:
    """One column or a pair of columns of rows by name; each row is read once, for it may not come again."""

    rows: Any
    column: str | tuple[str, str]
    kind: str

    def __iter__(self) -> Iterator[Any]:
        for number, row in enumerate(self.rows):
            if number == 0 and not isinstance(row, Mapping):
                raise LengthsError(
                    f"column names a column of a table or of rows by name, got {self.kind} of {describe(row)}; "
                    "leave column out"
                )
            yield _pick(row, self.column)

    def __len__(self) -> int:
        return len(self.rows)


@final
@dataclass(frozen=True)
class Pairs:
    """Two columns, read side by side."""

    first: Any
    second: Any

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return zip(self.first, self.second, strict=True)

    def __len__(self) -> int:
        return len(self.first)


def _zip(columns: Sequence[Any], names: Sequence[Any]) -> Pairs:
    first, second = columns
    if hasattr(first, "__len__") and hasattr(second, "__len__") and len(first) != len(second):
        raise LengthsError(
            f"columns {names[0]!r} and {names[1]!r} have {len(first)} and {len(second)} rows; give one pair per example"
        )
    return Pairs(first, second)


def _in_order(texts: Any) -> Any:
    """Return what ends where its length says: a data set read by number need not refuse a number beyond it."""
    if hasattr(texts, "__iter__") or not hasattr(texts, "__len__"):
        return texts
    return Examples(range(len(texts)), texts.__getitem__)


def _plain(texts: Any) -> Iterable[Any]:
    """Return what yields Python's texts: arrays of pyarrow yield scalars, rows of NumPy texts are arrays."""
    if hasattr(texts, "to_pylist"):
        return Examples(texts, lambda scalar: scalar.as_py())
    if isinstance(texts, np.ndarray) and texts.ndim == 2 and texts.dtype.kind in "UTO":
        return texts.tolist()
    return texts


def _check_column(column: Any) -> None:
    is_pair = isinstance(column, tuple | list) and len(column) == 2 and all(isinstance(name, str) for name in column)
    if not (column is None or isinstance(column, str) or is_pair):
        raise ArgumentError(f"column must be the name of a column or a pair of names, got {column!r}")


def _check_iterable(texts: Any) -> None:
    is_iterable = hasattr(texts, "__iter__") or hasattr(texts, "__getitem__")
    if not is_iterable or isinstance(texts, str | bytes | type) or getattr(texts, "ndim", 1) == 0:
        raise LengthsError(
            f"texts must be an iterable of str or of pairs of str, got {type(texts).__name__}; "
            "wrap one text in a list, pass one column of a table"
        )
