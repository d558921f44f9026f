"""The passes of a small model that doctor times: training, encoding and decoding, to run and to capture."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...step.graphs.backend import CudaGraphs
from .records import Effort

Shape: TypeAlias = tuple[int, ...]
# Keys that each row has while it is decoded.
_NUM_KEYS = 128


class Steps(Protocol):
    """Steps that can be run, and captured to be replayed."""

    def run(self, shape: Shape) -> None:
        """Run one step, kernel by kernel."""

    def warm_up(self, shape: Shape) -> None:
        """Prepare for captures, with a step of the smallest shape."""

    def capture(self, shape: Shape) -> Callable[[], Any]:
        """Capture one step and return what replays it."""


def training(device: torch.device, effort: Effort) -> Steps:
    """Return forward and backward passes on a CUDA device."""
    return CudaSteps(transformer(device, effort), effort, device)


def encoding(device: torch.device, effort: Effort) -> Steps:
    """Return forward passes on a CUDA device."""
    return CudaForwards(transformer(device, effort), effort, device)


def decoding(device: torch.device, effort: Effort) -> Steps:
    """Return steps of decoding on a CUDA device: one token for each row."""
    return CudaForwards(Decoding(effort, max(effort.graph_items)).to(device), effort, device)


def transformer(device: torch.device, effort: Effort) -> nn.Module:
    """Return the model that is trained, and that encodes."""
    layer = nn.TransformerEncoderLayer(
        effort.width,
        effort.num_heads,
        4 * effort.width,
        activation="gelu",
        batch_first=True,
        norm_first=True,
        device=device,
    )
    # A nested tensor would skip the padding, which few models do.
    return nn.TransformerEncoder(layer, effort.num_layers, enable_nested_tensor=False).train()


@final
class Decoding(nn.Module):
    """A decoder that adds one token to each row, and attends over the keys of those before.

    All layers read the same keys, which are more than caches near the processors hold.

    Args:
        effort: the width and the number of layers.
        num_rows: the most rows.
    """

    keys: Tensor

    def __init__(self, effort: Effort, num_rows: int) -> None:
        super().__init__()
        width, self._heads = effort.width, effort.num_heads
        shape = (2, num_rows, self._heads, _NUM_KEYS, width // self._heads)
        self.register_buffer("keys", torch.zeros(shape, dtype=torch.bfloat16))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * effort.num_layers))
        self.project = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(effort.num_layers))
        self.join = nn.ModuleList(nn.Linear(width, width) for _ in range(effort.num_layers))
        self.widen = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(effort.num_layers))
        self.narrow = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(effort.num_layers))
        self.bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        """Return ``(rows, 1, width)`` for the same."""
        x = x.bfloat16()
        keys, values = self.keys[0, : len(x)], self.keys[1, : len(x)]
        layers = zip(self.norms[::2], self.norms[1::2], self.project, self.join, self.widen, self.narrow, strict=True)
        for first, second, project, join, widen, narrow in layers:
            query, key, value = project(first(x)).view(len(x), 1, 3, self._heads, -1).permute(2, 0, 3, 1, 4)
            keys[:, :, -1:], values[:, :, -1:] = key, value
            mixed = F.scaled_dot_product_attention(query, keys, values)
            x = x + join(mixed.transpose(1, 2).reshape(x.shape))
            x = x + narrow(F.gelu(widen(second(x))))
        return x


@final
class CudaForwards:
    """Forward passes of a model on CUDA, as an encoder runs them.

    Args:
        model: takes ``(items, length, width)``.
        effort: the width, the length and the largest number of items.
        device: where the model lies.
    """

    def __init__(self, model: nn.Module, effort: Effort, device: torch.device) -> None:
        self._model, self._device = model.eval(), device
        self._input = torch.randn(max(effort.graph_items), effort.length, effort.width, device=device)
        self._backend = CudaGraphs(device)

    def run(self, shape: Shape) -> None:
        """Run one pass, kernel by kernel."""
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
            self._model(self._input[: shape[0]])

    def warm_up(self, shape: Shape) -> None:
        """Run one pass on a stream of its own, as captures need."""
        on_a_stream(self._device, lambda: self.run(shape))
        self._backend.prepare()

    def capture(self, shape: Shape) -> Callable[[], Any]:
        """Capture one pass into the pool that all graphs share."""
        return self._backend.capture(partial(self.run, shape))


def on_a_stream(device: torch.device, run: Callable[[], None]) -> None:
    """Run something on a stream of its own, between what comes before and after."""
    own, current = torch.cuda.Stream(device), torch.cuda.current_stream(device)
    own.wait_stream(current)
    with torch.cuda.stream(own):
        run()
    current.wait_stream(own)


@final
class CudaSteps:
    """Forward and backward passes of a model on CUDA; its gradients keep their place once they are captured.

    Args:
        model: takes ``(items, length, width)``.
        effort: the width, the length and the largest number of items.
        device: where the model lies.
    """

    def __init__(self, model: nn.Module, effort: Effort, device: torch.device) -> None:
        self._model, self._device = model, device
        self._input = torch.randn(max(effort.graph_items), effort.length, effort.width, device=device)
        self._backend = CudaGraphs(device)

    def run(self, shape: Shape) -> None:
        """Run one pass as a loop would, with gradients that are made anew."""
        self._model.zero_grad(set_to_none=True)
        self._pass(shape)

    def warm_up(self, shape: Shape) -> None:
        """Allocate the gradients outside the graphs, and run one pass on a stream of its own, as captures need."""
        for parameter in self._model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        on_a_stream(self._device, lambda: self._pass(shape))
        self._backend.prepare()

    def capture(self, shape: Shape) -> Callable[[], Any]:
        """Capture one pass into the pool that all graphs share."""
        return self._backend.capture(partial(self._zero_and_pass, shape))

    def _zero_and_pass(self, shape: Shape) -> None:
        torch._foreach_zero_([p.grad for p in self._model.parameters() if p.grad is not None])
        self._pass(shape)

    def _pass(self, shape: Shape) -> None:
        # A graph must not read copies of weights that autocast made outside it.
        with torch.autocast("cuda", dtype=torch.bfloat16, cache_enabled=False):
            loss = self._model(self._input[: shape[0]]).float().square().mean()
        loss.backward()
