"""Random numbers of the host: a graph would repeat what they were at capture, unless they change nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, final

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

# What torch.rand was asked for: size and type.
Draws: TypeAlias = list[tuple[tuple[int, ...], torch.dtype]]
CPU = "torch's CPU generator"
_LOWEST, _HIGHEST = 0.0, 1 - 2.0**-24


@final
class HostRandom:
    """The random generators of the host at one moment; for a model on the CPU torch's own is that of the device.

    Args:
        generators: of the model and of the loss function, each with a name.
        device: of the model.
    """

    def __init__(self, generators: Sequence[tuple[str, Any]], device: torch.device) -> None:
        self._is_on_host = device.type == "cpu"
        self._own = generators
        self._before = self._states()

    def _states(self) -> dict[str, Any]:
        return {
            "random": random.getstate(),
            "NumPy": repr(np.random.get_state()),
            CPU: b"" if self._is_on_host else torch.get_rng_state().numpy().tobytes(),
            **{name: _comparable(value) for name, value in self._own},
        }

    def moved(self) -> list[str]:
        """Return the names of the generators that have been used since."""
        return [name for name, state in self._states().items() if state != self._before[name]]


def generator_state(generator: Any) -> Any:
    """Return the state of a generator of Python, NumPy or torch."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def set_generator_state(generator: Any, state: Any) -> None:
    """Put back what ``generator_state`` returned."""
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def _comparable(generator: Any) -> Any:
    state = generator_state(generator)
    return state.numpy().tobytes() if isinstance(state, torch.Tensor) else repr(state)


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


def vain_draws(forward: Callable[[], float], restore: Callable[[], None], *, is_on_host: bool) -> Draws | None:
    """Return what a forward pass draws on the host in vain, None if draws matter; everything is put back.

    A replay on the host draws by itself, so there is nothing to repeat for it.
    """
    try:
        draws = harmless_draws(forward, restore, is_on_host=is_on_host)
        return [] if draws is not None and is_on_host else draws
    except Exception:  # a second pass that fails says nothing of the draws
        return [] if is_on_host else None
    finally:
        restore()


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
