"""Fashion-MNIST from the files of its Debian package, whole or with fewer pixels."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

from ....errors import ArgumentError
from .._assemble import SPLIT_SEED, shares, standardise
from ..dataset import Array, Dataset, Split

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
# 10,000 + 2,500 of the 70,000 images: an epoch takes a perceptron half a second, the convolutional networks four.
NUM_IMAGES = 12_500
# Pixels along each side that are averaged into one, by name: 28 × 28 pixels, and the same images in 7 × 7.
BLOCKS = {"fashion_mnist": 1, "fashion_mnist_7x7": 4}
# The third byte of an idx file says that values are unsigned bytes.
_UNSIGNED_BYTE = 0x08


def load_fashion(name: str, *, folder: Path | None, limit: int | None) -> Dataset:
    """Return images of clothes in 10 classes; the published test part is for validation.

    Args:
        name: ``"fashion_mnist"`` or ``"fashion_mnist_7x7"``.
        folder: the folder of its four files; None for the folder of the Debian package.
        limit: the most images, both parts together; None for 12,500.
    """
    folder = folder or DEBIAN_FOLDER
    train, validation = _part(folder, "train"), _part(folder, "t10k")
    num_train, num_validation = shares(NUM_IMAGES if limit is None else limit, len(train[1]), len(validation[1]))
    train, validation = _first(*train, num_train), _first(*validation, num_validation)
    images = [shrink(part[0], BLOCKS[name], folder) for part in (train, validation)]
    train_features, validation_features = standardise(images[0], images[1])
    return Dataset(
        name=name,
        task="classification",
        train=Split(features=train_features, labels=train[1]),
        validation=Split(features=validation_features, labels=validation[1]),
        num_classes=10,
        source="Fashion-MNIST of Zalando Research",
    )


def shrink(images: Array, block: int, folder: Path) -> Array:
    """Return images ``(N, 1, height, width)`` with each square of ``block × block`` pixels averaged into one.

    >>> shrink(np.arange(16).reshape(1, 1, 4, 4), 2, Path()).tolist()
    [[[[2.5, 4.5], [10.5, 12.5]]]]
    """
    count, channels, height, width = images.shape
    if height % block or width % block:
        raise ArgumentError(
            f"{folder}: images of {height} by {width} pixels cannot be averaged over squares of {block} by {block}; "
            "load them as fashion_mnist"
        )
    if block == 1:
        return images
    squares = images.reshape(count, channels, height // block, block, width // block, block)
    return np.asarray(squares.mean(axis=(3, 5)))


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


def _part(folder: Path, name: str) -> tuple[Array, Array]:
    images = read_idx(_existing(folder / f"{name}-images-idx3-ubyte.gz"))
    labels = read_idx(_existing(folder / f"{name}-labels-idx1-ubyte.gz"))
    if images.ndim != 3 or labels.shape != images.shape[:1]:
        raise ArgumentError(
            f"{folder}: the {name} files hold images {images.shape} and labels {labels.shape}; "
            "they must be (N, height, width) and (N,) of the same N"
        )
    if labels.size and labels.max() > 9:
        raise ArgumentError(f"{folder}: the {name} labels go up to {labels.max()}; Fashion-MNIST has classes 0 to 9")
    return images, labels


def _first(images: Array, labels: Array, count: int) -> tuple[Array, Array]:
    """Return the first images of an order that is always the same."""
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
