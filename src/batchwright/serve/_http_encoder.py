"""A small transformer with random weights that makes a vector of a text: something to serve without a download."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from .._optional import is_installed, require

Array: TypeAlias = NDArray[np.float32]

# Bytes of a text; a longer one is cut, as encoders do.
MAX_LENGTH = 256
_NUM_BYTES = 256
_FAR_BELOW = np.float32(-1e9)


@final
@dataclass(frozen=True)
class Layer:
    """The weights of one layer."""

    query_key_value: Any
    mix: Any
    grow: Any
    shrink: Any


@final
class DemoEncoder:
    """Attention and a feed-forward part, each added to its normalised input; the mean over a text is its vector.

    Padding is masked, so a vector does not depend on the mates. The time of a batch grows with its padded tokens.

    Args:
        width: of the hidden states, a multiple of ``num_heads``.
        num_layers: number of layers.
        num_heads: number of attention heads.
        use_torch: None takes torch where it is installed, else NumPy.

    >>> encoder = DemoEncoder(width=8, num_layers=1, num_heads=2, use_torch=False)
    >>> len(encoder(["to be", "or not"])[0])
    8
    """

    def __init__(
        self, *, width: int = 64, num_layers: int = 1, num_heads: int = 2, use_torch: bool | None = None
    ) -> None:
        self.uses_torch = is_installed("torch") if use_torch is None else use_torch
        self._num_heads = num_heads
        rng = np.random.default_rng(0)
        self._bytes = self._own(_normal(rng, _NUM_BYTES, width))
        self._positions = self._own(_normal(rng, MAX_LENGTH, width))
        shapes = ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width))
        self._layers = [Layer(*(self._own(_normal(rng, *shape)) for shape in shapes)) for _ in range(num_layers)]

    @property
    def name(self) -> str:
        """Return what it runs on."""
        return "torch" if self.uses_torch else "NumPy"

    def __call__(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = self._vectors(*pad(texts)).tolist()
        return vectors

    def _vectors(self, ids: Any, mask: Any) -> Any:
        if not self.uses_torch:
            return self._encode(ids, mask, np)
        torch = require("torch", extra="torch")
        with torch.inference_mode():
            return self._encode(torch.from_numpy(ids), torch.from_numpy(mask), torch)

    def _own(self, weights: Array) -> Any:
        return require("torch", extra="torch").from_numpy(weights) if self.uses_torch else weights

    def _encode(self, ids: Any, mask: Any, lib: Any) -> Any:
        """Return one vector a text, written with what NumPy and torch have in common."""
        x = self._bytes[ids] + self._positions[: ids.shape[1]]
        hidden = ((1 - mask) * _FAR_BELOW)[:, None, None, :]
        for layer in self._layers:
            x = x + _times(self._attend(_times(_normalise(x), layer.query_key_value), hidden, lib), layer.mix)
            x = x + _times(_times(_normalise(x), layer.grow).clip(0), layer.shrink)
        summed = (x * mask[:, :, None]).sum(1)
        return summed / lib.sqrt((summed * summed).sum(-1))[:, None]

    def _attend(self, query_key_value: Any, hidden: Any, lib: Any) -> Any:
        items, length, width = query_key_value.shape
        split = query_key_value.reshape(items, length, 3, self._num_heads, width // 3 // self._num_heads)
        query, key, value = (split[:, :, part].swapaxes(1, 2) for part in range(3))
        scores = query @ key.swapaxes(2, 3) / np.float32(query.shape[-1] ** 0.5) + hidden
        # Scores of normalised states are small; only those of padding are far away, and their weight is nought.
        weights = lib.exp(scores)
        return (weights @ value / weights.sum(-1)[..., None]).swapaxes(1, 2).reshape(items, length, width // 3)


def pad(texts: list[str]) -> tuple[NDArray[np.int64], Array]:
    """Return ids ``(items, longest)`` of bytes and a mask that is one where they are real.

    >>> ids, mask = pad(["ab", "c"])
    >>> ids.tolist(), mask.tolist()
    ([[97, 98], [99, 0]], [[1.0, 1.0], [1.0, 0.0]])
    """
    rows = [_bytes_of(text) for text in texts]
    ids = np.zeros((len(rows), max(map(len, rows))), np.int64)
    mask = np.zeros(ids.shape, np.float32)
    for row, (line, place) in zip(rows, zip(ids, mask, strict=True), strict=True):
        line[: len(row)], place[: len(row)] = list(row), 1
    return ids, mask


def length_of(text: Any) -> int:
    """Return the bytes of a text that are encoded.

    >>> length_of("to be"), length_of("x" * 1000)
    (5, 256)
    """
    return len(_bytes_of(text))


def _bytes_of(text: Any) -> bytes:
    if not isinstance(text, str):
        raise TypeError(f"the demo encodes a text, got {type(text).__name__}")
    return text.encode("utf-8", "surrogatepass")[:MAX_LENGTH] or b" "


def _normal(rng: np.random.Generator, rows: int, columns: int) -> Array:
    return rng.normal(0, rows**-0.5, (rows, columns)).astype(np.float32)


def _times(x: Any, weights: Any) -> Any:
    """Multiply as one large matrix; NumPy would run one small product a text."""
    return (x.reshape(-1, x.shape[-1]) @ weights).reshape(*x.shape[:-1], weights.shape[-1])


def _normalise(x: Any) -> Any:
    centred = x - x.mean(-1)[..., None]
    return centred / ((centred * centred).mean(-1)[..., None] + 1e-5) ** 0.5
