"""Small models by name: linear ones, perceptrons, convolutional networks, recurrent networks and transformers."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..._checks import as_whole
from ...errors import ArgumentError
from ..datasets.dataset import PADDING, Dataset

_STRUCTURED = {"table": ("mlp",), "images": ("mlp", "cnn", "cnn_batchnorm"), "text": ("transformer", "gru")}
_LANGUAGE = ("char_lm", "gru_lm")
_HIDDEN = 128
_CHANNELS = (16, 32)
_CHANNELS_PER_GROUP = 4
# The last map is averaged to this side, whatever the size of the image.
_SIDE = 4
_WIDTH = 64
# On a CPU each head of attention adds to the cost, and with long texts attention is most of a step.
_NUM_HEADS = 2


def models_for(dataset: Dataset) -> tuple[str, ...]:
    """Return the names of the models that fit a data set, the simplest first.

    >>> from batchwright.lab.datasets import load
    >>> models_for(load("digits")), models_for(load("diabetes"))
    (('logistic', 'mlp', 'cnn', 'cnn_batchnorm'), ('linear', 'mlp'))
    """
    if dataset.kind == "language":
        return _LANGUAGE
    simplest = "linear" if dataset.task == "regression" else "logistic"
    fitting = (simplest, *_STRUCTURED[dataset.kind])
    # A batch of one example has no variance over a map of one pixel, which is what two by two are pooled to.
    is_tiny = dataset.kind == "images" and max(_shape(dataset)[1:]) <= 2
    return tuple(name for name in fitting if not (is_tiny and name == "cnn_batchnorm"))


def make_model(name: str, dataset: Dataset, *, seed: int) -> nn.Module:
    """Return a new model for a data set, with initial weights that depend only on the seed.

    Called with the inputs of a batch, it returns ``(items, classes)``, ``(items, 1)`` for regression, or
    ``(items, tokens, length)`` for language. The random state of torch stays as it was.

    Args:
        name: one of ``models_for(dataset)``.
        dataset: gives the sizes of the inputs and outputs.
        seed: a whole number of 0 or more.

    >>> from batchwright.lab.datasets import load
    >>> count_parameters(make_model("logistic", load("digits"), seed=0))
    650
    """
    fitting = models_for(dataset)
    if name not in fitting:
        known = "" if name in _MAKERS else f", which is not one of {', '.join(sorted(_MAKERS))}"
        raise ArgumentError(
            f"{dataset.name} ({dataset.kind}, {dataset.task}) takes the models {', '.join(fitting)}; "
            f"got {name!r}{known}"
        )
    seed = as_whole("seed", seed, least=0)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return _MAKERS[name](dataset)


def count_parameters(model: nn.Module) -> int:
    """Return how many numbers a model learns.

    >>> count_parameters(nn.Linear(3, 2))
    8
    """
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


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
    """A linear model of texts: each token has one weight per output, and a text takes the mean of its tokens."""

    def __init__(self, vocabulary_size: int, num_outputs: int) -> None:
        super().__init__()
        self.weights = nn.EmbeddingBag(vocabulary_size, num_outputs, mode="mean", padding_idx=PADDING)
        self.bias = nn.Parameter(torch.zeros(num_outputs))
        nn.init.normal_(self.weights.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Return outputs ``(items, num_outputs)`` for padded ids ``(items, length)``."""
        means: Tensor = self.weights(ids)
        return means + self.bias


def group_norm(num_channels: int) -> nn.Module:
    """Return a normalisation of each example by itself: the batch size changes only the average of gradients."""
    return nn.GroupNorm(num_channels // _CHANNELS_PER_GROUP, num_channels)


def make_cnn(num_channels: int, num_outputs: int, *, norm: Callable[[int], nn.Module] = group_norm) -> nn.Module:
    """Return two convolutions of 3 × 3 and a linear layer.

    Args:
        num_channels: of an image.
        num_outputs: of the linear layer.
        norm: normalises a number of channels. With ``nn.BatchNorm2d`` every example depends on the others
            of its batch, or micro-batch, so that the batch size changes more than the average of gradients.
    """
    first, second = _CHANNELS
    return nn.Sequential(
        nn.Conv2d(num_channels, first, kernel_size=3, padding=1),
        nn.MaxPool2d(2, ceil_mode=True),
        norm(first),
        nn.ReLU(),
        nn.Conv2d(first, second, kernel_size=3, padding=1),
        norm(second),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(_SIDE),
        nn.Flatten(),
        nn.Linear(second * _SIDE**2, num_outputs),
    )


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
        """Return hidden states ``(items, length, width)``; without a mask each place sees only itself and earlier ones.

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
    """Tables of tokens and positions, then blocks; both transformers of the lab are built on it."""

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
    """A causal transformer that predicts the next character, or word, at every place."""

    def __init__(self, vocabulary_size: int, max_length: int) -> None:
        super().__init__()
        self.body = Transformer(vocabulary_size, max_length, num_layers=2)
        self.output = nn.Linear(_WIDTH, vocabulary_size, bias=False)
        nn.init.normal_(self.output.weight, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits ``(items, vocabulary, length)``: cross-entropy takes the classes on axis 1."""
        logits: Tensor = self.output(self.body(ids))
        return logits.transpose(1, 2)


@final
class GruLanguageModel(nn.Module):
    """A recurrent network that predicts the next character, or word, at every place."""

    def __init__(self, vocabulary_size: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary_size, _WIDTH)
        self.recurrent = nn.GRU(_WIDTH, _WIDTH, batch_first=True)
        self.output = nn.Linear(_WIDTH, vocabulary_size, bias=False)
        for table in (self.tokens, self.output):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits ``(items, vocabulary, length)``: cross-entropy takes the classes on axis 1."""
        states, _ = self.recurrent(self.tokens(ids))
        logits: Tensor = self.output(states)
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
        # Padding is on the right, so that no state at a real token has seen it.
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


def _make_linear(dataset: Dataset) -> nn.Module:
    if dataset.kind == "text":
        return BagOfTokens(_vocabulary(dataset), _num_outputs(dataset))
    return make_linear(prod(_shape(dataset)), _num_outputs(dataset))


def _num_outputs(dataset: Dataset) -> int:
    return dataset.num_classes or 1


def _vocabulary(dataset: Dataset) -> int:
    assert dataset.vocabulary_size is not None
    return dataset.vocabulary_size


def _shape(dataset: Dataset) -> tuple[int, ...]:
    assert not isinstance(dataset.train.features, list)
    return dataset.train.features.shape[1:]


def _max_length(dataset: Dataset) -> int:
    """Return the length of the longest text of both parts; the table of positions has one row per place."""
    parts = (dataset.train.lengths, dataset.validation.lengths)
    return max(int(lengths.max()) for lengths in parts if lengths is not None)


_MAKERS: dict[str, Callable[[Dataset], nn.Module]] = {
    "char_lm": lambda dataset: CharLanguageModel(_vocabulary(dataset), _max_length(dataset)),
    "cnn": lambda dataset: make_cnn(_shape(dataset)[0], _num_outputs(dataset)),
    "cnn_batchnorm": lambda dataset: make_cnn(_shape(dataset)[0], _num_outputs(dataset), norm=nn.BatchNorm2d),
    "gru": lambda dataset: GruClassifier(_vocabulary(dataset), _num_outputs(dataset)),
    "gru_lm": lambda dataset: GruLanguageModel(_vocabulary(dataset)),
    "linear": lambda dataset: _make_linear(dataset),
    "logistic": lambda dataset: _make_linear(dataset),
    "mlp": lambda dataset: make_mlp(prod(_shape(dataset)), _num_outputs(dataset)),
    "transformer": lambda dataset: TransformerClassifier(
        _vocabulary(dataset), _max_length(dataset), _num_outputs(dataset)
    ),
}
