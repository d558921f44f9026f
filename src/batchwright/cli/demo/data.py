"""The corpus of the demo, and the four ways of batching it, each a real ``DataLoader`` over the same examples."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import batchwright as bw

from ..._stdlib_source import functions_in, python_files, stdlib_folder, tokenize
from ...errors import ArgumentError
from .records import DemoSettings

Ids = npt.NDArray[np.int64]

_SPECIAL = ("<padding>", "<rare>", "<start>", "<end>")
PADDING, RARE, START, END = range(4)
# One file in this many is kept for validation, so that no validated function has a sibling in training.
_VALID_EVERY = 10


@final
@dataclass(frozen=True, kw_only=True)
class Corpus:
    """The token ids of each function, the start mark first; ``vocabulary[i]`` is the text of id ``i``."""

    train: list[Ids]
    valid: list[Ids]
    vocabulary: tuple[str, ...]


def load_corpus(settings: DemoSettings, *, root: Path | None = None) -> Corpus:
    """Read functions until there are enough, from files in a random order that depends only on the seed.

    Args:
        settings: how many functions to read, how long they may be, and how many different tokens to keep.
        root: a folder of Python files; None takes the standard library.
    """
    root = root or stdlib_folder()
    files = python_files(root)
    random.Random(settings.seed).shuffle(files)
    valid_files = files[::_VALID_EVERY]
    train_files = [file for i, file in enumerate(files) if i % _VALID_EVERY]
    if not valid_files or not train_files:
        raise ArgumentError(f"the demo needs at least 2 Python files, found {len(files)} under {root}")
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
    """Return start mark, tokens and end mark as ids: at most ``max_length`` to read, and one more to predict."""
    known = [START, *(ids.get(token, RARE) for token in tokens), END]
    return np.array(known[: max_length + 1], dtype=np.int64)


def lengths_of(examples: Sequence[Ids]) -> npt.NDArray[np.int64]:
    """Return how many tokens of each example the model reads: all but the last one, which it only predicts."""
    return np.array([len(ids) - 1 for ids in examples], dtype=np.int64)


@final
@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way of batching: a short name, what it does in a sentence, its loader and its number of steps."""

    name: str
    what: str
    loader: DataLoader[Any]
    num_steps: int


def collate(examples: Sequence[Ids]) -> Tensor:
    """Pad examples on the right to the longest of them."""
    return pad_sequence([torch.from_numpy(ids) for ids in examples], batch_first=True, padding_value=PADDING)


def make_arms(train: Sequence[Ids], settings: DemoSettings) -> list[Arm]:
    """Return the arms; the others are compared with the first.

    A batch of any arm has at most ``settings.max_tokens`` padded tokens.
    """
    lengths = lengths_of(train)
    size = fixed_size(train, settings)
    grouped = bw.BatchSampler(lengths, bw.MaxItems(size), seed=settings.seed, balance_over=1)
    planned = bw.BatchSampler(lengths, bw.MaxTokens(settings.max_tokens), seed=settings.seed, balance_over=1)
    smaller = tokens_for_updates(train, -(-len(train) // size), settings)
    steady = bw.BatchSampler(lengths, bw.MaxTokens(smaller), seed=settings.seed, balance_over=1)
    return [
        _shuffled(train, size, settings),
        _planned(
            train,
            f"fixed {size}, by length",
            f"{size} examples of similar length per batch, bw.MaxItems({size})",
            grouped,
        ),
        _planned(
            train, "planned, full budget", f"as many examples as fit, bw.MaxTokens({settings.max_tokens})", planned
        ),
        _planned(
            train,
            "planned, small budget",
            f"as many updates as the fixed size makes, or a few more, bw.MaxTokens({smaller})",
            steady,
        ),
    ]


def fixed_size(train: Sequence[Ids], settings: DemoSettings) -> int:
    """Return the largest fixed size that fits the budget at the longest example."""
    return max(1, settings.max_tokens // int(lengths_of(train).max()))


def tokens_for_updates(train: Sequence[Ids], num_updates: int, settings: DemoSettings) -> int:
    """Return the largest multiple of 64 as a budget that makes at least ``num_updates`` batches, if there is one."""
    lengths = lengths_of(train)
    lowest = -(-int(lengths.max()) // 64) * 64
    for max_tokens in range(settings.max_tokens, lowest, -64):
        if len(bw.plan_batches(lengths, bw.MaxTokens(max_tokens), seed=settings.seed)) >= num_updates:
            return max_tokens
    return lowest


def _shuffled(train: Sequence[Ids], size: int, settings: DemoSettings) -> Arm:
    generator = torch.Generator().manual_seed(settings.seed)
    loader: DataLoader[Any] = DataLoader(
        train,  # type: ignore[arg-type]  # a list is a data set to DataLoader, not to its types
        batch_size=size,
        shuffle=True,
        collate_fn=collate,
        generator=generator,
    )
    return Arm(
        name=f"fixed {size}, shuffled",
        what=f"{size} examples per batch in random order: the most that fit at the longest example",
        loader=loader,
        num_steps=len(loader),
    )


def _planned(train: Sequence[Ids], name: str, what: str, sampler: Any) -> Arm:
    loader: DataLoader[Any] = DataLoader(train, batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]
    return Arm(name=name, what=what, loader=loader, num_steps=len(sampler))


def _take(files: Sequence[Path], count: int) -> list[list[str]]:
    found: list[list[str]] = []
    for file in files:
        found += [tokenize(text) for text in functions_in(file)]
        if len(found) >= count:
            break
    return found[:count]
