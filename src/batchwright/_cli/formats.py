"""Records out of a file: JSON lines, CSV, tab-separated or plain lines, each also gzip."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import ArgumentError
from .lines import read_lines

Record: TypeAlias = Mapping[str, Any]

FORMATS = (".jsonl", ".csv", ".tsv", ".txt")


def file_format(path: Path) -> str:
    """Return the format a file name tells, one of ``FORMATS``.

    >>> file_format(Path("data.jsonl.gz"))
    '.jsonl'
    """
    suffix = Path(path.stem).suffix if path.suffix == ".gz" else path.suffix
    if suffix.lower() not in FORMATS:
        allowed = ", ".join(FORMATS)
        raise ArgumentError(f"cannot tell the format of {path.name}; the name must end in {allowed}, or that and .gz")
    return suffix.lower()


def read_records(path: Path, *, tsv_header: bool) -> Iterator[tuple[str, Record | None]]:
    """Yield ``(file:line, record)``; the record of a blank line is None.

    Args:
        path: the file; its name tells the format.
        tsv_header: whether the first line of a .tsv file names its columns; otherwise they are 1, 2, …
    """
    kind = file_format(path)
    if kind == ".tsv":
        return _tsv_records(path, tsv_header)
    return {".txt": _txt_records, ".jsonl": _jsonl_records, ".csv": _csv_records}[kind](path)


def _txt_records(path: Path) -> Iterator[tuple[str, Record | None]]:
    for number, line in read_lines(path):
        yield f"{path}:{number}", {"text": line} if line.strip() else None


def _jsonl_records(path: Path) -> Iterator[tuple[str, Record | None]]:
    for number, line in read_lines(path):
        where = f"{path}:{number}"
        if not line.strip():
            yield where, None
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ArgumentError(f"{where}: not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ArgumentError(f'{where}: each line must be a JSON object such as {{"text": "…"}}, got {line[:40]}')
        yield where, record


def _csv_records(path: Path) -> Iterator[tuple[str, Record | None]]:
    # One text may be longer than the default of 128 KiB; 31 bits is the most that every platform takes.
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader((line + "\n" for _, line in read_lines(path)), strict=True)
    names: list[str] | None = None
    while True:
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise ArgumentError(f"{path}:{reader.line_num}: not CSV: {error}") from None
        if cells is None:
            return
        where = f"{path}:{reader.line_num}"
        if not cells:
            yield where, None
        elif names is None:
            names = _header(cells, where)
        else:
            yield where, _named(names, cells, where)


def _tsv_records(path: Path, has_header: bool) -> Iterator[tuple[str, Record | None]]:
    names: list[str] | None = None
    for number, line in read_lines(path):
        where = f"{path}:{number}"
        if not line.strip():
            yield where, None
            continue
        cells = line.split("\t")
        if names is None:
            names = _header(cells, where) if has_header else [str(i) for i in range(1, len(cells) + 1)]
            if has_header:
                continue
        yield where, _named(names, cells, where)


def _header(names: list[str], where: str) -> list[str]:
    doubled = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if doubled:
        raise ArgumentError(f"{where}: two columns are called {doubled[0]!r}; give every column a name of its own")
    return names


def _named(names: list[str], cells: list[str], where: str) -> Record:
    if len(cells) != len(names):
        raise ArgumentError(f"{where}: {len(cells)} columns, where the first line has {len(names)}")
    return dict(zip(names, cells, strict=True))
