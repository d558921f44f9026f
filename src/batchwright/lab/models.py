"""Small models by name, one loss, one collator and one validation for all of them. Needs torch."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from .._optional import require

require("torch", extra="lab")

# After the check, so that its message is read.
import torch  # noqa: E402
from torch import nn  # noqa: E402

from .._checks import as_whole  # noqa: E402
from ..errors import ArgumentError  # noqa: E402
from ._cnn import make_cnn  # noqa: E402
from ._collate import collate_for as collate_for  # noqa: E402
from ._dense import BagOfTokens, make_linear, make_mlp  # noqa: E402
from ._evaluate import evaluate as evaluate  # noqa: E402
from ._loss import loss_fn_for as loss_fn_for  # noqa: E402
from ._records import Dataset  # noqa: E402
from ._sequence import CharLanguageModel, GruClassifier, TransformerClassifier  # noqa: E402

__all__ = ["collate_for", "count_parameters", "evaluate", "loss_fn_for", "make_model", "models_for"]

_MAKERS: dict[str, Callable[[Dataset], nn.Module]] = {
    "char_lm": lambda dataset: CharLanguageModel(_vocabulary(dataset), _max_length(dataset)),
    "cnn": lambda dataset: make_cnn(_shape(dataset)[0], _num_outputs(dataset)),
    "gru": lambda dataset: GruClassifier(_vocabulary(dataset), _num_outputs(dataset)),
    "linear": lambda dataset: _make_linear(dataset),
    "logistic": lambda dataset: _make_linear(dataset),
    "mlp": lambda dataset: make_mlp(prod(_shape(dataset)), _num_outputs(dataset)),
    "transformer": lambda dataset: TransformerClassifier(
        _vocabulary(dataset), _max_length(dataset), _num_outputs(dataset)
    ),
}
_STRUCTURED = {"table": ("mlp",), "images": ("mlp", "cnn"), "text": ("transformer", "gru")}


def models_for(dataset: Dataset) -> tuple[str, ...]:
    """Return the names of the models that fit a data set, the simplest first.

    >>> from batchwright.lab.datasets import load
    >>> models_for(load("digits")), models_for(load("diabetes"))
    (('logistic', 'mlp', 'cnn'), ('linear', 'mlp'))
    """
    if dataset.task == "language":
        return ("char_lm",)
    simplest = "linear" if dataset.task == "regression" else "logistic"
    return (simplest, *_STRUCTURED[dataset.kind])


def make_model(name: str, dataset: Dataset, *, seed: int) -> nn.Module:
    """Return a new model for a data set, with the initial weights that the seed fixes.

    Called with the inputs of a batch it returns ``(items, classes)``, ``(items, 1)`` for regression, or
    ``(items, tokens, length)`` for language. Torch's own random state stays as it was.

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
        known = "" if name in _MAKERS else f", which is none of {', '.join(sorted(_MAKERS))}"
        raise ArgumentError(
            f"{dataset.name} is a data set of {dataset.kind} for {dataset.task} and takes the models "
            f"{', '.join(fitting)}; got {name!r}{known}"
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
    """Return the length of the longest text of both parts; each place has a row in the table of positions."""
    parts = (dataset.train.lengths, dataset.validation.lengths)
    return max(int(lengths.max()) for lengths in parts if lengths is not None)
