"""Gradients of single examples in a few vectors, taken by hooks of modules while a micro-batch runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from ...errors import ArgumentError
from ._vectors import Tap
from .meter import GradientNorms, Norms, Squares, marked

# How far the sum over examples may be off the gradient of a vector: rounding, by the type that gradients come in.
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 1e-2}
_USUAL_TOLERANCE = 2e-3
INSTEAD = "use noise_from='all'"


@final
class Vector:
    """A parameter that is measured, and what is known about it.

    Attributes:
        name: of the parameter.
        parameter: the parameter.
        sizes: of the micro-batches in which the gradients of its examples added up to its own.
        reason: why it cannot be measured, None as far as is known.
    """

    def __init__(self, name: str, parameter: nn.Parameter) -> None:
        self.name = name
        self.parameter = parameter
        self.sizes: set[int] = set()
        self.reason: str | None = None

    @property
    def is_good(self) -> bool:
        """Return whether it was right in micro-batches of two sizes: a length may equal one by chance."""
        return self.reason is None and len(self.sizes) >= 2


@final
class VectorNorms(Norms):
    """Sums ``|h_e|²`` over examples for every vector, and ``|h_i|² / b_i`` of the whole gradient where asked to.

    Hooks are there only from ``begin`` to ``end``. A vector that several modules or calls use gets the sum of what they
    show. Nothing waits for the device, except in updates that also measure the whole gradient: these compare the sum
    over examples with the gradient of the vector itself.

    Args:
        model: whose modules are tapped.

    Attributes:
        taps: the modules.
        vectors: their parameters.
        whole: measures the whole gradient too, None in most updates.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.measure([], [])
        self.whole: GradientNorms | None = None
        self.total: Tensor | None = None
        self._handles: list[RemovableHandle] = []
        self._rows: list[Tensor | None] | None = None  # the gradient of every example in each vector, while open
        self._own: dict[int, Tensor] = {}  # gradients of the vectors themselves, by place
        self._dtypes: dict[int, torch.dtype] = {}
        self._grads: list[tuple[int, int]] = []
        self._num_rows = 0

    def measure(self, taps: Sequence[Tap], vectors: Sequence[Vector]) -> None:
        """Measure these vectors from now on."""
        self._batch_norms = [part for part in self._model.modules() if isinstance(part, _BatchNorm)]
        self.taps = [tap for tap in taps if tap.vector is not None]
        self.vectors = list(vectors)
        self._places = {id(vector.parameter): place for place, vector in enumerate(self.vectors)}

    def spread(self, places: Sequence[int], num_modules: int) -> list[int]:
        """Return the places of vectors in at most so many modules, spread evenly over the model."""
        known = {id(self.vectors[place].parameter) for place in places}
        able = [tap for tap in self.taps if id(tap.vector) in known]
        if len(able) > num_modules:
            able = [able[round(step * (len(able) - 1) / (num_modules - 1))] for step in range(num_modules)]
        kept = {id(tap.vector) for tap in able}
        return [place for place in places if id(self.vectors[place].parameter) in kept]

    @property
    def num_groups(self) -> int:
        """Return how many sums there are: one, or that of the whole gradient and one of each vector."""
        return 1 if self.whole is None else 1 + len(self.vectors)

    def check_model(self) -> None:
        """Refuse a model that mixes the examples of a batch."""
        if any(part.training for part in self._batch_norms):
            raise ArgumentError(
                f"BatchNorm mixes the examples of a batch, so none has a gradient of its own; {INSTEAD}, or GroupNorm"
            )

    def arrange(self, parts: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
        """Return parts of at least two sizes while a vector waits for them: of equal ones, the last is cut again."""
        is_checking = self.whole is not None and any(one.reason is None and not one.is_good for one in self.vectors)
        if not is_checking or len({len(part) for part in parts}) != 1 or len(parts[-1]) < 2:
            return parts
        place = max(1, len(parts[-1]) // 3)
        return [*parts[:-1], parts[-1][:place], parts[-1][place:]]

    def begin(self, num_rows: int) -> None:
        """Put the hooks on the modules."""
        self._close()
        self._rows, self._own, self._num_rows = [None] * len(self.vectors), {}, num_rows
        self._handles = [tap.module.register_forward_hook(partial(self._look, tap)) for tap in self.taps]
        if self.whole is not None:
            self._handles += [one.parameter.register_hook(marked(partial(self._note, one))) for one in self.vectors]
            self.whole.begin(num_rows)
        else:
            self._grads = [_mark(one.parameter) for one in self.vectors]

    def _look(self, tap: Tap, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Ask for the gradient of a module's output."""
        inputs = args[0] if args else None
        if not isinstance(output, Tensor) or not output.requires_grad:
            return  # the first pass of a reentrant checkpoint is one; the second comes during the backward pass
        if output.dim() < 2 or len(output) != self._num_rows:
            rows = tuple(output.shape)
            self._refuse(tap, f"its output of shape {rows} does not have a row per example, of which there are")
        elif tap.scale is None:
            output.register_hook(partial(self._take, tap, None, 0))
        elif isinstance(inputs, Tensor) and inputs.shape == output.shape:
            output.register_hook(partial(self._take, tap, inputs.detach(), inputs._version))

    def _take(self, tap: Tap, inputs: Tensor | None, version: int, gradient: Tensor) -> None:
        """Add the gradients of the examples in one call of a module."""
        if self._rows is None:
            return
        if inputs is not None and inputs._version != version:
            self._refuse(tap, "its input was changed in place after it ran, in a micro-batch of rows:")
            return
        place = self._places.get(id(tap.vector))
        if place is not None:
            rows, before = tap.rows_of(gradient, inputs), self._rows[place]
            self._rows[place] = rows if before is None else before + rows
            self._dtypes[place] = gradient.dtype

    def _note(self, vector: Vector, gradient: Tensor) -> None:
        """Keep the gradient of a vector, to compare it with the sum over examples."""
        if self._rows is not None:
            place = self._places[id(vector.parameter)]
            before = self._own.get(place)
            self._own[place] = gradient.detach().clone() if before is None else before + gradient.detach()

    def _refuse(self, tap: Tap, reason: str) -> None:
        """Leave the vectors of a module out while they are checked; later it is too late for that."""
        text = f"{reason} {self._num_rows}"
        place = self._places.get(id(tap.vector))
        if place is not None and self.vectors[place].reason is None:
            self.vectors[place].reason = text

    def end(self, num_examples: int) -> None:
        """Take the hooks off, and add the sums of a micro-batch."""
        rows, whole = self._rows or [], self.whole
        self._close()
        if whole is not None:
            whole.end(num_examples)
            self._check(rows)
        else:
            self._check_late(rows)
        if num_examples == 0 or not rows:
            return
        share = self._squares(rows)
        if whole is not None:
            first = share.new_zeros(1) if whole.total is None else whole.total.to(share)
            share = torch.cat([first, share])
            whole.reset()
        self.total = share if self.total is None else self.total + share

    def _squares(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return the squared norm of each vector, or of all together where the whole gradient is not measured."""
        squares = Squares()
        for place, one in enumerate(tensors):
            if one is not None:
                squares.add(one, 0 if self.whole is None else place)
        num = 1 if self.whole is None else len(tensors)
        found = squares.sums(num)
        return torch.zeros(num, dtype=torch.float64) if found is None else found

    def of_gradients(self) -> Tensor:
        """Return the squared norms of the gradients that are there now, in the order of ``total``."""
        squares = self._squares([one.parameter.grad for one in self.vectors])
        return squares if self.whole is None else torch.cat([self.whole.of_gradients().to(squares), squares])

    def _check(self, seen: Sequence[Tensor | None]) -> None:
        """Compare the sums over examples with the gradients of the vectors; this waits for the device."""
        for place, (vector, rows) in enumerate(zip(self.vectors, seen, strict=False)):
            own = self._own.get(place)
            if vector.reason is not None or (rows is None and own is None):
                continue
            if rows is None or own is None:
                vector.reason = "its gradient does not come from calls of its module alone"
                continue
            gap, size, spread = torch.stack([(rows.sum(0) - own).norm(), own.norm(), rows.norm()]).tolist()
            bound = _TOLERANCE.get(self._dtypes[place], _USUAL_TOLERANCE) * (size + spread)
            if math.isfinite(gap) and gap > bound:
                vector.reason = f"the gradients of its examples add up to one that is {gap:.2g} off {size:.2g}"
            elif math.isfinite(gap):
                vector.sizes.add(self._num_rows)

    def _check_late(self, seen: Sequence[Tensor | None]) -> None:
        """Refuse what has changed since vectors were checked, as far as the host can see it."""
        for vector, rows, mark in zip(self.vectors, seen, self._grads, strict=False):
            if vector.reason is None and rows is None and _mark(vector.parameter) != mark:
                vector.reason = "its module no longer shows the gradients of examples"
            if vector.reason is not None:
                raise ArgumentError(f"{vector.name} was measured before, but now {vector.reason}; {INSTEAD}")

    def reset(self, total: Tensor | None = None) -> None:
        """Forget the micro-batches so far, or go back to an earlier total."""
        self._close()
        if self.whole is not None:
            self.whole.reset()
        self.total = total

    def close(self) -> None:
        """Take all hooks off."""
        self._close()
        if self.whole is not None:
            self.whole.close()
        self.whole = self.total = None

    def _close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._rows = [], None


def _mark(parameter: nn.Parameter) -> tuple[int, int]:
    """Return what changes when a backward pass reaches a parameter."""
    return (0, 0) if parameter.grad is None else (id(parameter.grad), parameter.grad._version)
