"""How the learning rate follows the batch size: pure rules from sizes to a factor.

There are two ways to couple them. *Annealing* grows the batch where a schedule would shrink the rate, and keeps the
rate constant: the noise of the update falls. *Scaling*, the rules here, raises the rate with the batch: the noise stays
and there are fewer updates. Linear scaling undoes annealing, so choose one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, get_args

from ..errors import ArgumentError

RuleName: TypeAlias = Literal["linear", "sqrt", "adascale", "none"]
Rule: TypeAlias = Callable[[int, int], float]


def linear(batch_size: int, base_size: int) -> float:
    """Return ``B / B0``: for SGD, while the batch is well below the noise scale.

    >>> linear(256, 64)
    4.0
    """
    return float(batch_size / base_size)


def sqrt(batch_size: int, base_size: int) -> float:
    """Return ``sqrt(B / B0)``: for Adam and similar optimizers.

    >>> sqrt(256, 64)
    2.0
    """
    return math.sqrt(batch_size / base_size)


def none(batch_size: int, base_size: int) -> float:
    """Return 1: the rate stays."""
    return 1.0


def adascale(batch_size: int, base_size: int, *, s: float, g2: float) -> float:
    """Return the gain ``(S / B0 + G2) / (S / B + G2)`` of AdaScale, between 1 and ``B / B0``.

    With much noise it is linear, with little it is 1 (Johnson et al. 2020).

    >>> adascale(256, 64, s=100.0, g2=0.0), adascale(256, 64, s=0.0, g2=1.0)
    (4.0, 1.0)
    """
    top, bottom = max(s, 0.0) / base_size + max(g2, 0.0), max(s, 0.0) / batch_size + max(g2, 0.0)
    return float(top / bottom) if bottom > 0 else 1.0


def get_rule(rule: str | Rule | None) -> Rule | Literal["adascale"] | None:
    """Return the function of a rule, or ``"adascale"`` as it is; refuse an unknown name."""
    if rule is None or callable(rule) or rule == "adascale":
        return rule  # type: ignore[return-value]
    known: dict[str, Rule] = {"linear": linear, "sqrt": sqrt, "none": none}
    if rule not in known:
        names = ", ".join(map(repr, get_args(RuleName)))
        raise ArgumentError(f"lr_rule must be {names}, a function of (batch_size, base_size) or None, got {rule!r}")
    return known[rule]


@contextmanager
def scaled_lr(optimizer: Any, factor: float) -> Iterator[None]:
    """Multiply the learning rate of every group inside the context, and put the old rates back after it.

    A scheduler keeps its own sequence that way: one that builds on ``group["lr"]``, as ``ExponentialLR`` does, would
    compound any lasting change.

    Args:
        optimizer: a ``torch.optim.Optimizer``, or anything with its ``param_groups``.
        factor: the rates are multiplied by it.

    >>> from types import SimpleNamespace
    >>> optimizer = SimpleNamespace(param_groups=[{"lr": 0.5}])
    >>> with scaled_lr(optimizer, 4.0):
    ...     optimizer.param_groups[0]["lr"]
    2.0
    >>> optimizer.param_groups[0]["lr"]
    0.5
    """
    before = [group["lr"] for group in optimizer.param_groups]
    if factor != 1:
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, before, strict=True):
            group["lr"] = rate
