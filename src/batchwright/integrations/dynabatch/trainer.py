"""Hugging Face trainers on a ``DynaBatchSampler``: exact gradients from uneven micro-batches, retries, ranks, resuming.

Nothing here imports transformers: the mixin uses whatever trainer class it is mixed into.
"""

from __future__ import annotations

import copy
import functools
import math
import warnings
from collections.abc import Sized
from typing import Any, Literal, TypeAlias, final, get_args

import torch
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler

from ..._checks import as_whole, check_choice
from ...errors import ArgumentError, LengthsError
from ...size.learning_rate import Rule, get_rule
from ...step.huggingface import Novelty
from ...step.losses import needs_whole_batch
from ...step.oom import drop_gradients
from .._devices import Devices, is_divided, on_its_own, one_process, undivided
from .._failures import raise_together
from .._ranked import check_no_stream, loader_options
from .._safe_steps import SafeSteps, foreign_parameters
from .._trainer_step import WHOLE, Weighing, as_logged, check_rows, find_weighing, weighted, zero_of
from .._trial_loss import takes_own_loss
from .sampler import DynaBatchSampler

OOMFallbackStrategy: TypeAlias = Literal["split_retry", "skip", None]


class DynabatchTrainerMixin:
    """Train on the batches of a ``DynaBatchSampler``: ``class MyTrainer(DynabatchTrainerMixin, Seq2SeqTrainer): ...``.

    An update uses the gradient of the mean over all labels of its micro-batches, on all ranks, whatever their sizes. A
    loss that divides by ``num_items_in_batch`` gives this by itself; if the loss ignores that number, each
    micro-batch is weighted by its labels. The first micro-batch shows which of the two holds. A loss that is not a mean
    over labels is weighted by examples, with a warning, and never split. A loss that ``step.losses.whole_batch`` marks
    runs in updates of one micro-batch. FSDP, DeepSpeed, ``DataParallel`` and tensor parallelism keep the trainer's own
    rule.

    The ranks share the batches, and resuming in the middle of an epoch continues with the very next batch.

    Args:
        *args: arguments of the trainer.
        dynabatch_sampler: the batches of ``train_dataset``. A sampler without a ``task`` is planned for training here:
            ``dynabatch_sampler.for_training()``.
        auto_scale_lr: scale the learning rate once, by ``scale_lr_for_dynabatch``.
        batch_size_key: the name of the input whose length is the number of examples.
        oom_fallback: ``"split_retry"`` repeats a micro-batch that runs out of memory in smaller pieces, exactly;
            ``"skip"`` leaves it out of the gradient, though its labels still count in the mean; None raises. Each
            failure is logged as ``oom_failed``. With several micro-batches per update it needs memory for a second
            gradient; under DDP, gradients are reduced after the backward pass, not during it.
        oom_min_batch_size: the largest number of examples in a piece at the first retry, halved if it does not fit;
            None takes the sampler's ``min_batch_size``. A single example that does not fit is left out, with a warning;
            a micro-batch that cannot be split raises ``DoesNotFitError``.
        **kwargs: arguments of the trainer.
    """

    args: Any
    accelerator: Any
    model: Any
    optimizer: Any
    train_dataset: Any
    compute_loss_func: Any
    current_gradient_accumulation_steps: int

    def __init__(
        self,
        *args: Any,
        dynabatch_sampler: Any,
        auto_scale_lr: bool = False,
        batch_size_key: str = "input_ids",
        oom_fallback: OOMFallbackStrategy = None,
        oom_min_batch_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        check_choice("oom_fallback", oom_fallback, get_args(OOMFallbackStrategy))
        _check_sampler(dynabatch_sampler)
        self._dynabatch_sampler = dynabatch_sampler
        self._batch_size_key = batch_size_key
        self._oom_fallback = oom_fallback
        least = dynabatch_sampler.min_batch_size if oom_min_batch_size is None else oom_min_batch_size
        self._oom_min_batch_size = as_whole("oom_min_batch_size", least, least=1)
        self._oom_failed_count = 0
        self._weighing: Weighing | None = None
        self._novelty = Novelty()
        self._told = ""  # what was warned of
        self._window_weight: Tensor | None = None
        self._is_weighting = False
        super().__init__(*args, **kwargs)
        self._safe_steps = self._make_safe_steps()
        if auto_scale_lr:
            if not isinstance(self.train_dataset, Sized):
                raise ArgumentError("auto_scale_lr=True needs a train_dataset with a length")
            self.args = scale_lr_for_dynabatch(self.args, dynabatch_sampler, len(self.train_dataset))

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return the trainer's own loader with the batches of the sampler, divided over the ranks."""
        _check_dataset(self.train_dataset, self._dynabatch_sampler)
        if getattr(self.args, "train_sampling_strategy", "random") != "random":
            warnings.warn("train_sampling_strategy has no effect: dynabatch_sampler chooses the batches", stacklevel=2)
        base = super().get_train_dataloader()  # type: ignore[misc]
        devices = Devices.of(self)
        sampler = _trained_on(
            self._dynabatch_sampler, devices.rank, devices.world_size, drop_last=self.args.dataloader_drop_last
        )
        return _EpochLoader(base.dataset, batch_sampler=sampler, **loader_options(base))

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return SequentialSampler(self.train_dataset)  # for the loader that is replaced: the cheapest one

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """Return the micro-batches of an update; their total weight is kept."""
        batches, num_items = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        drop_gradients(foreign_parameters(self.model, self.optimizer))
        self._window_weight = self._weigh(batches) if batches and self._can_weigh() else None
        return batches, num_items

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """Return the loss; in training, its share of the mean over the update."""
        if not self._is_weighting:
            return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)  # type: ignore[misc]
        assert self._weighing is not None
        assert self._window_weight is not None
        divides, weight = self._weighing.divides, self._weighing.count(inputs)
        kwargs["num_items_in_batch"] = self._window_weight if divides else None
        if float(weight) == 0:  # runs only for the other ranks, which wait in its backward pass
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)  # type: ignore[misc]
            return (zero_of(loss, outputs), outputs) if return_outputs else zero_of(loss, outputs)
        result = super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)  # type: ignore[misc]
        if divides:
            return result
        loss, *outputs = result if return_outputs else (result,)
        loss = weighted(loss, weight, self._window_weight, Devices.of(self).num_replicas)
        return (loss, *outputs) if return_outputs else loss

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward of a micro-batch, in pieces if memory runs out."""
        # Without the weight of its update a piece would not know its own.
        if self._safe_steps is None or self._window_weight is None:
            return as_logged(self._weighted_step(model, inputs, *args, **kwargs), model)
        assert self._weighing is not None
        loss = self._safe_steps.run(
            model,
            dict(inputs),
            lambda module, part: self._weighted_step(module, part, *args, **kwargs),
            is_last=self.accelerator.sync_gradients,
            cut=self._weighing.cut(dict(inputs)),
            optimizer=self.optimizer,
            has_scaler=self.accelerator.scaler is not None,
        )
        return as_logged(loss, model)

    def _weighted_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self._window_weight is None:
            whole: Tensor = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
            return whole
        assert self._weighing is not None
        is_awaited = self._safe_steps is None and self.args.world_size > 1 and self.accelerator.sync_gradients
        if not is_awaited and float(self._weighing.count(inputs)) == 0:
            return torch.zeros((), device=self.args.device)
        self._is_weighting = True
        try:
            with undivided(self):
                part: Tensor = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
            return part
        finally:
            self._is_weighting = False

    def _can_weigh(self) -> bool:
        return not (is_divided(self) or self.args.n_gpu > 1)

    def _weigh(self, batches: list[Any]) -> Tensor:
        """Return how many labels count in an update, over all ranks unless the trainer is told otherwise."""
        failure = None
        try:
            self._learn(batches)
        except Exception as error:
            failure = error
        raise_together(failure, self.args.device, world_size=self.args.world_size)
        assert self._weighing is not None
        weight = torch.stack([self._weighing.count(batch).cpu() for batch in batches]).sum().to(self.args.device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            weight = self.accelerator.gather(weight).sum()
        return weight.clamp(min=1)

    def _learn(self, batches: list[Any]) -> None:
        """Look at the first micro-batch, unless an earlier one has told what the loss is a mean over."""
        key = self._batch_size_key
        if any(map(needs_whole_batch, (super().compute_loss, self.compute_loss_func, self.model))):  # type: ignore[misc]
            if len(batches) > 1:
                raise ArgumentError(f"an update of {len(batches)} micro-batches is not one whole batch, but {WHOLE}")
            self._weighing = Weighing(None, True, key, refusal=WHOLE)
        if self._weighing is None or not self._weighing.is_settled(batches[0]):
            self._weighing = self._find_weighing(batches[0], key)
        for batch in batches:
            new = None if self._weighing.refusal else self._novelty.notice(batch)
            if new:
                inputs = self._prepare_inputs(dict(batch))  # type: ignore[attr-defined]
                self._weighing = check_rows(
                    self._weighing, self._plain_loss, self.model, inputs, new, is_own=self._uses_own_loss()
                )
        if self._weighing.refusal and len(batches) > 1 and self._weighing.refusal != self._told:
            self._told = self._weighing.refusal
            warnings.warn(f"micro-batches are weighted by their examples: {self._told}", stacklevel=2)

    def _find_weighing(self, batch: Any, key: str) -> Weighing:
        inputs = self._prepare_inputs(dict(batch))  # type: ignore[attr-defined]
        has_labels = isinstance(inputs.get("labels"), Tensor)
        # Without labels the mean is over examples, or the loss is weighted by them with a warning.
        return find_weighing(
            self._plain_loss,
            self.model,
            inputs,
            key=key,
            by_example=not has_labels,
            is_own=self._uses_own_loss(),
        )

    def _uses_own_loss(self) -> bool:
        """Say whether the trainer takes the loss as the model returns it."""
        return takes_own_loss(super().compute_loss, self.compute_loss_func)  # type: ignore[misc]

    def _plain_loss(self, model: Any, inputs: dict[str, Any], num_items: Any) -> Tensor:
        """Return the trainer's loss as for a single process."""
        with one_process(self.args), on_its_own(self):
            loss: Tensor = super().compute_loss(model, inputs, num_items_in_batch=num_items)  # type: ignore[misc]
            return loss

    def _make_safe_steps(self) -> SafeSteps | None:
        if self._oom_fallback is None:
            return None
        if not self._can_weigh():
            raise ArgumentError(
                "oom_fallback needs one process per device with the whole model in it: with FSDP, DeepSpeed, tensor "
                "parallelism or DataParallel one part cannot try again while the others wait for it; leave it out "
                "there, or start one process per device with torchrun"
            )
        return SafeSteps(self._oom_fallback, self._oom_min_batch_size, self._batch_size_key, self._record_oom)

    def _record_oom(self) -> None:
        self._oom_failed_count += 1
        self.log({"oom_failed": self._oom_failed_count})  # type: ignore[attr-defined]


def make_dynabatch_trainer(trainer_cls: type) -> type:
    """Return the class ``Dynabatch<Trainer>`` of a trainer class; every call returns the same one.

    Args:
        trainer_cls: ``Trainer``, ``Seq2SeqTrainer`` or your own class.
    """
    if not isinstance(trainer_cls, type):
        kind = type(trainer_cls).__name__
        raise ArgumentError(f"trainer_cls must be a class such as transformers.Trainer, got {kind}; pass the class")
    return _mixed(trainer_cls)


@functools.cache
def _mixed(trainer_cls: type) -> type:
    return type(f"Dynabatch{trainer_cls.__name__}", (DynabatchTrainerMixin, trainer_cls), {"__module__": __name__})


def scale_lr_for_dynabatch(
    args: Any,
    sampler: Any,
    dataset_size: int,
    baseline_batch_size: int | None = None,
    *,
    rule: str | Rule = "linear",
) -> Any:
    """Return a copy of the training arguments with the learning rate scaled to the larger batches.

    ``lr × updates per epoch at a fixed size / updates per epoch``, both counted with all ranks and all micro-batches of
    an update: the mean batch relative to the fixed one. Gradients are means here, so the rate is scaled only once.

    Args:
        args: ``TrainingArguments``; they stay as they are.
        sampler: the batches to train on; of a ``DynaBatchSampler``, those that a trainer with these arguments takes.
        dataset_size: how many examples the data set has.
        baseline_batch_size: the fixed size per device, None takes ``per_device_train_batch_size``.
        rule: ``"linear"``, ``"sqrt"`` for Adam and its relatives, or a function of (larger, smaller).

    >>> from types import SimpleNamespace
    >>> args = SimpleNamespace(learning_rate=0.1, per_device_train_batch_size=8)
    >>> round(scale_lr_for_dynabatch(args, range(5), 80).learning_rate, 6)  # 10 batches of 8 become 5
    0.2
    """
    size = args.per_device_train_batch_size if baseline_batch_size is None else baseline_batch_size
    size = as_whole("baseline_batch_size", size, least=1)
    world_size, window = getattr(args, "world_size", 1), getattr(args, "gradient_accumulation_steps", 1)
    fixed = -(-as_whole("dataset_size", dataset_size, least=1) // size)
    if isinstance(sampler, DynaBatchSampler):
        steps = len(_trained_on(sampler, 0, world_size, drop_last=getattr(args, "dataloader_drop_last", False)))
    else:
        steps = math.ceil(len(sampler) / world_size)
    factor = get_rule(rule)
    if not callable(factor):
        raise ArgumentError(f"rule must be 'linear', 'sqrt' or a function of (larger, smaller), got {rule!r}")
    scaled = copy.copy(args)
    updates = [max(1, math.ceil(num / window)) for num in (math.ceil(fixed / world_size), steps)]
    scaled.learning_rate = args.learning_rate * factor(*updates)
    return scaled


def _trained_on(sampler: DynaBatchSampler, rank: int, world_size: int, *, drop_last: bool) -> DynaBatchSampler:
    """Return what a trainer iterates over, at its first epoch."""
    mine = sampler.for_training().for_rank(rank, world_size, drop_last=drop_last)
    mine.set_epoch(0)
    return mine


@final
class _EpochLoader(DataLoader[Any]):
    """A loader that the trainer tells which epoch begins, as it does not exhaust the iterator of batches."""

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler."""
        self.batch_sampler.set_epoch(epoch)  # type: ignore[union-attr]


def _check_sampler(sampler: Any) -> None:
    """Refuse what is no sampler of this package, and say how to make one."""
    if isinstance(sampler, DynaBatchSampler):
        return
    kind = type(sampler)
    if kind.__module__.partition(".")[0] == "dynabatch":
        raise ArgumentError(
            f"dynabatch_sampler was made by dynabatch itself ({kind.__module__}.{kind.__name__}), but this trainer is "
            "batchwright's; make it with `from batchwright.integrations.dynabatch import dynabatch_sampler`"
        )
    raise ArgumentError(
        f"dynabatch_sampler must be a DynaBatchSampler, got {kind.__name__}; make one with dynabatch_sampler(...)"
    )


def _check_dataset(dataset: Any, sampler: DynaBatchSampler) -> None:
    """Refuse a stream, and a data set that the sampler was not made for."""
    if dataset is None:
        return  # the trainer complains itself
    check_no_stream("dynabatch_sampler", dataset)
    if len(dataset) != sampler.num_examples:
        raise LengthsError(
            f"train_dataset has {len(dataset)} examples but dynabatch_sampler was made for {sampler.num_examples}; "
            "make the sampler from the texts of the data set to train on"
        )
