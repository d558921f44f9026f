"""Training data for a Lightning Trainer: loaders whose batchwright sampler divides the data over ranks itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from ...errors import ArgumentError
from .._ranked import sampler_of
from ._loaders import EvaluationLoader, TrainLoader
from ._package import LightningDataModule
from .modules import find_callback


def planned_loader(loader: Any, trainer: Any, *, training: bool = True) -> Any:
    """Return a loader for Lightning whose batchwright sampler divides the data over ranks itself.

    Return it from ``train_dataloader`` of a module or data module, or pass it to ``trainer.fit``. Lightning cannot
    replace its sampler under DDP, so every example comes once per epoch over all ranks, in equally many steps.

    Args:
        loader: a ``DataLoader`` with ``batch_sampler=`` a batchwright sampler, or what ``regroup`` made; with
            ``AdaptiveBatching(controller="auto")`` one with a ``batch_size``.
        trainer: has an ``AdaptiveBatching`` among its callbacks.
        training: False for validation and tests, which run the same epoch each time. There may then be several loaders
            in a list or a dict, and as many are returned.
    """
    if not training:
        return _each(loader, lambda one: EvaluationLoader(one, trainer))
    if trainer.overfit_batches > 0:
        raise ArgumentError(
            "Trainer(overfit_batches=…) needs a sampler that Lightning can replace; plan a data set of few examples"
        )
    callback = find_callback(trainer)
    planned = TrainLoader(callback.resizable(loader, trainer.world_size), trainer)
    callback.attach(planned)
    return planned


@final
class PlannedDataModule(LightningDataModule):
    """Loaders with batchwright samplers as a data module: ``trainer.fit(model, PlannedDataModule(train, val=val))``.

    Args:
        train: the training data, as for ``planned_loader``.
        val: a loader for validation, or several in a list or a dict; those without a batchwright sampler are left to
            Lightning.
        test: loaders for tests, likewise.
    """

    def __init__(self, train: Any, *, val: Any = None, test: Any = None) -> None:
        super().__init__()
        self._train = train
        self._planned: tuple[Any, TrainLoader] | None = None
        # Set only if there is data: Lightning takes a method that returns nothing for a mistake.
        if val is not None:
            self.val_dataloader = lambda: self._evaluation(val)  # type: ignore[method-assign]
        if test is not None:
            self.test_dataloader = lambda: self._evaluation(test)  # type: ignore[method-assign]

    def train_dataloader(self) -> Any:
        """Return the training data, the same object every time a Trainer asks."""
        if self._planned is None or self._planned[0] is not self.trainer:
            self._planned = (self.trainer, planned_loader(self._train, self.trainer))
        return self._planned[1]

    def _evaluation(self, loaders: Any) -> Any:
        return _each(loaders, lambda one: one if sampler_of(one) is None else EvaluationLoader(one, self.trainer))


def _each(loaders: Any, make: Callable[[Any], Any]) -> Any:
    """Return what is made of every loader, in the same list, tuple or dict."""
    if isinstance(loaders, dict):
        return {name: _each(one, make) for name, one in loaders.items()}
    if isinstance(loaders, list | tuple):
        return [_each(one, make) for one in loaders]
    return make(loaders)
