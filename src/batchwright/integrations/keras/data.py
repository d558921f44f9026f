"""Planned batches for Keras: a PyDataset for every backend, and a tf.data pipeline; both resume within an epoch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, final

import keras
import numpy as np

from ..._optional import require
from ...errors import ArgumentError, StateMismatchError
from ...plan import BatchSampler, Buckets, InOrder, Plan, ResizableBatchSampler, Sorted
from ._feed import FEEDS, Feed
from .collating import BatchMaker, Collate

# Plans of these have the same number of batches in every epoch.
_CONSTANT = (Buckets, Sorted, InOrder)
# Of the others this many epochs are planned to bound it, and a share is added: Keras is told one number for all.
_NUM_PLANNED = 4
_MARGIN = 0.02


@final
class PlannedDataset(keras.utils.PyDataset):  # type: ignore[misc]  # Keras has no types
    """Planned batches as a ``keras.utils.PyDataset``, for ``fit`` and ``evaluate`` on every backend.

    Give ``fit`` a ``BatchSizeCallback(dataset)`` too: it moves the plan to the epoch of Keras and counts the batches
    that were trained. Without it every epoch has the batches of the sampler's current one. ``fit`` must not shuffle
    again, ``shuffle=False``, and has no ``steps_per_epoch``: an epoch is the plan of the sampler. Keras is told one
    number of batches; epochs with fewer, such as one that is resumed, end early.

    Before training Keras reads ``dataset[0]`` and ``dataset[1]`` to learn which axes vary. Outside of ``fit`` these two
    are small batches of the extreme shapes, and ``iter(dataset)`` gives the plan.

    Args:
        sampler: a ``BatchSampler``; not of packed rows.
        examples: has one example per length, by index.
        collate: ``collate(examples, lengths)`` makes a batch; None is ``pad_collate``.

    >>> from batchwright import MaxTokens
    >>> sampler = BatchSampler([3, 1, 4], MaxTokens(8), grouping=InOrder())
    >>> [batch.shape for batch in PlannedDataset(sampler, [[1, 2, 3], [4], [5, 6, 7, 8]])]
    [(2, 3), (1, 4)]
    """

    def __init__(
        self,
        sampler: BatchSampler,
        examples: Any,
        *,
        collate: Collate | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(sampler, BatchSampler):
            raise ArgumentError(
                f"PlannedDataset takes a BatchSampler, whose batches are known, got {type(sampler).__name__}; "
                "to_tf_data takes samplers that decide as they go"
            )
        self.sampler = sampler
        self._maker = BatchMaker(sampler, examples, collate)
        self._plan = sampler.plan
        self._start = 0  # examples of the epoch before the plan begins
        self._bound = len(sampler)
        self._is_followed = self._is_open = self._is_read = False
        self._num_trained = 0
        self._seen: set[int] = set()
        self._num_jumps = 0

    @property
    def workers(self) -> int:
        """Return 1: several workers of Keras keep batches of one epoch for the next one."""
        return 1

    @workers.setter
    def workers(self, value: int) -> None:
        if value != 1:
            raise ArgumentError(f"PlannedDataset reads with 1 worker, got workers={value}; to_tf_data can prefetch")

    @property
    def use_multiprocessing(self) -> bool:
        """Return False, as ``workers`` returns 1."""
        return False

    @use_multiprocessing.setter
    def use_multiprocessing(self, value: bool) -> None:
        if value:
            raise ArgumentError("PlannedDataset reads in the process that trains; leave use_multiprocessing out")

    @property
    def num_batches(self) -> int:
        """Return the batches of the current epoch; before training, a number that no epoch exceeds."""
        return len(self._plan) // self.sampler.world_size if self._is_open or not self._is_followed else self._bound

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[Any]:
        plan = self._plan
        return (self._make(plan, index) for index in range(len(plan) // self.sampler.world_size))

    def __getitem__(self, index: int) -> Any:
        if not self._is_read and index < 2:
            return self._maker.extreme(largest=index == 1)
        # Batches before their turn say that Keras shuffles; one of them may be left from the epoch before.
        self._num_jumps += bool(index) and index - 1 not in self._seen
        self._seen.add(index)
        return self._make(self._plan, index)

    def _make(self, plan: Plan, index: int) -> Any:
        place = index * self.sampler.world_size + self.sampler.rank
        return self._maker.make(plan[place], tuple(plan.shapes[place, 1:].tolist()))

    def on_epoch_begin(self) -> None:
        """Note that Keras reads batches from now on; it calls this itself."""
        self._is_read, self._seen, self._num_jumps = True, set(), 0

    def on_epoch_end(self) -> None:
        """Note that Keras has read an epoch; it calls this itself."""
        self._is_read = False

    def follow(self) -> None:
        """Let a callback tell epochs; it calls this when it is made."""
        self._is_followed = True
        self._bound = _most_batches(self.sampler)

    def begin_epoch(self, epoch: int) -> int:
        """Go to an epoch of Keras, from a restored place if there is one in it, and return its number of batches."""
        self._check_place(epoch)
        self.sampler.set_epoch(epoch)
        self._plan, self._start = self.sampler.plan, int(self.sampler.state_dict()["position"])
        self._num_trained, self._is_open = 0, True
        if self.num_batches > self._bound:
            raise ArgumentError(
                f"epoch {epoch} has {self.num_batches} batches, more than the {self._bound} that Keras was told; use "
                "grouping=Buckets(count), whose epochs are equally long, or to_tf_data"
            )
        return self.num_batches

    def _check_place(self, epoch: int) -> None:
        """Refuse to lose or to repeat batches of an epoch that was interrupted."""
        if self._is_open and self._num_trained and not self.is_trained:
            raise StateMismatchError(
                f"epoch {self.sampler.epoch} was interrupted after {self._num_trained} of {self.num_batches} batches; "
                "to go on after them, call callback.load_state_dict(callback.state_dict()) first, or "
                "begin it again with a new PlannedDataset"
            )
        if self.sampler.epoch != epoch and self.sampler.state_dict()["position"]:
            raise StateMismatchError(
                f"fit begins with epoch {epoch}, but the data stand within epoch {self.sampler.epoch}, whose other "
                f"batches would be lost; pass initial_epoch={self.sampler.epoch}, or begin with a new PlannedDataset"
            )

    @property
    def is_trained(self) -> bool:
        """Return whether all batches of the epoch of Keras were trained."""
        return self._is_open and self._num_trained == self.num_batches

    def count_batch(self) -> None:
        """Count a batch that was trained."""
        self._num_trained += 1

    def end_epoch(self) -> None:
        """End an epoch of Keras; one that was trained whole is over, another one stays where it is."""
        state = self.state_dict()
        self._is_open = False
        self.load_state_dict(state)

    def state_dict(self) -> dict[str, Any]:
        """Return where training is in the plan, as JSON values."""
        if not self._is_open:
            return self.sampler.state_dict()
        if self.is_trained:
            return self.sampler.start_of(self.sampler.epoch + 1)
        if self._num_jumps > 1 and self._num_trained:
            raise StateMismatchError("fit shuffles the batches, so nobody knows which were trained; pass shuffle=False")
        end = int(self._plan.offsets[self._num_trained * self.sampler.world_size])
        return {**self.sampler.start_of(self.sampler.epoch), "position": self._start + end}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken; give ``fit`` its epoch as ``initial_epoch``."""
        self.sampler.load_state_dict(state)
        self._plan, self._is_open, self._num_trained = self.sampler.plan, False, 0


def _most_batches(sampler: BatchSampler) -> int:
    """Return a number of batches that no epoch exceeds, or hardly ever."""
    start = sampler.state_dict()
    epoch = int(start["epoch"])
    counts = []
    is_constant = isinstance(sampler.settings.grouping, _CONSTANT)
    for number in range(epoch, epoch + (1 if is_constant else _NUM_PLANNED)):
        sampler.load_state_dict(sampler.start_of(number))
        counts.append(len(sampler))
    sampler.load_state_dict(start)
    return counts[0] if is_constant else math.ceil(max(counts) * (1 + _MARGIN)) + 1


def to_tf_data(
    sampler: BatchSampler | ResizableBatchSampler,
    examples: Any,
    *,
    collate: Collate | None = None,
    endless: bool | None = None,
) -> Any:
    """Return the batches of a sampler as a ``tf.data.Dataset``.

    With ``Buckets`` lengths are static: as many shapes as buckets, and one more for a last batch that is short. A
    dataset of equally long epochs gives one epoch per pass. Others, and those of a ``ResizableBatchSampler``, are
    endless: epoch follows epoch, nothing is lost between them, and ``fit`` needs ``steps_per_epoch``.

    Batches are formed when they are asked for, so a new batch size applies to the very next one. With ``.prefetch``,
    give ``fit`` a ``BatchSizeCallback(sampler)``, which counts what was trained.

    Args:
        sampler: decides the batches.
        examples: has one example per length, by index.
        collate: ``collate(examples, lengths)`` makes a batch; None is ``pad_collate``. ``lengths`` are planned,
            or None with a ``ResizableBatchSampler``, where batches are as long as their longest example.
        endless: None decides by the sampler.
    """
    tf = require("tensorflow", extra=None)
    is_constant = isinstance(sampler, BatchSampler) and isinstance(sampler.settings.grouping, _CONSTANT)
    if endless is False and not is_constant:
        raise ArgumentError(
            "epochs of this sampler differ in their number of batches, and Keras would hold all of them to the first; "
            "leave endless out and give fit steps_per_epoch, or use grouping=Buckets(count)"
        )
    feed = Feed(
        sampler, BatchMaker(sampler, examples, collate), is_endless=not is_constant if endless is None else endless
    )
    FEEDS[sampler] = feed
    spec = keras.tree.map_structure(lambda *leaves: _spec(tf, leaves), *feed.samples())
    dataset = tf.data.Dataset.from_generator(lambda: iter(feed), output_signature=spec)
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False  # a batch is formed when it is asked for
    options.autotune.enabled = False  # there is nothing to tune, and the end of a pass would wait for the tuner
    dataset = dataset.with_options(options)
    num = tf.data.INFINITE_CARDINALITY if feed.is_endless else len(sampler)
    return dataset.apply(tf.data.experimental.assert_cardinality(num))


def _spec(tf: Any, leaves: Sequence[Any]) -> Any:
    arrays = [np.asarray(leaf) for leaf in leaves]
    axes = zip(*(array.shape[1:] for array in arrays), strict=True)
    return tf.TensorSpec([None, *(sizes[0] if len(set(sizes)) == 1 else None for sizes in axes)], arrays[0].dtype)
