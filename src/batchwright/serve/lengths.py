"""How long an item is: by the caller's function, by a tokenizer, or by its type where nobody says."""

from __future__ import annotations

import copy
import logging
import numbers
import threading
from collections.abc import Callable, Mapping
from typing import Any, final

from .._checks import as_whole, check_choice, is_whole
from .._lengths import is_backend_tokenizer, is_transformers_tokenizer
from ..errors import ArgumentError
from .settings import MAX_LENGTH, as_length

AUTO = "auto"
# Tokenizers without a maximum give a number beyond all texts.
_MAX_LENGTH = 1_000_000

logger = logging.getLogger("batchwright.serve")


def measure_for(length_of: Any, tokenizer: Any, *, name: str) -> Callable[[Any], int]:
    """Return the function that measures items; a ``Guess`` where the lengths are only estimates.

    Args:
        length_of: the caller's function, "auto", or None for items of the same length.
        tokenizer: counts the tokens of texts; None for no tokenizer.
        name: the batched function, for messages.

    >>> measure_for(len, None, name="embed")("four"), measure_for(None, None, name="embed")("four")
    (4, 1)
    """
    if tokenizer is not None:
        if length_of is not None and length_of != AUTO:
            raise ArgumentError("give length_of or tokenizer, not both: each says how long an item is")
        return TokenCount(tokenizer)
    if length_of is None:
        return lambda item: 1
    if not callable(length_of):
        check_choice("length_of", length_of, (AUTO,))
        return Guess(name)
    return lambda item: as_length(length_of(item))


@final
class Guess:
    """Estimates lengths by type, and says once if a type has none.

    Args:
        name: the batched function, for the message.

    >>> guess = Guess("embed")
    >>> guess("a text"), guess([101, 7, 102]), guess(("query", "a text")), guess({"input_ids": [101, 102]}), guess(7)
    (6, 3, 11, 2, 1)
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._has_said = False

    def __call__(self, item: Any) -> int:
        """Return an estimate, 1 where there is none."""
        try:
            length = guess_length(item)
        except Exception:  # an estimate never fails a request
            length = None
        if length is None:
            if not self._has_said and not _is_single(item):
                self._say(item)
            return 1
        return min(max(1, length), MAX_LENGTH)

    def _say(self, item: Any) -> None:
        self._has_said = True
        logger.warning(
            "%s: the length of a %s is not known, so its batches are formed without lengths; pass length_of=, or "
            "length_of=None if all items are alike",
            self._name,
            type(item).__name__,
        )


def guess_length(item: Any) -> int | None:
    """Return the length of an item by its type, None if the type says nothing about it.

    Characters of a text or of several texts, the number of ids or other numbers in a list, the first axis of an array
    or tensor, the ids of a dict with ``input_ids``.

    >>> guess_length("a text"), guess_length({"id": 7}), guess_length(b"bytes")
    (6, None, None)
    """
    if isinstance(item, str):
        return len(item)
    if isinstance(item, Mapping):
        return _num_ids(item["input_ids"]) if "input_ids" in item else None
    if hasattr(item, "shape"):
        return int(item.shape[0]) if len(item.shape) else None
    if isinstance(item, list | tuple):
        return _length_of_list(item)
    return None


def _length_of_list(items: list[Any] | tuple[Any, ...]) -> int | None:
    if not items or isinstance(items[0], list | tuple) or _is_number(items[0]):
        return len(items)
    if all(isinstance(item, str) for item in items):
        return sum(map(len, items))
    return None


def _num_ids(ids: Any) -> int | None:
    """Return the number of token ids, None if they have none; tokenizers may put one text into an axis of its own."""
    if hasattr(ids, "shape"):
        return int(ids.shape[-1]) if len(ids.shape) else None
    if not hasattr(ids, "__len__"):
        return None
    return max(map(len, ids)) if len(ids) and hasattr(ids[0], "__len__") else len(ids)


def _is_number(value: Any) -> bool:
    return is_whole(value) or isinstance(value, numbers.Real)


def _is_single(item: Any) -> bool:
    """Say whether an item is a single value, which has no length that anybody could miss."""
    return item is None or isinstance(item, bool | complex) or _is_number(item) or getattr(item, "shape", None) == ()


@final
class TokenCount:
    """Counts the tokens of a text or a pair of texts, with special tokens, as far as the model's longest input.

    Args:
        tokenizer: of transformers or tokenizers, or a function from str to a number or a sequence of tokens. A fast
            tokenizer is copied: the batched function may use and change the caller's own at the same time.

    >>> TokenCount(str.split)("to be or")
    3
    """

    def __init__(self, tokenizer: Any) -> None:
        most: Any = getattr(tokenizer, "model_max_length", None)
        self._most = int(most) if is_whole(most) and 0 < most < _MAX_LENGTH else None
        self._count = _counter(tokenizer)

    def __call__(self, item: Any) -> int:
        """Return the number of tokens."""
        if isinstance(item, Mapping) or _is_ids(item):
            length = guess_length(item)
        elif isinstance(item, str):
            length = self._count(item)
        elif isinstance(item, list | tuple) and len(item) == 2 and all(isinstance(text, str) for text in item):
            length = self._count(*item)
        else:
            length = None
        if length is None:
            raise ArgumentError(
                f"the tokenizer counts a text, a pair of texts or token ids, got {type(item).__name__}; pass length_of="
            )
        return as_length(length if self._most is None else min(length, self._most))


def _is_ids(item: Any) -> bool:
    return hasattr(item, "shape") or (isinstance(item, list | tuple) and (not item or is_whole(item[0])))


def _counter(tokenizer: Any) -> Callable[..., int]:
    """Return a function from one or two texts to a number of tokens."""
    if is_transformers_tokenizer(tokenizer):
        backend = getattr(tokenizer, "backend_tokenizer", None)
        return _slow_counter(tokenizer) if backend is None else _backend_counter(backend, truncates=False)
    if is_backend_tokenizer(tokenizer):
        return _backend_counter(tokenizer, truncates=True)
    if callable(tokenizer) and not isinstance(tokenizer, type):
        return lambda *texts: sum(_as_count(tokenizer(text)) for text in texts)
    advice = "; pass its method, e.g. tokenizer.encode" if hasattr(tokenizer, "encode") else ""
    raise ArgumentError(
        "tokenizer must be a transformers tokenizer, a tokenizers.Tokenizer or a function from str to int or sequence, "
        f"got {repr(tokenizer)[:80]}{advice}"
    )


def _backend_counter(backend: Any, *, truncates: bool) -> Callable[..., int]:
    """Count with a copy without padding, which nobody else changes.

    Args:
        backend: a ``tokenizers.Tokenizer``.
        truncates: keep its truncation; that of a transformers tokenizer is a rest of its last call.
    """
    try:
        own = copy.deepcopy(backend)
    except Exception as error:  # tokenizers raises a bare Exception
        raise ArgumentError(
            f"the tokenizer cannot be copied ({error}); pass length_of= with a count of your own"
        ) from error
    own.no_padding()
    if not truncates:
        own.no_truncation()
    if hasattr(backend, "encode_special_tokens"):  # a copy does not keep it
        own.encode_special_tokens = backend.encode_special_tokens
    return lambda *texts: len(own.encode(*texts))


def _slow_counter(tokenizer: Any) -> Callable[..., int]:
    lock = threading.Lock()

    def count(*texts: str) -> int:
        with lock:  # verbose=False: a text beyond the model's longest input is no mistake here
            return len(tokenizer(*texts, verbose=False)["input_ids"])

    return count


def _as_count(tokens: Any) -> int:
    return as_whole("the result of tokenizer", tokens if is_whole(tokens) else len(tokens), least=0)
