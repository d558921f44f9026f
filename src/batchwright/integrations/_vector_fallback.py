"""Where ``controller="auto"`` cannot measure noise in vectors: parts of the batch instead, said once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, final

from torch import nn

from ..errors import ArgumentError
from ..step import Stepper, StepReport
from ..step.noise import refuses_vectors
from ..step.oom import Snapshot
from ._auto import NOISE_EVERY


def in_parts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a ``Stepper`` that measures noise in two parts of every 8th batch.

    >>> in_parts({"clip_norm": 1.0, "measure_noise": 2, "noise_from": "vectors"})
    {'clip_norm': 1.0, 'measure_noise': 8, 'noise_from': 'all'}
    """
    return {**options, "measure_noise": NOISE_EVERY, "noise_from": "all"}


@final
class VectorFallback:
    """Runs updates; one that is refused because of vectors runs again, as it was, with noise from parts.

    Args:
        model: that is trained.
        make: makes a stepper that measures parts.
    """

    def __init__(self, model: nn.Module, make: Callable[[], Stepper]) -> None:
        self._model = model
        self._make = make
        self._is_checked = False  # vectors were right at least once
        self._is_left = False

    def first(self, make: Callable[[], Stepper]) -> Stepper:
        """Return the stepper to begin with, that of vectors; a model in which none is trained shows it here."""
        try:
            return make()
        except ArgumentError as error:
            if not refuses_vectors(error):
                raise
            self._warn(error)
        return self._make()

    def run(self, stepper: Stepper, update: Callable[[Stepper], StepReport]) -> tuple[Stepper, StepReport]:
        """Run an update, and return its report with the stepper for the next one."""
        if self._is_left:
            return stepper, update(stepper)
        # Random numbers and buffers, for the second attempt. Refusals after the first check leave both as they were.
        snapshot = None if self._is_checked else Snapshot.of(self._model)
        try:
            report = update(stepper)
        except ArgumentError as error:
            if not refuses_vectors(error):
                raise
            self._warn(error)
        else:
            self._is_checked |= report.noise is not None and report.noise.source != "all"
            return stepper, report
        if snapshot is not None:
            snapshot.restore()
        stepper.abandon()
        stepper = self._in_parts(stepper.state_dict())
        return stepper, update(stepper)

    def for_state(self, stepper: Stepper, state: Any) -> Stepper:
        """Return the stepper that takes a saved state: one of a run that had left vectors measures parts at once."""
        is_of_vectors = not isinstance(state, Mapping) or "vectors" in state
        return stepper if self._is_left or is_of_vectors else self._in_parts(stepper.state_dict())

    def _in_parts(self, state: Mapping[str, Any]) -> Stepper:
        stepper = self._make()
        stepper.load_state_dict(state)
        self._is_left = True
        return stepper

    def _warn(self, error: Exception) -> None:
        self._is_left = True
        warnings.warn(f"noise is measured in parts of every {NOISE_EVERY}th batch: {error}", stacklevel=5)
