"""PlannedEvaluation: the hooks of a ``Trainer`` for evaluation and prediction, handed to the plan of evaluation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from ..._types import IntArray
from ...plan.budget import Budget
from .._auto_budget import BudgetFinder
from .._devices import Devices
from ._evaluation import EvaluationPlan
from ._packing import padding
from ._probing import evaluation_budget_of_trainer
from ._weights import TrainerLoss
from .callbacks import Batching


class PlannedEvaluation:
    """Evaluates on planned batches, and returns predictions in the order of the data."""

    eval_dataset: Any
    compute_metrics: Callable[..., Any] | None
    _batching: Batching
    _finder: BudgetFinder

    @abstractmethod
    def _loading(self) -> dict[str, Any]: ...

    @abstractmethod
    def _trainer_loss(self) -> TrainerLoss: ...

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return the loader for evaluation, with planned batches if they can be planned."""
        with padding(self):
            base = super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        dataset = self.eval_dataset[dataset] if isinstance(dataset, str) else dataset
        only_loss = None if self.compute_metrics is not None else True
        return self._batching.evaluation.loader(base, dataset, **self._loading(), find=self._finding(base, only_loss))

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return the loader for prediction, with planned batches if they can be planned."""
        with padding(self):
            base = super().get_test_dataloader(test_dataset)  # type: ignore[misc]
        return self._batching.evaluation.loader(base, test_dataset, **self._loading(), find=self._finding(base, None))

    def _finding(self, base: Any, loss_only: bool | None) -> Callable[[IntArray], Budget]:
        """Return what finds the budget of evaluation."""
        return lambda lengths: evaluation_budget_of_trainer(self, base, lengths, self._finder, loss_only=loss_only)

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Run the trainer's loop; predictions, labels and the inputs of metrics come in the order of the data."""
        given = (dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        plan, metrics = getattr(dataloader, "batch_sampler", None), self.compute_metrics
        if not isinstance(plan, EvaluationPlan):
            return super().evaluation_loop(*given)  # type: ignore[misc]
        with self._batching.evaluation.running(plan) as run:
            self.compute_metrics = run.metrics_in_order(metrics)
            try:
                output = super().evaluation_loop(*given)  # type: ignore[misc]
            finally:
                self.compute_metrics = metrics
        return run.finish(output, metric_key_prefix, Devices.of(self).add_up)

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch; its loss counts by the labels or examples it is a mean over."""
        step = super().prediction_step  # type: ignore[misc]
        return self._batching.evaluation.step(
            lambda part: step(model, part, *args, **kwargs), inputs, self._trainer_loss(), Devices.of(self)
        )
