"""The sizes that a sampler was told, so that batches formed ahead of training are formed the same again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, final


@final
class SizeLog:
    """Stands between a sampler and its controller: notes every size, and first gives those of a saved run.

    Lightning fetches a batch ahead where the length is not known, and workers fetch more. Such a batch was formed at
    the size of then; formed again after a restart at the size of now, it would be another one. All else is the
    controller's.

    >>> from types import SimpleNamespace
    >>> log = SizeLog(SimpleNamespace(size=8))
    >>> log.begin(replay=[4])
    >>> log.size, log.size, log.behind(1)
    (4, 8, [8])
    """

    def __init__(self, controller: Any) -> None:
        self.controller = controller
        self._replay: deque[int] = deque()
        self._given: list[int] = []

    @property
    def size(self) -> int:
        """Return the size of the next batch."""
        size = self._replay.popleft() if self._replay else int(self.controller.size)
        self._given.append(size)
        return size

    def __getattr__(self, name: str) -> Any:
        if name == "controller":  # not there yet, while a copy is being made
            raise AttributeError(name)
        return getattr(self.controller, name)

    def begin(self, replay: Iterable[int] = ()) -> None:
        """Begin a loop over the sampler, whose first batches get the sizes in ``replay``."""
        self._replay, self._given = deque(replay), []

    def behind(self, num_batches: int) -> list[int]:
        """Return the sizes of the batches that were formed behind the first ``num_batches`` of the loop."""
        return [*self._given[num_batches:], *self._replay]


def log_sizes(sampler: Any) -> SizeLog | None:
    """Put a log between a sampler and its controller, unless there is one; None for samplers without a controller."""
    controller = getattr(sampler, "controller", None)
    if controller is None or isinstance(controller, SizeLog):
        return controller
    log = SizeLog(controller)
    sampler.controller = log
    return log
