"""Squared norms of each micro-batch's gradient, taken by hooks while backward runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@final
class GradientNorms:
    """Sums ``|h_i|² / b_i`` over micro-batches, ``h_i`` the gradient that backward adds for micro-batch ``i``.

    A hook of a parameter fires once a backward, with the gradient of that backward before it is added to ``.grad``, so
    no copy of a gradient is needed. Everything stays on the device.

    Args:
        parameters: those to watch.
        groups: the group of each parameter, 0, 1, …; sums are kept apart by group. None: one group.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], groups: Sequence[int] | None = None) -> None:
        self.groups = [0] * len(parameters) if groups is None else list(groups)
        self._parameters = list(parameters)
        self._handles: list[RemovableHandle] = [
            parameter.register_hook(partial(self._add, group))
            for parameter, group in zip(parameters, self.groups, strict=True)
        ]
        self._squares: list[Tensor] = []
        self._fired: list[int] = []
        self._is_open = False
        self.total: Tensor | None = None  # one sum a group

    @property
    def num_groups(self) -> int:
        """Return how many sums there are."""
        return max(self.groups) + 1

    def _add(self, group: int, gradient: Tensor) -> None:
        if self._is_open:
            self._squares.append(_square(gradient))
            self._fired.append(group)

    def begin(self) -> None:
        """Start a micro-batch."""
        self._squares, self._fired, self._is_open = [], [], True

    def end(self, num_examples: int) -> None:
        """Close a micro-batch of some examples and add its share; one of no examples counts for nothing."""
        self._is_open = False
        if not self._squares or num_examples == 0:
            return
        share = _sum_by_group(self._squares, self._fired, self.num_groups) / num_examples
        self.total = share if self.total is None else self.total + share

    def of_gradients(self) -> Tensor:
        """Return the squared norm of the gradients that are there now, one a group."""
        found = [
            (parameter.grad, group)
            for parameter, group in zip(self._parameters, self.groups, strict=True)
            if parameter.grad is not None
        ]
        squares = [_square(gradient) for gradient, _ in found]
        return _sum_by_group(squares, [group for _, group in found], self.num_groups)

    def reset(self) -> None:
        """Forget the micro-batches so far."""
        self._squares, self._fired, self._is_open, self.total = [], [], False, None

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def _square(gradient: Tensor) -> Tensor:
    """Return the squared norm of a gradient, in float32 or wider."""
    dense = (gradient.coalesce().values() if gradient.is_sparse else gradient).detach()
    is_wide = dense.dtype in (torch.float32, torch.float64)
    if is_wide and dense.device.type == "cpu" and dense.is_contiguous():
        flat = dense.view(-1)
        return torch.dot(flat, flat)  # on a CPU twice as fast as a norm for small gradients
    # Squares of half-precision gradients overflow.
    return torch.linalg.vector_norm(dense, dtype=dense.dtype if is_wide else torch.float32).square()


def _sum_by_group(squares: Sequence[Tensor], groups: Sequence[int], num_groups: int) -> Tensor:
    device = squares[0].device
    wide = torch.float32 if device.type == "mps" else torch.float64
    if any(square.device != device or square.dtype != squares[0].dtype for square in squares):
        squares = [square.to(device=device, dtype=wide) for square in squares]
    stacked = torch.stack(list(squares)).to(wide)
    if num_groups == 1:
        return stacked.sum().reshape(1)
    return stacked.new_zeros(num_groups).index_add(0, torch.tensor(groups, device=device), stacked)
