"""Adam's average of squared gradients when beta2 changes: what the bias correction makes of it stays the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

# Of torch.optim: the average starts at 0, and the step divides it by ``1 - beta2 ** step``.
_CORRECTED = frozenset({"Adam", "AdamW", "NAdam", "RAdam", "SparseAdam"})
# The second beta is that of an average without a correction.
_UNCORRECTED = frozenset({"Adamax", "Lion"})
# The largest average that AMSGrad has seen is divided by the same correction.
_AVERAGES = ("exp_avg_sq", "max_exp_avg_sq")
# Where a group notes the beta2 whose correction its averages need. It belongs to them: whoever saves, loads, copies or
# restores an optimizer takes both along.
MARK = "exp_avg_sq_beta2"

# Averages, each with the factor it is multiplied by: a number, or a tensor where the steps are on the device.
_Factors: TypeAlias = "list[tuple[Any, Any]]"


def is_corrected(optimizer: Any) -> bool | None:
    """Say whether an optimizer divides by ``1 - beta2 ** step``, None if nobody can tell.

    A class made from one of torch's counts as that one.
    """
    kinds = type(optimizer).__mro__
    if any(kind.__name__ in _CORRECTED and kind.__module__.startswith("torch.optim.") for kind in kinds):
        return True
    return False if any(kind.__name__ in _UNCORRECTED for kind in kinds) else None


def follow(optimizer: Any, values: Sequence[float | None]) -> None:
    """Multiply averages by ``(1 - new ** t) / (1 - old ** t)`` in groups whose beta2 is not that of the update before.

    Here ``t`` counts the steps of a parameter so far. Called again with the same values, it changes nothing. Steps on
    the device are not waited for.

    Args:
        optimizer: without its wrappers; one whose correction is not known is left alone.
        values: the beta2 of each group in the next step, None for a group without one.
    """
    if not is_corrected(optimizer):
        return
    for group, value in zip(optimizer.param_groups, values, strict=True):
        if value is None:
            continue
        before = group.get(MARK, float(group["betas"][1]))
        if value != before:
            factors = [one for held in _states(optimizer, group) for one in _factors(held, before, value)]
            _multiply(factors)  # needs no memory, so that either all averages have changed or none
            group[MARK] = value


def _states(optimizer: Any, group: dict[str, Any]) -> list[dict[str, Any]]:
    found = [optimizer.state.get(parameter) for parameter in group["params"]]
    return [held for held in found if held and "step" in held]


def _factors(held: dict[str, Any], before: float, after: float) -> _Factors:
    step = held["step"]
    if hasattr(step, "detach"):
        step = _local(step)
        step = step if step.device.type != "cpu" else float(step)
    factor = _weight(step, after) / _weight(step, before)
    return [(_local(held[name]), factor) for name in _AVERAGES if name in held]


def _weight(step: Any, beta2: float) -> Any:
    """Return ``1 - beta2 ** step`` to the last digit, for one step if there was none: the average is 0 then."""
    rate = math.log(beta2) if beta2 > 0 else -math.inf
    if isinstance(step, (int, float)):
        return -math.expm1(max(step, 1) * rate)
    return -(step.clamp(min=1) * rate).expm1()


def _multiply(factors: _Factors) -> None:
    import torch

    on_host = [(average, factor) for average, factor in factors if isinstance(factor, float)]
    if on_host:
        averages, numbers = zip(*on_host, strict=True)
        torch._foreach_mul_(averages, numbers)
    for average, factor in factors:
        if not isinstance(factor, float):
            average.mul_(factor)


def _local(tensor: Any) -> Any:
    """Return this rank's part of a sharded tensor, or any other tensor itself; detached."""
    detached = tensor.detach()
    return detached.to_local() if hasattr(detached, "to_local") else detached
