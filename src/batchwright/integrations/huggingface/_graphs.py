"""Graphs of an adaptive trainer: forward and backward are replayed, clipping and the update stay the trainer's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import Tensor, nn

from ..._modules import recomputes_activations
from ..._types import IntArray
from ...errors import ArgumentError
from ...plan.collating import PadTo
from ...plan.sampler.planned import BatchSampler
from ...size.learning_rate import innermost
from ...step.collators import PadCollator
from ...step.graphs.loops import LoopGraphs
from ...step.graphs.summary import GraphSummary
from .._devices import Devices, is_divided
from .._graphs import Choice, check_graphs, refuse_graphs, why_no_catalogue
from .._ranked import is_stream
from .._safe_steps import Replay
from ._lengths import with_collator
from ._weights import UpdateWeight

# Optimizers that update inside the backward pass, which a replay would not run.
_STEP_IN_BACKWARD = ("lomo", "adalomo")
# Columns whose lengths a collator pads to; the first that the examples have.
_SOURCES, _TARGET = ("input_ids", "input_values"), "labels"
_MULTIPLE = "pad_to_multiple_of"


@final
class TrainerGraphs:
    """Decides whether the micro-batches of a trainer are replayed, and replays them.

    Args:
        choice: True, ``"auto"``, False, or a backend.
    """

    def __init__(self, choice: Choice) -> None:
        self._choice = check_graphs(choice)
        self._reason: str | None = None
        self._shapes: Any = None
        self._loop: LoopGraphs | None = None
        self._said: set[str] = set()
        self._summary = GraphSummary()

    @property
    def is_wanted(self) -> bool:
        """Return whether graphs were asked for, and nothing speaks against them so far."""
        return self._choice is not False and self._reason is None

    def check(self, trainer: Any, *, has_controller: bool, on_oom: str, has_limit: bool = False) -> None:
        """Refuse a trainer whose steps cannot be replayed.

        Args:
            trainer: with its arguments, model and methods.
            has_controller: sizes are not planned.
            on_oom: the trainer's option.
            has_limit: micro-batches are cut by ``micro_batch``.
        """
        if self.is_wanted:
            reason = _why_not(trainer, self._choice, has_controller=has_controller, on_oom=on_oom)
            if reason is None and has_limit:
                reason = (
                    "micro_batch=FitToMemory(…) cuts micro-batches as memory allows, and a graph holds a whole one; "
                    "give a smaller budget instead"
                )
            self._refuse(reason)

    def _refuse(self, reason: str | None) -> None:
        if reason is not None:
            refuse_graphs(self._choice, reason)
            self._reason = reason

    def catalogue(self, sampler: BatchSampler, collate: Any, collator: Any, dataset: Any) -> Callable[[list[Any]], Any]:
        """Take the shapes of a plan, and return what collates to them; without graphs, what was given.

        Args:
            sampler: has the plan.
            collate: what the loader calls.
            collator: of the trainer, inside of it.
            dataset: of the loader.
        """
        if not self.is_wanted:
            return collate
        self._refuse(why_no_catalogue(sampler))
        planned = planned_collator(collate, collator, sampler.pad_to)
        if planned is None and self._reason is None and not are_equally_long(sampler.plan.shapes):
            self._refuse(
                f"{_name_of(collator)} cannot be told the planned lengths; use batchwright.step.PadCollator, or a "
                "collator of transformers with pad_to_multiple_of that pads to the longest example, with two lengths "
                "on the right"
            )
        if isinstance(planned, PlannedCollator) and self._reason is None:
            self._refuse(_why_not_columns(planned, dataset))
        if self._reason is not None:
            return collate
        self._shapes = sampler.plan.shapes
        return planned or collate

    def begin(
        self,
        model: nn.Module,
        optimizer: Any,
        loss: Callable[[Any, Any], Tensor],
        devices: Devices,
        *,
        is_weighed: bool,
    ) -> None:
        """Look at the model before an item runs; at the first one, make ready for captures.

        Args:
            model: as the trainer wraps it.
            optimizer: of the trainer.
            loss: of a micro-batch as ``replay`` makes it.
            devices: tell about precision.
            is_weighed: it is known what a micro-batch counts in its update.
        """
        if not self.is_wanted or self._shapes is None:
            return
        if not is_weighed:
            self._say_once("it is not known what the loss is a mean over, so the trainer's own step runs")
            return
        # What the trainer's own step does first; a replay does not call it.
        model.train()
        if callable(getattr(optimizer, "train", None)):
            optimizer.train()
        if self._loop is None:
            self._loop = LoopGraphs(
                model,
                innermost(optimizer),
                loss,
                graphs=self._choice,
                shapes=self._shapes,
                scaler=devices.accelerator.scaler,
                is_half=bool(devices.args.bf16 or devices.args.fp16),
            )
        self._loop.begin()

    def _say_once(self, reason: str) -> None:
        if reason not in self._said:
            self._said.add(reason)
            warnings.warn(f"a step runs eagerly, without graphs: {reason}", stacklevel=6)

    def replay(self, inputs: dict[str, Any], weight: float, whole: UpdateWeight | None) -> Replay | None:
        """Return what replays a micro-batch, None if it runs eagerly.

        Args:
            inputs: of the model.
            weight: of the micro-batch in its update.
            whole: the weight of the update, None if only the trainer knows it.
        """
        if self._loop is None or weight == 0 or whole is None:
            return None
        device = whole.total.device
        batch = {
            "inputs": inputs,
            "weight": torch.full((), weight, dtype=torch.float64, device=device),  # a copy would wait for the device
            "total": whole.total,
        }
        return partial(self._loop.run, batch)

    def make_room(self) -> None:
        """Drop the graphs after memory ran out."""
        if self._loop is not None:
            self._loop.make_room()

    def close(self) -> None:
        """End a training; its summary can still be read."""
        self._summary = self.summary()
        self._loop = self._shapes = None

    def summary(self) -> GraphSummary:
        """Return what graphs did in the newest training."""
        if self._reason is not None:
            return GraphSummary(reasons={self._reason: 0})
        return self._summary if self._loop is None else self._loop.summary()


def _name_of(collator: Any) -> str:
    return getattr(collator, "__name__", type(collator).__name__)


def _why_not(trainer: Any, choice: Choice, *, has_controller: bool, on_oom: str) -> str | None:
    """Return why the steps of a trainer cannot be replayed, None if nothing speaks against it."""
    args = trainer.args
    reasons = {
        "graphs need a model on a CUDA device": isinstance(choice, bool | str) and args.device.type != "cuda",
        "the shapes of batches are not planned with a controller": has_controller,
        "the shapes of a stream are not known before it is read": is_stream(trainer.train_dataset),
        "ranks hold parts of the model or of an example, with FSDP, DeepSpeed or tensor parallelism, and meet inside "
        "the forward pass": is_divided(trainer),
        "on_oom='raise' leaves the backward pass to the trainer; use 'split' or 'skip'": on_oom == "raise",
        "gradient_checkpointing runs the forward pass again inside the backward pass": _checkpoints(trainer),
        "torch_compile captures steps in its own way": bool(args.torch_compile),
        f"optim={str(getattr(args.optim, 'value', args.optim))!r} updates inside the backward pass": (
            getattr(args.optim, "value", args.optim) in _STEP_IN_BACKWARD
        ),
        "the loss of a TRL trainer notes figures at every call, and a replay would not": _is_of_trl(trainer),
    }
    found = next((reason for reason, holds in reasons.items() if holds), None)
    return found or _why_not_methods(trainer)


def _why_not_columns(planned: PlannedCollator, dataset: Any) -> str | None:
    """Return why the lengths of a batch cannot be seen in its examples, None if they can."""
    columns = getattr(dataset, "column_names", None)
    columns = dataset[0] if columns is None else columns
    if isinstance(columns, Collection) and padded_columns(columns, planned.pad_to):
        return None
    found = ", ".join(sorted(columns)) if isinstance(columns, Collection) else type(columns).__name__
    return (
        f"{_name_of(planned.collator)} can be told the lengths of {' or '.join(_SOURCES)}, and of {_TARGET} that have "
        f"lengths of their own, but the examples have {found}; use batchwright.step.PadCollator with axis_fields"
    )


def _checkpoints(trainer: Any) -> bool:
    return bool(trainer.args.gradient_checkpointing or recomputes_activations(trainer.model))


def _is_of_trl(trainer: Any) -> bool:
    return any(kind.__module__.split(".")[0] == "trl" for kind in type(trainer).__mro__)


def _why_not_methods(trainer: Any) -> str | None:
    """Return which method of the user's a replay would leave out, None if there is none."""
    ours = f"{__package__}.trainer"
    step = _owners(trainer, "training_step", ours, "transformers.trainer")
    if step:
        return f"{step[0].__name__}.training_step is not the Trainer's own, and a replay would not run it"
    kinds = type(trainer).__mro__
    above = kinds[: next(place for place, kind in enumerate(kinds) if kind.__module__ == ours)]
    if any("compute_loss" in vars(kind) for kind in above):
        return "compute_loss lies above the adaptive one; write it into a trainer class, and make that class adaptive"
    return None


def _owners(trainer: Any, name: str, *known: str) -> list[type]:
    return [kind for kind in type(trainer).__mro__ if name in vars(kind) and kind.__module__ not in known]


@final
@dataclass(frozen=True)
class PlannedCollator:
    """Lets a collator pad to the lengths of the plan.

    A collator that pads to a multiple pads to length W if W is that multiple and no example is longer. With two axes
    W is the larger of the two lengths, and what is longer than its own is cut back: labels and what belongs to the
    decoder to the second, all else to the first. So a collator that draws runs once.

    Args:
        collate: what the loader calls: the collator, or one of the trainer's around it.
        collator: pads to ``pad_to_multiple_of``, on the right where there are two axes.
        pad_to: turns the lengths of a batch into planned lengths.
    """

    collate: Callable[[list[Any]], Any]
    collator: Any
    pad_to: PadTo

    def __call__(self, examples: list[Mapping[str, Any]]) -> Any:
        """Return the batch of some examples."""
        names = padded_columns(examples[0], self.pad_to)
        widths = self.pad_to(np.array([[max(1, len(example[name])) for name in names] for example in examples]))
        width = max(widths)
        batch = with_collator(self.collate, self.collator, _at_multiple(self.collator, width))(examples)
        if min(widths) == width:
            return batch
        return {name: _cut(name, value, width, widths[_is_of_decoder(name)]) for name, value in batch.items()}


def padded_columns(columns: Collection[str], pad_to: PadTo) -> tuple[str, ...]:
    """Return the columns whose lengths are planned; none if the examples have others."""
    wanted = (next((name for name in _SOURCES if name in columns), ""), _TARGET)
    names = wanted[: _num_axes(pad_to)]
    return names if all(name in columns for name in names) else ()


def _num_axes(pad_to: PadTo) -> int:
    return len(pad_to.shapes[0]) if pad_to.shapes else 1


def _cut(name: str, value: Any, longest: int, width: int) -> Any:
    """Return a field of a batch without the padding that only the other axis needs."""
    sizes = tuple(getattr(value, "shape", ()))[1:]
    if width == longest or longest not in sizes:
        return value
    rest = value[:, width:]
    # Inputs of the decoder are the labels moved by one, so their first place after the cut is not padding.
    is_padding = name.startswith("decoder_") or bool((rest == rest.flatten()[0]).all())
    if sizes[0] != longest or longest in sizes[1:] or not is_padding:
        raise ArgumentError(
            f"the collator gives {name} of shape {tuple(value.shape)}, which cannot be padded to the planned "
            f"{width} of another axis; use batchwright.step.PadCollator, or leave graphs out"
        )
    return value[:, :width].contiguous() if isinstance(value, Tensor) else value[:, :width].copy()


def _is_of_decoder(name: str) -> bool:
    return name == _TARGET or name.startswith("decoder_")


def _at_multiple(collator: Any, width: int) -> Any:
    twin = copy.copy(collator)
    setattr(twin, _MULTIPLE, width)
    return twin


def planned_collator(collate: Any, collator: Any, pad_to: PadTo) -> Callable[[list[Any]], Any] | None:
    """Return what collates to planned lengths, None if the collator cannot be told them."""
    if collate is not collator and getattr(collate, "data_collator", None) is not collator:
        return None
    if isinstance(collator, PadCollator):
        is_plain = isinstance(collator.pad_to, PadTo)
        return with_collator(collate, collator, replace(collator, pad_to=pad_to)) if is_plain else collate
    pads_to_longest = getattr(collator, "padding", True) in (True, "longest")
    num_axes = _num_axes(pad_to)
    if not hasattr(collator, _MULTIPLE) or not pads_to_longest or num_axes > 2:
        return None
    pads_left = getattr(getattr(collator, "tokenizer", None), "padding_side", "right") == "left"
    if num_axes == 2 and (pads_left or not hasattr(collator, "label_pad_token_id")):
        return None
    return PlannedCollator(collate, collator, pad_to)


def are_equally_long(shapes: IntArray) -> bool:
    """Say whether all batches are padded to the same lengths, so that any collator will do."""
    return len(np.unique(shapes[:, 1:], axis=0)) == 1
