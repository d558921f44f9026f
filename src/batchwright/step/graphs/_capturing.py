"""Capturing: from the largest shape down into one pool, and only what a replay repeats; a replay is compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import torch

from ..._ranks import Ranks
from ..._tree import map_leaves
from ...plan import MaxBytes
from .._gradients import Trained
from .._optimizers import allocate_state
from .._settings import Settings
from ..oom import Snapshot, add_back, is_out_of_memory, set_aside
from ..report import MicroSums
from ._comparing import Comparer, numbers_of
from ._draws import CPU, Draws, HostRandom, harmless_draws, is_explained_by
from ._inputs import Signature, Target, elements_of, few_rows, resized
from ._micro import MicroGraph, NotGraphableError, Work, aliases_of, without_autocast_cache
from ._reach import Reach
from ._watch import Kept, Untouched
from .backend import GraphBackend

# How many times the memory of the largest eager step must be free beside the pool: other shapes leave gaps.
_SLACK = 1.1


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
        self, targets: Sequence[Target], real: Signature, *, eager_elements: int, is_half: bool
    ) -> Iterator[tuple[Signature, MicroGraph | None]]:
        """Yield every target with its graph, None where memory ran out or the budget would be exceeded.

        Args:
            targets: largest first; what is not the real one is made of its rows and columns.
            real: the signature of a batch that came.
            eager_elements: of the largest batch that will run eagerly, beside the pool.
            is_half: the forward pass computes in half precision.

        Raises:
            NotGraphableError: a replay would not repeat what the step does.
        """
        like = dict(targets)[real]
        rest = [_Candidate(one, given if one == real else resized(like, given), one == real) for one, given in targets]
        self._open()
        if self.look().obstacle is not None:
            raise NotGraphableError(str(self.reach.obstacle))
        kept, num_captured = self.keep(), 0
        is_larger = elements_of(rest[0].signature) > self._most_rehearsed
        dropped = self._rehearse_first(rest, kept, eager_elements) if is_larger else []
        first = rest[0].signature if rest else None
        rest = self._run_ahead(rest, kept)
        if is_larger and rest and rest[0].signature != first:  # more elements are not always more memory
            dropped += self._rehearse_first(rest, kept, eager_elements)
        yield from ((signature, None) for signature in dropped)
        self.look()
        self._backend.prepare()
        for one in rest:
            try:
                graph: MicroGraph | None = self._capture(one, kept, is_half=is_half)
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

    def _rehearse_first(self, rest: list[_Candidate], kept: Kept, eager_elements: int) -> list[Signature]:
        """Rehearse the first of some shapes; drop it, as long as it does not fit, and return what was dropped."""
        dropped = []
        while rest:
            fits = self._rehearse_if_it_fits(rest[0], kept, eager_elements)
            if fits:
                break
            one = rest.pop(0)
            if fits is not None:
                dropped.append(one.signature)
        return dropped

    def _rehearse_if_it_fits(self, one: _Candidate, kept: Kept, eager_elements: int) -> bool | None:
        """Rehearse a shape; return whether it fits, None where it was made up and does not go together."""
        num_elements = elements_of(one.signature)
        try:
            self._rehearse(one, kept)
        except _MadeUpError:
            return None
        except Exception as error:
            if not is_out_of_memory(error):
                kept.untouched.put_back()
                raise
        else:
            if self._fits(num_elements, eager_elements):
                self._most_rehearsed = max(self._most_rehearsed, num_elements)
                return True
        self._backend.prepare()  # outside the except block, where the traceback holds activations
        return False

    def _rehearse(self, one: _Candidate, kept: Kept) -> None:
        """Run the largest shape eagerly, so that caches which grow with the shape have grown; tensors are put back.

        A capture that follows refuses whatever still changes then, such as a counter.
        """
        assert self.work is not None
        held = set_aside(self.work.parameters)
        failure: str | None = None
        try:
            # A copy, since a loss may change its batch, which the step itself runs on later.
            batch = map_leaves(one.batch, torch.clone)
            taken = self._backend.measure(lambda: self._run_once(batch))
            self.predicted_bytes = max(self.predicted_bytes or 0, taken)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            failure = text_of(error)
        finally:
            kept.restore_values()
            add_back(held)
        if failure is not None:
            kept.untouched.put_back()
            raise NotGraphableError(failure) if one.is_real else _MadeUpError

    def _run_ahead(self, found: Sequence[_Candidate], kept: Kept) -> list[_Candidate]:
        """Run batches forward eagerly, and return those that take the most memory first.

        A table that a cache keeps per shape must not be made by a capture: what that makes holds no values before a
        replay, and not those of its shape after that of another one. In the order of their memory, all shapes find room
        in what the first one has taken.
        """
        ahead = [self._run_one_ahead(one, kept) for one in found]
        return sorted(ahead, key=lambda one: -one.num_bytes)

    def _run_one_ahead(self, one: _Candidate, kept: Kept) -> _Candidate:
        found: list[MicroSums] = []
        num_bytes, numbers = 0, None
        try:
            num_bytes = self._backend.measure(
                lambda: found.append(MicroSums(self._forward(one.batch), is_replayed=True))
            )
            numbers = numbers_of(found.pop())
        except Exception:  # the capture, or the eager run in its place, says why
            found.clear()
        finally:
            kept.restore_values()
        return one._replace(num_bytes=num_bytes, numbers=numbers)

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
        """Run a micro-batch both ways, and return the sums of the eager run and whether both agree."""
        return self._comparer.try_out(graph, batch, eager, divisor, is_half=is_half)

    @property
    def lacks_room(self) -> bool:
        """Say whether an eager step of the largest shape may find no memory beside the pool."""
        free = self._backend.free_bytes()
        return free is not None and self.predicted_bytes is not None and free < _SLACK * self.predicted_bytes

    def agrees(self, graph: MicroGraph, *, is_half: bool) -> bool:
        """Compare two rows of a graph's inputs: a whole micro-batch may not fit beside the pool."""
        return self._comparer.agrees(self._part_of(graph), is_half=is_half)

    def _part_of(self, graph: MicroGraph) -> MicroGraph:
        """Return a graph of two rows, or the same one where the loss wants all of them."""
        sizes = few_rows(graph.signature.sizes)
        if sizes == graph.signature.sizes:
            return graph
        part = _Candidate(graph.signature._replace(sizes=sizes), resized(graph.inputs, sizes), is_real=False)
        kept = self.keep()
        try:
            return self._capture(self._run_one_ahead(part, kept), kept, is_half=False)
        except _MadeUpError:
            return graph

    def _capture(self, one: _Candidate, kept: Kept, *, is_half: bool) -> MicroGraph:
        """Return the graph of a micro-batch, and see whether its replay gives the numbers of the eager run."""
        graph = self._capture_only(one)
        if one.numbers is not None:
            graph.is_checked = self._comparer.has_numbers(graph, one.numbers, is_half=is_half)
            kept.restore_values()
        return graph

    def _capture_only(self, one: _Candidate) -> MicroGraph:
        assert self.work is not None
        host, kept = HostRandom(self.reach.generators, self._device), self.keep()
        start = torch.get_rng_state()
        try:
            graph = MicroGraph(one.signature, one.batch, self.work, self._backend)
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
            if not one.is_real and "captur" not in str(error):  # the loss refuses what was made up
                raise _MadeUpError from error
            raise NotGraphableError(text_of(error)) from error
        finally:
            changed = kept.restore()
        if changed is not None:
            raise NotGraphableError(f"the forward pass changes {changed}, and a replay would not")
        return graph

    @property
    def _comparer(self) -> Comparer:
        assert self.work is not None
        return Comparer(self.work, self._backend, self.keep)


@final
class _Candidate(NamedTuple):
    """A micro-batch to capture, with what an eager forward pass of it gave."""

    signature: Signature
    batch: Any
    is_real: bool
    num_bytes: int = 0
    numbers: list[float] | None = None


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


def obstacle_of(settings: Settings, ranks: Ranks) -> str | None:
    """Return what stands against graphs whatever the batch, None if nothing does."""
    if ranks.meet_in_forward:
        return "ranks meet inside the forward pass, with FSDP2 or SyncBatchNorm"
    if settings.autocast is torch.float16 and settings.weight_of is None:
        return "float16 needs the weight of a batch before it runs, weight_of="
    return None
