"""What ``--tokenizer`` may name: a built-in count, a tokenizer file or folder, or a function."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .._optional import require
from ..errors import ArgumentError

LENGTHS = "lengths"


def split_words(text: str) -> list[str]:
    """Return the words between white space.

    >>> split_words("to be  or")
    ['to', 'be', 'or']
    """
    return text.split()


def split_chars(text: str) -> Sequence[str]:
    """Return the characters: the text itself."""
    return text


def split_bytes(text: str) -> bytes:
    """Return the UTF-8 bytes; a lone surrogate, which JSON can hold, counts three."""
    return text.encode("utf-8", "surrogatepass")


BUILT_IN: dict[str, Callable[[str], Sequence[Any]]] = {
    "words": split_words,
    "chars": split_chars,
    "bytes": split_bytes,
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
        Something ``measure_lengths`` takes.

    >>> load_tokenizer("words")("to be")
    ['to', 'be']
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    path = Path(name).expanduser()
    if path.is_dir():
        return _from_folder(path)
    if path.is_file():
        return _from_file(path)
    module_name, colon, function_name = name.partition(":")
    if colon and module_name and function_name:
        return _from_module(module_name, function_name)
    raise ArgumentError(
        f"--tokenizer {name}: no such file or folder; allowed are words, chars, bytes, lengths, "
        "a tokenizer.json, a folder with a saved tokenizer, or module:function"
    )


def _from_file(path: Path) -> Any:
    tokenizers = require("tokenizers", extra="hf")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust parser raises plain Exception
        raise ArgumentError(f"{path} is not a tokenizer.json: {error}") from None
    # A saved file may carry the padding and cutting of its last use; both would hide the true lengths.
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


def _from_module(module_name: str, function_name: str) -> Any:
    # A console script does not look for modules where it was started, unlike ``python -m``.
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        function = importlib.import_module(module_name)
        for part in function_name.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError, ValueError) as error:
        raise ArgumentError(f"--tokenizer {module_name}:{function_name}: {error}") from None
    if not callable(function):
        raise ArgumentError(f"--tokenizer {module_name}:{function_name} is not a function of a text")
    return function
