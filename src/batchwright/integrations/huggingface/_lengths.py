"""The lengths of a trainer's examples: read from the columns that hold them, measured once per data set."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, final

import numpy as np

from ..._lengths import as_lengths
from ..._progress import progress
from ..._types import IntArray
from ...errors import LengthsError
from ...step.collators import PadCollator
from ._sentences import measure_texts, reads_texts

_SOURCE, _TARGET = "input_ids", "labels"
_PROMPT, _SIDES = "prompt_ids", ("chosen_ids", "rejected_ids")
_ROWS_PER_READ = 1000
# Places of a sequence at which ranks compare what they have read.
_NUM_MARKS = 32
# Enough for the data sets of training and evaluation.
_MOST_DATASETS = 8


@final
class LengthCache:
    """Lengths of the data sets seen last; each data set is measured once."""

    def __init__(self) -> None:
        # The data set is kept with its lengths, so that no other object can get its id.
        self._found: dict[int, _Found] = {}

    def of(self, dataset: Any, args: Any, model: Any, collator: Any = None) -> IntArray:
        """Return the lengths of a data set, shape ``(N, axes)``.

        Args:
            dataset: tokenized examples, or texts that the collator makes tokens of.
            args: the ``TrainingArguments``: the column of lengths, and whether to show a bar.
            model: tells by its config whether labels are padded apart from the inputs.
            collator: may cut examples, or make tokens of texts.
        """
        found = self._found.pop(id(dataset), None)
        contents = _contents_of(dataset)
        if found is not None and len(found.lengths) == len(dataset) and found.contents == contents:
            self._found[id(dataset)] = found
            return found.lengths
        shows, tokens = not args.disable_tqdm and args.process_index == 0, None
        if has_pairs(dataset):
            lengths, tokens = measure_pairs(dataset, most=getattr(collator, "max_length", None), show_progress=shows)
        elif reads_texts(collator) and args.length_column_name not in _first(dataset):
            lengths = measure_texts(dataset, collator, show_progress=shows)
        else:
            lengths = measure_examples(
                dataset,
                length_column=args.length_column_name,
                has_decoder=has_decoder(model),
                show_progress=shows,
            )
        lengths = as_lengths(lengths)
        if len(self._found) == _MOST_DATASETS:
            self._found.pop(next(iter(self._found)))
        self._found[id(dataset)] = _Found(dataset, lengths, tokens, contents)
        return lengths

    def tokens_of(self, dataset: Any) -> IntArray | None:
        """Return the tokens of every example of a measured data set, None if they are the sum of its lengths."""
        found = self._found.get(id(dataset))
        return None if found is None else found.tokens


class _Found(NamedTuple):
    dataset: Any
    lengths: IntArray
    tokens: IntArray | None
    contents: int | None


def _contents_of(dataset: Any) -> int | None:
    """Return what changes when the examples of a list are replaced; None of data that only they themselves know."""
    return hash(tuple(map(id, dataset))) if isinstance(dataset, list) else None


@final
class StreamLengths:
    """Measures examples as they are read; an example has two lengths if labels are padded apart from the inputs.

    The first example decides whether labels have lengths of their own, unless the model has a decoder.

    Args:
        column: of measured lengths.
        has_decoder: labels are padded apart from the inputs, even if all lengths are equal.

    Attributes:
        num_axes: lengths of an example, None before the first.
        digest: of everything that was read, so that ranks can compare it.

    >>> lengths = StreamLengths("length", has_decoder=False)
    >>> lengths({"input_ids": [5, 6, 7], "labels": [1]}), lengths({"input_ids": [5], "labels": [2]})
    ((3, 1), (1, 1))
    """

    def __init__(self, column: str, *, has_decoder: bool) -> None:
        self.num_axes: int | None = None
        self.digest = 0
        self._column = column
        self._has_decoder = has_decoder

    def __call__(self, example: Any) -> tuple[int, ...]:
        """Return the lengths of an example that is read."""
        found = self.of(example)
        self.digest = zlib.crc32(np.asarray(found).tobytes() + _marks_of(example), self.digest)
        return found

    def of(self, example: Any) -> tuple[int, ...]:
        """Return the lengths of an example."""
        if not isinstance(example, Mapping):
            raise LengthsError(f"the examples of a stream must be mappings, got {type(example).__name__}")
        if self._column in example:
            return (int(example[self._column]),)
        ids: Any = example.get(_SOURCE)
        labels: Any = example.get(_TARGET)
        if not _is_sequence(ids):
            raise LengthsError(
                f"an example of the stream has {', '.join(sorted(map(str, example))) or 'no columns'}, but neither "
                f"{self._column!r} nor token ids under {_SOURCE!r}; add a column {self._column!r}, e.g. with map"
            )
        # An empty sequence is padded to at least one token.
        source = max(1, len(ids))
        target = max(1, len(labels)) if _is_sequence(labels) else None
        if self.num_axes is None:
            self.num_axes = 1 if target is None or (target == source and not self._has_decoder) else 2
        if (target is None) if self.num_axes == 2 else (target not in (None, source)):
            raise LengthsError(self._changed(source, target))
        return (source,) if self.num_axes == 1 or target is None else (source, target)

    def _changed(self, source: int, target: int | None) -> str:
        before = "lengths of their own" if self.num_axes == 2 else "the lengths of the inputs"
        return (
            f"an example has {source} input_ids and {'no' if target is None else target} labels, but in the first "
            f"example of the stream labels had {before}; add a column {self._column!r} to all of them, e.g. with map"
        )


def pad_multiple_of(collator: Any) -> int:
    """Return the multiple that a collator pads lengths to, 1 if it has none."""
    own = getattr(collator, "pad_to", None)  # of a PadCollator
    return int(getattr(collator, "pad_to_multiple_of", None) or getattr(own, "multiple_of", None) or 1)


def has_decoder(model: Any) -> bool:
    """Say whether a model pads labels apart from the inputs."""
    return bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))


def tell_label_axis(loader: Any, num_axes: int) -> PadCollator | None:
    """Let a plain ``PadCollator`` of a loader pad labels to their own length, if the plan counts them so.

    By itself it pads them as widely as the inputs, and batches would exceed the budget. What is returned is the
    ``PadCollator`` that the loader has then, None if it has another collator.
    """
    collate = loader.collate_fn
    inner = getattr(collate, "data_collator", collate)
    is_usual = isinstance(inner, PadCollator) and inner.axis_fields == (_SOURCE,) and _TARGET not in inner.same_axis
    if num_axes == 2 and is_usual:
        told = replace(inner, axis_fields=(_SOURCE, _TARGET))
        loader.collate_fn, inner = with_collator(collate, inner, told), told
    return inner if isinstance(inner, PadCollator) else None


def with_collator(collate: Any, collator: Any, other: Any) -> Callable[[list[Any]], Any]:
    """Return what a loader calls with another collator inside."""
    if collate is collator:
        return other
    twin = copy.copy(collate)  # the trainer's own, which removes columns that the model does not take
    twin.data_collator = other
    return twin


def is_flat(collator: Any) -> bool:
    """Say whether a collator joins the examples of a batch to one row without padding."""
    names = {kind.__name__ for kind in type(collator).__mro__}
    return "DataCollatorWithFlattening" in names or getattr(collator, "padding_free", False) is True


def has_pairs(dataset: Any) -> bool:
    """Say whether examples are tokenized pairs, as ``DPOTrainer`` and ``RewardTrainer`` make them."""
    first = _first(dataset)
    return all(_is_sequence(first.get(name)) for name in _SIDES)


def measure_pairs(dataset: Any, *, most: int | None = None, show_progress: bool = True) -> tuple[IntArray, IntArray]:
    """Return the lengths of pairs of rows, shape ``(N, 2)``, and the tokens of each pair, shape ``(N,)``.

    A batch holds the chosen and the rejected row of every pair, all padded to the longest of them. So both axes of a
    pair have the length of its longer row, with the prompt.

    Args:
        dataset: examples with ``chosen_ids``, ``rejected_ids`` and maybe ``prompt_ids``.
        most: tokens that the collator cuts a row to, None if it does not.
        show_progress: show a bar.

    >>> pairs = [{"prompt_ids": [1, 2], "chosen_ids": [3], "rejected_ids": [4, 5]}]
    >>> lengths, tokens = measure_pairs(pairs, show_progress=False)
    >>> lengths.tolist(), tokens.tolist()
    ([[4, 4]], [7])
    """
    names = [*_SIDES, *([_PROMPT] if _PROMPT in _first(dataset) else [])]
    found = np.array([[len(value) for value in row] for row in _rows(dataset, names, show_progress)])
    rows = found[:, :2] + found[:, 2:].sum(axis=1, keepdims=True)
    rows = np.maximum(1, rows if most is None else np.minimum(rows, most))
    return np.repeat(rows.max(axis=1, keepdims=True), 2, axis=1), rows.sum(axis=1)


def measure_examples(
    dataset: Any, *, length_column: str = "length", has_decoder: bool = False, show_progress: bool = True
) -> IntArray:
    """Return the lengths of tokenized examples, shape ``(N,)``, or ``(N, 2)`` if labels have lengths of their own.

    They come from ``length_column`` if there is one, otherwise from ``input_ids``. If ``labels`` are sequences of other
    lengths, these are the second axis.

    Args:
        dataset: examples that are mappings; from a ``datasets.Dataset`` only the needed columns are read.
        length_column: a column of measured lengths.
        has_decoder: labels are padded apart from the inputs, even if all lengths are equal.
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
            f"the examples have {', '.join(sorted(first)) or 'no columns'}, but neither {length_column!r} nor token "
            f"ids under {_SOURCE!r}; make tokens of texts first, name a column of lengths with length_column_name, or "
            "pass lengths=, one row per example"
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
        raise LengthsError(f"examples must be mappings, got {type(first).__name__}; pass lengths=, one row per example")
    return first


def _rows(dataset: Any, names: Sequence[str], show_progress: bool) -> Iterator[tuple[Any, ...]]:
    rows = _from_columns(dataset, names) if _has_columns(dataset, names) else _from_examples(dataset, names)
    return progress(rows, label="measuring lengths", total=len(dataset), enabled=show_progress)


def _has_columns(dataset: Any, names: Sequence[str]) -> bool:
    """Say whether single columns can be read; the output of a transform has no stored columns."""
    layout = getattr(dataset, "format", None)
    is_transformed = isinstance(layout, Mapping) and layout.get("type") == "custom"
    columns = getattr(dataset, "column_names", None) or ()
    return not is_transformed and hasattr(dataset, "select_columns") and all(name in columns for name in names)


def _from_columns(dataset: Any, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    for part in dataset.select_columns(list(names)).with_format(None).iter(batch_size=_ROWS_PER_READ):
        yield from zip(*(part[name] for name in names), strict=True)


def _from_examples(dataset: Any, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    for index in range(len(dataset)):
        example = dataset[index]
        yield tuple(example[name] for name in names)


def _marks_of(example: Mapping[str, Any]) -> bytes:
    """Return what tells an example of a stream from others of its lengths: texts and whole numbers, long ones in part.

    Examples may begin alike, as all do that follow one template. Floats are left out: ranks may augment these apart.
    """
    if _is_sequence(example.get(_SOURCE)):
        return _marks(example[_SOURCE])
    return b"".join(_marks(example[name]) for name in sorted(example, key=str))


def _marks(value: Any) -> bytes:
    if isinstance(value, str | bytes):
        return value.encode("utf-8", "replace") if isinstance(value, str) else value
    if _is_sequence(value) and len(value) > _NUM_MARKS:
        places = range(0, len(value), len(value) // _NUM_MARKS)
        value = [value[place] for place in (*places, len(value) - 1)]
    try:
        marks = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # uneven parts, or a tensor of another device
        return b""
    return marks.tobytes() if marks.dtype.kind in "biu" else b""


def _is_sequence(value: Any) -> bool:
    return hasattr(value, "__len__") and not isinstance(value, str | bytes) and getattr(value, "ndim", 1) > 0
