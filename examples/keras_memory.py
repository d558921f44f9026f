"""Keras: pieces follow memory, and the update stays: above 80 % of memory they halve, below 48 % they double.

    KERAS_BACKEND=tensorflow python examples/keras_memory.py

The same model is trained twice on the same batches of 64: by Keras alone, and in pieces whose size a policy decides
from the memory in use. A stand-in plays the memory, of which another program takes half after a while; on a GPU, leave
``get_info`` and ``reset`` out. Both runs end with the same weights, up to rounding. It takes a few seconds on a CPU.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

import batchwright as bw
from batchwright import size
from batchwright.integrations.keras import TensorFlowMemory, adaptive

NUM_STEPS, BATCH = 12, 64
BUSY_FROM = 6  # from this update on another program holds half of the memory


def make_model() -> Any:
    """Return a small compiled network."""
    keras.utils.set_random_seed(0)
    layers = [keras.Input((20,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", jit_compile=False)
    return model


def main() -> tuple[list[int], float]:
    """Train twice, print the sizes of pieces, and return them with the largest difference of a weight."""
    rng = np.random.default_rng(0)
    batches = [(rng.normal(size=(BATCH, 20)), rng.normal(size=(BATCH, 1))) for _ in range(NUM_STEPS)]
    controller = bw.BatchSizeController(size.memory_driven(high=0.8, low=0.48), min_size=1, max_size=BATCH, initial=8)
    used: list[float] = []

    def get_info(device: str) -> dict[str, int]:
        return {"current": 0, "peak": int(10 * controller.size + 500 * (len(used) >= BUSY_FROM))}

    memory = TensorFlowMemory("GPU:0", total_bytes=1000, get_info=get_info, reset=lambda device: None)
    whole, cut = make_model(), adaptive(make_model(), micro_batch=controller, memory=memory)
    sizes = []
    for x, y in batches:
        whole.train_on_batch(x, y)
        cut.train_on_batch(x, y)
        used.append(cut.batchwright.report.memory_fraction)
        sizes.append(max(cut.batchwright.report.sizes))
        print(f"update {len(sizes):>2}: pieces of {sizes[-1]:>2}, memory {used[-1]:.0%} full")
    pairs = zip(whole.get_weights(), cut.get_weights(), strict=True)
    apart = max(float(np.abs(a - b).max()) for a, b in pairs)
    print(f"\nweights differ from those of whole batches by {apart:.1e} at most")
    return sizes, apart


if __name__ == "__main__":
    main()
