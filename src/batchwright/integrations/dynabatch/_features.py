"""How every batch was decided, as lines to print and as tables with the columns of dynabatch."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ..._optional import is_installed
from ..._types import FloatArray, IntArray
from ...errors import ArgumentError
from ._longest_first import SizeRule

# Columns with lists of numbers; a pandas.DataFrame where pandas is installed.
Features: TypeAlias = Any

# Candidate sizes per unit of max_batch_range, and the figures of each kind of length, in the order of dynabatch.
_CANDIDATES_PER_UNIT = 20
_MAX_RANGE = 1_000
_STATISTICS = {"token": ("mean", "std", "sum", "max"), "word": ("mean", "sum", "max"), "char": ("sum",)}
_QUOTIENTS = {"token": ("max", "mean", "sum"), "word": ("max", "mean", "sum"), "char": ("sum",)}


def decisions(sizes: IntArray, longest: IntArray, rule: SizeRule | None) -> Iterator[str]:
    """Yield one line per batch, longest first."""
    for number, (size, length) in enumerate(zip(sizes.tolist(), longest.tolist(), strict=True), start=1):
        line = f"batch {number}: {size} items, longest {length}"
        if rule is not None:
            share = rule.predict(size, length, int(longest[0]))
            line += f", predicted {float(share):.2f} of the first batch"
        yield line


def input_features(
    lengths: dict[str, npt.NDArray[np.int32]], starts: IntArray, end_range: float, rule: SizeRule
) -> list[Features]:
    """Return one table per batch except the first, with the figures of every candidate size as columns.

    Candidates go from ``batch_size`` to ``batch_size × end_range``. ``_y`` is the candidate, ``_x`` the first batch and
    ``_diff`` their quotient. With pandas a table is a ``DataFrame`` with exactly the columns of dynabatch, and the
    memory predicted relative to the first batch is in ``frame.attrs["prediction"]``. Without, it is a dict of lists,
    with ``prediction`` as the last of them.

    Args:
        lengths: by kind, longest example first; several token axes are summed.
        starts: where each batch starts.
        end_range: the largest candidate, relative to the first batch.
        rule: predicts the memory.
    """
    if end_range > _MAX_RANGE:
        raise ArgumentError(
            f"save_input_features keeps {_CANDIDATES_PER_UNIT} candidates per unit of max_batch_range, got "
            f"{end_range:g}; choose at most {_MAX_RANGE}, or leave save_input_features out"
        )
    steps = max(1, int((end_range - 1.0) * _CANDIDATES_PER_UNIT))
    sizes = np.unique(np.round(rule.batch_size * np.linspace(1.0, end_range, steps)).astype(np.int64))
    first = {kind: _statistics(values, np.full(len(sizes), rule.batch_size)) for kind, values in lengths.items()}
    reference = int(first["token"]["max"][0])
    tables = []
    for start in starts[1:].tolist():
        mine = {kind: _statistics(values[start:], sizes) for kind, values in lengths.items()}
        prediction = rule.predict(sizes, mine["token"]["max"].astype(np.int64), reference)
        tables.append(_table(_columns(sizes, mine, first, rule.batch_size), prediction))
    return tables


def _columns(
    sizes: IntArray, mine: dict[str, dict[str, FloatArray]], first: dict[str, dict[str, FloatArray]], batch_size: int
) -> dict[str, list[float]]:
    """Return the columns by name: of the candidates, of the first batch, and their quotients."""
    columns: dict[str, npt.NDArray[Any]] = {"batch_size_y": sizes}
    columns |= {f"{kind}_{name}_y": mine[kind][name] for kind in mine for name in _STATISTICS[kind]}
    columns["batch_size_x"] = np.full(len(sizes), batch_size)
    # dynabatch knows the deviation of the candidates only.
    columns |= {f"{kind}_{name}_x": first[kind][name] for kind in mine for name in _STATISTICS[kind] if name != "std"}
    columns["batch_size_diff"] = sizes / batch_size
    for kind in mine:
        for name in _QUOTIENTS[kind]:
            columns[f"{kind}_{name}_diff"] = mine[kind][name] / np.maximum(first[kind][name], 1e-12)
    return {name: values.tolist() for name, values in columns.items()}


def _table(columns: dict[str, list[float]], prediction: FloatArray) -> Features:
    if not is_installed("pandas"):
        return {**columns, "prediction": prediction.tolist()}
    frame = importlib.import_module("pandas").DataFrame(columns)
    frame.attrs["prediction"] = prediction.tolist()
    return frame


def _statistics(values: npt.NDArray[np.int32], counts: IntArray) -> dict[str, FloatArray]:
    """Return the figures of the first ``count`` values, for each count."""
    run = values[: int(counts.max())].astype(np.float64)
    num = np.minimum(counts, len(run))
    total = np.cumsum(run)[num - 1]
    # Var = E[x²] - E[x]², which rounding may push below zero.
    variance = np.maximum(np.cumsum(run**2)[num - 1] / num - (total / num) ** 2, 0.0)
    return {"sum": total, "mean": total / num, "std": np.sqrt(variance), "max": np.maximum.accumulate(run)[num - 1]}
