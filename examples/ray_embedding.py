"""Ray Data: a data set in planned batches, mapped in Ray's workers without ever being in memory as a whole.

    python examples/ray_embedding.py

Each worker notes the tokens that its batches have with padding. You see them for Ray's own batches of 32 rows and for
planned batches of at most 32 × 128 tokens, and that every row came back once. Change ``Embed`` to your model and give
``num_gpus=1``; ``batched_deployment(Embed, deadline_ms=50)`` serves the same class through Ray Serve.
"""

import sys
from typing import Any

import numpy as np
import ray
from texts import VOCABULARY, read_texts, to_ids

import batchwright as bw
from batchwright.integrations.ray import plan_dataset


class Embed:
    """Made once per worker; takes columns, pads them, and returns columns."""

    def __init__(self) -> None:
        self.table = np.random.default_rng(0).normal(size=(VOCABULARY, 16))

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return the mean vector of each text, and the width that its row had."""
        width = max(map(len, batch["input_ids"]))
        ids = np.array([[*row, *[0] * (width - len(row))] for row in batch["input_ids"]])
        vectors = self.table[ids] * (ids != 0)[..., None]
        means = vectors.sum(axis=1) / (ids != 0).sum(axis=1, keepdims=True)
        return {"number": batch["number"], "vector": means, "padded": np.full(len(ids), width)}


def main(quick: bool = False) -> dict[str, Any]:
    """Embed twice, print and return the figures."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    ray.data.DataContext.get_current().enable_progress_bars = False
    ids = [to_ids(text) for text in read_texts(200 if quick else 2000)]
    data = ray.data.from_items([{"number": number, "input_ids": row} for number, row in enumerate(ids)])
    planned = plan_dataset(data, bw.MaxTokens(32 * 128), length_of="input_ids", buffer_size=1000)
    workers = {"compute": ray.data.ActorPoolStrategy(size=1)}
    mapped = {
        "32 rows": data.map_batches(Embed, batch_size=32, batch_format="numpy", **workers),
        "planned": planned.map_batches(Embed, **workers),
    }
    figures: dict[str, Any] = {"real": sum(map(len, ids))}
    for name, dataset in mapped.items():
        rows = dataset.take_all()
        figures[name] = sum(row["padded"] for row in rows)
        is_whole = sorted(row["number"] for row in rows) == list(range(len(ids)))
        print(f"{name}: {figures[name]:,} tokens for {figures['real']:,} real ones; every row once: {is_whole}")
    ray.shutdown()
    return figures


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
