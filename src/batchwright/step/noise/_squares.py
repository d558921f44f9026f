"""Squared norms of gradients, many at a time."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

# Gradients up to this size wait, so that one call takes the norms of many. Larger ones would hold too much memory.
SMALL_ON_CPU = 1 << 14
_SMALL = 1 << 18
_MAX_WAITING = 128


@final
class Squares:
    """Collects the squared norms of gradients as they come, each with its group."""

    def __init__(self) -> None:
        self._squares: list[Tensor] = []
        self._groups: list[int] = []
        self._waiting: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = {}
        self._num_waiting = 0

    def add(self, gradient: Tensor, group: int) -> None:
        """Take the norm of a gradient, now or later together with others."""
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient)
        if gradient.numel() > (SMALL_ON_CPU if gradient.is_cpu else _SMALL) or gradient.is_sparse:
            self._squares.append(square_of(gradient))
            self._groups.append(group)
            return
        self._waiting.setdefault((group, gradient.device, gradient.dtype), []).append(gradient.detach())
        self._num_waiting += 1
        if self._num_waiting >= _MAX_WAITING:  # over all groups: there may be as many groups as parameters
            self._flush()

    def sums(self, num_groups: int) -> Tensor | None:
        """Return the sum of each group, None if there was no gradient."""
        self._flush()
        squares = self._squares
        if not squares:
            return None
        device = squares[0].device
        wide = torch.float32 if device.type == "mps" else torch.float64
        if any(square.device != device or square.dtype != squares[0].dtype for square in squares):
            squares = [square.to(device=device, dtype=wide) for square in squares]
        stacked = torch.stack(squares)
        if num_groups == 1:
            return stacked.sum(0, keepdim=True, dtype=wide)
        groups = torch.tensor(self._groups, device=device)
        return stacked.new_zeros(num_groups, dtype=wide).index_add(0, groups, stacked.to(wide))

    def _flush(self) -> None:
        for (group, device, dtype), alike in self._waiting.items():
            if device.type == "cpu":  # there a call costs more than a copy into one row
                self._squares.append(square_of(_flatten_dense_tensors(alike)))
            else:
                norms = torch.stack(torch._foreach_norm(alike, dtype=_wide(dtype)))
                self._squares.append(torch.dot(norms, norms))
            self._groups.append(group)
        self._waiting, self._num_waiting = {}, 0


def marked(hook: Any) -> Any:
    """Return a hook with the mark of those that only look at a gradient."""
    hook.is_batchwright = True  # those of users, which may change a gradient, lack it
    return hook


def square_of(gradient: Tensor) -> Tensor:
    """Return the squared norm of a gradient, in float32 or wider."""
    if gradient.is_cpu and gradient.dtype is torch.float32 and gradient.is_contiguous():
        flat = gradient.detach().view(-1)
        return torch.dot(flat, flat)  # twice as fast as a norm on a CPU
    dense = (gradient.coalesce().values() if gradient.is_sparse else gradient).detach()
    return torch.linalg.vector_norm(dense, dtype=_wide(dense.dtype)).square()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type to square in: squares of half-precision gradients overflow."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32
