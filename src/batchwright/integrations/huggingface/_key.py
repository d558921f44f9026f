"""What a found budget of a trainer depends on: everything that costs memory or time in a step."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import nn
from transformers import TrainingArguments

from ..._types import IntArray
from ...size.learning_rate import innermost
from .._contents import contents_of, is_of_library, names_of
from .._describing import (
    describe_callable,
    describe_lengths,
    describe_model,
    describe_optimizer,
    describe_packages,
    describe_read,
)
from ._lengths import pad_multiple_of
from ._settings import Settings

_ARGUMENTS = (
    "bf16",
    "fp16",
    "tf32",
    "gradient_checkpointing",
    "gradient_checkpointing_kwargs",
    "label_smoothing_factor",
    "neftune_noise_alpha",
    "optim",
    "optim_args",
    "optim_target_modules",
    "torch_compile",
    "torch_compile_backend",
    "torch_compile_mode",
    "torch_empty_cache_steps",
    "use_liger_kernel",
)
_STEPS = ("compute_loss", "training_step")
# Methods that no step calls: what they keep is no setting of it.
_OUTSIDE_OF_STEPS = {
    *("__init__", "log", "evaluate", "predict", "train", "save_model", "_save", "create_optimizer", "create_scheduler"),
    *("create_optimizer_and_scheduler", "get_train_dataloader", "get_eval_dataloader", "get_test_dataloader"),
    *("evaluation_loop", "prediction_step", "push_to_hub", "_save_checkpoint", "_load_from_checkpoint"),
}
# What every trainer holds is described elsewhere, or costs nothing in a step.
_OF_EVERY_TRAINER = {
    *("model", "model_wrapped", "args", "accelerator", "state", "control", "callback_handler", "train_dataset"),
    *("eval_dataset", "optimizer", "lr_scheduler", "data_collator", "processing_class", "compute_loss_func"),
    *("_batching", "_finder", "_memory_tracker", "hp_name", "deepspeed", "_train_batch_size", "_step"),
}
# Arguments that say where results go, and what transformers keeps among them.
_NOT_ASKED_FOR = (
    *("distributed_state", "deepspeed_plugin", "mixed_precision"),
    *("output_dir", "logging_dir", "run_name", "hub_model_id", "hub_token", "resume_from_checkpoint"),
)


def key_of(trainer: Any, settings: Settings, lengths: IntArray, accumulates: bool) -> dict[str, Any]:
    """Return what the budget of a trainer depends on, as JSON values.

    Args:
        trainer: with its optimizer.
        settings: what the user asked for.
        lengths: of the examples, as padded.
        accumulates: several micro-batches make an update.
    """
    args = trainer.args
    return {
        "model": describe_model(trainer.model),
        "lengths": describe_lengths(lengths),
        "packages": describe_packages(),
        "trainer": [f"{kind.__module__}.{kind.__qualname__}" for kind in type(trainer).__mro__],
        "loss": [describe_callable(trainer.compute_loss_func), *_own_steps(trainer)],
        "collator": [describe_callable(trainer.data_collator), pad_multiple_of(trainer.data_collator)],
        "arguments": {name: contents_of(getattr(args, name, None)) for name in _arguments(trainer)},
        "precision": str(trainer.accelerator.mixed_precision),
        "optimizer": describe_optimizer(innermost(trainer.optimizer)),
        "accumulates": accumulates,
        "has_controller": settings.controller is not None,
        "on_oom": settings.on_oom,
        "weighting": settings.weighting,
        "entropy": settings.wants_entropy,
    }


def _arguments(trainer: Any) -> list[str]:
    """Return the arguments that cost memory or time: the usual ones, those of this kind of trainer, and what is read.

    A loss may read arguments that only this kind has, or that were set by hand.
    """
    usual = {field.name for field in fields(TrainingArguments)}
    read = names_of(type(trainer), _own_methods(trainer))
    given = [name for name in vars(trainer.args) if not name.startswith("_")]
    return sorted({*_ARGUMENTS, *(name for name in given if name not in usual or name in read)} - {*_NOT_ASKED_FOR})


def _own_methods(trainer: Any) -> list[Any]:
    """Return what the user wrote in the classes of a trainer, except what runs outside of a step."""
    kinds = [kind for kind in type(trainer).__mro__ if not is_of_library(kind)]
    found = [(name, one) for kind in kinds for name, one in vars(kind).items() if name not in _OUTSIDE_OF_STEPS]
    found += [(name, vars(trainer)[name]) for name in _STEPS if name in vars(trainer)]  # set by hand
    return [one for _, one in found if callable(one) or isinstance(one, property | staticmethod | classmethod)]


def _own_steps(trainer: Any) -> list[Any]:
    """Return the losses and steps of a trainer, what those of the user read of it, and the models that it holds.

    Trainers of libraries keep settings in their arguments, and counts in attributes; their code is known by its
    version. A model beside the trained one, such as a reference or a teacher, takes memory in the loss.
    """
    kind, own = type(trainer), _own_methods(trainer)
    steps = [vars(base).get(name) for base in kind.__mro__ for name in _STEPS]
    classes = [vars(base) for base in kind.__mro__ if not is_of_library(base)]
    values = {name: one for held in reversed(classes) for name, one in held.items() if _is_setting(name, one)}
    models = {
        name: contents_of(one)
        for name, one in vars(trainer).items()
        if isinstance(one, nn.Module) and name not in ("model", "model_wrapped")
    }
    read = describe_read(trainer, own, but=_OF_EVERY_TRAINER)
    return [contents_of([one for one in steps if one is not None]), contents_of(own), contents_of(values), models, read]


def _is_setting(name: str, value: Any) -> bool:
    return not name.startswith("__") and not callable(value) and not isinstance(value, staticmethod | classmethod)
