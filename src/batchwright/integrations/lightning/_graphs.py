"""Graphs under a Lightning Trainer: what ``loss_sums`` and hooks may not do where steps are replayed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn, final

from ...errors import ArgumentError
from .._graphs import check_graphs, graph_options, refuse_graphs

_HOOK = "on_before_backward"


class ReplayError(ArgumentError):
    """``loss_sums`` does what a replay would leave out."""


def options_with_graphs(options: Mapping[str, Any], trainer: Any, module: Any, loader: Any) -> dict[str, Any]:
    """Return the options of the Stepper, with the shapes of the training data, or without graphs.

    Args:
        options: of ``AdaptiveBatching``.
        trainer: has callbacks.
        module: has hooks of its own.
        loader: of the training data, None if Lightning divides it.
    """
    choice = check_graphs(options.get("graphs", False))
    listener = None if choice is False else next(filter(_listens, (*trainer.callbacks, module)), None)
    if listener is not None:
        refuse_graphs(choice, f"{type(listener).__name__}.{_HOOK} would not run at a replay")
        return without_graphs(options)
    collate = options.get("collate") or (None if loader is None else loader.collate)
    return graph_options(options, None if loader is None else loader.source, collate)


def without_graphs(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an eager Stepper."""
    return {name: value for name, value in options.items() if name not in ("graphs", "shapes")}


def _listens(part: Any) -> bool:
    owner = next(kind for kind in type(part).__mro__ if _HOOK in vars(kind))
    return not owner.__module__.startswith(("lightning.", "pytorch_lightning."))


@contextmanager
def replayable(module: Any) -> Iterator[None]:
    """Refuse a loss that logs, or reads the Trainer, which changes from step to step: a replay would do neither."""
    parts = [part for part in module.modules() if "_trainer" in vars(part)]
    trainers = [vars(part)["_trainer"] for part in parts]
    for part in parts:
        # Past the setters of modules, which would tell all parts of it.
        vars(part).update(_trainer=_Unseen(), log=_refuse_log, log_dict=_refuse_log)
    try:
        yield
    finally:
        for part, trainer in zip(parts, trainers, strict=True):
            vars(part)["_trainer"] = trainer
            del vars(part)["log"], vars(part)["log_dict"]


@final
class _Unseen:
    """Stands in for the Trainer while a loss is computed."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ReplayError(
            f"loss_sums reads {name} of the Trainer, which a replay would not see change; leave graphs out, or bring "
            "it as a tensor of the batch"
        )


def _refuse_log(*args: Any, **kwargs: Any) -> NoReturn:
    raise ReplayError(
        "loss_sums logs, which a replay would not; leave graphs out, or return sums in the third place: "
        "(loss_sum, weight, {name: sum})"
    )
