"""Load a data set by name: real tables and images, tables of a formula, Python's own source, and your own files.

The data sets of Python's source depend on its version; compare results only within one version.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..._checks import as_whole
from ..._optional import require
from ...errors import ArgumentError
from ._assemble import MIN_EXAMPLES, assemble
from ._columns import FileTask
from ._own_file import load_file
from .built_in import load_fashion, load_formula, load_texts, load_windows
from .built_in.fashion import BLOCKS
from .built_in.formulas import NAMES as FORMULAS
from .built_in.language import WINDOWS
from .built_in.texts import CORPORA
from .dataset import Dataset, Task

# Task, number of classes, and options of the loader.
_SKLEARN: dict[str, tuple[Task, int | None, dict[str, Any]]] = {
    "breast_cancer": ("classification", 2, {}),  # 569 tumours measured in 30 columns
    "diabetes": ("regression", None, {"scaled": False}),  # 442 patients in 10 columns; how far their illness progressed
    "digits": ("classification", 10, {}),  # 1,797 handwritten digits of 8 × 8 pixels
    "wine": ("classification", 3, {}),  # 178 wines measured in 13 columns
}
_NAMES = tuple(sorted([*_SKLEARN, *BLOCKS, *FORMULAS, *CORPORA, *WINDOWS]))


def names() -> tuple[str, ...]:
    """Return the names of the built-in data sets.

    >>> len(names()), names()[:3]
    (15, ('breast_cancer', 'diabetes', 'digits'))
    """
    return _NAMES


def load(
    name: str,
    *,
    path: str | os.PathLike[str] | None = None,
    target: str | None = None,
    columns: Sequence[str] | None = None,
    task: FileTask | None = None,
    limit: int | None = None,
    max_length: int = 256,
) -> Dataset:
    """Load a data set and split it, one example in five for validation, the same at every call.

    Args:
        name: one of ``names()``, or any other name for your own file.
        path: your ``.csv``, ``.tsv``, ``.jsonl`` or ``.npz`` file; for ``fashion_mnist`` and
            ``fashion_mnist_7x7`` the folder of the four files.
        target: the column of your file to predict.
        columns: the columns of your file to learn from: numbers, columns of at most 20 different words, which become
            columns of 0 and 1, or one column of texts. None takes the column ``text`` if there is one and it holds
            texts, else all columns except the target.
        task: what the target of your file is. None treats texts, and whole numbers with at most 20 different values,
            as classes, and everything else as numbers to predict.
        limit: the most examples to use, both parts together, chosen at random; no example changes its part with the
            limit. None uses all examples, 12,500 images of Fashion-MNIST, 2,000 functions, 3,000 docstrings, and
            10,000 paragraphs or windows of Python's source.
        max_length: texts are cut to this many tokens, those of ``python_paragraphs`` to this many characters.

    Returns:
        The data set, standardised by the mean and spread of its training part.

    >>> load("digits")
    Dataset(digits: images, classification, 1438 + 359 examples)
    """
    if limit is not None:
        limit = as_whole("limit", limit, least=MIN_EXAMPLES)
    max_length = as_whole("max_length", max_length, least=1)
    if name in _NAMES:
        _check_built_in(name, path, target=target, columns=columns, task=task)
        return _load_built_in(name, None if path is None else Path(path), limit=limit, max_length=max_length)
    if path is None or target is None:
        raise ArgumentError(
            f"no data set {name!r}; there are {', '.join(_NAMES)}; "
            "your own file needs path= and target=, e.g. load('mine', path='data.csv', target='label')"
        )
    return load_file(name, Path(path), target=target, columns=columns, task=task, limit=limit, max_length=max_length)


def _check_built_in(name: str, path: object, **options: object) -> None:
    """Refuse options that only files take: ignored silently, they would seem to work."""
    given = [option for option, value in options.items() if value is not None]
    if path is not None and name not in BLOCKS:
        given.insert(0, "path")
    if given:
        raise ArgumentError(f"{name} is built in and does not take {', '.join(given)}; give your file another name")


def _load_built_in(name: str, folder: Path | None, *, limit: int | None, max_length: int) -> Dataset:
    if name in BLOCKS:
        return load_fashion(name, folder=folder, limit=limit)
    if name in FORMULAS:
        return load_formula(name, limit=limit)
    if name in CORPORA:
        return load_texts(name, limit=limit, max_length=max_length)
    if name in WINDOWS:
        return load_windows(name, limit=limit)
    return _load_sklearn(name, limit=limit)


def _load_sklearn(name: str, *, limit: int | None) -> Dataset:
    """Return a data set that comes with scikit-learn: real, small, nothing to download."""
    require("sklearn", extra="lab")  # by its short name, for the message
    task, num_classes, options = _SKLEARN[name]
    loaded = getattr(require("sklearn.datasets", extra="lab"), f"load_{name}")(**options)
    features = loaded.images[:, None] if name == "digits" else loaded.data
    return assemble(
        name, features, loaded.target, task=task, num_classes=num_classes, limit=limit, source="scikit-learn"
    )
