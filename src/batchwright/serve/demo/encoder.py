"""DemoEncoder: a small network with random weights that turns texts into vectors, to serve without a download."""

from __future__ import annotations

from typing import Any, final

import numpy as np

# Longer texts are cut to this many bytes, as encoders do.
MAX_LENGTH = 256
_NUM_BYTES = 256


@final
class DemoEncoder:
    """The mean over the bytes of a text, each passed through a few dense layers, scaled to length 1.

    The layers run on padding too, so the time of a batch grows with ``num_items × longest``. Padding is left out of the
    mean, so the vector of a text does not depend on the other texts.

    Args:
        width: the size of the vectors.
        num_layers: the number of layers.

    >>> encoder = DemoEncoder(width=8)
    >>> vector = encoder(["to be"])[0]
    >>> len(vector), encoder(["a longer text", "to be"])[1] == vector
    (8, True)
    """

    def __init__(self, *, width: int = 64, num_layers: int = 3) -> None:
        rng = np.random.default_rng(0)
        # Bytes, their positions, then the layers: each draw has the variance that keeps its output near 1.
        rows = [_NUM_BYTES, MAX_LENGTH, *[width] * num_layers]
        self._bytes, self._positions, *self._layers = (
            rng.normal(0, count**-0.5, (count, width)).astype(np.float32) for count in rows
        )

    def __call__(self, texts: list[str]) -> list[list[float]]:
        """Return one vector per text."""
        rows = [_bytes_of(text) for text in texts]
        lengths = np.array([len(row) for row in rows])
        longest = int(lengths.max())
        ids = np.frombuffer(b"".join(row.ljust(longest) for row in rows), np.uint8).reshape(-1, longest)
        x = self._bytes[ids] + self._positions[:longest]
        for layer in self._layers:
            # Unlike ``@``, einsum keeps to one thread (three policies share the processor) and to one order of sums.
            x = np.maximum(np.einsum("nlw,wv->nlv", x, layer), 0)
        is_real = np.arange(longest) < lengths[:, None]
        summed = np.einsum("nlw,nl->nw", x, is_real.astype(np.float32))
        vectors: list[list[float]] = (summed / np.linalg.norm(summed, axis=1, keepdims=True)).tolist()
        return vectors


def length_of(text: Any) -> int:
    """Return how many bytes of a text are encoded.

    >>> length_of("to be"), length_of("x" * 1000)
    (5, 256)
    """
    return len(_bytes_of(text))


def _bytes_of(text: Any) -> bytes:
    if not isinstance(text, str):
        raise TypeError(f"the demo encodes a text, got {type(text).__name__}")
    return text.encode("utf-8", "surrogatepass")[:MAX_LENGTH] or b" "
