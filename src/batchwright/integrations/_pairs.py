"""Losses of pairs of rows, chosen and rejected: whether they are means over the pairs of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from torch import nn

from ..step.huggingface import TOLERANCE, adds_up, choose_rows, sample, try_out
from ..step.oom import is_out_of_memory
from ._inputs import Pairs
from ._trainer_step import UNSURE, Weighing, failed
from ._trial_loss import Compute, TrialLoss


class PairLoss(NamedTuple):
    """What is known of a loss of pairs: it is a mean over them, or a reason why it is none."""

    is_known: bool
    refusal: str = ""


def find_pairs(compute: Compute, model: nn.Module, inputs: Mapping[str, Any], *, key: str, pairs: PairLoss) -> Weighing:
    """Find out whether the loss of a batch of pairs is a mean over its pairs.

    A model that begins as its own reference has the same loss for all pairs, which shows nothing.

    Args:
        compute: the trainer's own loss.
        model: without wrappers for several devices.
        inputs: a micro-batch on the model's device.
        key: the input whose length is twice the number of pairs.
        pairs: what is known of the loss.
    """
    known = Weighing(None, True, key, has_pairs=True)
    unsure = known if pairs.is_known else replace(known, is_sure=False, refusal=UNSURE)
    if pairs.refusal:
        return replace(known, refusal=pairs.refusal)
    cut = Pairs(dict(inputs), key)
    rows = choose_rows(cut.first_sides(), set())
    if len(rows) < 2:
        return unsure
    loss = TrialLoss(compute, model, TOLERANCE, is_own=False)
    try:
        samples = sample(inputs, rows, cut.take)
        found = adds_up(loss, samples, lambda part: int(known.count(part)), sums=False)
        values = try_out(loss, *samples.apart)
    except Exception as error:
        if is_out_of_memory(error):
            return unsure
        return replace(known, refusal=failed(loss, inputs, error))
    if found is False:
        return replace(
            known,
            refusal=f"the loss of {loss.name} is not a mean over its pairs: those of some do not add up to that of all",
        )
    is_telling = found is True and max(values) - min(values) > TOLERANCE * max(map(abs, values))
    return known if is_telling else unsure
