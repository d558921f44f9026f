"""The columns of a user's file: which are numbers, which are texts, and what the target asks to predict."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

import numpy as np

from ...errors import ArgumentError
from .dataset import Array

FileTask: TypeAlias = Literal["classification", "regression"]
# Whole numbers with at most this many different values count as classes.
_MAX_NUMERIC_CLASSES = 20
# A column of at most this many different words, each in this many rows on average, holds kinds and no texts.
_MAX_KINDS = 20
_MIN_ROWS_A_KIND = 5
# Features are kept in 32 bits.
MAX_FLOAT32 = float(np.finfo(np.float32).max)
# Ways to write that a number is missing; as a class or a text each of them may be meant.
_MISSING_NUMBERS = frozenset({"na", "n/a", "nan", "null", "none", "?", "-"})
# What pandas writes, or makes of it when it reads the file again, above the numbers of the rows.
_UNNAMED = frozenset({"", "Unnamed: 0"})
_ODD_SPELLINGS = (
    (
        re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([T ]+\d{1,2}:\d{2}.*)?|\d{1,2}:\d{2}(:\d{2}.*)?"),
        "a date or time and no text; turn it into numbers, such as days since the first one",
    ),
    (
        re.compile(r"[-+]?\s*[$€£¥]?\s*[-+]?\d[\d.,' ]*\s*[%$€£¥]?"),
        "a number spelt with more than digits and a point; write it plainly, such as 1234.5",
    ),
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

    def first_where(self, name: str, is_so: Callable[[Any], bool]) -> tuple[str, Any] | None:
        """Return the place and the value of the first row of which something is so."""
        pairs = zip(self.where, self.values[name], strict=True)
        return next(((where, value) for where, value in pairs if is_so(value)), None)

    def numbers(self, name: str) -> Array:
        """Return the values of a column as float64, or say which one is not a number."""
        return np.array([self._number(name, row) for row in range(len(self.take(name)))], dtype=np.float64)

    def texts(self, name: str) -> Sequence[str]:
        """Return the values of a column of texts, or say which one is not a text."""
        for value, where in zip(self.take(name), self.where, strict=True):
            if not isinstance(value, str):
                raise ArgumentError(f"{where}: column {name!r} holds {str(value)[:40]}, where most rows hold a text")
        return self.values[name]

    def kinds(self, name: str) -> list[str]:
        """Return the few different words of a column, sorted; none if they are too many to be more than texts."""
        found = {value.strip() for value in self.take(name) if isinstance(value, str)}
        is_few = len(found) <= min(_MAX_KINDS, len(self.where) // _MIN_ROWS_A_KIND)
        return sorted(found) if is_few else []

    def feature_names(self, target: str, chosen: Sequence[str] | None) -> list[str]:
        """Return the columns to learn from: the chosen ones, or ``text``, or all but the target."""
        if chosen is not None:
            return _checked_choice(chosen, target)
        if target != "text" and "text" in self.values and self.is_text("text"):
            return ["text"]
        names = [name for name in self.values if name != target]
        if not names:
            raise ArgumentError(f"{self.name} has only the target column {target!r}; add features")
        for name in names:
            if name in _UNNAMED:
                raise ArgumentError(
                    f"{self.name}: column {list(self.values).index(name) + 1} has no name; a row number, as pandas "
                    "writes it, would be learnt from: write the file with index=False, give the column a name, or "
                    f"choose columns={[other for other in names if other not in _UNNAMED]}"
                )
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
        if not abs(number) <= MAX_FLOAT32:
            shown = str(value)[:40]
            raise ArgumentError(f"{self.where[row]}: column {name!r} holds {shown}, which is not a 32-bit number")
        return number


def parse_number(value: Any) -> float | None:
    """Return the number that a value is or spells, None for anything else.

    >>> parse_number(" 2.5"), parse_number(True), parse_number("two"), parse_number([1])
    (2.5, 1.0, None, None)
    """
    # Python reads 1_000 as a number; in a file it is a name.
    if not isinstance(value, str | int | float) or (isinstance(value, str) and "_" in value):
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
    _refuse_missing(columns, name, numbers)
    task = task or _guess(numbers)
    if task == "regression":
        target = columns.numbers(name)
        _check_target(columns, name, len(np.unique(target)), most=len(target))
        return target, task, None
    # From 2^53 on, neighbours become the same float64, and two classes one.
    is_plain = all(number is not None and abs(number) < 2**53 for number in numbers)
    values = columns.numbers(name) if is_plain else np.array(_as_labels(columns, name))
    classes, labels = np.unique(values, return_inverse=True)
    _check_target(columns, name, len(classes), most=len(labels) // 2)
    return labels, task, len(classes)


def _refuse_missing(columns: Columns, name: str, numbers: Sequence[float | None]) -> None:
    """Refuse a target with a word for a missing number among numbers, or ``nan``: it would become a class."""
    is_number = [number is not None and not math.isnan(number) for number in numbers]
    words = _MISSING_NUMBERS if 2 * sum(is_number) > len(numbers) else {"nan"}
    found = columns.first_where(name, lambda value: isinstance(value, str) and value.strip().lower() in words)
    if found is not None:
        where, value = found
        raise ArgumentError(
            f"{where}: the target {name!r} holds {value!r}, which stands for a missing value; fill it in or drop the "
            "row"
        )


def _guess(numbers: Sequence[float | None]) -> FileTask:
    if any(number is None for number in numbers):
        return "classification"
    is_whole = all(number is not None and number.is_integer() for number in numbers)
    return "classification" if is_whole and len(set(numbers)) <= _MAX_NUMERIC_CLASSES else "regression"


def _as_labels(columns: Columns, name: str) -> list[str]:
    for value, where in zip(columns.values[name], columns.where, strict=True):
        if parse_number(value) is None and not isinstance(value, str):
            raise ArgumentError(f"{where}: the target {name!r} holds {str(value)[:40]}, not a number or a text")
    return [str(value).strip() for value in columns.values[name]]


def _check_target(columns: Columns, name: str, num_values: int, *, most: int) -> None:
    num_rows = len(columns.where)
    if num_values == 1:
        raise ArgumentError(
            f"{columns.name}: the target {name!r} is {columns.values[name][0]!r} in all {num_rows} rows; "
            "there is nothing to learn"
        )
    if num_values > most:
        text = columns.first_where(name, lambda value: parse_number(value) is None)
        advice = "or pass task='regression' to predict a number"
        if text is not None:
            advice = f"or write numbers to predict a number: {text[0]} holds {str(text[1])[:40]!r}"
        raise ArgumentError(
            f"{columns.name}: the target {name!r} has {num_values} different values in {num_rows} rows, too many to "
            f"be classes; name another column, {advice}"
        )


def odd_spelling(values: Sequence[Any]) -> tuple[str | None, str]:
    """Return an example and advice if most values are dates, or numbers with more than digits and a point.

    >>> odd_spelling(["1,200", "3"])[0], odd_spelling(["5 %", "7 %"])[0], odd_spelling(["two words", "7 %"])[0]
    ('1,200', '5 %', None)
    """
    for pattern, advice in _ODD_SPELLINGS:
        found = [value for value in values if isinstance(value, str) and pattern.fullmatch(value.strip())]
        plain = sum(parse_number(value) is not None for value in values)
        if found and 2 * (len(found) + plain) > len(values):
            return found[0], advice
    return None, ""


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
    twice = [name for name in dict.fromkeys(chosen) if list(chosen).count(name) > 1]
    if twice:
        raise ArgumentError(f"columns must not name a column twice, got {twice[0]!r} more than once")
    return list(chosen)
