"""Records on disk: one JSON line each, whole or not at all, written by one process."""

from __future__ import annotations

import json
import os
import secrets
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, final

from ..errors import StoreError as StoreError
from ._run_record import Record

# Windows would write other line ends than it is given.
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)


@final
class RunStore:
    """A file of records that grows line by line; a context in which this process alone may write.

    A line that was cut off when a process was killed is dropped when the file is opened again.

    Args:
        path: the file; made where it is missing.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, RunStore(Path(folder) / "runs.jsonl") as store:
    ...     store.append({"id": "a", "status": "ok"})
    ...     list(store.records)
    ['a']
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self.records: dict[str, Record] = {}

    def __enter__(self) -> RunStore:
        try:
            self._file = os.open(self._path, _FLAGS, 0o666)
        except OSError as error:
            raise StoreError(f"cannot write {self._path}: {error.strerror}; choose another folder") from None
        try:
            self._lock()
            self._drop_half_line()
            self.records = {record["id"]: record for record in read_records(self._path)}
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record to the end and to the disk; where that fails the file stays as it was.

        Raises:
            StoreError: the disk is full, or refuses.
        """
        assert self._file is not None, "the store is not open"
        line = (json.dumps(record, allow_nan=False, separators=(",", ":")) + "\n").encode()
        before = os.fstat(self._file).st_size
        try:
            _write_all(self._file, line)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, before)
            raise StoreError(
                f"cannot write {self._path}: {error.strerror}; the {len(self.records)} runs before this one are kept: "
                "make room and run again to go on from there"
            ) from None
        self.records[record["id"]] = dict(record)

    def drop_failed(self) -> None:
        """Forget runs that failed, so that they are run again."""
        kept = {name: record for name, record in self.records.items() if record["status"] == "ok"}
        if len(kept) == len(self.records):
            return
        lines = [json.dumps(record, separators=(",", ":")) + "\n" for record in kept.values()]
        write_atomic(self._path, "".join(lines))
        self.__exit__()
        self.__enter__()

    def _lock(self) -> None:
        """Refuse a second writer; where the system has no such locks, none is taken."""
        try:
            import fcntl
        except ImportError:
            return
        assert self._file is not None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise StoreError(f"another process is writing {self._path}; wait for it or choose another folder") from None

    def _drop_half_line(self) -> None:
        assert self._file is not None
        content = self._path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.ftruncate(self._file, whole)


def read_records(path: Path) -> Iterator[Record]:
    """Yield the records of a file; a line that is none is left out with a warning, a last one that is cut off without.

    Args:
        path: the file; without it there are no records.
    """
    if not path.is_file():
        return
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is not None:
            yield record
        elif line and number < len(lines):
            warnings.warn(f"{path}:{number} is no record of a run and is left out", stacklevel=2)


def write_atomic(path: Path, text: str) -> None:
    """Write a file so that a reader finds the old one or the new one, never half of it."""
    partial = path.with_name(f"{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            partial.write_text(text, encoding="utf-8")
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


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
    os.fsync(file)


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and {"id", "status"} <= record.keys() else None
