"""Graphs for a training loop that updates by itself: it brings a loss, and its optimizer steps as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..._modules import parameters_of
from ..._ranks import Ranks
from .._gradients import Trained
from .._settings import Settings
from ..oom import Snapshot
from ..report import MicroSums
from .backend import Choice
from .graphed import Graphs
from .summary import GraphSummary


@final
class LoopGraphs:
    """Replays forward and backward of micro-batches; gradients lie in ``.grad`` afterwards, as after ``backward``.

    The loop clears gradients by setting them to None, clips them and steps its optimizer itself.

    Args:
        model: as the loop wraps it.
        optimizer: torch's own, without wrappers.
        loss: ``loss(module, batch)`` returns what ``backward`` would run on, and never waits for the device. It moves
            the batch to the device where that is needed.
        graphs: True, ``"auto"`` or a backend, as for ``Stepper``.
        shapes: the catalogue.
        scaler: of the loop, None without one.
        is_half: the forward pass computes in half precision.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss: Callable[[nn.Module, Any], Tensor],
        *,
        graphs: Choice,
        shapes: Any,
        scaler: torch.amp.GradScaler | None = None,
        is_half: bool = False,
    ) -> None:
        ranks = Ranks(model)
        settings = Settings(
            lambda module, batch: (loss(module, batch), 1.0), "auto", None, None, None, lambda batch: 1.0, None, None,
            scaler, "raise", 0, None, None, "add", None,
        )  # fmt: skip
        self._module = ranks.module
        self._trained = Trained(ranks, optimizer)
        self._graphs = Graphs(
            graphs, shapes, settings, ranks, self._trained, lambda: Snapshot.of(ranks.module), is_half=is_half
        )

    def begin(self) -> None:
        """Look at the model and the optimizer before a micro-batch runs: after a change, what was captured is void."""
        self._trained.refresh()
        reason = self._obstacle()
        if reason is not None:
            self._graphs.stop(reason)
        self._graphs.begin()

    def _obstacle(self) -> str | None:
        parameters = self._trained.parameters
        if any(one._backward_hooks or one._post_accumulate_grad_hooks for one in parameters):
            return "a parameter has a hook, which does not run at a replay"
        trained = set(map(id, parameters))
        if any(one.requires_grad and id(one) not in trained for one in parameters_of(self._module)):
            return "parameters that the optimizer does not update get gradients; freeze them with requires_grad_(False)"
        return None

    def run(self, batch: Any, eager: Callable[[], Tensor]) -> Tensor:
        """Run a micro-batch and return its loss: replay it, or call ``eager``, which runs forward and backward."""
        sums = self._graphs.run(
            batch,
            eager=lambda: MicroSums.of_replay(eager().detach(), 1.0, {}),
            divisor=lambda weight, num_elements: 1.0,
            can_compare=not any(parameter.grad is not None for parameter in self._trained.parameters),
        )
        return sums.loss

    def make_room(self) -> bool:
        """Drop all graphs after an eager step ran out of memory; return whether there were any."""
        return self._graphs.make_room()

    def summary(self) -> GraphSummary:
        """Return what graphs did so far."""
        return self._graphs.summary()
