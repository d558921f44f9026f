"""Arms whose batch changes on the way: tokens per update are a level, and each level has its own plan and graphs.

A new level is a new plan of static shapes and a new graphed ``Stepper``; the model and the optimizer stay, and the
graphs of the level before are freed. Capture is inside the clock, as everything else is. The learning rate follows the
root of the level, and the second moment of Adam keeps its half-life in tokens; both are meant for the base level. Ramps
that replace a decay keep the rate instead, as they are published.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any, final

import numpy as np
import torch
from _gpu import GIB, Device, Row

import batchwright as bw
from batchwright import size
from batchwright.size import learning_rate
from batchwright.step import Stepper, measure_size

from .arms import Arm, make_sampler, updates_of
from .corpus import Corpus, Made

PARTS = 1000  # of the time, in which schedules count
WARM_UP = 0.05
FACTORS_OF_LEVELS = (0.5, 1, 2, 4, 8)
# An update that measures noise runs without graphs, which on an H200 takes as long as eight that have them.
NOISE_EVERY = 64
EXPERIMENTS = (0.1, 0.3)  # when, in parts of the time
EXPERIMENT_BATCHES = 8  # to train on, and as many to compare losses on
NUM_PROBES = 6  # updates of one shape that a level is timed by; the first two are left out
# More tokens and updates than an H200 trains in a second, so that batches made before the clock suffice.
MOST_TOKENS_PER_SECOND, MOST_UPDATES_PER_SECOND = 900_000, 170

Pin = Callable[[list[Made], Device], list[Made]]


def decay(part: int) -> float:
    """Return the rate after so many thousandths of the time: up over the first 50, then down to 0.

    >>> [decay(part) for part in (0, 25, 50, 1000)]
    [0.0, 0.5, 1.0, 0.0]
    """
    gone = part / PARTS
    return min(gone / WARM_UP, (1 - gone) / (1 - WARM_UP))


@final
class Levels:
    """Trains an arm whose level changes.

    Args:
        arm: ``goodput-16-4096`` and the like: shapes of a plan, and the base level.
        corpus: what is trained on.
        device: where.
        optimizer: AdamW at the rate of the base level.
        seed: of the plans.
        seconds: of the whole run, for how many batches are made.
        make_stepper: returns a ``Stepper`` for a sampler, or for some shapes, with further options.
        pin: puts batches into pinned memory.
    """

    def __init__(
        self,
        arm: Arm,
        corpus: Corpus,
        device: Device,
        *,
        optimizer: torch.optim.Optimizer,
        seed: int,
        seconds: float,
        make_stepper: Callable[..., Stepper],
        pin: Pin,
    ) -> None:
        self._arm, self._device, self._optimizer = arm, device, optimizer
        self._make_stepper = make_stepper
        count, self.base = arm.numbers
        self._rates = [group["lr"] for group in optimizer.param_groups]
        self._betas = [group["betas"] for group in optimizer.param_groups]
        self._made: dict[int, list[Made]] = {}
        self._samplers: dict[int, Any] = {}
        for level in (int(self.base * factor) for factor in FACTORS_OF_LEVELS):
            of_level = Arm("graphs", (count, level))
            limit = int(seconds * min(MOST_UPDATES_PER_SECOND, MOST_TOKENS_PER_SECOND / level))
            updates = updates_of(of_level, corpus, seed=seed + level, limit=max(2 * EXPERIMENT_BATCHES, limit))
            self._made[level] = pin([corpus.make(part) for (part,) in updates], device)
            self._samplers[level] = make_sampler(of_level, corpus, seed=seed + level)
        self._next = dict.fromkeys(self._made, 0)
        self._experiments = list(EXPERIMENTS) if arm.kind == "measured" else []
        self._rate_of: Callable[[int], float] = decay
        self._stepper: Stepper | None = None
        self._level = 0
        self._figures: Row = Counter()
        self._controller: bw.BatchSizeController | None = None
        self.trained: list[Made] = []
        self.changes: list[tuple[float, int]] = []
        self.peak_bytes = 0

    def step(self, gone: float) -> None:
        """Run one update of the level in force; decide the level after it."""
        part = min(PARTS, int(PARTS * gone))
        if self._controller is None:
            self._controller = self._make_controller()
        self._move_to(self._controller.size, gone)
        assert self._stepper is not None
        if self._experiments and gone >= self._experiments[0]:
            self._experiments = [moment for moment in self._experiments if moment > gone]
            self._experiment(self._stepper, self._controller)
            self._move_to(self._controller.size, gone)
        self._set_rate(part)
        made = self._take()
        report = self._stepper.step(made.batch)
        self.trained.append(made)
        self.peak_bytes = max(self.peak_bytes, report.peak_bytes or 0)
        self._figures["graphed_updates"] += bool(report.graphed)
        if self._arm.kind == "goodput":
            self._show_noise(report, made)
        elif self._arm.kind != "measured":
            self._controller.observe(epoch=part)

    def describe(self) -> Row:
        """Return the sums over the graphs of all levels."""
        self._close()
        found = dict(self._figures)
        history = [] if self._controller is None else self._controller.history
        reasons = [f"{change.old} to {change.new}: {change.reason}" for change in history[:20]]
        return {**found, "stepper_peak_gib": self.peak_bytes / GIB, "levels": self.changes, "reasons": reasons}

    def _make_controller(self) -> bw.BatchSizeController:
        base, after = self.base, int(WARM_UP * PARTS)
        limits: dict[str, Any] = {"min_size": base, "max_size": max(self._made), "initial": base}
        kind, most = self._arm.kind, max(self._made) // base
        if kind == "smith":
            # For Adam the noise of an update falls with the root of the batch, so the batch grows as the square.
            policy = size.from_lr(decay, start=base, power=2.0, after=after, max_factor=most)
            self._rate_of = lambda part: decay(part) * _held(part, after, most)
        elif kind == "seesaw":
            policy, self._rate_of = size.seesaw(decay, start=base, after=after, max_factor=most)
        elif kind == "warmup":
            policy = size.milestones({0: base, 125: 2 * base, 250: 4 * base, 500: 8 * base}, per="epoch")
        elif kind == "measured":
            policy = size.measured()
        else:
            limits["min_size"] = min(self._made)
            # As many candidates as levels, each twice the one before.
            policy = size.goodput(
                self._time_levels(), base_size=base, unit="tokens", smallest=min(self._made), largest=max(self._made),
                num_candidates=len(self._made),
            )  # fmt: skip
        return bw.BatchSizeController(policy, **limits)

    @property
    def _follows(self) -> bool:
        """Return whether the rate follows the level; ramps in place of a decay keep it."""
        return self._arm.kind not in ("smith", "seesaw")

    def _set_rate(self, part: int) -> None:
        factor = learning_rate.sqrt(self._level, self.base) if self._follows else 1.0
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            # A captured update reads a tensor; a new object would leave it with the old rate.
            value = rate * factor * self._rate_of(part)
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(value)
            else:
                group["lr"] = value

    def _move_to(self, wanted: float, gone: float) -> None:
        level = min(self._made, key=lambda known: abs(np.log(known / wanted)))
        if level == self._level:
            return
        self._close()
        self._level = level
        self._set_betas()
        noise = {"measure_noise": NOISE_EVERY, **noise_options()} if self._arm.kind == "goodput" else {}
        self._stepper = self._make_stepper(self._samplers[level], **noise)
        self.changes.append((gone, level))

    def _set_betas(self) -> None:
        """Keep the half-life of the second moment in tokens; a new stepper captures the update anew."""
        for group, (first, second) in zip(self._optimizer.param_groups, self._betas, strict=True):
            group["betas"] = (first, second ** (self._level / self.base) if self._follows else second)

    def _close(self) -> None:
        """Free the graphs of a level, and keep their figures."""
        if self._stepper is None:
            return
        summary = self._stepper.graph_summary()
        self._figures["capture_seconds"] += summary.capture_seconds
        self._figures["num_captures"] += summary.num_captures
        self._figures["pool_bytes"] = max(self._figures["pool_bytes"], summary.pool_bytes)
        self._stepper = None
        self._optimizer.zero_grad(set_to_none=True)
        self._device.free()

    def _take(self) -> Made:
        place = self._next[self._level]
        self._next[self._level] = place + 1
        return self._made[self._level][place % len(self._made[self._level])]

    def _show_noise(self, report: Any, made: Made) -> None:
        assert self._controller is not None
        noise = report.noise
        if noise is None and len(self.trained) % NOISE_EVERY:
            return  # the loss is read from the device only where the policy has something to read
        observation = {**report.observation(), "batch_tokens": made.padded_tokens}
        self._controller.observe(**observation)

    def _time_levels(self) -> bw.TimeModel:
        """Time every level by a few graphed updates of its most frequent shape, on its own batches."""
        shapes, seconds = [], []
        for level in self._made:
            self._level = level
            self._set_betas()
            self._set_rate(0)
            shape = Counter(_shape_of(made) for made in self._made[level]).most_common(1)[0][0]
            of_shape = [made for made in self._made[level] if _shape_of(made) == shape][:NUM_PROBES]
            self._stepper = self._make_stepper([shape])
            times = [self._timed(made) for made in (of_shape * NUM_PROBES)[:NUM_PROBES]]
            shapes.append((shape[0], sum(shape[1:])))
            seconds.append(float(np.median(times[2:])))
            self._close()
        self._level = 0
        self._figures["probe_updates"] = NUM_PROBES * len(self._made)
        return bw.TimeModel.fit(np.array(shapes), np.array(seconds))

    def _timed(self, made: Made) -> float:
        assert self._stepper is not None
        self._device.synchronize()
        start = time.perf_counter()
        self._stepper.step(made.batch)
        self._device.synchronize()
        return time.perf_counter() - start

    def _experiment(self, stepper: Stepper, controller: bw.BatchSizeController) -> None:
        batches, held_out = ([self._take().batch for _ in range(EXPERIMENT_BATCHES)] for _ in range(2))
        result = measure_size(stepper, batches, factors=(1, 2, 4), evaluate=held_out)
        self._figures["experiment_seconds"] += result.total_seconds
        controller.observe(**result.observation())


def noise_options() -> Row:
    """Return how noise is measured beside the gradient of the update itself."""
    return {"noise_from": "vectors"}


def _shape_of(made: Made) -> tuple[int, ...]:
    rows, width = made.batch["input_ids"].shape
    labels = made.batch["labels"].shape[1]
    return (rows, width) if made.padded_tokens == rows * width else (rows, width, labels)


def _held(part: int, after: int, most: float) -> float:
    """Return what the growing batch takes off the decay, until the batch is at its largest."""
    if part <= after:
        return 1.0
    fallen = decay(part)
    return float(min(1 / fallen, most**0.5)) if fallen > 0 else 1.0
