"""Optional packages are imported where they are used, with one sentence that says how to get them."""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

from .errors import MissingDependencyError


def is_installed(name: str) -> bool:
    """Say whether a package can be imported, without importing it.

    >>> is_installed("json"), is_installed("no_such_package")
    (True, False)
    """
    return importlib.util.find_spec(name) is not None


def require(name: str, *, extra: str | None) -> ModuleType:
    """Import an optional package, or say what brings it.

    Args:
        name: the module to import.
        extra: the extra of batchwright that installs it; None for a package that is installed by its own name.

    Returns:
        The imported module.

    >>> require("json", extra="torch").__name__
    'json'
    >>> require("no_such_package", extra="ray")
    Traceback (most recent call last):
        ...
    batchwright.errors.MissingDependencyError: no_such_package is not installed; run: pip install 'batchwright[ray]'
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A package that is there but lacks one of its own dependencies must not be reported as absent.
        if error.name is None or error.name.split(".")[0] != name.split(".")[0]:
            raise
        what = name if extra is None else f"'batchwright[{extra}]'"
        raise MissingDependencyError(f"{name} is not installed; run: pip install {what}", name=name) from None
