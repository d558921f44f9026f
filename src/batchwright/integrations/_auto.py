"""What ``controller="auto"`` stands for: a policy, its bounds, and how rate and beta2 follow the size."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

from ..errors import ArgumentError
from ..size.controller import BatchSizeController
from ..size.learning_rate import innermost
from ..size.schedules import constant
from ..size.signals import goodput

logger = logging.getLogger(__name__)

# The largest batch: this many times the base, and so many updates per epoch that there is something to learn from.
_MOST_TIMES = 64
_LEAST_UPDATES = 20
# Every how many updates noise is measured where the batch has to be cut for it, which may take twice as long.
NOISE_EVERY = 8
# Of so many first updates every second one is measured, so that the first decision does not wait.
NOISE_FIRST = 32


class Coupling(NamedTuple):
    """How the learning rate and Adam's beta2 follow the size, by name."""

    lr_rule: str
    beta2_rule: str | None


def is_auto(controller: Any) -> bool:
    """Say whether a controller is to be made here."""
    return isinstance(controller, str) and controller == "auto"


def largest_size(base_size: int, num_examples: int | None) -> int:
    """Return ``64 × base_size``, at most a twentieth of an epoch, and at least ``base_size``.

    >>> largest_size(8, None), largest_size(8, 2_000), largest_size(8, 50)
    (512, 100, 8)
    """
    most = _MOST_TIMES * base_size
    return most if num_examples is None else max(base_size, min(most, num_examples // _LEAST_UPDATES))


def make_controller(base_size: int, num_examples: int | None) -> BatchSizeController:
    """Return a controller that looks for the size which makes the most progress per second, from a base upwards.

    Args:
        base_size: examples per update over all ranks, which the learning rate was chosen for.
        num_examples: of an epoch, None if nobody knows.
    """
    largest = largest_size(base_size, num_examples)
    if largest < 2 * base_size:
        logger.warning(
            "controller='auto' keeps the size near %d: an epoch of %s examples has room for %d updates of at most %d.",
            base_size,
            num_examples,
            _LEAST_UPDATES,
            largest,
        )
    if largest == base_size:
        return BatchSizeController(constant(base_size), min_size=base_size, max_size=base_size)
    policy = goodput(base_size=base_size, smallest=base_size, largest=largest)
    return BatchSizeController(policy, min_size=base_size, max_size=largest)


def coupling_of(optimizer: Any) -> Coupling:
    """Return how rate and beta2 follow the size: linear for SGD, else the square root; beta2's half-life for Adam.

    >>> from types import SimpleNamespace
    >>> class AdamW(SimpleNamespace): ...
    >>> coupling_of(AdamW(param_groups=[{"lr": 0.1, "betas": (0.9, 0.99)}]))
    Coupling(lr_rule='sqrt', beta2_rule='half_life')
    """
    inner = innermost(optimizer)
    groups, names = inner.param_groups, [kind.__name__.lower() for kind in type(inner).__mro__]
    if any(group.get("lr") is None for group in groups):
        raise ArgumentError(
            f"controller='auto' scales the learning rate with the size, but a group of {type(inner).__name__} has "
            "none; give the optimizer a rate (for Adafactor also relative_step=False), or pass a controller of your own"
        )
    if any("sgd" in name for name in names):
        return Coupling("linear", None)
    is_adam = any("adam" in name for name in names) and any("betas" in group for group in groups)
    return Coupling("sqrt", "half_life" if is_adam else None)
