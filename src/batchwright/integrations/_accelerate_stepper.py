"""The stepper that ``prepare`` returns: the exact update, then the scheduler and the controller."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

from ..errors import StateMismatchError
from ..step import Stepper, StepReport
from ._accelerate_loader import PreparedLoader

STATE_VERSION = 1


@final
class AcceleratedStepper:
    """Runs an update for ``prepare``; ``accelerator.save_state`` saves it with the sampler and the controller.

    Attributes:
        stepper: the ``Stepper``, for ``warm_up`` or for an update in parts.
        scheduler: the prepared scheduler, None where none was given.
        controller: what observes every update, None where there is none.
    """

    def __init__(self, stepper: Stepper, optimizer: Any, loader: Any, scheduler: Any, controller: Any) -> None:
        self.stepper = stepper
        self.scheduler = scheduler
        self.controller = controller
        self._optimizer = optimizer
        self._loader = loader if isinstance(loader, PreparedLoader) else None
        self._num_applied = 0
        if optimizer.scaler is not None:  # only a scaler leaves updates out
            optimizer.optimizer.register_step_post_hook(self._count)

    def step(self, batch: Any) -> StepReport:
        """Run one update on a batch of the loader; the scheduler and the controller follow.

        A scaler that finds infinities leaves the update out, and the scheduler waits with it.
        """
        before = self._num_applied
        report = self.stepper.step(batch)
        if self._optimizer.scaler is not None:
            # What accelerator.optimizer_step_was_skipped reads; prepared schedulers ask it too.
            self._optimizer._is_overflow = self._num_applied == before
        if self.scheduler is not None:
            self.scheduler.step()
        if self.controller is not None:
            self.controller.observe(**self._place(), **report.observation())
        return report

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the sampler, the stepper and the controller, as JSON values."""
        return {"version": STATE_VERSION, **{name: part.state_dict() for name, part in self._parts().items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where a state was taken.

        Raises:
            StateMismatchError: the state is of another version, or of other parts than these.
        """
        parts = self._parts()
        if state.get("version") != STATE_VERSION:
            raise StateMismatchError(
                f"the state of prepare has version {STATE_VERSION}, got {state.get('version')!r}; start without it"
            )
        saved = sorted(state.keys() - {"version"})
        if saved != sorted(parts):
            raise StateMismatchError(
                f"the checkpoint holds the states of {', '.join(saved)}, here there are {', '.join(sorted(parts))}; "
                "call prepare with the same parts"
            )
        for name, part in parts.items():
            part.load_state_dict(state[name])

    def _parts(self) -> dict[str, Any]:
        sampler = None if self._loader is None else self._loader.sampler
        parts = {"sampler": sampler, "stepper": self.stepper, "controller": self.controller}
        return {name: part for name, part in parts.items() if part is not None}

    def _place(self) -> dict[str, int]:
        """Return the epochs completed, where the loader knows: the last update of an epoch completes it."""
        if self._loader is None:
            return {}
        return {"epoch": self._loader.epoch + self._loader.is_at_end}

    def _count(self, *_: Any) -> None:
        self._num_applied += 1
