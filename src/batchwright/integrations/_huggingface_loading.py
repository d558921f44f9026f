"""The data of an adaptive trainer: its loader, the length of its epochs, and its place in a checkpoint."""

from __future__ import annotations

import inspect
import logging
import sys
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, SequentialSampler

from .._lengths import as_lengths, pad_up
from .._types import IntArray
from ..errors import LengthsError, StateMismatchError
from ..plan.budget import MaxItems
from ..plan.grouping.sorting import WindowSort
from ..plan.sampler.planned import BatchSampler
from ..plan.sampler.resizable import ResizableBatchSampler
from ..size.noise import NoiseAverage
from ._huggingface_course import Course, Noise
from ._huggingface_feed import Feed, PlannedFeed, ResizableFeed
from ._huggingface_lengths import measure_examples
from ._huggingface_loader import TrainLoader, check_dataset
from ._huggingface_settings import parallel_size
from ._huggingface_stepping import SteppingMixin

logger = logging.getLogger(__name__)

STATE_NAME = "batchwright"
STATE_VERSION = 1
# A batch should mix several groups of similar lengths; groups of fewer examples pad no less to speak of.
_LEAST_GROUP = 8
# Lengths of so many data sets are kept: those for training and evaluation.
_MOST_KEPT = 8


class LoadingMixin(SteppingMixin):
    """Feeds the trainer, tells it how long each epoch is, and continues in the middle of one."""

    state: Any
    train_dataset: Any
    data_collator: Any

    _kept_lengths: dict[int, tuple[Any, IntArray]]

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the trainer's own loader with planned batches of this rank."""
        check_dataset(self.train_dataset)
        base = super().get_train_dataloader()  # type: ignore[misc]
        given = self._settings.lengths
        lengths = self._lengths_of(self.train_dataset) if given is None else as_lengths(given)
        if len(lengths) != len(self.train_dataset):
            raise LengthsError(f"lengths must give one row an example, {len(self.train_dataset)}, got {len(lengths)}")
        self._feed = self._make_feed(lengths)
        return TrainLoader(base, self._feed, seed=self._seed)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return SequentialSampler(self.train_dataset)  # of the loader that is replaced; it costs nothing

    def _make_feed(self, lengths: IntArray) -> Feed:
        settings, args, multiple = self._settings, self.args, self._pad_multiple_of
        rank, world_size = self._rank
        options: dict[str, Any] = {
            "shuffle": getattr(args, "train_sampling_strategy", "random") != "sequential",
            "seed": self._seed,
            "rank": rank,
            "world_size": world_size,
        }
        if settings.controller is None:
            options |= {"pad_multiple_of": multiple, "drop_last": args.dataloader_drop_last, **settings.plan_options}
            assert settings.budget is not None
            planned = BatchSampler(lengths, settings.budget, grouping=settings.grouping or WindowSort(), **options)
            return PlannedFeed(planned, lengths, options["pad_multiple_of"])
        budget = settings.micro_budget(args)
        group = MaxItems(max(_LEAST_GROUP, getattr(settings.controller, "min_size", 1)))
        sampler = ResizableBatchSampler(
            len(lengths), settings.controller, lengths=pad_up(lengths, multiple), budget=budget & group, **options
        )
        return ResizableFeed(sampler, lengths, multiple, budget=budget, is_random=settings.measure_noise)

    def set_initial_training_values(self, args: Any, dataloader: Any, *rest: Any) -> tuple[Any, ...]:
        """Return the trainer's numbers of epochs, steps and examples; epochs may have unequal numbers of steps."""
        values = super().set_initial_training_values(args, dataloader, *rest)  # type: ignore[misc]
        if not isinstance(dataloader, TrainLoader):
            return tuple(values)
        if args.max_steps > 0:
            return (sys.maxsize, *values[1:])  # as many epochs as it takes, as with data of unknown length
        num = dataloader.feed.num_updates(args.num_train_epochs, args.gradient_accumulation_steps)
        if self._settings.controller is not None and args.process_index == 0:
            logger.warning(
                "The controller decides how many updates %s epochs have. The learning rate is scheduled over %d, as "
                "many as there are if the size stays %d; set max_steps for a schedule that ends with training.",
                args.num_train_epochs,
                num,
                self._settings.controller.size,
            )
        return (*values[:-1], num)

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        epochs_trained, num_skipped = super()._init_training_state(*args, **kwargs)  # type: ignore[misc]
        if self._feed is None:
            return epochs_trained, num_skipped
        self._course = Course()
        if self._noise is not None:
            self._noise.close()
        self._noise = Noise(self.model) if self._settings.measure_noise else None
        if self.state.global_step == 0:
            return epochs_trained, num_skipped
        # The place is ours alone: what the trainer would skip is skipped already.
        return self._restore(self._feed, epochs_trained), 0

    def _restore(self, feed: Feed, epochs_trained: int) -> int:
        saved = self.state.stateful_callbacks.get(STATE_NAME)
        if saved is None or saved.get("version") != STATE_VERSION:
            if self.args.ignore_data_skip:
                return epochs_trained
            raise StateMismatchError(
                "the checkpoint does not say where its epoch stood, as one of an adaptive trainer does; set "
                "ignore_data_skip=True to begin the epoch again"
            )
        if self.args.ignore_data_skip:
            feed.set_epoch(int(saved["feed"]["sampler"]["epoch"]))
        else:
            feed.go_to(saved["feed"])
        self._course.load_state_dict(saved["course"])
        if self._settings.controller is not None and saved["controller"] is not None:
            self._settings.controller.load_state_dict(saved["controller"])
        if self._noise is not None and saved["noise"] is not None:
            self._noise.average = NoiseAverage(**saved["noise"])
        return feed.epoch

    def _run_epoch(self, *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(super()._run_epoch).bind(*args, **kwargs)  # type: ignore[misc]
        if isinstance(call.arguments["train_dataloader"], TrainLoader):
            left = call.arguments["train_dataloader"].feed.begin(call.arguments["epoch"])
            call.arguments["steps_in_epoch"] = left
            call.arguments["num_update_steps_per_epoch"] = -(-left // self.args.gradient_accumulation_steps)
        return super()._run_epoch(*call.args, **call.kwargs)  # type: ignore[misc]

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        if self._feed is not None:
            controller = self._settings.controller
            self.state.stateful_callbacks[STATE_NAME] = {
                "version": STATE_VERSION,
                "feed": self._feed.place(),
                "course": self._course.state_dict(),
                "controller": None if controller is None else controller.state_dict(),
                "noise": None if self._noise is None else self._noise.average.to_state(),
            }
        return super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]

    @property
    def _seed(self) -> int:
        seed = self.args.data_seed
        return int(self.args.seed if seed is None else seed)

    @property
    def _rank(self) -> tuple[int, int]:
        """Return which share of the data is ours, and how many shares there are."""
        group = parallel_size(self)
        return self.args.process_index // group, max(1, self.args.world_size // group)

    @property
    def _pad_multiple_of(self) -> int:
        return int(getattr(self.data_collator, "pad_to_multiple_of", None) or 1)

    def _lengths_of(self, dataset: Any) -> IntArray:
        """Return the lengths of a data set, measured once."""
        kept = self._kept_lengths.get(id(dataset))
        if kept is not None:
            return kept[1]
        lengths = as_lengths(
            measure_examples(
                dataset,
                length_column=self.args.length_column_name,
                has_decoder=bool(getattr(getattr(self.model, "config", None), "is_encoder_decoder", False)),
                show_progress=not self.args.disable_tqdm and self.args.process_index == 0,
            )
        )
        if len(self._kept_lengths) == _MOST_KEPT:
            self._kept_lengths.pop(next(iter(self._kept_lengths)))
        self._kept_lengths[id(dataset)] = dataset, lengths  # kept with it, so that its id is not given out again
        return np.asarray(lengths)
