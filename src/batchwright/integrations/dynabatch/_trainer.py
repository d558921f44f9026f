"""Hugging Face trainers on a DynaBatchSampler: exact gradients from uneven micro-batches, retries, ranks, resuming."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from typing import Any, Literal, TypeAlias, get_args

import torch
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler

from ..._checks import as_whole
from ...errors import ArgumentError
from .._trainer_step import SafeSteps, Weighing, find_weighing, weighted
from ._learning_rate import scale_lr_for_dynabatch
from ._train_loader import check_dataset, replace_batches

OOMFallbackStrategy: TypeAlias = Literal["split_retry", "skip", None]


class DynabatchTrainerMixin:
    """Train on the batches of a ``DynaBatchSampler``: ``class MyTrainer(DynabatchTrainerMixin, Seq2SeqTrainer): ...``.

    The gradient of an update is that of the mean over all labels of its micro-batches, on all ranks, whatever their
    sizes. Where the loss divides by ``num_items_in_batch``, that does it; where it ignores the number, each micro-batch
    is weighted by its labels. Which holds is found out on the first one. A loss that is no mean over labels is weighted
    by examples, with a warning. Under FSDP, DeepSpeed, ``DataParallel`` and tensor parallelism the trainer's own rule
    holds.

    Ranks share the batches, and resuming in the middle of an epoch continues with the batch after the last.

    Args:
        *args: of the trainer.
        dynabatch_sampler: the batches of ``train_dataset``.
        auto_scale_lr: multiply the learning rate once by ``scale_lr_for_dynabatch``.
        batch_size_key: whose length is the number of examples of a batch.
        oom_fallback: ``"split_retry"`` runs a micro-batch that runs out of memory again in smaller pieces, exactly;
            ``"skip"`` leaves it out, without a trace in the gradient, though its labels still count in the mean; None
            raises. Each failure is logged as ``oom_failed``. With several micro-batches an update it needs room for a
            second gradient; under DDP gradients are reduced after the backward pass, not during it.
        oom_min_batch_size: the most examples of a piece at the first retry, halved if it does not fit; None takes the
            sampler's ``min_batch_size``. An example that does not fit alone is left out, with a warning.
        **kwargs: of the trainer.
    """

    args: Any
    accelerator: Any
    model: Any
    train_dataset: Any
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
        if oom_fallback not in get_args(OOMFallbackStrategy):
            raise ArgumentError(f"oom_fallback must be 'split_retry', 'skip' or None, got {oom_fallback!r}")
        self._dynabatch_sampler = dynabatch_sampler
        self._batch_size_key = batch_size_key
        self._oom_fallback = oom_fallback
        least = getattr(dynabatch_sampler, "min_batch_size", 1) if oom_min_batch_size is None else oom_min_batch_size
        self._oom_min_batch_size = as_whole("oom_min_batch_size", least, least=1)
        self._oom_failed_count = 0
        self._weighing: Weighing | None = None
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
        check_dataset(self.train_dataset, self._dynabatch_sampler)
        if getattr(self.args, "train_sampling_strategy", "random") != "random":
            warnings.warn("train_sampling_strategy has no effect: dynabatch_sampler chooses the batches", stacklevel=2)
        base = super().get_train_dataloader()  # type: ignore[misc]
        group = self._parallel_size()
        sampler = self._dynabatch_sampler.for_rank(
            self.args.process_index // group,
            max(1, self.args.world_size // group),
            drop_last=self.args.dataloader_drop_last,
        )
        sampler.set_epoch(0)
        return replace_batches(base, sampler)

    def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
        return SequentialSampler(self.train_dataset)  # of the loader that is replaced; it costs nothing

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """Return the micro-batches of an update; what they weigh together is kept."""
        batches, num_items = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self._window_weight = self._weigh(batches) if batches and self._can_weigh() else None
        return batches, num_items

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """Return the loss; in training its share of the mean over the update."""
        if not self._is_weighting:
            return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)  # type: ignore[misc]
        assert self._weighing is not None
        assert self._window_weight is not None
        divides, weight = self._weighing.divides, self._weighing.count(inputs)
        kwargs["num_items_in_batch"] = self._window_weight if divides else None
        result = super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)  # type: ignore[misc]
        if divides:
            return result
        replicas = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
        if not return_outputs:
            return weighted(result, weight, self._window_weight, replicas)
        return weighted(result[0], weight, self._window_weight, replicas), result[1]

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward of a micro-batch, in pieces where memory asks for it."""
        # Without the weight of its update a piece would not know its own.
        if self._safe_steps is None or self._window_weight is None:
            return self._weighted_step(model, inputs, *args, **kwargs)
        return self._safe_steps.run(
            model,
            dict(inputs),
            lambda module, part: self._weighted_step(module, part, *args, **kwargs),
            is_last=self.accelerator.sync_gradients,
            has_scaler=self.accelerator.scaler is not None,
        )

    def _weighted_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self._window_weight is None:
            whole: Tensor = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
            return whole
        steps, theirs = self.current_gradient_accumulation_steps, self.accelerator.gradient_accumulation_steps
        # The weights add up to one over the update, so neither the trainer nor (before transformers 5.6) Accelerate
        # must divide once more.
        self.current_gradient_accumulation_steps, self._is_weighting = 1, True
        self.accelerator.gradient_accumulation_steps = 1
        try:
            part: Tensor = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
            return part
        finally:
            self.current_gradient_accumulation_steps, self._is_weighting = steps, False
            self.accelerator.gradient_accumulation_steps = theirs

    def _can_weigh(self) -> bool:
        return not (self._is_sharded() or self.args.n_gpu > 1 or self._parallel_size() > 1)

    def _is_sharded(self) -> bool:
        return bool(getattr(self, "is_fsdp_enabled", False) or getattr(self, "is_deepspeed_enabled", False))

    def _parallel_size(self) -> int:
        """Return how many ranks work on the same batch."""
        return math.prod(max(1, getattr(self, f"get_{kind}_size", int)()) for kind in ("tp", "cp", "sp"))

    def _weigh(self, batches: list[Any]) -> Tensor:
        """Return the labels that count in an update, over all ranks unless the trainer is told otherwise."""
        if self._weighing is None or not self._weighing.is_sure:
            inputs = self._prepare_inputs(dict(batches[0]))  # type: ignore[attr-defined]
            self._weighing = find_weighing(self._plain_loss, self.model, inputs, key=self._batch_size_key)
        weight = torch.stack([self._weighing.count(batch).cpu() for batch in batches]).sum().to(self.args.device)
        if self.args.average_tokens_across_devices and self.args.world_size > 1:
            weight = self.accelerator.gather(weight).sum()
        return weight.clamp(min=1)

    def _plain_loss(self, model: Any, inputs: dict[str, Any], num_items: Any) -> Tensor:
        """Return the trainer's loss as for a single process."""
        with _one_process(self.args):
            loss: Tensor = super().compute_loss(model, inputs, num_items_in_batch=num_items)  # type: ignore[misc]
            return loss

    def _make_safe_steps(self) -> SafeSteps | None:
        if self._oom_fallback is None:
            return None
        if not self._can_weigh():
            raise ArgumentError(
                "oom_fallback needs a process for every device and the whole model in it: with FSDP, DeepSpeed, tensor "
                "parallelism or DataParallel no part can try again while the others wait for it; leave it out there, "
                "or start one process a device with torchrun"
            )
        return SafeSteps(self._oom_fallback, self._oom_min_batch_size, self._batch_size_key, self._record_oom)

    def _record_oom(self) -> None:
        self._oom_failed_count += 1
        self.log({"oom_failed": self._oom_failed_count})  # type: ignore[attr-defined]


@contextmanager
def _one_process(args: Any) -> Iterator[None]:
    """Keep a trainer from multiplying its loss by the number of processes."""
    before = args.average_tokens_across_devices
    args.average_tokens_across_devices = False
    try:
        yield
    finally:
        args.average_tokens_across_devices = before


@functools.cache
def make_dynabatch_trainer(trainer_cls: type) -> type:
    """Return the class ``Dynabatch<Trainer>`` of a trainer class; the same one at every call.

    Args:
        trainer_cls: ``Trainer``, ``Seq2SeqTrainer`` or a class of yours.
    """
    return type(f"Dynabatch{trainer_cls.__name__}", (DynabatchTrainerMixin, trainer_cls), {"__module__": __name__})
