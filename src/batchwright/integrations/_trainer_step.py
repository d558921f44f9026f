"""The weights of micro-batches in an update of a Hugging Face trainer: what its loss is a mean over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from .._tree import leaves
from ..errors import ArgumentError, DoesNotFitError
from ..step.huggingface import (
    TOLERANCE,
    LossReading,
    Views,
    adds_up,
    choose_rows,
    is_telling,
    label_views,
    num_labels,
    read_views,
    row_views,
    sample,
    sequence_views,
    try_out,
    unwrapped,
    usual_reading,
    why_not_apart,
)
from ..step.oom import devices_of, free_memory, is_out_of_memory
from ..step.packing.rows import is_packed
from ._inputs import Cut, Pairs, Rows, Sequences, Whole, num_rows, take_rows
from ._trial_loss import Compute, TrialLoss

WHOLE = "its loss was declared to need the whole batch"
UNSURE = (
    "the batches so far do not show what the loss is a mean over, as it is 0, not finite, the same for all labels, or "
    "their rows are too much alike"
)
_APART = "those of some examples of a batch do not add up to that of all of them"
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
        saw_sequences: two sequences of a packed row were compared.
        has_pairs: an example is a pair of rows, and the first half of the rows holds one side of every pair.
    """

    reading: LossReading | None
    is_sure: bool
    key: str
    refusal: str = ""
    cuts_sequences: bool = False
    saw_rows: bool = True
    saw_sequences: bool = False
    has_pairs: bool = False

    def is_settled(self, inputs: Mapping[str, Any]) -> bool:
        """Say whether a micro-batch has nothing new to tell."""
        if not self.is_sure or self.has_pairs:
            return self.is_sure
        if num_rows(inputs, self.key) > 1:
            return self.saw_rows
        return bool(self.refusal) or self.saw_sequences or not _has_two_sequences(inputs)

    @property
    def divides(self) -> bool:
        """Return whether the loss divides a sum by ``num_items_in_batch`` itself."""
        return self.reading is not None and self.reading.sums

    def count(self, inputs: Mapping[str, Any]) -> Tensor:
        """Return the weight of a micro-batch, on its device."""
        if self.reading is None:
            return torch.tensor(num_rows(inputs, self.key) // (2 if self.has_pairs else 1))
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
        if self.has_pairs:
            return Pairs(inputs, self.key)
        if not is_packed(inputs) or num_rows(inputs, self.key) > 1:
            return Rows(inputs, self.key)
        if not self.cuts_sequences:
            return Whole(inputs, "it is a packed row, and its sequences were not found to be independent")
        try:
            return Sequences(inputs, shifts=self.reading is None or self.reading.shifts)
        except ArgumentError as error:
            return Whole(inputs, str(error))


def find_weighing(
    compute: Compute,
    model: nn.Module,
    inputs: Mapping[str, Any],
    *,
    key: str,
    by_example: bool = False,
    is_own: bool = False,
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
        is_own: the loss is the model's own, and not one that the trainer makes of its outputs.
    """
    labels, is_single = inputs.get("labels"), num_rows(inputs, key) == 1
    loss = TrialLoss(compute, model, TOLERANCE, is_own=is_own)
    try:
        if not isinstance(labels, Tensor) or labels.ndim not in (1, 2):
            return _without_labels(loss, inputs, key, by_example=by_example)
        if is_packed(inputs) and is_single:
            return _of_sequences(loss, inputs, key)
        return _of_rows(loss, inputs, labels, key, by_example=by_example)
    except DoesNotFitError:
        raise
    except Exception as error:  # a loss may need more rows than a part has
        return Weighing(None, True, key, refusal=failed(loss, inputs, error))


def check_rows(
    weighing: Weighing,
    compute: Compute,
    model: nn.Module,
    inputs: Mapping[str, Any],
    new: set[Any],
    *,
    is_own: bool = False,
) -> Weighing:
    """Return a weighing if some rows of a micro-batch add up under it, else one that refuses to cut.

    Args:
        weighing: what is known so far.
        compute: the trainer's own loss.
        model: without wrappers for several devices.
        inputs: a micro-batch on the model's device.
        new: what it shows that earlier ones did not.
        is_own: as for ``find_weighing``.
    """
    loss = TrialLoss(compute, model, TOLERANCE, is_own=is_own)
    try:
        found = _adds_up(loss, inputs, weighing, new)
    except Exception as error:
        if not is_out_of_memory(error):
            return _refused(weighing, failed(loss, inputs, error))
        found = True  # two rows were compared before
    if found or (found is None and loss.is_usual):
        return weighing
    why = UNSURE if found is None else f"the loss of {loss.name} is not a mean over {_what(weighing)}: {_APART}"
    return _refused(weighing, why)


def _refused(weighing: Weighing, why: str) -> Weighing:
    # A batch alone keeps its loss; one that divides by a number still needs that.
    return replace(weighing, is_sure=True, refusal=why, reading=weighing.reading if weighing.divides else None)


def _adds_up(loss: TrialLoss, inputs: Mapping[str, Any], weighing: Weighing, new: set[Any]) -> bool | None:
    """Say whether rows that differ add up; True if there are none, None if they cannot tell."""
    rows, num = choose_rows(inputs, new), num_rows(inputs, weighing.key)
    if len(rows) < 2 or rows[-1] >= num:
        return True
    try:
        samples = sample(inputs, rows, lambda chosen: take_rows(inputs, chosen, num))
    except ArgumentError:  # rows cannot be cut
        return True
    return adds_up(loss, samples, lambda part: int(weighing.count(part)), sums=weighing.divides)


def _what(weighing: Weighing) -> str:
    return "its examples" if weighing.reading is None else "its labels"


def failed(loss: TrialLoss, inputs: Mapping[str, Any], error: Exception) -> str:
    """Say that a part could not be tried out; if all of the batch cannot either, its error is raised."""
    try_out(loss, inputs, num_items_in_batch=1)
    return f"the loss of a part of the batch could not be tried out: {type(error).__name__}: {error}"


def _without_labels(loss: TrialLoss, inputs: Mapping[str, Any], key: str, *, by_example: bool) -> Weighing:
    """Check what the user says of a loss whose labels are not known: that it is a mean over examples."""
    if not by_example:
        why = "the batch has no tensor 'labels' of one or two axes, so nothing says what its loss is a mean over"
        return Weighing(None, True, key, refusal=why)
    return check_rows(Weighing(None, True, key), loss.compute, loss.module, inputs, set(), is_own=loss.is_own)


def _of_rows(loss: TrialLoss, inputs: Mapping[str, Any], labels: Tensor, key: str, *, by_example: bool) -> Weighing:
    has_two = num_rows(inputs, key) > 1
    try:
        views = _two_rows(inputs, key)
    except ArgumentError as error:  # rows cannot be cut, so all of them run
        whole = _few_labels(loss, inputs)
        if whole is None:
            return Weighing(None, True, key, refusal=str(error))
        views, has_two = whole, True
    try:
        reading, ran_two = _read_rows(loss, inputs, views, key)
        has_two = has_two and ran_two
    except ArgumentError as error:
        stated = Weighing(None, True, key)
        is_stated = by_example and _adds_up(loss, views.both, stated, set()) and _adds_up(loss, inputs, stated, set())
        return Weighing(None, True, key, refusal="" if is_stated else str(error))
    if not is_telling(inputs, is_usual=loss.is_usual):
        reading = None
    return _read_as(loss, reading, labels, key, saw_rows=has_two)


def _read_as(loss: TrialLoss, reading: LossReading | None, labels: Tensor, key: str, **known: Any) -> Weighing:
    """Weigh by a reading, by the usual one where that is known to hold, or not at all until a batch can tell."""
    if reading is not None:
        return Weighing(reading, True, key, **known)
    if loss.is_usual:
        return Weighing(usual_reading(loss.module, labels), False, key, **known)
    return Weighing(None, False, key, refusal=UNSURE, **known)


def _read_rows(loss: TrialLoss, inputs: Mapping[str, Any], views: Views, key: str) -> tuple[LossReading | None, bool]:
    """Return the reading from two rows, or from one where two do not fit, and whether there were two."""
    try:
        return _read(loss, views), True
    except DoesNotFitError:
        one = _few_labels(loss, take_rows(inputs, [0], num_rows(inputs, key)))
        if one is None and not loss.is_usual:
            raise
        return None if one is None else _read(loss, one), False


def _few_labels(loss: TrialLoss, inputs: Mapping[str, Any]) -> Views | None:
    """Return a batch with few labels that count, and the decoder's inputs that all of them make; None if it cannot be.

    A model that makes the inputs of its decoder from labels would make others from few of them, and so other losses.
    """
    base: Any = unwrapped(loss.module)
    has_decoder = getattr(getattr(base, "config", None), "is_encoder_decoder", False)
    if has_decoder and not inputs.keys() & {"decoder_input_ids", "decoder_inputs_embeds"}:
        prepare = getattr(base, "prepare_decoder_input_ids_from_labels", None)
        if prepare is None:
            return None
        inputs = {**inputs, "decoder_input_ids": prepare(labels=inputs["labels"])}
    return label_views(inputs)


def _of_sequences(loss: TrialLoss, inputs: Mapping[str, Any], key: str) -> Weighing:
    """Try a packed row with few labels, then two of its sequences, which shows whether it can be cut."""
    cuts, read, views = False, None, None
    try:
        views = sequence_views(inputs)
        few = None if views is None else label_views(views.both)
        read = None if few is None else _read(loss, few)
        cuts = views is not None and read is not None and _are_apart(loss, views)
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
    return _read_as(loss, reading, inputs["labels"], key, cuts_sequences=cuts, saw_sequences=views is not None)


def _are_apart(loss: TrialLoss, views: Views) -> bool:
    try:
        return not why_not_apart(loss, views)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return False  # the row is not cut


def _read(loss: TrialLoss, views: Views) -> LossReading | None:
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


def _has_two_sequences(inputs: Mapping[str, Any]) -> bool:
    """Say whether a packed row has two sequences that can be compared."""
    try:
        return is_packed(inputs) and sequence_views(inputs) is not None
    except (ArgumentError, KeyError):
        return False


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
