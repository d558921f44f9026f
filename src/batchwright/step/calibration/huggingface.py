"""Calibrate a transformers model in one line; its configuration tells which inputs to make."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.optim import Optimizer

from ...errors import ArgumentError
from ..oom import Snapshot
from .result import Calibration, Shape
from .running import calibrate
from .shapes import growing_shapes

DEFAULT_LONGEST = 512


def calibrate_huggingface(
    model: Any,
    shapes: npt.ArrayLike | None = None,
    *,
    optimizer: Optimizer | None = None,
    lengths: npt.ArrayLike | None = None,
    autocast: torch.dtype | None = None,
    **options: Any,
) -> Calibration:
    """Calibrate the training step of a transformers model on random tokens.

    Shapes are ``(num_items, length)``, for sequence-to-sequence models ``(num_items, source length, target length)``.
    Rows are padded by one token, since some attention kernels take less memory without a mask. The model runs in
    training mode, in its own dtype and on its own device, and is afterwards as it was.

    Args:
        model: a ``PreTrainedModel``: causal or masked language model, sequence-to-sequence, token or sequence
            classification, question answering, or a bare encoder.
        shapes: what to measure; None chooses from ``lengths``, on a GPU up to the memory that is there.
        optimizer: its state is allocated first and counted; without it the memory is only that of gradients.
        lengths: those of the data, ``(N,)``, or ``(N, 2)`` for sequence-to-sequence; None takes up to 512 tokens.
        autocast: ``torch.bfloat16`` or ``torch.float16`` for the forward pass.
        options: further options of ``calibrate``, such as ``max_bytes`` and ``repeats``.

    Returns:
        What ``calibrate`` returns.
    """
    inputs = _Inputs(model)

    def run(shape: Shape) -> None:
        if not model.training:  # as from_pretrained returns it
            model.train()
        with _autocast(inputs.device, autocast):
            loss = inputs.loss(shape)
        loss.backward()

    of_data = _default_lengths(model, inputs.num_axes) if lengths is None else lengths
    wanted = growing_shapes(of_data) if shapes is None else shapes
    return calibrate(run, wanted, restore=(model, optimizer), **options)


@final
class _Inputs:
    """Makes random inputs that an architecture accepts, and the loss of a forward pass on them."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._names = set(inspect.signature(model.forward).parameters)
        if not hasattr(model, "config") or "input_ids" not in self._names:
            raise ArgumentError(
                f"calibrate_huggingface needs a transformers model of text, got {type(model).__name__}; "
                "use calibrate() with a run of your own"
            )
        self.device = model.device
        self._num_tokens = int(model.get_input_embeddings().num_embeddings)
        self._special = _special_tokens(model.config, self._num_tokens)
        self._ids = np.setdiff1d(np.arange(self._num_tokens), list(self._special.values()))
        self._is_pairs = bool(model.config.is_encoder_decoder) and model.get_output_embeddings() is not None
        self.num_axes = 2 if self._is_pairs else 1
        self._make_labels = self._label_maker()

    def loss(self, shape: Shape) -> Tensor:
        """Run a forward pass and return its loss."""
        if len(shape) != 1 + self.num_axes:
            wanted = "(num_items, source, target)" if self._is_pairs else "(num_items, length)"
            raise ArgumentError(f"shapes of {type(self._model).__name__} are {wanted}, got {shape}")
        output = self._model(**self._tokens(shape), **self._make_labels(shape))
        loss: Tensor | None = getattr(output, "loss", None)
        hidden: Tensor = output[0]
        return hidden.float().mean() if loss is None else loss

    def _tokens(self, shape: Shape) -> dict[str, Tensor]:
        num_items, length = shape[:2]
        ids = self._random(self._ids, (num_items, length))
        mask = torch.ones_like(ids)
        if length > 1:
            mask[1:, -1] = 0  # the first row is full, all others end one token earlier
        if "eos" in self._special:
            ids[:, -1] = self._special["eos"]  # some classifiers read the state at the end of the text
        return {"input_ids": ids, **({"attention_mask": mask} if "attention_mask" in self._names else {})}

    def _label_maker(self) -> Callable[[Shape], dict[str, Tensor]]:
        """Return a function that makes labels of the form this architecture takes."""
        if self._is_pairs:
            return lambda shape: {"labels": self._random(self._ids, (shape[0], shape[2]))}
        if {"start_positions", "end_positions"} <= self._names:
            return lambda shape: {
                name: self._random(np.arange(shape[1]), shape[:1]) for name in ("start_positions", "end_positions")
            }
        if "labels" not in self._names:
            return lambda shape: {}
        return self._labels_like(self._look_at_logits())

    def _look_at_logits(self) -> Tensor:
        before = Snapshot.of(self._model)
        try:
            with torch.no_grad():
                logits = getattr(self._model(**self._tokens((1, 4))), "logits", None)
        finally:
            before.restore()
        if not isinstance(logits, Tensor) or logits.ndim not in (2, 3):
            raise ArgumentError(
                f"{type(self._model).__name__} has logits of an unknown form; use calibrate() with a run of your own"
            )
        return logits

    def _labels_like(self, logits: Tensor) -> Callable[[Shape], dict[str, Tensor]]:
        classes = np.arange(logits.shape[-1])
        if logits.ndim == 3:  # one label per token
            return lambda shape: {"labels": self._random(classes, shape)}
        kind = getattr(self._model.config, "problem_type", None)
        if kind == "multi_label_classification":
            return lambda shape: {"labels": torch.zeros(shape[0], len(classes), device=self.device)}
        if kind == "regression" or len(classes) == 1:
            return lambda shape: {"labels": torch.zeros(shape[0], device=self.device, dtype=logits.dtype)}
        return lambda shape: {"labels": self._random(classes, shape[:1])}

    def _random(self, values: npt.NDArray[np.int64], size: tuple[int, ...]) -> Tensor:
        return torch.from_numpy(np.random.choice(values, size)).to(self.device)


def _special_tokens(config: Any, num_tokens: int) -> dict[str, int]:
    """Return tokens with a meaning (padding, end, images) by name; random text must not contain them."""
    found: dict[str, int] = {}
    for name, value in config.to_dict().items():
        stem, _, ending = name.rpartition("_token_")
        first = value[0] if isinstance(value, list) and value else value
        if ending in ("id", "index") and isinstance(first, int) and 0 <= first < num_tokens:
            found[stem] = first
    return found


def _default_lengths(model: Any, num_axes: int) -> npt.NDArray[np.int64]:
    most = getattr(model.config, "max_position_embeddings", None) or DEFAULT_LONGEST
    longest = max(4, min(DEFAULT_LONGEST, int(most)))
    return np.tile(np.geomspace(max(1, longest // 16), longest, 9).astype(np.int64)[:, None], num_axes)


def _autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
