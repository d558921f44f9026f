"""Real data sets by name, and a user's own files, all as one record with a split that never changes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from .._checks import as_whole
from ..errors import ArgumentError
from ._assemble import MIN_EXAMPLES
from ._builtin import load_breast_cancer, load_diabetes, load_digits, load_wine
from ._fashion import load_fashion_mnist
from ._files import load_file
from ._records import Dataset as Dataset
from ._records import Split as Split
from ._source_code import load_python_chars, load_python_functions

__all__ = ["Dataset", "Split", "load", "names"]

_SIMPLE: dict[str, Callable[..., Dataset]] = {
    "breast_cancer": load_breast_cancer,
    "diabetes": load_diabetes,
    "digits": load_digits,
    "python_chars": load_python_chars,
    "wine": load_wine,
}
_NAMES = tuple(sorted([*_SIMPLE, "fashion_mnist", "python_functions"]))


def names() -> tuple[str, ...]:
    """Return the names of the data sets that come without a file of one's own.

    >>> names()
    ('breast_cancer', 'diabetes', 'digits', 'fashion_mnist', 'python_chars', 'python_functions', 'wine')
    """
    return _NAMES


def load(
    name: str,
    *,
    path: str | os.PathLike[str] | None = None,
    target: str | None = None,
    columns: Sequence[str] | None = None,
    task: Literal["classification", "regression"] | None = None,
    limit: int | None = None,
    max_length: int = 256,
) -> Dataset:
    """Load a data set and split it, one example in five for validation, the same at every call.

    Args:
        name: one of ``names()``, or any name for a file of one's own.
        path: a ``.csv``, ``.tsv``, ``.jsonl`` or ``.npz`` file; for ``fashion_mnist`` the folder of its four files.
        target: the column of a file to predict.
        columns: the columns of a file to learn from: numbers, or one column of texts. None takes a column of texts
            called ``text`` where there is one, else all but the target.
        task: what the target of a file is. None takes texts, and whole numbers of at most 20 different values, as
            classes, and all others as numbers to predict.
        limit: the most examples, both parts together, chosen at random. None takes all, of the two data sets of
            Python's source 2,000.
        max_length: texts are cut to so many tokens.

    Returns:
        The data set, standardised by the figures of its training part.

    >>> load("digits")
    Dataset(digits: images, classification, 1438 + 359 examples)
    """
    if limit is not None:
        limit = as_whole("limit", limit, least=MIN_EXAMPLES)
    max_length = as_whole("max_length", max_length, least=1)
    if name in _NAMES:
        _check_built_in(name, path, target=target, columns=columns, task=task)
        if name == "fashion_mnist":
            return load_fashion_mnist(folder=None if path is None else Path(path), limit=limit)
        if name == "python_functions":
            return load_python_functions(limit=limit, max_length=max_length)
        return _SIMPLE[name](limit=limit)
    if path is None or target is None:
        raise ArgumentError(
            f"no data set {name!r}; there are {', '.join(_NAMES)}; "
            "a file of your own needs path= and target=, e.g. load('mine', path='data.csv', target='label')"
        )
    return load_file(name, Path(path), target=target, columns=columns, task=task, limit=limit, max_length=max_length)


def _check_built_in(name: str, path: object, **options: object) -> None:
    """Refuse options that are for files: silently left out, they would seem to work."""
    given = [option for option, value in options.items() if value is not None]
    if path is not None and name != "fashion_mnist":
        given.insert(0, "path")
    if given:
        raise ArgumentError(f"{name} is built in and takes no {', '.join(given)}; give a file another name")
