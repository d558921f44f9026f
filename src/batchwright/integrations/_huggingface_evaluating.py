"""The evaluation of an adaptive trainer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..errors import LengthsError
from ._huggingface_evaluation import EvaluationLoader, EvaluationRun, plan_evaluation
from ._huggingface_loading import LoadingMixin
from ._huggingface_settings import parallel_size
from ._huggingface_stepping import row_key
from ._inputs import num_rows

logger = logging.getLogger(__name__)


class EvaluatingMixin(LoadingMixin):
    """Plans the batches of evaluation and prediction; results come in the order of the data."""

    eval_dataset: Any
    compute_metrics: Callable[..., Any] | None

    _eval_loaders: WeakKeyDictionary[Any, EvaluationLoader]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Return the loader for evaluation, planned where that can be done."""
        base = super().get_eval_dataloader(eval_dataset)  # type: ignore[misc]
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        return self._planned(base, self.eval_dataset[dataset] if isinstance(dataset, str) else dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """Return the loader for prediction, planned where that can be done."""
        return self._planned(super().get_test_dataloader(test_dataset), test_dataset)  # type: ignore[misc]

    def _planned(self, base: DataLoader[Any], dataset: Any) -> DataLoader[Any]:
        budget = self._settings.evaluation_budget
        # Without one array of all results there is no order to restore, and metrics of batches want the trainer's loop.
        is_gathered = self.args.eval_do_concat_batches and not self.args.batch_eval_metrics
        if budget is None or not is_gathered or parallel_size(self) > 1:
            return base
        if base in self._eval_loaders:  # the trainer keeps its loader, so that workers persist
            return self._eval_loaders[base]
        try:
            lengths = self._lengths_of(dataset)
        except (LengthsError, TypeError) as error:
            logger.info("Evaluation is left to the trainer: %s", error)
            return base
        rank, world_size = self._rank
        plan = plan_evaluation(lengths, budget, world_size=world_size, pad_multiple_of=self._pad_multiple_of)
        loader = self._eval_loaders[base] = EvaluationLoader(base, plan, rank=rank)
        return loader

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Run the trainer's loop; predictions, labels and what metrics are computed from are in the order of data."""
        given = (dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if not isinstance(dataloader, EvaluationLoader):
            return super().evaluation_loop(*given)  # type: ignore[misc]
        run, metrics = EvaluationRun(dataloader), self.compute_metrics
        self._evaluation = run
        if metrics is not None:
            self.compute_metrics = lambda prediction: metrics(run.prediction_in_order(prediction))
        try:
            output = super().evaluation_loop(*given)  # type: ignore[misc]
        finally:
            self._evaluation, self.compute_metrics = None, metrics
        if run.sums is not None:
            loss, weight = self._add_up(run.sums).tolist()
            output.metrics[f"{metric_key_prefix}_loss"] = loss / max(weight, 1.0)
        return output._replace(predictions=run.in_order(output.predictions), label_ids=run.in_order(output.label_ids))

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch; its loss is summed up by what it is a mean over."""
        run = self._evaluation
        if run is None:
            return super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        has_labels = isinstance(inputs.get("labels"), Tensor)
        if has_labels and not self._weights.is_sure and self._can_weigh():
            prepared = self._prepare_inputs(dict(inputs))  # type: ignore[attr-defined]
            self._weights.learn(self._parent_loss, self.model, prepared, row_key(inputs, self.model))
        rows = torch.tensor(num_rows(inputs, row_key(inputs, self.model)))
        weight = self._weights.count(inputs) if has_labels and self._weights.is_known else rows
        found = super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]
        if found[0] is not None:
            run.add(found[0], weight)
        return found
