"""Numbered lines of a text file, plain or gzip, with every way it can fail told in one sentence."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

from ..errors import ArgumentError


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
        raise ArgumentError(f"{path} is not a readable gzip file: {error}") from None
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
        raise ArgumentError(
            f"{path}:{number}: not UTF-8 (byte {error.start + 1} of the line); convert the file first"
        ) from None
    return line.removesuffix("\n").removesuffix("\r")
