"""Comparing: whether a replay gave what an eager run of the same batch gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from ..report import MicroSums

# How far a replay may be from an eager run: sums in another order, and in half precision or with dropout.
NEAR, NEAR_ROUGHLY = 1e-3, 3e-2
# How many times the distance of two replays an eager run may be away.
_SPREAD = 3.0


@final
class Outcome(NamedTuple):
    """What a micro-batch gave: its sums, and the norms of the gradients by the places of their parameters."""

    sums: MicroSums
    touched: list[int]
    norms: Tensor


def outcome_of(sums: MicroSums, gradients: Sequence[Tensor | None]) -> Outcome:
    """Return the outcome with one gradient per parameter, None for those that got none."""
    found = [gradient for gradient in gradients if gradient is not None]
    touched = [place for place, gradient in enumerate(gradients) if gradient is not None]
    return Outcome(sums, touched, _norms_of(found))


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
    numbers = zip(*map(_numbers_of, (first.sums, second.sums, eager.sums)), strict=True)
    return all(_is_near(a, b, e, near) for a, b, e in numbers)


def _distance(norms: Tensor, wanted: Tensor) -> float:
    """Return how far norms are from others, as a share of all; 0 where both are no numbers."""
    whole = float(wanted.norm())
    if not math.isfinite(whole):
        return math.inf if math.isfinite(float(norms.norm())) else 0.0
    return float((norms - wanted).norm()) / max(whole, 1e-30)


def _numbers_of(sums: MicroSums) -> list[float]:
    metrics = [float(sums.metrics[name]) for name in sorted(sums.metrics, key=repr)]
    return [float(sums.loss.detach()), float(sums.weight), *metrics]


def _is_near(first: float, second: float, eager: float, near: float) -> bool:
    if math.isnan(eager) or math.isinf(eager):
        return math.isnan(first) or first == eager
    return abs(first - eager) <= _SPREAD * abs(first - second) + near * abs(eager) + 1e-6
