"""The lengths of a file: counted by the tokenizer that ``--tokenizer`` names, summarised, and put into bins."""

from __future__ import annotations

import difflib
import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt

import batchwright as bw

from .._optional import is_installed, require
from .._progress import ProgressBar
from .._types import MAX_INT32, IntArray
from ..errors import ArgumentError
from .options import load_function
from .reading import Row, Source, read_examples
from .screen import Bin

# The tokenizer that counts nothing, because the data hold lengths.
LENGTHS = "lengths"
_MAX_BINS = 16
# If the longest is this many medians long, equal bins would put nearly all examples in the first two.
_HEAVY_TAIL = 8
_NUMBER = re.compile(r"\s*\d+(\.0*)?\s*")


@final
@dataclass(frozen=True, kw_only=True)
class Measured:
    """The lengths of a file.

    Args:
        lengths: at least one, shape ``(N,)`` or ``(N, 2)`` for pairs.
        unit: what was counted: words, tokens, …
        num_blank: the number of blank lines, which were skipped.
        num_empty: the number of examples that were skipped because a text has no tokens.
        num_cut: the number of examples that were cut to the largest length allowed.
        max_length: the largest length allowed; None for no limit.
    """

    lengths: IntArray
    unit: str
    num_blank: int
    num_empty: int
    num_cut: int
    max_length: int | None = None

    @property
    def axes(self) -> dict[str, IntArray]:
        """Return the lengths of each text of an example, by what was counted: ``words``, ``source words``, …"""
        if self.lengths.ndim == 1:
            return {self.unit: self.lengths}
        return {f"{side} {self.unit}": self.lengths[:, axis] for axis, side in enumerate(("source", "target"))}

    def to_dict(self) -> dict[str, Any]:
        """Return counts and percentiles as plain numbers."""
        lengths = [summary(lengths) for lengths in self.axes.values()]
        return {"num_examples": len(self.lengths), **asdict(self), "lengths": lengths}


def measure_file(source: Source, *, tokenizer: str, max_length: int | None, progress: bool) -> Measured:
    """Read a file and count the tokens of each example.

    Args:
        source: the file and the fields to read.
        tokenizer: the value of ``--tokenizer``.
        max_length: longer texts count as this long; None for no limit.
        progress: whether to show progress on a terminal.
    """
    with ProgressBar(label="loading the tokenizer", total=1, enabled=progress and _takes_long(tokenizer)) as bar:
        count = None if source.holds_lengths else load_tokenizer(tokenizer)
        bar.update()
    rows, num_blank = read_examples(source, progress=progress)
    if count is None:
        lengths: npt.NDArray[Any] = np.asarray(rows, dtype=np.int64)
    else:
        _check_words(rows, tokenizer, source.name)
        lengths = _count(rows, count, tokenizer, progress=progress)
    full = (lengths.reshape(len(lengths), -1) > 0).all(axis=1)
    if not full.any():
        raise ArgumentError(f"every text of {source.name} is empty when counted in {unit_of(tokenizer)}")
    lengths = lengths[full]
    num_cut = 0
    if max_length is not None:
        num_cut = int((lengths.reshape(len(lengths), -1) > max_length).any(axis=1).sum())
        lengths = np.minimum(lengths, max_length)
    num_empty = int((~full).sum())
    return Measured(
        lengths=lengths,
        unit=unit_of(tokenizer),
        num_blank=num_blank,
        num_empty=num_empty,
        num_cut=num_cut,
        max_length=max_length,
    )


def _check_words(rows: list[Row], tokenizer: str, name: str) -> None:
    """Refuse to count words where every text is a number: those are lengths."""
    if tokenizer == "words" and all(isinstance(row, str) and _NUMBER.fullmatch(row) for row in rows):
        raise ArgumentError(
            f"every text of {name} is a number, the first is {str(rows[0]).strip()}, and would count as one word; if "
            "these are lengths, add --tokenizer lengths, and if they are texts, --tokenizer chars"
        )


def _takes_long(tokenizer: str) -> bool:
    return tokenizer not in _BUILT_IN and tokenizer != LENGTHS


def _count(rows: list[Row], count: Any, name: str, *, progress: bool) -> IntArray:
    """Count the tokens of every row; what a tokenizer raises becomes one sentence with the number of the text."""
    user_code = _Watched(count) if ":" in name and callable(count) else None
    try:
        return bw.measure_lengths(cast(list[str], rows), user_code or count, progress=progress)
    except ArgumentError:
        raise
    except (Exception, SystemExit) as error:  # the user's own code may raise anything, or end the process
        text = None if user_code is None else user_code.text
        numbers = (number for number, row in enumerate(rows, start=1) if _holds(row, text))
        place = next((f" at text {number}" for number in numbers), "")
        raise ArgumentError(
            f"--tokenizer {name} failed{place}: {_reason(error)}; mend it, or leave such texts out"
        ) from error


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _holds(row: Row, text: str | None) -> bool:
    return any(side is text for side in row) if isinstance(row, tuple) else row is text


@final
class _Watched:
    """A function from a text to its count that remembers the text it was last called with."""

    def __init__(self, function: Callable[[str], Any]) -> None:
        self._function = function
        self.text: str | None = None

    def __call__(self, text: str) -> Any:
        self.text = text
        found = self._function(text)
        if isinstance(found, int | np.integer) and found > MAX_INT32:  # found here, the text is still known
            raise ValueError(f"it counts {int(found):,}, and at most {MAX_INT32:,} can be planned")
        return found


def unit_of(name: str) -> str:
    """Return what a tokenizer counts, for messages.

    >>> unit_of("words"), unit_of("gpt2/tokenizer.json")
    ('words', 'tokens')
    """
    return {"words": "words", "chars": "characters", "bytes": "bytes"}.get(name, "tokens")


def load_tokenizer(name: str) -> Any:
    """Return the tokenizer that a name stands for; nothing is downloaded.

    Args:
        name: ``words``, ``chars``, ``bytes``, a ``tokenizer.json``, a folder that transformers'
            ``AutoTokenizer`` reads, a model of the Hub that was downloaded before, or ``module:function``.

    Returns:
        A tokenizer that ``measure_lengths`` takes.

    >>> load_tokenizer("words")("to be  or")
    ['to', 'be', 'or']
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    path = _existing(name)
    if path is not None:
        return _from_folder(path) if path.is_dir() else _from_file(path)
    module_name, _, function_name = name.partition(":")
    if not (module_name and function_name):
        return _from_downloads(name)
    try:
        return load_function(name)
    except ArgumentError as error:
        raise ArgumentError(f"--tokenizer {name}: {error}") from error.__cause__


def _existing(name: str) -> Path | None:
    """Return the file or folder of a name; None if there is none, also where no file can have such a name."""
    try:
        path = Path(name).expanduser()
        return path if name and (path.is_dir() or path.is_file()) else None
    except PermissionError as error:
        raise ArgumentError(f"--tokenizer {name}: cannot read it: {error.strerror}") from None
    except (OSError, RuntimeError):  # the name is too long, or its user has no home folder
        return None


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # JSON can hold a lone surrogate; it counts three


_BUILT_IN: dict[str, Callable[[str], Any]] = {"words": str.split, "chars": len, "bytes": _utf8}


def _from_file(path: Path) -> Any:
    tokenizers = require("tokenizers", extra="hf")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust parser raises plain Exception
        raise ArgumentError(f"{path} is not a tokenizer.json: {error}") from None
    # A saved file may still pad and cut as in its last use; both would hide the true lengths.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _from_folder(path: Path) -> Any:
    transformers = require("transformers", extra="hf")
    try:
        return transformers.AutoTokenizer.from_pretrained(str(path), local_files_only=True)
    except Exception as error:  # broken files raise nearly anything
        if (path / "tokenizer.json").is_file():
            return _from_file(path / "tokenizer.json")
        raise ArgumentError(f"{path} holds no tokenizer that transformers can load: {_reason(error)}") from None


# A model of the Hub is called name or owner/name.
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def _from_downloads(name: str) -> Any:
    """Return the tokenizer of a model that transformers has downloaded before, or say how to save one."""
    close = difflib.get_close_matches(name, [*_BUILT_IN, LENGTHS], n=1, cutoff=0.75)  # word2vec is not words
    meant = f"; did you mean {close[0]}?" if close else ""
    if not _HUB_NAME.fullmatch(name) or name.endswith(".json") or close:
        raise ArgumentError(
            f"--tokenizer {name!r}: no such file or folder{meant or '; allowed are'} {'Allowed are ' if meant else ''}"
            "words, chars, bytes, lengths, a tokenizer.json, a folder with a saved tokenizer, or module:function"
        )
    if is_installed("transformers") and _was_downloaded(name):
        try:
            return require("transformers", extra="hf").AutoTokenizer.from_pretrained(name, local_files_only=True)
        except Exception as error:  # broken files raise nearly anything
            raise ArgumentError(
                f"--tokenizer {name}: the files that were downloaded hold no tokenizer that transformers can load: "
                f"{_reason(error)}"
            ) from None
    folder = f"{name.rpartition('/')[2]}-tokenizer"
    raise ArgumentError(
        f"--tokenizer {name}: no such file or folder, and no model of that name was downloaded before. With a network, "
        f'save it once: python -c "from transformers import AutoTokenizer as T; '
        f"T.from_pretrained('{name}').save_pretrained('{folder}')\", then pass --tokenizer ./{folder}"
    )


def _was_downloaded(name: str) -> bool:
    """Look for the files of a tokenizer in the cache of the Hub; importing transformers to find none takes long."""
    hub = require("huggingface_hub", extra="hf")
    files = ("tokenizer_config.json", "tokenizer.json", "config.json")
    try:
        return any(isinstance(hub.try_to_load_from_cache(name, file), str) for file in files)
    except (OSError, ValueError):  # no model can have such a name
        return False


def percentile(lengths: IntArray, percent: float) -> int:
    """Return the smallest length that at least ``percent`` of the examples do not exceed.

    >>> percentile(np.array([1, 2, 3, 4]), 50)
    2
    """
    return int(np.percentile(lengths, percent, method="inverted_cdf"))


def summary(lengths: IntArray) -> dict[str, float]:
    """Return minimum, mean, median, p90, p99 and maximum.

    >>> summary(np.array([1, 2, 3, 10]))
    {'min': 1, 'mean': 4.0, 'median': 2, 'p90': 10, 'p99': 10, 'max': 10}
    """
    ranks = {"median": 50, "p90": 90, "p99": 99, "max": 100}
    found = {name: percentile(lengths, percent) for name, percent in ranks.items()}
    return {"min": int(lengths.min()), "mean": float(lengths.mean()), **found}


def is_heavy_tailed(lengths: IntArray) -> bool:
    """Say whether the longest is more than eight times the median.

    >>> is_heavy_tailed(np.array([1, 1, 9])), is_heavy_tailed(np.array([1, 1, 8]))
    (True, False)
    """
    return int(lengths.max()) > _HEAVY_TAIL * percentile(lengths, 50)


def make_bins(lengths: IntArray) -> list[Bin]:
    """Cut lengths into at most 16 bins with round bounds; under a heavy tail the bins widen with the length.

    >>> make_bins(np.array([1, 2, 2, 3]))
    [Bin(low=1, high=1, count=1), Bin(low=2, high=2, count=2), Bin(low=3, high=3, count=1)]
    >>> [b.label for b in make_bins(np.array([3, 3, 3, 40]))]
    ['3', '4-5', '6-7', '8-11', '12-15', '16-23', '24-31', '32-47']
    """
    low, high = int(lengths.min()), int(lengths.max())
    bounds = _growing_bounds(low, high) if is_heavy_tailed(lengths) else _equal_bounds(low, high)
    # np.histogram would count a length at the last bound; a place in sorted order leaves it out.
    counts = np.diff(np.searchsorted(np.sort(lengths), bounds)).tolist()
    return [Bin(start, stop - 1, count) for (start, stop), count in zip(pairwise(bounds), counts, strict=True)]


def _equal_bounds(low: int, high: int) -> list[int]:
    """Return bounds at multiples of the smallest of 1, 2, 5, 10, 20, 50, … that needs at most 16 bins."""
    steps = (factor * 10**power for power in range(10) for factor in (1, 2, 5))
    step = next(s for s in steps if high // s - low // s < _MAX_BINS)
    return [step * i for i in range(low // step, high // step + 2)]


def _growing_bounds(low: int, high: int) -> list[int]:
    """Return bounds at 1, 2, 3, 4, 6, 8, 12, … if 16 bins suffice, else at powers of 2, 4 or 16."""
    powers = [2**i for i in range(33)]
    for ladder in (sorted({*powers, *(3 * p for p in powers)}), powers, powers[::2], powers[::4]):
        start, stop = bisect_right(ladder, low) - 1, bisect_right(ladder, high)
        if stop - start <= _MAX_BINS:
            break
    return ladder[start : stop + 1]
