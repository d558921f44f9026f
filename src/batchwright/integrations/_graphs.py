"""Graphs under a framework: their catalogue, why there are none, and what a loss may not do where it is replayed."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, Literal, NoReturn, TypeAlias, final

import numpy as np
import torch

from ..errors import ArgumentError
from ..plan.collating import PadTo
from ..step.collators import PadCollator
from ..step.graphs.backend import GraphBackend

Choice: TypeAlias = "bool | Literal['auto'] | GraphBackend"

# A graph of each shape is captured; more shapes than this hardly come again.
MOST_SHAPES = 64
# How much of what a trainer holds is compared before and after a capture.
_DEPTH, _MOST_ENTRIES = 4, 5_000
_CONTAINERS = (list, tuple, dict, set, deque)
_VALUES = (bool, int, float, str, bytes)
_FRAMEWORKS = ("accelerate", "batchwright", "builtins", "datasets", "peft", "tokenizers", "torch", "transformers")
_OURS = ("_batching", "state", "log")


def check_graphs(choice: Any) -> Choice:
    """Return the option ``graphs`` of an adapter, or refuse what it cannot be.

    >>> check_graphs("auto")
    'auto'
    """
    is_backend = isinstance(choice, GraphBackend) and not isinstance(choice, type)
    if isinstance(choice, bool | np.bool_):
        return bool(choice)
    if is_backend or (isinstance(choice, str) and choice == "auto"):
        return choice
    raise ArgumentError(f"graphs must be False, 'auto' or True, got {choice!r}")


def refuse_graphs(choice: Choice, reason: str) -> None:
    """Refuse ``graphs=True``; with ``"auto"`` steps run eagerly, and a warning says why."""
    if not isinstance(choice, str):
        raise ArgumentError(f"graphs=True cannot be, as {reason}; leave graphs out, or pass graphs='auto'")
    warnings.warn(f"steps run eagerly, without graphs: {reason}", stacklevel=5)


def why_no_catalogue(sampler: Any) -> str | None:
    """Return why the batches of a sampler have no catalogue of few shapes, None if they have one."""
    shapes = getattr(getattr(sampler, "plan", sampler), "shapes", None)
    if shapes is None:
        return f"the shapes of this {type(sampler).__name__} are not planned; give it grouping=Buckets(32)"
    return _why_too_many(shapes)


def _why_too_many(shapes: Any) -> str | None:
    num = len(np.unique(shapes, axis=0))
    if num > MOST_SHAPES:
        return (
            f"the plan has {num:,} shapes, and each would be a graph; group by Buckets(32), which makes at most 32 "
            f"({MOST_SHAPES} are allowed)"
        )
    return None


def why_many_shapes(shapes: Any) -> str | None:
    """Return why given shapes are too many for a catalogue; what is no list of shapes is left to the Stepper."""
    try:
        rows = np.asarray(getattr(getattr(shapes, "plan", shapes), "shapes", shapes))
    except ValueError:
        return None
    return _why_too_many(rows) if rows.ndim == 2 else None


def why_not_padded(collate: Any, sampler: Any) -> str | None:
    """Return why a collator does not give batches their planned shapes, as far as can be seen."""
    if not isinstance(collate, PadCollator) or not isinstance(collate.pad_to, PadTo):
        return None
    if sampler.pad_to.shapes and not collate.pad_to.shapes:
        return "the PadCollator pads to the longest example of a batch; give it pad_to=sampler.pad_to"
    return None


def graph_options(options: Mapping[str, Any], sampler: Any, collate: Any, device: torch.device) -> dict[str, Any]:
    """Return the options of a ``Stepper`` whose graphs take their shapes from a sampler, if none were given.

    Args:
        options: the options given to the adapter.
        sampler: of the training data, None if it has none of ours.
        collate: of its loader, or of the stepper.
        device: of the model.
    """
    found = dict(options)
    choice = check_graphs(found.get("graphs", False))
    if choice is False:
        return found
    given = found.get("shapes")
    reason = None
    if given is not None:
        reason = why_many_shapes(given)
    elif sampler is not None:
        reason = why_no_catalogue(sampler) or why_not_padded(collate, sampler)
        found["shapes"] = sampler
    if reason is not None:
        refuse_graphs(choice, reason)
        return {name: value for name, value in found.items() if name not in ("graphs", "shapes")}
    if isinstance(choice, str) and device.type != "cuda":
        refuse_graphs(choice, "graphs need a model on a CUDA device")  # a Stepper alone says nothing
    return found


class ReplayError(ArgumentError):
    """``loss_sums`` does what a replay would leave out."""


@contextmanager
def captured(trainer: Any) -> Iterator[None]:
    """Refuse a loss that reads what changes between steps, logs, or changes the trainer: a replay does none of it."""
    before = dict(vars(trainer))
    contents = {name: _contents(value) for name, value in before.items() if name not in _OURS}
    trainer.state, trainer.log = _UnseenState(), _refuse_trainer_log
    try:
        yield
        now = {**vars(trainer), "state": before["state"]}
        now.pop("log")
        names = (now.keys() | before.keys()) - {"log"}
        changed = [name for name in names if now.get(name) is not before.get(name)]
        changed += [name for name, seen in contents.items() if not _are_same(seen, _contents(before[name]))]
    finally:
        trainer.state = before["state"]
        del trainer.log  # the method of its class is there again
        if "log" in before:
            trainer.log = before["log"]
    if changed:
        raise ArgumentError(f"compute_loss changes trainer.{min(changed)}, and a replay would not")


def _contents(value: Any) -> list[Any]:
    """Return what a container holds: as many entries as are compared, the newest first; else the value itself."""
    return list(islice(_walk(value, _DEPTH), _MOST_ENTRIES))


def _walk(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, np.ndarray) and value.size <= _MOST_ENTRIES:
        yield value.tobytes()
    elif depth and isinstance(value, _CONTAINERS):
        yield len(value)
        for entry in value if isinstance(value, set) else reversed(value):
            yield from _walk(entry, depth - 1)
            if isinstance(value, dict):
                yield from _walk(value[entry], depth - 1)
    elif depth and _is_of_user(value):
        yield from _walk(vars(value), depth)
    else:
        yield value


def _is_of_user(value: Any) -> bool:
    """Say whether an object may keep figures of a user's own; those of frameworks change at will."""
    *kinds, _ = type(value).__mro__  # without object
    is_plain = hasattr(value, "__dict__") and not isinstance(value, type)
    return is_plain and not any(kind.__module__.split(".")[0] in _FRAMEWORKS for kind in kinds)


def _are_same(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(
        old is new or (type(old) in _VALUES and type(new) is type(old) and old == new)
        for old, new in zip(before, after, strict=True)
    )


@final
class _UnseenState:
    """Stands in for ``trainer.state`` while a loss is captured."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ArgumentError(f"compute_loss reads trainer.state.{name}, which a replay would not see change")

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise ArgumentError(f"compute_loss writes trainer.state.{name}, which a replay would not")

    def __delattr__(self, name: str) -> NoReturn:
        raise ArgumentError(f"compute_loss deletes trainer.state.{name}, which a replay would not")


def _refuse_trainer_log(*args: Any, **kwargs: Any) -> NoReturn:
    raise ArgumentError("compute_loss calls trainer.log, which a replay would not")


@contextmanager
def replayable(module: Any) -> Iterator[None]:
    """Refuse a loss that logs, or reads the Trainer, which changes from step to step: a replay would do neither."""
    parts = [part for part in module.modules() if "_trainer" in vars(part)]
    trainers = [vars(part)["_trainer"] for part in parts]
    for part in parts:
        # Past the setters of modules, which would tell all parts of it.
        vars(part).update(_trainer=_UnseenTrainer(), log=_refuse_module_log, log_dict=_refuse_module_log)
    try:
        yield
    finally:
        for part, trainer in zip(parts, trainers, strict=True):
            vars(part)["_trainer"] = trainer
            del vars(part)["log"], vars(part)["log_dict"]


@final
class _UnseenTrainer:
    """Stands in for the Trainer while a loss is computed."""

    def __getattr__(self, name: str) -> NoReturn:
        raise ReplayError(
            f"loss_sums reads {name} of the Trainer, which a replay would not see change; leave graphs out, or bring "
            "it as a tensor of the batch"
        )

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        raise ReplayError(
            f"loss_sums writes {name} of the Trainer, which a replay would not; leave graphs out, or return sums in "
            "the third place: (loss_sum, weight, {name: sum})"
        )

    def __delattr__(self, name: str) -> NoReturn:
        raise ReplayError(f"loss_sums deletes {name} of the Trainer, which a replay would not; leave graphs out")


def _refuse_module_log(*args: Any, **kwargs: Any) -> NoReturn:
    raise ReplayError(
        "loss_sums logs, which a replay would not; leave graphs out, or return sums in the third place: "
        "(loss_sum, weight, {name: sum})"
    )
