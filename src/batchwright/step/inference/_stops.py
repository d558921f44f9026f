"""Where rows end that no end-of-sequence token ends: criteria of the user's own, and strings to stop at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import numpy as np
import numpy.typing as npt
from torch import Tensor


@final
class Stops:
    """One stopping criterion in place of several, which notes where each row ends.

    What follows in a row is padding, or more tokens where there is no end-of-sequence token. Neither can be told from
    what the row has by itself.

    Args:
        criteria: functions of the ids and scores of all rows, as ``model.generate`` takes them.

    >>> import torch
    >>> stops = Stops([lambda ids, scores: ids[:, -1] == 7])
    >>> for tokens in ([[5, 6], [5, 7]], [[5, 6, 7], [5, 7, 0]]):
    ...     _ = stops(torch.tensor(tokens), None)
    >>> stops.widths.tolist()
    [3, 2]
    """

    def __init__(self, criteria: list[Callable[..., Any]]) -> None:
        self._criteria = criteria
        self.widths: npt.NDArray[np.int64] | None = None

    @property
    def given(self) -> list[Callable[..., Any]]:
        """Return what ``model.generate`` is given: criteria of its own types take the place of those that it makes."""
        return [*(one for one in self._criteria if type(one).__module__.startswith("transformers.generation")), self]

    def __call__(self, ids: Tensor, scores: Any, **options: Any) -> Tensor:
        """Say of each row whether it has ended."""
        done = ids.new_zeros(len(ids)).bool()
        for criterion in self._criteria:
            done = done | criterion(ids, scores, **options)
        if self.widths is None:
            self.widths = np.full(len(ids), np.iinfo(np.int64).max)
        self.widths = np.where(done.cpu().numpy(), np.minimum(self.widths, ids.shape[1]), self.widths)
        return done


def generates_plainly(base: Any) -> bool:
    """Say whether a model generates as transformers does, and not in several rounds of its own (Whisper)."""
    return getattr(getattr(type(base), "generate", None), "__module__", None) == "transformers.generation.utils"


def stops_of(setting: Callable[[str], Any]) -> Stops | None:
    """Return what notes where rows end, None if only tokens end them.

    Args:
        setting: returns a setting of generation by its name.
    """
    given, strings, tokenizer = (setting(name) for name in ("stopping_criteria", "stop_strings", "tokenizer"))
    criteria = list(given) if isinstance(given, list) else [given] if given else []
    if strings and tokenizer is not None:  # without one, transformers says what is missing
        from transformers import StopStringCriteria

        criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=strings))
    return Stops(criteria) if criteria else None
