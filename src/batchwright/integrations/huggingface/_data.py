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
from transformers import default_data_collator

from ..._lengths import as_lengths, pad_up
from ..._types import IntArray
from ...errors import ArgumentError, BudgetError, LengthsError
from ...plan.budget import Budget, MaxItems
from ...plan.collating import Rows
from ...plan.grouping.sorting import WindowSort
from ...plan.sampler.planned import BatchSampler
from ...plan.sampler.resizable import ResizableBatchSampler
from ...plan.sampler.stream import AsGiven
from ...step.calibration.found import FoundBudget
from ...step.oom import free_memory, is_out_of_memory
from .._devices import Devices
from .._failures import raise_together
from .._ranked import is_stream, loader_options
from ._batches import BatchSource, PlannedBatches, ResizableBatches
from ._drawing import DECIDES, SeededData, SeededItems, updates_with_saved
from ._graphs import TrainerGraphs
from ._lengths import LengthCache, has_decoder, is_flat, pad_multiple_of, tell_label_axis
from ._packing import Packing, check_collator, choose_packing
from ._settings import STREAM_OPTIONS, Settings
from ._streams import StreamBatches, make_batches

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
        self._num_epochs: int | None = None  # that max_steps is expected to take
        self._settings = settings
        self._lengths = lengths
        self._graphs = graphs
        self._packing: Packing | None = None

    def loader(
        self,
        base: DataLoader[Any],
        dataset: Any,
        *,
        collator: Any,
        model: Any,
        devices: Devices,
        has_own_loss: bool = True,
    ) -> DataLoader[Any]:
        """Return a loader with our batches, and all other options of the trainer's own loader.

        Args:
            base: the trainer's own loader.
            dataset: what is trained on, before columns are removed.
            collator: may pad to a multiple.
            model: tells whether labels have lengths of their own.
            devices: the ranks that share the data.
            has_own_loss: the trainer takes the loss of the model.
        """
        args = devices.args
        seed = int(args.seed if args.data_seed is None else args.data_seed)
        options = {
            "shuffle": getattr(args, "train_sampling_strategy", "random") != "sequential",
            "seed": seed,
            "rank": devices.rank,
            "world_size": devices.world_size,
        }
        multiple = pad_multiple_of(collator)
        if is_stream(dataset):
            shared = {"devices": devices, "model": model, "pad_multiple_of": multiple}
            self.batches = make_batches(dataset, self._settings, options=options, **shared)
            tell_label_axis(base, 1 + has_decoder(model))
            return TrainLoader(base, self.batches, seed=seed)
        lengths = self.lengths(dataset, args, model, collator)
        collator = tell_label_axis(base, lengths.shape[1]) or collator
        collate = self._pack(base, lengths, collator, model, devices, has_own_loss=has_own_loss)
        make = self._planned if self._settings.controller is None else self._resizable
        self.batches = make(lengths, args, multiple, options)
        self.batches.is_flat = is_flat(collator)
        self.batches.num_tokens = self._lengths.tokens_of(dataset) if self._settings.lengths is None else None
        if isinstance(self.batches, PlannedBatches) and self._graphs.is_wanted:
            collate = self._graphs.catalogue(self.batches.sampler, collate, collator, base.dataset)
            self.batches.has_planned_shapes = self._graphs.is_wanted
        return TrainLoader(base, self.batches, seed=seed, collate=collate)

    @property
    def accumulation(self) -> int | None:
        """Return how many planned batches an item of a stream holds; None if the trainer accumulates items itself."""
        return self.batches.accumulation if isinstance(self.batches, StreamBatches) else None

    @property
    def has_ended(self) -> bool:
        """Return whether the pass over a stream is over, and the trainer goes on to ask for items."""
        return isinstance(self.batches, StreamBatches) and self.batches.has_ended

    def lengths(self, dataset: Any, args: Any, model: Any, collator: Any = None) -> IntArray:
        """Return the lengths of a data set, ``(N, axes)``."""
        given = self._settings.lengths
        lengths = self._lengths.of(dataset, args, model, collator) if given is None else as_lengths(given)
        if len(lengths) != len(dataset):
            raise LengthsError(f"lengths must give one row per example, {len(dataset)}, got {len(lengths)}")
        return lengths

    def _pack(
        self, base: DataLoader[Any], lengths: IntArray, collator: Any, model: Any, devices: Devices, **known: bool
    ) -> Callable[[list[Any]], Any]:
        """Settle how the rows of ``Packed`` are collated, and return what collates a batch."""
        grouping = self._settings.grouping
        is_packed = grouping is not None and grouping.row_capacity is not None
        check_collator(collator, is_packed=is_packed)
        if grouping is None or not is_packed:
            return base.collate_fn
        is_said = self._packing is not None
        self.release()
        self._packing = choose_packing(
            grouping,
            dataset=base.dataset,
            lengths=lengths,
            collate=base.collate_fn,
            collator=collator,
            model=model,
            devices=devices,
            is_said=is_said,
            **known,
        )
        return self._packing.collate

    def release(self) -> None:
        """Give the model its own attention back, at the end of a training."""
        if self._packing is not None:
            self._packing.close()

    def _planned(self, lengths: IntArray, args: Any, multiple: int, options: dict[str, Any]) -> BatchSource:
        settings = self._settings
        for name in [name for name in STREAM_OPTIONS if name in settings.plan_options]:
            raise ArgumentError(f"plan_options={{{name!r}: …}} belongs to streams, this data set has a length")
        options |= {"pad_multiple_of": multiple, "drop_last": args.dataloader_drop_last, **settings.plan_options}
        assert isinstance(settings.budget, Budget)
        packing = self._packing
        grouping = settings.grouping or WindowSort() if packing is None else packing.grouping
        try:
            sampler = BatchSampler(lengths, settings.budget, grouping=grouping, **options)
        except BudgetError as error:
            raise BudgetError(f"{error}; a trainer takes it as plan_options={{'oversize': …}}") from None
        if len(lengths) and not len(sampler):
            raise ArgumentError(_why_empty(len(lengths), drops_last=args.dataloader_drop_last))
        batches = PlannedBatches(sampler, lengths, options["pad_multiple_of"])
        batches.packing = packing if grouping.row_capacity is not None else None
        if isinstance(settings.budget, FoundBudget):  # now, before a place in an epoch is restored
            batches.planned_size = batches.mean_size(args.gradient_accumulation_steps)
        return batches

    def _resizable(self, lengths: IntArray, args: Any, multiple: int, options: dict[str, Any]) -> BatchSource:
        settings = self._settings
        budget = MaxItems(args.per_device_train_batch_size) if settings.budget is None else settings.budget
        assert isinstance(budget, Budget)
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

    def training_values(
        self, values: tuple[Any, ...], args: Any, loader: Any, checkpoint: str | None = None
    ) -> tuple[Any, ...]:
        """Return the trainer's numbers of epochs, steps and examples, with the right number of updates."""
        if not isinstance(loader, TrainLoader):
            raise ArgumentError(f"a get_train_dataloader above the adaptive one {DECIDES}")
        assert self.batches is not None
        self._num_epochs = None
        if args.max_steps > 0:
            self._num_epochs = None if isinstance(self.batches, StreamBatches) else values[0]
            return (sys.maxsize, *values[1:])  # as many epochs as it takes, as for data of unknown length
        if self._settings.is_auto:
            # The schedule follows the examples, at any size.
            assert isinstance(self.batches, ResizableBatches)
            return (*values[:-1], self.batches.num_updates(args.num_train_epochs, size=self._settings.base_size))
        epochs, accumulation = args.num_train_epochs, args.gradient_accumulation_steps
        num = self.batches.num_updates(epochs, accumulation)
        if isinstance(self.batches, PlannedBatches) and not args.ignore_data_skip:
            given = {"num_epochs": epochs, "accumulation": accumulation}
            num = updates_with_saved(checkpoint, self.batches.sampler, num, **given)
        if self._settings.controller is not None and args.process_index == 0:
            logger.warning(
                "The controller decides how many updates %s epochs have. The learning rate is scheduled over %d "
                "updates, which is right if the size stays %d; set max_steps for a schedule that ends with training.",
                args.num_train_epochs,
                num,
                self._settings.controller.size,
            )
        return (*values[:-1], num)

    def begin(self, state: Any) -> None:
        """Begin or continue a training, and tell callbacks by its state how many epochs to expect."""
        if isinstance(self.batches, ResizableBatches):
            self.batches.num_updates_before = state.global_step
        if self._num_epochs is not None:
            state.num_train_epochs = self._num_epochs

    def begin_epoch(self, arguments: dict[str, Any], accumulation: int) -> None:
        """Go to an epoch, and put its length into the arguments of the trainer's ``_run_epoch``."""
        assert self.batches is not None
        left = self.batches.begin_epoch(arguments["epoch"])
        arguments |= {"steps_in_epoch": left, "num_update_steps_per_epoch": -(-left // accumulation)}


def _why_empty(num_examples: int, *, drops_last: bool) -> str:
    """Return the text of an error about data of which no batch is planned: an update of nothing is no training."""
    if drops_last:
        return (
            f"no batch is left of {num_examples} examples, as dataloader_drop_last leaves out those that end only "
            "because the data end; leave it out, or lower the budget"
        )
    return f"no batch is planned of {num_examples} examples; see plan_options, such as oversize='drop'"


@final
class TrainLoader(DataLoader[Any]):
    """A trainer's loader with the items of a source; a loop runs one epoch, or what is left of it.

    Worker processes are seeded from the seed and the epoch, not from the global random state, and in them every batch
    by its place: a run that begins in the middle of an epoch draws the random numbers of a run without a break.

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
        if isinstance(batches, PlannedBatches) and batches.packing is not None and batches.packing.takes_rows:
            dataset = Rows(dataset)
        if isinstance(batches, ResizableBatches):
            dataset, options["collate_fn"] = ExampleLists(dataset), CollateParts(options["collate_fn"])
        elif isinstance(batches, StreamBatches):
            dataset, options["collate_fn"] = AsGiven(), CollateParts(options["collate_fn"])
        items: Any = batches
        if options["num_workers"] > 0:
            dataset, items = SeededData(dataset), SeededItems(batches, seed)
        super().__init__(dataset, batch_sampler=items, generator=torch.Generator(), **options)

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch."""
        self.batches.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of items in the epoch; with a controller, the number if the size stays as it is."""
        if isinstance(self.batches, ResizableBatches):
            return self.batches.num_updates(1)
        if isinstance(self.batches, StreamBatches):
            raise TypeError("the number of batches of a stream is not known before it is read")
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
            if isinstance(error, ValueError) and _only_stacks(self.collate):
                raise ArgumentError(_STACKS) from error
            if not is_out_of_memory(error):
                raise
        free_memory([])
        return self.collate(examples)


_STACKS = (
    "without a data_collator and a tokenizer, transformers stacks the examples of a batch, and these differ in length; "
    "pass data_collator=PadCollator() of batchwright.step, or a collator of transformers that pads"
)


def _only_stacks(collate: Any) -> bool:
    """Say whether a collator, perhaps inside the trainer's own, is what transformers takes where none was given."""
    return getattr(collate, "data_collator", collate) is default_data_collator


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
