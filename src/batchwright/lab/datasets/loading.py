"""Load a data set by name: those of scikit-learn, Fashion-MNIST, Python's own source, and your own files."""

from __future__ import annotations

import gzip
import os
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..._checks import as_whole
from ..._optional import require
from ...errors import ArgumentError
from ._assemble import MIN_EXAMPLES, SPLIT_SEED, VALIDATION_EVERY, assemble_arrays, standardise
from ._own_file import load_file
from ._python_source import load_python_chars, load_python_functions
from .dataset import Array, Dataset, Split, Task

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
# The third byte of an idx file says that values are unsigned bytes.
_UNSIGNED_BYTE = 0x08
# Task, number of classes, and options of the loader.
_SKLEARN: dict[str, tuple[Task, int | None, dict[str, Any]]] = {
    "breast_cancer": ("classification", 2, {}),  # 569 tumours measured in 30 columns
    "diabetes": ("regression", None, {"scaled": False}),  # 442 patients in 10 columns; how far their illness progressed
    "digits": ("classification", 10, {}),  # 1,797 handwritten digits of 8 × 8 pixels
    "wine": ("classification", 3, {}),  # 178 wines measured in 13 columns
}
_NAMES = tuple(sorted([*_SKLEARN, "fashion_mnist", "python_chars", "python_functions"]))


def names() -> tuple[str, ...]:
    """Return the names of the built-in data sets.

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
        name: one of ``names()``, or any other name for your own file.
        path: your ``.csv``, ``.tsv``, ``.jsonl`` or ``.npz`` file; for ``fashion_mnist`` the folder of its four files.
        target: the column of your file to predict.
        columns: the columns of your file to learn from: numbers, or one column of texts. None takes the column
            ``text`` if there is one and it holds texts, else all columns except the target.
        task: what the target of your file is. None treats texts, and whole numbers with at most 20 different values,
            as classes, and everything else as numbers to predict.
        limit: the most examples to use, both parts together, chosen at random. None uses all examples, and 2,000 of
            the two data sets of Python's source.
        max_length: texts are cut to this many tokens.

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
        if name == "fashion_mnist":
            return _load_fashion_mnist(folder=None if path is None else Path(path), limit=limit)
        if name == "python_functions":
            return load_python_functions(limit=limit, max_length=max_length)
        if name == "python_chars":
            return load_python_chars(limit=limit)
        return _load_sklearn(name, limit=limit)
    if path is None or target is None:
        raise ArgumentError(
            f"no data set {name!r}; there are {', '.join(_NAMES)}; "
            "your own file needs path= and target=, e.g. load('mine', path='data.csv', target='label')"
        )
    return load_file(name, Path(path), target=target, columns=columns, task=task, limit=limit, max_length=max_length)


def _check_built_in(name: str, path: object, **options: object) -> None:
    """Refuse options that only files take: ignored silently, they would seem to work."""
    given = [option for option, value in options.items() if value is not None]
    if path is not None and name != "fashion_mnist":
        given.insert(0, "path")
    if given:
        raise ArgumentError(f"{name} is built in and does not take {', '.join(given)}; give your file another name")


def _load_sklearn(name: str, *, limit: int | None) -> Dataset:
    """Return a data set that comes with scikit-learn: real, small, nothing to download."""
    require("sklearn", extra="lab")  # by its short name, for the message
    task, num_classes, options = _SKLEARN[name]
    loaded = getattr(require("sklearn.datasets", extra="lab"), f"load_{name}")(**options)
    features = loaded.images[:, None] if name == "digits" else loaded.data
    return assemble_arrays(name, features, loaded.target, task=task, num_classes=num_classes, limit=limit)


def _load_fashion_mnist(*, folder: Path | None = None, limit: int | None = None) -> Dataset:
    """Return Fashion-MNIST, 60,000 + 10,000 images of 28 × 28 pixels, 10 classes; its test part is for validation.

    Args:
        folder: the folder of its four files; None for the folder of the Debian package.
        limit: the most images, both parts together; None for all.
    """
    folder = folder or DEBIAN_FOLDER
    num_validation = None if limit is None else limit // VALIDATION_EVERY
    num_train = None if limit is None or num_validation is None else limit - num_validation
    train_images, train_labels = _part(folder, "train", num_train)
    validation_images, validation_labels = _part(folder, "t10k", num_validation)
    train_features, validation_features = standardise(train_images, validation_images)
    return Dataset(
        name="fashion_mnist",
        task="classification",
        train=Split(features=train_features, labels=train_labels),
        validation=Split(features=validation_features, labels=validation_labels),
        num_classes=10,
    )


def read_idx(path: Path) -> Array:
    """Return the array of unsigned bytes in a gzip idx file, which holds a magic number, sizes and values."""
    try:
        content = gzip.decompress(path.read_bytes())
        num_axes = content[3]
        shape = struct.unpack_from(f">{num_axes}I", content, 4)
        if content[:3] != bytes([0, 0, _UNSIGNED_BYTE]):
            raise ValueError("it does not begin as an idx file of bytes does")
        return np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * num_axes).reshape(shape)
    except (OSError, EOFError, zlib.error, struct.error, IndexError, ValueError) as error:
        raise ArgumentError(f"{path} is not a readable idx file: {error}; install or download it again") from None


def _part(folder: Path, name: str, count: int | None) -> tuple[Array, Array]:
    images = read_idx(_existing(folder / f"{name}-images-idx3-ubyte.gz"))
    labels = read_idx(_existing(folder / f"{name}-labels-idx1-ubyte.gz"))
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise ArgumentError(
            f"{folder}: the {name} files hold images {images.shape} and labels {labels.shape}; "
            "they must be (N, height, width) and (N,) of the same N"
        )
    rows = np.random.default_rng(SPLIT_SEED).permutation(len(images))[:count]
    return images[rows][:, None], labels[rows].astype(np.int64)


def _existing(path: Path) -> Path:
    if path.is_file():
        return path
    raise ArgumentError(
        f"no Fashion-MNIST in {path.parent}: {path.name} is missing; on Debian and Ubuntu run: apt install "
        "dataset-fashion-mnist; elsewhere download the four .gz files of github.com/zalandoresearch/fashion-mnist and "
        "pass their folder as path="
    )
