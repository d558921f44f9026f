"""The hooks of an update under a Lightning Trainer, in Lightning's order, and methods that would not run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor

from ...errors import ArgumentError

# What a module does in these would be missing from its update. The rest of the text says where to do it instead.
_REFUSED = {
    "optimizer_step": "on_before_optimizer_step for what comes before the step, a scheduler for a warm-up",
    "backward": "on_before_backward and on_after_backward",
    "configure_gradient_clipping": "AdaptiveBatching(clip_norm=…), or on_before_optimizer_step",
}


def refuse_methods(module: Any) -> None:
    """Refuse a module with methods of automatic optimisation that an exact update would leave out in silence."""
    for name, instead in _REFUSED.items():
        owner = next((cls for cls in type(module).__mro__ if name in vars(cls)), None)
        if owner is not None and not owner.__module__.startswith(("lightning.", "pytorch_lightning.")):
            raise ArgumentError(
                f"{owner.__name__}.{name} belongs to automatic optimisation and would not run; use {instead}"
            )


@final
class Hooks:
    """Calls the hooks of one update in Lightning's order: callbacks first, then the module.

    Args:
        trainer: has the callbacks.
        module: has hooks of its own.
        optimizer: torch's own, not Lightning's wrapper.
        has_scaler: a scaler steps the optimizer past Lightning, which then calls no ``on_before_optimizer_step``.
    """

    def __init__(self, trainer: Any, module: Any, optimizer: Any, *, has_scaler: bool) -> None:
        self._trainer = trainer
        self._module = module
        self._optimizer = optimizer
        self._has_scaler = has_scaler

    def before_backward(self, loss: Tensor) -> None:
        """Call ``on_before_backward`` with the summed loss of a micro-batch."""
        # The forward pass that has just ended ran under autocast; hooks do not.
        with torch.autocast(loss.device.type, enabled=False):
            self._call("on_before_backward", loss)

    def after_backward(self) -> None:
        """Call ``on_after_backward``: gradients are those of the whole batch on all ranks."""
        self._call("on_after_backward")

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Call the hooks right before and right after the optimizer's step while this is open."""
        handles = [self._optimizer.register_step_post_hook(lambda *_: self._of_optimizer("on_before_zero_grad"))]
        if self._has_scaler:
            before = self._optimizer.register_step_pre_hook(lambda *_: self._of_optimizer("on_before_optimizer_step"))
            handles.append(before)
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _of_optimizer(self, name: str) -> None:
        self._call(name, self._optimizer)

    def _call(self, name: str, *arguments: Any) -> None:
        for callback in self._trainer.callbacks:
            getattr(callback, name)(self._trainer, self._module, *arguments)
        getattr(self._module, name)(*arguments)
