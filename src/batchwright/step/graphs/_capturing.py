"""Capturing: from the largest shape down into one pool, and only what a replay repeats; a replay is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, final

import torch

from ..._ranks import Ranks
from ..._tree import map_leaves
from ...plan import MaxBytes
from .._gradients import Trained
from .._optimizers import allocate_state
from .._settings import Settings
from ..oom import Snapshot, add_back, is_out_of_memory, set_aside
from ..report import MicroSums
from ..whole_batches.loss import WholeBatchLoss
from ._comparing import Comparer, Outcome, outcome_of_step, outcome_without_gradients
from ._draws import CPU, Draws, HostRandom, is_explained_by, vain_draws
from ._inputs import Signature, Target, elements_of, few_rows, resized
from ._micro import MicroGraph, NotGraphableError, Work, aliases_of, without_autocast_cache
from ._reach import Reach
from ._watch import Kept, Untouched
from .backend import GraphBackend

Made = TypeVar("Made")

# How many times the memory of the largest eager step must be free beside the pool: other shapes leave gaps.
_SLACK = 1.1


@final
class Capturer:
    """Captures micro-batches, and refuses those that do more than a replay would repeat.

    Attributes:
        work: what micro-batches are put through, None before the first capture.
        draws: random numbers that the forward pass draws on the host in vain.
        reach: what the model and the loss function read, when ``look`` was called last.
        predicted_bytes: the most that an eager step of a captured shape took beyond what was there, None before.
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
        self._sample: _Candidate | None = None  # a batch that came

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
            raise NotGraphableError(random_reason(moved or [CPU]), sums)
        if any(one.grad is not None and one.grad.is_sparse for one in self._trained.parameters):
            raise NotGraphableError("sparse gradients have no static buffer", sums)
        return sums

    def look(self) -> Reach:
        """Find what the model and the loss function read now."""
        self.reach = Reach(self._ranks.module, self._settings.loss_fn)
        return self.reach

    def _look_at_draws(self, batch: Any) -> Draws | None:
        """Return what the forward pass draws on the host in vain, None if it matters."""
        kept = self.keep()

        def forward() -> float:
            with torch.no_grad():
                return float(self._forward(batch)[0])

        return vain_draws(forward, kept.put_back, is_on_host=self._device.type == "cpu")

    def _forward(self, batch: Any) -> Any:
        """Run a copy of a batch forward, since a loss may change its batch, which the step itself runs on later."""
        with self._settings.precision(self._device), without_autocast_cache():
            return self._settings.loss_fn(self._ranks.module, map_leaves(batch, torch.clone))

    def keep(self) -> Kept:
        """Return what puts everything back after a run that must leave no trace."""
        return Kept(self._snapshot(), Untouched(self.reach))

    def capture(
        self, targets: Sequence[Target], real: Signature, eager_elements: int, *, is_half: bool, is_tight: bool
    ) -> Iterator[tuple[Signature, MicroGraph | None]]:
        """Yield every target with its graph, None where memory ran out or the budget would be exceeded.

        Args:
            targets: largest first; what is not the real one is made of its rows and columns.
            real: the signature of a batch that came.
            eager_elements: of the largest batch that will run eagerly, beside the pool.
            is_half: the forward pass computes in half precision.
            is_tight: no eager step fits beside the pool.

        Raises:
            NotGraphableError: a replay would not repeat what the step does.
        """
        like = dict(targets)[real]
        rest = [_Candidate(one, given if one == real else resized(like, given), one == real) for one, given in targets]
        self._open()
        if self.look().obstacle is not None:
            raise NotGraphableError(str(self.reach.obstacle))
        if self._sample is None:  # a copy, since a loss may write to its batch
            self._sample = _Candidate(real, map_leaves(like, torch.clone), is_real=True)
        kept, num_captured = self.keep(), 0
        ready, dropped = self._run_ahead(rest, kept, eager_elements, is_tight=is_tight)
        yield from ((signature, None) for signature in dropped)
        self.look()
        self._backend.prepare()
        # In the order of their memory, all shapes find room in what the first one has taken.
        for one in sorted(ready, key=lambda one: -one.num_bytes):
            try:
                graph: MicroGraph | None = self._capture(one, is_half=is_half)
            except MadeUpError:
                continue  # what was made up does not go together: such shapes are captured when they come
            except Exception as error:
                if not is_out_of_memory(error):
                    kept.untouched.put_back()  # what the rehearsal has counted
                    raise
                graph = None
            if graph is None:
                self._backend.prepare()  # outside the except block, where the traceback holds activations
            else:
                num_captured += 1
                self.predicted_bytes = max(self.predicted_bytes or 0, one.num_bytes)
            yield one.signature, graph
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

    def _run_ahead(
        self, found: Sequence[_Candidate], kept: Kept, eager_elements: int, *, is_tight: bool
    ) -> tuple[list[_Candidate], list[Signature]]:
        """Run batches eagerly before they are captured; return what can be captured, and what does not fit.

        A table that a cache keeps per shape must not be made by a capture: what that makes holds no values before a
        replay, and not those of its shape after that of another one. A capture that follows refuses whatever still
        changes then, such as a counter.
        """
        ready, dropped = [], []
        for one in found:
            try:
                ran = self._run_forward_ahead(one, kept) if is_tight else self._run_step_ahead(one, kept)
            except MadeUpError:
                continue
            if ran is not None and self._fits(ran, eager_elements):
                ready.append(ran)
            else:
                dropped.append(one.signature)
                self._backend.prepare()  # outside the except block, where the traceback holds activations
        return ready, dropped

    def _run_step_ahead(self, one: _Candidate, kept: Kept) -> _Candidate | None:
        """Run a step, and return what it took and gave; None if it ran out of memory. Tensors are put back."""
        assert self.work is not None
        held, found = set_aside(self.work.parameters), list[Outcome]()
        num_bytes, failure = 0, None
        try:
            num_bytes = self._backend.measure(lambda: found.append(self._run_once(one.batch)))
        except Exception as error:
            failure = "" if is_out_of_memory(error) else text_of(error)
        finally:
            kept.restore_values()
            add_back(held)
        if failure and not one.is_real:
            raise MadeUpError  # what other shapes have made meanwhile, such as tables, stays
        if failure:
            kept.untouched.put_back()
            raise NotGraphableError(failure)
        return one._replace(num_bytes=num_bytes, outcome=found[0]) if found else None

    def _run_forward_ahead(self, one: _Candidate, kept: Kept) -> _Candidate:
        """Run a batch only forward and without gradients, where memory is short; a loss that fails then is no news."""
        found = list[Outcome]()
        try:
            with torch.no_grad():
                found.append(outcome_without_gradients(self._forward(one.batch)))
        except Exception:  # the capture, or the eager run in its place, says why
            found.clear()
        finally:
            kept.restore_values()
        return one._replace(outcome=found[0] if found else None)

    def _fits(self, one: _Candidate, eager_elements: int) -> bool:
        """Say whether the pool and what runs beside it stay inside a budget in bytes; activations grow with inputs."""
        if self._max_bytes is None:
            return True
        needed = one.num_bytes * (1 + eager_elements / elements_of(one.signature))
        return self._backend.used_bytes() + needed <= self._max_bytes

    def _run_once(self, batch: Any) -> Outcome:
        assert self.work is not None
        sums = MicroSums(self._forward(batch), is_replayed=True)
        return outcome_of_step(sums, self.work)

    def try_out(
        self, graph: MicroGraph, batch: Any, eager: Callable[[], MicroSums], divisor: float, *, is_half: bool
    ) -> tuple[MicroSums, bool]:
        """Run a micro-batch both ways, and return the sums of the eager run and whether both agree."""
        return self._comparer.try_out(graph, batch, eager, divisor, is_half=is_half)

    @property
    def lacks_room(self) -> bool:
        """Say whether an eager step of the largest shape may find no memory beside the pool."""
        free = self._backend.free_bytes()
        return free is not None and self.predicted_bytes is not None and free < _SLACK * self.predicted_bytes

    def agrees(self, graphs: Mapping[Signature, MicroGraph], *, is_half: bool) -> bool:
        """Compare two rows of a batch that came: a whole micro-batch may not fit beside the pool.

        Args:
            graphs: what was captured; where the loss wants all rows, the graph of that batch is compared.
            is_half: the forward pass computes in half precision.
        """
        sample = self._sample
        assert sample is not None
        sizes = few_rows(sample.signature.sizes)
        part = _Candidate(sample.signature._replace(sizes=sizes), resized(sample.batch, sizes), is_real=False)
        try:
            graph = None if sizes == sample.signature.sizes else self._capture_only(self._ahead_of(part))
        except MadeUpError:
            graph = None
        batch = sample.batch if graph is None else part.batch
        graph = graph or graphs.get(sample.signature)
        return graph is not None and self._comparer.agrees(graph, batch, is_half=is_half)

    def _ahead_of(self, part: _Candidate) -> _Candidate:
        ran = self._run_step_ahead(part, self.keep())
        if ran is None:
            raise torch.OutOfMemoryError("two rows find no memory beside the pool")
        return ran

    def _capture(self, one: _Candidate, *, is_half: bool) -> MicroGraph:
        """Return the graph of a micro-batch, and see whether replays give what the eager run gave."""
        graph = self._capture_only(one)
        if one.outcome is not None:
            graph.is_checked = self._comparer.has_outcome(graph, one.batch, one.outcome, is_half=is_half)
        return graph

    def _capture_only(self, one: _Candidate) -> MicroGraph:
        assert self.work is not None
        work, host, kept = self.work, HostRandom(self.reach.generators, self._device), self.keep()
        return captured(
            lambda: MicroGraph(one.signature, one.batch, work, self._backend),
            host, kept, self.draws, is_real=one.is_real,
        )  # fmt: skip

    @property
    def _comparer(self) -> Comparer:
        assert self.work is not None
        return Comparer(self.work, self._backend, self.keep)


def captured(make: Callable[[], Made], host: HostRandom, kept: Kept, draws: Draws, *, is_real: bool) -> Made:
    """Return the graph that ``make`` captures, if the capture did nothing that a replay would not repeat.

    Args:
        make: captures.
        host: the random generators of the host now.
        kept: puts everything back.
        draws: what may be drawn on the host, since it changes nothing.
        is_real: the inputs are those of a batch that came, and not made up.

    Raises:
        NotGraphableError: a replay would not repeat what was done.
        MadeUpError: inputs that were made up do not go together.
    """
    start = torch.get_rng_state()
    try:
        graph = make()
        moved = host.moved()
        if moved == [CPU] and draws and is_explained_by(draws, start):
            moved = []
        if moved:
            raise NotGraphableError(random_reason(moved))
    except NotGraphableError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise
        if not is_real and "captur" not in str(error):  # the loss refuses what was made up
            raise MadeUpError from error
        raise NotGraphableError(text_of(error)) from error
    finally:
        changed = kept.restore()
    if changed is not None:
        raise NotGraphableError(f"the forward pass changes {changed}, and a replay would not")
    return graph


@final
class _Candidate(NamedTuple):
    """A micro-batch to capture, with what an eager run of it took and gave."""

    signature: Signature
    batch: Any
    is_real: bool
    num_bytes: int = 0
    outcome: Outcome | None = None


def _max_bytes(micro_batch: Any) -> float | None:
    """Return the bytes that a budget allows, None if it counts something else."""
    parts = getattr(micro_batch, "parts", (micro_batch,))
    return min((part.max_bytes for part in parts if isinstance(part, MaxBytes)), default=None)


class MadeUpError(Exception):
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


def random_reason(generators: Sequence[str]) -> str:
    """Return why random numbers of the host stand against a graph."""
    names = ", ".join(generators)
    return f"the forward pass draws random numbers on the host ({names}), and a replay would repeat them for ever"


def obstacle_of(settings: Settings, ranks: Ranks) -> str | None:
    """Return what stands against graphs whatever the batch, None if nothing does."""
    if ranks.meet_in_forward:
        return "ranks meet inside the forward pass, with FSDP2 or SyncBatchNorm"
    if settings.autocast is torch.float16 and settings.weight_of is None:
        return "float16 needs the weight of a batch before it runs, weight_of="
    if isinstance(settings.loss_fn, WholeBatchLoss):
        return "a WholeBatchLoss encodes every micro-batch again after the loss of all of them"
    return None
