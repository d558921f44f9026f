"""Forward and backward of micro-batches that may run out of memory: exact gradients, or an error on every rank."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias, final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .._modules import parameters_of
from .._ranks import Ranks
from .._tree import leaves
from ..errors import ArgumentError, DoesNotFitError
from ..step.memory.budget_tracker import FitFeedback
from ..step.memory.fit_to_memory import MicroLimit
from ..step.oom import (
    Snapshot,
    add_back,
    devices_of,
    drop_gradients,
    free_memory,
    is_out_of_memory,
    present,
    set_aside,
    warn_of_split,
)
from ._inputs import Cut, Rows

# step(model, inputs) -> detached loss, forward and backward
Step: TypeAlias = Callable[[nn.Module, dict[str, Any]], Tensor]
# replay(eager) -> detached loss
Replay: TypeAlias = Callable[[Callable[[], Tensor]], Tensor]
# "split" raises if one example does not fit by itself; "split_retry" leaves that example out, and warns.
Strategy: TypeAlias = Literal["split", "split_retry", "skip"]

_HALF = (torch.float16, torch.bfloat16)

logger = logging.getLogger(__name__)


@final
class SafeSteps:
    """Runs forward and backward of micro-batches; the gradient stays exact if memory runs out.

    A micro-batch that does not fit is run again in smaller pieces, as if it had been cut like that from the beginning:
    its partial gradients are dropped, random state and buffers are restored. The size that failed is remembered, so
    that later micro-batches are cut before they fail. Gradients of parameters in half precision are summed in float32,
    and rounded once per update. Under DDP, forward and backward run without collectives; ranks meet once after the last
    micro-batch of an update, where all of them raise if one of them has failed.

    Args:
        strategy: ``"split"``, ``"split_retry"``, or ``"skip"`` to leave out a micro-batch that does not fit.
        first_size: the largest number of examples in a piece at the first retry.
        key: the input whose length is the number of examples.
        on_oom: called after every failure.
        fit: lets the size of pieces follow the memory in use; None runs micro-batches whole while they fit.

    Attributes:
        num_cuts: how many more pieces than micro-batches have run.
    """

    def __init__(
        self,
        strategy: Strategy,
        first_size: int,
        key: str,
        on_oom: Callable[[], None],
        *,
        fit: FitFeedback | None = None,
    ) -> None:
        self._fit = fit
        self._strategy = strategy
        self._first_size = first_size
        self._key = key
        self._on_oom = on_oom
        self._limit = MicroLimit()
        self._ranks: tuple[nn.Module, Ranks] | None = None
        self._sums = WideSums()
        self._is_warned = False
        self.num_cuts = 0

    def run(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        step: Step,
        *,
        is_last: bool,
        cut: Cut | None = None,
        optimizer: Any = None,
        has_scaler: bool = False,
        replay: Replay | None = None,
    ) -> Tensor:
        """Add the gradient of a micro-batch to the gradients; return its loss, 0 if all of it was left out.

        Args:
            model: as the trainer wraps it.
            inputs: the micro-batch.
            step: runs forward and backward on a piece, with the weight of the piece in the update.
            is_last: the micro-batch ends the update, so ranks add up their gradients.
            cut: how the micro-batch can be cut; None cuts rows.
            optimizer: may train parameters that the model does not own.
            has_scaler: a ``GradScaler`` follows.
            replay: adds the gradient from a graph, or calls what it is given, which adds it eagerly; None has no graph.
        """
        ranks = Ranks(model) if self._ranks is None or self._ranks[0] is not model else self._ranks[1]
        self._ranks = model, ranks
        parameters = trained_parameters(ranks.module, optimizer)
        loss, failure = torch.zeros((), device=parameters[0].device), None
        try:
            check_retries(ranks, parameters)
            cut = Rows(inputs, self._key) if cut is None else cut
            add = partial(self._add, ranks, cut, step, parameters)
            loss = add() if replay is None else replay(add)
        except Exception as error:
            failure = error
        if failure is not None or is_last:
            # A rank that fails does not run the rest of the update: it meets the others where they end theirs.
            (same_buffers,) = ranks.agree(failure, parameters[0].device, marks=[ranks.mark_of_buffers()])
            if not same_buffers:
                raise ArgumentError(
                    "buffers of the model have other shapes on other ranks, so they cannot be shared; give them the "
                    "same shape everywhere, or pass ddp_broadcast_buffers=False"
                )
        if is_last:
            self._sums.write_back(ranks, parameters)
            ranks.share_buffers()
        if is_last and has_scaler:
            fill_for_scaler(parameters)
        return loss

    def _add(self, ranks: Ranks, cut: Cut, step: Step, parameters: list[nn.Parameter]) -> Tensor:
        self._sums.collect(parameters)
        held = set_aside(parameters)
        sums, is_done = WideSums(), False
        try:
            with ranks.no_sync():
                loss = self._run_until_it_fits(ranks.module, cut, step, parameters, sums)
            is_done = True
        finally:
            if not is_done:
                drop_gradients(parameters)
            add_back(held)
            if is_done:
                self._sums.add(sums)
            else:
                self._sums.write_back()
        return loss

    def _run_until_it_fits(
        self, module: nn.Module, cut: Cut, step: Step, parameters: list[nn.Parameter], sums: WideSums
    ) -> Tensor:
        unit_cost = sum(tensor.numel() for tensor in leaves(cut.batch)) / cut.num
        snapshot = Snapshot.of(module)
        units, most = list(range(cut.num)), cut.num
        if self._fit is not None:
            self._fit.begin()
        while units:
            asked = cut.num if self._fit is None or cut.why_whole else self._fit.size
            most = max(1, min(most, asked, int(min(self._limit.ceiling / unit_cost, cut.num))))
            pieces = [piece.tolist() for piece in np.array_split(units, -(-len(units) // most))]
            check_hooks(parameters, len(pieces))
            if len(pieces) > 1 and not self._is_warned:
                self._is_warned = warn_of_split(module)
            outcome = _attempt(module, cut, pieces, step, lambda: sums.collect(parameters))
            if isinstance(outcome, Tensor):
                self.num_cuts += len(pieces) - 1
                is_cut = len(pieces) > 1 and self._limit.ceiling < asked * unit_cost
                self._limit = self._limit.after_success(max(map(len, pieces)) * unit_cost, is_cut=is_cut)
                if self._fit is not None:
                    self._fit.end([len(piece) for piece in pieces], None)
                return outcome
            drop_gradients(parameters)
            sums.drop()
            snapshot.restore()
            free_memory(devices_of(module))
            self._on_oom()
            if self._fit is not None:
                self._fit.failed(len(outcome))
            if self._strategy == "skip":
                logger.warning("A micro-batch of %d %ss ran out of memory and is left out.", cut.num, cut.unit)
                break
            if len(outcome) == 1:
                self._give_up(cut, outcome[0])
                units = [unit for unit in units if unit != outcome[0]]
            else:
                self._limit = self._limit.after_failure(len(outcome) * unit_cost)
                most = min(-(-len(outcome) // 2), self._first_size)
        return torch.zeros((), device=parameters[0].device)

    def _give_up(self, cut: Cut, unit: int) -> None:
        """Raise, unless single examples may be left out."""
        if self._strategy == "split" or cut.why_whole:
            raise DoesNotFitError(does_not_fit(cut, unit))
        logger.warning(
            "%s %d of %d does not fit by itself and is left out of this update.", cut.unit.capitalize(), unit, cut.num
        )


def check_retries(ranks: Ranks, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse models that a rank cannot run again on its own, and parameters that a reduction would not reach."""
    if not ranks.can_retry:
        raise ArgumentError(
            "ranks meet inside the forward pass, in SyncBatchNorm or in shards, so none can try again on its own; pass "
            "on_oom='raise', or use a norm that does not look at the batch"
        )
    ranks.check_reached(parameters)
    if any(parameter._post_accumulate_grad_hooks for parameter in parameters):
        raise ArgumentError(
            "a parameter has a hook of register_post_accumulate_grad_hook, which may update it inside the backward "
            "pass, and nothing could undo that if memory runs out; use an optimizer that steps later, or on_oom='raise'"
        )


def check_hooks(parameters: Sequence[nn.Parameter], num_parts: int) -> None:
    """Refuse hooks of parameters that would see the gradients of parts instead of that of the update.

    Args:
        parameters: that are trained.
        num_parts: in how many backward passes the gradient is gathered.
    """
    for parameter in parameters if num_parts > 1 else []:
        steps = parameter._post_accumulate_grad_hooks
        foreign = [hook for hook in (parameter._backward_hooks or {}).values() if not hasattr(hook, "is_batchwright")]
        if steps or foreign:
            raise ArgumentError(
                f"a parameter of shape {tuple(parameter.shape)} has a hook, which would see the gradients of "
                f"{num_parts} micro-batches instead of that of the update; remove it, or use one micro-batch per update"
            )


def does_not_fit(cut: Cut, unit: int) -> str:
    """Return the error text about a unit that runs out of memory on its own."""
    what = f"the {cut.unit}" if cut.why_whole else f"{cut.unit} {unit} of {cut.num} of a micro-batch"
    cannot = f" and cannot be cut: {cut.why_whole}" if cut.why_whole else ""
    return (
        f"{what} does not fit on its own{cannot}; {cut.describe(unit)}. Lower the budget or shorten the example, use "
        "gradient_checkpointing=True, or leave out what does not fit with on_oom='skip'"
    )


def _attempt(
    module: nn.Module, cut: Cut, pieces: list[list[int]], step: Step, collect: Callable[[], None]
) -> Tensor | list[int]:
    """Run all pieces; return the sum of their losses, or the piece that ran out of memory."""
    total: Tensor | None = None
    piece: list[int] = []
    try:
        for piece in pieces:
            loss = step(module, cut.part(piece))
            total = loss if total is None else total + loss
            if len(pieces) > 1:
                collect()
        assert total is not None
        return total
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    # Outside the except block: the traceback is gone, and with it the activations it held.
    return piece


@final
class WideSums:
    """Sums of the gradients of parameters in half precision, kept in float32: adding there would round every piece.

    >>> weight = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    >>> sums = WideSums()
    >>> for gradient in (256.0, 1.0, 1.0):  # bfloat16 has no 257
    ...     weight.grad = torch.full_like(weight, gradient)
    ...     sums.collect([weight])
    >>> sums.write_back()
    >>> float(weight.grad)
    258.0
    """

    def __init__(self) -> None:
        self._sums: dict[nn.Parameter, Tensor] = {}

    def collect(self, parameters: Sequence[nn.Parameter]) -> None:
        """Take the gradients in half precision off their parameters."""
        for parameter in parameters:
            gradient = parameter.grad
            if gradient is not None and gradient.dtype in _HALF and not gradient.is_sparse:
                self._add(parameter, gradient)
                parameter.grad = None

    def add(self, other: WideSums) -> None:
        """Take over what another has collected."""
        for parameter, value in other._sums.items():
            self._add(parameter, value)

    def _add(self, parameter: nn.Parameter, value: Tensor) -> None:
        total = self._sums.get(parameter)
        self._sums[parameter] = value.float() if total is None else total.add_(value)

    def write_back(self, ranks: Ranks | None = None, parameters: Sequence[nn.Parameter] | None = None) -> None:
        """Round the sums once, into ``.grad``; with ranks, first average all gradients over them."""
        chosen = list(self._sums) if parameters is None else parameters
        sums = [self._with_newest(parameter) for parameter in chosen]
        if ranks is not None:
            sums = ranks.add_up(sums, chosen, 1 / ranks.world_size)
        for parameter, total in zip(chosen, sums, strict=True):
            if total is not None and total is not parameter.grad:
                parameter.grad = total.to(parameter.dtype)
        self.drop()

    def _with_newest(self, parameter: nn.Parameter) -> Tensor | None:
        total, newest = self._sums.get(parameter), parameter.grad
        return newest if total is None else total if newest is None else total.add_(newest)

    def drop(self) -> None:
        """Forget what was collected."""
        self._sums = {}


def trained_parameters(module: nn.Module, optimizer: Any = None) -> list[nn.Parameter]:
    """Return what an update trains now: parameters of the module, and those that only the optimizer holds."""
    found = {id(parameter): parameter for parameter in parameters_of(module) if parameter.requires_grad}
    for group in [] if optimizer is None else optimizer.param_groups:
        found |= {id(parameter): parameter for parameter in group["params"] if parameter.requires_grad}
    return list(found.values())


def foreign_parameters(module: nn.Module, optimizer: Any) -> list[nn.Parameter]:
    """Return what only the optimizer holds: a trainer never clears the gradients of these between updates."""
    groups = [] if optimizer is None else optimizer.param_groups
    own = set(map(id, parameters_of(module)))
    held = {id(parameter): parameter for group in groups for parameter in group["params"] if parameter.requires_grad}
    return [parameter for key, parameter in held.items() if key not in own]


def fill_for_scaler(parameters: list[nn.Parameter]) -> None:
    """Give a ``GradScaler``, which fails without any gradient, an infinite one: it skips the update, as intended."""
    if not present(parameters):
        parameters[0].grad = torch.full_like(parameters[0], torch.inf)


def unreduced_parameters(model: nn.Module, optimizer: Any) -> list[nn.Parameter]:
    """Return the trained parameters that DDP does not reduce: those of no module, and those unfrozen later."""
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, DistributedDataParallel):
        return []
    # It looks at the parameters once, when it is made.
    reduced = {id(parameter) for parameter in inner._module_parameters}
    return [parameter for parameter in trained_parameters(inner.module, optimizer) if id(parameter) not in reduced]
