"""Graphs: which micro-batches are captured, which are replayed, and what runs eagerly and why."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor

from ..._ranks import Ranks
from ...errors import ArgumentError
from ...size.learning_rate import innermost
from .._gradients import Trained
from .._optimizers import allocate_state
from .._settings import Settings
from ..oom import Snapshot, add_back, is_out_of_memory, set_aside
from ..report import MicroSums
from ._inputs import Axes, Shape, Signature, elements_of, matches, read_shapes, resized, signature_of
from ._micro import MicroGraph, NotGraphableError, Work
from ._update import UpdateGraph, why_not
from ._watch import HostRandom, Untouched, Watch, hooks_of, unfit
from .backend import CudaGraphs, GraphBackend
from .summary import GraphSummary

Choice: TypeAlias = "bool | Literal['auto'] | GraphBackend"
# divisor(weight on the host or None, elements of the micro-batch): what losses of the update are divided by
Divisor: TypeAlias = Callable[[float | None, int], float]

# Without a plan, shapes that come again are captured, up to so many.
MOST_UNPLANNED = 64
# A replay must take at most this share of the eager seconds to be worth its memory.
WORTH = 0.95
# A model that changes more often than this between steps would be captured again and again.
_MOST_CHANGES = 8
# How far a replay may be from an eager run: sums in another order, and in half precision.
_NEAR, _NEAR_HALF = 1e-3, 3e-2


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

    Attributes:
        num_replayed: micro-batches that were replayed so far.
    """

    def __init__(
        self,
        choice: Choice,
        shapes: Any,
        settings: Settings,
        ranks: Ranks,
        trained: Trained,
        snapshot: Callable[[], Snapshot],
    ) -> None:
        self._is_choosy = choice == "auto"
        self._planned = None if shapes is None else read_shapes(shapes)
        self._settings, self._ranks, self._trained, self._snapshot = settings, ranks, trained, snapshot
        self._device = trained.parameters[0].device
        self._backend = make_backend(choice, self._device)
        self._off: str | None = None if self._backend is not None else "graphs need a CUDA device"
        if ranks.meet_in_forward:
            self._turn_off("ranks meet inside the forward pass (FSDP2 or SyncBatchNorm)", must=choice is True)
        if settings.autocast is torch.float16 and settings.weight_of is None:
            self._turn_off("float16 needs the weight of a batch before it runs, weight_of=", must=choice is True)
        self._reasons: dict[str, int] = {}
        self._warned: set[str] = set()
        self._num_changes = self._num_captures = 0
        self.num_replayed = self._num_eager = self._num_updates = 0
        self._capture_seconds = self._saved_seconds = 0.0
        self._predicted: int | None = None
        self._lost_peak = self._held = 0
        self._clear()

    def _turn_off(self, reason: str, *, must: bool = False) -> None:
        if must:
            raise ArgumentError(f"graphs=True cannot be: {reason}; leave it out, or pass graphs='auto'")
        self._off = reason

    def _clear(self) -> None:
        """Forget all captures."""
        self._graphs: dict[Signature, MicroGraph] = {}
        self._failed: set[Signature] = set()
        self._seen: set[Signature] = set()
        self._axes = Axes()
        self._is_warm = self._has_catalogue = False
        self._watch: Watch | None = None
        self._work: Work | None = None
        self._update_graph: UpdateGraph | None = None
        self._num_update_captures = 0
        self._trained.gradients.static = {}

    @property
    def is_on(self) -> bool:
        """Return whether anything may be captured or replayed."""
        return self._off is None

    def begin(self) -> None:
        """Look at the model before a batch runs: after a change, what was captured is void."""
        if self._off is not None:
            return
        if self._work is not None:
            parameters = self._work.parameters
            has_other = len(parameters) != len(self._trained.parameters) or any(
                old is not new for old, new in zip(parameters, self._trained.parameters, strict=True)
            )
            if has_other or (self._watch is not None and self._watch.has_changed):
                self._num_changes += 1
                self._drop()
        if self._num_changes > _MOST_CHANGES:
            self._give_up("the model changes again and again between steps")
        elif self._work is None:
            reason = hooks_of(self._ranks.module) or unfit(self._trained.parameters)
            if reason is not None:
                self._give_up(reason)

    def _drop(self) -> None:
        self._clear()
        assert self._backend is not None
        self._backend.release()

    def _give_up(self, reason: str) -> None:
        """Run everything eagerly from now on, and say why once."""
        self._drop()
        self._off = reason
        self._warn(f"steps run eagerly, without graphs: {reason}")

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(text, stacklevel=8)

    def _count(self, reason: str) -> None:
        self._reasons[reason] = self._reasons.get(reason, 0) + 1

    def run(self, batch: Any, *, eager: Callable[[], MicroSums], divisor: Divisor, is_first: bool) -> MicroSums:
        """Run a micro-batch: replay it, or call ``eager``.

        Args:
            batch: the micro-batch.
            eager: runs it forward and backward.
            divisor: of the update.
            is_first: no gradient was gathered before in this update, so that a replay can be compared.
        """
        signature = None if self._off is not None else signature_of(batch)
        graph = None if signature is None else self._graphs.get(signature)
        if graph is not None and graph.is_trusted:
            return self._replay(graph, batch, divisor)
        self._num_eager += 1
        if signature is None:
            self._count(self._off or "the batch holds more than tensors and single values")
            return eager()
        if not self._is_warm:
            return self._warm_up(signature, eager)
        graph = graph or self._captured(signature, batch)
        if graph is None or not is_first:
            return eager()
        return self._try_out(graph, batch, eager, divisor)

    def _replay(self, graph: MicroGraph, batch: Any, divisor: Divisor) -> MicroSums:
        self._attach(graph.touched)
        sums = graph.run(batch, divisor(graph.host_weight, elements_of(graph.signature)))
        graph.num_replayed += 1
        self.num_replayed += 1
        if math.isfinite(graph.eager_seconds):
            self._saved_seconds += graph.eager_seconds - graph.seconds
        return sums

    def _attach(self, places: Sequence[int]) -> None:
        """Let the gradients of parameters be their static buffers; what was gathered so far goes there too."""
        assert self._work is not None
        parameters, buffers = self._work.parameters, self._work.buffers
        strange = [place for place in places if parameters[place].grad is not buffers[place]]
        empty = [buffers[place] for place in strange if parameters[place].grad is None]
        if empty:
            torch._foreach_zero_(empty)
        for place in strange:
            gradient = parameters[place].grad
            if gradient is not None:
                buffers[place].copy_(gradient)
            parameters[place].grad = buffers[place]

    def _warm_up(self, signature: Signature, eager: Callable[[], MicroSums]) -> MicroSums:
        """Run the first micro-batch eagerly: what is made lazily exists afterwards."""
        host = HostRandom(self._ranks.module)
        sums = eager()
        self._is_warm = True
        self._seen.add(signature)
        if host.moved is not None:
            self._give_up(_draws(host.moved))
        elif any(one.grad is not None and one.grad.is_sparse for one in self._trained.parameters):
            self._give_up("sparse gradients have no static buffer")
        else:
            self._axes.see(signature.sizes, self._shapes_of(signature))
        return sums

    def _shapes_of(self, signature: Signature) -> list[Shape]:
        return [shape for shape in self._planned or () if matches(signature.sizes, shape)]

    def _captured(self, signature: Signature, batch: Any) -> MicroGraph | None:
        """Return the graph of a micro-batch, after a capture of it, or of the whole catalogue at the first time."""
        if signature in self._failed:
            self._count("a shape could not be captured, or does not gain from it")
            return None
        shapes = self._shapes_of(signature)
        is_new = signature not in self._seen
        self._seen.add(signature)
        if self._planned is not None and not shapes:
            self._count("a shape was not planned")
            return None
        self._axes.see(signature.sizes, shapes)
        if self._planned is None and (is_new or len(self._graphs) >= MOST_UNPLANNED):
            self._count("without shapes=, a shape is captured when it comes again")
            return None
        if self._is_rare(shapes) and is_new:
            self._count("a shape is planned only once an epoch")
            return None
        start = time.perf_counter()
        try:
            self._capture_all(self._targets(signature, batch), signature)
        finally:
            self._capture_seconds += time.perf_counter() - start
        return self._graphs.get(signature)

    def _is_rare(self, shapes: Sequence[Shape]) -> bool:
        planned = self._planned
        return planned is not None and all(planned[shape] == 1 for shape in shapes) and max(planned.values()) > 1

    def _targets(self, signature: Signature, batch: Any) -> list[tuple[Signature, Any]]:
        """Return what to capture now, largest first: the batch, and at the first time whatever else is planned."""
        targets = {signature: batch}
        if not self._has_catalogue:
            for shape in self._planned or ():
                sizes = None if self._is_rare([shape]) else self._axes.sizes_at(shape)
                if sizes is not None:
                    other = signature._replace(sizes=tuple(sizes))
                    if other not in self._graphs and other not in self._failed:
                        targets.setdefault(other, sizes)
            # Sizes that were not certain are captured when they come.
            self._has_catalogue = True
        return sorted(targets.items(), key=lambda target: elements_of(target[0]), reverse=True)

    def _capture_all(self, targets: list[tuple[Signature, Any]], real: Signature) -> None:
        """Capture from the largest down into one pool, which is then hardly larger than the largest needs."""
        assert self._backend is not None
        like = dict(targets)[real]
        try:
            self._open(like)
            for place, (signature, given) in enumerate(targets):
                batch = given if signature == real else resized(like, given)
                if place == 0 and not self._graphs:
                    self._rehearse(batch)
                    self._backend.prepare()
                self._capture(signature, batch, is_real=signature == real)
                if self._off is not None:
                    return
        except Exception as error:  # of the rehearsal, or of making room
            if not is_out_of_memory(error):
                self._give_up(_text_of(error))
                return
            self._failed.update(signature for signature, _ in targets[:1])
            self._count("memory ran out before a capture")
        finally:
            if self._off is None and self._graphs:
                self._watch = Watch(self._ranks.module, self._trained.parameters)
            self._held = self._backend.pool_bytes()

    def _open(self, like: Any) -> None:
        """Allocate what outlives the captures, before the pool: the optimizer's state, gradients, the divisor."""
        if self._work is not None:
            return
        allocate_state(self._trained.optimizer)
        parameters = list(self._trained.parameters)
        buffers = [torch.zeros_like(parameter, requires_grad=False) for parameter in parameters]
        self._trained.gradients.static = dict(zip(parameters, buffers, strict=True))
        divisor = torch.ones((), dtype=torch.float64, device=self._device)
        self._work = Work(
            self._settings.loss_fn,
            self._ranks,
            lambda: self._settings.precision(self._device),
            self._settings.scaler,
            parameters,
            buffers,
            divisor,
        )

    def _rehearse(self, batch: Any) -> None:
        """Run the largest shape eagerly without a trace, so that caches which grow with the shape have grown."""
        work = self._work
        assert work is not None
        snapshot, held = self._snapshot(), set_aside(work.parameters)
        is_cuda = self._device.type == "cuda"
        try:
            if is_cuda:
                self._lost_peak = max(self._lost_peak, torch.cuda.max_memory_allocated(self._device))
                torch.cuda.reset_peak_memory_stats(self._device)
                before = torch.cuda.memory_allocated(self._device)
            with work.precision():
                loss = MicroSums(work.loss_fn(work.ranks.module, batch), is_replayed=True).loss
            torch.autograd.grad(loss, work.parameters, allow_unused=True)
            del loss
            if is_cuda:
                self._predicted = torch.cuda.max_memory_allocated(self._device) - before
        finally:
            snapshot.restore()
            add_back(held)

    def _capture(self, signature: Signature, batch: Any, *, is_real: bool) -> None:
        assert self._work is not None
        assert self._backend is not None
        module = self._ranks.module
        host, untouched, snapshot = HostRandom(module), Untouched(module), self._snapshot()
        graph: MicroGraph | None = None
        reason: str | None = None
        try:
            graph = MicroGraph(signature, batch, self._work, self._backend)
        except Exception as error:
            if is_out_of_memory(error):
                self._count("memory ran out during a capture")
                self._failed.add(signature)
            elif is_real:
                reason = _text_of(error)
            # Otherwise the inputs that were made up do not go together: the shape is captured when it comes.
        moved, changed = host.moved, untouched.put_back()
        snapshot.restore()
        if moved is not None or changed is not None:
            reason = _draws(moved) if moved is not None else f"the forward pass changes {changed}; a replay would not"
        if reason is not None:
            self._give_up(reason)
        elif graph is not None:
            self._graphs[signature] = graph
            self._num_captures += 1

    def _try_out(self, graph: MicroGraph, batch: Any, eager: Callable[[], MicroSums], divisor: Divisor) -> MicroSums:
        """Run a micro-batch both ways, keep the eager one, and trust the graph if both agree."""
        assert self._backend is not None
        assert self._work is not None
        started = self._backend.seconds()
        value = divisor(graph.host_weight, elements_of(graph.signature))
        snapshot = self._snapshot()
        buffers = [self._work.buffers[place] for place in graph.touched]
        for _ in range(2):  # the first replay loads the graph
            start = self._backend.seconds()
            torch._foreach_zero_(buffers)
            replayed = graph.run(batch, value)
            graph.seconds = self._backend.seconds() - start
            snapshot.restore()
        norms = _norms(buffers)
        start = self._backend.seconds()
        sums = eager()
        graph.eager_seconds = self._backend.seconds() - start
        gradients = [parameter.grad for parameter in self._work.parameters]
        touched = [place for place, gradient in enumerate(gradients) if gradient is not None]
        same = touched == graph.touched and self._is_near(replayed, sums)
        found = [gradients[place] for place in touched]
        if not same or not self._are_near(norms, _norms([one for one in found if one is not None])):
            self._give_up("a replay gave other results than an eager run of the same batch")
        elif self._is_choosy and graph.seconds > WORTH * graph.eager_seconds:
            del self._graphs[graph.signature]
            self._failed.add(graph.signature)
        else:
            graph.is_trusted = True
        self._capture_seconds += self._backend.seconds() - started - (graph.eager_seconds or 0.0)
        return sums

    def _tolerance(self) -> float:
        is_half = self._settings.autocast is not None or torch.is_autocast_enabled(self._device.type)
        return _NEAR_HALF if is_half else _NEAR

    def _is_near(self, replayed: MicroSums, eager: MicroSums) -> bool:
        pairs = [(replayed.loss, eager.loss.detach()), (replayed.weight, eager.weight)]
        if replayed.metrics.keys() != eager.metrics.keys():
            return False
        pairs += [(replayed.metrics[name], value) for name, value in eager.metrics.items()]
        numbers = [(float(first), float(second)) for first, second in pairs]
        near = self._tolerance()
        return all(math.isclose(a, b, rel_tol=near, abs_tol=1e-6) or (a != a and b != b) for a, b in numbers)

    def _are_near(self, replayed: Tensor, eager: Tensor) -> bool:
        """Compare the norms of all gradients; one that is tiny beside the whole may differ by as much."""
        whole = float(eager.norm())
        if not math.isfinite(whole):
            return not math.isfinite(float(replayed.norm()))
        allowed = self._tolerance() * (eager + 0.01 * whole)
        return bool(((replayed - eager).abs() <= allowed + 1e-30).all())

    def update(self, factor: float) -> tuple[bool, Tensor | None]:
        """Replay the update if it can be; return whether it was, and the norm of the gradient before clipping."""
        if self._off is not None or self._work is None or not self._graphs or self._num_update_captures < 0:
            return False, None
        optimizer, scaler = self._trained.optimizer, self._settings.scaler
        assert self._backend is not None
        parameters = self._work.parameters
        plain = innermost(optimizer) is optimizer
        reason = why_not(optimizer, scaler, self._backend) if plain else "a wrapped optimizer steps eagerly"
        if reason is not None:
            self._num_update_captures = -1
            self._count(reason)
            self._warn(f"forward and backward are replayed, the update runs eagerly: {reason}")
            return False, None
        if not UpdateGraph.is_ready(optimizer, parameters):
            return False, None
        self._attach([place for place, parameter in enumerate(parameters) if parameter.grad is not None])
        if self._update_graph is None or not self._update_graph.fits():
            self._capture_update(optimizer, scaler)
        if self._update_graph is None:
            return False, None
        rates = [group["lr"] * factor for group in optimizer.param_groups]
        self._num_updates += 1
        return True, self._update_graph.run(rates)

    def _capture_update(self, optimizer: Any, scaler: torch.amp.GradScaler | None) -> None:
        assert self._work is not None
        assert self._backend is not None
        self._num_update_captures += 1
        self._update_graph = None
        if self._num_update_captures > _MOST_CHANGES:
            self._num_update_captures = -1
            self._count("options of the optimizer change again and again")
            return
        start = time.perf_counter()
        try:
            self._update_graph = UpdateGraph(
                optimizer, self._work.parameters, self._settings.clip_norm, scaler, self._backend
            )
        except Exception as error:
            self._num_update_captures = -1
            self._count(_text_of(error))
            self._warn(f"forward and backward are replayed, the update runs eagerly: {_text_of(error)}")
        self._capture_seconds += time.perf_counter() - start

    def make_room(self) -> bool:
        """Drop all graphs after an eager step ran out of memory; return whether there were any."""
        if self._off is not None or not self._graphs:
            return False
        self._give_up("an eager step ran out of memory beside the pool of the graphs")
        return True

    def pool_bytes(self) -> int:
        """Return the memory that the graphs share."""
        return 0 if self._backend is None else self._backend.pool_bytes()

    @property
    def held_bytes(self) -> int:
        """Return the memory of the pool when it was last measured: reading it takes a while."""
        return self._held

    @property
    def lost_peak_bytes(self) -> int:
        """Return the highest peak of memory before a rehearsal began to measure anew."""
        return self._lost_peak

    def summary(self) -> GraphSummary:
        """Return the figures so far."""
        return GraphSummary(
            shapes={graph.label: graph.num_replayed for graph in self._graphs.values()},
            num_replayed=self.num_replayed,
            num_eager=self._num_eager,
            num_updates_replayed=self._num_updates,
            num_captures=self._num_captures,
            pool_bytes=self.pool_bytes(),
            predicted_pool_bytes=self._predicted,
            capture_seconds=self._capture_seconds,
            saved_seconds=self._saved_seconds,
            reasons=dict(self._reasons) | ({} if self._off is None else {self._off: self._reasons.get(self._off, 0)}),
        )


def make_backend(choice: Choice, device: torch.device) -> GraphBackend | None:
    """Return what captures on a device, None where ``"auto"`` finds nothing."""
    if choice is True or (isinstance(choice, str) and choice == "auto"):
        if device.type == "cuda":
            return CudaGraphs(device)
        if choice is True:
            raise ArgumentError(
                f"graphs=True needs a model on a CUDA device, but it lies on {device}; move the model before the "
                "Stepper is made, or pass graphs='auto', which runs eagerly elsewhere"
            )
        return None
    if isinstance(choice, GraphBackend) and not isinstance(choice, type):
        return choice
    raise ArgumentError(f"graphs must be False, 'auto' or True, got {choice!r}")


def _norms(gradients: Sequence[Tensor]) -> Tensor:
    if not gradients:
        return torch.zeros(0)
    return torch.stack([norm.double() for norm in torch._foreach_norm(list(gradients))])


def _draws(generator: str) -> str:
    return f"the forward pass draws random numbers on the host ({generator}), and a replay would repeat them for ever"


def _text_of(error: Exception) -> str:
    if isinstance(error, NotGraphableError):
        return str(error)
    first = str(error).strip().splitlines()[0] if str(error).strip() else ""
    return f"a capture failed with {type(error).__name__}: {first[:200]}"
