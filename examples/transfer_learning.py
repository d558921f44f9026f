"""Transfer learning with BatchNorm, in micro-batches: when the update stays exact, and when it does not.

A small convolutional network learns the digits 0 to 4. Its features are then used to learn 5 to 9 from 25 examples:
first they are frozen and only a new head is trained, then everything is.

BatchNorm normalises by statistics of the batch, so a batch that runs in pieces is normalised piece by piece, and the
update is another one. There are two ways out, and one that is wrong:

- **Frozen statistics.** BatchNorm in evaluation mode uses the statistics of the first training. Every example is
  normalised by itself, so the batch may run in pieces of any size.
- **Statistics of the whole batch, where it fits.** The loss is marked with ``whole_batch``. The batch runs in one
  piece, and is refused where it does not fit, instead of being normalised otherwise than asked for.
- **Statistics of the pieces.** ``Stepper`` runs it and warns: the update depends on the split.

    python examples/transfer_learning.py

It needs torch and scikit-learn, takes a few seconds and runs on the CPU.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F

from batchwright.errors import BatchwrightError
from batchwright.step import Stepper, whole_batch
from batchwright.testing import FakeMemory

BATCH = 25
MICRO_BATCH = 5
NUM_EXAMPLES = 25
NUM_EPOCHS = 20


@dataclass(frozen=True)
class Result:
    """How a way to treat BatchNorm does."""

    name: str
    difference: float  # of the weights after one update, from torch's own update of the whole batch
    accuracy: float
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Digits:
    """Images and labels, from 0."""

    images: Tensor
    labels: Tensor

    def batches(self, size: int, seed: int) -> list[tuple[Tensor, Tensor]]:
        """Return the examples in random order, in batches."""
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(seed))
        return [(self.images[part], self.labels[part]) for part in order.split(size)]


def load() -> tuple[Digits, Digits, Digits]:
    """Return the digits 0 to 4, 25 examples of 5 to 9 to learn from, and the rest of these to test on."""
    images, labels = load_digits(return_X_y=True)
    pixels, numbers = torch.as_tensor(images).float().reshape(-1, 1, 8, 8) / 16, torch.as_tensor(labels)
    first, second = numbers < 5, numbers >= 5
    few, rest = pixels[second], numbers[second] - 5
    return (
        Digits(pixels[first], numbers[first]),
        Digits(few[:NUM_EXAMPLES], rest[:NUM_EXAMPLES]),
        Digits(few[NUM_EXAMPLES:], rest[NUM_EXAMPLES:]),
    )


def make_model() -> nn.Sequential:
    """Return a convolutional network with BatchNorm: features, then a head."""
    torch.manual_seed(0)
    features = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten()),
    )
    return nn.Sequential(features, nn.Linear(512, 5))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Return the summed loss and how many examples it sums over."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="sum"), len(images)


@whole_batch
def whole_loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    """Return the same, for batches that must not be cut."""
    return loss_fn(model, batch)


def frozen(model: nn.Module) -> None:
    """Put BatchNorm into evaluation mode: it uses the statistics it has, and keeps them."""
    model.train()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.eval()


def learning(model: nn.Module) -> None:
    """Leave BatchNorm in training mode: it uses the statistics of what runs at once."""
    model.train()


def make_stepper(model: nn.Module, loss: Any, micro_batch: Any, *, lr: float = 0.05) -> Stepper:
    """Return a stepper for all parameters of a model."""
    return Stepper(model, torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), loss, micro_batch=micro_batch)


def pretrain(digits: Digits) -> nn.Sequential:
    """Return a network that knows the first digits, with a new head for the others."""
    model = make_model()
    learning(model)
    stepper = make_stepper(model, whole_loss_fn, "auto")
    for epoch in range(3):
        for batch in digits.batches(64, seed=epoch):
            stepper.step(batch)
    torch.manual_seed(1)
    model[1] = nn.Linear(512, 5)
    return model


def transfer(
    pretrained: nn.Sequential, few: Digits, mode: Callable[[nn.Module], None], loss: Any, micro_batch: Any
) -> tuple[nn.Sequential, tuple[str, ...]]:
    """Return a copy of a network after it has learned the other digits, and what it was warned of."""
    model = copy.deepcopy(pretrained)
    features, head = model
    mode(model)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01, momentum=0.9)
    stepper = Stepper(model, optimizer, loss, micro_batch=micro_batch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(NUM_EPOCHS):
            if epoch == NUM_EPOCHS // 2:
                # From here on the features are trained too: the stepper asks the optimizer at every update.
                optimizer.add_param_group({"params": list(features.parameters())})
            for batch in few.batches(BATCH, seed=epoch):
                stepper.step(batch)
    return model, tuple(str(warning.message) for warning in caught)


def update_difference(
    pretrained: nn.Module, few: Digits, mode: Callable[[nn.Module], None], loss: Any, micro_batch: Any
) -> float:
    """Return how far an update ends from torch's own update of the whole batch: the largest difference of a weight."""
    batch, models = few.batches(BATCH, seed=0)[0], [copy.deepcopy(pretrained) for _ in range(2)]
    for model in models:
        mode(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_stepper(models[0], loss, micro_batch).step(batch)
    optimizer = torch.optim.SGD(models[1].parameters(), lr=0.05, momentum=0.9)
    F.cross_entropy(models[1](batch[0]), batch[1]).backward()
    optimizer.step()
    pairs = zip(*(model.parameters() for model in models), strict=True)
    return max(float((mine - other).detach().abs().max()) for mine, other in pairs)


def accuracy(model: nn.Module, digits: Digits) -> float:
    """Return the share of digits that are recognised."""
    model.eval()
    with torch.no_grad():
        return float((model(digits.images).argmax(dim=1) == digits.labels).float().mean())


def refusal(pretrained: nn.Module, few: Digits) -> str:
    """Return what is said where the whole batch does not fit into memory, played by a stand-in with room for five."""
    memory = FakeMemory(MICRO_BATCH)

    @whole_batch
    def tight_loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        memory.run_batch(len(batch[0]))
        return loss_fn(model, batch)

    model = copy.deepcopy(pretrained)
    learning(model)
    try:
        make_stepper(model, tight_loss_fn, "auto").step(few.batches(BATCH, seed=0)[0])
    except BatchwrightError as error:
        return str(error)
    raise AssertionError("a batch that must not be cut was cut")


def main() -> tuple[list[Result], float, str]:
    """Compare the three ways, and print what each does to the update."""
    known, few, test = load()
    pretrained = pretrain(known)
    results = []
    for name, mode, loss, micro_batch in (
        (f"frozen statistics, pieces of {MICRO_BATCH}", frozen, loss_fn, MICRO_BATCH),
        ("statistics of the whole batch", learning, whole_loss_fn, "auto"),
        (f"statistics of pieces of {MICRO_BATCH}", learning, loss_fn, MICRO_BATCH),
    ):
        model, said = transfer(pretrained, few, mode, loss, micro_batch)
        change = update_difference(pretrained, few, mode, loss, micro_batch)
        results.append(Result(name, change, accuracy(model, test), said))
    print("BatchNorm uses                     an update differs by  accuracy  warnings")
    for result in results:
        print(f"{result.name:<33}  {result.difference:>20.1e}  {result.accuracy:>8.1%}  {len(result.warnings):>8}")
    scratch = accuracy(transfer(make_model(), few, learning, whole_loss_fn, "auto")[0], test)
    print(f"{'without the first training':<33}  {'':>20}  {scratch:>8.1%}")
    refused = refusal(pretrained, few)
    print(f"\nPieces: {results[-1].warnings[0]}.\n\nA whole batch that does not fit: {refused}")
    return results, scratch, refused


if __name__ == "__main__":
    main()
