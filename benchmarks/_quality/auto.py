"""The arms without a batch size: updates run eagerly, and a policy decides how many texts the next one has.

``auto`` asks ``size.goodput``, ``trials`` asks ``size.measured``, which reads experiments of ``step.measure_size``.
These take at most the share of the time that ``size.ExperimentBudget`` has by itself; ``trials_early`` lets them take
half of it.

Texts of about the same length share an update, as in the grouped arms. The rate follows the root of the size and Adam's
second moment keeps its half-life, both meant for the first size; ``auto_betas`` leaves the second moment alone. Batches
are made while the clock stands still, some at a time, as workers would make them; all that the policy costs (noise,
reading the loss at every update) is inside the clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
from _gpu import Device, Row
from torch import nn

import batchwright as bw
from batchwright import size
from batchwright.step import Stepper, StepReport, measure_size

from .arms import WINDOW, Arm
from .corpus import Batch, Corpus, Made, Part

# As ``controller="auto"`` of the trainers measures it.
NOISE: Row = {"measure_noise": 4, "noise_from": "vectors"}
LARGEST = 64  # times the first size
# Batches that are made at a time, while the clock stands still and the device with it: that drains the device, which
# runs behind the host in all other arms. So there are twice as many each time, as long as the size stays.
AHEAD, MOST_AHEAD = 48, 768
SHARES = {"trials": 0.05, "trials_early": 0.5}
FACTORS = (1, 2, 4)
# Batches to train on, and groups of them to compare losses on; batches of a group can be joined to one.
EXPERIMENT_BATCHES, HELD_OUT = 16, 4


@final
class Auto:
    """Trains at sizes that a controller decides.

    Args:
        arm: ``auto-32``, ``auto_betas-32``, ``trials-32`` or ``trials_early-32``: the first size.
        corpus: what is trained on.
        device: where.
        model: that is trained.
        optimizer: at the rate of the first size.
        loss_fn: of ``Stepper``.
        clip_norm: of ``Stepper``.
        seed: of the order.
        pin: puts batches into pinned memory.
    """

    def __init__(
        self,
        arm: Arm,
        corpus: Corpus,
        device: Device,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Any,
        clip_norm: float,
        seed: int,
        pin: Callable[[list[Made], Device], list[Made]],
    ) -> None:
        (base,) = arm.numbers
        self._corpus, self._device, self._pin = corpus, device, pin
        self._rng = np.random.default_rng(seed)
        self._left = np.empty(0, dtype=np.int64)
        self._batches: deque[np.ndarray] = deque()
        self._ready: deque[tuple[np.ndarray, Made]] = deque()
        # Padded tokens: padding takes time too. The labels of a decoder alone are its inputs.
        columns = ("input_ids", "labels")[: len(corpus.columns)]
        self._stepper = Stepper(
            model, optimizer, loss_fn, clip_norm=clip_norm, autocast=torch.bfloat16, lr_rule="sqrt",
            beta2_rule=None if arm.kind == "auto_betas" else "half_life", base_size=base,
            **({} if arm.kind in SHARES else NOISE),
            tokens_of=lambda batch: sum(batch[column].numel() for column in columns),
        )  # fmt: skip
        limits = {"min_size": max(2, base // 8), "max_size": LARGEST * base, "initial": base}
        policy = size.measured() if arm.kind in SHARES else size.goodput()
        self._controller = bw.BatchSizeController(policy, **limits)
        self._budget = size.ExperimentBudget(SHARES[arm.kind]) if arm.kind in SHARES else None
        self._ahead = AHEAD
        self._reasons: list[str] = []
        self._report: StepReport | None = None
        self._size = 0
        self.trained: list[Made] = []
        self.peak_bytes = 0

    @property
    def is_ready(self) -> bool:
        """Say whether a batch of the size in force is there."""
        return bool(self._ready) and self._controller.size == self._size

    def make_ready(self) -> None:
        """Make some batches: of a window of texts, sorted and cut, or of a new one where the size has changed."""
        if self._controller.size != self._size:
            self._cut(self._controller.size)
            self._ahead = AHEAD
        while len(self._batches) < self._ahead:
            self._add_window(self._size)
        cuts = [self._batches.popleft() for _ in range(self._ahead)]
        self._ahead = min(2 * self._ahead, MOST_AHEAD)
        made = self._pin([self._corpus.make(Part(cut)) for cut in cuts], self._device)
        self._ready.extend(zip(cuts, made, strict=True))

    def take(self) -> Made:
        """Return the next batch that is ready."""
        return self._ready.popleft()[1]

    @property
    def is_due(self) -> bool:
        """Say whether it is time for an experiment."""
        return self._budget is not None and self._budget.allows(EXPERIMENT_BATCHES, FACTORS)

    def take_experiment(self) -> tuple[list[Batch], list[Batch]]:
        """Return batches to train on and batches to compare losses on."""
        number, most = self._controller.size, max(FACTORS)
        groups = [self._take_group(number * most) for _ in range(EXPERIMENT_BATCHES // most + HELD_OUT)]
        parts = [[_rows(group, at, number) for at in range(0, number * most, number)] for group in groups[HELD_OUT:]]
        return [part for group in parts for part in group], groups[:HELD_OUT]

    def _take_group(self, number: int) -> Batch:
        self._cut(number)
        return self._corpus.make(Part(self._batches.popleft())).batch

    def experiment(self, batches: list[Batch], held_out: list[Batch]) -> None:
        """Branch training at 1, 2 and 4 times the size in force, and let the policy read it."""
        train, test = ([self._sent(batch) for batch in found] for found in (batches, held_out))
        result = measure_size(self._stepper, train, factors=FACTORS, evaluate=test)
        before = self._controller.size
        self._controller.observe(**result.observation())
        assert self._budget is not None
        counts = {"num_batches": EXPERIMENT_BATCHES, "factors": FACTORS}
        has_grown = self._controller.size > before
        self._budget = self._budget.after_experiment(result.total_seconds, **counts, has_grown=has_grown)
        self._reasons.append(f"{before} to {self._controller.size} after {result.total_seconds:.2f} s: {result}")

    def _sent(self, batch: Batch) -> Batch:
        return {name: tensor.to(self._device.name, non_blocking=True) for name, tensor in batch.items()}

    def _cut(self, number: int) -> None:
        unused = [*(cut for cut, _ in self._ready), *self._batches]
        self._ready.clear()
        rest = self._rng.permutation(np.concatenate([*unused, np.empty(0, dtype=np.int64)]))
        self._left, self._size = np.concatenate([rest, self._left]), number
        self._batches.clear()
        self._add_window(number)

    def _add_window(self, number: int) -> None:
        """Add a window of texts, sorted and cut."""
        while len(self._left) < number:
            self._left = np.concatenate([self._left, self._rng.permutation(len(self._corpus.lengths))])
        num = min(len(self._left) // number, WINDOW) * number
        window, self._left = self._left[:num], self._left[num:]
        order = window[np.lexsort(self._corpus.lengths[window].T[::-1])]
        batches = np.split(order, range(number, num, number))
        self._batches.extend(batches[place] for place in self._rng.permutation(len(batches)))

    def __call__(self, update: Sequence[Made]) -> None:
        """Run an update, and let the policy see it."""
        (made,) = update
        report, before = self._stepper.step(self._sent(made.batch)), self._report
        self._report = report
        if before is not None and self._budget is not None:
            self._budget = self._budget.after_update(before.seconds)
        elif before is not None:
            # That of the update before: its values are there, and the host need not wait for the device.
            self._controller.observe(**before.observation())
        self.trained.append(made)
        self.peak_bytes = max(self.peak_bytes, report.peak_bytes or 0)

    def describe(self) -> Row:
        """Return the sizes and their reasons."""
        sizes = [made.num_examples for made in self.trained]
        starts = [place for place, number in enumerate(sizes) if place == 0 or number != sizes[place - 1]]
        history = self._controller.history[:30]
        return {
            "sizes": [(place, sizes[place]) for place in starts][:60],
            "reasons": [*self._reasons, *(f"{change.old} to {change.new}: {change.reason}" for change in history)],
        }


def _rows(batch: Batch, start: int, num: int) -> Batch:
    return {name: tensor[start : start + num] for name, tensor in batch.items()}
