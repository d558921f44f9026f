"""Comparing: whether a replay gave what an eager run of the same batch gives."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast, final

import torch
from torch import Tensor

from ..._tree import leaves, map_leaves
from ..oom import Held, add_back, drop_gradients
from ..report import MicroSums, Sum
from ._inputs import signature_of
from ._micro import MicroGraph, Work
from ._watch import Kept
from .backend import GraphBackend

# How far a replay may be from an eager run: sums in another order, and in half precision or with dropout.
NEAR, NEAR_ROUGHLY = 1e-3, 3e-2
# How many times the distance of two replays an eager run may be away.
_SPREAD = 3.0


@final
class Outcome(NamedTuple):
    """What a micro-batch gave: its sums, and the norms of the gradients by the places of their parameters.

    The places are None where only the forward pass ran.
    """

    sums: MicroSums
    touched: list[int] | None
    norms: Tensor

    @property
    def says_something(self) -> bool:
        """Say whether another outcome could differ from it: where nothing counts, all are 0 or no numbers."""
        loss, weight, *_ = numbers_of(self.sums)
        has_gradients = self.touched is None or 0 < float(self.norms.norm()) < math.inf
        return 0 < abs(loss) < math.inf and 0 < weight < math.inf and has_gradients


def outcome_of(sums: MicroSums, gradients: Sequence[Tensor | None]) -> Outcome:
    """Return the outcome with one gradient per parameter, None for those that got none."""
    found = [gradient for gradient in gradients if gradient is not None]
    touched = [place for place, gradient in enumerate(gradients) if gradient is not None]
    return Outcome(sums, touched, _norms_of(found))


def outcome_of_step(sums: MicroSums, work: Work) -> Outcome:
    """Return the outcome of a forward pass, whose backward pass runs now and adds to no gradient."""
    loss = sums.loss if work.scaler is None else work.scaler.scale(sums.loss)
    gradients = torch.autograd.grad(loss, list(work.parameters), allow_unused=True)
    found = outcome_of(sums, gradients)
    weight = cast("Sum", sums.weight)  # not copied to the host in such a run
    return found._replace(sums=MicroSums.of_replay(sums.loss.detach(), weight, sums.metrics))


def outcome_without_gradients(returned: Any) -> Outcome:
    """Return the outcome of a forward pass that ran without gradients."""
    loss, weight, *more = returned
    return Outcome(MicroSums.of_replay(loss, weight, more[0] if more else {}), None, torch.zeros(0))


def _norms_of(gradients: Sequence[Tensor]) -> Tensor:
    if not gradients:
        return torch.zeros(0)
    norms = torch._foreach_norm(list(gradients))
    if len({norm.dtype for norm in norms}) == 1:  # one kernel instead of one for each parameter
        return torch.stack(norms).double()
    return torch.stack([norm.double() for norm in norms])


def are_alike(replays: tuple[Outcome, Outcome], eager: Outcome, *, is_half: bool) -> bool:
    """Say whether an eager run differs from replays of the same batch by rounding only, or by dropout.

    The first replay has the random state of the eager run, the second a later one: dropout shows in how far they are
    apart. Kernels may draw in another order under a capture, so an eager run may be about as far away.
    """
    first, second = replays
    if first.touched != eager.touched or first.sums.metrics.keys() != eager.sums.metrics.keys():
        return False
    spread = _distance(first.norms, second.norms)
    near = NEAR_ROUGHLY if is_half or spread > NEAR else NEAR
    if not _distance(first.norms, eager.norms) <= _SPREAD * spread + near:
        return False
    return _are_near(numbers_of(first.sums), numbers_of(second.sums), numbers_of(eager.sums), near)


def outputs_alike(replays: tuple[Any, Any], eager: Any, *, is_half: bool) -> bool:
    """Say whether the nested output of an eager run differs from those of two replays by rounding only, or by dropout.

    Every row counts: one that is wrong among many would hardly change a norm over all of them.
    """
    kinds = {signature_of(map_leaves(one, Tensor.detach)) for one in (*replays, eager)}
    if len(kinds) != 1 or None in kinds:
        return False
    columns = zip(*map(leaves, (*replays, eager)), strict=True)
    return all(_tensors_alike(*column, is_half=is_half) for column in columns)


def _tensors_alike(first: Tensor, second: Tensor, eager: Tensor, *, is_half: bool) -> bool:
    if not (eager.is_floating_point() or eager.is_complex()):
        return torch.equal(first, eager) or not torch.equal(first, second)
    spread = _largest_distance(first, second)
    near = NEAR_ROUGHLY if is_half or spread > NEAR else NEAR
    return _largest_distance(first, eager) <= _SPREAD * spread + near


def _largest_distance(values: Tensor, wanted: Tensor) -> float:
    """Return how far the worst row is from the wanted one, as a share of that; infinite where numbers are missing."""
    if wanted.numel() == 0:
        return 0.0
    kind = torch.complex128 if wanted.is_complex() else torch.float64
    rows = [one.detach().to(kind).reshape(len(one) if one.ndim else 1, -1) for one in (values, wanted)]
    if not torch.equal(*[row.isfinite() for row in rows]):
        return math.inf
    # Infinite numbers and those that are none are equal where they stand.
    first, second = (torch.where(row.isfinite(), row, 0) for row in rows)
    norms = second.norm(dim=1)
    # A row of hardly anything is measured by the others.
    least = max(1e-3 * float(norms.mean()), 1e-12)
    return float(((first - second).norm(dim=1) / norms.clamp(min=least)).max())


def _are_near(first: Sequence[float], second: Sequence[float], eager: Sequence[float], near: float) -> bool:
    if not len(first) == len(second) == len(eager):
        return False
    return all(_is_near(a, b, e, near) for a, b, e in zip(first, second, eager, strict=True))


def _distance(norms: Tensor, wanted: Tensor) -> float:
    """Return how far norms are from others, as a share of all; 0 where both are no numbers."""
    whole = float(wanted.norm())
    if not math.isfinite(whole):
        return math.inf if math.isfinite(float(norms.norm())) else 0.0
    return float((norms - wanted).norm()) / max(whole, 1e-30)


def numbers_of(sums: MicroSums) -> list[float]:
    """Return the loss, the weight, and metrics in the order of their names."""
    metrics = [float(sums.metrics[name]) for name in sorted(sums.metrics, key=repr)]
    return [float(sums.loss.detach()), float(sums.weight), *metrics]


def _is_near(first: float, second: float, eager: float, near: float) -> bool:
    if math.isnan(eager) or math.isinf(eager):
        return math.isnan(first) or first == eager
    return abs(first - eager) <= _SPREAD * abs(first - second) + near * abs(eager) + 1e-6


@final
class Comparer:
    """Compares replays with eager runs; nothing of that is left behind.

    Args:
        work: what micro-batches are put through.
        backend: tells the time.
        keep: returns what puts everything back.
    """

    def __init__(self, work: Work, backend: GraphBackend, keep: Callable[[], Kept]) -> None:
        self._work, self._seconds, self._keep = work, backend.seconds, keep

    def try_out(
        self, graph: MicroGraph, batch: Any, eager: Callable[[], MicroSums], divisor: float, *, is_half: bool
    ) -> tuple[MicroSums, bool]:
        """Replay a micro-batch twice, run it eagerly, and return the sums of the eager run and whether all agree.

        Gradients that were gathered before lie aside meanwhile; that of the eager run is added to them.
        """
        held = self._set_aside()
        replays = self._replay_twice(graph, batch, divisor, self._keep())
        start = self._seconds()
        sums = eager()
        graph.eager_seconds = self._seconds() - start
        wanted = outcome_of(sums, [parameter.grad for parameter in self._work.parameters])
        add_back(held)
        return sums, are_alike(replays, wanted, is_half=is_half)

    def agrees(self, graph: MicroGraph, batch: Any, *, is_half: bool) -> bool:
        """Compare a graph with an eager run of a batch."""
        kept, work = self._keep(), self._work
        try:
            with work.precision():
                sums = MicroSums(work.loss_fn(work.ranks.module, map_leaves(batch, torch.clone)), is_replayed=True)
            wanted = outcome_of_step(sums, work)
        finally:
            kept.restore()
        return self.has_outcome(graph, batch, wanted, is_half=is_half)

    def has_outcome(self, graph: MicroGraph, batch: Any, wanted: Outcome, *, is_half: bool) -> bool:
        """Say whether replays of a batch give what an eager run of it gave, if that says anything."""
        if not wanted.says_something:
            return False
        held, kept = self._set_aside(), self._keep()
        try:
            if wanted.touched is None:
                replays = self._replay_forward(graph, batch), self._replay_forward(graph, batch)
            else:
                replays = self._replay_twice(graph, batch, 1.0, kept)
        finally:
            kept.restore()
            add_back(held)
        return are_alike(replays, wanted, is_half=is_half)

    def _replay_forward(self, graph: MicroGraph, batch: Any) -> Outcome:
        sums = graph.run_forward(batch)
        return Outcome(sums, None, torch.zeros(0))

    def _replay_twice(self, graph: MicroGraph, batch: Any, divisor: float, kept: Kept) -> tuple[Outcome, Outcome]:
        """Replay a micro-batch into empty buffers; everything else is put back."""
        touched = set(graph.touched)
        buffers = [buffer if place in touched else None for place, buffer in enumerate(self._work.buffers)]
        replays = []
        try:
            for _ in range(2):  # the first replay also loads the graph; the second has another random state
                start = self._seconds()
                torch._foreach_zero_([buffer for buffer in buffers if buffer is not None])
                replayed = graph.run(batch, divisor)
                graph.seconds = self._seconds() - start
                replays.append(outcome_of(replayed, buffers))
                kept.untouched.put_back()
        finally:
            kept.restore()
        return replays[0], replays[1]

    def _set_aside(self) -> Held:
        """Take gradients off their parameters; those that lie in static buffers are copied."""
        pairs = zip(self._work.parameters, self._work.buffers, strict=True)
        held = [
            (one, one.grad.clone() if one.grad is buffer else one.grad) for one, buffer in pairs if one.grad is not None
        ]
        drop_gradients(self._work.parameters)
        return held
