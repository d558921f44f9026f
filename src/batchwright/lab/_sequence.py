"""Models of texts: a transformer and a recurrent network that classify, a transformer that predicts the next token."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn
from torch.nn import functional as F

from ._records import PADDING

_WIDTH = 64
# On a processor attention costs by the head, and over long texts it is most of a step.
_NUM_HEADS = 2


@final
class Block(nn.Module):
    """Self-attention and a feed-forward layer, each added to its normalised input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(_WIDTH)
        self.query_key_value = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.mix = nn.Linear(_WIDTH, _WIDTH)
        self.norm_feed = nn.LayerNorm(_WIDTH)
        self.feed = nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.GELU(), nn.Linear(2 * _WIDTH, _WIDTH))

    def forward(self, x: Tensor, is_visible: Tensor | None) -> Tensor:
        """Return hidden states ``(items, length, width)``; without a mask each place sees itself and those before it.

        Args:
            x: hidden states ``(items, length, width)``.
            is_visible: ``(items, 1, 1, length)``, true where a token is real.
        """
        items, length, width = x.shape
        heads = self.query_key_value(self.norm_attention(x)).view(items, length, 3, _NUM_HEADS, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=is_visible, is_causal=is_visible is None)
        x = x + self.mix(attended.transpose(1, 2).reshape(items, length, width))
        fed: Tensor = self.feed(self.norm_feed(x))
        return x + fed


@final
class Transformer(nn.Module):
    """Token and position tables and some blocks; both transformers of the lab are built on it."""

    def __init__(self, vocabulary_size: int, max_length: int, *, num_layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary_size, _WIDTH)
        self.positions = nn.Embedding(max_length, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_layers))
        self.norm = nn.LayerNorm(_WIDTH)
        for table in (self.tokens, self.positions):
            nn.init.normal_(table.weight, std=0.02)

    def forward(self, ids: Tensor, is_visible: Tensor | None = None) -> Tensor:
        """Return hidden states ``(items, length, width)`` for ids ``(items, length)``."""
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, is_visible)
        normalised: Tensor = self.norm(x)
        return normalised


@final
class TransformerClassifier(nn.Module):
    """Attention in both directions over the real tokens, then their mean, then a linear layer."""

    def __init__(self, vocabulary_size: int, max_length: int, num_outputs: int) -> None:
        super().__init__()
        self.body = Transformer(vocabulary_size, max_length, num_layers=1)
        self.output = nn.Linear(_WIDTH, num_outputs)

    def forward(self, ids: Tensor) -> Tensor:
        """Return outputs ``(items, num_outputs)`` for padded ids ``(items, length)``."""
        is_real = ids != PADDING
        outputs: Tensor = self.output(mean_of_real(self.body(ids, is_real[:, None, None, :]), is_real))
        return outputs


@final
class CharLanguageModel(nn.Module):
    """A causal transformer that predicts the next character at every place."""

    def __init__(self, vocabulary_size: int, max_length: int) -> None:
        super().__init__()
        self.body = Transformer(vocabulary_size, max_length, num_layers=2)
        self.output = nn.Linear(_WIDTH, vocabulary_size, bias=False)
        nn.init.normal_(self.output.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits ``(items, vocabulary, length)``, classes on axis 1 as cross-entropy takes them."""
        logits: Tensor = self.output(self.body(ids))
        return logits.transpose(1, 2)


@final
class GruClassifier(nn.Module):
    """A recurrent network read from left to right, the mean of its states at real tokens, then a linear layer."""

    def __init__(self, vocabulary_size: int, num_outputs: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary_size, _WIDTH)
        self.recurrent = nn.GRU(_WIDTH, _WIDTH, batch_first=True)
        self.output = nn.Linear(_WIDTH, num_outputs)
        nn.init.normal_(self.tokens.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        """Return outputs ``(items, num_outputs)`` for padded ids ``(items, length)``."""
        # Padding stands on the right, so that no state at a real token has seen it.
        states, _ = self.recurrent(self.tokens(ids))
        outputs: Tensor = self.output(mean_of_real(states, ids != PADDING))
        return outputs


def mean_of_real(states: Tensor, is_real: Tensor) -> Tensor:
    """Return the mean state over the real tokens of each item, ``(items, width)``.

    >>> import torch
    >>> mean_of_real(torch.tensor([[[1.0], [3.0], [9.0]]]), torch.tensor([[True, True, False]])).tolist()
    [[2.0]]
    """
    weights = is_real.to(states.dtype).unsqueeze(-1)
    return (states * weights).sum(dim=1) / weights.sum(dim=1)
