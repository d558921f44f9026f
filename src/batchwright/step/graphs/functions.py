"""graphed: a function of tensors, captured once per planned shape and replayed."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, final

import torch

from ..._tree import leaves, map_leaves
from ...errors import ArgumentError
from ..oom import is_out_of_memory
from ._capturing import text_of
from ._catalogue import read_shapes
from ._function_graphs import NO_ROOM, FunctionGraphs
from ._functions import FunctionGraph, device_of, reach_of, root_of, without_gradients
from ._inputs import Catalogue, Signature, signature_of
from ._padding import Call, Cut, Padding, names_of, run
from ._rotary import Rotary, may_pad, rotary_of
from .backend import Choice, CudaGraphs, GraphBackend, make_backend
from .summary import FAR_SIDE, UNPLANNED, GraphSummary, Reasons, replays_by_label

# A function that changes more often than this between calls would be captured again and again.
_MOST_CHANGES = 8
# Calls that differ in fields, types and single values are captured up to so many times.
_MOST_KINDS = 4
_UNREADABLE = "a call holds more than plain tensors and single values"
_OTHER_KINDS = "fields, types or single values of calls differ again and again"


@final
class graphed:
    """Compute a function over a few planned shapes without launch costs: each is captured once, and replayed.

    A call is padded up to the planned shape of the fewest elements that holds it, copied into static buffers, replayed
    as one CUDA graph, and its output is cut back and copied out. So every result is the caller's own, and new lengths
    cost nothing: their shape ran before. Without ``pad``, only calls of exactly a planned shape are replayed. All other
    calls run eagerly, as do calls on a CPU, and what no graph can hold, such as ``.item()``, random numbers of the host
    or inputs that are changed in place; a warning says why, once, and ``summary()`` counts it.

    At the first call, or at ``warm_up``, every shape runs eagerly once and is captured, the largest first into one pool
    of memory. Replays must give what eager runs give, and padded calls what they give by themselves; otherwise nothing
    is replayed. A function or model that changes later (train and eval, weights that lie elsewhere, types, hooks) is
    captured anew. Weights that are changed in place count at the next call.

    Calls compute without gradients. They may come from several threads and streams, and take turns. Inputs on another
    device are copied to that of the function. The output holds nested tensors and single values, such as a
    ``ModelOutput``; its tensors share no memory with each other or with the inputs.

    Args:
        fn: a module or a function of tensors, which leaves its inputs as they are.
        shapes: what to capture: rows of ``(num_items, length)``, ``plan.shapes``, a plan, a sampler or its ``pad_to``.
        pad: the value that each named tensor is padded with along its second axis, such as
            ``{"input_ids": 0, "attention_mask": 0}``; None for tensors that only have rows. Names are those of
            arguments and of fields inside them. Rows are filled up with copies of the first one.
        cut: what calls return with ``pad``: "rows" keeps the rows that came of every tensor; a function
            ``cut(output, shape)`` gets every output and the shape that came, also where nothing was padded.
        graphs: ``"auto"`` keeps only graphs that gain at least 5 % and runs eagerly without a CUDA device; True keeps
            all and needs one; False replays nothing.

    >>> total = graphed(lambda x: x.sum(1), [(4, 8), (2, 16)], pad={"x": 0}, graphs=False)
    >>> total(torch.ones(1, 3))
    tensor([3.])
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        shapes: Any,
        *,
        pad: Mapping[str, float | None] | None = None,
        cut: str | Cut = "rows",
        graphs: Choice = "auto",
    ) -> None:
        if not callable(fn):
            raise ArgumentError(f"fn must be a module or a function of tensors, got {type(fn).__name__}")
        if graphs is not False:
            make_backend(graphs, torch.device("cuda"))  # says what is allowed
        self._function, self._choice = fn, graphs
        self._planned = read_shapes(shapes)
        self._padding = None if pad is None else Padding(pad, cut, self._planned, names_of(fn))
        if pad is None and cut != "rows":
            raise ArgumentError("cut= says what padded calls return, so it needs pad=")
        self._lock = threading.RLock()
        self._reasons = Reasons()
        self._off: str | None = "graphs=False" if graphs is False else None
        self._device: torch.device | None = None
        self._backend: GraphBackend | None = None
        self._rotary: Rotary = ()
        self._order = _Order()
        self._num_changes = self._num_captures = self._num_eager = self._num_replayed = 0
        self._capture_seconds = self._saved_seconds = 0.0
        self._clear()

    def _clear(self) -> None:
        """Forget all captures."""
        self._graphs: FunctionGraphs | None = None
        self._kinds: dict[tuple[Any, ...], Catalogue] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the function returns."""
        call = self._checked((args, dict(sorted(kwargs.items()))))
        if self._off is None and not _is_capturing():
            with without_gradients(), self._lock:
                found = self._replayed(call)
            if found is not None:
                return found.output
        return self._run_eagerly(call)

    def warm_up(self, *args: Any, **kwargs: Any) -> GraphSummary:
        """Capture every planned shape now, with rows and columns of a call that is given as an example.

        Without ``pad``, shapes whose sizes one example cannot tell are captured when they come.
        """
        call = self._checked((args, dict(sorted(kwargs.items()))))
        with without_gradients(), self._lock:
            is_replayed = self._off is None and self._replayed(call) is not None
        if not is_replayed:
            self._run_eagerly(call)  # a call that is wrong by itself says so
        return self.summary()

    _doubt: str | None = None  # why the last capture failed; a call that works eagerly makes it final

    def _checked(self, call: Call) -> Call:
        """Return a call without gradients, or refuse one whose result would have to have some."""
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in leaves(call)):
            raise ArgumentError(
                "a graphed function computes without gradients, but an input requires them; call it under "
                "torch.no_grad(), or detach the input"
            )
        return call

    def _run_eagerly(self, call: Call) -> Any:
        """Run a call as it came; if a capture failed before, say so now that the call itself is right."""
        doubt, self._doubt = self._doubt, None
        with without_gradients():
            moved = call if self._device is None else map_leaves(call, lambda tensor: tensor.to(self._device))
            try:
                output = run(self._function, moved)
            except BaseException:
                if doubt is not None:  # the call itself is wrong: what a capture said of it does not count
                    self._drop()
                raise
            if self._padding is not None:
                output = self._padding.whole(call, output)
        self._num_eager += 1
        if doubt is not None:
            self._give_up(doubt)
        return output

    def _replayed(self, call: Call) -> _Output | None:
        """Return the output of a replay, None if the call has to run eagerly."""
        self._open(call)
        if self._off is not None or self._doubt is not None:
            return self._without_graph(self._off or str(self._doubt))
        fit = self._fitted(call)
        if isinstance(fit, str):
            if fit == FAR_SIDE:
                self._reasons.warn(f"calls run eagerly, without graphs: {fit}")
            return self._without_graph(fit)
        signature = signature_of(fit.call)
        if signature is None or any(type(tensor) is not torch.Tensor for tensor in leaves(fit.call)):
            return self._without_graph(_UNREADABLE)
        graphs = self._graphs
        graph = None if graphs is None or not graphs.is_pure else graphs.by_signature.get(signature)
        if graphs is not None and graph is not None and graph.is_worth and not graphs.has_doubts:
            output = self._run(graphs, graph, fit)
            if graphs.change is None:  # looked at while the device computes
                return output
        if self._drop_if_changed():
            return self._replayed(call)
        graphs = self._captured(signature, fit.call)
        graph = None if self._doubt is not None else graphs.by_signature.get(signature)
        if graph is None:
            return self._without_graph(self._doubt or graphs.failed.get(signature, UNPLANNED))
        doubt = self._doubt_of(graphs, signature, call, fit) if graphs.has_doubts else None
        return self._run(graphs, graph, fit) if doubt is None else self._without_graph(doubt)

    def _doubt_of(self, graphs: FunctionGraphs, signature: Signature, call: Call, fit: _Fit) -> str | None:
        """Compare a call by padding with the same by itself if none before could show a difference; say what failed."""
        try:
            with self._order:
                graphs.prove(signature, map_leaves(call, torch.Tensor.detach), fit.call, fit.cut)
        except Exception as error:
            if is_out_of_memory(error):
                return NO_ROOM
            self._drop()
            self._doubt = text_of(error)
        return self._doubt

    def _fitted(self, call: Call) -> _Fit | str:
        """Return a call as a graph takes it, or why no planned shape holds it."""
        call = map_leaves(call, torch.Tensor.detach)
        padding = self._padding
        if padding is None:
            return _Fit(call, lambda output: output)
        shape = padding.shape_of(call)
        planned = padding.planned_for(shape, partial(may_pad, self._rotary))
        if isinstance(planned, str):
            return planned
        return _Fit(padding.pad(call, planned), lambda out: padding.cut(out, shape, planned))

    def _run(self, graphs: FunctionGraphs, graph: FunctionGraph, fit: _Fit) -> _Output:
        if not graph.is_worth:  # its shape ran before all the same, so it has no first visit
            self._num_eager += 1
            return _Output(fit.cut(run(self._function, map_leaves(fit.call, lambda tensor: tensor.to(self._device)))))
        with self._order:
            output = graph.run(fit.call, fit.cut)
        graphs.draw()
        graph.num_replayed += 1
        self._num_replayed += 1
        if math.isfinite(graph.eager_seconds):
            self._saved_seconds += graph.eager_seconds - graph.seconds
        return _Output(output)

    def _without_graph(self, reason: str) -> _Output | None:
        self._reasons.count(reason)
        return None

    def _open(self, call: Call) -> None:
        """Find out where the function computes, and what captures there."""
        if self._backend is not None or self._off is not None:
            return
        reach = reach_of(self._function, root_of(self._function))
        self._device, self._rotary = device_of(reach, call), rotary_of(reach.modules)
        self._backend = make_backend(self._choice, self._device)
        self._order = _Order(self._device)
        if self._backend is None:
            self._backend = CudaGraphs(self._device)
            self._give_up("graphs need a CUDA device")

    def _drop_if_changed(self) -> bool:
        """Drop what was captured of a function that is another one now, and say whether it is."""
        change = None if self._graphs is None else self._graphs.change
        if change is None:
            return False
        self._num_changes += 1
        self._drop()
        self._rotary = rotary_of(reach_of(self._function, root_of(self._function)).modules)
        if self._num_changes > _MOST_CHANGES:
            self._give_up(f"{change} changes again and again between calls")
        return True

    def _drop(self) -> None:
        if self._graphs is not None:
            self._graphs.release()
        self._clear()

    def _give_up(self, reason: str) -> None:
        """Run everything eagerly from now on, and say why once."""
        self._drop()
        self._off = reason
        self._reasons.warn(f"calls run eagerly, without graphs: {reason}")

    def _captured(self, signature: Signature, call: Call) -> FunctionGraphs:
        """Return all graphs, after a capture of a call that has none, and of all that is planned at the first time."""
        if self._graphs is None:
            assert self._backend is not None
            assert self._device is not None
            self._graphs = FunctionGraphs(
                self._function, self._backend, self._device, self._padding, is_choosy=isinstance(self._choice, str)
            )
        graphs = self._graphs
        if signature in graphs.by_signature or signature in graphs.failed:
            return graphs
        if signature.structure not in self._kinds and len(self._kinds) >= _MOST_KINDS:
            graphs.failed[signature] = _OTHER_KINDS
            return graphs
        catalogue = self._kinds.setdefault(signature.structure, Catalogue(self._planned))
        if catalogue.see(signature):
            self._capture(graphs, catalogue, signature, call)
        return graphs

    def _capture(self, graphs: FunctionGraphs, catalogue: Catalogue, signature: Signature, call: Call) -> None:
        start = time.perf_counter()
        num_before = len(graphs.by_signature)
        try:
            with self._order:
                graphs.capture(catalogue, signature, call)
        except Exception as error:
            self._drop()
            self._doubt = text_of(error)
        self._num_captures += len(graphs.by_signature) - num_before
        self._capture_seconds += time.perf_counter() - start

    def summary(self) -> GraphSummary:
        """Return what was captured and replayed so far, what ran eagerly, and why."""
        reasons = dict(self._reasons.counts)
        if self._off is not None:
            reasons.setdefault(self._off, 0)
        return GraphSummary(
            shapes=replays_by_label([] if self._graphs is None else self._graphs.by_signature.values()),
            num_replayed=self._num_replayed,
            num_eager=self._num_eager,
            num_captures=self._num_captures,
            pool_bytes=0 if self._off is not None or self._backend is None else self._backend.pool_bytes(),
            capture_seconds=self._capture_seconds,
            saved_seconds=self._saved_seconds,
            reasons=reasons,
            unit="calls",
        )

    def __reduce__(self) -> Any:
        raise TypeError("a graphed function belongs to its process and is neither copied nor pickled; make it there")


@final
class _Output(NamedTuple):
    """The output of a replay, which may be None itself."""

    output: Any


@final
class _Fit(NamedTuple):
    """A call of a planned shape, and what cuts its output back."""

    call: Call
    cut: Callable[[Any], Any]


@final
class _Order:
    """Lets replays from several streams follow each other: they share buffers.

    Args:
        device: of the replays; None or a CPU has one stream.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device if device is not None and device.type == "cuda" else None
        self._event: torch.cuda.Event | None = None

    def __enter__(self) -> None:
        if self._device is not None and self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)

    def __exit__(self, *error: object) -> None:
        if self._device is not None:
            self._event = self._event or torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(self._device))


def _is_capturing() -> bool:
    """Say whether another capture is going on, which takes this call in as it is."""
    with suppress(RuntimeError):  # where torch has no CUDA
        return torch.cuda.is_current_stream_capturing()
    return False
