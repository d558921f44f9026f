"""The graphs of a function: captured over all planned shapes, compared, and void after a change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, final

import torch

from ..._tree import map_leaves
from ..oom import is_out_of_memory
from ._capturing import MadeUpError, text_of
from ._catalogue import Shape
from ._functions import FunctionCapturer, FunctionGraph
from ._inputs import Catalogue, Signature, elements_of, resized, signature_of
from ._micro import NotGraphableError
from ._padding import Call, Padding
from ._rotary import may_pad, rotary_of, side_of
from ._watch import Watch
from .backend import GraphBackend
from .graphed import WORTH
from .summary import OTHER_RESULTS

NO_ROOM = "a shape did not fit into memory beside the others"
# Columns that show which positions a function gives them.
_FEW = 8
_PADDED = (
    "padding changes what the function returns: mask what is padded, give the values in pad=, or leave pad= out to "
    "replay only calls of planned shapes"
)


@final
class FunctionGraphs:
    """Captures a function over its planned shapes, the largest first into one pool.

    Args:
        function: a module, a method of one, or any function.
        backend: captures.
        device: where the function computes.
        padding: pads calls, None for calls as they come.
        is_choosy: only graphs that gain are replayed.

    Attributes:
        by_signature: what was captured.
        failed: what was not, and why.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        backend: GraphBackend,
        device: torch.device,
        padding: Padding | None,
        *,
        is_choosy: bool,
    ) -> None:
        self._backend, self._device, self._padding, self._is_choosy = backend, device, padding, is_choosy
        self._capturer = FunctionCapturer(function, backend, device)
        self.by_signature: dict[Signature, FunctionGraph] = {}
        self.failed: dict[Signature, str] = {}
        self._unproven: set[tuple[Any, ...]] = set()  # kinds of calls that were compared with equal rows only
        self._watch: Watch | None = None
        self._held: list[torch.Tensor] = []  # what graphs read keeps its memory as long as they may be replayed

    @property
    def change(self) -> str | None:
        """Return what is not as the captures saw it, for people, or None."""
        return None if self._watch is None else self._watch.change

    @property
    def is_pure(self) -> bool:
        """Return whether a replay too many is harmless."""
        return self._capturer.is_pure

    def draw(self) -> None:
        """Move the generator of the host as an eager run would have."""
        self._capturer.draw()

    def release(self) -> None:
        """Give the memory of all graphs back, before their buffers are free for others."""
        if self.by_signature:
            self._backend.release()

    def _targets(self, signature: Signature, fitted: Call, catalogue: Catalogue) -> list[_Target]:
        """Return what to capture, the largest first."""
        if self._padding is None:
            found = catalogue.targets(signature, fitted)
            return [_Target(one, fitted if one == signature else resized(fitted, given)) for one, given in found]
        made = [(shape, self._padding.resize(fitted, shape)) for shape in self._padding.shapes]
        targets = {_signature(call): _Target(_signature(call), call, shape) for shape, call in made}
        targets[signature] = targets[signature]._replace(call=fitted)
        return sorted(targets.values(), key=lambda target: -elements_of(target.signature))

    def capture(self, catalogue: Catalogue, real: Signature, call: Call) -> None:
        """Run all that is planned ahead, capture them into one pool, and compare replays with eager runs.

        Raises:
            NotGraphableError: a replay would not repeat what the function does.
        """
        found = self._targets(real, call, catalogue)
        targets = [one._replace(call=map_leaves(one.call, self._placed)) for one in found]
        self._capturer.check(next(one.call for one in targets if one.signature == real))
        ready = [ran for one in targets if (ran := self._ran_ahead(one, real)) is not None]
        self._capturer.look()
        self._backend.prepare()
        # In the order of their memory, all shapes find room in what the first one has taken.
        made = [one for one in sorted(ready, key=lambda one: -one.num_bytes) if self._add(one, real)]
        self._compare_padded([one for one in made if self._is_right(one)])
        padding = self._padding
        if padding is not None and padding.most_rows > 2 and not padding.has_other_rows(call):
            self._unproven.add(real.structure)
        if self.by_signature:
            self._watch = self._capturer.watch()
            self._held = [tensor.detach() for tensor in self._watch.tensors]

    def _placed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device of the function, with its rows one after the other."""
        return tensor.to(self._device).contiguous()

    def _ran_ahead(self, one: _Target, real: Signature) -> _Target | None:
        try:
            return one._replace(num_bytes=self._capturer.run_ahead(one.call))
        except Exception as error:
            if one.signature == real and not is_out_of_memory(error):
                raise
            self.failed[one.signature] = NO_ROOM if is_out_of_memory(error) else text_of(error)
        self._backend.prepare()  # outside the except block, where the traceback holds activations
        return None

    def _add(self, one: _Target, real: Signature) -> bool:
        """Capture a call, and return whether it fitted into memory."""
        try:
            graph = self._capturer.capture(one.signature, one.call, is_real=one.signature == real)
        except MadeUpError as error:
            self.failed[one.signature] = text_of(error)
            return False
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            self.failed[one.signature] = NO_ROOM
        else:
            self.by_signature[one.signature] = graph
            return True
        self._backend.prepare()
        return False

    def _is_right(self, one: _Target) -> bool:
        """Compare a graph with an eager run, and return whether that fitted into memory beside the pool."""
        graph = self.by_signature[one.signature]
        try:
            is_alike = self._capturer.compare(graph, one.call)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            del self.by_signature[one.signature]
            self.failed[one.signature] = NO_ROOM
            return False
        if not is_alike:
            raise NotGraphableError(OTHER_RESULTS)
        graph.is_worth = not self._is_choosy or graph.seconds <= WORTH * graph.eager_seconds
        return True

    def _compare_padded(self, made: list[_Target]) -> None:
        """Compare calls that are shorter than the shape that they are padded to."""
        padding = self._padding
        if padding is None:
            return
        found = {one.shape: one for one in made if one.shape is not None and max(one.shape) > 1}
        for shape, short in self._shorter(list(found)):
            one, call = found[shape], padding.resize(found[shape].call, short)

            def cut(output: Any, short: Shape = short, shape: Shape = shape) -> Any:
                return padding.cut(output, short, shape)

            graph = self.by_signature[one.signature]
            # Filler is a copy of the first row, which may be the one that makes no difference to the others.
            for given in (call, padding.turned(call)):
                self._check_padded(graph, given, padding.pad(given, shape), cut)

    def _check_padded(self, graph: FunctionGraph, call: Call, padded: Call, cut: Callable[[Any], Any]) -> None:
        assert self._padding is not None
        if not self._capturer.compare_padded(graph, call, padded, cut, self._padding.whole):
            raise NotGraphableError(_PADDED)

    @property
    def has_doubts(self) -> bool:
        """Say whether calls of some kind were compared with equal rows only, beside which filler shows nowhere."""
        return bool(self._unproven)

    def prove(self, signature: Signature, call: Call, padded: Call, cut: Callable[[Any], Any]) -> None:
        """Compare the first padded call of a kind whose rows differ, if those before had none that do.

        Args:
            signature: of the padded call.
            call: as it came.
            padded: the same call.
            cut: makes the output of the padded call that of the call.

        Raises:
            NotGraphableError: padding changes what the function returns.
        """
        padding = self._padding
        if padding is None or signature.structure not in self._unproven:
            return
        if padding.shape_of(call)[0] in (1, padding.shape_of(padded)[0]) or not padding.has_other_rows(call):
            return
        call, padded = (map_leaves(one, self._placed) for one in (call, padded))
        self._check_padded(self.by_signature[signature], call, padded, cut)
        self._unproven.remove(signature.structure)

    def _shorter(self, shapes: list[Shape]) -> Iterator[tuple[Shape, Shape]]:
        """Yield the largest and the smallest shape, each with one that is a row and a column short.

        Where positions change with the longest row, none is shorter than leaves them as they are, and the longest shape
        on each side is also compared as far down as that: the function may count more columns than come.
        """
        rotary = rotary_of(self._capturer.reach.modules)
        for shape in dict.fromkeys(shapes[:1] + shapes[-1:]):
            short = tuple(max(1, size - 1) for size in shape)
            yield shape, short if may_pad(rotary, short, shape) else (short[0], *shape[1:])
        longest = {side_of(rotary, shape[1]): shape for shape in sorted(shapes, key=lambda one: one[1:]) if shape[1:]}
        for side, (rows, length) in longest.items() if rotary else ():
            least = next(one for one in range(min(_FEW, length), length + 1) if side_of(rotary, one) == side)
            yield (rows, length), (rows, least)


@final
class _Target(NamedTuple):
    """A call to capture, the shape that it is padded to, and the memory that an eager run of it took."""

    signature: Signature
    call: Call
    shape: Shape | None = None
    num_bytes: int = 0


def _signature(call: Call) -> Signature:
    found = signature_of(call)
    assert found is not None
    return found
