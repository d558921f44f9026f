"""``budget="auto"`` for a ``BatchSampler`` whose batches a ``Stepper`` runs, as under Accelerate and Lightning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, final

import torch
from torch import nn

from .._checks import as_state
from .._lengths import pad_up
from ..errors import ArgumentError
from ..plan.sampler.planned import BatchSampler
from ..size.learning_rate import innermost
from ..step import Stepper
from ..step.calibration.finding import Probe, find_budget
from ..step.calibration.found import FoundBudget
from ..step.filler import without_filler
from ..step.losses import LossFunction
from ._auto_budget import (
    BudgetFinder,
    agreement_of,
    is_auto_budget,
    monitor_of,
    own_collator,
    tell,
    with_whole_groups,
)
from ._contents import contents_of
from ._describing import (
    describe_callable,
    describe_lengths,
    describe_model,
    describe_optimizer,
    describe_packages,
)
from ._keeping import kept_draws

# What a Stepper needs to run a batch; the rest is about updates.
_OPTIONS = ("lengths", "collate", "trim", "weight_of", "split", "tokens_of")


def wants_auto(budget: Any) -> bool:
    """Say whether an adapter is to find the budget; None leaves that of the sampler."""
    if budget is not None and not is_auto_budget(budget):
        raise ArgumentError(f"budget takes 'auto' here, got {budget!r}; give any other budget to the BatchSampler")
    return budget is not None


def check_sampler(sampler: Any) -> None:
    """Refuse data whose batches are not planned."""
    if not isinstance(sampler, BatchSampler):
        raise ArgumentError(
            "budget='auto' sets the budget of a BatchSampler; give a DataLoader with batch_sampler="
            "BatchSampler(lengths, MaxItems(1)), or leave budget out: where a controller decides the size, Stepper "
            "finds by itself what fits"
        )
    if sampler.settings.grouping.row_capacity is not None:
        raise ArgumentError(
            "budget='auto' measures batches of single examples, not of packed rows; give MaxTokens(8 * capacity) to "
            "the sampler"
        )


@final
class PlannedBudget:
    """A sampler with the budget that was found, as one part of a checkpoint: its place is one in that plan.

    Args:
        sampler: gets the budget.
        budget: what was found.
    """

    def __init__(self, sampler: BatchSampler, budget: FoundBudget) -> None:
        self._sampler, self.budget = sampler, budget
        self._plan_with(budget)

    def state_dict(self) -> dict[str, Any]:
        """Return the budget and the place as JSON values."""
        return {"found": self.budget.to_json(), "sampler": self._sampler.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Plan with the budget of another run, and continue where that was; after a refusal all is as it was."""
        state = as_state(state, of="a sampler with budget='auto'", needs=("found", "sampler"))
        found, place = FoundBudget.from_json(state["found"]), self._sampler.state_dict()
        before = self.budget
        self._plan_with(found)
        try:
            self._sampler.load_state_dict(state["sampler"])
        except Exception:
            self._plan_with(before)
            self._sampler.load_state_dict(place)
            raise

    def _plan_with(self, budget: FoundBudget) -> None:
        self.budget = budget
        # A sampler is pickled without its plan: that of the old budget.
        vars(self._sampler).update({**self._sampler.__getstate__(), "budget": budget})
        vars(self._sampler).pop("pad_to", None)


@final
class StepperProbe(Probe):
    """Runs batches of a loader's data as a ``Stepper`` does, without an update."""

    def __init__(self, stepper: Stepper, loader: Any, move: Callable[[Any], Any]) -> None:
        self._stepper, self._move = stepper, move
        self._dataset, self._collate = loader.dataset, own_collator(loader.collate_fn)

    def load(self, indices: list[int]) -> Any:
        """Return the batch of some examples, on the device."""
        fetch = getattr(self._dataset, "__getitems__", None)
        examples = fetch(indices) if callable(fetch) else [self._dataset[index] for index in indices]
        return self._move(_examples_alone(self._collate(examples)))

    def run(self, batch: Any) -> None:
        """Run forward and backward."""
        try:
            self._stepper.accumulate(batch)
        finally:
            self._stepper.abandon()


def _examples_alone(batch: Any) -> Any:
    """Return a batch without filler, which costs what examples cost: a few would seem to take as long as many."""
    return without_filler(batch) if isinstance(batch, Mapping) else batch


def find_planned(
    finder: BudgetFinder,
    sampler: BatchSampler,
    loader: Any,
    *,
    module: nn.Module,
    optimizer: Any,
    loss_fn: LossFunction,
    options: Mapping[str, Any],
    move: Callable[[Any], Any],
    device: torch.device,
    world_size: int,
    autocast: torch.dtype | None,
    name: str,
    is_shown: bool,
    runs: Any = None,
) -> FoundBudget:
    """Return the budget of a sampler's batches, each of which is an update. A collective.

    Args:
        finder: keeps what is known.
        sampler: plans the batches.
        loader: has the data and the collator.
        module: without DDP.
        optimizer: of the module.
        loss_fn: of the ``Stepper``.
        options: of the ``Stepper``.
        move: puts a batch on the device.
        device: that batches run on.
        world_size: number of ranks.
        autocast: the type of the forward pass.
        name: of the framework.
        is_shown: show progress and result.
        runs: what ``loss_fn`` calls, if that is a loss of the user; None if ``loss_fn`` is it.
    """
    if any(isinstance(part, nn.SyncBatchNorm) for part in module.modules()) and world_size > 1:
        raise ArgumentError(
            "budget='auto' measures every rank by itself, but ranks meet in SyncBatchNorm; give a budget to the sampler"
        )
    lengths = pad_up(sampler.plan.lengths, sampler.settings.pad_multiple_of)
    inner, agreement = innermost(optimizer), agreement_of(device, world_size)
    monitor = monitor_of(device, options.get("memory"))
    needed = {option: options[option] for option in _OPTIONS if option in options}

    def search() -> FoundBudget:
        used, collate = dict(needed), needed.get("collate")
        if collate is not None:
            used["collate"] = lambda examples: _examples_alone(collate(examples))
        stepper = Stepper(module, inner, loss_fn, autocast=autocast, on_oom="raise", **used)
        put_back = kept_draws([loader.dataset, loader.collate_fn])
        try:
            return find_budget(
                StepperProbe(stepper, loader, move),
                lengths,
                modules=[module],
                optimizers=[inner],
                device=device,
                monitor=monitor,
                agreement=agreement,
                progress=is_shown,
            )
        finally:
            put_back()

    def describe() -> dict[str, Any]:
        return {
            "framework": name,
            "model": describe_model(module),
            "lengths": describe_lengths(lengths),
            "packages": describe_packages(),
            "loss": describe_callable(loss_fn if runs is None else runs),
            "collator": describe_callable(loader.collate_fn),
            "precision": str(autocast),
            "optimizer": describe_optimizer(inner),
            "options": {option: contents_of(value) for option, value in sorted(needed.items())},
        }

    found, is_known = finder.find(
        describe,
        search,
        device=device,
        monitor=monitor,
        lengths=lengths,
        reserved_bytes=0,  # DDP has its buckets by now
        agreement=agreement,
        world_size=world_size,
    )
    found = with_whole_groups(found, lengths, sampler.settings.groups)
    tell(found, lengths, how="as found before" if is_known else "measured now", is_shown=is_shown)
    return found
