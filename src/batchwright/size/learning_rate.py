"""How the learning rate, and Adam's second beta, follow the batch size: pure rules.

There are two ways to couple them. *Annealing* grows the batch where a schedule would shrink the rate, and keeps the
rate constant: the noise of the update falls. *Scaling*, the rules here, raises the rate with the batch: the noise stays
and there are fewer updates. Linear scaling undoes annealing, so choose one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, Protocol, TypeAlias, final, get_args

from ..errors import ArgumentError

RuleName: TypeAlias = Literal["linear", "sqrt", "adascale", "none"]
Rule: TypeAlias = Callable[[int, int], float]
Beta2Rule: TypeAlias = Callable[[int, int, float], float]


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


# A bound by convention, below which the average is hardly longer than that of the gradient itself. benchmarks/beta2.py
# shows that shorter averages are worse, but no place where that begins.
LEAST_BETA2 = 0.95


def half_life(batch_size: int, base_size: int, beta2: float) -> float:
    """Return ``beta2 ** (B / B0)``: Adam's average of squared gradients forgets after as many examples as at ``B0``.

    Each update multiplies the average by ``beta2``, so half of it is left after ``B · ln 2 / -ln beta2`` examples. A
    larger batch makes fewer updates of the same examples, and needs a smaller ``beta2`` (Marek et al. 2025). It does
    not fall below 0.95, or the ``beta2`` that was given if that is less.

    >>> half_life(128, 64, 0.99), half_life(16, 64, 0.9801), half_life(512, 64, 0.98)
    (0.9801, 0.99498743710662, 0.95)
    """
    return max(float(beta2 ** (batch_size / base_size)), min(float(beta2), LEAST_BETA2))


def get_beta2_rule(rule: str | Beta2Rule | None) -> Beta2Rule | None:
    """Return the function of a rule for beta2; refuse an unknown name."""
    if rule is None or callable(rule):
        return rule
    if rule != "half_life":
        raise ArgumentError(
            f"beta2_rule must be 'half_life', a function of (batch_size, base_size, beta2) or None, got {rule!r}"
        )
    return half_life


# Wrappers that only hand calls on, by the name of a class, each with the attribute that holds the real optimizer.
_WRAPPERS = {"AcceleratedOptimizer": "optimizer", "LightningOptimizer": "_optimizer", "_FabricOptimizer": "_optimizer"}


def innermost(optimizer: Any) -> Any:
    """Return the optimizer inside the wrappers of Accelerate and Lightning, or the optimizer itself."""
    names = (_WRAPPERS.get(kind.__name__) for kind in type(optimizer).__mro__)
    attribute = next((name for name in names if name is not None), None)
    inner = None if attribute is None else getattr(optimizer, attribute, None)
    return optimizer if inner is None else innermost(inner)


def current_lr(optimizer: Any) -> float | None:
    """Return the learning rate of the first group, None if it has none.

    >>> from types import SimpleNamespace
    >>> current_lr(SimpleNamespace(param_groups=[{"lr": 0.5}]))
    0.5
    >>> current_lr(SimpleNamespace(param_groups=[{"lr": None}])) is None
    True
    """
    rate = optimizer.param_groups[0].get("lr")
    return None if rate is None else float(rate)


@contextmanager
def scaled_lr(optimizer: Any, factor: float) -> Iterator[None]:
    """Multiply the learning rate of every group in the optimizer's step, and put the rates back before anyone looks.

    Schedulers keep their own sequence that way, in a step hook too: hooks of ``torch.optim`` see the rate as it was,
    and what they make of it stays. An optimizer without such hooks has scaled rates from the first line inside the
    context to the last. A factor of 1 touches nothing.

    Args:
        optimizer: a ``torch.optim.Optimizer``, or anything with its ``param_groups``.
        factor: the rates are multiplied by it.

    Raises:
        ArgumentError: a group has no rate, or the step itself changed a scaled rate.

    >>> from types import SimpleNamespace
    >>> optimizer = SimpleNamespace(param_groups=[{"lr": 0.5}])
    >>> with scaled_lr(optimizer, 4.0):
    ...     optimizer.param_groups[0]["lr"]
    2.0
    >>> optimizer.param_groups[0]["lr"]
    0.5
    """
    if factor == 1:
        yield
        return
    inner = innermost(optimizer)
    with in_step(inner, _ScaledRates(inner, factor)):
        yield


class Change(Protocol):
    """A change of an optimizer's groups from ``__enter__`` to ``__exit__``; ``put_back`` undoes it after an error."""

    def __enter__(self) -> None:
        """Make the change."""

    def __exit__(self, *_: object) -> None:
        """Undo the change, and refuse what the step made of it."""

    def put_back(self) -> None:
        """Undo the change if it was made."""


@contextmanager
def in_step(optimizer: Any, change: Change) -> Iterator[None]:
    """Make a change only while the step of an optimizer runs, and undo it before anyone looks, after an error too.

    Args:
        optimizer: without its wrappers. One whose step runs no hooks is changed for as long as the context lasts.
        change: is made and undone.
    """
    with _step_hooks(optimizer, change) if _runs_hooks(optimizer) else change:
        try:
            yield
        except BaseException:
            change.put_back()
            raise


def _runs_hooks(optimizer: Any) -> bool:
    """Say whether ``step`` calls hooks; a compiled one is left alone, as every new hook would compile it again."""
    step = getattr(optimizer, "step", None)
    is_plain = getattr(step, "hooked", False) and not hasattr(step, "_torchdynamo_orig_callable")
    return is_plain and hasattr(optimizer, "_optimizer_step_pre_hooks")


@contextmanager
def _step_hooks(optimizer: Any, change: Change) -> Iterator[None]:
    """Make a change in the last hook before the step and undo it in the first one after it."""
    before = optimizer.register_step_pre_hook(lambda *_: change.__enter__())
    after = optimizer.register_step_post_hook(lambda *_: change.__exit__())
    optimizer._optimizer_step_post_hooks.move_to_end(after.id, last=False)
    try:
        yield
    finally:
        before.remove()
        after.remove()
        change.put_back()  # if an error ended the step between the two hooks


@final
class _ScaledRates:
    """The learning rates of an optimizer, scaled from ``__enter__`` to ``__exit__``.

    Args:
        optimizer: has ``param_groups``.
        factor: the rates are multiplied by it.
    """

    def __init__(self, optimizer: Any, factor: float) -> None:
        self._optimizer, self._factor = optimizer, factor
        self._depth = 0  # hooks run twice if a step calls the step of its base class
        self._held: list[tuple[dict[str, Any], Any, Any, Any]] = []
        self._check()

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._check()
        tensors: dict[int, Any] = {}  # groups may share a tensor, which is scaled once
        for group in self._optimizer.param_groups:
            rate = group["lr"]
            if hasattr(rate, "mul_"):  # a tensor stays the same object: compiled steps and graphs read it
                if id(rate) not in tensors:
                    tensors[id(rate)] = rate.detach().clone()
                    rate.detach().mul_(self._factor)
                self._held.append((group, rate, tensors[id(rate)], rate._version))
            else:
                group["lr"] = rate * self._factor
                self._held.append((group, rate, None, group["lr"]))

    def __exit__(self, *_: object) -> None:
        self._depth = max(0, self._depth - 1)
        if self._depth:
            return
        changed = [
            group["lr"]
            for group, rate, value, mark in self._held
            if (group["lr"] != mark if value is None else group["lr"] is not rate or rate._version != mark)
        ]
        self.put_back()
        if changed:
            raise ArgumentError(
                f"the learning rate was changed to {changed[0]} inside the step of {type(self._optimizer).__name__} "
                "while it was scaled, so nobody can tell what it is without the scale; change it after the step or "
                "in a step hook, or leave lr_rule out"
            )

    def put_back(self) -> None:
        """Restore every rate, after an error too."""
        held, self._held, self._depth = self._held, [], 0
        for group, rate, value, _ in held:
            if value is not None:
                rate.detach().copy_(value)
            group["lr"] = rate

    def _check(self) -> None:
        for number, group in enumerate(self._optimizer.param_groups):
            if group.get("lr") is None:
                raise ArgumentError(
                    f"lr_rule scales the learning rate, but group {number} of {type(self._optimizer).__name__} has "
                    "none; give the optimizer a rate (for Adafactor also relative_step=False), or leave lr_rule out"
                )
