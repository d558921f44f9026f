"""One run: a model trained by a strategy until the clock says that the time is over."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, final

import numpy as np
import torch

from batchwright.step import Stepper

from .clocks import kind_of, make_clock
from .strategies import Strategy
from .tasks import LOSS, TASKS, mean_loss

Row = dict[str, Any]


@final
class Unit(NamedTuple):
    """One run to make; the horizon is relative to that of the task."""

    clock: str
    task: str
    strategy: str
    horizon: float
    seed: int

    def is_of(self, row: Row) -> bool:
        """Return whether a row is a finished run of it."""
        return "error" not in row and all(row[name] == value for name, value in self._asdict().items())


@final
class Stream:
    """Places of examples, epoch after epoch, in an order that depends only on the seed."""

    def __init__(self, num_examples: int, seed: int) -> None:
        self._num, self._rng = num_examples, np.random.default_rng(seed)
        self._left = np.empty(0, dtype=np.int64)

    def take(self, size: int) -> np.ndarray:
        """Return the next places; an epoch that ends inside a batch is followed by the next one."""
        while len(self._left) < size:
            self._left = np.concatenate([self._left, self._rng.permutation(self._num)])
        taken, self._left = self._left[:size], self._left[size:]
        return taken


def run(unit: Unit, scale: float = 1.0) -> Row:
    """Train, and return what was found.

    Args:
        unit: the run.
        scale: of all horizons, below 1 for a trial.
    """
    torch.set_num_threads(1)
    torch.manual_seed(unit.seed)
    task = TASKS[unit.task]
    data, model = task.load(), task.make()
    optimizer = task.make_optimizer(model)
    seconds = scale * unit.horizon * task.seconds[kind_of(unit.clock)]
    strategy = Strategy(unit.strategy, task, seconds)
    stepper = Stepper(model, optimizer, LOSS, **strategy.stepper_options)
    stream, clock = Stream(len(data.train[1]), unit.seed), make_clock(unit.clock)
    updates = examples = 0
    extra = 0.0  # seconds of experiments
    running = weighted = 0.0  # seconds of updates, and these times their sizes
    changes: list[tuple[float, int]] = [(0.0, strategy.size)]

    def take(num: int, size: int) -> list[Any]:
        return [data.batch(stream.take(size)) for _ in range(num)]

    others = np.random.default_rng(unit.seed + 1)  # for those who may look at other examples
    strategy.watch(model, lambda num: data.batch(others.integers(0, len(data.train[1]), num)))
    clock.start()
    while (began := clock.seconds) < seconds:
        extra += strategy.experiment(stepper, take, clock)
        began, read = clock.seconds, clock.stopwatch
        size = strategy.size
        for group in optimizer.param_groups:
            group["lr"] = task.lr * strategy.rate(began / seconds)
        report = stepper.step(data.batch(stream.take(size)))
        clock.passed(passes=report.num_micro_batches, examples=size)
        now = clock.seconds
        strategy.after(report, seconds=clock.stopwatch - read, gone=now / seconds)
        updates, examples = updates + 1, examples + size
        running, weighted = running + now - began, weighted + size * (now - began)
        if strategy.size != changes[-1][1]:
            changes.append((now / seconds, strategy.size))
        if not math.isfinite(report.loss):
            break
    clock.pause()
    return {
        "seconds": clock.seconds,
        "updates": updates,
        "examples": examples,
        "mean_size": weighted / running,
        "experiment_seconds": extra,
        "sizes": changes[-200:],
        "reasons": [f"{change.old} → {change.new}: {change.reason}" for change in strategy.controller.history[:12]],
        "loss": mean_loss(model, data.held_out),
        "train_loss": mean_loss(model, tuple(column[: len(data.held_out[1])] for column in data.train)),
    }
