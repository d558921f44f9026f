"""What an adapter hands on: options, except those that the framework decides itself, and calls that it has read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from ..errors import ArgumentError

# The framework opens autocast and owns the scaler; a second one would act twice.
_DECIDED = ("autocast", "scaler")


def check_options(options: Mapping[str, Any], source: str) -> None:
    """Refuse options of ``Stepper`` that the framework decides.

    Args:
        options: the options given to the adapter, by name.
        source: the framework's setting that decides them.

    >>> check_options({"clip_norm": 1.0}, "Trainer(precision=…)")
    >>> check_options({"scaler": None}, "Trainer(precision=…)")
    Traceback (most recent call last):
        ...
    batchwright.errors.ArgumentError: scaler comes from Trainer(precision=…); leave it out
    """
    for name in _DECIDED:
        if name in options:
            raise ArgumentError(f"{name} comes from {source}; leave it out")


def move_after_collate(options: Mapping[str, Any], move: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the options; micro-batches from their ``collate``, if there is one, are moved to the device.

    >>> options = move_after_collate({"collate": sum, "clip_norm": 1.0}, float)
    >>> options["collate"]([1, 2]), options["clip_norm"]
    (3.0, 1.0)
    """
    collate = options.get("collate")
    if collate is None:
        return dict(options)
    return {**options, "collate": lambda examples: move(collate(examples))}


@final
class Call:
    """The arguments of a call, by the names that a framework's own method gives them.

    A class in between may call them otherwise, or take ``*args`` and ``**kwargs``.

    Args:
        method: of the framework's class; its first parameter is the object.
        args: given by place.
        kwargs: given by name.

    Attributes:
        arguments: by name; what is set here is handed on.

    >>> call = Call(lambda self, batches, num, device: None, ["batches", 2], {"device": "cpu"})
    >>> call.arguments["num"] = 3
    >>> call.hand_on(lambda *args, **kwargs: (args, kwargs))
    (('batches', 3), {'device': 'cpu'})
    """

    def __init__(self, method: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        _, *parameters = inspect.signature(method).parameters.values()
        self.arguments: dict[str, Any] = inspect.Signature(parameters).bind(*args, **kwargs).arguments
        self._num_by_place = len(args)

    def hand_on(self, method: Callable[..., Any]) -> Any:
        """Call a method with the same arguments by place and the same by name."""
        given = list(self.arguments.items())
        by_place = [value for _, value in given[: self._num_by_place]]
        return method(*by_place, **dict(given[self._num_by_place :]))
