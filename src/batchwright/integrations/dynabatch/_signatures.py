"""Which arguments a tokenizer or a model takes, as far as its signature tells."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def named_arguments(function: Callable[..., Any]) -> set[str] | None:
    """Return the arguments that a function takes by name; None if it takes any, or does not say.

    >>> named_arguments(lambda text, *, padding: None) == {"text", "padding"}, named_arguments(dict)
    (True, None)
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {parameter.name for parameter in parameters if parameter.kind in by_name}


def takes(function: Callable[..., Any], name: str) -> bool:
    """Say whether a function takes an argument by name, as far as is known.

    >>> takes(lambda text: None, "text"), takes(lambda texts: None, "text")
    (True, False)
    """
    names = named_arguments(function)
    return names is None or name in names
