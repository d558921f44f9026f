"""The runner of a Stepper: it runs the micro-batches of a logical batch, again and smaller until they fit."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias, final

import numpy as np
import torch

from .._ranks import Ranks
from ..errors import ArgumentError, DoesNotFitError
from ..plan import PadTo
from ._copies import Copied
from ._means import MeanCheck
from ._settings import Settings, required
from .filler import ROW_WEIGHT, Filler, count_rows
from .graphs.graphed import Graphs
from .losses import needs_whole_batch
from .memory.budget_tracker import Feedback
from .memory.fit_to_memory import MicroLimit
from .noise import Norms
from .oom import Buffers, Snapshot, devices_of, does_not_fit, free_memory, is_out_of_memory, split_doubts
from .report import MicroSums, Pending, Totals, is_on_host, power_of_two
from .splitting import LogicalBatch, Part, cost_of, near_equal, split
from .whole_batches._passes import AgainError, Passes, Turn
from .whole_batches.loss import NUM_PIECES, WholeBatchLoss, modules_of

Parts: TypeAlias = Sequence[Part]
_Failure: TypeAlias = tuple[float, Part]  # cost and examples of the micro-batch that did not fit


@final
class Runner:
    """Runs forward and backward of every micro-batch and remembers how large one may be.

    Attributes:
        limit: how large a micro-batch may be, as far as is known.
        usual_weight: of an update on this rank, None before the first one.
        graphs: replay micro-batches, None without them.
        passes: run a ``WholeBatchLoss``, None for any other loss.
        pad_to: has the static shapes that lists of examples are cut into, None to cut by cost.
    """

    def __init__(self, settings: Settings, ranks: Ranks, device: torch.device, feedback: Feedback | None) -> None:
        self._settings = settings
        self._ranks = ranks
        self._device = device
        self._feedback = feedback
        self._compares = needs_whole_batch(settings.loss_fn)
        self._warned = False
        self.limit = MicroLimit()
        self.usual_weight: float | None = None
        self.graphs: Graphs | None = None
        self.pad_to: PadTo | None = None
        self._has_weights = False  # of rows, some of which may be filler
        is_half = settings.autocast is not None
        self._filler = Filler(self._forward, ranks.module, lambda: self.snapshot().restore, is_half=is_half)
        self.look_at_model()
        can_try = ranks.world_size == 1 and not self._compares
        self._means = MeanCheck(self._forward, ranks.module, is_half=is_half, can_try=can_try)
        self.passes: Passes | None = None
        if isinstance(settings.loss_fn, WholeBatchLoss):
            self.passes = Passes(settings, ranks, device, self.snapshot, lambda: Snapshot(None, self._devices))

    def look_at_model(self) -> None:
        """Find the buffers and devices of the model; call it when the model has other parts than before."""
        self._devices = devices_of(self._ranks.module)
        self._buffers = Buffers(self._ranks.module, *modules_of(self._settings.loss_fn))
        self._doubts = split_doubts(self._ranks.module)

    def snapshot(self) -> Snapshot:
        """Return the random state and the model's buffers now."""
        if self._buffers.is_outdated:
            self.look_at_model()
        return Snapshot(self._buffers, self._devices)

    def cut(self, logical: LogicalBatch, noise_seed: int | None) -> Parts:
        """Return the micro-batches of a logical batch, by the setting and by what has fitted so far.

        Args:
            logical: the batch.
            noise_seed: seeds the random subsets that noise is measured on; None measures no noise.
        """
        order = None
        if noise_seed is not None:
            # Parts sorted by length are not random samples: their gradients differ by more than noise.
            order = np.random.default_rng([noise_seed]).permutation(logical.num_examples)
        limit, budget, least = self._most_cost, self._settings.cost_budget, self._least_parts(noise_seed)
        parts: Parts | None = None
        if order is not None and self._settings.noise_parts is not None and logical.refusal is None:
            exact = near_equal(order, logical.num_examples, min(least, logical.num_examples))
            parts = exact if max(self._cost(logical, part) for part in exact) <= limit else None
        if parts is None:
            parts = split(logical, budget=budget, limit=limit, order=order, least_parts=least, pad_to=self.pad_to)
        self._check(parts)
        return parts

    def run(self, logical: LogicalBatch, pending: Pending, snapshot: Snapshot, norms: Norms | None) -> Totals:
        """Add the gradient of a logical batch to that of an update and return its sums.

        Args:
            logical: the batch.
            pending: the update it belongs to.
            snapshot: the state that a second attempt begins with.
            norms: measure gradient noise if not None.
        """
        measured = None if norms is None else norms.total
        seed = pending.noise_seed
        if self._feedback is not None:
            self._feedback.begin()
        num_replayed = 0
        if self.graphs is not None:
            self.graphs.begin()
            num_replayed = self.graphs.num_replayed
        versions, replayed_before = logical.versions(), pending.num_replayed
        while True:
            parts = self.cut(logical, seed)
            num_cut = len(parts)
            if norms is not None:
                parts = norms.arrange(parts, lambda part: self._cost(logical, part) <= self._most_cost)
                self._check(parts)
            num_parts = self._agree_on_parts(parts)
            outcome = self._attempt(logical, parts, num_parts, pending, norms)
            if isinstance(outcome, Totals) and not self._is_spoiled(outcome, logical, parts, pending):
                is_replayed = self.graphs is not None and self.graphs.num_replayed > num_replayed
                self._learn(logical, parts, is_cut=num_cut > self._least_parts(seed), is_replayed=is_replayed)
                return outcome
            if logical.versions() != versions:
                raise ArgumentError(
                    "loss_fn or collate changed the batch in place, so it cannot run again after out of memory; let it "
                    "work on a copy, or pass on_oom='raise'"
                )
            pending.gradients.drop()
            pending.num_replayed = replayed_before
            if norms is not None:
                norms.reset(measured)
            snapshot.restore()
            free_memory(self._devices)
            if isinstance(outcome, tuple):
                pending.ooms += 1
                if self.graphs is None or not self.graphs.make_room():
                    self._note_failure(outcome, logical, pending)

    def _note_failure(self, failure: _Failure, logical: LogicalBatch, pending: Pending) -> None:
        if pending.totals.num_micro_batches == 0:
            pending.divisor = None  # so that the bits are those of a run that began with smaller pieces
        self._lower_limit(failure, logical)

    def _is_spoiled(self, totals: Totals, logical: LogicalBatch, parts: Parts, pending: Pending) -> bool:
        """Return whether a batch must run again, although it fitted, and settle how."""
        if not self._ranks.can_retry:
            return False
        if self._has_weights and self._counts_filler(totals, logical, parts):
            return True
        if totals.num_doubtful and not pending.leaves_out and not pending.gradients.are_finite:
            pending.leaves_out = True
            return True
        is_estimate = pending.total_weight is None and pending.asked_weight is None and len(parts) > 1
        if not is_estimate or pending.divisor is None or not (totals.are_weights_on_host or self._needs_exact(pending)):
            return False
        weight = float(totals.weight)
        # How far off the estimate may be: gradients in float16 span few powers of two, others many.
        most = 2.0**3 if self._needs_exact(pending) else 2.0**60
        if not 0 < weight < math.inf or 1 / most <= weight / pending.divisor <= most:
            return False
        if pending.totals.num_micro_batches > 0:
            raise ArgumentError(
                f"a batch of weight {weight:g} follows one of about {pending.divisor:g} in the same update, too far "
                "apart for one scale of the gradients; give total_weight= or weight_of="
            )
        pending.divisor = power_of_two(weight)
        return True

    def _counts_filler(self, totals: Totals, logical: LogicalBatch, parts: Parts) -> bool:
        """Return whether the loss counted filler rows, which is seen when the first of them come."""
        is_first = self._filler.is_unknown and totals.num_filler > 0
        return is_first and any(map(self._filler.is_counted, logical.take_all(parts)))

    def _needs_exact(self, pending: Pending) -> bool:
        """Return whether gradients have the short range of float16."""
        return self._settings.autocast is torch.float16 or pending.gradients.has_float16

    @property
    def _most_cost(self) -> float:
        factor = 1.0 if self._feedback is None else self._feedback.factor
        return min(self._settings.asked * factor, self.limit.ceiling)

    def _cost(self, logical: LogicalBatch, part: Sequence[int]) -> float:
        return cost_of(logical, part, self._settings.cost_budget)

    def _check(self, parts: Parts) -> None:
        if len(parts) > 1 and self._compares and self.passes is None:
            raise ArgumentError(
                f"this loss compares the examples of a batch, so {len(parts)} micro-batches would change it; "
                "use WholeBatchLoss(encode, loss), a smaller logical batch, or activation checkpointing"
            )
        if len(parts) > 1 and not self._warned:
            warning = next(filter(None, (doubt() for doubt in self._doubts)), None)
            if warning is not None:
                self._warned = True
                warnings.warn(warning, stacklevel=6)

    def _agree_on_parts(self, parts: Parts) -> int:
        """Return how many micro-batches this rank runs: its own number, or under FSDP2 the largest of all ranks."""
        if not self._ranks.meet_in_forward:
            return len(parts)
        if self.passes is not None:
            self.passes.check(int(*self._ranks.largest([len(parts)], self._device)))
        self._ranks.check_shards()
        (most,) = self._ranks.largest([len(parts)], self._device)
        if self._ranks.has_sync_batch_norm:
            (are_equal,) = self._ranks.agree(None, self._device, marks=[len(parts)])
            if not are_equal:
                raise ArgumentError(
                    f"SyncBatchNorm takes statistics over the micro-batches of all ranks, but this rank has "
                    f"{len(parts)} and another one up to {int(most)}; give all ranks equally many, or use GroupNorm"
                )
        return int(most)

    def _attempt(
        self, logical: LogicalBatch, parts: Parts, num_parts: int, pending: Pending, norms: Norms | None
    ) -> Totals | _Failure | None:
        """Run all micro-batches; return their sums, the one that ran out of memory, or None for one of another rank."""
        totals = Totals()
        part: Part = []
        is_cut = num_parts > 1 or pending.totals.num_micro_batches > 0 or self.passes is not None
        gradients = pending.gradients
        token = NUM_PIECES.set(len(parts))
        try:
            with self._ranks.no_sync(), gradients.gathering(in_pieces=is_cut):
                if self.passes is not None:
                    whole = Turn(range(logical.num_examples), logical, pending, totals, None)
                    is_spoiled = partial(self._is_spoiled, totals, logical, parts, pending)
                    self.passes.run(whole, parts, lambda sums: self._finish_part(sums, whole), is_spoiled)
                    if self.graphs is not None:
                        self.graphs.note_eager("a WholeBatchLoss runs its micro-batches twice")
                    return totals
                micro_batches = iter(logical.take_all(parts))
                for part in parts:
                    # Unnamed where it runs eagerly, so that the inputs are freed after the forward pass.
                    run = self._run_part if self.graphs is None or norms is not None else self._replay_part
                    run(next(micro_batches), Turn(part, logical, pending, totals, norms))
                    if is_cut and self._ranks.is_sharded:
                        gradients.widen_shards()
                # Under FSDP2 a rank that is done keeps the others company: divided by infinity, its part is zero.
                for _ in range(num_parts - len(parts)):
                    self._backward(self._forward(logical.take(parts[-1])), math.inf, None)
                    gradients.widen_shards()
            return totals
        except AgainError:
            return None
        except Exception as error:
            part = part if self.passes is None else self.passes.part
            # Where ranks meet in the forward pass, none can try again on its own: the others wait for it inside.
            can_retry = self._settings.on_oom == "split" and self._ranks.can_retry
            if not can_retry or not part or not is_out_of_memory(error):
                raise
        finally:
            NUM_PIECES.reset(token)
        # Outside the except block the traceback is gone, and with it the activations that it held.
        return cost_of(logical, part, self._settings.cost_budget), part

    def _run_part(self, micro_batch: Any, turn: Turn) -> None:
        """Run a micro-batch eagerly."""
        kept, counts = self._counted(micro_batch, len(turn.part), is_cut=turn.norms is not None)
        if kept is None:  # a piece of nothing but filler
            if self._ranks.meet_in_forward:  # the others wait inside: divided by infinity, its part is zero
                self._backward(self._forward(micro_batch), math.inf, None)
            return
        del micro_batch
        if turn.norms is not None:
            turn.norms.begin(counts[1])
        sums = self._forward(kept)
        del kept  # so that the inputs are freed before the backward pass
        num_measured = 0 if turn.norms is None else round(float(counts[0]))  # filler is no example
        self._finish_part(sums, turn, num_measured=num_measured)
        turn.totals.add(sums, *counts)
        if self.graphs is not None:
            self.graphs.note_eager("gradient noise is measured eagerly")

    def _counted(self, micro_batch: Any, num: int, *, is_cut: bool) -> tuple[Any, tuple[int | Copied, int]]:
        """Return a micro-batch, perhaps without its filler rows, and how many examples and rows it has."""
        if not (isinstance(micro_batch, Mapping) and ROW_WEIGHT in micro_batch):
            return required(micro_batch), (num, num)
        self._has_weights = True
        # After memory ran out, filler would make small pieces as large as those that failed.
        must_be_cut = is_cut or math.isfinite(self.limit.ceiling) or not self._ranks.can_retry
        kept = self._filler.cut_off(micro_batch, always=must_be_cut)
        return kept, (0, 0) if kept is None else count_rows(kept, num)

    def _finish_part(self, sums: MicroSums, turn: Turn, *, num_measured: int = 0) -> None:
        """Run the backward pass of a micro-batch, unless it is left out."""
        part, logical, pending, totals, norms = turn
        if totals.num_micro_batches == 0 and pending.gradients.has_any:
            raise ArgumentError("loss_fn ran a backward pass of its own; return the loss, and Stepper does")
        if sums.doubt is not None:
            self._means.check(sums, part, logical, can_try=norms is None)
        is_left_out = sums.is_empty or (sums.is_doubtful and pending.leaves_out)
        if not is_left_out or self._ranks.is_sharded:
            divisor = self._divisor(pending, sums.weight, len(part), logical.num_examples)
            self._backward(sums, divisor, norms, num_measured=num_measured)

    def _replay_part(self, micro_batch: Any, turn: Turn) -> None:
        """Replay a micro-batch from its graph, or run it eagerly."""
        assert self.graphs is not None
        part, logical, pending, totals, _ = turn
        before = self.graphs.num_replayed
        micro_batch, counts = self._counted(micro_batch, len(part), is_cut=False)
        if micro_batch is None:
            return

        def divisor(weight: float | None, num_elements: int) -> float:
            if weight is None and pending.divisor is None and pending.total_weight is pending.asked_weight is None:
                # The graph counts it; for the scale of gradients any power of two near it will do.
                pending.divisor = power_of_two(self.usual_weight or num_elements * logical.num_examples / len(part))
            return self._divisor(pending, weight, len(part), logical.num_examples)

        def eager() -> MicroSums:
            sums = self._forward(micro_batch)
            self._finish_part(sums, turn)
            return sums

        sums = self.graphs.run(micro_batch, eager=eager, divisor=divisor, can_compare=True)
        pending.num_replayed += self.graphs.num_replayed - before
        totals.add(sums, *counts)

    def _forward(self, micro_batch: Any) -> MicroSums:
        with self._settings.precision(self._device):
            return MicroSums(self._settings.loss_fn(self._ranks.module, micro_batch))

    def _backward(self, sums: MicroSums, divisor: float, norms: Norms | None, *, num_measured: int = 0) -> None:
        loss: torch.Tensor = sums.loss / divisor
        if self._settings.scaler is not None:
            loss = self._settings.scaler.scale(loss)
        loss.backward()
        if norms is not None:
            norms.end(num_measured)

    def _divisor(self, pending: Pending, weight: Any, num_examples: int, num_all: int) -> float:
        """Return what losses of this update are divided by on this rank; the first micro-batch settles it.

        It is the weight of the update where that is known: given, or counted in examples, or that of the only
        micro-batch. Otherwise it is a power of two near that weight. That loses no digit, and gradients are about as
        large as those of a mean, so that none of them leaves the range of half precision.
        """
        if pending.divisor is None:
            pending.divisor = self._settle(pending, weight, num_examples, num_all)
        return pending.divisor

    def _settle(self, pending: Pending, weight: Any, num_examples: int, num_all: int) -> float:
        if pending.total_weight is not None:
            return pending.total_weight
        if self._ranks.is_sharded:
            return self._settle_for_all(pending, weight, num_all / num_examples)
        if pending.asked_weight is not None:
            return pending.asked_weight if pending.asked_weight > 0 else 1.0
        if isinstance(weight, float) and weight == num_examples:
            return float(num_all)
        # In float16 an old estimate could be too far off, so the weight is worth a wait for the device.
        if not is_on_host(weight) and self.usual_weight is not None and not self._needs_exact(pending):
            return power_of_two(self.usual_weight)
        value = float(weight)
        if num_examples == num_all and 0 < value < math.inf:
            return value
        return power_of_two(value * num_all / num_examples if value > 0 else self.usual_weight or float(num_all))

    def _settle_for_all(self, pending: Pending, weight: Any, num_per_part: float) -> float:
        """Return one divisor for all ranks: FSDP2 sums gradients before they could be multiplied."""
        local = pending.asked_weight if pending.asked_weight is not None else float(weight) * num_per_part
        (total,) = self._ranks.sum([local], self._device)
        return total if pending.asked_weight is not None and total > 0 else power_of_two(total)

    def _least_parts(self, noise_seed: int | None) -> int:
        num_parts, world_size = self._settings.noise_parts, self._ranks.world_size
        if noise_seed is not None and num_parts is not None:
            return num_parts // world_size
        return 1 if noise_seed is None or world_size > 1 else 2

    def _learn(self, logical: LogicalBatch, parts: Parts, *, is_cut: bool, is_replayed: bool) -> None:
        if math.isfinite(self.limit.ceiling):
            largest = max(self._cost(logical, part) for part in parts)
            self.limit = self.limit.after_success(largest, is_cut=is_cut and self.limit.ceiling < self._settings.asked)
        if self._feedback is not None and not is_replayed:
            pad_to = PadTo() if self.pad_to is None else self.pad_to
            shapes = [shape for part in parts if (shape := logical.shape_of(part, pad_to)) is not None]
            self._feedback.end([len(part) for part in parts], shapes or None)

    def _lower_limit(self, failure: _Failure, logical: LogicalBatch) -> None:
        """Lower the ceiling after a failed attempt, or say that one example does not fit."""
        cost, part = failure
        if len(part) == 1:
            raise DoesNotFitError(does_not_fit(logical, part[0], self._device))
        self.limit = self.limit.after_failure(cost)
        if self._feedback is not None:
            self._feedback.failed(len(part))
