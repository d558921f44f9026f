"""Random numbers of the host: a graph would repeat what they were at capture, unless they change nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

# What torch.rand was asked for: size and type.
Draws: TypeAlias = list[tuple[tuple[int, ...], torch.dtype]]
CPU = "torch's CPU generator"
_LOWEST, _HIGHEST = 0.0, 1 - 2.0**-24


@final
class HostRandom:
    """The random generators of the host at one moment; for a model on the CPU torch's own is that of the device."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._is_on_host = device.type == "cpu"
        self._own = [
            (f"{name}.{key}".lstrip("."), value)
            for name, part in module.named_modules()
            for key, value in vars(part).items()
            if isinstance(value, random.Random | np.random.Generator | np.random.RandomState | torch.Generator)
        ]
        self._before = self._states()
        self._states_of_own = [(value, _saved(value)) for _, value in self._own]

    def _states(self) -> dict[str, Any]:
        return {
            "random": random.getstate(),
            "NumPy": repr(np.random.get_state()),
            CPU: b"" if self._is_on_host else torch.get_rng_state().numpy().tobytes(),
            **{name: _state_of(value) for name, value in self._own},
        }

    def moved(self) -> list[str]:
        """Return the names of the generators that have been used since."""
        return [name for name, state in self._states().items() if state != self._before[name]]

    def put_back(self) -> None:
        """Let the generators of the model's own parts stand where they stood; the others are in a snapshot."""
        for value, state in self._states_of_own:
            if isinstance(value, random.Random):
                value.setstate(state)
            elif isinstance(value, np.random.Generator):
                value.bit_generator.state = state
            else:
                value.set_state(state)


def _saved(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    return generator.bit_generator.state if isinstance(generator, np.random.Generator) else generator.get_state()


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return repr(generator.bit_generator.state)
    state = generator.get_state()
    return state.numpy().tobytes() if isinstance(generator, torch.Generator) else repr(state)


@final
class _ForcedDraws(TorchDispatchMode):
    """Lets ``torch.rand`` on the host return one value, and notes what it was asked for."""

    def __init__(self, value: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._value = value
        self.draws: Draws = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation, or stand in for it."""
        options = kwargs or {}
        device = options.get("device")
        if func is not torch.ops.aten.rand.default or (device is not None and torch.device(device).type != "cpu"):
            return func(*args, **options)
        size, dtype = tuple(args[0]), options.get("dtype") or torch.get_default_dtype()
        self.draws.append((size, dtype))
        return torch.full(size, self._value, dtype=dtype)


def harmless_draws(
    forward: Callable[[], float], restore: Callable[[], None], *, is_on_host: bool = False
) -> Draws | None:
    """Return what a forward pass draws with ``torch.rand`` on the host if its loss is the same for the lowest and the
    highest draws, None if draws matter or are of another kind.

    Layers that are dropped with probability 0 draw, and compare in vain.

    Args:
        forward: runs a batch and returns its loss.
        restore: puts all random states and buffers back.
        is_on_host: the model lies on the host, where layers such as dropout draw in other ways.
    """
    losses, draws = [], []
    for value in (_LOWEST, _HIGHEST):
        before = torch.get_rng_state()
        with _ForcedDraws(value) as forced:
            losses.append(forward())
        if not is_on_host and not torch.equal(torch.get_rng_state(), before):
            return None
        restore()
        draws.append(forced.draws)
    # To the bit: a layer more or less may change a loss by little, and two equal runs differ by nothing.
    return draws[0] if losses[0] == losses[1] and draws[0] == draws[1] else None


def draw_again(draws: Draws) -> None:
    """Move torch's generator on the host as an eager run would have."""
    for size, dtype in draws:
        torch.rand(size, dtype=dtype)


def is_explained_by(draws: Draws, start: torch.Tensor) -> bool:
    """Say whether the generator on the host stands where these draws lead from a state; it is left there."""
    now = torch.get_rng_state()
    torch.set_rng_state(start)
    draw_again(draws)
    return torch.equal(torch.get_rng_state(), now)
