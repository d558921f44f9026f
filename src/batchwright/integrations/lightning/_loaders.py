"""The loaders that ``planned_loader`` makes: Lightning leaves them as they are and asks them for epoch and length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, final

from ..._checks import as_state, read_whole
from ...errors import ArgumentError
from .._ranked import give_rank, num_batches, sampler_of
from .._size_log import log_sizes, read_sizes


@final
class TrainLoader:
    """Runs one epoch of this rank per loop, starting from a restored place if there is one.

    It is not a ``DataLoader``, so Lightning does not rebuild its sampler. Consumed batches are those that training has
    finished, since Lightning may fetch one ahead.
    """

    def __init__(self, loader: Any, trainer: Any) -> None:
        self.loader = self._loader = loader
        self.trainer = self._trainer = trainer
        self.source = _find_sampler(loader)
        self._sizes = log_sizes(self.source)
        self._epoch = int(self.source.epoch)  # of the newest loop, or of a restored place
        self._num_before = 0  # batches of that epoch that ran before the loop began
        self._replay: list[int] = []
        self._states: dict[int, dict[str, Any]] = {}  # the sampler's states, by the number of batches fetched
        self.before_plan: Callable[[], bool] | None = None  # called before the plan is read, until it returns True

    @property
    def controller(self) -> Any:
        """Return what decides the sizes, None if a plan does."""
        return None if self._sizes is None else self._sizes.controller

    @property
    def collate(self) -> Any:
        """Return what makes a batch of examples, None if the loader does not say."""
        return getattr(self._loader, "collate_fn", None)

    @property
    def sampler(self) -> TrainLoader:
        """Return itself: Lightning calls ``set_epoch`` on a loader's sampler."""
        return self

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; a loop begun or a place restored within that same epoch is kept."""
        if epoch == self._epoch:
            return
        self._num_before, self._replay, self._states = 0, [], {}
        if epoch != self.source.epoch:
            self.source.set_epoch(epoch)
        if _is_resuming(self._trainer):
            _begin_again(self._trainer)
        else:
            self._tell(_set_length)

    def __len__(self) -> int:
        num = self._length()
        if num is None:
            raise TypeError("the number of batches is not known: the controller decides the size of each")
        return num

    def __bool__(self) -> bool:
        return True  # Python would otherwise ask len(), which not every sampler knows

    def __iter__(self) -> Iterator[Any]:
        self._tell(_set_limit)
        return self._run()

    def _tell(self, tell: Callable[[Any, Any, int], Any]) -> None:
        num = self._length()
        if num is not None:
            tell(self._trainer, self, num)

    def _length(self) -> int | None:
        _give_rank_of(self._trainer, self.source, self._loader)
        if self.before_plan is not None and self.before_plan():
            self.before_plan = None
        left = num_batches(self.source)
        return None if left is None else self._num_before + left

    def _run(self) -> Iterator[Any]:
        # Nothing may begin before the first batch is asked for: Lightning makes iterators before it sets the epoch.
        self._epoch, num = int(self.source.epoch), self._num_before
        if self._sizes is not None:
            self._sizes.begin(self._replay)
        self._states = {num: self.source.state_dict()}
        self._tell(_set_length)
        for batch in self.source.track(self._loader) if hasattr(self.source, "track") else self._loader:
            num += 1
            # Two states: a checkpoint may be saved before training has finished the batch fetched last.
            self._states = {num - 1: self._states[num - 1], num: self.source.state_dict()}
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: ``AdaptiveBatching`` saves ``place``, but Lightning expects a loader to have this method."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing, as for ``state_dict``."""

    def place(self) -> dict[str, Any]:
        """Return where training is in the data, as JSON values."""
        num = int(self._trainer.fit_loop.epoch_loop.batch_progress.current.processed)  # finished in this epoch
        if num not in self._states:  # nothing was fetched in this epoch
            return {"sampler": self.source.state_dict(), "num_batches": self._num_before, "sizes": self._replay}
        sizes = [] if self._sizes is None else self._sizes.after(num - self._num_before)
        return {"sampler": self._states[num], "num_batches": num, "sizes": sizes}

    def go_to(self, place: Mapping[str, Any]) -> None:
        """Continue where a place was taken."""
        place = as_state(place, of="AdaptiveBatching", needs=("sampler", "num_batches", "sizes"))
        num, sizes = read_whole(place, "num_batches"), read_sizes(place)
        self.source.load_state_dict(place["sampler"])
        self._epoch, self._num_before, self._replay, self._states = int(self.source.epoch), num, sizes, {}


@final
class EvaluationLoader:
    """Runs the same epoch in every loop, divided over the ranks, for validation and tests."""

    def __init__(self, loader: Any, trainer: Any) -> None:
        self._loader = loader
        self._trainer = trainer
        self.source = _find_sampler(loader)

    def __len__(self) -> int:
        self._begin()
        return len(self.source)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[Any]:
        self._begin()
        return iter(self._loader)

    def _begin(self) -> None:
        _give_rank_of(self._trainer, self.source, self._loader)
        self.source.set_epoch(0)


def _find_sampler(loader: Any) -> Any:
    sampler = sampler_of(loader)
    if sampler is None:
        raise ArgumentError(
            "planned_loader needs a DataLoader with batch_sampler= a batchwright sampler, or what regroup made, got "
            f"{type(loader).__name__}; Lightning divides other loaders itself. Write DataLoader(data, "
            "batch_sampler=BatchSampler(lengths, MaxTokens(8192)), collate_fn=…); with budget='auto' any budget will do"
        )
    return sampler


def _give_rank_of(trainer: Any, sampler: Any, loader: Any) -> None:
    """Give a sampler the rank of a Trainer, which knows it only after it has started its processes."""
    give_rank(sampler, rank=trainer.global_rank, world_size=trainer.world_size, is_loader=sampler is loader)


# A Trainer asks a loader for its length once, but a plan has a few batches more or fewer every epoch. The first number
# would drop the last batches of a longer epoch, and leave out the validation after a shorter one.


def _set_limit(trainer: Any, loader: Any, num_batches: int) -> int | None:
    """Set how many batches the Trainer fetches from a loader in the epoch that begins.

    Returns:
        The limit, None before the Trainer has asked for it the first time.
    """
    combined = trainer.fit_loop._combined_loader
    if combined is None or not combined.limits or loader not in combined.flattened:
        return None
    limit = trainer.limit_train_batches
    num = min(num_batches, limit) if isinstance(limit, int) else int(num_batches * limit)
    # In place: the iterator that is being made holds the same list.
    combined.limits[combined.flattened.index(loader)] = num
    return num


def _set_length(trainer: Any, loader: Any, num_batches: int) -> None:
    """Set the limit, and everything else that the Trainer derived from the length of the previous epoch."""
    num = _set_limit(trainer, loader, num_batches)
    if num is None or len(trainer.fit_loop._combined_loader.flattened) > 1:
        return
    trainer.fit_loop.max_batches = num
    interval = trainer.val_check_interval
    if isinstance(interval, float) and isinstance(getattr(trainer, "val_check_batch", None), int):
        trainer.val_check_batch = max(1, int(num * interval))


def _is_resuming(trainer: Any) -> bool:
    """Return whether the Trainer is about to run its first epoch after a checkpoint."""
    loop = trainer.fit_loop
    return bool(getattr(loop, "is_resuming", False) or loop.restarting or loop.epoch_loop.restarting)


def _begin_again(trainer: Any) -> None:
    """Make a Trainer that resumes begin its loader again; by itself it does so only in later epochs."""
    if trainer.fit_loop._data_fetcher is not None:
        iter(trainer.fit_loop._data_fetcher)


def check_planned(loader: Any, *, finds_size: bool, finds_budget: bool) -> None:
    """Refuse to train on batches that nobody plans where their size was to be found."""
    if loader is None and (finds_size or finds_budget):
        raise ArgumentError(
            f"AdaptiveBatching({'controller' if finds_size else 'budget'}='auto') plans the batches itself, and the "
            "training data did not come through it; pass trainer.fit(model, PlannedDataModule(loader)), or return "
            "planned_loader(loader, self.trainer) from train_dataloader"
        )
