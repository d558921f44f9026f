"""Graphs: which micro-batches are captured, which are replayed, and what runs eagerly and why."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from ..._ranks import Ranks
from ...errors import ArgumentError
from ...size.momentum import Beta2s
from .._gradients import Trained
from .._settings import Settings
from ..oom import Snapshot, is_out_of_memory
from ..report import MicroSums
from ._capturing import Capturer, obstacle_of, text_of
from ._catalogue import Shape, read_shapes
from ._draws import draw_again
from ._inputs import Catalogue, Signature, Target, elements_of, signature_of
from ._micro import MicroGraph, NotGraphableError
from ._update import Updates
from ._watch import Watch, hooks_of, unfit
from .backend import Choice, CudaGraphs, make_backend
from .summary import NO_ROOM, OTHER_RESULTS, UNPLANNED, GraphSummary, Reasons, replays_by_label

# divisor(weight on the host or None, elements of the micro-batch): what losses of the update are divided by
Divisor: TypeAlias = Callable[[float | None, int], float]

# Without a plan, shapes that come again are captured, up to so many.
MOST_UNPLANNED = 64
# A replay must take at most this share of the eager seconds to be worth its memory.
WORTH = 0.95
# Micro-batches of one size that differ in single values, such as a name, are captured up to so many times.
_MOST_ALIKE = 4
_MOST_SEEN = 4096
# A model that changes more often than this between steps would be captured again and again.
_MOST_CHANGES = 8
# So many graphs are compared on batches that come; for the others the run before their capture suffices.
_MOST_COMPARED = 4


@final
class Graphs:
    """Runs micro-batches by replay where they were captured, and eagerly otherwise.

    Args:
        choice: True captures every planned shape, ``"auto"`` keeps only graphs that pay, a backend is for tests.
        shapes: the catalogue, None for shapes that come again.
        settings: of the Stepper.
        ranks: have the model.
        trained: the parameters and their gradients.
        snapshot: returns the random state and the buffers now.
        is_half: the forward pass opens autocast by itself.

    Attributes:
        num_replayed: micro-batches that were replayed so far.
        held_bytes: the memory of the pool when it was last measured.
    """

    def __init__(
        self,
        choice: Choice,
        shapes: Any,
        settings: Settings,
        ranks: Ranks,
        trained: Trained,
        snapshot: Callable[[], Snapshot],
        *,
        is_half: bool = False,
    ) -> None:
        self._is_half = is_half or settings.autocast is not None
        self._is_choosy = isinstance(choice, str)
        self._planned = None if shapes is None else read_shapes(shapes)
        self._settings, self._ranks, self._trained, self._snapshot = settings, ranks, trained, snapshot
        self._device = trained.parameters[0].device
        self._off = obstacle_of(settings, ranks)
        if self._off is not None and not self._is_choosy:
            raise ArgumentError(f"graphs=True cannot be, as {self._off}; leave it out, or pass graphs='auto'")
        found = make_backend(choice, self._device)
        self._off = self._off or ("graphs need a model on a CUDA device" if found is None else None)
        self._backend = CudaGraphs(self._device) if found is None else found
        self._reasons = Reasons()
        self._num_changes = self._num_captures = self._num_eager = self._num_updates = 0
        self._capture_seconds = self._saved_seconds = 0.0
        self.num_replayed = self.held_bytes = 0
        self._clear()

    def _clear(self) -> None:
        """Forget all captures."""
        self._graphs: dict[Signature, MicroGraph] = {}
        self._failed: set[Signature] = set()
        self._seen: set[Signature] = set()
        self._kinds: set[tuple[Any, ...]] = set()  # structures of signatures that ran
        self._catalogue = Catalogue(self._planned)
        self._is_warm = self._is_in_doubt = False
        self._is_tight = False  # no eager step fits beside the pool
        self._num_compared = 0  # graphs, with eager steps
        self._watch: Watch | None = None
        self._doubt: str | None = None  # why the last capture failed
        self._capturer = Capturer(self._settings, self._ranks, self._trained, self._backend, self._snapshot)
        self._updates = Updates(self._trained.optimizer, self._settings, self._backend)
        self._trained.gradients.static = {}

    def begin(self) -> None:
        """Look at the model before a batch runs: after a change, what was captured is void."""
        if self._off is None:
            self._drop_if_changed()
        if self._off is None and self._capturer.work is None:
            reason = hooks_of(self._ranks.module, self._trained.parameters) or unfit(self._trained.parameters)
            if reason is not None:
                self._give_up(reason)

    def _drop_if_changed(self) -> None:
        """Drop all captures if the model or the loss is not what they saw; do without them if that comes too often."""
        self._is_in_doubt = False
        change = self._change()
        if change is None:
            return
        self._num_changes += 1
        self._drop()
        if self._num_changes > _MOST_CHANGES:
            self._give_up(
                f"{change} changes again and again between steps; a number that changes can be a tensor on the device "
                "of the model, written in place"
            )

    def _change(self) -> str | None:
        if self._capturer.work is None:
            return None
        before, now = self._capturer.work.parameters, self._trained.parameters
        if len(before) != len(now) or any(old is not new for old, new in zip(before, now, strict=True)):
            return "the list of trained parameters"
        return None if self._watch is None else self._watch.change

    def _drop(self) -> None:
        self._num_updates += self._updates.num_replayed
        self._clear()
        self.held_bytes = 0
        self._backend.release()

    def _give_up(self, reason: str) -> None:
        """Run everything eagerly from now on, and say why once."""
        self._drop()
        self._off = reason
        self._reasons.warn(f"steps run eagerly, without graphs: {reason}")

    def note_eager(self, reason: str) -> None:
        """Count a micro-batch that ran eagerly without being asked for here."""
        self._num_eager += 1
        self._reasons.count(reason)

    def run(self, batch: Any, *, eager: Callable[[], MicroSums], divisor: Divisor, can_compare: bool) -> MicroSums:
        """Run a micro-batch: replay it, or call ``eager``.

        Args:
            batch: the micro-batch.
            eager: runs it forward and backward.
            divisor: of the update.
            can_compare: gradients that were gathered before may be set aside while a replay is compared.
        """
        if self._is_in_doubt and self._off is None:
            self._drop_if_changed()
        signature = None if self._off is not None else signature_of(batch)
        graph = None if signature is None else self._graphs.get(signature)
        if graph is not None and graph.is_trusted:
            return self._replay(graph, batch, divisor)
        self._num_eager += 1
        self._is_in_doubt = True  # an eager run may change the model, whose graphs then are void
        if signature is None:
            self._reasons.count(self._off or self._reasons.of_unreadable(is_any_captured=bool(self._graphs)))
            return eager()
        if not self._is_warm:
            return self._warm_up(signature, batch, eager)
        graph = graph or self._captured(signature, batch)
        if graph is not None and self._need_not_compare(graph):
            self._num_eager -= 1
            return self._replay(graph, batch, divisor)
        try:
            sums = self._try_out(graph, batch, eager, divisor) if graph is not None and can_compare else eager()
        except BaseException:
            if self._doubt is not None:  # the step itself is wrong: what a capture said of it does not count
                self._num_changes += 1
                self._drop()
            raise
        if self._doubt is not None:
            self._give_up(self._doubt)
        self._note(signature)
        return sums

    def _need_not_compare(self, graph: MicroGraph) -> bool:
        """Trust a graph that was compared at its capture, after some others were compared on batches that came."""
        is_enough = not self._is_choosy and self._num_compared >= _MOST_COMPARED
        graph.is_trusted |= graph.is_checked and is_enough
        return graph.is_trusted

    def _note(self, signature: Signature) -> None:
        """Remember a micro-batch that ran: one that the loss refuses is not worth a capture."""
        if len(self._seen) < _MOST_SEEN:
            self._seen.add(signature)
            self._kinds.add(signature.structure)

    def _replay(self, graph: MicroGraph, batch: Any, divisor: Divisor) -> MicroSums:
        self._attach(graph.touched)
        sums = graph.run(batch, divisor(graph.host_weight, elements_of(graph.signature)))
        if self._capturer.draws:
            draw_again(self._capturer.draws)
        graph.num_replayed += 1
        self.num_replayed += 1
        if math.isfinite(graph.eager_seconds):
            self._saved_seconds += graph.eager_seconds - graph.seconds
        return sums

    def _attach(self, places: Sequence[int]) -> None:
        """Let the gradients of parameters be their static buffers; what was gathered so far goes there too."""
        work = self._capturer.work
        assert work is not None
        parameters, buffers = work.parameters, work.buffers
        strange = [place for place in places if parameters[place].grad is not buffers[place]]
        empty = [buffers[place] for place in strange if parameters[place].grad is None]
        if empty:
            torch._foreach_zero_(empty)
        for place in strange:
            gradient = parameters[place].grad
            if gradient is not None:
                buffers[place].copy_(gradient)
            parameters[place].grad = buffers[place]

    def _warm_up(self, signature: Signature, batch: Any, eager: Callable[[], MicroSums]) -> MicroSums:
        try:
            sums = self._capturer.run_first(batch, eager)
        except NotGraphableError as error:
            if error.sums is None:
                raise
            self._give_up(str(error))
            return error.sums
        self._is_warm = True
        self._note(signature)
        self._see(signature)
        return sums

    def _see(self, signature: Signature) -> list[Shape]:
        shapes = self._catalogue.see(signature)
        if self._planned is not None:
            self._reasons.see(signature, shapes, self._planned)
        return shapes

    def _captured(self, signature: Signature, batch: Any) -> MicroGraph | None:
        """Return the graph of a micro-batch after a capture of it, and of the whole catalogue at the first time."""
        shapes = self._see(signature)
        reason = self._why_not(signature, shapes)
        if reason is not None:
            self._reasons.count(reason)
            return None
        start = time.perf_counter()
        self._capture(self._catalogue.targets(signature, batch), signature)
        self._capture_seconds += time.perf_counter() - start
        return None if self._doubt is not None else self._graphs.get(signature)

    def _why_not(self, signature: Signature, shapes: Sequence[Shape]) -> str | None:
        is_new = signature not in self._seen
        if signature.structure not in self._kinds:
            return self._reasons.of_new_kind(len(self._kinds), is_any_captured=bool(self._graphs))
        if sum(one.sizes == signature.sizes for one in self._graphs) >= _MOST_ALIKE:
            return "fields, types or single values of batches of one shape differ again and again"
        if signature in self._failed:
            return "a shape did not fit into memory, or gained nothing"
        if not self._catalogue.is_planned:
            is_full = len(self._graphs) >= MOST_UNPLANNED
            return "without shapes=, a shape is captured when it comes again" if is_new or is_full else None
        if not shapes:
            return UNPLANNED
        is_left_out = is_new and self._catalogue.is_rare(shapes) and not self._is_tight
        return "a shape is planned only once" if is_left_out else None

    def _capture(self, targets: list[Target], real: Signature) -> None:
        captures = self._capturer.capture(
            targets, real, self._catalogue.eager_elements(real), is_half=self._computes_in_half, is_tight=self._is_tight
        )
        try:
            for signature, graph in captures:
                if graph is None:
                    self._failed.add(signature)
                    self._reasons.count("a shape did not fit into memory beside the others")
                else:
                    graph.is_trusted = self._is_tight and graph.is_checked
                    self._graphs[signature] = graph
                    self._num_captures += 1
        except Exception as error:  # the eager run that follows raises what is wrong with the step itself
            self._doubt = text_of(error)
        if self._doubt is None:
            self._watch = Watch(self._capturer.look(), self._trained.parameters)
            self.held_bytes = self._backend.pool_bytes()
            self._backend.measure(lambda: None)  # the peak of captures has the pool already
            if self._graphs and not self._is_tight and self._capturer.lacks_room:
                self._do_without_eager_steps()

    def _try_out(self, graph: MicroGraph, batch: Any, eager: Callable[[], MicroSums], divisor: Divisor) -> MicroSums:
        """Run a micro-batch both ways, keep the eager run, and trust the graph if both agree."""
        started = self._backend.seconds()
        value = divisor(graph.host_weight, elements_of(graph.signature))
        sums, is_alike = self._capturer.try_out(graph, batch, eager, value, is_half=self._computes_in_half)
        if not is_alike:
            self._give_up(OTHER_RESULTS)
        elif self._is_choosy and graph.seconds > WORTH * graph.eager_seconds:
            del self._graphs[graph.signature]
            self._failed.add(graph.signature)
        else:
            graph.is_trusted = True
        self._num_compared += 1
        self._capture_seconds += self._backend.seconds() - started - graph.eager_seconds
        return sums

    def update(self, factor: float, beta2s: Beta2s | None = None) -> tuple[bool, Tensor | None]:
        """Replay the update if it can be, with the rates times a factor and the beta2 of each group if they change.

        Returns:
            Whether it was replayed, and the norm of the gradient before clipping.
        """
        work = self._capturer.work
        if self._off is not None or work is None or not self._graphs or not self._updates.is_ready(work.parameters):
            reason = self._updates.reason
            if self._off is None and reason is not None:
                self._reasons.warn(f"forward and backward are replayed, the update runs eagerly: {reason}")
            return False, None
        self._attach([place for place, parameter in enumerate(work.parameters) if parameter.grad is not None])
        start = time.perf_counter()
        is_captured = self._updates.prepare(work.parameters, beta2s)
        if self._updates.is_new:
            self._capture_seconds += time.perf_counter() - start
            self.held_bytes = self._backend.pool_bytes()
        return (True, self._updates.run(factor)) if is_captured else (False, None)

    def stop(self, reason: str) -> None:
        """Run everything eagerly from now on, and say why once."""
        if self._off is None:
            self._give_up(reason)

    def make_room(self) -> bool:
        """Take less memory after an eager step ran out of it; return whether another attempt may help."""
        if self._off is not None or not self._graphs:
            return False
        self._backend.prepare()
        if self._is_tight:
            self._give_up(NO_ROOM)
        else:
            self._do_without_eager_steps()
        return True

    def _do_without_eager_steps(self) -> None:
        """Let nothing that is planned run eagerly beside the pool any more, or drop all graphs.

        Rare shapes are captured too, and graphs are used without an eager run of each, after one was compared.
        """
        reason = NO_ROOM
        try:
            is_right = any(graph.is_trusted for graph in self._graphs.values())
            self._is_tight = is_right or self._capturer.agrees(self._graphs, is_half=self._computes_in_half)
            reason = OTHER_RESULTS
        except Exception as error:
            reason = NO_ROOM if is_out_of_memory(error) else text_of(error)
        if not self._is_tight:
            self._give_up(reason)
        for graph in self._graphs.values():
            graph.is_trusted = graph.is_trusted or graph.is_checked
        self.held_bytes = self._backend.pool_bytes()

    @property
    def _computes_in_half(self) -> bool:
        return self._is_half or torch.is_autocast_enabled(self._device.type)

    @property
    def lost_peak_bytes(self) -> int:
        """Return the highest peak of memory before a rehearsal began to measure anew."""
        return self._backend.lost_peak_bytes

    def summary(self) -> GraphSummary:
        """Return the figures so far."""
        reasons = dict(self._reasons.counts)
        for reason in (self._off, self._updates.reason or self._updates.note):
            if reason is not None:
                reasons.setdefault(reason, 0)
        return GraphSummary(
            shapes=replays_by_label(self._graphs.values()),
            num_replayed=self.num_replayed,
            num_eager=self._num_eager,
            num_updates_replayed=self._num_updates + self._updates.num_replayed,
            num_captures=self._num_captures,
            pool_bytes=0 if self._off is not None else self._backend.pool_bytes(),
            predicted_pool_bytes=self._capturer.predicted_bytes,
            capture_seconds=self._capture_seconds,
            saved_seconds=self._saved_seconds if math.isfinite(self._saved_seconds) else 0.0,
            reasons=reasons,
        )
