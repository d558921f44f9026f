"""Gathering: batches become the gradient of one update, on all ranks or on none."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from .._checks import is_number
from .._ranks import Ranks, mark_of
from ..errors import ArgumentError
from ._gradients import Trained, attempt
from ._optimizers import check_gradients, forget_unscaling
from ._runner import Runner
from ._settings import Settings
from .measuring._stopwatch import Lap
from .memory.budget_tracker import Feedback
from .memory.monitor import MemoryMonitor
from .noise import Meter, Norms
from .oom import Snapshot, devices_of
from .report import Pending, Summary, Totals, check_summary, check_weight, num_compilations
from .splitting import LogicalBatch


@final
class Gatherer:
    """Adds up the gradients of batches until an update takes them; a batch that fails on one rank counts on none.

    Attributes:
        trained: the parameters that the optimizer updates.
        runner: runs micro-batches.
        clock: the host's, in seconds that never go back.
        start_lap: begins to time an update on CUDA devices, None without them.
        meter: measures gradient noise, None if nobody asked for it.
        pending: the update that was begun, None between updates.
        num_updates: that were applied so far.
        device: that the first parameter lies on.
        is_running: whether ``loss_fn`` runs a batch.
    """

    def __init__(
        self,
        settings: Settings,
        ranks: Ranks,
        trained: Trained,
        *,
        meter: Meter | None,
        memory: MemoryMonitor | None,
        feedback: Feedback | None,
    ) -> None:
        self._settings = settings
        self._ranks = ranks
        self._memory = memory
        self._feedback = feedback
        self._is_warned = False
        self.is_running = False
        self.trained = trained
        self.device = trained.parameters[0].device
        self.runner = Runner(settings, ranks, self.device, feedback)
        devices = dict.fromkeys([self.device, *devices_of(ranks.module)])
        on_cuda = [device for device in devices if device.type == "cuda"]
        self.clock: Callable[[], float] = time.perf_counter
        self.start_lap: Callable[[], Lap] | None = partial(Lap, on_cuda) if on_cuda else None
        self.meter = meter
        self.pending: Pending | None = None
        self.num_updates = 0

    def add(self, batch: Any, total_weight: float | None) -> None:
        """Run a batch and add its gradient; if it fails on any rank, leave everything as it was, and raise on all."""
        if self.is_running:
            raise ArgumentError("a Stepper runs one batch at a time; loss_fn and other threads must not call it")
        with self.running():
            self._add(batch, total_weight)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Refuse batches that come before this one has run."""
        self.is_running = True
        try:
            yield
        finally:
            self.is_running = False

    def _add(self, batch: Any, total_weight: float | None) -> None:
        snapshot = self.runner.snapshot()
        prepared, error = attempt(lambda: self._prepare(batch, total_weight))
        if prepared is not None:
            total_weight = prepared.total_weight  # a tensor may change later, and names its device
        opened: _Opened | None = None
        totals: Totals | None = None
        is_run = False
        try:
            if self._ranks.meet_in_forward:  # where a failed rank would be waited for
                (is_same,) = self._ranks.agree(error, self.device, marks=[mark_of(total_weight)])
                self._check_total(is_same)
            if prepared is not None:
                opened, error = attempt(lambda: self._open(prepared))
            passes = self.runner.passes
            if passes is not None and passes.is_together:  # likewise
                (is_same,) = self._ranks.agree(error, self.device, marks=[mark_of(total_weight)])
                self._check_total(is_same)
            if prepared is not None and opened is not None:
                pending, norms = opened.pending, self._norms(opened.pending)
                totals, error = attempt(lambda: self._run(prepared.logical, pending, snapshot, norms))
                if error is not None and self._ranks.meet_in_forward:
                    raise error
            same = self._ranks.agree(error, self.device, marks=self._marks(totals, total_weight))
            self._check_marks(same[1:])
            is_run = True
            if opened is not None and opened.taken is not None:
                opened.pending.gradients.put_back(opened.taken)
        except BaseException:
            error = None  # its traceback holds this frame
            snapshot.restore()
            if opened is not None:
                self._undo(opened, is_run=is_run)
            raise
        assert opened is not None
        assert totals is not None
        assert prepared is not None
        totals.num_tokens = prepared.num_tokens
        opened.pending.totals.merge(totals)
        opened.pending.same_names &= same[0]
        self.pending = opened.pending

    def _run(self, logical: LogicalBatch, pending: Pending, snapshot: Snapshot, norms: Norms | None) -> Totals:
        passes = self.runner.passes
        with nullcontext() if passes is None else passes.in_company():
            return self.runner.run(logical, pending, snapshot, norms)

    def _marks(self, totals: Totals | None, total_weight: float | None) -> list[int]:
        """Return numbers that are compared over the ranks."""
        if self._ranks.world_size == 1:
            return [0] * 6
        names = 0 if totals is None else mark_of(sorted(totals.metrics, key=repr))
        num_hooked = self.trained.gradients.num_hooked
        return [names, mark_of(total_weight), num_hooked, *self.trained.marks()]

    def _check_total(self, is_same: bool) -> None:
        if not is_same:
            raise ArgumentError("total_weight differs between ranks; it is the weight of the update over all ranks")

    def _check_marks(self, are_equal: list[bool]) -> None:
        """Refuse, on all ranks alike, what differs between them."""
        same_total, same_hooks, *same = are_equal
        self._check_total(same_total)
        if not same_hooks:
            raise ArgumentError("parameters have hooks on some ranks only; register them on all ranks alike")
        self.trained.check_marks(same)

    def _prepare(self, batch: Any, total_weight: float | None) -> _Prepared:
        """Do what may be refused before anything is changed."""
        pending = self.pending
        if pending is not None and pending.stage != "gathered":
            raise ArgumentError("the gradient was reduced already; call update() before the next accumulate(batch)")
        if total_weight is not None:
            total_weight = check_weight(_as_weight("total_weight", total_weight))
        if pending is not None and pending.total_weight != total_weight:
            raise ArgumentError(
                f"total_weight is {total_weight}, but an earlier accumulate of the same update had "
                f"{pending.total_weight}; give the weight of the whole update in every call"
            )
        if pending is not None:
            self.check_same_parameters()
            pending.gradients.check_untouched()
        elif self.trained.refresh():
            self.runner.look_at_model()
            if self.meter is not None:
                self.meter.watch(self.trained.named())
        logical = self._settings.wrap(batch)
        if self._ranks.meet_in_forward:
            self.runner.cut(logical, None)
        weight_of = self._settings.weight_of
        asked = None if weight_of is None else _as_weight("weight_of(batch)", weight_of(batch))
        return _Prepared(logical, asked, self._settings.count_tokens(batch, logical), total_weight)

    def check_same_parameters(self) -> None:
        """Refuse to go on with an update after the optimizer was given other parameters."""
        if self.trained.has_changed():
            raise ArgumentError(
                "the optimizer trains other parameters than when the update began; freeze or unfreeze between updates, "
                "or call abandon() first"
            )

    def _open(self, prepared: _Prepared) -> _Opened:
        """Begin an update, or take the gradients of the one that runs aside."""
        pending = self.pending
        asked_before = None if pending is None else pending.asked_weight
        taken = None if pending is None else pending.gradients.take()
        if pending is None:
            gradients = self.trained.gradients
            self._is_warned |= gradients.begin(self._settings.existing_gradients, is_warned=self._is_warned)
            index, rest = divmod(self.num_updates, self._settings.measure_noise or 1)
            is_due = self.meter is not None and rest == 0
            is_cut = self.meter is not None and is_due and self.meter.begin(index)
            lap = None if self.start_lap is None else self.start_lap()
            pending = Pending(gradients, self.clock(), lap, prepared.total_weight, is_measured=is_due)
            pending.noise_seed = self.num_updates if is_cut else None
            pending.num_compiled_before = num_compilations()
            if self._memory is not None and self._feedback is None:
                self._memory.reset_peak()
        if prepared.asked is not None:
            pending.asked_weight = (asked_before or 0.0) + prepared.asked
        measured = None if self.meter is None else self.meter.norms.total
        return _Opened(pending, taken, asked_before, pending.divisor, pending.num_replayed, measured)

    def _undo(self, opened: _Opened, *, is_run: bool) -> None:
        """Drop what a batch has added, and put back what was there before it, unless ``put_back`` failed and did so."""
        pending = opened.pending
        if not is_run:
            pending.gradients.drop()
        if opened.taken is None:
            pending.gradients.put_existing_back()
        elif not is_run:
            pending.gradients.put_back(opened.taken)
        if opened.taken is not None:
            pending.gradients.watch()
        pending.asked_weight, pending.divisor = opened.asked_before, opened.divisor_before
        pending.num_replayed = opened.replayed_before
        if self.meter is not None:
            self.meter.norms.reset(opened.measured_before)

    def _norms(self, pending: Pending) -> Norms | None:
        return self.meter.norms if self.meter is not None and pending.is_measured else None

    def reduce(self, pending: Pending) -> None:
        """Turn sums into the gradient of the mean, on all ranks; after an error, the update is abandoned."""
        try:
            summary = pending.summary = self._summarize(pending)
            check_summary(summary)
            weight = summary.weight if pending.total_weight is None else pending.total_weight
            self.runner.usual_weight = summary.weight / self._ranks.world_size
            pending.gradients.finish(self._ranks, (pending.divisor or 1.0) / weight)
            self._measure(pending, summary, weight)
            pending.gradients.run_hooks(self._ranks, self.device)
            pending.gradients.add_existing(self._ranks)
            check_gradients(self.trained.parameters)
            pending.stage = "reduced"
        except BaseException:
            self.abandon()
            raise

    def _measure(self, pending: Pending, summary: Summary, weight: float) -> None:
        """Estimate gradient noise while ``.grad`` holds the gradient of the update."""
        if self.meter is None or summary.squares is None:
            return
        self.meter.settle(self._ranks, self.device)
        # Hooks saw gradients of loss_sum / divisor; noise is that of the per-example gradients of B × loss / W.
        scale = 1.0 if self._settings.scaler is None else float(self._settings.scaler.get_scale())
        pending.noise = self.meter.add(
            summary.squares,
            q_factor=(summary.num_examples / weight / scale) ** 2,
            gb_factor=scale**-2,
            num_examples=summary.num_examples,
            num_parts=summary.num_micro_batches,
        )

    def _summarize(self, pending: Pending) -> Summary:
        """Return the sums over all ranks; one device copies nothing to the host but a weight that lies on it."""
        totals, asked = pending.totals, pending.asked_weight
        norms = self._norms(pending)
        squares = None if norms is None or norms.total is None else norms.total * (pending.divisor or 1.0) ** 2
        if self._ranks.world_size == 1:
            return Summary(
                float(totals.weight), totals.loss, totals.num_examples, totals.num_micro_batches, pending.ooms,
                dict(totals.metrics), squares, asked, totals.num_spoiled, totals.num_tokens,
            )  # fmt: skip
        names = sorted(totals.metrics, key=repr)
        if not pending.same_names:
            names = sorted({name for found in self._ranks.gather(names) for name in found}, key=repr)
        counts = [totals.num_examples, totals.num_micro_batches, pending.ooms, totals.num_spoiled]
        counts += [totals.num_tokens or 0, int(totals.num_tokens is None)]
        weight, asked_sum, loss, num, parts, ooms, spoiled, tokens, num_unknown, *rest = self._ranks.sum(
            [totals.weight, asked or 0.0, totals.loss, *counts]
            + [totals.metrics.get(name, 0.0) for name in names]
            + ([] if norms is None else [0.0] * norms.num_groups if squares is None else list(squares)),
            self.device,
        )
        metrics = dict(zip(names, rest, strict=False))
        summed = torch.tensor(rest[len(names) :], dtype=torch.float64) if norms is not None else None
        return Summary(
            weight, loss, round(num), round(parts), round(ooms), metrics, summed,
            None if asked is None else asked_sum, round(spoiled), None if num_unknown else round(tokens),
        )  # fmt: skip

    def stop(self, pending: Pending) -> Lap | float:
        """Return the seconds of an update that ends here; on a CUDA device they are read later."""
        if pending.lap is None:
            return self.clock() - pending.started
        pending.lap.stop()
        return pending.lap

    def end(self) -> None:
        """Leave no trace of an update that was applied."""
        self.trained.gradients.drop()
        self._ranks.share_buffers()
        self.num_updates += 1
        self.pending = None
        if self.meter is not None:
            self.meter.finish()

    def abandon(self) -> None:
        """Drop the update that was begun, with its gradients; the next one can begin. Without one, nothing happens."""
        pending, self.pending = self.pending, None
        if pending is None:
            return
        pending.gradients.drop()
        pending.gradients.put_existing_back()
        if self.meter is not None:
            self.meter.finish()
        if self._settings.scaler is not None:
            forget_unscaling(self._settings.scaler, self.trained.optimizer)


class _Prepared(NamedTuple):
    """A batch that may be run."""

    logical: LogicalBatch
    asked: float | None  # what weight_of counted
    num_tokens: int | None
    total_weight: float | None  # as a plain number


def _as_weight(name: str, value: Any) -> float:
    """Return a weight that was counted before a batch runs, as a plain number."""
    found = value.item() if isinstance(value, Tensor | np.ndarray) and math.prod(value.shape) == 1 else value
    if not (is_number(found) or isinstance(found, bool)):
        what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor | np.ndarray) else repr(value)
        raise ArgumentError(f"{name} must be a single number, the examples or tokens that count, got {what}")
    return float(found)


class _Opened(NamedTuple):
    """What a failed batch needs to be undone."""

    pending: Pending
    taken: list[Tensor | None] | None  # gradients of earlier batches, None for the first of an update
    asked_before: float | None
    divisor_before: float | None
    replayed_before: int
    measured_before: Tensor | None
