"""Gradients of single examples in a few vectors, taken by hooks of modules while a micro-batch runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.hooks import RemovableHandle

from ...errors import ArgumentError
from ._vectors import Tap, compiled_parts
from .meter import SMALL_ON_CPU, GradientNorms, Norms, Squares, marked, square_of

# How far the sum over examples may be off the gradient of a vector: rounding, by the type that gradients come in.
_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 1e-2}
_USUAL_TOLERANCE = 2e-3
# Rows of one shape are copied into one tensor, so that a call takes the norms of all vectors. On a GPU a call costs
# more than a copy of so many numbers; on a CPU that holds for fewer.
_SMALL = 1 << 22
INSTEAD = "use noise_from='all'"
_COMPILED = "torch.compile runs its module without hooks"
_ELSEWHERE = "its gradient does not come from a call of its module that runs hooks; compiled modules run none"


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

    Hooks are there only from ``begin`` to ``end``. Every micro-batch compares the sum over examples with the gradient
    of the vector itself. Updates that also measure the whole gradient wait for the device to do so, and leave out what
    is off. Others wait for nothing: for every vector ``total`` holds ``sum |h_e|²``, then the square of the gap between
    the two, then that of the vector's own gradient, and who reads them looks at the gap. A vector that is used twice is
    left out: its rows may come in another order the second time, and the sum over them does not show that.

    Args:
        model: whose modules are tapped.

    Attributes:
        taps: the modules.
        vectors: their parameters.
        whole: measures the whole gradient too, None in most updates.
        tolerances: how far the sum over examples may be off in each vector, as a share.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.measure([], [])
        self.whole: GradientNorms | None = None
        self.total: Tensor | None = None
        self._handles: list[RemovableHandle] = []
        self._rows: list[Tensor | None] | None = None  # the gradient of every example in each vector, while open
        self._own: dict[int, Tensor] = {}  # gradients of the vectors themselves, by place
        self._num_rows = 0
        self._late: str | None = None  # what went wrong in this micro-batch, after vectors were checked

    def measure(self, taps: Sequence[Tap], vectors: Sequence[Vector]) -> None:
        """Measure these vectors from now on."""
        self._batch_norms = [part for part in self._model.modules() if isinstance(part, _BatchNorm)]
        self.taps = [tap for tap in taps if tap.vector is not None]
        self.vectors = list(vectors)
        self._places = {id(vector.parameter): place for place, vector in enumerate(self.vectors)}
        self.tolerances = [_USUAL_TOLERANCE] * len(self.vectors)

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
        """Return how many sums there are: three for each vector, or one and that of the whole gradient."""
        return 3 * len(self.vectors) if self.whole is None else 1 + len(self.vectors)

    def check_model(self) -> None:
        """Refuse a model that mixes the examples of a batch."""
        if any(part.training for part in self._batch_norms):
            raise ArgumentError(
                f"BatchNorm mixes the examples of a batch, so none has a gradient of its own; {INSTEAD}, or GroupNorm"
            )

    def leave_compiled_out(self) -> None:
        """Note which vectors belong to compiled modules; hooks may run there at first, but not for every shape."""
        compiled = compiled_parts(self._model)
        for tap in self.taps:
            if tap.module in compiled:
                self._refuse(tap, _COMPILED)

    def hold(self) -> Callable[[], None]:
        """Return a function that puts back what is known about the vectors now."""
        taps, vectors = list(self.taps), list(self.vectors)
        known = [(one, one.reason, set(one.sizes)) for one in vectors]

        def put_back() -> None:
            if self.vectors != vectors:
                self.measure(taps, vectors)
            for one, reason, sizes in known:
                one.reason, one.sizes = reason, set(sizes)

        return put_back

    def arrange(self, parts: Sequence[Sequence[int]], fits: Callable[[Sequence[int]], bool]) -> Sequence[Sequence[int]]:
        """Return parts of at least two sizes while a vector waits for them.

        Two equal ones become a third and the rest, if that fits; of several, the last is cut again.
        """
        is_checking = self.whole is not None and any(one.reason is None and not one.is_good for one in self.vectors)
        if not is_checking or len({len(part) for part in parts}) != 1 or len(parts[-1]) < 2:
            return parts
        if len(parts) == 2:
            both = [*parts[0], *parts[1]]
            place = len(both) // 3
            if fits(both[place:]):
                return [both[:place], both[place:]]
        place = max(1, len(parts[-1]) // 3)
        return [*parts[:-1], parts[-1][:place], parts[-1][place:]]

    def begin(self, num_rows: int) -> None:
        """Put the hooks on the modules."""
        self._close()
        self._rows, self._own, self._num_rows = [None] * len(self.vectors), {}, num_rows
        self._late = None
        self._handles = [tap.module.register_forward_hook(partial(self._look, tap)) for tap in self.taps]
        self._handles += [
            one.parameter.register_hook(marked(partial(self._note, place))) for place, one in enumerate(self.vectors)
        ]
        if self.whole is not None:
            self.whole.begin(num_rows)

    def _look(self, tap: Tap, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Ask for the gradient of a module's output."""
        if not isinstance(output, Tensor) or not output.requires_grad:
            return  # the first pass of a reentrant checkpoint is one; the second comes during the backward pass
        if torch.compiler.is_compiling():
            self._refuse(tap, _COMPILED)
            return
        inputs, node = args[0] if args else None, output.grad_fn  # asking for it ends what the compiler traces
        if node is None:
            return
        shape, width = output.shape, 0 if tap.vector is None else len(tap.vector)
        if len(shape) < 2 or shape[0] != self._num_rows:
            text = f"its output of shape {tuple(shape)} does not have a row per example, of which there are"
            self._refuse(tap, f"{text} {self._num_rows}")
        elif shape[tap.axis] != width:
            self._refuse(tap, f"its output of shape {tuple(shape)} has no {width} features at axis {tap.axis}")
        elif tap.scale is None:
            # The hook of a node sees what that of its output would, and costs less to make.
            node.register_prehook(partial(self._take, tap, None, 0, output.output_nr))
        elif isinstance(inputs, Tensor) and inputs.shape == shape:
            node.register_prehook(partial(self._take, tap, inputs.detach(), inputs._version, output.output_nr))

    def _take(
        self, tap: Tap, inputs: Tensor | None, version: int, number: int, gradients: tuple[Tensor | None, ...]
    ) -> None:
        """Keep the gradients of the examples in a call of a module, from that of one of a node's outputs."""
        place, gradient = self._places.get(id(tap.vector)), gradients[number]
        if self._rows is None or place is None or gradient is None:
            return
        if inputs is not None and inputs._version != version:
            self._refuse(tap, "its input was changed in place after it ran")
        elif self._rows[place] is not None:
            self._refuse(tap, "it is used more than once, and the rows of one call may be in another order")
        else:
            self._rows[place] = tap.rows_of(gradient, inputs)
            self.tolerances[place] = _TOLERANCE.get(gradient.dtype, _USUAL_TOLERANCE)

    def _note(self, place: int, gradient: Tensor) -> None:
        """Keep the gradient of a vector, to compare it with the sum over examples."""
        if self._rows is not None:
            before = self._own.get(place)
            # Autograd would copy a gradient that somebody else holds; of this one it makes .grad itself. It changes
            # that only if the same pass adds to it, and then the examples do not add up to it anyway.
            self._own[place] = gradient.detach() if before is None else before + gradient

    def _refuse(self, tap: Tap, reason: str) -> None:
        """Leave the vector of a module out while it is checked; later it is too late for that."""
        place = self._places.get(id(tap.vector))
        if place is not None:
            self._refuse_vector(self.vectors[place], reason)

    def _refuse_vector(self, vector: Vector, reason: str) -> None:
        if self.whole is None:
            self._late = self._late or f"{vector.name} was measured before, but now {reason}; {INSTEAD}"
        elif vector.reason is None:
            vector.reason = reason

    def end(self, num_examples: int) -> None:
        """Take the hooks off, and add the sums of a micro-batch."""
        rows, whole = self._rows or [], self.whole
        self._close()
        for place, vector in enumerate(self.vectors if rows else []):
            if (rows[place] is None) != (place not in self._own):
                self._refuse_vector(vector, _ELSEWHERE)
        if self._late is not None:
            raise ArgumentError(self._late)
        seen = [place for place, one in enumerate(rows) if one is not None and place in self._own]
        found = self._figures(rows, seen)
        self._own = {}
        if whole is not None:
            whole.end(num_examples)
            self._judge(found, seen)
        if num_examples == 0 or not rows:
            return
        share = found.flatten()
        if whole is not None:
            first = found.new_zeros(1) if whole.total is None else whole.total.to(found)
            share = torch.cat([first, found[0]])
            whole.reset()
        self.total = share if self.total is None else self.total + share

    def _figures(self, rows: Sequence[Tensor | None], seen: Sequence[int]) -> Tensor:
        """Return a row of each of the sums of ``total``, with a column per vector; those of one shape in one go."""
        alike: dict[tuple[Any, ...], list[int]] = {}
        found = {place: one for place in seen if (one := rows[place]) is not None}
        for place, one in found.items():
            alike.setdefault((one.shape, one.dtype, one.device, self._own[place].dtype), []).append(place)
        norms = [
            _norms_of([found[place] for place in places], [self._own[place] for place in places])
            for places in alike.values()
        ]
        if len(norms) == 1 and len(seen) == len(rows):
            return norms[0].to(_wide(norms[0].device)).square()
        device = norms[0].device if norms else self.vectors[0].parameter.device
        columns = [torch.zeros(3, dtype=_wide(device), device=device)] * len(self.vectors)
        for places, one in zip(alike.values(), norms, strict=True):
            for place, column in zip(places, one.to(columns[0]).unbind(1), strict=True):
                columns[place] = column
        return torch.stack(columns, dim=1).square()

    def _judge(self, found: Tensor, seen: Sequence[int]) -> None:
        """Leave out the vectors whose examples do not add up; this waits for the device."""
        figures = found.T.tolist() if seen else []
        for place in seen:
            squares, gap, own = figures[place]
            if not math.isfinite(gap):
                continue
            if is_off(squares, gap, own, self.tolerances[place]):
                off = f"{math.sqrt(gap):.2g} off {math.sqrt(own):.2g}"
                self._refuse_vector(self.vectors[place], f"the gradients of its examples add up to one that is {off}")
            else:
                self.vectors[place].sizes.add(self._num_rows)

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


def is_off(rows: float, gap: float, own: float, tolerance: float) -> bool:
    """Return whether a vector's examples do not add up, from the three squares that ``VectorNorms.total`` has of it.

    Squares may be summed over micro-batches and ranks: what is within bounds in each of them stays so in their sum.
    """
    return math.sqrt(gap) > tolerance * (math.sqrt(own) + math.sqrt(rows))


def _norms_of(rows: Sequence[Tensor], own: Sequence[Tensor]) -> Tensor:
    """Return the norms of the rows, of what their sum is off and of the own gradients, of vectors of one shape."""
    if rows[0].numel() > (SMALL_ON_CPU if rows[0].is_cpu else _SMALL):
        norms, sums = torch.stack([square_of(one) for one in rows]).sqrt(), torch.stack([one.sum(0) for one in rows])
    else:
        all_rows = torch.stack(tuple(rows))
        norms, sums = torch.linalg.vector_norm(all_rows.flatten(1), dim=1), all_rows.sum(1)
    mine = torch.stack(tuple(own)).to(sums.dtype)
    return torch.stack([norms, *(torch.linalg.vector_norm(one, dim=1) for one in (sums.sub_(mine), mine))])


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # Metal has no float64
