"""The loaders that ``planned_loader`` makes: Lightning leaves them as they are and asks them for epoch and length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

from ..errors import ArgumentError, StateMismatchError
from ._lightning_lengths import begin_again, is_resuming, num_processed, set_limit, tell_length
from ._ranked import give_rank, num_batches, sampler_of
from ._size_log import log_sizes


@final
class TrainLoader:
    """One epoch a loop, of this rank, from where a restored place says.

    Not a ``DataLoader``, so Lightning does not make its sampler anew. What was consumed is counted by the batches that
    training is done with, since Lightning may fetch one ahead.
    """

    def __init__(self, loader: Any, trainer: Any) -> None:
        self._loader = loader
        self._trainer = trainer
        self.source = find_sampler(loader)
        self._sizes = log_sizes(self.source)
        self._epoch = int(self.source.epoch)  # of the loop that was begun last, or of a restored place
        self._num_before = 0  # batches of that epoch which ran before the loop began
        self._replay: list[int] = []
        self._states: dict[int, dict[str, Any]] = {}  # of the sampler, by the batches of the epoch that were fetched

    @property
    def controller(self) -> Any:
        """Return what decides the sizes, None where a plan does."""
        return None if self._sizes is None else self._sizes.controller

    @property
    def sampler(self) -> TrainLoader:
        """Return what Lightning tells the epoch."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; a loop begun or a place restored within that very epoch is kept."""
        if epoch == self._epoch:
            return
        self._num_before, self._replay, self._states = 0, [], {}
        if epoch != self.source.epoch:
            self.source.set_epoch(epoch)
        if is_resuming(self._trainer):
            begin_again(self._trainer)
        else:
            self._tell(tell_length)

    def __len__(self) -> int:
        num = self._length()
        if num is None:
            raise TypeError("the number of batches is not known: the controller decides the size of each")
        return num

    def __bool__(self) -> bool:
        return True  # asked of len() otherwise, which not every sampler knows

    def __iter__(self) -> Iterator[Any]:
        self._tell(set_limit)
        return self._run()

    def _tell(self, tell: Callable[[Any, Any, int], Any]) -> None:
        num = self._length()
        if num is not None:
            tell(self._trainer, self, num)

    def _length(self) -> int | None:
        give_rank_of(self._trainer, self.source, self._loader)
        left = num_batches(self.source)
        return None if left is None else self._num_before + left

    def _run(self) -> Iterator[Any]:
        # Nothing may begin before the first batch is asked for: Lightning makes iterators before it sets the epoch.
        self._epoch, num = int(self.source.epoch), self._num_before
        if self._sizes is not None:
            self._sizes.begin(self._replay)
        self._states = {num: self.source.state_dict()}
        self._tell(tell_length)
        for batch in self.source.track(self._loader) if hasattr(self.source, "track") else self._loader:
            num += 1
            self._states = {num - 1: self._states[num - 1], num: self.source.state_dict()}
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return nothing, since ``AdaptiveBatching`` saves ``place``; Lightning looks whether a loader has it."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing, as for ``state_dict``."""

    def place(self) -> dict[str, Any]:
        """Return where training stands, as JSON values."""
        num = num_processed(self._trainer)
        if num not in self._states:  # nothing was fetched in this epoch
            return {"sampler": self.source.state_dict(), "num_batches": self._num_before, "sizes": self._replay}
        sizes = [] if self._sizes is None else self._sizes.behind(num - self._num_before)
        return {"sampler": self._states[num], "num_batches": num, "sizes": sizes}

    def go_to(self, place: Mapping[str, Any]) -> None:
        """Continue where a place was taken."""
        try:
            state, num, sizes = place["sampler"], int(place["num_batches"]), list(place["sizes"])
        except (KeyError, TypeError) as error:
            raise StateMismatchError(f"the place in the data is not one that place() returned: {error!r}") from error
        self.source.load_state_dict(state)
        self._epoch, self._num_before, self._replay, self._states = int(self.source.epoch), num, sizes, {}


@final
class EvaluationLoader:
    """The same epoch every loop, divided over the ranks, for validation and tests."""

    def __init__(self, loader: Any, trainer: Any) -> None:
        self._loader = loader
        self._trainer = trainer
        self.source = find_sampler(loader)

    def __len__(self) -> int:
        self._begin()
        return len(self.source)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        return iter(self._loader)

    def _begin(self) -> None:
        give_rank_of(self._trainer, self.source, self._loader)
        self.source.set_epoch(0)


def find_sampler(loader: Any) -> Any:
    """Return the sampler of a loader, or say what is needed."""
    sampler = sampler_of(loader)
    if sampler is None:
        raise ArgumentError(
            "planned_loader needs a DataLoader with batch_sampler= a batchwright sampler, or what regroup made, got "
            f"{type(loader).__name__}; Lightning divides other loaders itself"
        )
    return sampler


def give_rank_of(trainer: Any, sampler: Any, loader: Any) -> None:
    """Give a sampler the rank of a Trainer that has started its processes; before, it does not know it."""
    give_rank(sampler, rank=trainer.global_rank, world_size=trainer.world_size, is_loader=sampler is loader)
