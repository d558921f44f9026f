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
        self._norms: list[Tensor] = []
        self._fired: list[int] = []
        self._is_open = False
        self.total: Tensor | None = None  # one sum a group

    @property
    def num_groups(self) -> int:
        """Return how many sums there are."""
        return max(self.groups) + 1

    def _add(self, group: int, gradient: Tensor) -> None:
        if self._is_open:
            self._norms.append(_norm(gradient))
            self._fired.append(group)

    def begin(self) -> None:
        """Start a micro-batch."""
        self._norms, self._fired, self._is_open = [], [], True

    def end(self, num_examples: int) -> None:
        """Close a micro-batch of some examples and add its share; one of no examples counts for nothing."""
        self._is_open = False
        if not self._norms or num_examples == 0:
            return
        share = _sum_squares(self._norms, self._fired, self.num_groups) / num_examples
        self.total = share if self.total is None else self.total + share

    def of_gradients(self) -> Tensor:
        """Return the squared norm of the gradients that are there now, one a group."""
        found = [
            (parameter.grad, group)
            for parameter, group in zip(self._parameters, self.groups, strict=True)
            if parameter.grad is not None
        ]
        return _sum_squares([_norm(gradient) for gradient, _ in found], [group for _, group in found], self.num_groups)

    def reset(self) -> None:
        """Forget the micro-batches so far."""
        self._norms, self._fired, self._is_open, self.total = [], [], False, None

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def _norm(gradient: Tensor) -> Tensor:
    dense = gradient.coalesce().values() if gradient.is_sparse else gradient
    # Squares of half-precision gradients overflow.
    wide = torch.float64 if dense.dtype == torch.float64 else torch.float32
    return torch.linalg.vector_norm(dense.detach(), dtype=wide)


def _sum_squares(norms: Sequence[Tensor], groups: Sequence[int], num_groups: int) -> Tensor:
    device = norms[0].device
    dtype = torch.float32 if device.type == "mps" else torch.float64
    squares = torch.stack([norm.to(device=device, dtype=dtype) for norm in norms]).square()
    if num_groups == 1:
        return squares.sum().reshape(1)
    return squares.new_zeros(num_groups).index_add(0, torch.tensor(groups, device=device), squares)
