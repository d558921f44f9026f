"""Models without structure: linear ones, and a multilayer perceptron."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from ._records import PADDING

_HIDDEN = 128


def make_linear(num_inputs: int, num_outputs: int) -> nn.Module:
    """Return one linear layer: logistic regression under cross-entropy, least squares under squared error."""
    return nn.Sequential(nn.Flatten(), nn.Linear(num_inputs, num_outputs))


def make_mlp(num_inputs: int, num_outputs: int) -> nn.Module:
    """Return two hidden layers of 128."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(num_inputs, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, _HIDDEN),
        nn.ReLU(),
        nn.Linear(_HIDDEN, num_outputs),
    )


@final
class BagOfTokens(nn.Module):
    """A linear model of texts: each token has a weight an output, and a text takes the mean of its tokens."""

    def __init__(self, vocabulary_size: int, num_outputs: int) -> None:
        super().__init__()
        self.weights = nn.EmbeddingBag(vocabulary_size, num_outputs, mode="mean", padding_idx=PADDING)
        self.bias = nn.Parameter(torch.zeros(num_outputs))
        nn.init.normal_(self.weights.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Return outputs ``(items, num_outputs)`` for padded ids ``(items, length)``."""
        means: Tensor = self.weights(ids)
        return means + self.bias
