"""One face for every kind of tokenizer: count tokens, and say who you are.

A tokenizer is recognised by what it can do, so that neither transformers nor tokenizers is imported here.
"""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from ..._checks import is_whole
from ..._lengths import is_backend_tokenizer, is_transformers_tokenizer
from ...errors import ArgumentError, LengthsError
from ._describing import Description, OpaqueError
from ._examples import num_sides_of_ids, num_sides_of_text

# Attributes of slow tokenizers: results that they remember, and warnings that they gave.
CHANGED_BY_CALLS = {"cache", "deprecation_warnings"}


class TokenCounter(ABC):
    """Counts the tokens of texts; it pickles where its tokenizer does, so that a worker can be given one."""

    @abstractmethod
    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text, truncated if a maximum was given."""

    def num_sides(self, example: Any) -> int:
        """Return 1 for an example that can be counted, 2 for a pair of them, 0 for anything else."""
        return num_sides_of_text(example)

    @abstractmethod
    def identity(self) -> bytes:
        """Return bytes that differ where the counts could; the maximum length is not part of them."""


def adapt(tokenizer: Any, max_length: int | None) -> TokenCounter:
    """Return the counter for a tokenizer, or say which kinds there are.

    Args:
        tokenizer: of transformers (fast or slow), of tokenizers, or a function from str to int or sequence.
        max_length: the largest number of tokens per text; None does not truncate.

    Returns:
        A counter around the tokenizer.

    >>> adapt(str.split, 2).count(["a", "a b c"])
    [1, 2]
    """
    is_class = isinstance(tokenizer, type)
    if is_transformers_tokenizer(tokenizer):
        return TransformersCounter(tokenizer, max_length)
    if is_backend_tokenizer(tokenizer):
        return _backend_counter(tokenizer, max_length)
    if callable(tokenizer) and not (is_class and hasattr(tokenizer, "get_vocab")):
        return FunctionCounter(tokenizer, max_length)
    raise ArgumentError(
        "tokenizer must be a transformers tokenizer, a tokenizers.Tokenizer or a function from str to int "
        f"or sequence, got {_what_instead(tokenizer)}"
    )


@final
@dataclass(frozen=True)
class TransformersCounter(TokenCounter):
    """Counts with a tokenizer of transformers, fast or slow: ``len(tokenizer(text)["input_ids"])``."""

    tokenizer: Any
    max_length: int | None

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the number of ids of each text, with special tokens and without padding."""
        truncate = {} if self.max_length is None else {"truncation": True, "max_length": self.max_length}
        # verbose=False keeps quiet about texts longer than the model allows: here that is not a mistake.
        encoded = self.tokenizer(list(texts), return_attention_mask=False, verbose=False, **truncate)
        return [len(ids) for ids in encoded["input_ids"]]

    def identity(self) -> bytes:
        """Return class and backend of a fast tokenizer; class, vocabulary and settings of a slow one."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        state = _slow_state(self.tokenizer) if backend is None else _fast_state(self.tokenizer, backend)
        # By its code too: a class of the user's own may change under its name.
        code = Description().add_seen_through({"class": type(self.tokenizer)}).digest()
        return code + json.dumps(state, sort_keys=True, default=repr).encode()


@final
@dataclass(frozen=True)
class BackendCounter(TokenCounter):
    """Counts with a ``tokenizers.Tokenizer`` whose padding is off and whose truncation is as wanted."""

    tokenizer: Any
    encode_special_tokens: bool

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the number of ids of each text, with special tokens."""
        # Neither copying nor pickling a tokenizer keeps this setting.
        if getattr(self.tokenizer, "encode_special_tokens", False) != self.encode_special_tokens:
            self.tokenizer.encode_special_tokens = self.encode_special_tokens
        encode = getattr(self.tokenizer, "encode_batch_fast", self.tokenizer.encode_batch)
        return [len(encoding) for encoding in encode(list(texts))]

    def identity(self) -> bytes:
        """Return the tokenizer as it serialises itself."""
        return f"{self.encode_special_tokens} {_serialise(self.tokenizer)}".encode()


@final
@dataclass(frozen=True)
class FunctionCounter(TokenCounter):
    """Counts with a function: its integer, or the length of its sequence, at most ``max_length``."""

    function: Callable[[str], Any]
    max_length: int | None

    def count(self, texts: Sequence[str]) -> list[int]:
        """Return the function's number for each text."""
        lengths = [_as_length(self.function(text), text) for text in texts]
        return lengths if self.max_length is None else [min(length, self.max_length) for length in lengths]

    def identity(self) -> bytes:
        """Return the function's code and state and all that they hold, or refuse what cannot be described."""
        try:
            return Description(_identity_within).add(self.function).digest()
        except (OpaqueError, RecursionError) as error:
            raise ArgumentError(
                f"the tokenizer holds something that cannot be described ({error}), so its lengths cannot be cached; "
                "pass cache=None"
            ) from error


@final
@dataclass(frozen=True)
class IdCounter(TokenCounter):
    """Counts token ids: the length of each sequence, at most ``max_length``."""

    max_length: int | None

    def num_sides(self, example: Any) -> int:
        """Return 1 for ids, 2 for a pair of them, 0 for anything else."""
        return num_sides_of_ids(example)

    def count(self, texts: Sequence[Any]) -> list[int]:
        """Return the number of ids of each sequence."""
        lengths = map(len, texts)
        return list(lengths) if self.max_length is None else [min(length, self.max_length) for length in lengths]

    def identity(self) -> bytes:
        """Return the name."""
        return b"ids"


def _what_instead(tokenizer: Any) -> str:
    """Say what came in place of a tokenizer, and what to do."""
    if isinstance(tokenizer, type):
        return f"the class {tokenizer.__name__}; pass a tokenizer made from it"
    shown = repr(tokenizer)[:80]
    if isinstance(tokenizer, str):
        return f"{shown}; load the tokenizer of that name first, e.g. AutoTokenizer.from_pretrained({shown})"
    return f"{shown}; pass its method, e.g. tokenizer.encode" if hasattr(tokenizer, "encode") else shown


def _backend_counter(tokenizer: Any, max_length: int | None) -> BackendCounter:
    """Make a counter that leaves the user's tokenizer as it is: a copy gets the settings that must change."""
    encode_special_tokens = bool(getattr(tokenizer, "encode_special_tokens", False))
    if max_length is not None or tokenizer.padding is not None:
        try:
            tokenizer = copy.deepcopy(tokenizer)
        except Exception as error:  # tokenizers raises a bare Exception
            raise ArgumentError(
                f"the tokenizer cannot be copied ({error}), so its truncation and padding cannot be changed; "
                "turn padding off, leave max_length out and use np.minimum(lengths, max_length)"
            ) from error
        tokenizer.no_padding()
        if max_length is not None:
            tokenizer.enable_truncation(max_length=max_length)
    return BackendCounter(tokenizer, encode_special_tokens)


def _serialise(tokenizer: Any) -> str:
    try:
        return str(tokenizer.to_str())
    except Exception as error:  # tokenizers raises a bare Exception
        raise ArgumentError(
            f"the tokenizer cannot be serialised ({error}), so its lengths cannot be cached; pass cache=None"
        ) from error


def _fast_state(tokenizer: Any, backend: Any) -> list[Any]:
    state = json.loads(_serialise(backend))
    # The last call left its own truncation and padding there, and the next call replaces them.
    state.pop("truncation", None)
    state.pop("padding", None)
    return [bool(getattr(tokenizer, "split_special_tokens", False)), state]


def _slow_state(tokenizer: Any) -> list[Any]:
    # Merges, models and switches such as lower-casing are attributes.
    settings = {key: value for key, value in vars(tokenizer).items() if key not in CHANGED_BY_CALLS}
    described = Description().add_seen_through(settings).digest().decode()
    return [tokenizer.get_vocab(), getattr(tokenizer, "special_tokens_map", None), described]


def _identity_within(value: Any) -> bytes | None:
    """Return the identity of a tokenizer that a function holds, None for anything else."""
    if is_transformers_tokenizer(value) or is_backend_tokenizer(value):
        return adapt(value, None).identity()
    return None


def _as_length(result: Any, text: str) -> int:
    """Read a function's result as a length; what would only look like one is refused."""
    if is_whole(result) and int(result) >= 0:
        return int(result)
    # len() of a mapping counts its keys, and len() of a tensor with a batch axis is 1.
    is_sequence = hasattr(result, "__len__") and not isinstance(result, Mapping)
    if is_sequence and getattr(result, "ndim", 1) == 1:
        return len(result)
    raise LengthsError(
        f"tokenizer must return a length of 0 or more or a flat sequence of tokens, got {brief(result)} "
        f"for the text {brief(text)}; return e.g. tokenizer(text)['input_ids']"
    )


def brief(value: Any) -> str:
    """Show a value in one short line, with its type."""
    text = " ".join(repr(value).split())
    return f"{text[:40]}… ({type(value).__name__})" if len(text) > 40 else f"{text} ({type(value).__name__})"
