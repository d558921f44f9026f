"""From a file to lengths, with everything left out counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt

from .._types import IntArray
from ..errors import ArgumentError
from ..plan.lengths.measuring import measure_lengths
from .histogram import percentile
from .reading import Source, read_examples
from .tokenizer import load_tokenizer, unit_of


@final
@dataclass(frozen=True, kw_only=True)
class Measured:
    """The lengths of a file.

    Args:
        lengths: one or more, shape ``(N,)`` or ``(N, 2)`` for pairs.
        unit: what was counted: words, tokens, …
        num_blank: blank lines skipped.
        num_empty: examples skipped because a text has no tokens.
        num_cut: examples cut to the greatest length allowed.
    """

    lengths: IntArray
    unit: str
    num_blank: int
    num_empty: int
    num_cut: int

    @property
    def axes(self) -> dict[str, IntArray]:
        """The lengths of each text of an example, by name."""
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
        tokenizer: what ``--tokenizer`` named.
        max_length: longer texts count as this long; None for no limit.
        progress: whether to show progress on a terminal.
    """
    count = None if source.holds_lengths else load_tokenizer(tokenizer)
    examples = read_examples(source)
    if count is None:
        lengths: npt.NDArray[Any] = np.asarray(examples.rows, dtype=np.int64)
    else:
        lengths = measure_lengths(cast(list[str], examples.rows), count, progress=progress)
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
    """Return mean, median, p90, p99, least and greatest.

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
