"""``compute_lengths``: tokens, words and characters of every text, and the texts cut to what the tokens cover."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import numpy.typing as npt

from ..._checks import as_whole
from ..._machine import num_cores
from ...errors import ArgumentError
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

    A fast tokenizer uses all cores by itself; only others get worker processes. A text that is not cut counts whole,
    including spaces at its end. A text without any token counts as 1, because it takes a row of the batch too.

    Args:
        texts: one string per example.
        tokenizer: a tokenizer of transformers, or any callable from a list of texts, ``truncation``, ``max_length`` and
            ``padding`` to ``{"input_ids": ...}``. With ``is_fast`` it is asked for offsets, if it gives any. Otherwise
            it needs ``batch_decode``, to cut texts that are too long, and is called with
            ``return_attention_mask=False``.
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
    texts = list(texts)
    tokens = measure_tokens(texts, tokenizer, max_length, max_workers, progress=progress, cache=cache)
    cut = truncated(texts, tokens, tokenizer, max_length)
    return tokens.tolist(), [len(text.split()) for text in cut], [len(text) for text in cut], cut


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
    count: Any = tokenizer
    if _takes_lists(tokenizer):
        count = _ListCounter(tokenizer, max_length, _gives_offsets(tokenizer))
    # A counter has cut its texts already, and a tokenizer that does not cut has longer ones, as its batches will.
    limit = None if count is not tokenizer else max_length
    lengths = measure_lengths(texts, count, max_length=limit, num_workers=workers, progress=progress, cache=cache)
    return np.maximum(lengths, 1)


def truncated(texts: Sequence[str], tokens: npt.NDArray[np.int32], tokenizer: Any, max_length: int) -> list[str]:
    """Return the texts cut to what their tokens cover; only those at the limit are tokenized again."""
    cut = list(texts)
    full = np.flatnonzero(tokens >= max_length).tolist()
    ends = _ends_by_offsets if _gives_offsets(tokenizer) else _ends_by_decoding
    for start in range(0, len(full), _TEXTS_PER_CALL):
        places = full[start : start + _TEXTS_PER_CALL]
        for place, end in zip(places, ends([cut[place] for place in places], tokenizer, max_length), strict=True):
            cut[place] = cut[place][:end]
    return cut


def as_array(values: Any) -> npt.NDArray[Any]:
    """Return lengths as an array, read at once: reading a column of a data set one by one is slow.

    >>> as_array((3, 5)).tolist()
    [3, 5]
    """
    if not isinstance(values, np.ndarray | list | tuple) and not hasattr(values, "__array__"):
        values = values[:] if hasattr(values, "__getitem__") else list(values)
    return np.asarray(values)


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


def _takes_lists(tokenizer: Any) -> bool:
    """Say whether a tokenizer is none of transformers, and yet one that takes lists of texts, not a function of one."""
    is_ready_made = any(kind.__module__.partition(".")[0] == "transformers" for kind in type(tokenizer).__mro__)
    is_like_one = hasattr(tokenizer, "batch_decode") or getattr(tokenizer, "is_fast", False)
    return callable(tokenizer) and not isinstance(tokenizer, type) and is_like_one and not is_ready_made


def _gives_offsets(tokenizer: Any) -> bool:
    if not getattr(tokenizer, "is_fast", False):
        return False
    try:
        return "offset_mapping" in tokenizer(["a"], return_offsets_mapping=True)
    except (NotImplementedError, TypeError, ValueError):
        return False


def _ends_by_offsets(texts: list[str], tokenizer: Any, max_length: int) -> Iterator[int]:
    encoded = _encode(texts, tokenizer, max_length, return_offsets_mapping=True)
    for offsets in encoded["offset_mapping"]:
        yield max((end for _, end in offsets), default=0)


def _ends_by_decoding(texts: list[str], tokenizer: Any, max_length: int) -> Iterator[int]:
    if not hasattr(tokenizer, "batch_decode"):
        raise ArgumentError(
            f"texts of {max_length} tokens or more must be cut, which needs a tokenizer with offsets or with "
            f"batch_decode, and {type(tokenizer).__name__} has neither; cut the texts yourself, or raise the limit"
        )
    encoded = _encode(texts, tokenizer, max_length, return_attention_mask=False)
    decoded = tokenizer.batch_decode(encoded["input_ids"], skip_special_tokens=True, clean_up_tokenization_spaces=False)
    for text, visible in zip(texts, decoded, strict=True):
        # Decoding may add or lose spaces at either end; the rest is as long as the part of the text it came from.
        end = min(len(visible.strip()) + len(text) - len(text.lstrip()), len(text))
        yield end + len(text[end:]) - len(text[end:].lstrip())


def _encode(texts: list[str], tokenizer: Any, max_length: int, **options: Any) -> Any:
    # No more than dynabatch passes: a tokenizer made for it may not take anything else.
    return tokenizer(texts, truncation=True, max_length=max_length, padding=False, **options)
