"""Adam's beta2 inside one step: what a rule makes of it, averages that follow it, and the betas put back afterwards."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, final

from .._checks import as_number
from ..errors import ArgumentError
from .learning_rate import Beta2Rule, in_step, innermost

# The beta2 of each group of an optimizer, None for a group without one.
Beta2s: TypeAlias = "tuple[float | None, ...]"
# Of torch.optim: the average starts at 0, and the step divides it by ``1 - beta2 ** step``.
_CORRECTED = frozenset({"Adam", "AdamW", "NAdam", "RAdam", "SparseAdam"})
# Of these, the ones whose steps may be any number: nothing but the two corrections depends on it.
_COUNTED = frozenset({"Adam", "AdamW"})
# The second beta is that of an average without a correction.
_UNCORRECTED = frozenset({"Adamax", "Lion"})
# The largest average that AMSGrad has seen is divided by the same correction.
_AVERAGES = ("exp_avg_sq", "max_exp_avg_sq")
# Where a group notes the beta2 whose correction its averages need. It belongs to them: whoever saves, loads, copies or
# restores an optimizer takes both along.
MADE_FOR = "exp_avg_sq_beta2"
# Where a group notes the batch size that its averages of squares are right for.
MADE_AT = "exp_avg_sq_size"
# A size within this factor is the same: squares differ by less than they are off anyway.
_SAME_SIZE = 1.1
# A part of a step, far below what the largest change of a size makes of the first one.
_FEWEST_STEPS = 1e-12


def check_beta2(optimizer: Any) -> None:
    """Refuse an optimizer none of whose groups has ``betas``; warn if its bias correction is not known."""
    inner = innermost(optimizer)
    if all(beta2 is None for beta2 in beta2s_of(inner)):
        raise ArgumentError(
            f"beta2_rule changes the second of betas, but no group of {type(inner).__name__} has betas; leave "
            "beta2_rule out, or use an optimizer like Adam"
        )
    if _is_corrected(inner) is None:
        warnings.warn(
            f"beta2_rule does not know the bias correction of {type(inner).__name__}, if it has one: the steps after a "
            "change of the batch size may be too large or too small early in training; Adam, AdamW, NAdam, RAdam and "
            "SparseAdam of torch.optim are right",
            stacklevel=3,
        )


def follow_beta2(optimizer: Any, values: Sequence[float | None] | None) -> None:
    """Prepare Adam's averages for a step with another beta2 than the step before.

    The step divides the average of squared gradients by ``1 - beta2 ** step``, which is right for one made with this
    beta2 alone. With Adam and AdamW, ``step`` becomes the number of steps with the new beta2 that would have forgotten
    as much, ``step · log(old) / log(new)``: under ``half_life``, ten updates of 16 examples are one and a quarter of
    128, and the first few gradients of small batches, which are noisy and large, do not count as if each had been of a
    large one. The average of gradients is multiplied so that its own correction is right too. With NAdam, RAdam and
    SparseAdam, steps stay, and the average of squares is multiplied so that the quotient is what it was. A group notes
    for which beta2 its averages are right as ``"exp_avg_sq_beta2"``, and checkpoints of the optimizer hold it.

    Args:
        optimizer: Adam, AdamW, NAdam, RAdam or SparseAdam of ``torch.optim``; others are left alone.
        values: a beta2 per group, None for a group without one; None for those that the groups have.
    """
    inner = innermost(optimizer)
    if values is not None:
        _follow(inner, values)
    elif any(MADE_FOR in group for group in inner.param_groups):  # a rule was at work before, perhaps in another run
        _follow(inner, beta2s_of(inner))


def follow_noise(optimizer: Any, batch_size: int, find_scale: Callable[[], float | None]) -> None:
    """Make Adam's averages of squared gradients those that batches of another size would have given.

    The gradient of ``B`` examples has a mean square of ``G2 + S / B``, so that a noise scale ``N = S / G2`` says what
    the averages of ``B0`` examples would be at ``B``: they are multiplied by ``(1 + N / B) / (1 + N / B0)``. Without
    that, a batch that has grown takes steps that are too short until its own squares have replaced the others. A group
    notes the size as ``"exp_avg_sq_size"``, and checkpoints of the optimizer hold it.

    Args:
        optimizer: Adam, AdamW, NAdam, RAdam or SparseAdam of ``torch.optim``; others are left alone.
        batch_size: of the next step; within a tenth of the one before, nothing changes.
        find_scale: returns the noise scale in examples, None if it is not known; asked only after a change.
    """
    inner = innermost(optimizer)
    if not _is_corrected(inner):
        return
    for group in inner.param_groups:
        before = group.setdefault(MADE_AT, batch_size)
        if abs(math.log(batch_size / before)) > math.log(_SAME_SIZE):
            scale = find_scale()
            if scale is not None and math.isfinite(scale):
                _scale_squares(inner, group, (1 + scale / batch_size) / (1 + scale / before))
            group[MADE_AT] = batch_size


def forget_size(optimizer: Any) -> None:
    """Drop the note of ``follow_noise``: from this update on the averages follow no size.

    A later run that measures noise again would otherwise multiply them from a size that they left long ago.
    """
    for group in innermost(optimizer).param_groups:
        group.pop(MADE_AT, None)


def _scale_squares(optimizer: Any, group: dict[str, Any], factor: float) -> None:
    import torch

    found = [optimizer.state.get(parameter) or {} for parameter in group["params"]]
    averages = [_local(held[name]) for held in found for name in _AVERAGES if name in held]
    if averages:
        torch._foreach_mul_(averages, factor)


def beta2s_of(optimizer: Any) -> Beta2s:
    """Return the beta2 of each group, None for one without.

    >>> from types import SimpleNamespace
    >>> beta2s_of(SimpleNamespace(param_groups=[{"betas": (0.9, 0.99)}, {"momentum": 0.9}]))
    (0.99, None)
    """
    return tuple(_beta2_of(group) for group in optimizer.param_groups)


def _beta2_of(group: dict[str, Any]) -> float | None:
    betas = group.get("betas")
    if not isinstance(betas, (list, tuple)) or len(betas) < 2 or betas[1] is None:
        return None
    return float(betas[1])


def beta2s_for(optimizer: Any, rule: Beta2Rule, batch_size: int, base_size: int) -> Beta2s:
    """Return the beta2 of each group for a batch of some size, each 0 or more and below 1."""
    found = []
    for beta2 in beta2s_of(innermost(optimizer)):
        name = f"beta2_rule({batch_size}, {base_size}, {beta2}), the new beta2,"
        value = None if beta2 is None else as_number(name, rule(batch_size, base_size, beta2), least=0, below=1)
        found.append(value)
    return tuple(found)


@contextmanager
def changed_beta2(optimizer: Any, values: Sequence[float | None] | None) -> Iterator[None]:
    """Give the groups another beta2 in the optimizer's step, and put theirs back before anyone looks.

    Hooks and checkpoints see the betas as they were, as with ``scaled_lr``. Averages follow as in ``follow_beta2``,
    whether or not a step is taken.

    Args:
        optimizer: a ``torch.optim.Optimizer``, or anything with its ``param_groups``.
        values: a beta2 per group, None where nothing changes; None if nothing does.

    Raises:
        ArgumentError: the step itself changed the betas.

    >>> from types import SimpleNamespace
    >>> optimizer = SimpleNamespace(param_groups=[{"betas": (0.9, 0.99)}])
    >>> with changed_beta2(optimizer, [0.5]):
    ...     optimizer.param_groups[0]["betas"]
    (0.9, 0.5)
    >>> optimizer.param_groups[0]["betas"]
    (0.9, 0.99)
    """
    inner = innermost(optimizer)
    follow_beta2(inner, values)
    if values is None or tuple(values) == beta2s_of(inner):
        yield
        return
    with in_step(inner, ChangedBeta2(inner, values)):
        yield


@final
class ChangedBeta2:
    """The beta2 of an optimizer's groups, changed from ``__enter__`` to ``__exit__``.

    Args:
        optimizer: has ``param_groups``.
        values: a beta2 per group, None where nothing changes; None changes nothing at all.
    """

    def __init__(self, optimizer: Any, values: Sequence[float | None] | None) -> None:
        self._optimizer, self._values = optimizer, values
        self._depth = 0  # hooks run twice if a step calls the step of its base class
        self._held: list[tuple[dict[str, Any], Any, Any, Any]] = []

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1 or self._values is None:
            return
        for group, value in zip(self._optimizer.param_groups, self._values, strict=True):
            if value is not None:
                self._change(group, value)

    def _change(self, group: dict[str, Any], value: float) -> None:
        betas = group["betas"]
        beta2 = betas[1]
        if hasattr(beta2, "fill_"):  # a tensor stays the same object: compiled steps read it
            before = next((held for _, mine, held, _ in self._held if mine[1] is beta2), None)
            before = beta2.detach().clone() if before is None else before
            beta2.detach().fill_(value)
            self._held.append((group, betas, before, betas))
        else:
            changed = [betas[0], value, *betas[2:]]
            group["betas"] = changed if isinstance(betas, list) else tuple(changed)
            self._held.append((group, betas, None, group["betas"]))

    def __exit__(self, *_: object) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return
        changed = [group["betas"] for group, _, _, mark in self._held if group["betas"] is not mark]
        self.put_back()
        if changed:
            raise ArgumentError(
                f"betas were changed to {changed[0]} inside the step of {type(self._optimizer).__name__} while "
                "beta2_rule was at work; change them after the step, or leave beta2_rule out"
            )

    def put_back(self) -> None:
        """Restore the betas of every group, after an error too."""
        held, self._held, self._depth = self._held, [], 0
        for group, betas, before, _ in held:
            if before is not None:
                betas[1].detach().copy_(before)
            group["betas"] = betas


def _is_corrected(optimizer: Any) -> bool | None:
    """Say whether an optimizer divides by ``1 - beta2 ** step``, None if nobody can tell.

    A class made from one of torch's counts as that one.
    """
    kinds = type(optimizer).__mro__
    if any(kind.__name__ in _CORRECTED and kind.__module__.startswith("torch.optim.") for kind in kinds):
        return True
    return False if any(kind.__name__ in _UNCORRECTED for kind in kinds) else None


def _follow(optimizer: Any, values: Sequence[float | None]) -> None:
    """Prepare the groups whose beta2 is not that of the update before; see ``follow_beta2``.

    Called again with the same values, it changes nothing. Steps on the device are not waited for.

    Args:
        optimizer: without its wrappers; one whose correction is not known is left alone.
        values: the beta2 of each group in the next step, None for a group without one.
    """
    if not _is_corrected(optimizer):
        return
    may_count = any(kind.__name__ in _COUNTED for kind in type(optimizer).__mro__)
    for group, value in zip(optimizer.param_groups, values, strict=True):
        if value is None:
            continue
        if may_count and MADE_FOR not in group:
            _check_steps(optimizer, group)
        before = group.get(MADE_FOR, float(group["betas"][1]))
        if value != before:
            found = [optimizer.state.get(parameter) for parameter in group["params"]]
            held = [one for one in found if one and "step" in one]
            if may_count and min(before, value) > 0 and all(hasattr(one["step"], "mul_") for one in held):
                _count_anew(held, math.log(before) / math.log(value), float(group["betas"][0]))
            else:
                _multiply(held, _AVERAGES, before, value)
            group[MADE_FOR] = value


def _check_steps(optimizer: Any, group: dict[str, Any]) -> None:
    """Refuse averages that count for another beta2 than the group's, if nothing says for which; steps on a device pass.

    Steps become fractions when they count anew, and the note stands beside the betas. Who keeps only the options that
    a new optimizer has, as flattened states of ``torch.distributed.checkpoint`` do, loses the note.
    """
    found = (optimizer.state.get(parameter) for parameter in group["params"])
    step = next((held["step"] for held in found if held and "step" in held), 0)
    if getattr(step, "is_cpu", True) and not float(step).is_integer():
        raise ArgumentError(
            f"averages of {type(optimizer).__name__} are those of {float(step):g} steps, as beta2_rule counts them, "
            f"but their group has no {MADE_FOR!r}, which says for which beta2; load a state_dict() of the optimizer "
            "with all entries of its groups (flatten_optimizer_state_dict=True loses this one), or set the entry"
        )


def _count_anew(states: list[dict[str, Any]], ratio: float, beta1: float) -> None:
    """Multiply steps, so that averages of squares are right for another beta2, and averages of gradients with them."""
    import torch

    if states:
        # 1 - beta1 ** (ratio · step) is the correction of a beta1 ** ratio after as many steps as there were.
        _multiply(states, ("exp_avg",), beta1, beta1**ratio)
        torch._foreach_mul_([_local(held["step"]) for held in states], ratio)


def _multiply(states: list[dict[str, Any]], names: Sequence[str], before: float, after: float) -> None:
    """Multiply averages that are right for one beta by ``(1 - after ** t) / (1 - before ** t)``: right for another."""
    import torch

    on_host: list[tuple[dict[str, Any], float]] = []
    on_device: dict[Any, list[tuple[dict[str, Any], Any]]] = {}
    for held in states:
        step = _local(held["step"]) if hasattr(held["step"], "detach") else held["step"]
        if getattr(step, "is_cpu", True):
            on_host.append((held, _weight(float(step), after) / _weight(float(step), before)))
        else:
            on_device.setdefault(step.device, []).append((held, step))
    # All factors before the first product, which needs no memory: either all averages change or none.
    pairs = []
    for members in on_device.values():
        steps = torch.stack([step for _, step in members])
        factors = (_weight(steps, after) / _weight(steps, before)).unbind()
        pairs += [(held, factor) for (held, _), factor in zip(members, factors, strict=True)]
    averages = [(_local(held[name]), factor) for held, factor in on_host for name in names if name in held]
    if averages:
        torch._foreach_mul_([average for average, _ in averages], [factor for _, factor in averages])
    for held, factor in pairs:
        for name in names:
            if name in held:
                _local(held[name]).mul_(factor)


def _weight(step: Any, beta2: float) -> Any:
    """Return ``1 - beta2 ** step`` to the last digit; without a step the average is 0, and any factor will do."""
    rate = math.log(beta2) if beta2 > 0 else -math.inf
    if isinstance(step, float):
        return -math.expm1(max(step, _FEWEST_STEPS) * rate)
    return -(step.clamp(min=_FEWEST_STEPS) * rate).expm1()


def _local(tensor: Any) -> Any:
    """Return this rank's part of a sharded tensor, or any other tensor itself; detached."""
    detached = tensor.detach()
    return detached.to_local() if hasattr(detached, "to_local") else detached
