"""How a sampler decided its sizes, and from which figures: for ``debug`` and ``save_input_features``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from ..._types import FloatArray, IntArray
from ._longest_first import SizeRule

Features = dict[str, list[Any]]

# Candidate sizes per unit of max_batch_range.
CANDIDATES_PER_UNIT = 20
_STATISTICS = {"token": ("mean", "std", "sum", "max"), "word": ("mean", "sum", "max"), "char": ("sum",)}


def candidate_sizes(batch_size: int, end_range: float) -> IntArray:
    """Return the sizes to describe, from ``batch_size`` to ``batch_size × end_range``.

    >>> candidate_sizes(4, 2.0).tolist()
    [4, 5, 6, 7, 8]
    """
    steps = max(1, int((end_range - 1.0) * CANDIDATES_PER_UNIT))
    return np.unique(np.round(batch_size * np.linspace(1.0, end_range, steps)).astype(np.int64))


def input_features(
    lengths: dict[str, npt.NDArray[np.int32]], starts: IntArray, candidates: IntArray, rule: SizeRule
) -> list[Features]:
    """Return one table per batch except the first, with the figures of every candidate size as columns.

    ``_y`` is the candidate, ``_x`` the first batch and ``_diff`` their quotient; ``prediction`` is the memory relative
    to the first batch. ``pandas.DataFrame(table)`` makes a frame of a table.

    Args:
        lengths: by kind, longest example first; several token axes are summed.
        starts: where each batch starts.
        candidates: the sizes to describe.
        rule: predicts the memory.
    """
    sums = {kind: _Sums(values) for kind, values in lengths.items()}
    first = {kind: table.between(0, np.array([rule.batch_size])) for kind, table in sums.items()}
    reference = int(first["token"]["max"][0])
    tables = []
    for start in starts[1:].tolist():
        columns: dict[str, Any] = {
            "batch_size_y": candidates,
            "batch_size_x": np.full(len(candidates), rule.batch_size),
        }
        columns["batch_size_diff"] = candidates / rule.batch_size
        for kind, table in sums.items():
            columns |= _compared(kind, table.between(start, candidates), first[kind])
        columns["prediction"] = rule.predict(candidates, columns["token_max_y"], reference)
        tables.append({name: values.tolist() for name, values in columns.items()})
    return tables


def decisions(sizes: IntArray, longest: IntArray, rule: SizeRule | None) -> Iterator[str]:
    """Yield one line per batch, longest first."""
    for number, (size, length) in enumerate(zip(sizes.tolist(), longest.tolist(), strict=True), start=1):
        line = f"batch {number}: {size} items, longest {length}"
        if rule is not None:
            share = rule.predict(size, length, int(longest[0]))
            line += f", predicted {float(share):.2f} of the first batch"
        yield line


def _compared(kind: str, mine: dict[str, FloatArray], first: dict[str, FloatArray]) -> dict[str, FloatArray]:
    columns = {}
    for name in _STATISTICS[kind]:
        columns[f"{kind}_{name}_y"] = mine[name]
        columns[f"{kind}_{name}_x"] = np.full(len(mine[name]), first[name][0])
        if name != "std":
            columns[f"{kind}_{name}_diff"] = mine[name] / np.maximum(columns[f"{kind}_{name}_x"], 1e-12)
    return columns


class _Sums:
    """Running sums, which give the figures of any run of examples without another pass."""

    def __init__(self, values: npt.NDArray[np.int32]) -> None:
        self._values = values
        exact = values.astype(np.float64)
        self._sums = np.concatenate([[0.0], np.cumsum(exact)])
        self._squares = np.concatenate([[0.0], np.cumsum(exact**2)])

    def between(self, start: int, counts: IntArray) -> dict[str, FloatArray]:
        """Return the figures of the next ``count`` examples from a place, for each count."""
        stops = np.minimum(start + counts, len(self._values))
        num = stops - start
        total = self._sums[stops] - self._sums[start]
        squares = self._squares[stops] - self._squares[start]
        tops = np.maximum.accumulate(self._values[start : int(stops.max())])
        # Var = E[x²] - E[x]², which rounding may push below zero.
        spread = np.sqrt(np.maximum(squares / num - (total / num) ** 2, 0.0))
        return {"sum": total, "mean": total / num, "std": spread, "max": tops[num - 1].astype(np.float64)}
