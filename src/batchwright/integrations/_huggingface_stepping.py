"""The updates of an adaptive trainer: exact weights, retries after out of memory, any number of micro-batches."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ._huggingface_course import Course, Noise
from ._huggingface_evaluation import EvaluationRun
from ._huggingface_feed import Feed
from ._huggingface_settings import Settings, is_divided, parallel_size
from ._huggingface_weights import Update, Weights
from ._inputs import num_rows
from ._trainer_step import SafeSteps

# With no bound of its own, a retry begins at half of what did not fit.
_NO_BOUND = 1 << 31


class SteppingMixin:
    """Weighs micro-batches, runs them so that out of memory leaves no trace, and counts what was trained on."""

    args: Any
    accelerator: Any
    model: Any
    current_gradient_accumulation_steps: int

    _settings: Settings
    _weights: Weights
    _course: Course
    _feed: Feed | None
    _noise: Noise | None
    _evaluation: EvaluationRun | None
    _safe_steps: SafeSteps | None
    _update: Update | None
    _repeats: deque[bool]
    _is_weighting: bool

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
        """Return the items of an update; what they hold and weigh together is kept."""
        items, num_items = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        if items and self._feed is not None:
            self._begin_update(self._feed, _batches_of(items))
        return items, num_items

    def _begin_update(self, feed: Feed, batches: list[Any]) -> None:
        args, key = self.args, row_key(batches[0], self.model)
        if self._settings.on_oom != "raise" and self._safe_steps is None:
            strategy: Any = "split_retry" if self._settings.on_oom == "split" else "skip"
            self._safe_steps = SafeSteps(strategy, _NO_BOUND, key, self._note_oom)
        counted, repeats = feed.take()
        self._repeats = deque(repeats)
        weight = self._weigh(batches, repeats, key) if self._can_weigh() else torch.zeros(())
        sums = self._add_up(torch.tensor([float(weight), *counted, self._course.num_ooms], dtype=torch.float64))
        self._course.begin(sums)
        if self._noise is not None:
            self._noise.begin()
        if self._settings.memory is not None:
            self._settings.memory.reset_peak()
        total = sums[0] if args.average_tokens_across_devices else weight
        self._update = None
        if self._can_weigh():
            # A count as a float would make half-precision losses wide.
            self._update = Update(total.clamp(min=1).round().long().to(args.device), self._num_replicas)

    def _weigh(self, batches: list[Any], repeats: list[bool], key: str) -> Tensor:
        if not self._weights.is_sure:
            inputs = self._prepare_inputs(dict(batches[0]))  # type: ignore[attr-defined]
            self._weights.learn(self._parent_loss, self.model, inputs, key)
        weights = [
            self._weights.count(batch).cpu() * (not is_repeat)
            for batch, is_repeat in zip(batches, repeats, strict=True)
        ]
        return torch.stack(weights).sum()

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
        """Return the loss: in training its share of the mean over the update, in evaluation the mean of the batch."""
        if self._is_weighting and self._update is not None:
            loss, outputs = self._weights.part(self._parent_loss, model, inputs, self._update, return_outputs)
        elif self._evaluation is not None and self._weights.is_known:
            loss, outputs = self._weights.mean(self._parent_loss, model, inputs, with_outputs=return_outputs)
        else:
            return super().compute_loss(model, inputs, return_outputs=return_outputs, **kwargs)  # type: ignore[misc]
        return (loss, outputs) if return_outputs else loss

    def _parent_loss(self, model: Any, inputs: dict[str, Any], return_outputs: bool, num_items: Any) -> Any:
        """Return the trainer's loss as for a single process."""
        with _one_process(self.args):
            return super().compute_loss(  # type: ignore[misc]
                model, inputs, return_outputs=return_outputs, num_items_in_batch=num_items
            )

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward of an item, micro-batch by micro-batch."""
        parts = _batches_of([inputs])
        total: Tensor | None = None
        for place, part in enumerate(parts):
            if self._update is not None and self._repeats and self._repeats.popleft():
                self._update = self._update._replace(num_replicas=0)  # another rank runs it too: no weight here
            loss = self._run_part(model, part, args, kwargs, is_end=place == len(parts) - 1)
            total = loss if total is None else total + loss
        assert total is not None
        self._course.add_loss(total)
        if self._noise is not None and self.accelerator.sync_gradients:
            scaler = self.accelerator.scaler
            self._noise.end(
                self._add_up,
                num_examples=self._course.batch_size,
                num_replicas=self._num_replicas,
                scale=1.0 if scaler is None else float(scaler.get_scale()),
            )
        return total

    def _run_part(self, model: Any, part: Any, args: Any, kwargs: Any, *, is_end: bool) -> Tensor:
        """Add the gradient of a micro-batch; under DDP nothing is sent before the last."""
        if self._noise is not None:
            self._noise.keep()
        if self._safe_steps is None or self._update is None:
            with nullcontext() if is_end else self.accelerator.no_sync(model):
                return self._weighted_step(model, part, *args, **kwargs)
        return self._safe_steps.run(
            model,
            dict(part),
            lambda module, piece: self._weighted_step(module, piece, *args, **kwargs),
            is_last=is_end and self.accelerator.sync_gradients,
            has_scaler=self.accelerator.scaler is not None,
        )

    def _weighted_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        if self._update is None:
            whole: Tensor = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
            return whole
        num = _num_examples(inputs, self.model) if self._update.num_replicas else 0
        with self._weighing(), nullcontext() if self._noise is None or num == 0 else self._noise.part(num):
            part: Tensor = super().training_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
            return part

    @contextmanager
    def _weighing(self) -> Iterator[None]:
        """Let the weights hold: they add up to one over the update, so nobody must divide once more."""
        steps, accelerator = self.current_gradient_accumulation_steps, self.accelerator
        divisor = accelerator.gradient_accumulation_steps  # of the first releases of transformers 5; 1 in later ones
        self.current_gradient_accumulation_steps = accelerator.gradient_accumulation_steps = 1
        self._is_weighting = True
        try:
            yield
        finally:
            self.current_gradient_accumulation_steps, accelerator.gradient_accumulation_steps = steps, divisor
            self._is_weighting = False

    def floating_point_ops(self, inputs: Any) -> int:
        """Return the operations of an item."""
        count = super().floating_point_ops  # type: ignore[misc]
        return sum(map(count, _batches_of([inputs])))

    def _track_num_input_tokens(self, inputs: Any) -> None:
        for part in _batches_of([inputs]):
            super()._track_num_input_tokens(part)  # type: ignore[misc]

    def _note_oom(self) -> None:
        self._course.num_ooms += 1
        if self._noise is not None:
            self._noise.undo()

    def _can_weigh(self) -> bool:
        return not is_divided(self)

    @property
    def _num_replicas(self) -> int:
        return int(self.accelerator.num_processes) if self.args.average_tokens_across_devices else 1

    def _add_up(self, figures: Tensor) -> Tensor:
        """Sum figures over all ranks; those of ranks that share a batch count once."""
        if self.args.world_size == 1:
            return figures
        summed: Tensor = self.accelerator.reduce(figures.to(self.args.device), reduction="sum")
        return summed / parallel_size(self)


def row_key(batch: Mapping[str, Any], model: Any) -> str:
    """Return the name of a value whose length is the number of examples."""
    names = [getattr(model, "main_input_name", "input_ids"), "input_ids", "labels"]
    tensors = [name for name, value in batch.items() if isinstance(value, Tensor) and value.ndim > 0]
    return next((name for name in names if name in batch), tensors[0] if tensors else names[0])


def _num_examples(batch: Mapping[str, Any], model: Any) -> int:
    return num_rows(batch, row_key(batch, model))


def _batches_of(items: list[Any]) -> list[Any]:
    """Return the micro-batches of items: a list of them, or one each."""
    return [batch for item in items for batch in (item if isinstance(item, list) else [item])]


@contextmanager
def _one_process(args: Any) -> Iterator[None]:
    """Keep a trainer from multiplying its loss by the number of processes."""
    before = args.average_tokens_across_devices
    args.average_tokens_across_devices = False
    try:
        yield
    finally:
        args.average_tokens_across_devices = before
