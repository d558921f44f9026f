"""A replay against an eager run of the same micro-batch: losses, weights, metrics and the norm of every gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from ..report import MicroSums

# How far a replay may be from an eager run: sums in another order, and in half precision.
NEAR, NEAR_HALF = 1e-3, 3e-2
# A gradient that is this small beside all of them may differ by as much.
_SMALL = 0.01


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
    norms = torch.stack([norm.double() for norm in torch._foreach_norm(found)]) if found else torch.zeros(0)
    return Outcome(sums, touched, norms)


def are_alike(replayed: Outcome, eager: Outcome, near: float) -> bool:
    """Say whether two outcomes differ by rounding only."""
    return (
        replayed.touched == eager.touched
        and _have_same_sums(replayed.sums, eager.sums, near)
        and _have_same_norms(replayed.norms, eager.norms, near)
    )


def _have_same_sums(replayed: MicroSums, eager: MicroSums, near: float) -> bool:
    if replayed.metrics.keys() != eager.metrics.keys():
        return False
    pairs = [(replayed.loss, eager.loss.detach()), (replayed.weight, eager.weight)]
    pairs += [(replayed.metrics[name], value) for name, value in eager.metrics.items()]
    numbers = [(float(first), float(second)) for first, second in pairs]
    return all(math.isclose(a, b, rel_tol=near, abs_tol=1e-6) or (math.isnan(a) and math.isnan(b)) for a, b in numbers)


def _have_same_norms(replayed: Tensor, eager: Tensor, near: float) -> bool:
    whole = float(eager.norm())
    if not math.isfinite(whole):
        return not math.isfinite(float(replayed.norm()))
    return bool(((replayed - eager).abs() <= near * (eager + _SMALL * whole) + 1e-30).all())
