"""What an update trains: the optimizer's parameters, asked anew every time and kept equal on all ranks."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .._ranks import Ranks, common_error, failure_of, is_sharded
from ..errors import ArgumentError
from ._gradients import Gradients
from ._optimizers import check_parameters, optimizer_parameters

T = TypeVar("T")


@final
class Trained:
    """The parameters that an optimizer updates now, of the model or not.

    Attributes:
        parameters: those with ``requires_grad``, each once, in the order of the optimizer.
        gradients: of these parameters.
        optimizer: the optimizer.
    """

    def __init__(self, ranks: Ranks, optimizer: Optimizer) -> None:
        self._ranks = ranks
        self.optimizer = optimizer
        self._names: dict[int, str] = {}
        self._mark = 0
        self.parameters: list[nn.Parameter] = []
        self.gradients = Gradients([], [])
        self.refresh()
        if not self.parameters:
            raise ArgumentError(
                "the optimizer updates no trainable parameter; set requires_grad on those to train, and give them to it"
            )

    def refresh(self) -> bool:
        """Ask the optimizer again, and return whether it updates other parameters than before."""
        found = optimizer_parameters(self.optimizer)
        check_parameters(found)
        if len(found) == len(self.parameters) and all(map(_is, found, self.parameters)):
            return False
        self._ranks.check_reached(found)
        own = list(self._ranks.module.named_parameters())
        known = {id(parameter) for parameter in found}
        in_groups = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        others = {id(one): one for one in [*(value for _, value in own), *in_groups] if id(one) not in known}
        self._names = {id(parameter): name for name, parameter in own}
        self.parameters = found
        self.gradients = Gradients(found, list(others.values()))
        self._mark = self._mark_of_unshared() if self._ranks.world_size > 1 else 0
        return True

    def named(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters with their names; one that the model does not own is named by its place."""
        return [
            (self._names.get(id(value), f"optimizer.{place}"), value) for place, value in enumerate(self.parameters)
        ]

    def marks(self) -> list[int]:
        """Return numbers that must be the same on all ranks; see ``check_marks``."""
        return [self._ranks.mark_of_buffers(), self._mark, len(self.parameters)]

    def check_marks(self, are_equal: Sequence[bool]) -> None:
        """Refuse, on all ranks alike, what differs between them; each of ``marks`` was compared."""
        same_buffers, same_values, same_number = are_equal
        if not same_buffers:
            raise ArgumentError(
                "buffers of the model have other shapes on other ranks, so they cannot be shared; give them the same "
                "shape everywhere, or use DDP(broadcast_buffers=False)"
            )
        if not (same_values and same_number):
            raise ArgumentError(
                "the optimizer trains parameters that the wrapped model does not own, and their values differ between "
                "ranks; make them with the same seed on all ranks, or put them into the model before it is wrapped"
            )

    def _mark_of_unshared(self) -> int:
        """Return a checksum of the parameters that no wrapper has made equal on all ranks."""
        is_shared: Callable[[nn.Parameter], bool] = (
            is_sharded if self._ranks.is_sharded else lambda parameter: id(parameter) in self._names
        )
        mark = 0
        for parameter in self.parameters:
            if not is_shared(parameter):
                mark = zlib.crc32(_bytes_of(parameter), mark)
        return mark

    def take_over(self, error: Exception | None, scaler: Any, device: torch.device) -> None:
        """Let ranks on which the optimizer's step failed take over the result of one on which it did not.

        Every rank calls it after the step. If one failed, all raise in the end: the failed ones their own error.
        """
        if self._ranks.is_sharded:  # no other rank holds the same part
            self._ranks.agree(error, device)
            return
        (has_failed,) = self._ranks.largest([float(error is not None)], device)
        if not has_failed:
            return
        failures = self._ranks.gather(failure_of(error))
        source = next((rank for rank, failure in enumerate(failures) if failure is None), 0)
        second: Exception | None = None
        state = self._ranks.broadcast(self._state(scaler), rank=source)
        try:
            if error is not None or failures[source] is not None:
                self._load(state, scaler)
        except Exception as caught:
            second = caught
        self._ranks.agree(second, device)
        raise common_error(error, failures)

    def _state(self, scaler: Any) -> dict[str, Any]:
        return {
            "parameters": [parameter.detach().cpu() for parameter in self.parameters],
            "optimizer": self.optimizer.state_dict(),
            "scaler": None if scaler is None else scaler.state_dict(),
        }

    def _load(self, state: dict[str, Any], scaler: Any) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters, state["parameters"], strict=True):
                parameter.copy_(value)
        self.optimizer.load_state_dict(state["optimizer"])
        if scaler is not None:
            forget_unscaling(scaler, self.optimizer)
            scaler.load_state_dict(state["scaler"])


def attempt(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Run a function, and return its result or its error: other ranks must hear of it before it is raised."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def forget_unscaling(scaler: Any, optimizer: Optimizer) -> None:
    """Let a scaler unscale the next gradients, although those of this update were not used."""
    getattr(scaler, "_per_optimizer_states", {}).pop(id(optimizer), None)


def _is(first: Any, second: Any) -> bool:
    return first is second


def _bytes_of(parameter: Tensor) -> bytes:
    flat = parameter.detach().cpu().contiguous()
    real = torch.view_as_real(flat) if flat.is_complex() else flat
    return real.reshape(-1).view(torch.uint8).numpy().tobytes()
