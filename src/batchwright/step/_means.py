"""Means that a loss function returns in place of sums: the graph of a loss raises a doubt, examples settle it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from .._tree import map_leaves
from ..errors import ArgumentError
from ._full_precision import HALF
from .oom import Snapshot, devices_of
from .report import HOW, MicroSums
from .splitting import LogicalBatch, Part

_MOST_TRIALS = 3  # batches that are tried out until the question is dropped
# How far a mean may be off that of its parts. A sum is twice as large, so there a part in ten will do.
_TOLERANCE, _HALF_TOLERANCE, _NEAR, _FAR = 1e-4, 2e-2, 0.1, 0.2


@final
class MeanCheck:
    """Refuses losses that are means over the examples of a micro-batch; each would be divided by its weight once more.

    A sum over examples is the sum of its parts, which is what ``Stepper`` needs, and a mean is their mean. So where the
    graph raises a doubt, two pairs of examples run apart and together, in evaluation mode; random state, buffers and
    attributes of modules are put back. Losses whose graph raises none run once, as ever.

    Args:
        forward: runs the loss function.
        model: is put back afterwards.
        is_half: the loss is computed in half precision.
        can_try: examples can run by themselves: no other rank waits, and no loss compares them.
    """

    def __init__(
        self,
        forward: Callable[[Any], MicroSums],
        model: nn.Module,
        *,
        is_half: bool,
        can_try: bool,
    ) -> None:
        self._forward, self._model, self._can_try = forward, model, can_try
        self._is_half, self._num_left = is_half, _MOST_TRIALS

    def check(self, sums: MicroSums, part: Part, logical: LogicalBatch, *, can_try: bool = True) -> None:
        """Refuse a loss that is a mean; it is asked where the graph of a micro-batch raises a doubt.

        Args:
            sums: of the micro-batch, with the doubt.
            part: its examples.
            logical: the batch that they are of.
            can_try: nothing looks at the forward passes of this batch.
        """
        if not self._num_left or float(sums.weight) == 1:  # each micro-batch may count as one
            return
        found = self._try_out(part, logical) if self._can_try and can_try else None
        if found == "mean" or (found is None and sums.doubt == "likely"):
            raise ArgumentError(
                f"loss_sum is a mean, and would be divided by the weight once more; {HOW}, such as "
                "F.cross_entropy(outputs, targets, reduction='sum'), len(targets)"
            )
        self._num_left = 0 if found == "sum" else self._num_left - 1

    def _try_out(self, part: Part, logical: LogicalBatch) -> Literal["mean", "sum"] | None:
        """Say what the loss of some examples is; None if they cannot tell."""
        num = min(2, len(part) // 2)
        if num == 0 or logical.refusal is not None:
            return None
        try:
            with self._put_back(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the micro-batch itself has warned
                found = [self._run(logical.take(rows)) for rows in (part[:num], part[num : 2 * num], part[: 2 * num])]
        except Exception:  # a loss that cannot run on few examples
            return None
        dtypes = {parameter.dtype for parameter in self._model.parameters()}
        return _judge(found, _HALF_TOLERANCE if self._is_half or not dtypes.isdisjoint(HALF) else _TOLERANCE)

    def _run(self, micro_batch: Any) -> tuple[float, float]:
        # A copy, as the loss may change its batch in place.
        sums = self._forward(map_leaves(micro_batch, torch.clone))
        return float(sums.loss.detach()), float(sums.weight)

    @contextmanager
    def _put_back(self) -> Iterator[None]:
        """Run the model in evaluation mode and on copies of its buffers; afterwards all is as before."""
        random, copies = Snapshot(None, devices_of(self._model)), dict[int, Tensor]()
        places = [place for module in self._model.modules() for place in (module.__dict__, module._buffers)]
        held = [(place, dict(place)) for place in places]
        try:
            for module in self._model.modules():
                module.__dict__["training"] = False
                for name, buffer in module._buffers.items():
                    # Copies, since the graph that waits for its backward pass may hold the buffers themselves.
                    if buffer is not None:
                        module._buffers[name] = copies.setdefault(id(buffer), buffer.detach().clone())
            yield
        finally:
            for place, before in held:
                place.clear()
                place.update(before)
            random.restore()


def _judge(found: Sequence[tuple[float, float]], tolerance: float) -> Literal["mean", "sum"] | None:
    """Compare the losses of two parts, which have equally many examples, and of both together; with their weights."""
    (first, first_weight), (second, second_weight), (both, weight) = found
    total, scale = first + second, max(abs(first), abs(second))
    # Losses of both signs may add up to next to nothing, and so may their mean.
    if not all(map(math.isfinite, (first, second, both, weight))) or abs(total) <= _FAR * scale:
        return None
    if abs(both - total) <= _NEAR * abs(total):
        return "sum"
    means = [total / 2]
    if weight != 0:
        means.append((first * first_weight + second * second_weight) / weight)
    return "mean" if any(abs(both - mean) <= tolerance * scale for mean in means) else None
