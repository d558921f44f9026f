"""What runs the batches of ``generate``: graphs where these can be exact, else ``model.generate``."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, Protocol, final

import numpy as np
import torch
from torch import Tensor

from ...errors import ArgumentError
from ..graphs.backend import Choice, GraphBackend, make_backend
from ._decoding import Counts, Decoder


class Runner(Protocol):
    """Runs batches."""

    def run(self, examples: list[Any], indices: list[int], limits: Counts | None) -> list[Tensor]:
        """Return the token ids of each example.

        Args:
            examples: those of one batch.
            indices: their places among all.
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


def as_limits(value: Any, num: int) -> Counts | None:
    """Return ``max_new_tokens`` of each example, None if there is one number for all.

    Args:
        value: what was given.
        num: the number of examples.
    """
    if value is None or np.ndim(value) == 0:
        return None
    limits = np.asarray(value)
    if limits.shape != (num,) or not np.issubdtype(limits.dtype, np.integer) or limits.min() < 1:
        raise ArgumentError(
            f"max_new_tokens must be one whole number from 1, or one per example, {num}; got an array of shape "
            f"{limits.shape} and type {limits.dtype}"
        )
    return limits.astype(np.int64)


def make_runner(decoder: Decoder, graphs: Choice) -> Runner:
    """Return what runs a batch.

    Args:
        decoder: runs a batch eagerly.
        graphs: what was asked for.
    """
    backend = None if graphs is False else make_backend(graphs, decoder.device)
    if backend is None:
        return Eager(decoder)
    from ._options import read_options

    options = read_options(decoder.base, decoder.model, decoder.kwargs)
    if not isinstance(options, str):
        from ._ranges import make_attend
        from ._replaying import Replaying

        seed = int(torch.randint(2**62, ())) if options.rules.draws else 0
        make = partial(_another, backend, graphs, decoder.device)
        attend = make_attend(decoder.base, decoder.device)
        return Replaying(decoder, options, make, seed=seed, is_wanted=graphs is True, attend=attend)
    if graphs is True:
        raise ArgumentError(f"graphs=True cannot be followed: {options}; pass graphs='auto' or graphs=False")
    warnings.warn(f"generate runs eagerly: {options}", stacklevel=4)
    return Eager(decoder)


def _another(given: GraphBackend, graphs: Choice, device: torch.device) -> GraphBackend:
    """Return what captures for a new layout of the memory; CUDA graphs of the one before go with their pool."""
    return (make_backend(graphs, device) or given) if isinstance(graphs, bool | str) else given
