"""The arm of the demo without a batch size: ``size.goodput`` finds it on the way, and says why."""

from __future__ import annotations

import math
import time
from typing import Any, cast, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import batchwright as bw

from ... import size, step
from ..._progress import ProgressBar
from .records import ArmResult, Check, DemoSettings
from .training import (
    TOKENS_AT_BASE_RATE,
    Corpus,
    Ids,
    collate,
    lengths_of,
    loss_sum,
    make_model,
    rate_factor,
    valid_batches,
    validate,
)

# The largest batch leaves so many updates.
_LEAST_UPDATES = 20
NAME = "size found on the way"


def train_without_size(corpus: Corpus, settings: DemoSettings) -> ArmResult:
    """Train a fresh model on every example once, in batches whose tokens per update a policy chooses.

    Args:
        corpus: the examples.
        settings: the settings of the demo.
    """
    lengths = lengths_of(corpus.train)
    num_tokens = int(lengths.sum())
    largest = max(TOKENS_AT_BASE_RATE + 1, num_tokens // _LEAST_UPDATES)
    policy = size.goodput(unit="tokens", smallest=TOKENS_AT_BASE_RATE // 4, largest=largest)
    controller = bw.BatchSizeController(
        policy, min_size=TOKENS_AT_BASE_RATE // 4, max_size=largest, initial=TOKENS_AT_BASE_RATE
    )
    run = _Run(corpus, settings, controller)
    options: dict[str, Any] = {
        "lengths": lengths,
        "budget": _budget(corpus),
        "size_unit": "tokens",
        "seed": settings.seed,
    }
    sampler = bw.ResizableBatchSampler(len(corpus.train), controller, **options)
    # A list is a data set to DataLoader, but not to its types.
    loader: DataLoader[Any] = DataLoader(cast("Dataset[Any]", corpus.train), batch_sampler=sampler, collate_fn=list)
    with ProgressBar(label=f"{NAME:<22} functions", total=len(corpus.train)) as bar:
        start = time.process_time()
        for batch in loader:
            run.update(batch, start)
            bar.update(len(batch))
            start = time.process_time()
    return ArmResult(
        name=NAME,
        what=f"about {TOKENS_AT_BASE_RATE:,} tokens at first, then what goodput chooses",
        rate=settings.base_rate,
        seconds=run.seconds,
        num_tokens=num_tokens,
        checks=tuple(run.checks),
        shapes=tuple(run.shapes),
        num_updates=run.num_updates,
        reasons=tuple(map(str, controller.history)) or (f"{controller.size} all the time ({controller.explain()})",),
    )


@final
class _Run:
    """A training whose learning rate, beta2 and schedule follow the tokens of an update.

    Args:
        corpus: the examples.
        settings: the settings of the demo.
        controller: chooses tokens per update.
    """

    def __init__(self, corpus: Corpus, settings: DemoSettings, controller: bw.BatchSizeController) -> None:
        self.seconds, self.num_updates = 0.0, 0
        self.checks: list[Check] = []
        self.shapes: list[tuple[int, int]] = []
        self._controller, self._settings = controller, settings
        self._num_train, self._num_examples, self._num_tokens = len(corpus.train), 0, 0
        self._valid = valid_batches(corpus, settings)
        self._model = make_model(settings, len(corpus.vocabulary))
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=settings.base_rate, betas=(0.9, 0.98), weight_decay=0.01
        )
        self._num_steps = max(1, int(lengths_of(corpus.train).sum()) // TOKENS_AT_BASE_RATE)
        self._stepper = step.Stepper(
            self._model,
            self._optimizer,
            cast("Any", loss_sum),
            micro_batch=_budget(corpus),
            lengths=_length,
            collate=self._collate,
            clip_norm=1.0,
            measure_noise=True,
            noise_from="vectors",
            base_size=1,  # both rules count tokens
            lr_rule=lambda batch_size, base_size: math.sqrt(self._factor),
            beta2_rule=lambda batch_size, base_size, beta2: beta2**self._factor,
        )
        self._factor = 1.0

    def _collate(self, examples: list[Ids]) -> Tensor:
        batch = collate(examples)
        self.shapes.append((batch.shape[0], batch.shape[1] - 1))
        return batch

    def update(self, batch: list[Ids], start: float) -> None:
        """Run an update, let the controller observe it, and validate at even intervals."""
        num_tokens = sum(map(_length, batch))
        self._factor = num_tokens / TOKENS_AT_BASE_RATE
        rate = self._settings.base_rate * rate_factor(self._num_tokens // TOKENS_AT_BASE_RATE, self._num_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        report = self._stepper.step(batch)
        figures = {**report.observation(), "batch_tokens": num_tokens, "seconds": time.process_time() - start}
        self._controller.observe(**figures)
        self.seconds += time.process_time() - start
        self.num_updates += 1
        self._num_examples += len(batch)
        self._num_tokens += num_tokens
        if self._num_examples * self._settings.num_checks >= (len(self.checks) + 1) * self._num_train:
            loss = validate(self._model, self._valid)
            self.checks.append(Check(num_examples=self._num_examples, seconds=self.seconds, loss=loss))


def _budget(corpus: Corpus) -> bw.Budget:
    """Return what a group of similar lengths may hold; a batch mixes several of them, and runs in such groups again."""
    return bw.MaxTokens(max(TOKENS_AT_BASE_RATE, int(lengths_of(corpus.train).max())))


def _length(example: Ids) -> int:
    return len(example) - 1
