"""Capturing: from the largest shape down into one pool, and only what a replay repeats; a replay is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from ..._ranks import Ranks
from ..._tree import map_leaves
from ...plan import MaxBytes
from .._gradients import Trained
from .._optimizers import allocate_state
from .._settings import Settings
from ..oom import Held, Snapshot, add_back, drop_gradients, is_out_of_memory, set_aside
from ..report import MicroSums
from ._comparing import Outcome, are_alike, outcome_of
from ._draws import CPU, Draws, HostRandom, harmless_draws, is_explained_by
from ._inputs import Signature, Target, elements_of, few_rows, resized
from ._micro import MicroGraph, NotGraphableError, Work, aliases_of, without_autocast_cache
from ._reach import Reach
from ._watch import Untouched
from .backend import GraphBackend

# How many times the memory of the largest eager step must be free beside the pool: other shapes leave gaps.
_SLACK = 1.1


@final
class Kept(NamedTuple):
    """Everything that a run which does not count may change: random states, buffers, and what Python holds."""

    snapshot: Snapshot
    untouched: Untouched

    def restore(self) -> str | None:
        """Put everything back, and return which value Python held otherwise, or None."""
        changed = self.untouched.put_back()
        self.snapshot.restore()
        return changed

    def restore_values(self) -> None:
        """Put back tensors and random states only."""
        self.untouched.put_values_back()
        self.snapshot.restore()


@final
class Capturer:
    """Captures micro-batches, and refuses those that do more than a replay would repeat.

    Attributes:
        work: what micro-batches are put through, None before the first capture.
        draws: random numbers that the forward pass draws on the host in vain.
        reach: what the model and the loss function read, when ``look`` was called last.
        predicted_bytes: what an eager step of the largest shape took beyond what was there, None before.
    """

    def __init__(
        self,
        settings: Settings,
        ranks: Ranks,
        trained: Trained,
        backend: GraphBackend,
        snapshot: Callable[[], Snapshot],
    ) -> None:
        self._settings, self._ranks, self._trained = settings, ranks, trained
        self._backend, self._snapshot = backend, snapshot
        self._device = trained.parameters[0].device
        self.work: Work | None = None
        self.draws: Draws = []
        self.reach = Reach(ranks.module)
        self.predicted_bytes: int | None = None
        self._max_bytes = _max_bytes(settings.micro_batch)
        self._most_rehearsed = 0  # elements of the largest inputs that were rehearsed

    def run_first(self, batch: Any, eager: Callable[[], MicroSums]) -> MicroSums:
        """Run a first micro-batch eagerly: what is made lazily exists afterwards.

        Raises:
            NotGraphableError: after the run, with its sums: the forward pass does what no graph can hold.
        """
        host = HostRandom(self.look().generators, self._device)
        whole = map_leaves(batch, lambda tensor: tensor)  # a loss may take fields out of its batch
        sums = eager()
        if self.reach.obstacle is not None:
            raise NotGraphableError(self.reach.obstacle, sums)
        moved = host.moved()
        draws: Draws | None = []
        if moved == [CPU] or self._device.type == "cpu":
            try:
                draws = self._look_at_draws(whole)
            except Exception as error:  # the eager run is done, and counts
                raise NotGraphableError(text_of(error), sums) from error
            self.draws = draws or []
        if draws is None or (moved and not draws):
            raise NotGraphableError(_random(moved or [CPU]), sums)
        if any(one.grad is not None and one.grad.is_sparse for one in self._trained.parameters):
            raise NotGraphableError("sparse gradients have no static buffer", sums)
        return sums

    def look(self) -> Reach:
        """Find what the model and the loss function read now."""
        self.reach = Reach(self._ranks.module, self._settings.loss_fn)
        return self.reach

    def _look_at_draws(self, batch: Any) -> Draws | None:
        """Return what the forward pass draws on the host in vain, None if it matters."""
        kept, is_on_host = self.keep(), self._device.type == "cpu"

        def forward() -> float:
            with torch.no_grad():
                return float(self._forward(batch)[0])

        def restore() -> None:
            kept.restore()

        try:
            draws = harmless_draws(forward, restore, is_on_host=is_on_host)
            # A replay on the host draws by itself.
            return [] if draws is not None and is_on_host else draws
        except Exception:  # a second pass that fails says nothing of the draws
            return [] if is_on_host else None
        finally:
            restore()

    def _forward(self, batch: Any) -> Any:
        """Run a copy of a batch forward, since a loss may change its batch, which the step itself runs on later."""
        with self._settings.precision(self._device), without_autocast_cache():
            return self._settings.loss_fn(self._ranks.module, map_leaves(batch, torch.clone))

    def keep(self) -> Kept:
        """Return what puts everything back after a run that must leave no trace."""
        return Kept(self._snapshot(), Untouched(self.reach))

    def capture(
        self, targets: Sequence[Target], real: Signature, *, eager_elements: int
    ) -> Iterator[tuple[Signature, MicroGraph | None]]:
        """Yield every target with its graph, None where memory ran out or the budget would be exceeded.

        Args:
            targets: largest first; what is not the real one is made of its rows and columns.
            real: the signature of a batch that came.
            eager_elements: of the largest batch that will run eagerly, beside the pool.

        Raises:
            NotGraphableError: a replay would not repeat what the step does.
        """
        like = dict(targets)[real]
        batches = [given if signature == real else resized(like, given) for signature, given in targets]
        self._open()
        if self.look().obstacle is not None:
            raise NotGraphableError(str(self.reach.obstacle))
        kept, is_rehearsed, num_captured = self.keep(), elements_of(targets[0][0]) <= self._most_rehearsed, 0
        if is_rehearsed:
            self._run_ahead(batches, kept)
        for place, (signature, batch) in enumerate(zip(dict(targets), batches, strict=True)):
            try:
                if not is_rehearsed:
                    self._rehearse(batch, kept, is_real=signature == real)
                    is_rehearsed = self._fits(elements_of(signature), eager_elements)
                    self._most_rehearsed = elements_of(signature) if is_rehearsed else 0
                    if is_rehearsed:
                        self._run_ahead(batches[place + 1 :], kept)
                is_real = signature == real
                graph: MicroGraph | None = self._capture(signature, batch, is_real=is_real) if is_rehearsed else None
            except _MadeUpError:
                continue  # what was made up does not go together: such shapes are captured when they come
            except Exception as error:
                if not is_out_of_memory(error):
                    kept.untouched.put_back()  # what the rehearsal has counted
                    raise
                graph = None
            if graph is None:
                self._backend.prepare()  # outside the except block, where the traceback holds activations
            num_captured += graph is not None
            yield signature, graph
        if not num_captured:  # otherwise graphs read what the rehearsal has made
            kept.untouched.put_back()

    def _open(self) -> None:
        """Allocate what outlives the captures, before the pool: the optimizer's state, gradients, the divisor."""
        if self.work is not None:
            return
        allocate_state(self._trained.optimizer)
        parameters = list(self._trained.parameters)
        buffers = [torch.zeros_like(parameter, requires_grad=False) for parameter in parameters]
        self._trained.gradients.static = dict(zip(parameters, buffers, strict=True))
        self.work = Work(
            self._settings.loss_fn,
            self._ranks,
            lambda: self._settings.precision(self._device),
            self._settings.scaler,
            parameters,
            aliases_of(parameters, self._ranks),
            buffers,
            torch.ones((), dtype=torch.float64, device=self._device),
        )

    def _rehearse(self, batch: Any, kept: Kept, *, is_real: bool) -> None:
        """Run the largest shape eagerly, so that caches which grow with the shape have grown; tensors are put back.

        A capture that follows refuses whatever still changes then, such as a counter.
        """
        assert self.work is not None
        held = set_aside(self.work.parameters)
        failure: str | None = None
        try:
            # A copy, since a loss may change its batch, which the step itself runs on later.
            self.predicted_bytes = self._backend.measure(lambda: self._run_once(map_leaves(batch, torch.clone)))
        except Exception as error:
            if is_out_of_memory(error):
                raise
            failure = text_of(error)
        finally:
            kept.restore_values()
            add_back(held)
        if failure is not None:
            kept.untouched.put_back()
            raise NotGraphableError(failure) if is_real else _MadeUpError
        self.look()
        self._backend.prepare()

    def _run_ahead(self, batches: Sequence[Any], kept: Kept) -> None:
        """Run batches forward eagerly: a table that a cache keeps per shape must not be made by a capture.

        What a capture makes holds no values before a replay, and not those of its shape after that of another one.
        """
        for batch in batches:
            for needs_gradient in (False, True):  # a loss may take gradients itself
                try:
                    with torch.set_grad_enabled(needs_gradient):
                        self._forward(batch)
                    break
                except Exception:
                    continue
                finally:
                    kept.restore_values()
        self.look()
        self._backend.prepare()

    def _fits(self, num_elements: int, eager_elements: int) -> bool:
        """Say whether the pool and what runs beside it stay inside a budget in bytes; activations grow with inputs."""
        if self._max_bytes is None or self.predicted_bytes is None:
            return True
        needed = self.predicted_bytes * (1 + eager_elements / num_elements)
        return self._backend.used_bytes() + needed <= self._max_bytes

    def _run_once(self, batch: Any) -> None:
        assert self.work is not None
        with self.work.precision():
            loss = MicroSums(self.work.loss_fn(self.work.ranks.module, batch), is_replayed=True).loss
        torch.autograd.grad(loss, self.work.parameters, allow_unused=True)

    def try_out(
        self, graph: MicroGraph, batch: Any, eager: Callable[[], MicroSums], divisor: float, *, is_half: bool
    ) -> tuple[MicroSums, bool]:
        """Replay a micro-batch twice, run it eagerly, and return the sums of the eager run and whether all agree.

        Gradients that were gathered before lie aside meanwhile; that of the eager run is added to them.
        """
        work, seconds = self.work, self._backend.seconds
        assert work is not None
        held, kept = _set_aside(work.parameters, work.buffers), self.keep()
        replays = self._replay_twice(graph, batch, divisor, kept)
        start = seconds()
        sums = eager()
        graph.eager_seconds = seconds() - start
        wanted = outcome_of(sums, [parameter.grad for parameter in work.parameters])
        add_back(held)
        return sums, are_alike(replays, wanted, is_half=is_half)

    def _replay_twice(self, graph: MicroGraph, batch: Any, divisor: float, kept: Kept) -> tuple[Outcome, Outcome]:
        """Replay a micro-batch into empty buffers; everything else is put back."""
        work, seconds, touched = self.work, self._backend.seconds, set(graph.touched)
        assert work is not None
        buffers = [buffer if place in touched else None for place, buffer in enumerate(work.buffers)]
        replays = []
        for _ in range(2):  # the first replay also loads the graph; the second has another random state
            start = seconds()
            torch._foreach_zero_([buffer for buffer in buffers if buffer is not None])
            replayed = graph.run(batch, divisor)
            graph.seconds = seconds() - start
            replays.append(outcome_of(replayed, buffers))
            kept.untouched.put_back()
        kept.restore()
        return replays[0], replays[1]

    @property
    def lacks_room(self) -> bool:
        """Say whether an eager step of the largest shape may find no memory beside the pool."""
        free = self._backend.free_bytes()
        return free is not None and self.predicted_bytes is not None and free < _SLACK * self.predicted_bytes

    def agrees(self, graph: MicroGraph, *, is_half: bool) -> bool:
        """Capture two rows of a graph's inputs and compare them with an eager run, without a trace.

        For where memory is short: a whole micro-batch may not fit beside the pool.
        """
        work = self.work
        assert work is not None
        held = _set_aside(work.parameters, work.buffers)
        try:
            part = self._part_of(graph)
            batch, kept = map_leaves(part.inputs, torch.clone), self.keep()
            replays = self._replay_twice(part, batch, 1.0, kept)
            with work.precision():
                sums = MicroSums(work.loss_fn(work.ranks.module, batch), is_replayed=True)
            loss = sums.loss if work.scaler is None else work.scaler.scale(sums.loss)
            wanted = outcome_of(sums, torch.autograd.grad(loss, list(work.parameters), allow_unused=True))
            kept.restore()
        finally:
            add_back(held)
        return are_alike(replays, wanted, is_half=is_half)

    def _part_of(self, graph: MicroGraph) -> MicroGraph:
        """Return a graph of two rows, or the same one where the loss wants all of them."""
        sizes = few_rows(graph.signature.sizes)
        if sizes == graph.signature.sizes:
            return graph
        batch = resized(graph.inputs, sizes)
        try:
            self._run_ahead([batch], self.keep())
            return self._capture(graph.signature._replace(sizes=sizes), batch, is_real=False)
        except _MadeUpError:
            return graph

    def _capture(self, signature: Signature, batch: Any, *, is_real: bool) -> MicroGraph:
        assert self.work is not None
        host, kept = HostRandom(self.reach.generators, self._device), self.keep()
        start = torch.get_rng_state()
        try:
            graph = MicroGraph(signature, batch, self.work, self._backend)
            moved = host.moved()
            if moved == [CPU] and self.draws and is_explained_by(self.draws, start):
                moved = []
            if moved:
                raise NotGraphableError(_random(moved))
        except NotGraphableError:
            raise
        except Exception as error:
            if is_out_of_memory(error):
                raise
            if not is_real and "captur" not in str(error):  # the loss refuses what was made up
                raise _MadeUpError from error
            raise NotGraphableError(text_of(error)) from error
        finally:
            changed = kept.restore()
        if changed is not None:
            raise NotGraphableError(f"the forward pass changes {changed}, and a replay would not")
        return graph


def _max_bytes(micro_batch: Any) -> float | None:
    """Return the bytes that a budget allows, None if it counts something else."""
    parts = getattr(micro_batch, "parts", (micro_batch,))
    return min((part.max_bytes for part in parts if isinstance(part, MaxBytes)), default=None)


class _MadeUpError(Exception):
    """Inputs that were made of others do not go together."""


def text_of(error: Exception) -> str:
    """Return the reason of a failed capture as part of a sentence."""
    if isinstance(error, NotGraphableError):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    what = f"{type(error).__name__}: {lines[0][:200]}"
    if "captur" in str(error):  # the texts of CUDA differ between versions
        return f"the step waits for the device, by .item(), a shape that depends on values or the like ({what})"
    return f"a capture failed with {what}"


def _random(generators: Sequence[str]) -> str:
    names = ", ".join(generators)
    return f"the forward pass draws random numbers on the host ({names}), and a replay would repeat them for ever"


def _set_aside(parameters: Sequence[nn.Parameter], buffers: Sequence[Tensor]) -> Held:
    """Take gradients off their parameters; those that lie in static buffers are copied."""
    pairs = zip(parameters, buffers, strict=True)
    held = [
        (one, one.grad.clone() if one.grad is buffer else one.grad) for one, buffer in pairs if one.grad is not None
    ]
    drop_gradients(parameters)
    return held
