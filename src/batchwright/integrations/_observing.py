"""What a controller observes under a framework: which figures its policy reads, and its decisions as live lines."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, final

import numpy as np

from .._checks import read_size
from ..errors import ArgumentError, MissingSignalError
from ..size.controller import Decision
from ..size.policy import Policy, Transform
from ..size.signals.entropy import EntropyDriven
from ..size.signals.memory import MemoryDriven

if TYPE_CHECKING:  # Keras on TensorFlow observes without torch
    import torch

    from ..step.memory.monitor import MemoryMonitor

logger = logging.getLogger(__name__)

# False is silent, True prints a line per decision, a function gets the line.
History: TypeAlias = "bool | Callable[[str], Any]"

_FIGURE_OF = {EntropyDriven: "entropy", MemoryDriven: "memory_fraction"}


def reads(controller: Any, figure: str) -> bool:
    """Say whether the policy of a controller reads a figure, as far as its parts tell.

    A policy of your own says so with an attribute ``needs``, as ``track(…, needs=["entropy"])`` does.

    >>> import batchwright as bw
    >>> from batchwright import size
    >>> policy = size.chain(size.maximum(size.constant(8), size.memory_driven()), size.multiple_of(8))
    >>> controller = bw.BatchSizeController(policy, min_size=8, max_size=64)
    >>> reads(controller, "memory_fraction"), reads(controller, "entropy")
    (True, False)
    """
    return figure in set(_figures(getattr(controller, "policy", None)))


def _figures(part: Any) -> Iterator[str]:
    if isinstance(part, Mapping):
        part = tuple(part.values())
    if isinstance(part, tuple | list):
        for item in part:
            yield from _figures(item)
    elif isinstance(part, Policy | Transform):
        if type(part) in _FIGURE_OF:
            yield _FIGURE_OF[type(part)]
        needs = getattr(part, "needs", ())
        yield from needs if isinstance(needs, tuple | list | set | frozenset) else ()
        names = [item.name for item in fields(part)] if is_dataclass(part) else list(getattr(part, "__dict__", ()))
        for name in names:
            yield from _figures(getattr(part, name))


def with_memory(options: Mapping[str, Any], controller: Any, device: torch.device | str) -> dict[str, Any]:
    """Return the options of a ``Stepper``; a policy that reads memory gets a monitor of the device if none was given.

    >>> from types import SimpleNamespace
    >>> from batchwright import size
    >>> controller = SimpleNamespace(policy=size.memory_driven())
    >>> list(with_memory({"clip_norm": 1.0}, controller, "cpu"))
    ['clip_norm', 'memory']
    """
    if options.get("memory") is not None:
        return dict(options)
    memory = monitor_for(controller, device)
    return dict(options) if memory is None else {**options, "memory": memory}


def monitor_for(controller: Any, device: torch.device | str) -> MemoryMonitor | None:
    """Return a monitor of a device if the policy of a controller reads memory.

    On a CPU that is the resident memory of the process, as a share of what the machine or its container can give it.
    """
    from ..step.memory.monitor import MemoryMonitor

    return MemoryMonitor(device) if reads(controller, "memory_fraction") else None


class Change(NamedTuple):
    """A change of the size: the line that tells it, and the decision."""

    line: str
    decision: Decision

    def figures(self) -> dict[str, float]:
        """Return what a logger of numbers can take."""
        old, new, examples = self.decision.old, self.decision.new, self.decision.examples
        known = {} if examples is None else {"examples": float(examples)}
        return {"batch_size_old": float(old), "batch_size_new": float(new), **known}


def observe(controller: Any, *, hints: Mapping[str, str] | None = None, **figures: Any) -> Change | None:
    """Let a controller observe; log a change of the size with its reason and return it, None if the size stays.

    Args:
        controller: has ``observe`` and ``size``.
        hints: where a figure that was not observed comes from in this framework.
        **figures: of the update.
    """
    before = read_size(controller)
    try:
        size = int(controller.observe(**figures))
    except MissingSignalError as error:
        found = [hint for name, hint in (hints or {}).items() if name in str(error)]
        raise MissingSignalError(f"{error}; here, {found[0]}") if found else error from None
    if size == before:
        return None
    decision = _newest(controller, before, size, figures)
    logger.info("Batch size: %s", decision)
    return Change(f"Batch size: {decision}", decision)


def _newest(controller: Any, old: int, new: int, figures: Mapping[str, Any]) -> Decision:
    """Return the decision as the controller recorded it, or made from what is known where it records none."""
    history = getattr(controller, "history", ())
    if history and isinstance(history[-1], Decision):
        return history[-1]
    counts = {name: figures.get(name) for name in ("epoch", "step", "examples")}
    explain = getattr(controller, "explain", None)
    reason = str(explain()) if callable(explain) else f"{type(controller).__name__} says no reason"
    return Decision(**counts, old=old, new=new, wanted=float(new), reason=reason)


@final
class LiveHistory:
    """Shows changes of the size as they happen.

    Args:
        choice: False, True or a function that takes a line.

    >>> lines = []
    >>> history = LiveHistory(lines.append)
    >>> decision = Decision(epoch=None, step=12, examples=96, old=8, new=16, wanted=16.0, reason="the loss fell")
    >>> history.show(Change(f"Batch size: {decision}", decision), print)
    >>> lines
    ['Batch size: step 12, examples 96: 8 -> 16 (the loss fell)']
    """

    def __init__(self, choice: History) -> None:
        if not isinstance(choice, bool | np.bool_) and not callable(choice):
            raise ArgumentError(f"history must be True, False or a function that takes a line, got {choice!r}")
        self._choice = choice
        self.is_wanted = callable(choice) or bool(choice)

    def show(self, change: Change, write: Callable[[str], Any]) -> None:
        """Hand a line to the user's function, or to ``write``."""
        if self.is_wanted:
            (self._choice if callable(self._choice) else write)(change.line)
