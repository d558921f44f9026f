"""Columns of a user's file: which are features, what stands in them, and what the target asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

import numpy as np

from ..errors import ArgumentError
from ._records import Array

FileTask: TypeAlias = Literal["classification", "regression"]

# Whole numbers with no more different values than this are taken for classes.
_MAX_NUMERIC_CLASSES = 20
# Features are kept in 32 bits.
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
# Ways to write that a number is missing. As a class or a text each of them may be meant.
_MISSING_NUMBERS = frozenset({"na", "n/a", "nan", "null", "none", "?", "-"})


@final
@dataclass(frozen=True, kw_only=True)
class Columns:
    """The columns of a file.

    Args:
        name: the file, for messages.
        values: the values of each column, all as many.
        where: where each row stands, for messages, e.g. ``data.csv:2``.
    """

    name: str
    values: Mapping[str, Sequence[Any]]
    where: Sequence[str]

    def listed(self) -> str:
        """Return the names for a message."""
        return ", ".join(self.values)

    def take(self, name: str) -> Sequence[Any]:
        """Return the values of a column, or say which columns there are, or where a value is missing."""
        if name not in self.values:
            raise ArgumentError(f"{self.name} has no column {name!r}; columns here: {self.listed()}")
        for value, where in zip(self.values[name], self.where, strict=True):
            if _is_missing(value):
                raise ArgumentError(f"{where}: column {name!r} has no value, got {value!r}; fill it in or drop the row")
        return self.values[name]

    def numbers(self, name: str) -> Array:
        """Return the values of a column as float64, or say where one is no number."""
        return np.array([self._number(name, row) for row in range(len(self.take(name)))], dtype=np.float64)

    def texts(self, name: str) -> Sequence[str]:
        """Return the values of a column of texts, or say where one is none."""
        for value, where in zip(self.take(name), self.where, strict=True):
            if not isinstance(value, str):
                raise ArgumentError(f"{where}: column {name!r} holds {str(value)[:40]}, not a text as most rows do")
        return self.values[name]

    def feature_names(self, target: str, chosen: Sequence[str] | None) -> list[str]:
        """Return the columns to learn from: those chosen, one called ``text``, or all but the target."""
        if chosen is not None:
            return _checked_choice(chosen, target)
        if target != "text" and "text" in self.values and self.is_text("text"):
            return ["text"]
        names = [name for name in self.values if name != target]
        if not names:
            raise ArgumentError(f"{self.name} has the target {target!r} and no other column; add features")
        return names

    def is_text(self, name: str) -> bool:
        """Say whether most values of a column are texts; the few others are then told as mistakes."""
        return 2 * sum(map(_is_text, self.take(name))) > len(self.where)

    def _number(self, name: str, row: int) -> float:
        value = self.values[name][row]
        number = as_number(value)
        if number is None:
            raise ArgumentError(
                f"{self.where[row]}: column {name!r} holds {str(value)[:40]!r}, not a number; correct it, or leave the "
                "column out with columns="
            )
        if not abs(number) <= _MAX_FLOAT32:
            raise ArgumentError(f"{self.where[row]}: column {name!r} holds {value}, which is no 32-bit number")
        return number


def as_number(value: Any) -> float | None:
    """Return a value as a number, or None where it is none.

    >>> as_number(" 2.5"), as_number(True), as_number("two"), as_number([1])
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

    Without a task, texts are classes, and so are whole numbers of at most 20 different values; all others are numbers
    to predict.
    """
    numbers = [as_number(value) for value in columns.take(name)]
    task = task or _guess(numbers)
    if task == "regression":
        target = columns.numbers(name)
        _check_varies(columns, name, len(np.unique(target)))
        return target, task, None
    has_text = any(number is None for number in numbers)
    values = np.array(_as_labels(columns, name)) if has_text else columns.numbers(name)
    classes, labels = np.unique(values, return_inverse=True)
    _check_varies(columns, name, len(classes))
    _check_classes(columns, name, len(classes))
    return labels, task, len(classes)


def _guess(numbers: Sequence[float | None]) -> FileTask:
    if any(number is None for number in numbers):
        return "classification"
    is_whole = all(number is not None and number.is_integer() for number in numbers)
    return "classification" if is_whole and len(set(numbers)) <= _MAX_NUMERIC_CLASSES else "regression"


def _as_labels(columns: Columns, name: str) -> list[str]:
    for value, where in zip(columns.values[name], columns.where, strict=True):
        if as_number(value) is None and not isinstance(value, str):
            raise ArgumentError(f"{where}: the target {name!r} holds {str(value)[:40]}, not a number or a text")
    return [str(value) for value in columns.values[name]]


def _check_varies(columns: Columns, name: str, num_values: int) -> None:
    if num_values == 1:
        raise ArgumentError(
            f"{columns.name}: the target {name!r} is {columns.values[name][0]!r} in all {len(columns.where)} rows; "
            "there is nothing to learn"
        )


def _check_classes(columns: Columns, name: str, num_classes: int) -> None:
    num_rows = len(columns.where)
    if num_classes > num_rows // 2:
        raise ArgumentError(
            f"{columns.name}: the target {name!r} has {num_classes} different values in {num_rows} rows, too many to "
            "be classes; name another column, or pass task='regression' for a number"
        )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and as_number(value) is None and value.strip().lower() not in _MISSING_NUMBERS


def _is_missing(value: Any) -> bool:
    if isinstance(value, str):
        return not value.strip()
    return value is None or (isinstance(value, float) and math.isnan(value))


def _checked_choice(chosen: Sequence[str], target: str) -> list[str]:
    if isinstance(chosen, str) or not chosen:
        raise ArgumentError(f"columns must be a list of names, got {chosen!r}; write columns=['a', 'b']")
    if target in chosen:
        raise ArgumentError(f"columns must not hold the target {target!r}; it would be learned from itself")
    return list(chosen)
