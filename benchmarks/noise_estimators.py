"""Gradient noise by both estimators on the same training run: from the whole gradient, and from the vectors of norms.

    python benchmarks/noise_estimators.py [--task chars|digits] [--steps 600]

A character model (the source of Python's library, 3 layers, AdamW) and a classifier (digits of scikit-learn,
convolutions with GroupNorm, SGD) train by ``Stepper(measure_noise=True, noise_from="vectors")``. Before every update a
second Stepper with a learning rate of 0 measures the whole gradient of the same batch at the same weights, in 4 parts.
Each row is a tenth of the run: ``S`` and ``G2`` are averaged over it and divided last. "vectors alone" is the scale of
the vectors as it is, "vectors, scaled" what reports say: the ratio comes from the few updates that measured both, not
from the column beside it. The error is that of ``G2`` of the whole gradient, which is the noisiest of all.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn

from batchwright._stdlib_source import python_files, stdlib_folder
from batchwright.size.noise import NoiseRatio
from batchwright.step import Stepper

RESULT = Path(__file__).parent / "results" / "noise_estimators.json"
BATCH_SIZE = 32
NUM_PARTS = 4
LENGTH = 48
Batch = tuple[torch.Tensor, torch.Tensor]
Task = tuple[nn.Module, torch.optim.Optimizer, Callable[[], Batch]]


class CharModel(nn.Module):
    """A causal language model over bytes."""

    def __init__(self, width: int = 64, num_layers: int = 3) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(256, width), nn.Parameter(0.02 * torch.randn(LENGTH, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(tokens) + self.places, mask=self.mask, is_causal=True))


def make_chars() -> Task:
    source = b"".join(path.read_bytes() for path in python_files(stdlib_folder())[:300])
    text = torch.tensor(list(source), dtype=torch.long)
    model = CharModel()

    def draw() -> Batch:
        rows = torch.randint(0, len(text) - LENGTH - 1, (BATCH_SIZE, 1)) + torch.arange(LENGTH + 1)
        return text[rows[:, :-1]], text[rows[:, 1:]]

    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), draw


def make_digits() -> Task:
    from sklearn.datasets import load_digits

    found = load_digits()
    images, labels = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16, torch.tensor(found.target)
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.GroupNorm(4, 32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1),
        nn.GroupNorm(4, 32), nn.ReLU(), nn.Flatten(), nn.Linear(2048, 10),
    )  # fmt: skip

    def draw() -> Batch:
        rows = torch.randint(0, len(images), (BATCH_SIZE,))
        return images[rows], labels[rows]

    return model, torch.optim.SGD(model.parameters(), lr=0.01), draw


TASKS = {"chars": make_chars, "digits": make_digits}


def loss_fn(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
    inputs, labels = batch
    loss = nn.functional.cross_entropy(model(inputs).flatten(0, -2), labels.flatten(), reduction="sum")
    return loss, labels.numel()


def run(make: Callable[[], Task], num_steps: int) -> list[dict[str, float]]:
    """Return S and G2 of every update, by both estimators."""
    torch.manual_seed(0)
    model, optimizer, draw = make()
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    exact = Stepper(model, still, loss_fn, micro_batch=BATCH_SIZE // NUM_PARTS, measure_noise=True)
    stepper = Stepper(model, optimizer, loss_fn, measure_noise=True, noise_from="vectors")
    updates = []
    for _ in range(num_steps):
        batch = draw()
        whole, report = exact.step(batch).noise, stepper.step(batch)
        noise = report.noise
        assert whole is not None
        assert noise is not None
        s, g2 = NoiseRatio.from_state(stepper.state_dict()["vectors"]["ratio"]).factors
        updates.append(
            {
                "loss": report.loss, "s": whole.s, "g2": whole.g2,
                "s_vectors": noise.s / s, "g2_vectors": noise.g2 / g2, "s_scaled": noise.s, "g2_scaled": noise.g2,
            }
        )  # fmt: skip
    return updates


def table(updates: list[dict[str, float]]) -> list[dict[str, float]]:
    """Return the scales of each tenth of a run."""
    rows = []
    for part in np.array_split(np.arange(len(updates)), 10):
        values = {name: np.array([updates[place][name] for place in part]) for name in updates[0]}
        mean = {name: float(value.mean()) for name, value in values.items()}
        error = float(values["g2"].std() / math.sqrt(len(part)) / mean["g2"])
        whole, alone = mean["s"] / mean["g2"], mean["s_vectors"] / mean["g2_vectors"]
        scaled = mean["s_scaled"] / mean["g2_scaled"]
        rows.append(
            {
                "updates": int(part[-1]) + 1, "loss": mean["loss"], "whole": whole, "error": error,
                "alone": alone, "alone_off": alone / whole, "scaled": scaled, "scaled_off": scaled / whole,
            }
        )  # fmt: skip
    return rows


def correlations(updates: list[dict[str, float]]) -> dict[str, float]:
    """Return how S and G2 of single updates go together, after the first tenth."""
    rest = updates[len(updates) // 10 :]
    return {
        name: float(np.corrcoef([one[name] for one in rest], [one[f"{name}_vectors"] for one in rest])[0, 1])
        for name in ("s", "g2")
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=sorted(TASKS), help="one of them; both if not given")
    parser.add_argument("--steps", type=int, default=600)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    found["machine"] = {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()}
    for name in [arguments.task] if arguments.task else sorted(TASKS):
        updates = run(TASKS[name], arguments.steps)
        rows, together = table(updates), correlations(updates)
        print(f"{name}: updates, loss, scale of the whole (error), of vectors alone (÷ whole), scaled (÷ whole)")
        for row in rows:
            print(
                "{updates:5} {loss:7.3f} {whole:9.1f} (±{error:4.0%}) {alone:9.1f} ({alone_off:5.2f}) {scaled:9.1f} "
                "({scaled_off:5.2f})".format(**row)
            )
        print(f"correlation of single updates: S {together['s']:.2f}, G2 {together['g2']:.2f}", flush=True)
        rounded = [{key: float(f"{value:.5g}") for key, value in update.items()} for update in updates]
        found[name] = {"rows": rows, "correlation": together, "updates": rounded}
        RESULT.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
