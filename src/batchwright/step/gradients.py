"""Squared norms of each micro-batch's gradient, taken by hooks while backward runs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle


@final
class GradientNorms:
    """Sums ``|h_i|² / b_i`` over micro-batches, ``h_i`` the gradient that backward adds for micro-batch ``i``.

    A hook of a parameter fires once a backward, with the gradient of that backward before it is added to ``.grad``, so
    no copy of a gradient is needed. Everything stays on the device.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._handles: list[RemovableHandle] = [
            parameter.register_hook(self._add) for parameter in parameters if parameter.requires_grad
        ]
        self._current: dict[torch.device, Tensor] = {}
        self._is_open = False
        self.total: Tensor | None = None

    def _add(self, gradient: Tensor) -> None:
        if not self._is_open:
            return
        dense = gradient.coalesce().values() if gradient.is_sparse else gradient
        # Squares of half-precision gradients overflow; double is free on a CPU and slow on a GPU.
        wide = dense.detach().to(torch.float64 if dense.dtype == torch.float64 else torch.float32)
        square = torch.linalg.vector_norm(wide).square()
        known = self._current.get(square.device)
        self._current[square.device] = square if known is None else known + square

    def begin(self) -> None:
        """Start a micro-batch."""
        self._current, self._is_open = {}, True

    def end(self, num_examples: int) -> None:
        """Close a micro-batch of some examples and add its share."""
        self._is_open = False
        for square in self._current.values():
            share = (square / num_examples).to(
                dtype=torch.float64, device="cpu" if square.device.type == "cpu" else None
            )
            self.total = share if self.total is None else self.total + share.to(self.total.device)

    def reset(self) -> None:
        """Forget the micro-batches so far."""
        self._current, self._is_open, self.total = {}, False, None

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


def squared_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Return the summed squares of some gradients, in float32 or wider."""
    squares = []
    for gradient in gradients:
        dense = gradient.coalesce().values() if gradient.is_sparse else gradient
        wide = dense.to(torch.float64 if dense.dtype == torch.float64 else torch.float32)
        squares.append(torch.linalg.vector_norm(wide).square())
    device = squares[0].device
    return torch.stack([square.to(device=device, dtype=torch.float64) for square in squares]).sum()
