"""The training of the demo: its corpus, ways of batching it, a small transformer, and the training of an arm."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

import batchwright as bw

from ..._progress import ProgressBar
from ..._stdlib_source import functions_in, python_files, stdlib_folder, tokenize
from ...errors import ArgumentError
from .records import ArmResult, Check, DemoSettings

Ids = npt.NDArray[np.int64]

_SPECIAL = ("<padding>", "<rare>", "<start>", "<end>")
PADDING, RARE, START, END = range(4)
# One file in this many is kept for validation, so that no validated function has a sibling in training.
_VALID_EVERY = 10
# For Adam the learning rate grows with the square root of the tokens per update; this many get the base rate.
TOKENS_AT_BASE_RATE = 1000
_WARM_UP = 0.2
_LAST_RATE = 0.1


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
    kept = counts.most_common(settings.vocabulary_size - len(_SPECIAL))
    vocabulary = (*_SPECIAL, *(token for token, _ in kept))
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
    """One way of batching: a short name, what it does in a sentence, and its loader, one batch per update."""

    name: str
    what: str
    loader: DataLoader[Any]


def collate(examples: Sequence[Ids]) -> Tensor:
    """Pad examples on the right to the longest of them."""
    return pad_sequence([torch.from_numpy(ids) for ids in examples], batch_first=True, padding_value=PADDING)


def make_arms(train: Sequence[Ids], settings: DemoSettings) -> list[Arm]:
    """Return the arms; the others are compared with the first.

    A batch of any arm has at most ``settings.max_tokens`` padded tokens.
    """
    lengths = lengths_of(train)
    size = fixed_size(train, settings)
    smaller = tokens_for_updates(train, -(-len(train) // size), settings)
    generator = torch.Generator().manual_seed(settings.seed)
    shuffled = _load(train, batch_size=size, shuffle=True, generator=generator)
    what = f"{size} examples per batch in random order: the most that fit at the longest example"
    arms = [Arm(name=f"fixed {size}, shuffled", what=what, loader=shuffled)]
    planned: list[tuple[str, str, bw.Budget]] = [
        (f"fixed {size}, by length", f"{size} examples of similar length per batch", bw.MaxItems(size)),
        ("planned, full budget", "as many examples as fit", bw.MaxTokens(settings.max_tokens)),
        ("planned, small budget", "as many updates as the fixed size makes, or a few more", bw.MaxTokens(smaller)),
    ]
    for name, what, budget in planned:
        sampler = bw.BatchSampler(lengths, budget, seed=settings.seed)
        arms.append(Arm(name=name, what=f"{what}, bw.{budget}", loader=_load(train, batch_sampler=sampler)))
    return arms


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


def _load(train: Sequence[Ids], **options: Any) -> DataLoader[Any]:
    # A list is a data set to DataLoader, but not to its types.
    return DataLoader(cast(Dataset[Any], train), collate_fn=collate, **options)


def _take(files: Sequence[Path], count: int) -> list[list[str]]:
    found: list[list[str]] = []
    for file in files:
        found += [tokenize(text) for text in functions_in(file)]
        if len(found) >= count:
            break
    return found[:count]


def train_arm(arm: Arm, corpus: Corpus, settings: DemoSettings, *, num_updates: int | None = None) -> ArmResult:
    """Train a fresh model, and validate it at even intervals.

    Args:
        arm: the batches.
        corpus: the examples; every arm is validated on the same ones.
        settings: the settings of the demo.
        num_updates: how many updates to make, epoch after epoch; None for one epoch.
    """
    model = make_model(settings, len(corpus.vocabulary))
    rate = settings.base_rate * math.sqrt(int(lengths_of(corpus.train).sum()) / len(arm.loader) / TOKENS_AT_BASE_RATE)
    total = len(arm.loader) if num_updates is None else num_updates
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, total))
    valid = valid_batches(corpus, settings)
    checks: list[Check] = []
    shapes: list[tuple[int, int]] = []
    num_examples, num_tokens, seconds = 0, 0, 0.0
    with ProgressBar(label=f"{arm.name:<22} updates", total=total) as bar:
        # Processor time does not count other programs on the machine; on one thread it is otherwise the same as time.
        start = time.process_time()
        for batch in islice(_epochs(arm.loader), total):
            num_tokens += train_step(model, optimizer, batch)
            schedule.step()
            seconds += time.process_time() - start
            shapes.append((batch.shape[0], batch.shape[1] - 1))
            num_examples += batch.shape[0]
            if len(shapes) * settings.num_checks >= (len(checks) + 1) * total:
                checks.append(Check(num_examples=num_examples, seconds=seconds, loss=validate(model, valid)))
            bar.update(1)
            start = time.process_time()
    return ArmResult(
        name=arm.name,
        what=arm.what,
        rate=rate,
        seconds=seconds,
        num_tokens=num_tokens,
        checks=tuple(checks),
        shapes=tuple(shapes),
    )


def _epochs(loader: DataLoader[Any]) -> Iterator[Tensor]:
    while True:
        yield from loader


# A run that is to last as long as the slowest arm makes at most so many times the updates of an epoch.
_MOST_EPOCHS = 8


def train_as_long(corpus: Corpus, settings: DemoSettings, results: Sequence[ArmResult]) -> list[ArmResult]:
    """Train the same size by length, and planned batches of as many updates, for the seconds of shuffled batches.

    The number of updates follows from the seconds of an update in the first comparison, so that the learning rate of
    every run falls to its end when its seconds are over.

    Args:
        corpus: the examples.
        settings: the settings of the demo.
        results: the arms of ``make_arms`` over one epoch, in order.
    """
    found = []
    for place in (1, 3):
        arm, epoch = make_arms(corpus.train, settings)[place], results[place]
        num_epochs = min(_MOST_EPOCHS, results[0].seconds / max(epoch.seconds, 1e-9))
        found.append(train_arm(arm, corpus, settings, num_updates=max(1, round(num_epochs * epoch.num_steps))))
    return found


def train_step(model: LanguageModel, optimizer: torch.optim.Optimizer, batch: Tensor) -> int:
    """Make one update on the mean loss per token of a batch, and return its real tokens."""
    total, num_tokens = loss_sum(model, batch)
    torch.autograd.backward(total / num_tokens)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return num_tokens


def rate_factor(step: int, num_steps: int) -> float:
    """Return the learning rate relative to its peak: a linear rise, then half a cosine.

    >>> [round(rate_factor(step, 20), 2) for step in (0, 3, 11, 19)]
    [0.25, 1.0, 0.55, 0.1]
    """
    warm_up = max(1, round(_WARM_UP * num_steps))
    if step < warm_up:
        return (step + 1) / warm_up
    done = min(1.0, (step - warm_up + 1) / max(1, num_steps - warm_up))
    return _LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * done)) / 2


def valid_batches(corpus: Corpus, settings: DemoSettings) -> list[Tensor]:
    """Return the validation examples in batches with little padding, the same for every arm."""
    plan = bw.plan_batches(lengths_of(corpus.valid), bw.MaxTokens(settings.max_tokens), grouping=bw.Sorted())
    batches = np.split(plan.indices, plan.offsets[1:-1])
    return [collate([corpus.valid[i] for i in indices]) for indices in batches]


@torch.no_grad()
def validate(model: LanguageModel, batches: Sequence[Tensor]) -> float:
    """Return the mean loss per token over all batches together."""
    losses = [loss_sum(model, batch) for batch in batches]
    return float(sum(total for total, _ in losses)) / sum(count for _, count in losses)


@final
class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each added to its normalised input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states of the same shape, ``(items, length, width)``."""
        items, length, width = x.shape
        heads = self.query_key_value(self.norm_attention(x)).view(items, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        # Padding is on the right, where the causal mask already hides it from every real token.
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).reshape(items, length, width))
        fed: Tensor = self.feed(self.norm_feed(x))
        return x + fed


@final
class LanguageModel(nn.Module):
    """Predicts the next token at every position."""

    def __init__(self, settings: DemoSettings, vocabulary_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary_size, settings.width)
        self.positions = nn.Embedding(settings.max_length, settings.width)
        self.blocks = nn.Sequential(*(Block(settings.width, settings.num_heads) for _ in range(settings.num_layers)))
        self.norm = nn.LayerNorm(settings.width)
        self.output = nn.Linear(settings.width, vocabulary_size, bias=False)
        for table in (self.tokens, self.positions, self.output):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits ``(items, length, vocabulary)`` for ids ``(items, length)``."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        logits: Tensor = self.output(self.norm(self.blocks(x)))
        return logits


def make_model(settings: DemoSettings, vocabulary_size: int) -> LanguageModel:
    """Return a model whose initial weights depend only on the seed, the same for every arm."""
    torch.manual_seed(settings.seed)
    return LanguageModel(settings, vocabulary_size)


def loss_sum(model: LanguageModel, batch: Tensor) -> tuple[Tensor, int]:
    """Return the summed cross-entropy of the real tokens of a batch, and their number.

    Args:
        model: the model.
        batch: ids ``(items, length + 1)``, padded on the right.
    """
    inputs, targets = batch[:, :-1], batch[:, 1:]
    logits = model(inputs)
    total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum")
    return total, int((targets != PADDING).sum())
