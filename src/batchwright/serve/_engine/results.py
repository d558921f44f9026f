"""What a batched function may return, and which part of it is whose: a row per item, or a refusal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set, Sized
from itertools import islice
from typing import Any

from ...errors import ResultError

# They have a length and can be iterated over, but what comes out belongs to no item.
_NO_ROWS = (str, bytes, bytearray, memoryview, Set)
# How tables give rows and names: polars, pyarrow, pandas. Iterating over them gives columns or names of columns.
_TABLES = (("to_dicts", (), "columns"), ("to_pylist", (), "column_names"), ("to_dict", ("records",), "columns"))


def as_results(values: Any, num_items: int) -> list[Any]:
    """Return the results as a list with one entry per item, or say what is wrong with them.

    Lists, tuples, arrays and tensors are iterated over, and so is a generator. A mapping holds columns: each item gets
    a dict with its row of every column. A table (pandas, polars, pyarrow) gives each item its row as a dict. Texts,
    bytes, sets, named tuples and single values have no rows and are refused, and so is a length that differs from what
    the iteration gives.

    >>> as_results((1, 2), 2)
    [1, 2]
    >>> as_results({"label": ["a", "b"], "score": [0.5, 0.25]}, 2)
    [{'label': 'a', 'score': 0.5}, {'label': 'b', 'score': 0.25}]
    >>> as_results([1], 2)
    Traceback (most recent call last):
        ...
    batchwright.errors.ResultError: the batched function returned 1 results for 2 items; return one result per item
    """
    return _rows(values, num_items, "the batched function")


def _rows(values: Any, num_items: int, name: str) -> list[Any]:
    if isinstance(values, Mapping):
        return _rows_of_columns(values, num_items, name)
    if hasattr(values, "columns"):
        return _counted(_rows_of_table(values, name), num_items, name)
    if isinstance(values, _NO_ROWS) or _is_record(values) or not isinstance(values, Iterable | Sized):
        raise _no_rows(values, name)
    return _counted(values, num_items, name)


def _rows_of_columns(columns: Mapping[Any, Any], num_items: int, name: str) -> list[Any]:
    """Return a plain dict per item; every column must have a row for each."""
    if not columns:
        raise ResultError(f"{name} returned an empty {type(columns).__name__}; return one result per item")
    keys = list(columns)
    rows = [_rows(columns[key], num_items, f"{name}, in column {key!r},") for key in keys]
    return [dict(zip(keys, row, strict=True)) for row in zip(*rows, strict=True)]


def _rows_of_table(table: Any, name: str) -> Any:
    for method, arguments, names_of in _TABLES:
        if callable(rows := getattr(table, method, None)):
            names = list(getattr(table, names_of))
            if len(set(names)) < len(names):  # a dict has room for one of them
                raise ResultError(f"{name} returned a table in which a column name comes twice: {names}")
            return rows(*arguments)
    raise _no_rows(table, name)


def _counted(values: Any, num_items: int, name: str) -> list[Any]:
    """Return what the iteration gives, if that is one value per item and as many as the length says."""
    said = _length(values, name)
    if said is not None and said != num_items:
        raise _miscounted(name, str(said), num_items, said)
    rows = list(islice(values, num_items + 1))  # one more shows that there are too many, however many there are
    if len(rows) == num_items:
        return rows
    came = f"more than {num_items}" if len(rows) > num_items else str(len(rows))
    if said is None:
        raise _miscounted(name, came, num_items, len(rows))
    kind = type(values).__name__
    raise ResultError(
        f"{name} returned {kind} of length {said}, but iterating over it gives {came}; return a list with one result "
        "per item"
    )


def _length(values: Any, name: str) -> int | None:
    """Return how many values there are said to be; None for a generator, which does not say."""
    if not isinstance(values, Sized):
        return None
    try:
        return len(values)
    except TypeError:  # an array or tensor without dimensions
        raise _no_rows(values, name) from None


def _is_record(values: Any) -> bool:
    """Say whether a tuple has named fields: a named tuple, or what ``torch.max`` returns."""
    return isinstance(values, tuple) and (hasattr(values, "_fields") or hasattr(values, "n_fields"))


def _no_rows(values: Any, name: str) -> ResultError:
    return ResultError(f"{name} must return a list with one result per item, got {type(values).__name__}")


def _miscounted(name: str, came: str, num_items: int, num_results: int) -> ResultError:
    error = ResultError(f"{name} returned {came} results for {num_items} items; return one result per item")
    error.num_results = num_results
    return error
