"""The loader that ``prepare`` returns: batches of this rank on its device, counted as the loop receives them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, final

import torch

from ._ranked import is_at_end, num_batches


@final
class PreparedLoader:
    """Yields the batches of a loader, moved to the device; the place in the epoch is that of the loop.

    ``for batch in loader`` runs one epoch, or what is left of it after ``accelerator.load_state``. Nothing is fetched
    ahead of the loader's own workers.
    """

    def __init__(self, loader: Any, sampler: Any, move: Callable[[Any], Any]) -> None:
        self._loader = loader
        self._sampler = sampler
        self._move = move
        self._num_left: int | None = None

    @property
    def epoch(self) -> int:
        """Return the epoch that runs, or that the next loop runs: ``for epoch in range(loader.epoch, num_epochs)``."""
        return int(self._sampler.epoch)

    @property
    def sampler(self) -> Any:
        """Return what the loader draws from."""
        return self._sampler

    @property
    def is_at_end(self) -> bool:
        """Return whether the newest batch is the last of its epoch; False where that cannot be known."""
        return is_at_end(self._sampler, self._num_left)

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; a place restored within that very epoch is kept. Without it epochs follow one another."""
        self._sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._loader)

    def __bool__(self) -> bool:
        return True  # asked of len() otherwise, which not every sampler knows

    def __iter__(self) -> Iterator[Any]:
        self._num_left = num_batches(self._sampler)
        begun = _BegunQuietly(self._loader, self._sampler)
        for batch in self._sampler.track(begun) if hasattr(self._sampler, "track") else begun:
            if self._num_left is not None:
                self._num_left -= 1
            yield self._move(batch)


@final
class _BegunQuietly:
    """A loader that takes nothing from the random state when it begins within an epoch.

    A ``DataLoader`` draws a seed when it begins. A run without a break has drawn it at the start of the epoch, so a
    resumed one must not draw again.
    """

    def __init__(self, loader: Any, sampler: Any) -> None:
        self._loader = loader
        self._sampler = sampler
        self.dataset = getattr(loader, "dataset", None)
        self.in_order = getattr(loader, "in_order", True)

    def __iter__(self) -> Iterator[Any]:
        state = self._sampler.state_dict()
        is_within = bool(state.get("position", state.get("consumed", 0)))
        with _kept_random_state(is_kept=is_within):
            iterator = iter(self._loader)
            # A generator, as regroup has one, begins its loader no sooner than with its first item.
            first = list(islice(iterator, 1)) if isinstance(iterator, Generator) else []
        return chain(first, iterator)


@contextmanager
def _kept_random_state(*, is_kept: bool) -> Iterator[None]:
    before = torch.get_rng_state()
    yield
    if is_kept:
        torch.set_rng_state(before)
