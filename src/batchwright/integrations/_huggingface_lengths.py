"""How long the examples of a data set are, read from the columns that tell and from no others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .._progress import progress
from .._types import IntArray
from ..errors import LengthsError

_SOURCE, _TARGET = "input_ids", "labels"
_CHUNK = 1000


def measure_examples(
    dataset: Any, *, length_column: str = "length", has_decoder: bool = False, show_progress: bool = True
) -> IntArray:
    """Return the lengths of tokenized examples, shape ``(N,)``, or ``(N, 2)`` where labels have lengths of their own.

    Taken from ``length_column`` where there is one, else from ``input_ids``, with ``labels`` as the second axis where
    they are sequences of another length.

    Args:
        dataset: examples are mappings; of a ``datasets.Dataset`` only the needed columns are read.
        length_column: a column of measured lengths.
        has_decoder: labels are padded apart from the inputs, whatever their lengths.
        show_progress: show a bar.

    >>> measure_examples([{"input_ids": [5, 6]}, {"input_ids": [7]}], show_progress=False).tolist()
    [2, 1]
    >>> measure_examples([{"input_ids": [5, 6], "labels": [7]}], show_progress=False).tolist()
    [[2, 1]]
    """
    first = _first(dataset)
    if length_column in first:
        return np.array([int(row[0]) for row in _rows(dataset, [length_column], show_progress)])
    if not _is_sequence(first.get(_SOURCE)):
        raise LengthsError(
            f"the examples have {', '.join(sorted(first)) or 'no columns'}, neither {length_column!r} nor token ids as "
            f"{_SOURCE!r}; pass lengths=, one an example"
        )
    names = [_SOURCE, _TARGET] if _is_sequence(first.get(_TARGET)) else [_SOURCE]
    # An empty sequence is padded to at least one token.
    found = [[max(1, len(value)) for value in row] for row in _rows(dataset, names, show_progress)]
    lengths = np.array(found)
    is_pair = len(names) == 2 and (has_decoder or bool((lengths[:, 0] != lengths[:, 1]).any()))
    return lengths if is_pair else lengths[:, 0]


def _first(dataset: Any) -> Mapping[str, Any]:
    if len(dataset) == 0:
        raise LengthsError("the data set is empty; there is nothing to batch")
    first = dataset[0]
    if not isinstance(first, Mapping):
        raise LengthsError(f"examples must be mappings, got {type(first).__name__}; pass lengths=, one an example")
    return first


def _rows(dataset: Any, names: Sequence[str], show_progress: bool) -> Iterator[tuple[Any, ...]]:
    rows = _from_columns(dataset, names) if _has_columns(dataset, names) else _from_examples(dataset, names)
    return progress(rows, label="measuring lengths", total=len(dataset), enabled=show_progress)


def _has_columns(dataset: Any, names: Sequence[str]) -> bool:
    """Say whether columns can be read alone; what a transform makes of them cannot."""
    layout = getattr(dataset, "format", None)
    is_made = isinstance(layout, Mapping) and layout.get("type") == "custom"
    columns = getattr(dataset, "column_names", None) or ()
    return not is_made and hasattr(dataset, "select_columns") and all(name in columns for name in names)


def _from_columns(dataset: Any, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    for part in dataset.select_columns(list(names)).with_format(None).iter(batch_size=_CHUNK):
        yield from zip(*(part[name] for name in names), strict=True)


def _from_examples(dataset: Any, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    for index in range(len(dataset)):
        example = dataset[index]
        yield tuple(example[name] for name in names)


def _is_sequence(value: Any) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, str | bytes) and getattr(value, "ndim", 1) > 0
