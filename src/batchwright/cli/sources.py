"""Where records come from: one file, the files of a folder, a Parquet file, or standard input."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast, final

from .._files import FORMATS, Record, distinct_names, read_lines, read_records
from .._optional import require
from ..errors import ArgumentError

Located: TypeAlias = tuple[str, Record | None]

PARQUET = ".parquet"
KINDS = (*FORMATS, PARQUET)
STDIN = Path("-")
# Parquet is not read from a stream.
STDIN_FORMATS = tuple(kind.removeprefix(".") for kind in FORMATS)
_ALLOWED = ".jsonl, .csv, .tsv or .txt, each also as .gz, or .parquet"


def kind_of(path: Path, *, stdin_format: str | None = None) -> str:
    """Return the format of a file, of every file in a folder, or of standard input, one of ``KINDS``.

    Args:
        path: the file or folder; ``-`` is standard input.
        stdin_format: the format of standard input without the dot.

    >>> kind_of(Path("-"), stdin_format="csv")
    '.csv'
    """
    if path == STDIN:
        if stdin_format is None:
            formats = ", ".join(STDIN_FORMATS)
            raise ArgumentError(f"standard input has no name to tell its format; add --format, one of {formats}")
        return f".{stdin_format}"
    if stdin_format is not None:
        raise ArgumentError(
            f"--format is for standard input, and the name of a file tells its format; write "
            f"- --format {stdin_format} < {path}, or leave --format out"
        )
    try:
        if not path.exists():
            raise ArgumentError(f"no such file: {path}")
        return _folder_kind(path) if path.is_dir() else _file_kind(path)
    except OSError as error:  # no right to look inside the folder, or no file can have such a name
        raise ArgumentError(f"cannot read {path}: {error.strerror or error}") from None


def open_records(path: Path, kind: str, *, tsv_header: bool) -> Iterator[Located]:
    """Yield ``(file:line, record)`` of one file or of every file in a folder, in the order of their names.

    A folder of .txt files holds one text per file; a single .txt file holds one per line.

    Args:
        path: the file or folder; ``-`` is standard input.
        kind: its format, as ``kind_of`` tells it.
        tsv_header: whether the first line of a .tsv file names its columns.
    """
    if path == STDIN:
        # It has the few attributes of a path that reading lines needs.
        yield from read_records(cast(Path, _StandardInput(kind)), tsv_header=tsv_header)
    elif not path.is_dir():
        yield from _one_file(path, kind, tsv_header=tsv_header)
    else:
        for part in _parts(path):
            yield from [_whole_text(part)] if kind == ".txt" else _one_file(part, kind, tsv_header=tsv_header)


@final
class _StandardInput:
    """Standard input in place of a path."""

    def __init__(self, suffix: str) -> None:
        self.suffix = suffix

    def open(self, mode: str) -> BinaryIO:
        assert mode == "rb"
        if sys.stdin is None:
            raise ArgumentError("standard input is closed; send data to it, for example < data.jsonl")
        return sys.stdin.buffer

    def __str__(self) -> str:
        return "standard input"


def _one_file(path: Path, kind: str, *, tsv_header: bool) -> Iterator[Located]:
    return _parquet_records(path) if kind == PARQUET else read_records(path, tsv_header=tsv_header)


def _whole_text(path: Path) -> Located:
    return str(path), {"text": "\n".join(line for _, line in read_lines(path))}


def _file_kind(path: Path) -> str:
    suffix = _suffix(path)
    if suffix == ".json":
        lines = f"{Path(path.name.removesuffix('.gz')).stem}.jsonl"
        raise ArgumentError(
            f"{path.name} is not read, because a .json file may be one document; if it has one object per line, rename "
            f"it to {lines}, else write it so, for example jq -c '.[]' {path.name} > {lines} for a list of objects"
        )
    if suffix not in KINDS:
        raise ArgumentError(
            f"cannot tell the format of {path.name}; the name must end in {_ALLOWED}; or say what it is, for example "
            f"- --format txt < {path}"
        )
    return suffix


def _suffix(path: Path) -> str:
    return Path(path.stem if path.suffix == ".gz" else path.name).suffix.lower()


def _parts(folder: Path) -> list[Path]:
    """Return the files of a folder by name; names that begin with a dot or an underscore are no data."""
    return sorted(part for part in folder.iterdir() if not part.name.startswith((".", "_")))


def _folder_kind(folder: Path) -> str:
    """Return the one format of the files in a folder, or say why there is none."""
    parts = _parts(folder)
    missing = next((part for part in parts if part.is_symlink() and not part.exists()), None)
    if missing is not None:
        raise ArgumentError(f"{missing} is a link to a file that is not there; remove the link, or mend it")
    found = {_suffix(part): part.name for part in reversed(parts) if part.is_file()}
    if not found:
        inside = next((part for part in parts if part.is_dir()), None)
        where = f"; give a folder inside it, for example {inside}" if inside else "; give one with"
        raise ArgumentError(f"the folder {folder} holds no files{where}{'' if inside else f' {_ALLOWED} files'}")
    strange = [part.name for part in parts if not part.is_file() or _suffix(part) not in KINDS]
    if strange or len(found) > 1:
        names = ", ".join(sorted({*found.values(), *strange[:3]}))
        raise ArgumentError(
            f"the folder {folder} mixes formats ({names}); keep only files of one format in it, "
            f"{_ALLOWED}, or give a single file"
        )
    return next(iter(found))


@final
class _Columns:
    """Some rows of a table; a column becomes Python values when it is first asked for."""

    def __init__(self, table: Any, path: Path, num_before: int) -> None:
        self._table, self._path, self._num_before = table, path, num_before
        self.names: list[str] = table.schema.names
        self._values: dict[str, Any] = {}

    def __len__(self) -> int:
        return cast(int, self._table.num_rows)

    def value(self, name: str, place: int) -> Any:
        if name not in self._values:
            column = self._table.column(name)
            try:
                self._values[name] = column.to_pylist()
            except (ValueError, OverflowError):  # one by one, up to the value that Python cannot hold
                self._values[name] = column
        found = self._values[name]
        return found[place] if isinstance(found, list) else self._one(name, place, found[place])

    def _one(self, name: str, place: int, value: Any) -> Any:
        try:
            return value.as_py()
        except (ValueError, OverflowError) as error:
            is_text = isinstance(error, UnicodeDecodeError)
            reason = "is not UTF-8; convert the file first" if is_text else f"cannot be read: {error}"
            raise ArgumentError(f"{self._path}:row {self._num_before + place + 1}: column {name!r} {reason}") from None


@final
class _TableRow(Mapping[str, Any]):
    """One row, read like a record."""

    def __init__(self, columns: _Columns, place: int) -> None:
        self._columns, self._place = columns, place

    def __getitem__(self, name: str) -> Any:
        if name not in self._columns.names:
            raise KeyError(name)
        return self._columns.value(name, self._place)

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns.names)

    def __len__(self) -> int:
        return len(self._columns.names)


def _parquet_records(path: Path) -> Iterator[Located]:
    arrow, parquet = require("pyarrow", extra=None), require("pyarrow.parquet", extra=None)
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            distinct_names(file.schema_arrow.names, str(path))
            for batch in file.iter_batches():
                columns = _Columns(batch, path, number)
                for place in range(len(columns)):
                    number += 1
                    yield f"{path}:row {number}", _TableRow(columns, place)
    except FileNotFoundError:
        raise ArgumentError(f"no such file: {path}") from None
    except (arrow.ArrowException, OSError) as error:
        raise ArgumentError(f"{path} is not a readable Parquet file: {error}") from None
