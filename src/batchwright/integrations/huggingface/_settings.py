"""What a user asks of an adaptive trainer, checked by itself and against the trainer's own arguments."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sized
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, final, get_args

import numpy.typing as npt

from ..._checks import as_flag, as_interval, as_whole, check_choice
from ...errors import ArgumentError, MissingDependencyError
from ...plan.budget import Budget, MaxItems, check_budget
from ...plan.grouping.base import Grouping, check_grouping
from ...plan.plan import PlanSettings
from ...size.learning_rate import Beta2Rule, Rule, get_beta2_rule, get_rule
from ...step.memory.fit_to_memory import FitToMemory
from ...step.memory.monitor import MemoryMonitor
from .._auto import NOISE_EVERY, NOISE_FIRST, is_auto, make_controller
from .._auto_budget import BudgetChoice, is_auto_budget
from .._devices import is_divided
from .._graphs import Choice
from .._observing import History, LiveHistory, reads
from .._ranked import controller_of

Weighting: TypeAlias = Literal["tokens", "examples"]
OnOom: TypeAlias = Literal["split", "skip", "raise"]

# Methods of the trainer that take the length of an epoch and the place in it.
_HOOKS = ("set_initial_training_values", "_init_training_state", "_run_epoch")
# These are arguments of the trainer, or come from TrainingArguments; all others go into plan_options.
_NOT_IN_PLAN_OPTIONS = ("grouping", "shuffle", "seed", "drop_last", "rules")
_PLAN_OPTIONS = [field.name for field in fields(PlanSettings) if field.name not in _NOT_IN_PLAN_OPTIONS]


@final
@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of an adaptive trainer; see ``AdaptiveTrainerMixin``."""

    budget: BudgetChoice | None
    controller: Any
    grouping: Grouping | None
    lengths: npt.ArrayLike | None
    weighting: Weighting
    on_oom: OnOom
    micro_batch: FitToMemory | None
    lr_rule: str | Rule | None
    base_size: int | None
    measure_noise: int
    memory: MemoryMonitor | None
    eval_budget: Budget | Literal["same", "auto"] | None
    plan_options: Mapping[str, Any]
    graphs: Choice = False
    curriculum: Any = None
    measure_entropy: bool | None = None
    history: History = False
    beta2_rule: str | Beta2Rule | None = None
    is_auto: bool = False
    noise_first: int = 0  # of so many first updates every second one is measured
    num_examples: int | None = None  # that bound the sizes of "auto"
    runs_whole: bool = False  # the budget of "auto" is the largest size
    finds_budget: bool = False  # budget="auto" was asked for
    is_probe: bool = False  # batches are measured: what runs out of memory is not tried again

    def __post_init__(self) -> None:
        object.__setattr__(self, "measure_noise", as_interval("measure_noise", self.measure_noise))
        if is_auto_budget(self.budget):
            object.__setattr__(self, "finds_budget", True)
            self._check_auto_budget()
        for budget in (self.budget, None if self.eval_budget == "same" else self.eval_budget):
            if budget is not None and not is_auto_budget(budget):
                check_budget(budget)  # type: ignore[arg-type]
        if self.controller is None and self.budget is None:
            raise ArgumentError(
                "an adaptive trainer needs a budget such as MaxTokens(8192) or 'auto', a controller, or both"
            )
        if not is_auto(self.controller):  # which is made as soon as the trainer's arguments are known
            controller_of(None, self.controller)
        check_choice("weighting", self.weighting, get_args(Weighting))
        check_choice("on_oom", self.on_oom, get_args(OnOom))
        self._check_micro_batch()
        self._check_plan()
        self._check_course()
        self._check_rate_and_noise()

    @property
    def rule(self) -> Rule | Literal["adascale"] | None:
        """Return how the learning rate follows the batch size, None if it does not."""
        return None if self.lr_rule == "none" else get_rule(self.lr_rule)

    @property
    def rule_of_beta2(self) -> Beta2Rule | None:
        """Return how Adam's beta2 follows the batch size, None if it does not."""
        return get_beta2_rule(self.beta2_rule)

    @property
    def wants_entropy(self) -> bool:
        """Return whether the entropy of the model's output is measured."""
        return reads(self.controller, "entropy") if self.measure_entropy is None else self.measure_entropy

    @property
    def evaluation_budget(self) -> BudgetChoice | None:
        """Return what a batch of evaluation may cost, None if evaluation is left to the trainer."""
        if self.eval_budget != "same":
            return self.eval_budget
        return "auto" if self.finds_budget else self.budget  # without a backward pass more fits

    def _check_auto_budget(self) -> None:
        if self.grouping is not None and getattr(self.grouping, "row_capacity", None) is not None:
            raise ArgumentError(
                "budget='auto' measures batches of single examples, not of packed rows; give MaxTokens(8 * capacity)"
            )

    def _check_micro_batch(self) -> None:
        if self.micro_batch is None:
            return
        if not isinstance(self.micro_batch, FitToMemory):
            raise ArgumentError(
                f"micro_batch must be a FitToMemory or None, got {self.micro_batch!r}; for a fixed number of examples "
                "use budget=MaxItems(n)"
            )
        if self.on_oom == "raise":
            raise ArgumentError("micro_batch=FitToMemory(…) cuts micro-batches, which on_oom='raise' does not allow")

    def _check_plan(self) -> None:
        if self.grouping is not None:
            check_grouping(self.grouping)
            if self.grouping.row_capacity is not None:
                raise ArgumentError(
                    "Packed makes rows of several examples, which a trainer's collator cannot take; use another "
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
            raise ArgumentError(f"{name} belongs to planned batches; leave it out, or train without a controller")

    def _check_course(self) -> None:
        """Check what needs a controller: examples in play, entropy, and lines about its decisions."""
        LiveHistory(self.history)
        if self.measure_entropy is not None:
            object.__setattr__(self, "measure_entropy", as_flag("measure_entropy", self.measure_entropy))
        given = {"curriculum": self.curriculum is not None, "measure_entropy": self.measure_entropy}
        given["history"] = self.history is not False
        for name in [name for name, is_given in given.items() if is_given] if self.controller is None else []:
            raise ArgumentError(
                f"{name} needs a controller; BatchSizeController(size.constant(n), min_size=n, max_size=n) keeps the "
                "size at n"
            )

    def _check_rate_and_noise(self) -> None:
        if self.base_size is not None:
            object.__setattr__(self, "base_size", as_whole("base_size", self.base_size, least=1))
        elif (self.rule is not None or self.rule_of_beta2 is not None) and not is_auto(self.controller):
            name = "beta2_rule" if self.rule is None else "lr_rule"
            raise ArgumentError(
                f"{name} needs base_size, the batch size over all ranks that learning_rate was chosen for"
            )
        if self.rule == "adascale" and not self.measure_noise and not is_auto(self.controller):
            raise ArgumentError("lr_rule='adascale' needs measure_noise=True")
        if self.measure_noise and self.controller is None:
            raise ArgumentError(
                "measure_noise needs a controller: it compares random parts of a batch, but a planned batch holds "
                "examples of similar lengths; size.constant(n) keeps the size"
            )
        if self.measure_noise and self.on_oom == "skip":
            raise ArgumentError("measure_noise needs every example of a batch; use on_oom='split' or 'raise'")


def with_controller(settings: Settings, trainer: Any) -> Settings:
    """Return settings with the controller that ``"auto"`` stands for, and what belongs to it.

    ``gradient_accumulation_steps`` becomes 1 in the trainer: the base size holds it.
    """
    args, base_size, budget = trainer.args, settings.base_size, settings.budget
    if settings.on_oom == "skip":
        raise ArgumentError("controller='auto' measures gradient noise, which needs every example; use on_oom='split'")
    if is_divided(trainer):
        raise ArgumentError("controller='auto' needs the whole model on every rank; leave it out, or use DDP")
    if base_size is None:
        base_size = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    runs_in_parts = settings.on_oom == "raise" or args.gradient_accumulation_steps > 1
    if budget is None and runs_in_parts:
        budget = MaxItems(args.per_device_train_batch_size)
    trainer.args = copy.copy(args)  # the user's own stay as they are
    trainer.args.gradient_accumulation_steps = trainer.accelerator.gradient_accumulation_steps = 1
    settings = replace(
        settings,
        base_size=base_size,
        budget=budget,
        eval_budget=settings.evaluation_budget,
        measure_noise=settings.measure_noise or NOISE_EVERY,
        noise_first=0 if settings.measure_noise else NOISE_FIRST,
        runs_whole=budget is None,
    )
    return _bounded(settings, trainer.train_dataset)


def for_data(settings: Settings, dataset: Any) -> Settings:
    """Return settings whose controller, if ``"auto"`` made it, is bounded by this data; the same ones if it is."""
    is_known = not isinstance(dataset, Sized) or len(dataset) == settings.num_examples
    return settings if not settings.is_auto or is_known else _bounded(settings, dataset)


def _bounded(settings: Settings, dataset: Any) -> Settings:
    assert settings.base_size is not None
    num_examples = len(dataset) if isinstance(dataset, Sized) else None
    controller = make_controller(settings.base_size, num_examples)
    # A larger batch is faster only if it runs at once.
    budget = MaxItems(controller.max_size) if settings.runs_whole else settings.budget
    return replace(settings, controller=controller, budget=budget, num_examples=num_examples, is_auto=True)


def check_trainer_class(trainer_cls: type, version: str) -> None:
    """Refuse an older transformers, whose training loop does not take the place in an epoch."""
    missing = [name for name in _HOOKS if not hasattr(trainer_cls, name)]
    if missing:
        raise MissingDependencyError(
            f"adaptive trainers need transformers 5.3 or newer, but {version} has no {missing[0]}; "
            "run: pip install -U 'batchwright[hf]'"
        )


def check_trainer(settings: Settings, trainer: Any) -> None:
    """Refuse arguments of the trainer that contradict the settings."""
    args = trainer.args
    _check_devices(settings, trainer)
    if args.auto_find_batch_size:
        raise ArgumentError("auto_find_batch_size has no effect on planned batches; use on_oom='split' instead")
    if not getattr(args, "dataloader_in_order", True):
        raise ArgumentError("adaptive trainers count batches in order; leave dataloader_in_order at True")
    config = args.accelerator_config
    if getattr(config, "split_batches", False) or getattr(config, "dispatch_batches", False):
        raise ArgumentError("every rank loads its own batches; leave out split_batches and dispatch_batches")
    if settings.controller is not None:
        _check_resizable(args)
    if getattr(args, "train_sampling_strategy", "random") not in ("random", "sequential"):
        warnings.warn("train_sampling_strategy has no effect, as batches are planned", stacklevel=4)


def _check_resizable(args: Any) -> None:
    if args.gradient_accumulation_steps != 1:
        raise ArgumentError(
            f"gradient_accumulation_steps is {args.gradient_accumulation_steps}, but the controller decides how many "
            "examples an update uses, and the budget how many run at once; leave it at 1"
        )
    if args.dataloader_drop_last:
        raise ArgumentError("with a controller every example comes once per epoch; leave out dataloader_drop_last")


def _check_devices(settings: Settings, trainer: Any) -> None:
    if trainer.args.n_gpu > 1:
        raise ArgumentError(
            f"one process drives {trainer.args.n_gpu} GPUs with DataParallel; start one process per GPU with torchrun"
        )
    if not is_divided(trainer):
        _check_gathering(settings, trainer)
        if settings.measure_noise and trainer.args.world_size > 1 and not trainer.args.average_tokens_across_devices:
            raise ArgumentError("measure_noise needs average_tokens_across_devices=True")
        return
    if settings.finds_budget or settings.evaluation_budget == "auto":
        name = "budget" if settings.finds_budget else "eval_budget"
        raise ArgumentError(
            f"{name}='auto' measures every rank by itself, but ranks hold parts of the model or of an example; give a "
            "budget such as MaxTokens(8192)"
        )
    if settings.on_oom != "raise":
        raise ArgumentError(
            "ranks that hold parts of a model cannot retry one by one, as the others wait inside their forward pass; "
            "pass on_oom='raise'"
        )
    for name, is_used in (("a controller", settings.controller is not None), ("lr_rule", settings.rule is not None)):
        if is_used:
            raise ArgumentError(f"{name} needs the whole model on every rank; leave it out")


def _check_gathering(settings: Settings, trainer: Any) -> None:
    """Refuse ranks that would call a loss which gathers figures from all ranks unequally often."""
    is_trl = any(kind.__module__.split(".")[0] == "trl" for kind in type(trainer).__mro__)
    if is_trl and trainer.args.world_size > 1 and (settings.on_oom != "raise" or settings.controller is not None):
        raise ArgumentError(
            "the loss of a TRL trainer gathers figures from all ranks whenever it is called, so all ranks must run "
            "equally many micro-batches; pass on_oom='raise', and leave the controller out"
        )
