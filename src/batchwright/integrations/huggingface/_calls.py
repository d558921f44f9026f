"""A call of one of the trainer's methods, read by the names of transformers and passed on as it came."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import transformers


@final
class Call:
    """The arguments of a call, by the names that transformers gives them.

    A trainer class in between may call them otherwise, or take ``*args`` and ``**kwargs``.

    Args:
        name: of a method of ``Trainer``.
        args: given by place.
        kwargs: given by name.

    Attributes:
        arguments: by name; what is set here is passed on.

    >>> call = Call("get_batch_samples", ["batches", 2], {"device": "cpu"})
    >>> call.arguments["num_batches"] = 3
    >>> call.pass_on(lambda *args, **kwargs: (args, kwargs))
    (('batches', 3), {'device': 'cpu'})
    """

    def __init__(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        _, *parameters = inspect.signature(getattr(transformers.Trainer, name)).parameters.values()
        self.arguments: dict[str, Any] = inspect.Signature(parameters).bind(*args, **kwargs).arguments
        self._num_by_place = len(args)

    def pass_on(self, method: Callable[..., Any]) -> Any:
        """Call a method with the same arguments by place and the same by name."""
        given = list(self.arguments.items())
        by_place = [value for _, value in given[: self._num_by_place]]
        return method(*by_place, **dict(given[self._num_by_place :]))
