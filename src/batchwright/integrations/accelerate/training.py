"""What ``prepare`` returns: a loader of this rank's batches, and a stepper that runs exact updates on them."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, NamedTuple, final

import torch
from torch import nn

from ..._checks import as_state, is_same, load_parts
from ...errors import StateMismatchError
from ...step import Stepper, StepReport
from ...step.calibration.found import FoundBudget
from ...step.graphs.summary import GraphSummary
from .._auto import Ticks
from .._observing import Change, observe
from .._planned_budget import PlannedBudget
from .._ranked import is_at_end, num_batches
from .._size_log import log_sizes, read_sizes
from .._vector_fallback import VectorFallback

STATE_VERSION = 1
_SIZES = "sizes"  # states of earlier versions have none
_HINTS = {
    "entropy": "huggingface_loss(with_entropy=True) returns it too",
    "noise": "pass measure_noise=True to prepare",
}


@final
class PreparedLoader:
    """Yields the batches of a loader, moved to the device; its position in the epoch is the loop's.

    ``for batch in loader`` runs one epoch, or the rest of it after ``accelerator.load_state``. Nothing is fetched
    ahead except by the loader's own workers.
    """

    def __init__(self, loader: Any, sampler: Any, move: Callable[[Any], Any]) -> None:
        self._loader = loader
        self._sampler = sampler
        self._move = move
        self._num_left: int | None = None
        self._sizes = log_sizes(sampler)
        self._replay: list[int] = []  # sizes of the batches that workers of a saved run had fetched ahead
        self._num_received = 0  # in the newest loop

    @property
    def epoch(self) -> int:
        """Return the current epoch, or the next one: ``for epoch in range(loader.epoch, num_epochs)``."""
        return int(self._sampler.epoch)

    @property
    def sampler(self) -> Any:
        """Return what the loader draws from."""
        return self._sampler

    @property
    def is_at_end(self) -> bool:
        """Return whether the newest batch is the last of its epoch; False if that cannot be known."""
        return is_at_end(self._sampler, self._num_left)

    def set_epoch(self, epoch: int) -> None:
        """Go to an epoch; a position restored within that same epoch is kept. Without it, epochs follow one another."""
        if epoch != self.epoch:
            self._replay = []
        self._sampler.set_epoch(epoch)

    @property
    def _sizes_to_save(self) -> dict[str, list[int]]:
        """Return the sizes of batches that were formed and not received yet, under their name; a plan needs none."""
        return {} if self._sizes is None else {_SIZES: [*self._sizes.after(self._num_received), *self._replay]}

    def _go_on(self, sizes: list[int]) -> None:
        """Form the next batches with the sizes of a saved run."""
        self._replay, self._num_received = sizes, 0
        if self._sizes is not None:
            self._sizes.begin()

    def __len__(self) -> int:
        return len(self._loader)

    def __bool__(self) -> bool:
        return True  # Python would otherwise ask len(), which not every sampler knows

    def __iter__(self) -> Iterator[Any]:
        self._num_left = num_batches(self._sampler)
        if self._sizes is not None:
            self._sizes.begin(self._replay)
        self._replay, self._num_received = [], 0
        begun = _BegunQuietly(self._loader, self._sampler)
        for batch in self._sampler.track(begun) if hasattr(self._sampler, "track") else begun:
            self._num_received += 1
            if self._num_left is not None:
                self._num_left -= 1
            yield self._move(batch)


@final
class AcceleratedStepper:
    """Runs updates for ``prepare``; ``accelerator.save_state`` saves it with the sampler and the controller.

    Attributes:
        stepper: the ``Stepper``, for ``warm_up`` or for an update in parts.
        scheduler: the prepared scheduler, None if none was given.
        controller: what observes every update, or None.
    """

    def __init__(
        self,
        stepper: Stepper,
        optimizer: Any,
        loader: Any,
        scheduler: Any,
        controller: Any,
        *,
        announce: Callable[[Change], None] | None = None,
        ticks: Ticks | None = None,
        fallback: VectorFallback | None = None,
        budget: PlannedBudget | None = None,
    ) -> None:
        self.stepper = stepper
        self.scheduler = scheduler
        self.controller = controller
        self._optimizer = optimizer
        self._loader = loader if isinstance(loader, PreparedLoader) else None
        self._announce = announce
        self._ticks = ticks
        self._fallback = fallback
        self._budget = budget
        self._num_applied = 0
        if optimizer.scaler is not None:  # only a scaler skips updates
            optimizer.optimizer.register_step_post_hook(self._count)

    def step(self, batch: Any) -> StepReport:
        """Run one update on a batch of the loader, then advance the scheduler and let the controller observe.

        A scaler that finds infinities skips the update, and the scheduler waits with it.
        """
        before = self._num_applied
        report = self._run(batch)
        if self._optimizer.scaler is not None:
            # accelerator.optimizer_step_was_skipped reads this, and so do prepared schedulers.
            self._optimizer._is_overflow = self._num_applied == before
        for _ in range(1) if self._ticks is None else self._ticks.take(report.batch_size):
            if self.scheduler is not None:
                self.scheduler.step()
        if self.controller is not None:
            change = observe(self.controller, hints=_HINTS, **self._completed(), **report.observation())
            if change is not None and self._announce is not None:
                self._announce(change)
        return report

    @property
    def found_budget(self) -> FoundBudget | None:
        """Return what ``budget="auto"`` found, None without it."""
        return None if self._budget is None else self._budget.budget

    def _run(self, batch: Any) -> StepReport:
        if self._fallback is None:
            return self.stepper.step(batch)
        self.stepper, report = self._fallback.run(self.stepper, lambda stepper: stepper.step(batch))
        return report

    def graph_summary(self) -> GraphSummary:
        """Return what graphs did so far: shapes, how often they were replayed, memory, seconds spent and saved."""
        return self.stepper.graph_summary()

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the sampler, the stepper and the controller, as JSON values."""
        parts = {name: part.state_dict() for name, part in self._parts().items()}
        sizes = {} if self._loader is None else self._loader._sizes_to_save
        return {"version": STATE_VERSION, **parts, **sizes}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken.

        Raises:
            StateMismatchError: the state has another version, or belongs to other parts than these; all
                parts stay as they were.
        """
        state, parts = as_state(state, of="prepare"), self._parts()
        if not is_same(state.get("version"), STATE_VERSION):
            raise StateMismatchError(
                f"prepare reads states of version {STATE_VERSION}, got {state.get('version')!r}; start without it"
            )
        saved, sizes = sorted(map(str, state.keys() - {"version", _SIZES})), read_sizes(state)
        if saved != sorted(parts):
            raise StateMismatchError(
                f"the checkpoint holds the states of {', '.join(saved)}, but this run has {', '.join(sorted(parts))}; "
                "call prepare with the same parts"
            )
        if self._fallback is not None:
            self.stepper = parts["stepper"] = self._fallback.for_state(self.stepper, state["stepper"])
        if "sampler" in parts:
            _check_same_budgets(state["sampler"], has_found=self._budget is not None)
        load_parts(parts, state)
        if self._loader is not None:
            self._loader._go_on(sizes)

    def _parts(self) -> dict[str, Any]:
        sampler = None if self._loader is None else self._loader.sampler
        place = sampler if self._budget is None else self._budget
        parts = {"sampler": place, "stepper": self.stepper, "controller": self.controller, "schedule": self._ticks}
        return {name: part for name, part in parts.items() if part is not None}

    def _completed(self) -> dict[str, int]:
        """Return the completed epochs, if the loader knows them; the last update of an epoch completes it."""
        if self._loader is None:
            return {}
        return {"epoch": self._loader.epoch + self._loader.is_at_end}

    def _count(self, *_: Any) -> None:
        self._num_applied += 1


def _check_same_budgets(state: Any, *, has_found: bool) -> None:
    """Refuse the place in a plan of which only one of two runs has found the budget."""
    was_found = isinstance(state, Mapping) and "found" in state
    if was_found != has_found:
        raise StateMismatchError(
            f"the checkpoint was saved {'with' if was_found else 'without'} budget='auto', and this run has other "
            f"batches; call prepare {'with' if was_found else 'without'} it, or start without the checkpoint"
        )


@final
class Prepared(NamedTuple):
    """What ``prepare`` returns."""

    model: nn.Module
    optimizer: Any
    loader: Any
    stepper: AcceleratedStepper


@final
class _BegunQuietly:
    """A loader that leaves the random state as it was when it begins within an epoch.

    A ``DataLoader`` draws a seed when it begins. An uninterrupted run draws it at the start of the epoch, so a resumed
    one must not draw again.
    """

    def __init__(self, loader: Any, sampler: Any) -> None:
        self._loader = loader
        self._sampler = sampler
        self.dataset = getattr(loader, "dataset", None)
        self.in_order = getattr(loader, "in_order", True)

    def __iter__(self) -> Iterator[Any]:
        state = self._sampler.state_dict()
        is_within = bool(state.get("position", state.get("consumed", 0)))
        with _kept_random_state(is_kept=is_within):
            iterator = iter(self._loader)
            # regroup returns a generator, which begins its loader only when the first item is asked for.
            first = list(islice(iterator, 1)) if isinstance(iterator, Generator) else []
        return chain(first, iterator)


@contextmanager
def _kept_random_state(*, is_kept: bool) -> Iterator[None]:
    before = torch.get_rng_state()
    yield
    if is_kept:
        torch.set_rng_state(before)
