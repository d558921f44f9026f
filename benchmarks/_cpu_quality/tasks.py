"""Three small tasks that differ in data, model, optimizer, and in how the time of an update grows with its size.

The learning rate and the base size of a task are those that an earlier benchmark, ``policies.py``, chose for such a
model and stored in ``results/policies.json`` (``settings`` of its tasks): 0.03 at 16 examples for the convolutions with
SGD, 0.001 at 8 for the characters with Adam, 0.003 at 16 for the perceptron with Adam. They were written down before
the sweep and must not be changed by looking at its results.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchwright.lab.datasets import load
from batchwright.lab.models import make_model
from batchwright.lab.models.networks import Transformer
from batchwright.step import supervised_loss

LOSS = supervised_loss(partial(F.cross_entropy, reduction="sum"))
_WINDOW = 32  # characters
_NUM_TRAIN, _NUM_VALIDATION = 48_000, 4_000


@final
class Data(NamedTuple):
    """Inputs and targets to train on, and those held out."""

    train: tuple[Tensor, Tensor]
    held_out: tuple[Tensor, Tensor]

    def batch(self, places: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return the examples at some places."""
        chosen = torch.from_numpy(places)
        return self.train[0][chosen], self.train[1][chosen]


@final
class Task(NamedTuple):
    """A task.

    Attributes:
        title: what is learned, by what.
        optimizer: ``"sgd"``, with a momentum of 0.9, or ``"adamw"``.
        lr: at the base size.
        base_size: examples of an update that the rate is meant for.
        seconds: the horizon T of the sweep, for each kind of clock.
        load: returns the data.
        make: returns a model with the weights of torch's random state.
    """

    title: str
    optimizer: str
    lr: float
    base_size: int
    seconds: dict[str, float]
    load: Callable[[], Data]
    make: Callable[[], nn.Module]

    @property
    def lr_rule(self) -> str:
        """Return how the rate follows the size: SGD linearly, Adam by the root."""
        return "linear" if self.optimizer == "sgd" else "sqrt"

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer, at the rate of the base size."""
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=self.lr)


@torch.no_grad()
def mean_loss(model: nn.Module, examples: tuple[Tensor, ...]) -> float:
    """Return the mean loss of inputs and targets, in evaluation mode."""
    model.eval()
    total = count = 0.0
    for inputs, targets in zip(*(column.split(500) for column in examples), strict=True):
        loss_sum, weight = LOSS(model, (inputs, targets))[:2]
        total, count = total + float(loss_sum), count + float(weight)
    model.train()
    return total / count


@lru_cache(maxsize=1)
def _images() -> Data:
    return _from_lab("fashion_mnist_7x7")


@lru_cache(maxsize=1)
def _characters() -> Data:
    return _from_lab("python_chars", window=_WINDOW)


def _from_lab(name: str, *, window: int | None = None) -> Data:
    found = load(name, limit=_NUM_TRAIN * 5 // 4)

    def columns(part: Any) -> tuple[Tensor, Tensor]:
        made = torch.as_tensor(part.features), torch.as_tensor(part.labels)
        return made if window is None else (made[0][:, :window].contiguous(), made[1][:, :window].contiguous())

    held_out = columns(found.validation)
    return Data(columns(found.train), (held_out[0][:_NUM_VALIDATION], held_out[1][:_NUM_VALIDATION]))


@lru_cache(maxsize=1)
def _teacher() -> Data:
    """Return points labelled by a random network; one label in five is drawn anew, so that much is noise."""
    rng = np.random.default_rng(20_261_116)
    num, wide, classes = _NUM_TRAIN + _NUM_VALIDATION, 32, 10
    points = rng.standard_normal((num, wide)).astype(np.float32)
    hidden = np.tanh(points @ rng.standard_normal((wide, 48)) / np.sqrt(wide) * 2)
    labels = (hidden @ rng.standard_normal((48, classes))).argmax(axis=1)
    labels = np.where(rng.random(num) < 0.2, rng.integers(0, classes, num), labels)
    inputs, targets = torch.from_numpy(points), torch.from_numpy(labels)
    return Data((inputs[:_NUM_TRAIN], targets[:_NUM_TRAIN]), (inputs[_NUM_TRAIN:], targets[_NUM_TRAIN:]))


@final
class CharacterModel(nn.Module):
    """One block of a causal transformer of width 64."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.body = Transformer(vocabulary, _WINDOW, num_layers=1)
        self.output = nn.Linear(64, vocabulary, bias=False)
        nn.init.normal_(self.output.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits ``(items, vocabulary, length)``."""
        logits: Tensor = self.output(self.body(ids))
        return logits.transpose(1, 2)


_small_images = lru_cache(maxsize=1)(partial(load, "fashion_mnist_7x7", limit=1000))  # only its shapes count


def _image_model() -> nn.Module:
    # The seed of the lab is taken from torch's random state, so that a seed means the same in all three tasks.
    return make_model("cnn", _small_images(), seed=int(torch.randint(2**31, ())))


def _character_model() -> nn.Module:
    inputs, targets = _characters().train
    return CharacterModel(int(max(inputs.max(), targets.max())) + 1)


def _teacher_model() -> nn.Module:
    layers: list[nn.Module] = []
    for inside in (32, 128):
        layers += [nn.Linear(inside, 128), nn.LayerNorm(128), nn.GELU()]
    return nn.Sequential(*layers, nn.Linear(128, 10))


# Horizons were chosen for the length of the whole benchmark: some seconds of a processor for each run.
TASKS = {
    "images": Task(
        "Fashion-MNIST at 7 by 7 pixels, convolutions with GroupNorm, SGD with momentum", "sgd", 0.03, 16,
        {"cpu": 4.0, "model": 5.4}, _images, _image_model,
    ),
    "characters": Task(
        "characters of Python's own source, one transformer block, AdamW", "adamw", 1e-3, 8,
        {"cpu": 6.0, "model": 4.0}, _characters, _character_model,
    ),
    "teacher": Task(
        "points labelled by a random network, a fifth of them wrongly, MLP with LayerNorm, AdamW", "adamw", 3e-3, 16,
        {"cpu": 3.0, "model": 5.4}, _teacher, _teacher_model,
    ),
}  # fmt: skip
