"""Follow one training iteration through the files of batchwright. Needs torch.

The iteration: ``ResizableBatchSampler`` under a token budget forms a batch, ``DataLoader`` hands it over as a list,
``Stepper.step`` runs it in micro-batches and measures gradient noise, and the controller observes the report and
decides the next size. It comes after several others, so that nothing is set up for the first time.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import batchwright as bw
from batchwright import size
from batchwright.step import Stepper

from .files import room_of

PACKAGE = Path(bw.__file__).parent
NUM_EXAMPLES = 400
VOCABULARY = 50
MAX_TOKENS = 256
NUM_WARM_UP = 2


@dataclass(frozen=True)
class Walk:
    """The files an iteration passes: calls of each, in order of first entry, and how often file and room change."""

    calls: dict[str, int]
    changes_of_file: int
    changes_of_room: int


def walk_one_iteration() -> Walk:
    """Train a small model for a few iterations and follow the last."""
    iterations = make_iterations()
    for _ in range(NUM_WARM_UP):
        next(iterations)
    return follow(lambda: next(iterations))


def make_iterations() -> Iterator[None]:
    """Return a training loop that runs one iteration per ``next``."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(3, 40, (NUM_EXAMPLES,), generator=generator).tolist()
    examples = [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]
    budget = bw.MaxTokens(MAX_TOKENS)
    policy = size.chain(size.noise_driven(), size.clamp(4, 64), size.cooldown(steps=2))
    controller = bw.BatchSizeController(policy, min_size=4, max_size=64, initial=16)
    sampler = bw.ResizableBatchSampler(NUM_EXAMPLES, controller, lengths=lengths, budget=budget)
    loader: Any = DataLoader(examples, batch_sampler=sampler, collate_fn=list)  # type: ignore[arg-type]
    stepper = make_stepper(budget)
    for batch in sampler.track(loader):
        report = stepper.step(batch)
        controller.observe(**report.observation())
        yield


def make_stepper(budget: bw.Budget) -> Stepper:
    """Return a stepper around a very small language model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, VOCABULARY))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Stepper(
        model, optimizer, loss_fn, micro_batch=budget, lengths=len, collate=pad, measure_noise=True,
        lr_rule="sqrt", base_size=16,
    )  # fmt: skip


def pad(examples: list[Tensor]) -> Tensor:
    """Return examples as the rows of one tensor."""
    return nn.utils.rnn.pad_sequence(examples, batch_first=True)


def loss_fn(model: nn.Module, tokens: Tensor) -> tuple[Tensor, int]:
    """Return the loss of every next token, summed, and how many there are."""
    logits, targets = model(tokens[:, :-1]), tokens[:, 1:]
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def follow(action: Callable[[], Any], package: Path = PACKAGE) -> Walk:
    """Return the files of a package that an action calls Python code of; returns to a caller are not counted."""
    files = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(package):
            files.append(path.relative_to(package).as_posix())

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(before)
    rooms = [room_of(file.removesuffix(".py").replace("/", ".")) for file in files]
    return Walk(dict(Counter(files)), count_changes(files), count_changes(rooms))


def count_changes(items: list[str]) -> int:
    """Return how often an item differs from the one before."""
    return sum(before != after for before, after in pairwise(items))


def walk_lines(walk: Walk) -> Iterator[str]:
    """Yield a walk as lines of text."""
    for file, calls in walk.calls.items():
        yield f"{calls:5} {file}"
    yield f"{len(walk.calls)} files, {walk.changes_of_file} changes of file, {walk.changes_of_room} of room"
