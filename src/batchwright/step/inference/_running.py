"""What runs the batches of ``generate``: ``model.generate`` itself, or graphs where these can follow it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, final

import torch
from torch import Tensor

from ...errors import ArgumentError
from ..graphs.backend import Choice, GraphBackend, make_backend
from ._decoding import Counts, Decoder
from ._limits import MOST_ITEMS_KNOWN

if TYPE_CHECKING:  # pragma: no cover
    from ._sizing import Sizes

# With "auto": a comparison and the first captures take about as long as so many eager steps.
_LEAST_STEPS = 24
_SAID: set[str] = set()


class Runner(Protocol):
    """Runs batches."""

    def run(self, examples: list[Any], indices: list[int], limits: Counts | None) -> list[Tensor]:
        """Return the token ids of each example.

        Args:
            examples: those of one batch.
            indices: their places among all.
            limits: the most new tokens of each, None if all have the same.
        """

    def learn(self, examples: list[Any], limits: Counts | None) -> Sizes | None:
        """Return what batches take of the memory, None if that is not known.

        Args:
            examples: a few of the longest.
            limits: the most new tokens of each, None if all have the same.
        """

    @property
    def held_bytes(self) -> int:
        """Return the memory that is held from batch to batch."""


@final
class Eager:
    """Runs batches through ``model.generate``."""

    held_bytes = 0

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder

    def run(self, examples: list[Any], indices: list[int], limits: Counts | None) -> list[Tensor]:
        """Return the token ids of each example."""
        return self._decoder.run(examples, limits)

    def learn(self, examples: list[Any], limits: Counts | None) -> Sizes | None:
        """Return None: the peaks of batches tell."""
        return None


def make_runner(
    decoder: Decoder,
    graphs: Choice,
    num: int,
    most: int,
    *,
    has_limits: bool,
    room: Callable[[int], float | None],
) -> Runner:
    """Return what runs a batch.

    Args:
        decoder: runs a batch eagerly.
        graphs: what was asked for.
        num: the number of examples.
        most: the most new tokens.
        has_limits: examples have limits of their own.
        room: returns the bytes for a batch, see ``Replaying``.
    """
    backend = None if graphs is False else make_backend(graphs, decoder.device)
    if backend is None or (isinstance(graphs, str) and -(-num // MOST_ITEMS_KNOWN) * (most - 1) < _LEAST_STEPS):
        return Eager(decoder)
    from ._options import read_options

    options = read_options(decoder.base, decoder.model, decoder.kwargs)
    if not isinstance(options, str):
        from ._ranges import make_attend
        from ._replaying import Replaying

        seed = int(torch.randint(2**62, ())) if options.rules.draws else 0
        return Replaying(
            decoder,
            options,
            partial(_another, backend, graphs, decoder.device),
            seed=seed,
            give_up=partial(give_up, graphs),
            has_limits=has_limits,
            attend=make_attend(decoder.base, decoder.device),
            room=room,
        )
    give_up(graphs, options)
    return Eager(decoder)


def give_up(graphs: Choice, reason: str) -> None:
    """Say why batches run eagerly, with ``"auto"`` once for each reason; refuse where graphs are a must."""
    if graphs is True:
        raise ArgumentError(f"graphs=True cannot be followed: {reason}; pass graphs='auto' or graphs=False")
    if isinstance(graphs, str):
        if reason in _SAID:
            return
        _SAID.add(reason)
    warnings.warn(f"generate runs eagerly: {reason}", stacklevel=_stacklevel())


def _stacklevel() -> int:
    """Return the level of the line outside of this package that is to blame, however deep decoding stands."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and str(frame.f_globals.get("__name__")).startswith("batchwright."):
        frame, level = frame.f_back, level + 1
    return level


def _another(given: GraphBackend, graphs: Choice, device: torch.device) -> GraphBackend:
    """Return what captures for a new layout of the memory; CUDA graphs of the one before go with their pool."""
    return (make_backend(graphs, device) or given) if isinstance(graphs, bool | str) else given
