"""Squared norms of gradients, taken by hooks while a backward pass runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.utils.hooks import RemovableHandle

# Gradients up to this size wait, so that one call takes the norms of many. Larger ones would hold too much memory.
_SMALL_ON_CPU = 1 << 14
_SMALL = 1 << 18
_MAX_WAITING = 128


class Norms(ABC):
    """Adds up squared norms over the micro-batches of an update.

    Attributes:
        total: the sums so far, ``num_groups`` of them; None before the first micro-batch.
    """

    total: Tensor | None

    @property
    @abstractmethod
    def num_groups(self) -> int:
        """Return how many sums there are."""

    def arrange(self, parts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return the micro-batches that run in place of some that are equally random."""
        return parts

    @abstractmethod
    def begin(self, num_rows: int) -> None:
        """Start a micro-batch of some rows, before its forward pass."""

    @abstractmethod
    def end(self, num_examples: int) -> None:
        """Close a micro-batch of some examples and add its share; one without examples adds nothing."""

    @abstractmethod
    def reset(self, total: Tensor | None = None) -> None:
        """Forget the micro-batches so far, or go back to an earlier total."""


@final
class GradientNorms(Norms):
    """Sums ``|h_i|² / b_i`` over micro-batches, where backward adds the gradient ``h_i`` for micro-batch ``i``.

    A hook of a parameter fires once per backward, with the gradient of that backward before it is added to ``.grad``,
    so no copy of the gradient is needed. Everything stays on the device.

    Args:
        parameters: the parameters to watch.
        groups: the group of each parameter, 0, 1, …, with a sum each; None is one group for all.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], groups: Sequence[int] | None = None) -> None:
        self.groups = [0] * len(parameters) if groups is None else list(groups)
        self._num_groups = max(self.groups) + 1
        self._parameters = list(parameters)
        self._handles: list[RemovableHandle] = [
            parameter.register_hook(marked(partial(self._add, group)))
            for parameter, group in zip(parameters, self.groups, strict=True)
        ]
        self._open: _Squares | None = None
        self.total: Tensor | None = None  # one sum per group

    @property
    def num_groups(self) -> int:
        """Return how many sums there are."""
        return self._num_groups

    def _add(self, group: int, gradient: Tensor) -> None:
        if self._open is not None:
            self._open.add(gradient, group)

    def begin(self, num_rows: int) -> None:
        """Start a micro-batch."""
        self._open = _Squares()

    def end(self, num_examples: int) -> None:
        """Close a micro-batch of some examples and add its share; one without examples adds nothing."""
        squares, self._open = self._open, None
        if squares is None or num_examples == 0:
            return
        found = squares.sums(self.num_groups)
        if found is not None:
            share = found / num_examples
            self.total = share if self.total is None else self.total + share

    def of_gradients(self) -> Tensor:
        """Return the squared norm of the gradients that are there now, one per group."""
        squares = _Squares()
        for parameter, group in zip(self._parameters, self.groups, strict=True):
            if parameter.grad is not None:
                squares.add(parameter.grad, group)
        found = squares.sums(self.num_groups)
        return torch.zeros(self.num_groups, dtype=torch.float64) if found is None else found

    def reset(self, total: Tensor | None = None) -> None:
        """Forget the micro-batches so far, or go back to an earlier total."""
        self._open, self.total = None, total

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


@final
class _Squares:
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
        if gradient.numel() > (_SMALL_ON_CPU if gradient.is_cpu else _SMALL) or gradient.is_sparse:
            self._squares.append(_square(gradient))
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
                self._squares.append(_square(_flatten_dense_tensors(alike)))
            else:
                norms = torch.stack(torch._foreach_norm(alike, dtype=_wide(dtype)))
                self._squares.append(torch.dot(norms, norms))
            self._groups.append(group)
        self._waiting, self._num_waiting = {}, 0


def marked(hook: Any) -> Any:
    """Return a hook with the mark of those that only look at a gradient."""
    hook.is_batchwright = True  # those of users, which may change a gradient, lack it
    return hook


def _square(gradient: Tensor) -> Tensor:
    """Return the squared norm of a gradient, in float32 or wider."""
    if gradient.is_cpu and gradient.dtype is torch.float32 and gradient.is_contiguous():
        flat = gradient.detach().view(-1)
        return torch.dot(flat, flat)  # twice as fast as a norm on a CPU
    dense = (gradient.coalesce().values() if gradient.is_sparse else gradient).detach()
    return torch.linalg.vector_norm(dense, dtype=_wide(dense.dtype)).square()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type to square in: squares of half-precision gradients overflow."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32
