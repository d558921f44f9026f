"""Which arguments a tokenizer or a model takes, as far as its signature tells."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple


class Arguments(NamedTuple):
    """The arguments that can be given by name, and whether any other can be given too."""

    names: frozenset[str]
    takes_others: bool

    def take(self, name: str) -> bool:
        """Say whether an argument can be given by this name."""
        return self.takes_others or name in self.names


def arguments_of(function: Callable[..., Any]) -> Arguments:
    """Return what a function takes; one that does not say takes anything.

    >>> arguments_of(lambda text, *, padding: None).take("texts"), arguments_of(lambda **options: None).take("texts")
    (False, True)
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return Arguments(frozenset(), True)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    names = frozenset(parameter.name for parameter in parameters if parameter.kind in by_name)
    return Arguments(names, any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters))
