"""The weights of micro-batches in an update of a Hugging Face trainer: what its loss is a mean over."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from .._tree import leaves
from ..errors import ArgumentError, DoesNotFitError
from ..step.huggingface import (
    HALF_TOLERANCE,
    IGNORED,
    TOLERANCE,
    LossReading,
    ProbedLoss,
    Views,
    adds_up_by_example,
    label_views,
    num_labels,
    read_views,
    row_views,
    try_out,
    unwrapped,
    usual_reading,
)
from ..step.oom import devices_of, free_memory, is_out_of_memory
from ._inputs import Cut, Rows, Sequences, Whole, is_packed, num_rows, take_rows

# compute(model, inputs, num_items_in_batch) -> loss, what a trainer calls compute_loss
Compute: TypeAlias = Callable[[nn.Module, dict[str, Any], Any], Tensor]

WHOLE = "its loss was declared to need the whole batch"
WHAT_TO_DO = (
    "let the loss divide a sum by num_items_in_batch, pass weighting='examples' if it is a mean over examples, or mark "
    "it with step.losses.whole_batch and use one micro-batch per update"
)


@final
@dataclass(frozen=True)
class Weighing:
    """How much a micro-batch counts in the mean of an update: its labels, or its examples.

    Attributes:
        reading: how to read the loss; None counts examples.
        is_sure: False if the batch could not tell; a later batch may.
        key: the input whose length is the number of examples.
        refusal: why a part of a batch has no weight; then an update is a single micro-batch, which is not cut.
        cuts_sequences: packed sequences were found to be independent, so a packed row may be cut between them.
        saw_rows: two rows were compared; one row does not show whether the loss compares examples.
    """

    reading: LossReading | None
    is_sure: bool
    key: str
    refusal: str = ""
    cuts_sequences: bool = False
    saw_rows: bool = True

    def is_settled(self, inputs: Mapping[str, Any]) -> bool:
        """Say whether a micro-batch has nothing new to tell."""
        return self.is_sure and (self.saw_rows or num_rows(inputs, self.key) == 1)

    @property
    def divides(self) -> bool:
        """Return whether the loss divides a sum by ``num_items_in_batch`` itself."""
        return self.reading is not None and self.reading.sums

    def count(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the weight of a micro-batch, on its device."""
        if self.reading is None:
            return torch.tensor(num_rows(inputs, self.key))
        if not isinstance(inputs.get("labels"), Tensor):
            raise ArgumentError(
                f"a micro-batch has no labels, only {sorted(inputs)}, but others were weighed by theirs; give every "
                "batch labels, -100 where none counts"
            )
        return num_labels(inputs, self.reading.shifts)

    def cut(self, inputs: dict[str, Any]) -> Cut:
        """Return how a micro-batch can be cut if it does not fit."""
        if self.refusal:
            return Whole(inputs, self.refusal)
        if not is_packed(inputs) or num_rows(inputs, self.key) > 1:
            return Rows(inputs, self.key)
        if not self.cuts_sequences:
            return Whole(inputs, "it is a packed row, and its sequences were not found to be independent")
        try:
            return Sequences(inputs)
        except ArgumentError as error:
            return Whole(inputs, str(error))


def find_weighing(
    compute: Compute,
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    key: str,
    by_example: bool = False,
    is_half: bool = False,
) -> Weighing:
    """Find out from parts of a micro-batch what the loss of a trainer is a mean over.

    Model and random state stay as they were. The loss runs on two examples, or if the batch cannot be cut on all of it
    with few labels, apart and together.

    Args:
        compute: the trainer's own loss, made by the model, by label smoothing or by a function of the user.
        model: without wrappers for several devices.
        inputs: a micro-batch on the model's device.
        key: the input whose length is the number of examples.
        by_example: the user says that every example counts the same.
        is_half: the model computes in half precision.
    """
    labels = inputs.get("labels")
    if not isinstance(labels, Tensor) or labels.ndim not in (1, 2):
        why = "the batch has no tensor 'labels' of one or two axes, so nothing says what its loss is a mean over"
        return Weighing(None, True, key, refusal="" if by_example else why)
    loss = _TrainerLoss(compute, model, TOLERANCE)
    if is_packed(inputs) and num_rows(inputs, key) == 1:
        return _of_sequences(loss, inputs, key, is_half=is_half)
    return _of_rows(loss, inputs, labels, key, by_example=by_example)


def is_mean_over_examples(compute: Compute, model: nn.Module, inputs: Mapping[str, Any], *, key: str) -> bool:
    """Say whether the loss of two examples is the mean of their losses apart, as for ``find_weighing``."""
    return adds_up_by_example(_TrainerLoss(compute, model, TOLERANCE), _two_rows(inputs, key))


def _of_rows(loss: _TrainerLoss, inputs: Mapping[str, Any], labels: Tensor, key: str, *, by_example: bool) -> Weighing:
    has_two = num_rows(inputs, key) > 1
    try:
        views = _two_rows(inputs, key)
    except ArgumentError as error:  # rows cannot be cut, so all of them run
        whole = label_views(inputs)
        if whole is None:
            return Weighing(None, True, key, refusal="" if by_example else str(error))
        views, has_two = whole, True
    try:
        reading, has_two = _read_rows(loss, inputs, views, key) if has_two else (_read(loss, views), False)
    except ArgumentError as error:
        is_stated = by_example and adds_up_by_example(loss, views)
        return Weighing(None, True, key, refusal="" if is_stated else str(error))
    return Weighing(reading or usual_reading(loss.module, labels), reading is not None, key, saw_rows=has_two)


def _read_rows(
    loss: _TrainerLoss, inputs: Mapping[str, Any], views: Views, key: str
) -> tuple[LossReading | None, bool]:
    """Return the reading from two rows, or from one where two do not fit, and whether there were two."""
    try:
        return _read(loss, views), True
    except DoesNotFitError:
        one = label_views(take_rows(inputs, [0], num_rows(inputs, key)))
        if one is None:
            raise
        return _read(loss, one), False


def _of_sequences(loss: _TrainerLoss, inputs: Mapping[str, Any], key: str, *, is_half: bool) -> Weighing:
    """Try a packed row with few labels, then two of its sequences, which shows whether it can be cut."""
    # Rows of other lengths run in other kernels, which round differently.
    apart = _TrainerLoss(loss.compute, loss.module, HALF_TOLERANCE if is_half else TOLERANCE)
    cuts, read = False, None
    try:
        views = _two_sequences(inputs)
        read = None if views is None else _read(apart, views)
        cuts = views is not None and read is not None and _are_independent(apart, views)
    except (ArgumentError, DoesNotFitError):
        pass  # the row is not cut
    try:
        whole = label_views(inputs)
        reading = read if whole is None else _read(loss, whole)
    except ArgumentError as error:
        return Weighing(None, True, key, refusal=str(error))
    except DoesNotFitError as error:
        if not cuts:
            return Weighing(None, True, key, refusal=str(error))
        reading = read
    return Weighing(
        reading or usual_reading(loss.module, inputs["labels"]), reading is not None, key, cuts_sequences=cuts
    )


def _are_independent(loss: _TrainerLoss, views: Views) -> bool:
    """Say whether the loss of the second of two sequences stays the same when the tokens of the first one change."""
    tokens, name = views.both.get("input_ids"), _name_of_labels(views.both)
    if not isinstance(tokens, Tensor) or tokens.ndim != 2:
        return False
    num = views.first[name].shape[1]
    labels, others = views.both[name].clone(), tokens.clone()
    labels[:, :num] = IGNORED
    least, most = tokens.min(), tokens.max()
    others[:, :num] = most if bool((tokens[:, :num] == least).all()) else least
    before, after = try_out(loss, {**views.both, name: labels}, {**views.both, name: labels, "input_ids": others})
    return bool(least != most) and math.isclose(before, after, rel_tol=1e-7)


def _read(loss: _TrainerLoss, views: Views) -> LossReading | None:
    try:
        return read_views(loss, views)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    # Outside the except block: the traceback is gone, and with it the activations it held.
    free_memory(devices_of(loss.module))
    raise DoesNotFitError(
        "memory ran out in the forward pass, without gradients, that shows what the loss is a mean over; shorten the "
        "examples, or use a smaller model"
    )


def _two_rows(inputs: Mapping[str, Any], key: str) -> Views:
    num = num_rows(inputs, key)
    return row_views(inputs, num, lambda others, rows: take_rows(others, rows, num))


def _two_sequences(inputs: Mapping[str, Any]) -> Views | None:
    """Return the two shortest sequences of a packed row that have three tokens, None if there are none."""
    cut = Sequences(dict(inputs))
    order = sorted((length, unit) for unit, length in enumerate(cut.lengths) if length >= 3)
    if len(order) < 2:
        return None
    (num, first), (_, second) = order[:2]
    name = _name_of_labels(inputs)
    parts = [cut.take([first, second]), cut.take([first]), cut.take([second])]
    filled = torch.where(parts[0][name] == IGNORED, inputs[name].max().clamp(min=0), parts[0][name])
    thin = torch.full_like(filled, IGNORED)
    for place in (num - 1, -2, -1):  # one label of the first sequence, two of the second
        thin[0, place] = filled[0, place]
    rows = [thin, thin[:, :num], thin[:, num:]]
    both, alone, other = ({**part, name: row.contiguous()} for part, row in zip(parts, rows, strict=True))
    return Views(both, alone, other, copies=1)


def _name_of_labels(inputs: Mapping[str, Any]) -> str:
    return "shift_labels" if isinstance(inputs.get("shift_labels"), Tensor) else "labels"


@final
class _TrainerLoss(ProbedLoss):
    """A trainer's loss, to be tried out."""

    takes_number = True  # compute_loss takes it, whether or not it is honoured
    trusts_number = True  # a trainer divides by its own count of labels

    def __init__(self, compute: Compute, model: nn.Module, tolerance: float) -> None:
        self.module, self.tolerance = model, tolerance
        self.compute = compute

    def __call__(self, inputs: Mapping[str, Any], **options: Any) -> Tensor:
        """Return the loss for a number of items, or without one."""
        return self.compute(self.module, dict(inputs), options.get("num_items_in_batch"))

    def complaint(self, why: str) -> ArgumentError:
        """Return the error, whose text is part of a longer one."""
        return ArgumentError(
            f"the loss of {type(unwrapped(self.module)).__name__} is not a mean over its labels: {why}"
        )


def weighted(loss: Tensor, weight: Tensor, total: Tensor, num_replicas: int) -> Tensor:
    """Return what a mean over ``weight`` adds to the mean over ``total``.

    ``loss * weight / total``, times the number of replicas whose gradients are averaged later.
    """
    # bfloat16 cannot hold whole numbers above 256.
    share = weight.to(loss.device, torch.float64) / total.to(loss.device, torch.float64) * num_replicas
    # Without labels the mean is NaN, though its gradient is zero.
    return torch.where(share > 0, loss * share.to(torch.promote_types(loss.dtype, torch.float32)), 0)


def zero_of(loss: Tensor, outputs: Any) -> Tensor:
    """Return zero that depends on the outputs, so that every parameter gets a gradient, which is zero.

    A mean over no label may be NaN, and so may be its gradient, even times zero.
    """
    zeros = [(tensor * 0).sum() for tensor in leaves(outputs) if tensor.requires_grad and tensor.numel() > 1]
    return sum(zeros[1:], zeros[0]) if zeros else torch.where(torch.tensor(False, device=loss.device), loss, 0)


def as_logged(loss: Tensor, model: nn.Module) -> Tensor:
    """Return a loss in a type that depends on the model only, as ranks without a loss gather a zero with the others."""
    first = next(model.parameters())
    return loss.to(torch.float64 if first.dtype == torch.float64 else torch.float32)
