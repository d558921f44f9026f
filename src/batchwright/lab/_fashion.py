"""Fashion-MNIST out of its four files: 60,000 + 10,000 images of 28 × 28 pixels, 10 classes."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np

from ..errors import ArgumentError
from ._assemble import SPLIT_SEED, VALIDATION_EVERY, standardise
from ._records import Array, Dataset, Split

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
# The third byte of an idx file says that values are unsigned bytes.
_UNSIGNED_BYTE = 0x08


def load_fashion_mnist(*, folder: Path | None = None, limit: int | None = None) -> Dataset:
    """Return Fashion-MNIST; its published test part is the validation part.

    Args:
        folder: where the four files are; None for where the Debian package puts them.
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
    """Return the array of unsigned bytes in a gzip idx file: magic number, sizes, values."""
    try:
        content = gzip.decompress(path.read_bytes())
        num_axes = content[3]
        shape = struct.unpack_from(f">{num_axes}I", content, 4)
        if content[:3] != bytes([0, 0, _UNSIGNED_BYTE]):
            raise ValueError("the first bytes are not those of an idx file of bytes")
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
        "dataset-fashion-mnist; elsewhere get the four .gz files of github.com/zalandoresearch/fashion-mnist and pass "
        "their folder as path="
    )
