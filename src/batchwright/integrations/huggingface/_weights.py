"""The weight of a micro-batch in the mean of an update, its labels or its examples; the mean entropy over labels."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...errors import ArgumentError
from ...step.huggingface import IGNORED, LABELS, Novelty, counts_tokens, output_entropy, usual_reading
from ...step.packing.rows import is_packed
from .._devices import Devices
from .._inputs import Cut, num_rows
from .._pairs import PairLoss, find_pairs
from .._trainer_step import UNSURE, WHAT_TO_DO, WHOLE, Weighing, check_rows, find_weighing, weighted, zero_of
from .._trial_loss import Compute
from ._settings import Weighting

_OTHER = "use weighting='tokens', or a loss that is itself a mean over examples"


class TrainerLoss(NamedTuple):
    """The loss of a trainer, and what is needed to try it out on a micro-batch."""

    compute: Compute  # as for a single process
    model: nn.Module  # without wrappers for several devices
    prepare: Callable[[dict[str, Any]], dict[str, Any]]  # moves inputs to the device
    needs_whole: bool = False  # it was declared to compare the examples of a batch
    is_own: bool = False  # it is the model's own, and not one that the trainer makes of its outputs
    smooths: bool = False  # the trainer smooths labels
    pairs: PairLoss | None = None  # of a batch whose examples are pairs of rows


class UpdateWeight(NamedTuple):
    """The weight of a whole update, which its micro-batches are parts of."""

    total: Tensor  # labels or examples
    num_replicas: int  # whose gradients are averaged later


@final
class LossWeights:
    """Finds out what a trainer's loss is a mean over, counts that, and weighs losses by it.

    Args:
        weighting: ``"tokens"``: every label counts the same. ``"examples"``: every example counts the same, with the
            mean over its own labels, taken from the logits.
    """

    def __init__(self, weighting: Weighting) -> None:
        self._by_example = weighting == "examples"
        self._weighing: Weighing | None = None
        self._novelty = Novelty()
        self._smooths = False
        self._update: UpdateWeight | None = None
        self._is_weighing = False
        self._is_idle = False
        self._given: Tensor | None = None
        self._was_asked = False

    def learn(self, loss: TrainerLoss, batches: Sequence[Mapping[str, Any]]) -> None:
        """Look at the largest of some micro-batches, unless an earlier one has told what the loss is a mean over."""
        key = row_key(batches[0], loss.model)
        self._smooths = loss.smooths
        if loss.needs_whole:
            self._weighing = Weighing(None, True, key, refusal=WHOLE, has_pairs=loss.pairs is not None)
            return
        batch = max(batches, key=lambda batch: num_rows(batch, row_key(batch, loss.model)))
        if self._weighing is None or not self._weighing.is_settled(batch):
            self._weighing = self._find(loss, batch, key)
        if self._weighing.has_pairs:
            return
        has_tokens = any(self._labels_of_rows(other) is not None for other in batches)
        for other in [] if has_tokens else batches:  # means over rows are compared with the loss itself
            new = None if self._weighing.refusal else self._novelty.notice(other)
            if new:
                inputs = loss.prepare(dict(other))
                self._weighing = check_rows(self._weighing, loss.compute, loss.model, inputs, new, is_own=loss.is_own)

        if self.refusal == UNSURE and self._by_example and _are_tokens(batch):
            raise refuse(UNSURE, len(batches))

    def _find(self, loss: TrainerLoss, batch: Mapping[str, Any], key: str) -> Weighing:
        if loss.pairs is not None:
            return find_pairs(loss.compute, loss.model, loss.prepare(dict(batch)), key=key, pairs=loss.pairs)
        if self._by_example and is_packed(batch):
            raise ArgumentError(
                "weighting='examples' needs a row per example, but the rows of this batch hold several sequences; use "
                "weighting='tokens', or a collator that does not pack"
            )
        return find_weighing(
            loss.compute,
            loss.model,
            loss.prepare(dict(batch)),
            key=key,
            by_example=self._by_example,
            is_own=loss.is_own,
        )

    @property
    def is_known(self) -> bool:
        """Return whether anything was learned."""
        return self._weighing is not None

    @property
    def refusal(self) -> str:
        """Return why parts of a batch have no weight, an empty text if they have."""
        return "" if self._weighing is None else self._weighing.refusal

    def cut(self, inputs: dict[str, Any]) -> Cut | None:
        """Return how a micro-batch can be cut, None for rows."""
        return None if self._weighing is None else self._weighing.cut(inputs)

    def count(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the weight of a micro-batch, on its device."""
        assert self._weighing is not None
        labels = self._labels_of_rows(inputs)
        return self._weighing.count(inputs) if labels is None else (labels != IGNORED).any(dim=1).sum()

    def num_examples(self, inputs: Mapping[str, Any], key: str) -> int:
        """Return the number of examples of a micro-batch: its rows, or its pairs of rows."""
        has_pairs = self._weighing is not None and self._weighing.has_pairs
        return num_rows(inputs, key) // (2 if has_pairs else 1)

    def has_weight(self, inputs: Mapping[str, Any]) -> bool:
        """Say whether a micro-batch counts at all."""
        return bool(self.refusal) or float(self.count(inputs)) > 0

    @contextmanager
    def weighing(
        self, update: UpdateWeight | None, *, is_idle: bool = False, weight: Tensor | None = None
    ) -> Iterator[None]:
        """Let ``loss`` return parts of an update inside the context; if that is None, means of batches.

        Args:
            update: what they are parts of.
            is_idle: the micro-batch does not count; its gradients are zero, and only exist for other ranks.
            weight: of the micro-batch, if it was counted before.
        """
        self._is_weighing, self._update, self._is_idle, self._was_asked = True, update, is_idle, False
        self._given = weight
        try:
            yield
        finally:
            self._is_weighing, self._update, self._is_idle, self._given = False, None, False, None
        if update is not None and not self._was_asked:
            raise ArgumentError(
                "the trainer's loss was not weighed: a compute_loss or training_step above the adaptive one does not "
                "call super(); write the loss into a trainer class and make it adaptive: adaptive(YourTrainer)"
            )

    def loss(
        self, compute: Callable[[Any, bool], Any], inputs: Mapping[str, Any], *, with_outputs: bool
    ) -> tuple[Tensor, Any] | None:
        """Return the weighed loss of a micro-batch, and the outputs if they are needed.

        Returns None outside of ``weighing``, and as long as nothing was learned: then the trainer's own loss holds.

        Args:
            compute: called with ``num_items_in_batch`` and ``return_outputs``, it is the trainer's loss.
            inputs: the micro-batch.
            with_outputs: the outputs are needed.
        """
        self._was_asked = True
        if not self._is_weighing or self._weighing is None:
            return None
        update, labels = self._update, self._labels_of_rows(inputs)
        divides = self._weighing.divides and labels is None
        # Before the loss, which may remove the labels.
        weight = self._weight_of(inputs, update, divides)
        # A mean over nothing may be NaN, and only outputs make a zero then. Otherwise they are not asked for: TRL would
        # run another forward pass for them, which ranks that are not idle do not join.
        needs_outputs = self._is_idle and not divides and float(weight) == 0
        with_outputs = with_outputs or needs_outputs or labels is not None
        # The trainer evaluates with the number of labels of the batch, so a loss may count on getting one.
        number = (weight if update is None else update.total) if divides else None
        found = compute(number, with_outputs)
        loss, outputs = found if with_outputs else (found, None)
        if self._is_idle:
            return zero_of(loss, outputs), outputs
        if labels is not None:
            loss = self._mean_over_rows(loss, _logits_of(outputs, loss), labels)
        if update is None:
            return loss, outputs
        if divides:
            return loss * update.num_replicas, outputs
        return weighted(loss, weight, update.total, update.num_replicas), outputs

    def _weight_of(self, inputs: Mapping[str, Any], update: UpdateWeight | None, divides: bool) -> Tensor:
        if self._given is not None:
            return self._given
        if (update is None and not divides) or self.refusal:
            return torch.ones(())  # nobody divides by it, or the batch counts as one
        return self.count(inputs).clamp(min=update is None)

    def _mean_over_rows(self, loss: Tensor, logits: Tensor, labels: Tensor) -> Tensor:
        losses, counts = _losses_of_rows(logits, labels, self._shifts)
        self._check(loss.detach(), losses.detach().sum() / counts.sum())
        rows = losses.sum(dim=1) / counts.clamp(min=1)
        return rows.sum() / (counts > 0).sum().clamp(min=1)

    @property
    def _shifts(self) -> bool:
        assert self._weighing is not None
        return self._weighing.reading is not None and self._weighing.reading.shifts

    def shifts(self, model: nn.Module, labels: Any) -> bool:
        """Say whether a model predicts the next label: as its loss has shown, or as is usual for its kind."""
        if self._weighing is not None and self._weighing.reading is not None:
            return self._weighing.reading.shifts
        return isinstance(labels, Tensor) and usual_reading(model, labels).shifts

    def _labels_of_rows(self, inputs: Mapping[str, Any]) -> Tensor | None:
        """Return the labels of tokens if examples are weighed by them; None if there is one label per example."""
        labels = inputs.get("labels")
        if not self._by_example or self._weighing is None or self._weighing.reading is None:
            return None
        if labels is None or not _are_tokens(inputs):
            return None
        return labels[:, 1:] if self._shifts else labels

    def _check(self, loss: Tensor, found: Tensor) -> None:
        """Refuse a loss that is not the cross entropy of the logits."""
        if self._smooths:
            raise ArgumentError(
                "weighting='examples' takes the cross entropy of the logits, but label_smoothing_factor asks for "
                f"another loss; leave that out, or {_OTHER}"
            )
        theirs, ours = float(loss), float(found)
        tolerance = 1e-4 if loss.dtype in (torch.float32, torch.float64) else 2e-2
        if math.isfinite(theirs) and not math.isclose(theirs, ours, rel_tol=tolerance, abs_tol=1e-12):
            raise ArgumentError(
                f"weighting='examples' takes the cross entropy of the logits, {ours:.6g}, but the loss is "
                f"{theirs:.6g}; {_OTHER}"
            )


@final
class EntropyMeter:
    """Adds up the entropy over the labels of an update, whatever its micro-batches.

    Attributes:
        is_wanted: anybody reads it.
    """

    def __init__(self, *, is_wanted: bool) -> None:
        self.is_wanted = is_wanted
        self.newest: float | None = None
        self._sums: list[Tensor] = []  # (entropy, labels) of every piece
        self._num_kept = 0
        self._is_open = False

    def begin(self) -> None:
        """Begin an update."""
        self._sums, self._num_kept = [], 0

    def keep(self) -> None:
        """Keep what was measured so far, whatever happens to the next micro-batch."""
        self._num_kept = len(self._sums)

    def undo(self) -> None:
        """Forget the pieces of a micro-batch that ran out of memory."""
        del self._sums[self._num_kept :]

    @contextmanager
    def part(self, *, counts: bool) -> Iterator[None]:
        """Measure what runs inside, if it counts; a repeat of another rank's example does not."""
        self._is_open = self.is_wanted and counts
        try:
            yield
        finally:
            self._is_open = False

    def labels(self, inputs: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the labels of a piece before its loss takes them out; None if it is not measured."""
        return {name: inputs[name] for name in LABELS if name in inputs} if self._is_open else None

    def note(self, outputs: Any, labels: Mapping[str, Any], *, shifts: bool) -> None:
        """Add the entropy of a piece."""
        entropy, num = output_entropy(outputs, labels, shifts=shifts)
        wide = torch.float32 if entropy.device.type == "mps" else torch.float64
        self._sums.append(torch.stack([entropy.to(wide), num.to(wide)]))

    def end(self, devices: Devices) -> float | None:
        """Return the mean over all labels of the update on all ranks, NaN if no label counts; None if not wanted."""
        if not self.is_wanted:
            return None
        mine = torch.stack(self._sums).sum(dim=0).cpu() if self._sums else torch.zeros(2)
        entropy, num = devices.add_up(mine.to(torch.float64)).tolist()
        self.newest = entropy / num if num else math.nan
        return self.newest


def _are_tokens(inputs: Mapping[str, Any]) -> bool:
    labels = inputs.get("labels")
    return isinstance(labels, Tensor) and counts_tokens(labels)


def refuse(refusal: str, num_parts: int) -> ArgumentError:
    """Return the error of an update whose micro-batches have no weight."""
    advice = (
        "use one micro-batch per update: gradient_accumulation_steps=1, and a budget that holds the batch"
        if refusal == WHOLE
        else WHAT_TO_DO
    )
    return ArgumentError(
        f"an update of {num_parts} micro-batches needs to know what each of them counts, but {refusal}; {advice}"
    )


def row_key(batch: Mapping[str, Any], model: Any) -> str:
    """Return the name of an input whose length is the number of examples."""
    names = [getattr(model, "main_input_name", "input_ids"), "input_ids", "labels"]
    tensors = [name for name, value in batch.items() if isinstance(value, Tensor) and value.ndim > 0]
    return next((name for name in names if name in batch), tensors[0] if tensors else names[0])


def _logits_of(outputs: Any, loss: Tensor) -> Tensor:
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else outputs[1] if len(outputs) > 1 else None
    if isinstance(logits, Tensor) and loss.requires_grad and not logits.requires_grad:
        raise ArgumentError(
            f"weighting='examples' needs logits with a gradient, but this trainer's have none; {_OTHER}"
        )
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        raise ArgumentError(
            f"weighting='examples' needs the logits of every token, which the model does not return; {_OTHER}"
        )
    return logits


def _losses_of_rows(logits: Tensor, labels: Tensor, shifts: bool) -> tuple[Tensor, Tensor]:
    """Return the loss of every label, 0 for ignored ones, and the number of labels that count in each row."""
    logits = logits[:, :-1] if shifts else logits
    labels = labels.to(logits.device)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view(labels.shape), (labels != IGNORED).sum(dim=1)
