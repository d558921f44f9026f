"""The ways of batching that the demo compares, each a real ``DataLoader`` over the same examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import batchwright as bw

from .corpus import PADDING, Ids, lengths_of
from .settings import DemoSettings


@final
@dataclass(frozen=True, kw_only=True)
class Arm:
    """One way of batching: a short name, what it does in a sentence, and the loader."""

    name: str
    what: str
    loader: DataLoader[Any]
    num_steps: int


def collate(examples: Sequence[Ids]) -> Tensor:
    """Pad examples on the right to the longest of them."""
    return pad_sequence([torch.from_numpy(ids) for ids in examples], batch_first=True, padding_value=PADDING)


def make_arms(train: Sequence[Ids], settings: DemoSettings) -> list[Arm]:
    """Return the arms; the first is what the others are compared with.

    A batch of any arm holds at most ``settings.max_tokens`` padded tokens.
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
            f"{size} examples of similar length a batch, bw.MaxItems({size})",
            grouped,
        ),
        _planned(train, "planned, full budget", f"as many as fit, bw.MaxTokens({settings.max_tokens})", planned),
        _planned(
            train,
            "planned, small budget",
            f"as many updates as the fixed size or a few more, bw.MaxTokens({smaller})",
            steady,
        ),
    ]


def fixed_size(train: Sequence[Ids], settings: DemoSettings) -> int:
    """Return the largest fixed size that fits the budget at the longest example."""
    return max(1, settings.max_tokens // int(lengths_of(train).max()))


def tokens_for_updates(train: Sequence[Ids], num_updates: int, settings: DemoSettings) -> int:
    """Return the largest budget, in steps of 64, with ``num_updates`` batches or more, where there is one."""
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
        what=f"{size} examples a batch in random order: the most that fits at the longest example",
        loader=loader,
        num_steps=len(loader),
    )


def _planned(train: Sequence[Ids], name: str, what: str, sampler: Any) -> Arm:
    loader: DataLoader[Any] = DataLoader(train, batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]
    return Arm(name=name, what=what, loader=loader, num_steps=len(sampler))
