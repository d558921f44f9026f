"""What a user asks of an adaptive trainer, checked once, and checked against what the trainer can do."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final, get_args

import numpy.typing as npt

from ..errors import ArgumentError, MissingDependencyError
from ..plan.budget import Budget, MaxItems, check_budget
from ..plan.grouping.base import Grouping, check_grouping
from ..size.learning_rate import Rule, get_rule
from ..step.memory.monitor import MemoryMonitor
from ._ranked import controller_of

Weighting: TypeAlias = Literal["tokens", "examples"]
OnOom: TypeAlias = Literal["split", "skip", "raise"]

# Methods of the trainer that are told how long an epoch is and where it stands.
_HOOKS = ("set_initial_training_values", "_init_training_state", "_run_epoch")
# The other options of BatchSampler have arguments of their own here, or come from TrainingArguments.
_PLAN_OPTIONS = (
    "size_multiple_of",
    "size_ladder",
    "pad_multiple_of",
    "keep_first",
    "oversize",
    "remainder",
    "balance_over",
    "cost",
)


@final
@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of an adaptive trainer; see ``AdaptiveTrainerMixin``."""

    budget: Budget | None
    controller: Any
    grouping: Grouping | None
    lengths: npt.ArrayLike | None
    weighting: Weighting
    on_oom: OnOom
    lr_rule: str | Rule | None
    base_size: int | None
    measure_noise: bool
    memory: MemoryMonitor | None
    eval_budget: Budget | Literal["same"] | None
    plan_options: Mapping[str, Any]

    def __post_init__(self) -> None:
        for budget in (self.budget, None if self.eval_budget == "same" else self.eval_budget):
            if budget is not None:
                check_budget(budget)
        if self.controller is None and self.budget is None:
            raise ArgumentError("an adaptive trainer needs budget=MaxTokens(8192) or such, a controller, or both")
        controller_of(None, self.controller)
        _check_choice("weighting", self.weighting, get_args(Weighting))
        _check_choice("on_oom", self.on_oom, get_args(OnOom))
        self._check_plan()
        self._check_rate_and_noise()

    @property
    def rule(self) -> Rule | Literal["adascale"] | None:
        """Return how the learning rate follows the batch, None where it does not."""
        return None if self.lr_rule == "none" else get_rule(self.lr_rule)

    @property
    def evaluation_budget(self) -> Budget | None:
        """Return what a batch of evaluation may cost, None where evaluation is left to the trainer."""
        return self.budget if self.eval_budget == "same" else self.eval_budget

    def micro_budget(self, args: Any) -> Budget:
        """Return what runs at once on a device."""
        return MaxItems(args.per_device_train_batch_size) if self.budget is None else self.budget

    def _check_plan(self) -> None:
        if self.grouping is not None:
            check_grouping(self.grouping)
            if self.grouping.row_capacity is not None:
                raise ArgumentError(
                    "Packed makes rows of several examples, which a trainer's collator does not take; use another "
                    "grouping, or train on packed rows with Stepper"
                )
        unknown = [name for name in self.plan_options if name not in _PLAN_OPTIONS]
        if unknown:
            raise ArgumentError(f"plan_options takes {', '.join(_PLAN_OPTIONS)}; got {', '.join(unknown)}")
        if self.plan_options.get("oversize") == "truncate":
            raise ArgumentError(
                'oversize="truncate" needs a collator that cuts; truncate when tokenizing, or use "alone" or "drop"'
            )
        if self.controller is not None and (self.grouping is not None or self.plan_options):
            name = "grouping" if self.grouping is not None else "plan_options"
            raise ArgumentError(f"{name} belongs to planned batches; with a controller leave it out")

    def _check_rate_and_noise(self) -> None:
        if self.rule is not None and (self.base_size is None or self.base_size < 1):
            raise ArgumentError(
                "lr_rule needs base_size, the batch size over all ranks that learning_rate is meant for"
            )
        if self.rule == "adascale" and not self.measure_noise:
            raise ArgumentError("lr_rule='adascale' needs measure_noise=True")
        if self.measure_noise and self.controller is None:
            raise ArgumentError(
                "measure_noise needs a controller: it compares random parts of a batch, and a planned batch holds "
                "examples of similar lengths; size.constant(n) holds the size"
            )
        if self.measure_noise and self.on_oom == "skip":
            raise ArgumentError("measure_noise needs every example of a batch; use on_oom='split' or 'raise'")


def check_trainer_class(trainer_cls: type, version: str) -> None:
    """Refuse a trainer of an older transformers, whose loop cannot be told where an epoch stands."""
    missing = [name for name in _HOOKS if not hasattr(trainer_cls, name)]
    if missing:
        raise MissingDependencyError(
            f"adaptive trainers need transformers 5.3 or newer, {version} has no {missing[0]}; "
            "run: pip install -U 'batchwright[hf]'"
        )


def check_trainer(settings: Settings, trainer: Any) -> None:
    """Refuse arguments of the trainer that contradict the settings."""
    args = trainer.args
    _check_devices(settings, trainer)
    if args.auto_find_batch_size:
        raise ArgumentError("auto_find_batch_size changes a size that is not used; on_oom='split' does what it is for")
    if not getattr(args, "dataloader_in_order", True):
        raise ArgumentError("batches are counted in order; leave dataloader_in_order at True")
    config = args.accelerator_config
    if getattr(config, "split_batches", False) or getattr(config, "dispatch_batches", False):
        raise ArgumentError("ranks take their own batches; leave split_batches and dispatch_batches out")
    if settings.controller is not None:
        _check_resizable(args)
    if getattr(args, "train_sampling_strategy", "random") not in ("random", "sequential"):
        warnings.warn("train_sampling_strategy has no effect: batches are planned", stacklevel=4)


def _check_resizable(args: Any) -> None:
    if args.gradient_accumulation_steps != 1:
        raise ArgumentError(
            f"gradient_accumulation_steps is {args.gradient_accumulation_steps}, but the controller decides how many "
            "examples an update uses and the budget how many run at once; leave it at 1"
        )
    if args.dataloader_drop_last:
        raise ArgumentError("with a controller every example comes once an epoch; leave dataloader_drop_last out")


def _check_devices(settings: Settings, trainer: Any) -> None:
    if trainer.args.n_gpu > 1:
        raise ArgumentError(
            f"one process drives {trainer.args.n_gpu} GPUs with DataParallel; start one process a GPU with torchrun"
        )
    if not is_divided(trainer):
        if settings.measure_noise and trainer.args.world_size > 1 and not trainer.args.average_tokens_across_devices:
            raise ArgumentError("measure_noise needs average_tokens_across_devices=True")
        return
    if settings.on_oom != "raise":
        raise ArgumentError(
            "where ranks hold parts of a model, one cannot try again while the others wait inside their forward pass; "
            "pass on_oom='raise'"
        )
    for name, is_used in (("a controller", settings.controller is not None), ("lr_rule", settings.rule is not None)):
        if is_used:
            raise ArgumentError(f"{name} needs the whole model on every rank; leave it out")


def is_divided(trainer: Any) -> bool:
    """Say whether ranks hold parts of the model, or of an example: FSDP, DeepSpeed, tensor and context parallelism."""
    is_sharded = getattr(trainer, "is_fsdp_enabled", False) or getattr(trainer, "is_deepspeed_enabled", False)
    return bool(is_sharded) or parallel_size(trainer) > 1


def parallel_size(trainer: Any) -> int:
    """Return how many ranks work on the same batch."""
    sizes = [getattr(trainer, f"get_{kind}_size", int)() for kind in ("tp", "cp", "sp")]
    return int(max(1, sizes[0]) * max(1, sizes[1]) * max(1, sizes[2]))


def _check_choice(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ArgumentError(f"{name} must be {' or '.join(map(repr, allowed))}, got {value!r}")
