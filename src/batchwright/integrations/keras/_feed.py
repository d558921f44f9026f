"""Feed: the batches of a sampler one after the other, for tf.data, and the place after each of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, final
from weakref import WeakKeyDictionary

from ..._checks import as_state
from ...errors import ArgumentError, StateMismatchError
from ...plan import BatchSampler, Plan, ResizableBatchSampler
from .._size_log import log_sizes, read_sizes
from .collating import BatchMaker


@final
class Feed:
    """Forms the batches of a sampler one after the other, and knows the place after each of them.

    A pass begins after the batches that were trained, where a callback counts them, and where the sampler stands
    otherwise: TensorFlow may begin passes that nobody reads to the end.
    """

    def __init__(self, sampler: Any, maker: BatchMaker, *, is_endless: bool) -> None:
        self.sampler, self.is_endless = sampler, is_endless
        self._maker = maker
        self._check_place(sampler.state_dict())
        self._sizes = log_sizes(sampler)
        self._states: list[dict[str, Any]] = [self._place()]  # after each batch of the newest pass, from its beginning
        self._num_trained: int | None = None  # of the newest pass; None: nobody counts
        self._replay: list[int] = []

    def samples(self) -> list[Any]:
        """Return batches to read types and axes from."""
        return self._maker.samples()

    def follow(self) -> None:
        """Let a callback count what was trained; it calls this when it is made."""
        self._num_trained = 0

    def count_batch(self) -> None:
        """Count a batch that was trained."""
        if self._num_trained is not None:
            self._num_trained += 1

    def _place(self) -> dict[str, Any]:
        state: dict[str, Any] = self.sampler.state_dict()
        return state

    def __iter__(self) -> Iterator[Any]:
        if self._num_trained is not None:
            self._go_to(self.state_dict())
        if self._sizes is not None:
            self._sizes.begin(self._replay)
        self._states = states = [self._place()]
        while True:
            yield from self._epoch(states)
            if not self.is_endless:
                return

    def _epoch(self, states: list[dict[str, Any]]) -> Iterator[Any]:
        batches = iter(self.sampler)
        plan = self.sampler.plan if isinstance(self.sampler, BatchSampler) else None
        num_left = None if plan is None else len(plan) // self.sampler.world_size
        for number, indices in enumerate(batches):
            if number + 1 == num_left or self._is_last():
                next(batches, None)  # Keras may not ask again after the last one, and the epoch must end
            states.append(self._place())
            yield self._maker.make(indices, None if plan is None else self._planned_lengths(plan, number))

    def _is_last(self) -> bool:
        """Say whether a sampler that decides as it goes has given the last batch of its epoch."""
        is_open = isinstance(self.sampler, ResizableBatchSampler)
        return is_open and self._place()["position"] >= self.sampler.num_in_epoch

    def _planned_lengths(self, plan: Plan, number: int) -> tuple[int, ...]:
        lengths = plan.shapes[number * self.sampler.world_size + self.sampler.rank, 1:]
        return tuple(lengths.tolist())

    def state_dict(self) -> dict[str, Any]:
        """Return the place after the batches that were trained, and the sizes of those formed after them."""
        num = len(self._states) - 1 if self._num_trained is None else self._num_trained
        if num >= len(self._states):
            raise StateMismatchError(f"{num} batches were trained, but only {len(self._states) - 1} were formed here")
        sizes = [] if self._sizes is None else self._sizes.after(num)
        return {"sampler": self._states[num], "sizes": sizes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken."""
        self._check_place(as_state(state, of="a dataset of to_tf_data", needs=("sampler",))["sampler"])
        self._go_to(state)

    def _check_place(self, place: Mapping[str, Any]) -> None:
        if not self.is_endless and place.get("position"):
            raise StateMismatchError(
                "an epoch that is resumed has fewer batches than Keras was told; resume with endless=True and "
                "steps_per_epoch, or with PlannedDataset"
            )

    def _go_to(self, state: Mapping[str, Any]) -> None:
        replay = read_sizes(state)
        self.sampler.load_state_dict(state["sampler"])
        self._replay, self._states = replay, [self._place()]
        self._num_trained = None if self._num_trained is None else 0


FEEDS: WeakKeyDictionary[Any, Feed] = WeakKeyDictionary()


def feed_of(sampler: Any) -> Feed:
    """Return what feeds a dataset from a sampler."""
    if sampler not in FEEDS:
        raise ArgumentError("the sampler feeds no dataset yet; call to_tf_data(sampler, examples) first")
    return FEEDS[sampler]
