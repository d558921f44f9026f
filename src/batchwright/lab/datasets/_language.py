"""Language modelling on Python's own source: windows of characters or of words, each with those that follow."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from ..._stdlib_source import tokenize
from ...errors import ArgumentError
from ._assemble import SPLIT_SEED, VALIDATION_EVERY, shares
from ._texts import OTHER_CHAR, char_ids, files_by_group
from .dataset import Dataset, Ids, Split

NUM_WINDOWS = 10_000
# Characters, or words, of a window.
WINDOWS = {"python_chars": 64, "python_words": 32}
NUM_WORDS = 1024
# The id of all words that are not among the most frequent ones.
_OTHER_WORD = 0


def load_windows(name: str, *, limit: int | None = None, root: Path | None = None) -> Dataset:
    """Return windows of the files of Python's standard library, each with the ids that follow.

    The two parts come from different files, the same whatever the limit. Each file gives one window in turn, so that a
    small data set sees many files. A window that occurs twice counts once, and never in both parts.

    Args:
        name: ``"python_chars"`` for windows of 64 characters, ``"python_words"`` for 32 names, numbers, symbols and
            line ends out of 1,023 that are frequent in the training files; all others share an id.
        limit: the most windows, both parts together; None for 10,000.
        root: a folder with the modules; None for the standard library of this Python.
    """
    files = [file for group in files_by_group(root) for file in group]
    random.Random(SPLIT_SEED).shuffle(files)
    texts = [file.read_text(encoding="utf-8", errors="replace") for file in files]
    kept = texts[::VALIDATION_EVERY]
    others = [text for place, text in enumerate(texts) if place % VALIDATION_EVERY]
    if name == "python_chars":
        ids, vocabulary_size = [[char_ids(text) for text in part] for part in (others, kept)], OTHER_CHAR + 1
    else:
        ids, vocabulary_size = word_ids(others, kept), NUM_WORDS
    train, validation = _take(name, ids, NUM_WINDOWS if limit is None else limit)
    return Dataset(
        name=name,
        task="language",
        train=train,
        validation=validation,
        num_classes=vocabulary_size,
        vocabulary_size=vocabulary_size,
        source="the source of the standard library of this Python",
    )


def word_ids(train: Sequence[str], validation: Sequence[str]) -> list[list[Ids]]:
    """Return the ids of the words of each text; the most frequent words of the training texts have one each.

    >>> [[ids.tolist() for ids in part] for part in word_ids(["a b a"], ["b c"])]
    [[[1, 2, 1]], [[2, 0]]]
    """
    words = [[tokenize(text) for text in part] for part in (train, validation)]
    counts = Counter(word for text in words[0] for word in text)
    # Words that are equally frequent by the alphabet: the order of a Counter is that of reading.
    frequent = sorted(counts, key=lambda word: (-counts[word], word))[: NUM_WORDS - 1]
    known = {word: place for place, word in enumerate(frequent, start=_OTHER_WORD + 1)}
    return [
        [np.array([known.get(word, _OTHER_WORD) for word in text], dtype=np.int64) for text in part] for part in words
    ]


def _take(name: str, ids: Sequence[Sequence[Ids]], wanted: int) -> list[Split]:
    seen: set[bytes] = set()
    enough = shares(wanted, wanted, wanted)
    found = [_windows(part, count, WINDOWS[name], seen) for part, count in zip(ids, enough, strict=True)]
    if not all(map(len, found)):
        raise ArgumentError(
            f"{name}: the files hold {len(found[0])} + {len(found[1])} different windows to train on and to validate; "
            "it needs a Python installed with its standard library as .py files"
        )
    return [Split(features=part[:, :-1], labels=part[:, 1:]) for part in found]


def _windows(texts: Sequence[Ids], count: int, width: int, seen: set[bytes]) -> Ids:
    """Return at most ``count`` windows, each with the id after it; none that was seen before, in the other part too."""
    rng = np.random.default_rng(SPLIT_SEED)
    found = []
    for window in _in_turn([_shuffled(ids, width, rng) for ids in texts]):
        if len(found) == count:
            break
        key = window[:-1].tobytes()
        if key not in seen:
            seen.add(key)
            found.append(window)
    if not found:
        return np.empty((0, width + 1), dtype=np.int64)
    return np.stack(found)[rng.permutation(len(found))]


def _shuffled(ids: Ids, width: int, rng: np.random.Generator) -> Ids:
    """Return the windows of a text, side by side, in random order."""
    starts = width * rng.permutation(max(0, len(ids) - 1) // width)
    return ids[starts[:, None] + np.arange(width + 1)]


def _in_turn(parts: Sequence[Ids]) -> Iterator[Ids]:
    """Yield the first row of each part, then the second of each that has one, and so on."""
    for place in range(max(map(len, parts), default=0)):
        yield from (part[place] for part in parts if place < len(part))
