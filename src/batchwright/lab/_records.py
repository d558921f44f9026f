"""The record of a run: what it holds, what is read off it, and the file that keeps records line by line."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, final

from .._checks import is_number
from .._files import write_atomic
from .._machine import num_cores, processor_name, versions_of
from .._version import __version__
from ..errors import StoreError
from .strategies.strategy import BASELINE

RunRecord: TypeAlias = Mapping[str, Any]

# 2: every strategy has a learning rate of its own, and curves have simulated seconds.
VERSION = 2
# What a line must hold to be a record, where it has these fields.
_TYPES = {"id": str, "status": str, "dataset": str, "model": str, "strategy": str, "group": str, "seed": int}
_TYPES_OR_NONE = {
    **{"final": dict, "settings": dict, "properties": dict, "tuning": dict, "time_model": dict},
    **{"curve": list, "decisions": list, "error": str, "metric_name": str},
}
# O_BINARY: Windows would otherwise change the line ends.
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0)


def run_id(dataset: str, model: str, strategy: str, seed: int, settings: Mapping[str, Any]) -> str:
    """Return the name of a run, which is the same whenever everything that decides the run is the same.

    >>> run_id("wine", "mlp", "linear", 0, {"lr": 0.1}) == run_id("wine", "mlp", "linear", 0, {"lr": 0.2})
    False
    """
    content = json.dumps([VERSION, dataset, model, strategy, seed, dict(settings)], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=10).hexdigest()


def make_record(
    *, dataset: str, model: str, strategy: str, group: str, seed: int, settings: Mapping[str, Any], **found: Any
) -> dict[str, Any]:
    """Return the record of a run; fields not given are empty, and numbers that are not finite are None.

    Args:
        dataset: the name of the data set.
        model: the name of the model.
        strategy: the name of the strategy.
        group: the group of the strategy.
        seed: the seed of the run.
        settings: the settings as JSON values.
        **found: further fields of the record.
    """
    record = {
        "version": VERSION,
        "id": run_id(dataset, model, strategy, seed, settings),
        "dataset": dataset,
        "model": model,
        "strategy": strategy,
        "group": group,
        "seed": seed,
        "status": "ok",
        "error": None,
        "settings": dict(settings),
        "properties": {},
        "num_parameters": None,
        "metric_name": None,
        "tuning": None,
        "time_model": None,
        "curve": [],
        "decisions": [],
        "final": None,
        **found,
        "versions": versions(),
        "hardware": hardware(),
    }
    return dict(finite(record))


def finite(value: Any) -> Any:
    """Return JSON values, with None for every number that JSON cannot hold.

    >>> finite({"loss": float("nan"), "sizes": (1, 2.5)})
    {'loss': None, 'sizes': [1, 2.5]}
    """
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@lru_cache(maxsize=1)
def versions() -> dict[str, str | None]:
    """Return the versions that a run depends on."""
    return {"batchwright": __version__, **versions_of("torch", "numpy")}


@lru_cache(maxsize=1)
def hardware() -> dict[str, Any]:
    """Return the machine of a run."""
    return {"machine": platform.machine(), "num_cpus": num_cores(), "processor": processor_name()}


class CellKey(NamedTuple):
    """The data set and the model of a cell, by which runs are compared: one column of the report's matrix."""

    dataset: str
    model: str

    def __str__(self) -> str:
        return f"{self.dataset} · {self.model}"


def cell_of(record: RunRecord) -> CellKey:
    """Return the data set and the model of a run."""
    return CellKey(record["dataset"], record["model"])


def newest_records(records: Iterable[RunRecord]) -> list[RunRecord]:
    """Return the last record of each data set, model, strategy and seed, since a run may have been repeated.

    >>> run = {"dataset": "wine", "model": "mlp", "strategy": "constant", "seed": 0}
    >>> [record["status"] for record in newest_records([run | {"status": "failed"}, run | {"status": "ok"}])]
    ['ok']
    """
    newest: dict[tuple[Any, ...], RunRecord] = {}
    for record in records:
        key = (record["dataset"], record["model"], record["strategy"], record["seed"])
        newest.pop(key, None)
        newest[key] = record
    return list(newest.values())


def finished(records: Iterable[RunRecord]) -> Iterator[RunRecord]:
    """Yield the runs that ended well: not failed, and with a finite loss at the end."""
    return (record for record in records if record["status"] == "ok" and not diverged(record))


def diverged(record: RunRecord) -> bool:
    """Say whether a run ended with a loss that is not a finite number.

    >>> diverged({"status": "ok", "final": {"validation_loss": float("nan")}})
    True
    """
    return record["status"] == "ok" and number((record.get("final") or {}).get("validation_loss")) is None


def number(value: Any) -> float | None:
    """Return a finite number, or None for anything else.

    >>> number(2), number(float("inf")), number(None)
    (2.0, None, None)
    """
    return float(value) if is_number(value) and math.isfinite(value) else None


def ordered(names: Iterable[str]) -> list[str]:
    """Return each name once, the baseline first and the others in their order.

    >>> ordered(["linear", "constant", "linear"])
    ['constant', 'linear']
    """
    return sorted(dict.fromkeys(names), key=lambda name: name != BASELINE)


@final
class RunStore:
    """A file of records that grows line by line; a context in which only this process may write.

    A line that was cut off when a process was killed is dropped when the file is opened again.

    Args:
        path: the file; made if it does not exist.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, RunStore(Path(folder) / "runs.jsonl") as store:
    ...     store.append({"id": "a", "status": "ok"})
    ...     list(store.records)
    ['a']
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self.records: dict[str, dict[str, Any]] = {}

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
        """Write one record to the end of the file and wait for the disk; if that fails, the file stays as it was.

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
                "make room and run again to continue"
            ) from None
        self.records[record["id"]] = dict(record)

    def drop_failed(self) -> None:
        """Forget failed runs, so that they are run again."""
        kept = {name: record for name, record in self.records.items() if record["status"] == "ok"}
        if len(kept) == len(self.records):
            return
        lines = [json.dumps(record, separators=(",", ":")) + "\n" for record in kept.values()]
        write_atomic(self._path, "".join(lines))
        self.__exit__()
        self.__enter__()

    def _lock(self) -> None:
        """Refuse a second writer, on systems that have such locks."""
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


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a file, and warn about lines that are not a record of a run.

    A last line without its end is skipped silently: it is being written, or was cut off.

    Args:
        path: the file; if it does not exist, there are no records.
    """
    for number, record in scan_records(path):
        if record is not None:
            yield record
        else:
            warnings.warn(f"{path}:{number} is not the record of a run and is skipped", stacklevel=2)


def scan_records(path: Path) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """Yield ``(line number, record)``; the record is None for a line that is not the record of a run."""
    if not path.is_file():
        return
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from None
    for number, line in enumerate(lines, start=1):
        record = _parse(line)
        if record is not None or (line and number < len(lines)):
            yield number, record


def _write_all(file: int, data: bytes) -> None:
    while data:
        data = data[os.write(file, data) :]
    os.fsync(file)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # the second for brackets in brackets in brackets
        return None
    return record if isinstance(record, dict) and {"id", "status"} <= record.keys() and _has_its_types(record) else None


def _has_its_types(record: Mapping[str, Any]) -> bool:
    """Say whether every field of a record that is there can be what it stands for."""
    if any(type(record[name]) is not kind for name, kind in _TYPES.items() if name in record):
        return False
    if any(not isinstance(record.get(name), kind | None) for name, kind in _TYPES_OR_NONE.items()):
        return False
    lists = (record.get("curve") or (), record.get("decisions") or ())
    return all(isinstance(point, dict) for points in lists for point in points)
