"""What an adaptive trainer holds: its settings, and the objects that do the work."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from ..._checks import read_size
from ...errors import StateMismatchError
from ...size.noise import NoiseAverage
from ._data import TrainingData
from ._evaluation import Evaluation
from ._lengths import LengthCache
from ._settings import Settings
from ._updates import Updates
from ._weights import LossWeights
from .callbacks import UpdateCallback

# Raise it when an older state can no longer be read.
STATE_VERSION = 1


@final
class Batching:
    """Holds the settings and the collaborators of an adaptive trainer.

    None of them holds the trainer: such a cycle would keep the worker processes of its loader alive until garbage is
    collected.

    Args:
        settings: what the user asked for.
    """

    def __init__(self, settings: Settings) -> None:
        lengths = LengthCache()
        self.settings = settings
        self.weights = LossWeights(settings.weighting)
        self.data = TrainingData(settings, lengths)
        self.updates = Updates(settings, self.weights)
        self.evaluation = Evaluation(settings, lengths, self.weights)
        self.callback = UpdateCallback(settings, self.data, self.updates)

    def close(self) -> None:
        """End a training."""
        self.callback.close()
        self.updates.close()
        self.data.batches = None

    def take_figures(self) -> dict[str, float]:
        """Return the figures of the updates since the last log; an empty dict if there were none."""
        figures = {} if self.data.batches is None else self.updates.figures.take_recent()
        if not figures:
            return {}
        if self.settings.rule is not None:
            figures["lr_factor"] = self.updates.figures.lr_factor
        if self.settings.controller is not None:
            figures["batch_size_wanted"] = read_size(self.settings.controller)
        scale = None if self.updates.noise is None else self.updates.noise.meter.average.scale
        return figures if scale is None else {**figures, "noise_scale": scale}

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the data and everything that was learned, as JSON values."""
        assert self.data.batches is not None
        controller, noise = self.settings.controller, self.updates.noise
        # Older checkpoints hold the keys "feed" and "course", so they keep these names.
        return {
            "version": STATE_VERSION,
            "feed": self.data.batches.state_dict(),
            "course": self.updates.figures.state_dict(),
            "controller": None if controller is None else controller.state_dict(),
            "noise": None if noise is None else noise.meter.average.to_state(),
        }

    def restore(self, saved: Mapping[str, Any] | None, epochs_trained: int, *, ignores_place: bool) -> int:
        """Continue from a state, and return the epoch to run.

        Args:
            saved: of ``state_dict``; None if the checkpoint has none.
            epochs_trained: the epoch that the trainer found.
            ignores_place: begin the epoch again.
        """
        batches, controller, noise = self.data.batches, self.settings.controller, self.updates.noise
        assert batches is not None
        if saved is None or saved.get("version") != STATE_VERSION:
            if ignores_place:
                return epochs_trained
            raise StateMismatchError(
                "the checkpoint does not hold the place in its epoch, as checkpoints of adaptive trainers do; set "
                "ignore_data_skip=True to begin the epoch again"
            )
        if ignores_place:
            batches.set_epoch(int(saved["feed"]["sampler"]["epoch"]))
        else:
            batches.load_state_dict(saved["feed"])
        self.updates.figures.load_state_dict(saved["course"])
        if controller is not None and saved["controller"] is not None:
            controller.load_state_dict(saved["controller"])
        if noise is not None and saved["noise"] is not None:
            noise.meter.average = NoiseAverage(**saved["noise"])
        return batches.epoch
