"""Examples from a file: which fields hold them, and one text or a pair of texts per example."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

from .._files import Record
from .._progress import ProgressBar
from .._types import MAX_INT32
from ..errors import ArgumentError
from .sources import Located, kind_of, open_records

Value: TypeAlias = str | int
Row: TypeAlias = Value | tuple[Value, ...]


@final
@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the examples come from.

    Args:
        path: the file, the folder of files, or ``-`` for standard input.
        field: the name of the field or column; None to choose.
        pairs: whether an example has a source and a target.
        limit: the most examples to read; None for all.
        holds_lengths: whether the field holds lengths instead of texts.
        stdin_format: the format of standard input without the dot; None for a file, whose name tells it.
    """

    path: Path
    field: str | None = None
    pairs: bool = False
    limit: int | None = None
    holds_lengths: bool = False
    stdin_format: str | None = None

    @property
    def name(self) -> str:
        """Return what the user calls it."""
        return "standard input" if self.stdin_format is not None else self.path.name or str(self.path)


def read_examples(source: Source, *, progress: bool = False) -> tuple[list[Row], int]:
    """Read the examples of a file; blank lines are skipped and counted.

    Args:
        source: the file and which part of it to read.
        progress: whether to show progress on a terminal.

    Returns:
        The examples in file order, one value each or a tuple of two for pairs, and the number of blank lines.
    """
    kind = kind_of(source.path, stdin_format=source.stdin_format)
    if kind == ".txt" and (source.pairs or source.field is not None):
        raise ArgumentError(f"{source.name} holds plain text and has no fields; leave out --field and --pairs")
    with ProgressBar(label=f"reading {source.name}", enabled=progress) as bar:
        rows, num_blank = _read(
            open_records(source.path, kind, tsv_header=_has_header(source, kind)), source, kind, bar
        )
    if not rows:
        raise ArgumentError(f"{source.name} holds no examples ({num_blank} blank lines); there is nothing to plan")
    return rows, num_blank


def _read(records: Iterator[Located], source: Source, kind: str, bar: ProgressBar) -> tuple[list[Row], int]:
    rows: list[Row] = []
    num_blank = 0
    names: list[str] | None = None
    for where, record in records:
        if record is None:
            num_blank += 1
            continue
        if names is None:
            names = choose_fields(record, _field(source, kind), pairs=source.pairs, where=where)
        rows.append(_row(record, names, where, source))
        bar.update()
        if len(rows) == source.limit:
            break
    return rows, num_blank


def choose_fields(record: Record, field: str | None, *, pairs: bool, where: str) -> list[str]:
    """Return the names of the one or two fields to read, from the first record of a file.

    Args:
        record: the first record.
        field: what the user named: ``name``, or ``source,target`` with ``pairs``; None to choose.
        pairs: whether two fields are wanted.
        where: ``file:line`` for messages.

    >>> choose_fields({"text": "a", "label": "b"}, None, pairs=False, where="data.jsonl:1")
    ['text']
    >>> choose_fields({"en": "a", "de": "b"}, None, pairs=True, where="data.jsonl:1")
    ['en', 'de']
    """
    if field is not None:
        names = _split_names(field, pairs=pairs)
        for name in names:
            _check_has(record, name, where)
        return names
    if not pairs and "text" in record:
        return ["text"]
    texts = [name for name, value in record.items() if isinstance(value, str)]
    _check_separator(record, where)
    if len(texts) != (2 if pairs else 1):
        wanted = "two fields" if pairs else "the field with the text"
        example = _example_of_fields(record, texts, 2 if pairs else 1)
        raise ArgumentError(
            f"{where}: name {wanted}, {example}; fields here: {_listed(record)}{_hint_of_pairs(texts, pairs)}"
            f"{_hint_of_lengths(record, pairs)}"
        )
    return texts


def _check_separator(record: Record, where: str) -> None:
    """Refuse a single column whose name and value split alike at another separator than the comma."""
    name, value = next(iter(record.items()), ("", "")) if len(record) == 1 else ("", "")
    found = next((mark for mark in (";", "\t", "|") if 0 < name.count(mark) == str(value).count(mark)), None)
    if found is not None:
        raise ArgumentError(
            f"{where}: the only column is called {name!r}, and seems to be several, separated by {found!r}; separate "
            f"them by commas, or name it, --field {shlex.quote(name)}, if it is one"
        )


def _example_of_fields(record: Record, texts: list[str], num: int) -> str:
    """Return an option to type: the longest texts of the record, in its order."""
    if len(texts) < num:
        return f"--field {'SOURCE,TARGET' if num == 2 else 'NAME'}"
    longest = sorted(texts, key=lambda name: len(str(record[name])))[-num:]
    return f"for example --field {shlex.quote(','.join(name for name in texts if name in longest))}"


def _hint_of_pairs(texts: list[str], pairs: bool) -> str:
    """Say how both texts of a record are read, if it holds two."""
    if pairs or len(texts) != 2:
        return ""
    return f"; if every row is a pair of texts, --pairs --field {shlex.quote(','.join(texts))}"


def _hint_of_lengths(record: Record, pairs: bool) -> str:
    """Say how lengths are read, if fields of the record look like them."""
    counts = [name for name, value in record.items() if _looks_like_length(value)]
    if len(counts) < 1 + pairs:
        return ""
    counts.sort(key=lambda name: not re.search("len|tok|num|count", name, re.IGNORECASE))
    names = ",".join(counts[: 1 + pairs])
    return f"; if they hold lengths, for example --field {names} --tokenizer lengths"


def _looks_like_length(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(item, int) for item in value)
    return str(value).removesuffix(".0").isdecimal()


def as_length(value: Any, name: str, where: str) -> int:
    """Return a length that the data holds: a whole number, or the number of items of a flat list.

    A list inside a list may be a batch of one, and the pairs of a map are no tokens: both are refused.

    >>> as_length("12", "n", "data.csv:2"), as_length([5, 7], "input_ids", "data.jsonl:1")
    (12, 2)
    """
    if isinstance(value, list):
        nested = [item for item in value if not isinstance(item, int | float | str)]
        if not nested:
            return len(value)
        raise ArgumentError(
            f"{where}: --tokenizer lengths counts the items of a flat list, and the list in field {name!r} holds "
            f"{_kind(nested[0])}: {str(nested[0])[:40]!r}; name a field with one list of token ids per example"
        )
    try:
        # int and float would take true, and bytes that look like a number.
        if isinstance(value, bool | bytes) or int(value) != float(value) or not 0 <= int(value) <= MAX_INT32:
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(
            f"{where}: --tokenizer lengths needs a whole number from 0 to {MAX_INT32:,} or a list in field {name!r}, "
            f"got {_kind(value)}: {str(value)[:40]!r}"
        ) from None
    return int(value)


def _as_text(value: Any, name: str, where: str) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        raise ArgumentError(f"{where}: field {name!r} holds null, not text; fill it in, or leave that example out")
    other = "name a text field, or use --tokenizer lengths if it holds lengths or token ids"
    hint = _hint_of_nested(value, name) or other
    raise ArgumentError(f"{where}: field {name!r} holds {_kind(value)}, not text; {hint}")


def _hint_of_nested(value: Any, name: str) -> str:
    """Say how a text inside a chat or an object is read."""
    inside = value[0] if isinstance(value, list) and value else value
    if not isinstance(inside, dict) or not inside:
        return ""
    key = next((key for key in ("content", "value", "text") if key in inside), next(iter(inside)))
    text = f".{name}.{key}" if inside is value else f'[.{name}[].{key}] | join(" ")'
    return f"take the text out of it, for example jq -c '{{text: ({text})}}' FILE > texts.jsonl"


def _row(record: Record, names: list[str], where: str, source: Source) -> Row:
    take = as_length if source.holds_lengths else _as_text
    values: list[Value] = []
    for name in names:
        _check_has(record, name, where)
        values.append(take(record[name], name, where))
    return tuple(values) if source.pairs else values[0]


def _field(source: Source, kind: str) -> str | None:
    """Return the field to look for; the columns of a file without names are called 1, 2, …"""
    if source.field is None and kind == ".tsv":
        return "1,2" if source.pairs else "1"
    return source.field


def _has_header(source: Source, kind: str) -> bool:
    """Say whether the user named columns, so that the first line must hold names, or numbered them."""
    field = _field(source, kind)
    return field is not None and not all(name.isdigit() for name in _split_names(field, pairs=source.pairs))


def _split_names(field: str, *, pairs: bool) -> list[str]:
    """Split ``source,target`` for pairs; a single name may hold commas."""
    names = [name.strip() for name in field.split(",")] if pairs else [field]
    if pairs and (len(names) != 2 or not all(names)):
        raise ArgumentError(f"--pairs needs two fields, --field source,target; got --field {field}")
    return names


def _check_has(record: Record, name: str, where: str) -> None:
    if name in record:
        return
    parts = [part.strip() for part in name.split(",")]
    hint = (
        f"; for two texts per example add --pairs --field {name}" if len(parts) == 2 and set(parts) <= {*record} else ""
    )
    outer = name.partition(".")[0]
    if outer != name and outer in record:
        hint = f"; fields inside a field are not read: {_hint_of_nested(record[outer], outer)}".rstrip(": ")
    raise ArgumentError(f"{where}: no field {name!r}; fields here: {_listed(record)}{hint}")


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", tuple: "a pair", type(None): "null", bool: "true or false"}
    names |= {str: "text", bytes: "bytes", int: "a number", float: "a number"}
    return names.get(type(value), f"a value of type {type(value).__name__}")


def _listed(record: Record) -> str:
    return ", ".join(map(str, record)) or "none"
