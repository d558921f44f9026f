"""Files: written whole or not at all, read line by line or record by record, with every failure told in one sentence.

Records come out of JSON lines, CSV, tab-separated or plain text files, each also as gzip.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import json
import os
import secrets
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

from .errors import ArgumentError, StoreError

Record: TypeAlias = Mapping[str, Any]

FORMATS = (".jsonl", ".csv", ".tsv", ".txt")

_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader finds the old one or the new one, never half of it."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            partial.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error.strerror}; what was there is kept") from None


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, or say why there can be none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(f"cannot make the folder {folder}: {error.strerror}; choose another") from None


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    r"""Yield ``(line number, line)`` without the line end, split on ``\n`` only.

    Other separators that ``str.splitlines`` knows, such as U+2028, may stand inside a JSON string.

    Args:
        path: a UTF-8 file; gzip where the name ends in ``.gz``.
    """
    try:
        with _open(path) as file:
            for number, raw in enumerate(file, start=1):
                yield number, _decode(raw, path, number)
    except FileNotFoundError:
        raise ArgumentError(f"no such file: {path}") from None
    except IsADirectoryError:
        raise ArgumentError(f"{path} is a folder; give a file") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ArgumentError(
            f"{path} is not a readable gzip file: {error}; copy it again, or rename it without .gz if it is plain"
        ) from None
    except OSError as error:
        raise ArgumentError(f"cannot read {path}: {error.strerror or error}") from None


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")


def _decode(raw: bytes, path: Path, number: int) -> str:
    try:
        line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        kind = "utf-16" if number == 1 and raw.startswith(_UTF16_MARKS) else "latin1"
        raise ArgumentError(
            f"{path}:{number}: not UTF-8 (byte {error.start + 1} of the line); convert the file first, "
            f"for example iconv -f {kind} -t utf-8, or save it as UTF-8"
        ) from None
    return line.removesuffix("\n").removesuffix("\r")


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
            got = f"got {line.strip()[:40]}{_hint_of_document(line, path, number)}"
            raise ArgumentError(f"{where}: not JSON: {_place_in_line(error)}; {got}") from None
        if not isinstance(record, dict):
            got = f"got {line[:40]}{_hint_of_document(line, path, number)}"
            raise ArgumentError(f'{where}: each line must be a JSON object such as {{"text": "…"}}, {got}')
        yield where, record


def _hint_of_document(line: str, path: Path, number: int) -> str:
    """Say how one list over the whole file becomes lines, if it seems to be one."""
    if number > 1 or not line.lstrip().startswith("["):
        return ""
    return f"; if the file is one list of objects, write one a line: jq -c '.[]' {path} > lines.jsonl"


def _place_in_line(error: Exception) -> str:
    """Say what is wrong without the line that json counts, which is always the first."""
    return f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def _csv_records(path: Path) -> Iterator[tuple[str, Record | None]]:
    # One text may be longer than the default of 128 KiB; 31 bits is the most that every platform takes.
    csv.field_size_limit(2**31 - 1)
    reader = csv.reader((line + "\n" for _, line in read_lines(path)), strict=True)
    names: list[str] | None = None
    while True:
        where = f"{path}:{reader.line_num + 1}"  # where a record begins: a text may have many lines
        try:
            cells = next(reader, None)
        except csv.Error as error:
            raise ArgumentError(f"{where}: not CSV: {_csv_reason(error, names or [])}") from None
        if cells is None:
            return
        if not cells:
            yield where, None
        elif names is None:
            names = distinct_names(cells, where)
        else:
            yield where, _named(names, cells, where)


def _csv_reason(error: csv.Error, names: list[str]) -> str:
    """Say what stops a reader of CSV: mostly another separator, or a quote that is never closed."""
    mark = next((mark for mark in (";", "\t", "|") if len(names) == 1 and mark in names[0]), None)
    if mark is not None:
        return f"{error}; the columns seem to be separated by {mark!r}, write the file again with commas"
    if str(error) == "unexpected end of data":
        return "a text that begins here with a quote is never closed; write quotes inside a text twice"
    return str(error)


def _tsv_records(path: Path, has_header: bool) -> Iterator[tuple[str, Record | None]]:
    names: list[str] | None = None
    for number, line in read_lines(path):
        where = f"{path}:{number}"
        if not line.strip():
            yield where, None
            continue
        cells = line.split("\t")
        if names is None:
            names = distinct_names(cells, where) if has_header else [str(i) for i in range(1, len(cells) + 1)]
            if has_header:
                continue
        yield where, _named(names, cells, where)


def distinct_names(names: list[str], where: str) -> list[str]:
    """Return the names of columns, or refuse two that are equal."""
    doubled = [name for name in dict.fromkeys(names) if names.count(name) > 1]
    if doubled:
        raise ArgumentError(f"{where}: two columns are called {doubled[0]!r}; give every column a name of its own")
    return names


def _named(names: list[str], cells: list[str], where: str) -> Record:
    if len(cells) != len(names):
        raise ArgumentError(f"{where}: {len(cells)} columns, where the first line has {len(names)}")
    return dict(zip(names, cells, strict=True))
