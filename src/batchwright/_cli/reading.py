"""Examples out of a file: one text an example, or a pair of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, final

from ..errors import ArgumentError
from .fields import as_length, as_text, check_has, choose_fields, split_names
from .formats import Record, file_format, read_records

Value: TypeAlias = str | int
Row: TypeAlias = Value | tuple[Value, ...]


@final
@dataclass(frozen=True, kw_only=True)
class Source:
    """Where the examples come from.

    Args:
        path: the file.
        field: name of the field or column; None to choose.
        pairs: whether an example is a source and a target.
        limit: the most examples to read; None for all.
        holds_lengths: whether the field holds lengths in place of texts.
    """

    path: Path
    field: str | None = None
    pairs: bool = False
    limit: int | None = None
    holds_lengths: bool = False


@final
@dataclass(frozen=True, kw_only=True)
class Examples:
    """The examples of a file: one value each, or a tuple of two for pairs."""

    rows: list[Row]
    num_blank: int


def read_examples(source: Source) -> Examples:
    """Read the examples of a file; blank lines are skipped and counted.

    Args:
        source: the file and which part of it to read.

    Returns:
        The examples in file order.
    """
    if file_format(source.path) == ".txt" and (source.pairs or source.field is not None):
        raise ArgumentError(f"{source.path.name} has one text a line and no fields; drop --field and --pairs")
    rows: list[Row] = []
    num_blank = 0
    names: list[str] | None = None
    for where, record in read_records(source.path, tsv_header=_has_header(source)):
        if record is None:
            num_blank += 1
            continue
        if names is None:
            names = choose_fields(record, _field(source), pairs=source.pairs, where=where)
        rows.append(_row(record, names, where, source))
        if len(rows) == source.limit:
            break
    if not rows:
        raise ArgumentError(f"{source.path} holds no examples ({num_blank} blank lines); there is nothing to plan")
    return Examples(rows=rows, num_blank=num_blank)


def _row(record: Record, names: list[str], where: str, source: Source) -> Row:
    take = as_length if source.holds_lengths else as_text
    values: list[Value] = []
    for name in names:
        check_has(record, name, where)
        values.append(take(record[name], name, where))
    return tuple(values) if source.pairs else values[0]


def _field(source: Source) -> str | None:
    """Return the field to look for; columns of a file without names are called 1, 2, …"""
    if source.field is None and file_format(source.path) == ".tsv":
        return "1,2" if source.pairs else "1"
    return source.field


def _has_header(source: Source) -> bool:
    """Say whether the user named columns, so that the first line must hold names, or numbered them."""
    field = _field(source)
    return field is not None and not all(name.isdigit() for name in split_names(field, pairs=source.pairs))
