"""Hugging Face: a ``Trainer`` on planned or resizable batches, with exact updates.

::

    AdaptiveTrainer = adaptive(Trainer)
    trainer = AdaptiveTrainer(model=model, args=args, train_dataset=data, budget=bw.MaxTokens(8192))
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Mapping
from typing import Any, Literal
from weakref import WeakKeyDictionary

import numpy.typing as npt

from .._optional import require
from ..errors import ArgumentError

transformers = require("transformers", extra="hf")

# After the check, so that its message is read.
from ..plan.budget import Budget  # noqa: E402
from ..plan.grouping.base import Grouping  # noqa: E402
from ..size.learning_rate import Rule  # noqa: E402
from ..step.memory.monitor import MemoryMonitor  # noqa: E402
from ._huggingface_course import Course, Noise  # noqa: E402
from ._huggingface_evaluating import EvaluatingMixin  # noqa: E402
from ._huggingface_evaluation import EvaluationRun  # noqa: E402
from ._huggingface_feed import Feed  # noqa: E402
from ._huggingface_keeper import BatchSizeCallback, Keeper  # noqa: E402
from ._huggingface_settings import (  # noqa: E402
    OnOom,
    Settings,
    Weighting,
    check_trainer,
    check_trainer_class,
)
from ._huggingface_weights import Update, Weights  # noqa: E402
from ._trainer_step import SafeSteps  # noqa: E402

__all__ = ["AdaptiveTrainerMixin", "BatchSizeCallback", "adaptive"]


class AdaptiveTrainerMixin(EvaluatingMixin):
    """Train on planned or resizable batches: ``class MyTrainer(AdaptiveTrainerMixin, Seq2SeqTrainer): ...``.

    Without a controller one planned batch runs a device and a micro step, and ``gradient_accumulation_steps`` of them
    make an update. With a controller an update uses ``controller.size`` examples over all ranks, cut into micro-batches
    under the budget; ``gradient_accumulation_steps`` stays 1.

    The gradient of an update is that of the mean over all its labels on all ranks, whatever the sizes of its
    micro-batches and whether or not the model takes ``num_items_in_batch``. Every example counts once an epoch in
    total: where fewer than ranks are left, a rank without one runs that of another with no weight. A checkpoint holds
    the place in the epoch and the state of the controller; ``resume_from_checkpoint`` goes on with the very next batch.
    Evaluation is planned too: predictions come in the order of the data, and its loss is the exact mean.

    Logged with the loss: ``batch_size`` (of an update, over all ranks), ``num_micro_batches``, ``padding``, ``ooms``,
    and where they are in use ``batch_size_wanted``, ``noise_scale`` and ``lr_factor``.

    Args:
        *args: of the trainer.
        budget: what runs at once on a device, e.g. ``MaxTokens(8192)``; with a controller None takes
            ``per_device_train_batch_size`` examples.
        controller: decides how many examples an update uses.
        grouping: which examples share a planned batch; None is ``WindowSort()``.
        lengths: of the training examples; None measures ``input_ids``, and ``labels`` of other lengths, or takes the
            column ``length_column_name``.
        weighting: ``"tokens"``, every label counts the same, or ``"examples"``, every example does, with the mean over
            its own labels. For labels of tokens that needs the logits and a loss that is their cross entropy.
        on_oom: ``"split"`` runs a micro-batch that runs out of memory again in smaller pieces, exactly; ``"skip"``
            leaves it out, though its labels still count in the mean. Both need room for a second gradient where an
            update has several micro-batches, and under DDP reduce gradients after the backward pass, not during it.
            ``"raise"`` leaves all of that as it is.
        lr_rule: ``"none"``, ``"linear"``, ``"sqrt"``, ``"adascale"`` or a function of ``(batch_size, base_size)``; in
            the optimizer's step alone.
        base_size: the batch size over all ranks that ``learning_rate`` is meant for; needed with ``lr_rule``.
        measure_noise: estimate gradient noise; micro-batches are then random parts, which pad more. Needs a controller.
        memory: reads the peak of every update, for policies that follow it.
        eval_budget: what a batch of evaluation may cost; ``"same"`` takes ``budget``, None leaves evaluation alone.
        plan_options: further options of ``BatchSampler``, e.g. ``{"keep_first": 3}``.
        **kwargs: of the trainer.
    """

    callback_handler: Any

    def __init__(
        self,
        *args: Any,
        budget: Budget | None = None,
        controller: Any = None,
        grouping: Grouping | None = None,
        lengths: npt.ArrayLike | None = None,
        weighting: Weighting = "tokens",
        on_oom: OnOom = "split",
        lr_rule: str | Rule | None = "none",
        base_size: int | None = None,
        measure_noise: bool = False,
        memory: MemoryMonitor | None = None,
        eval_budget: Budget | Literal["same"] | None = "same",
        plan_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        check_trainer_class(transformers.Trainer, transformers.__version__)
        self._settings = Settings(
            budget=budget,
            controller=controller,
            grouping=grouping,
            lengths=lengths,
            weighting=weighting,
            on_oom=on_oom,
            lr_rule=lr_rule,
            base_size=base_size,
            measure_noise=measure_noise,
            memory=memory,
            eval_budget=eval_budget,
            plan_options=dict(plan_options or {}),
        )
        self._weights = Weights(weighting)
        self._course = Course()
        self._feed: Feed | None = None
        self._noise: Noise | None = None
        self._evaluation: EvaluationRun | None = None
        self._safe_steps: SafeSteps | None = None
        self._update: Update | None = None
        self._repeats: deque[bool] = deque()
        self._is_weighting = False
        self._kept_lengths = {}
        self._eval_loaders = WeakKeyDictionary()
        super().__init__(*args, **kwargs)
        check_trainer(self._settings, self)
        self._keeper = Keeper(self)
        # First, so that the others see the epoch and the size that hold.
        self.callback_handler.callbacks.insert(0, self._keeper)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as the trainer does; the learning rate is left as the schedule has it, whatever happens."""
        try:
            return super().train(*args, **kwargs)  # type: ignore[misc]
        finally:
            self._keeper.close()
            self._feed, self._update, self._safe_steps = None, None, None

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log; what is logged of training has the figures of its batches."""
        if "loss" in logs and self._feed is not None:
            logs.update(self._figures())
        super().log(logs, *args, **kwargs)  # type: ignore[misc]

    def _figures(self) -> dict[str, float]:
        figures = self._course.figures()
        if not figures:
            return {}
        if self._settings.rule is not None:
            figures["lr_factor"] = self._course.lr_factor
        if self._settings.controller is not None:
            figures["batch_size_wanted"] = int(self._settings.controller.size)
        scale = None if self._noise is None else self._noise.average.scale
        return figures if scale is None else {**figures, "noise_scale": scale}


@functools.cache
def adaptive(trainer_cls: type) -> type:
    """Return the class ``Adaptive<Trainer>`` of a trainer class; the same one at every call.

    Args:
        trainer_cls: ``Trainer``, ``Seq2SeqTrainer`` or a class of yours.

    >>> from transformers import Seq2SeqTrainer
    >>> adaptive(Seq2SeqTrainer)
    <class 'batchwright.integrations.huggingface.AdaptiveSeq2SeqTrainer'>
    """
    if not (isinstance(trainer_cls, type) and issubclass(trainer_cls, transformers.Trainer)):
        raise ArgumentError(f"adaptive takes a transformers Trainer class, got {trainer_cls!r}")
    if issubclass(trainer_cls, AdaptiveTrainerMixin):
        return trainer_cls
    return type(f"Adaptive{trainer_cls.__name__}", (AdaptiveTrainerMixin, trainer_cls), {"__module__": __name__})
