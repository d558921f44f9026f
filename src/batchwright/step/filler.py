"""Filler rows: not counted as examples, and taken out where a loss would count them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from .._tree import Rows, take
from ..errors import ArgumentError
from .report import Copied, MicroSums

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
    """

    def __init__(
        self, run: Callable[[Any], MicroSums], model: nn.Module, snapshot: Callable[[], Callable[[], None]]
    ) -> None:
        self._run, self._model, self._snapshot = run, model, snapshot
        self._is_left_out: bool | None = None

    @property
    def is_unknown(self) -> bool:
        """Return whether no filler was seen so far."""
        return self._is_left_out is None

    def cut_off(self, batch: Any, *, always: bool = False) -> Any:
        """Return a micro-batch without its filler rows, if the loss counts them or ``always``."""
        if weights_of(batch) is None or (self._is_left_out is not False and not always):
            return batch
        return without_filler(batch)

    def is_counted(self, batch: Any) -> bool:
        """Say whether the loss counts the filler rows of a micro-batch; it is asked once, and warned of.

        One example alone and the same one with three filler rows must have the same loss and weight.
        """
        weights = weights_of(batch)
        if weights is None or self._is_left_out is not None:
            return self._is_left_out is False
        real, filler = (weights != 0).nonzero().flatten().tolist(), (weights == 0).nonzero().flatten().tolist()
        if not filler or not real:
            return False
        reason = self._why_counted(Rows(batch), real[0], filler[0])
        self._is_left_out = reason is None
        if reason is not None:
            warnings.warn(
                f"filler rows are cut off, and short batches run eagerly, as {reason}; multiply losses and weights "
                f"of rows by batch[{ROW_WEIGHT!r}], or count labels that are not ignored",
                stacklevel=7,
            )
        return self._is_left_out is False

    def _why_counted(self, rows: Rows, real: int, filler: int) -> str | None:
        if any(isinstance(part, _BatchNorm) and part.training for part in self._model.modules()):
            return "BatchNorm in training mode takes its statistics over all rows"
        restore, modes = self._snapshot(), [(part, part.training) for part in self._model.modules()]
        try:
            self._model.eval()
            alone, filled = (self._run(rows.take(places)) for places in ([real], [real, filler, filler, filler]))
            loss = float(alone.loss.detach()), float(filled.loss.detach())
            weight = float(alone.weight), float(filled.weight)
        except Exception as error:  # a loss that cannot run on few rows
            return f"whether the loss counts them cannot be seen ({type(error).__name__}: {str(error)[:80]})"
        finally:
            for part, mode in modes:
                part.training = mode
            restore()
        if not math.isclose(*weight, rel_tol=1e-6):
            return f"the loss counts them: an example of weight {weight[0]:g} has {weight[1]:g} with three of them"
        if not math.isclose(*loss, rel_tol=0.05, abs_tol=1e-6):
            return f"the loss counts them: an example of loss {loss[0]:g} has {loss[1]:g} with three of them"
        return None
