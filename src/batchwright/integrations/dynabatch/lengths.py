"""``compute_lengths``: tokens, words and characters of every text, and the texts cut to what the tokens cover."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt

from ..._checks import as_whole
from ..._machine import num_cores
from ...errors import LengthsError
from ...plan import measure_lengths

# Measuring fewer texts takes less time than starting worker processes.
MIN_TEXTS_FOR_WORKERS = 5_000
_TEXTS_PER_CALL = 1_000


def compute_lengths(
    texts: Iterable[str],
    tokenizer: Any,
    max_length: int,
    max_workers: int = 4,
    *,
    progress: bool = True,
    cache: str | os.PathLike[str] | None = None,
) -> tuple[list[int], list[int], list[int], list[str]]:
    """Measure texts as a tokenizer that truncates to ``max_length`` sees them.

    A fast tokenizer uses all cores by itself; only others get worker processes. Only a text of more than ``max_length``
    tokens is cut, to the part that gives as many tokens again, or as close to it as a part can. All others count whole,
    including spaces at their end. A text without any token counts as 1, because it takes a row of the batch too.

    Args:
        texts: one string per example, as a list or a column, not as a table.
        tokenizer: a tokenizer of transformers, or any callable from a list of texts, ``truncation``, ``max_length`` and
            ``padding`` to ``{"input_ids": ...}``. With ``is_fast`` it is asked for offsets, if it gives any. Otherwise
            it is called with ``return_attention_mask=False``, and decodes to find where to cut, if it can.
        max_length: texts are cut to this many tokens, special tokens included.
        max_workers: the largest number of processes for a slow tokenizer.
        progress: show a progress bar on stderr.
        cache: a directory that keeps token lengths for the next run, or None.

    Returns:
        ``(token_lengths, word_lengths, char_lengths, truncated_texts)``, lists in the order of the texts.

    >>> class Words:
    ...     def __call__(self, texts, truncation, max_length, padding, return_attention_mask):
    ...         return {"input_ids": [text.split()[:max_length] for text in texts]}
    ...     def batch_decode(self, ids, **options):
    ...         return [" ".join(row) for row in ids]
    >>> compute_lengths(["a b c d", "e", ""], Words(), 2, progress=False)
    ([2, 1, 1], [2, 1, 0], [4, 1, 0], ['a b ', 'e', ''])
    """
    texts = as_texts(texts)
    tokens = measure_tokens(texts, tokenizer, max_length, max_workers, progress=progress, cache=cache)
    cut = truncated(texts, tokens, tokenizer, max_length)
    return tokens.tolist(), [len(text.split()) for text in cut], [len(text) for text in cut], cut


def as_texts(texts: Any) -> list[str]:
    """Return texts as a list, or refuse what holds anything else.

    >>> as_texts(("a", "b"))
    ['a', 'b']
    """
    rows = as_rows(texts)
    place = next((place for place, text in enumerate(rows) if not isinstance(text, str)), None)
    if place is not None:
        raise LengthsError(
            f"texts must be str, got {type(rows[place]).__name__} at example {place}; pass the texts alone, e.g. "
            "[row['text'] for row in data], and for pairs measure_lengths(pairs, tokenizer) as token_lengths"
        )
    return rows


def as_rows(texts: Any) -> list[Any]:
    """Return examples as a list; iterating over a table or a text would give the names of columns or letters.

    >>> as_rows("one text")
    Traceback (most recent call last):
        ...
    batchwright.errors.LengthsError: texts must be a list or a column of texts, got str; wrap one text in a list
    """
    names = [getattr(texts, name, None) for name in ("columns", "column_names")]
    is_table = any(isinstance(found, Iterable) for found in names)
    if isinstance(texts, Mapping) or is_table:
        raise LengthsError(
            f"texts must be a list or a column of texts, got {type(texts).__name__}; pass one column, e.g. data['text']"
        )
    if isinstance(texts, str | bytes):
        raise LengthsError(
            f"texts must be a list or a column of texts, got {type(texts).__name__}; wrap one text in a list"
        )
    if not hasattr(texts, "__iter__") and not hasattr(texts, "__getitem__"):
        raise LengthsError(f"texts must be a list or a column of texts, got {type(texts).__name__}")
    return texts.to_pylist() if hasattr(texts, "to_pylist") else list(texts)  # an array of pyarrow yields no str


def measure_tokens(
    texts: Sequence[str],
    tokenizer: Any,
    max_length: int,
    max_workers: int,
    *,
    progress: bool,
    cache: str | os.PathLike[str] | None,
) -> npt.NDArray[np.int32]:
    """Return only the token lengths, at least 1, which is all that planning needs."""
    max_length = as_whole("max_input_token_length", max_length, least=1)
    workers = _num_processes(tokenizer, len(texts), max_workers)
    return np.maximum(_count(texts, tokenizer, max_length, num_workers=workers, progress=progress, cache=cache), 1)


def truncated(
    texts: Sequence[str], tokens: npt.NDArray[np.int32], tokenizer: Any, max_length: int, *, exact: bool = False
) -> list[str]:
    """Return the texts, those of more than ``max_length`` tokens cut to a part that has no more.

    Args:
        texts: all of them.
        tokens: how many tokens they have, cut by the tokenizer.
        tokenizer: as for ``compute_lengths``.
        max_length: the most tokens of a text.
        exact: cut only where the part has the very ids of the text cut by the tokenizer; leave other texts whole.
    """
    cut = list(texts)
    cutter = _Cutter(tokenizer, max_length, exact, _gives_offsets(tokenizer))
    # A tokenizer that gives more does not cut, and its batches will be as long as planned.
    full = np.flatnonzero(tokens == max_length).tolist()
    for start in range(0, len(full), _TEXTS_PER_CALL):
        places = full[start : start + _TEXTS_PER_CALL]
        counts = _count([texts[place] for place in places], tokenizer, max_length + 1)
        over = [place for place, count in zip(places, counts.tolist(), strict=True) if count > max_length]
        for place, part in zip(over, cutter.cut([texts[place] for place in over]), strict=True):
            cut[place] = part
    return cut


@final
@dataclass(frozen=True)
class _Cutter:
    """Finds the part of a text that a tokenizer keeps: by its offsets or by decoding, and otherwise by trying."""

    tokenizer: Any
    max_length: int
    exact: bool
    has_offsets: bool

    def cut(self, texts: list[str]) -> list[str]:
        """Return the part of each text, which is over the limit."""
        if not texts or (self.exact and not _is_called_on_lists(self.tokenizer)):
            return texts
        parts = [self._part(text, num) for text, num in zip(texts, self._guesses(texts), strict=True)]
        missed = [place for place, is_good in enumerate(self._are_good(texts, parts)) if not is_good]
        if missed:
            whole = [texts[place] for place in missed]
            tried = self._longest(whole)
            if self.exact:
                are_good = self._are_good(whole, tried)
                tried = [part if good else text for part, good, text in zip(tried, are_good, whole, strict=True)]
            for place, part in zip(missed, tried, strict=True):
                parts[place] = part
        return parts

    @property
    def _keeps_end(self) -> bool:
        return getattr(self.tokenizer, "truncation_side", "right") == "left"

    def _part(self, text: str, num: int) -> str:
        return text[len(text) - num :] if self._keeps_end else text[:num]

    def _guesses(self, texts: list[str]) -> Iterator[int]:
        """Yield how many characters of each text are kept; 0 if it is not known."""
        if self.has_offsets:
            encoded = _encode(texts, self.tokenizer, self.max_length, return_offsets_mapping=True)
            for text, offsets in zip(texts, encoded["offset_mapping"], strict=True):
                spans = [(start, end) for start, end in offsets if end > start]  # special tokens cover nothing
                start, end = min(spans, default=(0, 0))[0], max((end for _, end in spans), default=0)
                yield len(text) - start if self._keeps_end else end
        elif self._keeps_end or not _can_decode(self.tokenizer):
            yield from [0] * len(texts)
        else:
            encoded = _encode(texts, self.tokenizer, self.max_length, return_attention_mask=False)
            for text, visible in zip(texts, _decode(self.tokenizer, encoded["input_ids"]), strict=True):
                # Decoding may add or lose spaces at either end; the rest is as long as the part it came from.
                end = min(len(visible.strip()) + len(text) - len(text.lstrip()), len(text))
                yield end + len(text[end:]) - len(text[end:].lstrip())

    def _are_good(self, texts: list[str], parts: list[str]) -> list[bool]:
        """Say of each part whether it has as many tokens as planned, and the same if that is asked for."""
        counts = _count(parts, self.tokenizer, self.max_length + 1).tolist()
        are_good = [count == self.max_length for count in counts]
        if not self.exact:
            return are_good
        # In one call: a tokenizer may number its tokens anew in the next.
        ids = _encode([*parts, *texts], self.tokenizer, self.max_length, **self._option)["input_ids"]
        rows = [np.asarray(row).tolist() for row in ids]
        same = [mine == theirs for mine, theirs in zip(rows[: len(parts)], rows[len(parts) :], strict=True)]
        return [good and equal for good, equal in zip(are_good, same, strict=True)]

    @property
    def _option(self) -> dict[str, bool]:
        return {"return_offsets_mapping": True} if self.has_offsets else {"return_attention_mask": False}

    def _longest(self, texts: list[str]) -> list[str]:
        """Return the longest part of each text that is within the limit, found by bisection for all at once."""
        # Invariant: low is within the limit (nothing always counts as within it), high is over it.
        low, high = [0] * len(texts), [len(text) for text in texts]
        while places := [place for place in range(len(texts)) if high[place] - low[place] > 1]:
            # A long text is not read to its middle: a token rarely has more than four characters.
            tries = {p: min((low[p] + high[p]) // 2, 2 * low[p] + 4 * self.max_length) for p in places}
            parts = [self._part(texts[place], num) for place, num in tries.items()]
            counts = _count(parts, self.tokenizer, self.max_length + 1).tolist()
            for (place, num), count in zip(tries.items(), counts, strict=True):
                if count <= self.max_length:
                    low[place] = num
                else:
                    high[place] = num
        return [self._part(text, num) for text, num in zip(texts, low, strict=True)]


@final
@dataclass(frozen=True)
class _ListCounter:
    """Counts the tokens of one text with a tokenizer that takes lists, called exactly as dynabatch calls it."""

    tokenizer: Any
    max_length: int
    has_offsets: bool

    def __call__(self, text: str) -> int:
        """Return the number of ids."""
        option = {"return_offsets_mapping": True} if self.has_offsets else {"return_attention_mask": False}
        (ids,) = _encode([text], self.tokenizer, self.max_length, **option)["input_ids"]
        return len(ids)


def _count(
    texts: Sequence[str],
    tokenizer: Any,
    max_length: int,
    *,
    num_workers: int = 0,
    progress: bool = False,
    cache: str | os.PathLike[str] | None = None,
) -> npt.NDArray[np.int32]:
    """Return how many tokens a tokenizer that cuts to ``max_length`` gives for each text."""
    count: Any = tokenizer
    if _takes_lists(tokenizer):
        count = _ListCounter(tokenizer, max_length, _gives_offsets(tokenizer))
    # A counter has cut its texts already, and a tokenizer that does not cut has longer ones, as its batches will.
    limit = None if count is not tokenizer else max_length
    return measure_lengths(texts, count, max_length=limit, num_workers=num_workers, progress=progress, cache=cache)


def _num_processes(tokenizer: Any, num_texts: int, max_workers: int) -> int:
    if getattr(tokenizer, "is_fast", False) or num_texts < MIN_TEXTS_FOR_WORKERS:
        return 0
    workers = min(num_cores(), as_whole("max_workers", max_workers, least=0))
    return workers if workers and _pickles(tokenizer) else 0


def _pickles(tokenizer: Any) -> bool:
    try:
        pickle.dumps(tokenizer)
    except Exception:  # a failing pickle raises nearly anything
        return False
    return True


def _is_ready_made(tokenizer: Any) -> bool:
    return any(kind.__module__.partition(".")[0] == "transformers" for kind in type(tokenizer).__mro__)


def _takes_lists(tokenizer: Any) -> bool:
    """Say whether a tokenizer is none of transformers, and yet one that takes lists of texts, not a function of one."""
    is_like_one = _can_decode(tokenizer) or getattr(tokenizer, "is_fast", False)
    return callable(tokenizer) and not isinstance(tokenizer, type) and is_like_one and not _is_ready_made(tokenizer)


def _is_called_on_lists(tokenizer: Any) -> bool:
    return _is_ready_made(tokenizer) or _takes_lists(tokenizer)


def _gives_offsets(tokenizer: Any) -> bool:
    if not getattr(tokenizer, "is_fast", False):
        return False
    try:
        return "offset_mapping" in tokenizer(["a"], return_offsets_mapping=True)
    except (NotImplementedError, TypeError, ValueError):
        return False


def _can_decode(tokenizer: Any) -> bool:
    return hasattr(tokenizer, "batch_decode") or (
        hasattr(tokenizer, "convert_ids_to_tokens") and hasattr(tokenizer, "convert_tokens_to_string")
    )


def _decode(tokenizer: Any, rows: Sequence[Any]) -> list[str]:
    """Return the texts of ids, without special tokens."""
    if hasattr(tokenizer, "batch_decode"):
        texts: list[str] = tokenizer.batch_decode(rows, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return texts
    special = set(getattr(tokenizer, "all_special_ids", ()))
    kept = [[number for number in row if number not in special] for row in rows]
    tokens = [tokenizer.convert_ids_to_tokens(row, skip_special_tokens=False) for row in kept]
    return [tokenizer.convert_tokens_to_string(row) for row in tokens]


def _encode(texts: list[str], tokenizer: Any, max_length: int, **options: Any) -> Any:
    """Return what the tokenizer does, or name the first text for which it gives no ids."""
    # No more than dynabatch passes: a tokenizer made for it may not take anything else.
    encoded = tokenizer(texts, truncation=True, max_length=max_length, padding=False, **options)
    try:
        rows = list(encoded["input_ids"])
    except (KeyError, TypeError):
        rows = []
    wanted = "the tokenizer must return {'input_ids': one list of ids per text}"
    if len(rows) != len(texts):
        kind = type(encoded).__name__
        raise LengthsError(f"{wanted}, got {kind} with {len(rows)} for {len(texts)}, the first is {texts[0][:40]!r}")
    for row, text in zip(rows, texts, strict=True):
        if not hasattr(row, "__len__"):
            raise LengthsError(f"{wanted}, got {type(row).__name__} for the text {text[:40]!r}")
    return encoded
