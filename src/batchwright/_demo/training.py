"""Train one arm and record what it cost."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

import batchwright as bw

from .._progress import ProgressBar
from .arms import Arm, collate
from .corpus import Corpus, lengths_of
from .model import LanguageModel, loss_sum, make_model
from .results import ArmResult, Check
from .settings import DemoSettings

# The rate grows with the root of the tokens an update averages, as suits Adam; this many get the base rate.
_TOKENS_AT_BASE_RATE = 1000
_WARM_UP = 0.2
_LAST_RATE = 0.1


def train_arm(arm: Arm, corpus: Corpus, settings: DemoSettings) -> ArmResult:
    """Train a fresh model on every example once, validating at even intervals of examples.

    Args:
        arm: the batches.
        corpus: the examples; those for validation are the same for every arm.
        settings: of the demo.
    """
    model = make_model(settings, len(corpus.vocabulary))
    num_tokens = int(lengths_of(corpus.train).sum())
    rate = settings.base_rate * math.sqrt(num_tokens / arm.num_steps / _TOKENS_AT_BASE_RATE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate_factor(step, arm.num_steps))
    valid = valid_batches(corpus, settings)
    checks: list[Check] = []
    shapes: list[tuple[int, int]] = []
    num_examples, seconds = 0, 0.0
    with ProgressBar(label=f"{arm.name:<22}", total=len(corpus.train)) as bar:
        # Processor time: what other programs on the machine do does not count, and the rest is the same on one thread.
        start = time.process_time()
        for batch in arm.loader:
            train_step(model, optimizer, batch)
            schedule.step()
            seconds += time.process_time() - start
            shapes.append((batch.shape[0], batch.shape[1] - 1))
            num_examples += batch.shape[0]
            if num_examples * settings.num_checks >= (len(checks) + 1) * len(corpus.train):
                checks.append(Check(num_examples=num_examples, seconds=seconds, loss=validate(model, valid)))
            bar.update(batch.shape[0])
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


def train_step(model: LanguageModel, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    """Make one update on the mean loss a token of a batch."""
    total, num_tokens = loss_sum(model, batch)
    torch.autograd.backward(total / num_tokens)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def rate_factor(step: int, num_steps: int) -> float:
    """Return the learning rate relative to its peak: a straight rise, then half a cosine.

    >>> [round(rate_factor(step, 20), 2) for step in (0, 3, 11, 19)]
    [0.25, 1.0, 0.55, 0.1]
    """
    warm_up = max(1, round(_WARM_UP * num_steps))
    if step < warm_up:
        return (step + 1) / warm_up
    done = min(1.0, (step - warm_up + 1) / max(1, num_steps - warm_up))
    return _LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * done)) / 2


def valid_batches(corpus: Corpus, settings: DemoSettings) -> list[Tensor]:
    """Return the validation examples in batches of little padding, equal for every arm."""
    plan = bw.plan_batches(lengths_of(corpus.valid), bw.MaxTokens(settings.max_tokens), grouping=bw.Sorted())
    batches = np.split(plan.indices, plan.offsets[1:-1])
    return [collate([corpus.valid[i] for i in indices]) for indices in batches]


@torch.no_grad()
def validate(model: LanguageModel, batches: Sequence[Tensor]) -> float:
    """Return the mean loss a token over all batches together."""
    losses = [loss_sum(model, batch) for batch in batches]
    return float(sum(total for total, _ in losses)) / sum(count for _, count in losses)
