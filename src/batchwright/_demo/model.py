"""A small decoder-only transformer."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional

from .corpus import PADDING
from .settings import DemoSettings


@final
class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each added to its normalised input."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm_feed = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return hidden states of the same shape, ``(items, length, width)``."""
        items, length, width = x.shape
        heads = self.query_key_value(self.norm_attention(x)).view(items, length, 3, self.num_heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        # Padding stands on the right, where a causal mask already hides it from every real token.
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.mix(attended.transpose(1, 2).reshape(items, length, width))
        fed: Tensor = self.feed(self.norm_feed(x))
        return x + fed


@final
class LanguageModel(nn.Module):
    """Predicts the next token at every position."""

    def __init__(self, settings: DemoSettings, vocabulary_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary_size, settings.width)
        self.positions = nn.Embedding(settings.max_length, settings.width)
        self.blocks = nn.Sequential(*(Block(settings.width, settings.num_heads) for _ in range(settings.num_layers)))
        self.norm = nn.LayerNorm(settings.width)
        self.output = nn.Linear(settings.width, vocabulary_size, bias=False)
        for table in (self.tokens, self.positions, self.output):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits ``(items, length, vocabulary)`` for ids ``(items, length)``."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        logits: Tensor = self.output(self.norm(self.blocks(x)))
        return logits


def make_model(settings: DemoSettings, vocabulary_size: int) -> LanguageModel:
    """Return a model with the initial weights that the seed fixes, the same for every arm."""
    torch.manual_seed(settings.seed)
    return LanguageModel(settings, vocabulary_size)


def loss_sum(model: LanguageModel, batch: Tensor) -> tuple[Tensor, int]:
    """Return the summed cross-entropy of the real tokens of a batch, and their number.

    Args:
        model: the model.
        batch: ids ``(items, length + 1)``, padded on the right.
    """
    inputs, targets = batch[:, :-1], batch[:, 1:]
    logits = model(inputs)
    total = functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=PADDING, reduction="sum")
    return total, int((targets != PADDING).sum())
