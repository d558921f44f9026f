"""A log of the sizes that a sampler used, so that a resumed run forms the same batches again."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any, final

from .._checks import as_whole, read_size
from ..errors import ArgumentError, StateMismatchError


@final
class SizeLog:
    """Stands between a sampler and its controller, records every size, and can replay the sizes of a saved run.

    Loaders form batches ahead of training: workers fetch several, and Lightning fetches one if the length is not known.
    After a restart these batches must be formed with the sizes of that time, not with the size that holds now. All
    other attributes come from the controller.

    >>> from types import SimpleNamespace
    >>> log = SizeLog(SimpleNamespace(size=8))
    >>> log.begin(replay=[4])
    >>> log.size, log.size, log.after(1)
    (4, 8, [8])
    """

    def __init__(self, controller: Any) -> None:
        self.controller = controller
        self._replay: deque[int] = deque()
        self._given: list[int] = []

    @property
    def size(self) -> int:
        """Return the size of the next batch."""
        size = self._replay.popleft() if self._replay else read_size(self.controller)
        self._given.append(size)
        return size

    @property
    def newest(self) -> int:
        """Return the size of the batch that was formed last."""
        return self._given[-1]

    def __getattr__(self, name: str) -> Any:
        if name == "controller":  # not set yet while a copy is being made
            raise AttributeError(name)
        return getattr(self.controller, name)

    def begin(self, replay: Iterable[int] = ()) -> None:
        """Begin a loop over the sampler; its first batches get the sizes in ``replay``."""
        self._replay, self._given = deque(replay), []

    def after(self, num_batches: int) -> list[int]:
        """Return the sizes of the batches that were formed after the first ``num_batches`` of the loop."""
        return [*self._given[num_batches:], *self._replay]


def read_sizes(state: Mapping[str, Any]) -> list[int]:
    """Return the sizes that a state holds for ``replay``, none where it has no such key.

    >>> read_sizes({"sizes": [4, 8]}), read_sizes({})
    ([4, 8], [])
    """
    sizes = state.get("sizes", [])
    try:
        if not isinstance(sizes, list | tuple):
            raise ArgumentError(f"sizes must be a list, got {sizes!r}")
        return [as_whole("a size", size, least=1) for size in sizes]
    except ArgumentError as error:
        raise StateMismatchError(f"the state holds no valid sizes: {error}") from None


def log_sizes(sampler: Any) -> SizeLog | None:
    """Put a log between a sampler and its controller, unless there is one; return None if it has no controller."""
    controller = getattr(sampler, "controller", None)
    if controller is None or isinstance(controller, SizeLog):
        return controller
    log = SizeLog(controller)
    sampler.controller = log
    return log
