"""A corpus that every machine has: the functions of Python's standard library."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import numpy.typing as npt

from .._stdlib_source import functions_in, python_files, stdlib_folder, tokenize
from ..errors import ArgumentError
from .settings import DemoSettings

Ids = npt.NDArray[np.int64]

_SPECIAL = ("<padding>", "<rare>", "<start>", "<end>")
PADDING, RARE, START, END = range(4)
# One file in this many is kept for validation, so that no validated function has a sibling in training.
_VALID_EVERY = 10


@final
@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Token ids of each function, the start mark first; ``vocabulary[i]`` is the text of id ``i``."""

    train: list[Ids]
    valid: list[Ids]
    vocabulary: tuple[str, ...]


def load_corpus(settings: DemoSettings, *, root: Path | None = None) -> Corpus:
    """Read functions until there are enough, from files in a random order that the seed fixes.

    Args:
        settings: how many functions, how long, how many different tokens.
        root: a folder of Python files; None takes the standard library.
    """
    root = root or stdlib_folder()
    files = python_files(root)
    random.Random(settings.seed).shuffle(files)
    valid_files = files[::_VALID_EVERY]
    train_files = [file for i, file in enumerate(files) if i % _VALID_EVERY]
    if not valid_files or not train_files:
        raise ArgumentError(f"too few Python files under {root} for the demo: {len(files)}")
    train = _take(train_files, settings.num_train)
    valid = _take(valid_files, settings.num_valid)
    counts = Counter(token for tokens in train for token in tokens)
    vocabulary = (
        *_SPECIAL,
        *(token for token, _ in counts.most_common(settings.vocabulary_size - len(_SPECIAL))),
    )
    ids = {token: i for i, token in enumerate(vocabulary)}
    return Corpus(
        train=[encode(tokens, ids, settings.max_length) for tokens in train],
        valid=[encode(tokens, ids, settings.max_length) for tokens in valid],
        vocabulary=vocabulary,
    )


def encode(tokens: Sequence[str], ids: dict[str, int], max_length: int) -> Ids:
    """Return start mark, tokens and end mark as ids: ``max_length`` to read at most, one more to predict."""
    known = [START, *(ids.get(token, RARE) for token in tokens), END]
    return np.array(known[: max_length + 1], dtype=np.int64)


def lengths_of(examples: Sequence[Ids]) -> npt.NDArray[np.int64]:
    """Return how many tokens the model reads of each example: all but the last, which is only predicted."""
    return np.array([len(ids) - 1 for ids in examples], dtype=np.int64)


def _take(files: Sequence[Path], count: int) -> list[list[str]]:
    found: list[list[str]] = []
    for file in files:
        found += [tokenize(text) for text in functions_in(file)]
        if len(found) >= count:
            break
    return found[:count]
