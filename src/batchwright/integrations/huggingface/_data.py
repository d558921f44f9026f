"""The training data of an adaptive trainer: its loader, the length of its epochs, and its place in them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, final

import torch
from torch.utils.data import DataLoader, Dataset

from ..._lengths import as_lengths, pad_up
from ..._types import IntArray
from ...errors import LengthsError
from ...plan.budget import MaxItems
from ...plan.grouping.sorting import WindowSort
from ...plan.sampler.planned import BatchSampler
from ...plan.sampler.resizable import ResizableBatchSampler
from ...step.oom import free_memory, is_out_of_memory
from .._devices import Devices
from .._failures import raise_together
from .._ranked import loader_options
from ._batches import BatchSource, PlannedBatches, ResizableBatches
from ._graphs import TrainerGraphs
from ._lengths import LengthCache, is_flat, pad_multiple_of
from ._settings import Settings

logger = logging.getLogger(__name__)

# A batch should mix several groups of similar lengths. Smaller groups than this hardly save padding.
_LEAST_GROUP = 8


@final
class TrainingData:
    """Makes the loader of a training, and tells the trainer how long each epoch is.

    Args:
        settings: what the user asked for.
        lengths: of the data sets measured so far.
        graphs: may need batches of planned shapes.

    Attributes:
        batches: what the loader draws from, None when no training runs.
    """

    def __init__(self, settings: Settings, lengths: LengthCache, graphs: TrainerGraphs) -> None:
        self.batches: BatchSource | None = None
        self._settings = settings
        self._lengths = lengths
        self._graphs = graphs

    def loader(
        self, base: DataLoader[Any], dataset: Any, *, collator: Any, model: Any, devices: Devices
    ) -> DataLoader[Any]:
        """Return a loader with our batches, and all other options of the trainer's own loader.

        Args:
            base: the trainer's own loader.
            dataset: what is trained on, before columns are removed.
            collator: may pad to a multiple.
            model: tells whether labels have lengths of their own.
            devices: the ranks that share the data.
        """
        args, given = devices.args, self._settings.lengths
        lengths = self._lengths.of(dataset, args, model, collator) if given is None else as_lengths(given)
        if len(lengths) != len(dataset):
            raise LengthsError(f"lengths must give one row per example, {len(dataset)}, got {len(lengths)}")
        seed = int(args.seed if args.data_seed is None else args.data_seed)
        options = {
            "shuffle": getattr(args, "train_sampling_strategy", "random") != "sequential",
            "seed": seed,
            "rank": devices.rank,
            "world_size": devices.world_size,
        }
        make = self._planned if self._settings.controller is None else self._resizable
        self.batches = make(lengths, args, pad_multiple_of(collator), options)
        self.batches.is_flat = is_flat(collator)
        self.batches.num_tokens = self._lengths.tokens_of(dataset) if given is None else None
        collate = base.collate_fn
        if isinstance(self.batches, PlannedBatches) and self._graphs.is_wanted:
            collate = self._graphs.catalogue(self.batches.sampler, collate, collator, base.dataset)
            self.batches.has_planned_shapes = self._graphs.is_wanted
        return TrainLoader(base, self.batches, seed=seed, collate=collate)

    def _planned(self, lengths: IntArray, args: Any, multiple: int, options: dict[str, Any]) -> BatchSource:
        settings = self._settings
        options |= {"pad_multiple_of": multiple, "drop_last": args.dataloader_drop_last, **settings.plan_options}
        assert settings.budget is not None
        sampler = BatchSampler(lengths, settings.budget, grouping=settings.grouping or WindowSort(), **options)
        return PlannedBatches(sampler, lengths, options["pad_multiple_of"])

    def _resizable(self, lengths: IntArray, args: Any, multiple: int, options: dict[str, Any]) -> BatchSource:
        settings = self._settings
        budget = MaxItems(args.per_device_train_batch_size) if settings.budget is None else settings.budget
        group = MaxItems(max(_LEAST_GROUP, getattr(settings.controller, "min_size", 1)))
        sampler = ResizableBatchSampler(
            len(lengths),
            settings.controller,
            lengths=pad_up(lengths, multiple),
            budget=budget & group,
            curriculum=settings.curriculum,
            **options,
        )
        return ResizableBatches(
            sampler,
            lengths,
            multiple,
            budget=budget,
            noise_every=settings.measure_noise,
            noise_first=settings.noise_first,
            curriculum=settings.curriculum,
        )

    def training_values(self, values: tuple[Any, ...], args: Any) -> tuple[Any, ...]:
        """Return the trainer's numbers of epochs, steps and examples, with the right number of updates."""
        assert self.batches is not None
        if args.max_steps > 0:
            return (sys.maxsize, *values[1:])  # as many epochs as it takes, as for data of unknown length
        if self._settings.is_auto:
            # The schedule follows the examples, at any size.
            assert isinstance(self.batches, ResizableBatches)
            return (*values[:-1], self.batches.num_updates(args.num_train_epochs, size=self._settings.base_size))
        num = self.batches.num_updates(args.num_train_epochs, args.gradient_accumulation_steps)
        if self._settings.controller is not None and args.process_index == 0:
            logger.warning(
                "The controller decides how many updates %s epochs have. The learning rate is scheduled over %d "
                "updates, which is right if the size stays %d; set max_steps for a schedule that ends with training.",
                args.num_train_epochs,
                num,
                self._settings.controller.size,
            )
        return (*values[:-1], num)

    def begin_at(self, num_updates: int) -> None:
        """Begin or continue a training after so many updates."""
        if isinstance(self.batches, ResizableBatches):
            self.batches.num_updates_before = num_updates

    def begin_epoch(self, arguments: dict[str, Any], accumulation: int) -> None:
        """Go to an epoch, and put its length into the arguments of the trainer's ``_run_epoch``."""
        assert self.batches is not None
        left = self.batches.begin_epoch(arguments["epoch"])
        arguments |= {"steps_in_epoch": left, "num_update_steps_per_epoch": -(-left // accumulation)}


@final
class TrainLoader(DataLoader[Any]):
    """A trainer's loader with the items of a source; a loop runs one epoch, or what is left of it.

    Worker processes are seeded from the seed and the epoch, not from the global random state: a run that begins in the
    middle of an epoch must draw as many random numbers as a run without a break.

    Args:
        base: the trainer's own loader.
        batches: what is given out instead.
        seed: of the workers.
        collate: makes a batch of examples; None takes that of the trainer's own loader.
    """

    def __init__(
        self, base: Any, batches: BatchSource, *, seed: int, collate: Callable[[list[Any]], Any] | None = None
    ) -> None:
        self.batches = batches
        self._seed = seed
        dataset, options = base.dataset, loader_options(base)
        options["collate_fn"] = TwiceCollated(base.collate_fn if collate is None else collate)
        if isinstance(batches, ResizableBatches):
            dataset, options["collate_fn"] = ExampleLists(dataset), CollateParts(options["collate_fn"])
        super().__init__(dataset, batch_sampler=batches, generator=torch.Generator(), **options)

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch."""
        self.batches.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of items in the epoch; with a controller, the number if the size stays as it is."""
        if isinstance(self.batches, ResizableBatches):
            return self.batches.num_updates(1)
        return self.batches.begin_epoch(self.batches.epoch)

    def __iter__(self) -> Any:
        return self.batches.track(self._items())

    def _items(self) -> Iterator[Any]:
        self.generator.manual_seed(self._seed + 1_000_003 * self.batches.epoch)
        yield from super().__iter__()


@final
class ExampleLists(Dataset[list[Any]]):
    """A data set that is asked for several examples at once, those of a micro-batch.

    >>> ExampleLists(["a", "b", "c"])[[2, 0]]
    ['c', 'a']
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, indices: list[int]) -> list[Any]:
        fetch = getattr(self.dataset, "__getitems__", None)
        return list(fetch(indices)) if callable(fetch) else [self.dataset[index] for index in indices]


@final
@dataclass(frozen=True)
class CollateParts:
    """Collate every micro-batch of an item by itself.

    >>> CollateParts(sum)([[1, 2], [3]])
    [3, 3]
    """

    collate: Callable[[list[Any]], Any]

    def __call__(self, parts: list[list[Any]]) -> list[Any]:
        """Return one batch per part."""
        return [self.collate(part) for part in parts]


@final
@dataclass(frozen=True)
class TwiceCollated:
    """Collate once more if memory runs out: garbage may have filled it. A second failure is raised; no example is lost.

    >>> TwiceCollated(sum)([1, 2])
    3
    """

    collate: Callable[[list[Any]], Any]

    def __call__(self, examples: list[Any]) -> Any:
        """Return the batch of some examples."""
        try:
            return self.collate(examples)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        free_memory([])
        return self.collate(examples)


def fetch_together(loader: Iterator[Any], num: int, args: Any) -> list[Any]:
    """Return the next items of a loader; if it fails on one rank, all ranks raise. A collective.

    Args:
        loader: of this rank.
        num: of items; at the end of an epoch there are fewer.
        args: the ``TrainingArguments``.
    """
    items, failure = [], None
    try:
        items = list(islice(loader, num))
    except Exception as error:
        failure = error
    raise_together(failure, args.device, world_size=args.world_size)
    return items


def micro_batches_of(items: list[Any]) -> list[Any]:
    """Return the micro-batches of items from the loader: an item is one micro-batch, or a list of them.

    >>> micro_batches_of([{"x": 1}, [{"x": 2}, {"x": 3}]])
    [{'x': 1}, {'x': 2}, {'x': 3}]
    """
    return [batch for item in items for batch in (item if isinstance(item, list) else [item])]
