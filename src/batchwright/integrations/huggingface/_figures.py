"""The figures of an adaptive trainer's updates: what was trained on, and what to log of it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from ..._checks import as_state, read_whole

# Where figures come from in a trainer, for the error of a policy that does without one.
HINTS = {
    "entropy": "pass measure_entropy=True to the trainer",
    "noise": "pass measure_noise=True to the trainer",
    "memory_fraction": "pass memory=MemoryMonitor() to the trainer, from batchwright.step",
}
# Places in the sums of an update: its weight in labels or examples, examples, tokens, padded tokens, micro-batches, how
# often ranks have run out of memory and how often they have cut micro-batches since training began, and how many ranks
# have failed or cannot weigh micro-batches.
WEIGHT, EXAMPLES, TOKENS, PADDED, PARTS, OOMS, CUTS, FAILED, REFUSED = range(9)


@final
class TrainingFigures:
    """Counts over all ranks; they stay on the device until someone reads them.

    Attributes:
        num_ooms: how often this rank has run out of memory since training began.
        num_cuts: how many more pieces than micro-batches this rank has run since training began.
        lr_factor: the factor of the learning rate in the update.
        loss: of the update on this rank, as far as it was run.
    """

    def __init__(self) -> None:
        self.num_ooms = 0
        self.num_cuts = 0
        self.lr_factor = 1.0
        self.loss: Tensor | float = 0.0
        self._saved_ooms = 0  # of the runs before, from a checkpoint
        self._sums = _no_sums()
        self._all = _no_sums()
        self._recent: Tensor | None = None
        self._num_recent = 0
        self._cuts_at_start, self._cuts_logged = 0, 0
        self._start = 0.0

    def begin(self, sums: Tensor) -> None:
        """Begin an update with its sums over all ranks."""
        self._sums, self.loss, self._start = sums, 0.0, time.perf_counter()
        self._cuts_at_start = self.num_cuts

    def end(self) -> None:
        """Count the update as done."""
        self._all = self._all.to(self._sums.device) + self._sums
        self._recent = self._sums if self._recent is None else self._recent + self._sums
        self._num_recent += 1

    @property
    def weight(self) -> float:
        """Return the weight of the update, in labels or examples."""
        return float(self._sums[WEIGHT])

    @property
    def batch_size(self) -> int:
        """Return the number of examples of the update."""
        return round(float(self._sums[EXAMPLES]))

    @property
    def seconds(self) -> float:
        """Return the seconds since the update began."""
        return time.perf_counter() - self._start

    def counts(self) -> dict[str, int]:
        """Return the examples and tokens so far."""
        values = self._all.tolist()
        return {"examples": round(values[EXAMPLES]), "tokens": round(values[TOKENS])}

    def take_recent(self) -> dict[str, float]:
        """Return what to log of the updates since the last call; an empty dict if there were none."""
        if self._recent is None:
            return {}
        sums, num = self._recent.tolist(), self._num_recent
        self._recent, self._num_recent = None, 0
        before, self._cuts_logged = self._cuts_logged, self._all_cuts()
        return {
            "batch_size": sums[EXAMPLES] / num,
            "num_micro_batches": (sums[PARTS] + self._cuts_logged - before) / num,
            "padding": 1 - sums[TOKENS] / sums[PADDED],
            "ooms": self._all_ooms(),
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        return {**self.counts(), "ooms": self._all_ooms()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue counting from a state."""
        state = as_state(state, of="the figures of a trainer")
        examples, tokens, ooms = (read_whole(state, name) for name in ("examples", "tokens", "ooms"))
        self._all, self._saved_ooms = _no_sums(), ooms
        self._all[EXAMPLES], self._all[TOKENS] = float(examples), float(tokens)

    def _all_ooms(self) -> int:
        # The sums hold what other ranks had met before this update; their newest failures arrive with the next one.
        return self._saved_ooms + max(round(float(self._sums[OOMS])), self.num_ooms)

    def _all_cuts(self) -> int:
        # As above: those of this rank up to now, those of other ranks before this update.
        return round(float(self._sums[CUTS])) - self._cuts_at_start + self.num_cuts


def _no_sums() -> Tensor:
    return torch.zeros(9, dtype=torch.float64)
