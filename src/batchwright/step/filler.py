"""Filler rows: not counted as examples, and taken out where a loss would count them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .._tree import Rows, leaves, take
from ..errors import ArgumentError
from ._copies import Copied
from .report import MicroSums

# The field of a batch that is 1 for each of its rows and 0 for filler.
ROW_WEIGHT = "row_weight"
# A number of examples, perhaps on its way from the device.
Count: TypeAlias = "int | Copied"


def without_filler(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rows of a batch that are examples; a batch without ``row_weight`` or without filler is returned as is.

    It reads the weights, so a batch on a device has to wait for it. The rows keep the width they were padded to.

    >>> batch = {"x": torch.tensor([5, 6, 5]), "row_weight": torch.tensor([1.0, 1.0, 0.0])}
    >>> without_filler(batch)["x"].tolist()
    [5, 6]

    Raises:
        ArgumentError: all rows are filler, or the weights are no tensor of one number per row.
    """
    weights = batch.get(ROW_WEIGHT)
    if weights is None:
        return batch
    if not isinstance(weights, Tensor) or weights.ndim != 1:
        found = f"{weights.ndim} axes" if isinstance(weights, Tensor) else type(weights).__name__
        raise ArgumentError(f"batch[{ROW_WEIGHT!r}] must be a tensor with one weight per row, got {found}")
    real = torch.nonzero(weights)[:, 0].tolist()
    if not real:
        raise ArgumentError(
            f"all {len(weights)} rows of the batch are filler, and a batch without rows has no loss; leave it out, or "
            "take the filler off before the batch is cut into pieces"
        )
    return batch if len(real) == len(weights) else take(dict(batch), real)


def weights_of(batch: Any) -> Tensor | None:
    """Return the weight of each row of a batch that may have filler, None for any other."""
    found = batch.get(ROW_WEIGHT) if isinstance(batch, Mapping) else None
    return found if isinstance(found, Tensor) and found.ndim == 1 else None


def count_rows(batch: Any, num_examples: int) -> tuple[Count, int]:
    """Return how many rows of a micro-batch are examples, and how many there are, without waiting for the device."""
    weights = weights_of(batch)
    if weights is None:
        return num_examples, num_examples
    num = (weights != 0).sum()
    return Copied(num) if num.is_cuda else int(num), len(weights)


@final
class Filler:
    """Knows whether the loss leaves filler rows out; if it does not, they are cut off.

    Args:
        run: ``run(micro_batch)`` returns the sums of the loss function.
        model: put into eval mode while losses are compared.
        snapshot: returns what restores the random state and the buffers.
        is_half: the loss is computed in half precision.
    """

    def __init__(
        self,
        run: Callable[[Any], MicroSums],
        model: nn.Module,
        snapshot: Callable[[], Callable[[], None]],
        *,
        is_half: bool,
    ) -> None:
        self._run, self._model, self._snapshot, self._is_half = run, model, snapshot, is_half
        self._is_left_out: bool | None = None

    @property
    def is_unknown(self) -> bool:
        """Return whether no filler was seen so far."""
        return self._is_left_out is None

    def cut_off(self, batch: Any, *, always: bool = False) -> Any:
        """Return a micro-batch without its filler rows, if the loss counts them or ``always``; None if none is left."""
        weights = weights_of(batch)
        if weights is None or (self._is_left_out is not False and not always):
            return batch
        return without_filler(batch) if bool((weights != 0).any()) else None

    def is_counted(self, batch: Any) -> bool:
        """Say whether the loss counts the filler rows of a micro-batch; it is asked once, and warned of.

        Two examples alone (one where there is only one) and the same with three filler rows must have the same loss and
        weight, in eval mode and, if the forward pass draws no random numbers, in training mode.
        """
        weights = weights_of(batch)
        if weights is None or self._is_left_out is not None:
            return self._is_left_out is False
        real, filler = (weights != 0).nonzero().flatten().tolist(), (weights == 0).nonzero().flatten().tolist()
        if not filler or not real:
            return False
        reason = self._why_counted(Rows(batch), _unlike(batch, real), filler[0])
        self._is_left_out = reason is None
        if reason is not None:
            warnings.warn(
                f"filler rows are cut off, and short batches run eagerly, as {reason}; multiply losses and weights "
                f"of rows by batch[{ROW_WEIGHT!r}], or count labels that are not ignored",
                stacklevel=7,
            )
        return self._is_left_out is False

    def _why_counted(self, rows: Rows, real: list[int], filler: int) -> str | None:
        if any(isinstance(part, _BatchNorm) and part.training for part in self._model.modules()):
            return "BatchNorm in training mode takes its statistics over all rows"
        modes = [(part, part.training) for part in self._model.modules()]
        choices = (real, [*real, filler, filler, filler])
        try:
            reason = self._compare(rows, choices) if self._draws_nothing(rows, real) else None
            self._model.eval()
            return reason or self._compare(rows, choices)
        except Exception as error:  # a loss that cannot run on few rows
            return f"whether the loss counts them cannot be seen ({type(error).__name__}: {str(error)[:80]})"
        finally:
            for part, mode in modes:
                part.training = mode

    def _draws_nothing(self, rows: Rows, real: list[int]) -> bool:
        """Say whether two passes from two random states give the same loss, so that training mode can be compared."""
        if not any(part.training for part in self._model.modules()):
            return False
        restore = self._snapshot()
        try:
            first = self._run(rows.take(real)).loss.detach()
            before = _state_of(first.device)
            second = self._run(rows.take(real)).loss.detach()
            has_moved = not torch.equal(_state_of(first.device), before)
            return not has_moved and math.isclose(float(first), float(second), rel_tol=1e-5)
        finally:
            restore()

    def _compare(self, rows: Rows, choices: tuple[list[int], list[int]]) -> str | None:
        """Return what differs between examples alone and with filler, None if nothing does."""
        found = []
        for places in choices:
            restore = self._snapshot()
            try:
                found.append(self._run(rows.take(places)))
            finally:
                restore()
        loss, weight = [float(one.loss.detach()) for one in found], [float(one.weight) for one in found]
        who = "an example" if len(choices[0]) == 1 else "two examples"
        verb = "has" if len(choices[0]) == 1 else "have"
        if not math.isclose(*weight, rel_tol=1e-6):
            return f"the loss counts them: {who} of weight {weight[0]:g} {verb} {weight[1]:g} with three of them"
        if not math.isclose(*loss, rel_tol=self._tolerance(found[0].loss), abs_tol=1e-6):
            return f"the loss counts them: {who} of loss {loss[0]:g} {verb} {loss[1]:g} with three of them"
        return None

    def _tolerance(self, loss: Tensor) -> float:
        """Return how far losses may be apart by rounding, as a share."""
        dtypes = {loss.dtype, *(parameter.dtype for parameter in self._model.parameters())}
        is_half = self._is_half or torch.is_autocast_enabled(loss.device.type) or bool(dtypes & _HALF)
        if is_half:
            return 2e-2
        # On CUDA, kernels for few rows and for many may differ in whether they round to TF32.
        return 1e-3 if loss.is_cuda else 1e-4


_HALF = {torch.float16, torch.bfloat16}


def _state_of(device: torch.device) -> Tensor:
    """Return the state of the random generator that a device draws from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _unlike(batch: Any, real: list[int]) -> list[int]:
    """Return the first row and one that differs from it, if there is one: alike ones have the mean of their copies."""
    first, *others = real
    tensors = [one for one in leaves(batch) if one.ndim and len(one) > max(real)]
    for other in others:
        if any(not torch.equal(one[first], one[other]) for one in tensors):
            return [first, other]
    return [first, *others[:1]]
