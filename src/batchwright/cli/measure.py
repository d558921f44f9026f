"""From a file to lengths: the tokenizers that ``--tokenizer`` can name, and a count of everything left out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt

import batchwright as bw

from .._optional import require
from .._types import IntArray
from ..errors import ArgumentError
from .histogram import percentile
from .options import load_function
from .reading import Source, read_examples

# The tokenizer that counts nothing, because the data hold lengths.
LENGTHS = "lengths"


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
    """

    lengths: IntArray
    unit: str
    num_blank: int
    num_empty: int
    num_cut: int

    @property
    def axes(self) -> dict[str, IntArray]:
        """Return the lengths of each text of an example, by name."""
        if self.lengths.ndim == 1:
            return {"": self.lengths}
        return {"source": self.lengths[:, 0], "target": self.lengths[:, 1]}

    def to_dict(self) -> dict[str, Any]:
        """Return counts and percentiles as plain numbers."""
        return {
            "num_examples": len(self.lengths),
            "unit": self.unit,
            "num_blank": self.num_blank,
            "num_empty": self.num_empty,
            "num_cut": self.num_cut,
            "lengths": [summary(lengths) for lengths in self.axes.values()],
        }


def measure_file(source: Source, *, tokenizer: str, max_length: int | None, progress: bool) -> Measured:
    """Read a file and count the tokens of each example.

    Args:
        source: the file and the fields to read.
        tokenizer: the value of ``--tokenizer``.
        max_length: longer texts count as this long; None for no limit.
        progress: whether to show progress on a terminal.
    """
    count = None if source.holds_lengths else load_tokenizer(tokenizer)
    examples = read_examples(source)
    if count is None:
        lengths: npt.NDArray[Any] = np.asarray(examples.rows, dtype=np.int64)
    else:
        lengths = bw.measure_lengths(cast(list[str], examples.rows), count, progress=progress)
    full = (lengths.reshape(len(lengths), -1) > 0).all(axis=1)
    if not full.any():
        raise ArgumentError(f"every text of {source.path} is empty when counted in {unit_of(tokenizer)}")
    lengths = lengths[full]
    num_cut = 0
    if max_length is not None:
        num_cut = int((lengths.reshape(len(lengths), -1) > max_length).any(axis=1).sum())
        lengths = np.minimum(lengths, max_length)
    return Measured(
        lengths=lengths,
        unit=unit_of(tokenizer),
        num_blank=examples.num_blank,
        num_empty=int((~full).sum()),
        num_cut=num_cut,
    )


def summary(lengths: IntArray) -> dict[str, float]:
    """Return minimum, mean, median, p90, p99 and maximum.

    >>> summary(np.array([1, 2, 3, 10]))
    {'min': 1, 'mean': 4.0, 'median': 2, 'p90': 10, 'p99': 10, 'max': 10}
    """
    return {
        "min": int(lengths.min()),
        "mean": float(lengths.mean()),
        "median": percentile(lengths, 50),
        "p90": percentile(lengths, 90),
        "p99": percentile(lengths, 99),
        "max": int(lengths.max()),
    }


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
            ``AutoTokenizer`` reads, or ``module:function``.

    Returns:
        A tokenizer that ``measure_lengths`` takes.

    >>> load_tokenizer("words")("to be  or")
    ['to', 'be', 'or']
    """
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    path = Path(name).expanduser()
    if path.is_dir():
        return _from_folder(path)
    if path.is_file():
        return _from_file(path)
    module_name, _, function_name = name.partition(":")
    if not (module_name and function_name):
        raise ArgumentError(
            f"--tokenizer {name}: no such file or folder; allowed are words, chars, bytes, lengths, "
            "a tokenizer.json, a folder with a saved tokenizer, or module:function"
        )
    try:
        return load_function(name)
    except ArgumentError as error:
        raise ArgumentError(f"--tokenizer {name}: {error}") from error.__cause__


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
    except (OSError, ValueError, KeyError) as error:
        if (path / "tokenizer.json").is_file():
            return _from_file(path / "tokenizer.json")
        reason = str(error).strip().partition("\n")[0]
        raise ArgumentError(f"{path} holds no tokenizer that transformers can load: {reason}") from None
