"""Evaluation in planned batches: less padding, results in the order of the data, an exact mean loss."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.trainer_pt_utils import nested_concat

from ..._lengths import pad_up
from ..._types import IntArray
from ...errors import ArgumentError, DoesNotFitError, LengthsError
from ...plan.budget import Budget, MaxCost
from ...plan.grouping.sorting import Sorted
from ...plan.plan import plan_batches
from ...step.oom import devices_of, free_memory, is_out_of_memory
from ...step.packing.rows import is_packed
from .._devices import Devices
from .._inputs import Rows, Sequences, Whole, num_rows
from .._ranked import loader_options
from .._safe_steps import does_not_fit
from ._data import TwiceCollated
from ._lengths import LengthCache, pad_multiple_of, tell_label_axis
from ._sentences import reads_texts
from ._settings import Settings
from ._weights import LossWeights, TrainerLoss, row_key

logger = logging.getLogger(__name__)


@final
class Evaluation:
    """Plans the batches of evaluation and prediction, and weighs their losses.

    Args:
        settings: what the user asked for.
        lengths: of the data sets measured so far.
        weights: of losses; training uses the same.
    """

    def __init__(self, settings: Settings, lengths: LengthCache, weights: LossWeights) -> None:
        self._settings = settings
        self._lengths = lengths
        self._weights = weights
        self._run: EvaluationRun | None = None
        self._loaders: WeakKeyDictionary[Any, DataLoader[Any]] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        # A search of hyperparameters copies trainers into other processes, which make loaders of their own.
        return {**vars(self), "_loaders": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _loaders=WeakKeyDictionary())

    def loader(
        self,
        base: DataLoader[Any],
        dataset: Any,
        *,
        collator: Any,
        model: Any,
        devices: Devices,
        find: Callable[[IntArray], Budget],
    ) -> DataLoader[Any]:
        """Return a loader with planned batches, or the trainer's own loader if they cannot be planned.

        Args:
            base: the trainer's own loader.
            dataset: what is evaluated, before columns are removed.
            collator: may pad to a multiple.
            model: tells whether labels have lengths of their own.
            devices: the ranks that share the data.
            find: finds the budget that "auto" stands for, by the padded lengths.
        """
        args, budget = devices.args, self._settings.evaluation_budget
        # The order can be restored only in one array of all results. Metrics per batch need the trainer's own batches.
        is_gathered = args.eval_do_concat_batches and not args.batch_eval_metrics
        # Losses of sentence-transformers may compare the examples of a batch, so they keep the batches they know.
        if budget is None or not is_gathered or devices.parallel_size > 1 or reads_texts(collator):
            return base
        kept = self._loaders.get(base)  # the trainer keeps its loader, so that workers persist
        if kept is not None and kept.batch_sampler.num_examples == len(dataset):  # type: ignore[union-attr]
            return kept
        try:
            lengths = self._lengths.of(dataset, args, model, collator)
        except (LengthsError, TypeError) as error:
            logger.info("Evaluation is left to the trainer: %s", error)
            return base
        tell_label_axis(base, lengths.shape[1])
        multiple = pad_multiple_of(collator)
        plan = plan_evaluation(
            lengths,
            budget if isinstance(budget, Budget) else find(pad_up(lengths, multiple)),
            rank=devices.rank,
            world_size=devices.world_size,
            pad_multiple_of=multiple,
        )
        loader = self._loaders[base] = DataLoader(
            base.dataset,
            batch_sampler=plan,
            **{**loader_options(base), "collate_fn": TwiceCollated(base.collate_fn)},
        )
        return loader

    @contextmanager
    def running(self, plan: EvaluationPlan) -> Iterator[EvaluationRun]:
        """Evaluate the batches of a plan inside the context."""
        self._run = EvaluationRun(plan)
        try:
            with self._weights.weighing(None):
                yield self._run
        finally:
            self._run = None

    def step(self, predict: Callable[[Any], Any], inputs: Any, loss: TrainerLoss, devices: Devices) -> Any:
        """Run the trainer's prediction step on a batch, and add its loss with its weight.

        Args:
            predict: the trainer's own step on a batch.
            inputs: the batch.
            loss: of the trainer.
            devices: tell whether losses can be weighed.
        """
        if self._run is None:
            return self._predict(predict, inputs, loss)
        # Before the step, which may remove the labels.
        weight = self._weigh(inputs, loss, devices)
        found = self._predict(predict, inputs, loss)
        if found[0] is not None:
            self._run.add(found[0], weight)
        return found

    def _weigh(self, inputs: Any, loss: TrainerLoss, devices: Devices) -> Tensor:
        has_labels = isinstance(inputs.get("labels"), Tensor)
        if has_labels and not devices.is_divided:
            self._weights.learn(loss, [inputs])
        if has_labels and self._weights.is_known:
            return self._weights.count(inputs)
        return torch.tensor(num_rows(inputs, row_key(inputs, loss.model)))

    def _predict(self, predict: Callable[[Any], Any], inputs: Any, loss: TrainerLoss) -> Any:
        """Run the trainer's step, on halves of a batch that runs out of memory."""
        if self._settings.on_oom == "raise":
            return predict(inputs)
        try:
            return predict(dict(inputs))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        free_memory(devices_of(loss.model))
        if isinstance(inputs.get("labels"), Tensor) or loss.pairs is not None:
            self._weights.learn(loss, [inputs])
        key = row_key(inputs, loss.model)
        cut = self._weights.cut(dict(inputs)) if self._weights.is_known else None
        if cut is None or (isinstance(cut, Whole) and not is_packed(inputs) and loss.pairs is None):
            cut = Rows(dict(inputs), key)  # its outputs may be merged, if not its loss
        if cut.num == 1:
            raise DoesNotFitError(does_not_fit(cut, 0))
        middle, units = -(-cut.num // 2), list(range(cut.num))
        logger.warning("A batch of %d %ss ran out of memory in evaluation and runs in two.", cut.num, cut.unit)
        halves = [cut.take(part) for part in (units[:middle], units[middle:])]
        sizes = [None if isinstance(cut, Sequences) else num_rows(half, key) for half in halves]
        weights = [self._weights.count(half) if self._weights.is_known else None for half in halves]
        return merged([self._predict(predict, half, loss) for half in halves], sizes, self._weights_of(weights))

    def _weights_of(self, weights: list[Tensor | None]) -> list[float] | None:
        """Return the weights of losses, None if nobody knows them."""
        if self._weights.refusal or any(weight is None for weight in weights):
            return None
        return [float(weight) for weight in weights if weight is not None]


def merged(results: list[Any], sizes: list[int | None], weights: list[float] | None) -> Any:
    """Return the result of a prediction step on a batch from those on its parts.

    Args:
        results: ``(loss, logits, labels)`` of every part.
        sizes: the rows of every part; None where a part has no rows of its own, and only losses can be merged.
        weights: what the losses are means over; None if that is not known.
    """
    losses, *outputs = zip(*results, strict=True)
    loss = None
    if losses[0] is not None:
        if weights is None:
            raise DoesNotFitError(
                "a batch of evaluation does not fit, and cannot be cut, as nothing says what its loss is a mean over; "
                "use a smaller eval_budget"
            )
        wide = [value.double() * weight for value, weight in zip(losses, weights, strict=True) if weight > 0]
        loss = (sum(wide) / max(sum(weights), 1.0)).to(losses[0]) if wide else losses[0]
    return loss, *(_joined(list(values), sizes) for values in outputs)


def _joined(values: list[Any], sizes: list[int | None]) -> Any:
    """Return outputs of parts as those of the whole: rows in one tensor, nested as they came."""
    first = values[0]
    if first is None:
        return None
    if isinstance(first, Mapping):
        return {name: _joined([value[name] for value in values], sizes) for name in first}
    if isinstance(first, tuple | list):
        return type(first)(_joined(list(parts), sizes) for parts in zip(*values, strict=True))
    if not all(isinstance(value, Tensor) and value.ndim and len(value) == size
               for value, size in zip(values, sizes, strict=True)):  # fmt: skip
        raise DoesNotFitError(
            "a batch of evaluation does not fit, and an output of the model has no row per example, so parts of the "
            "batch cannot be joined; leave it out with ignore_keys, or use a smaller eval_budget"
        )
    return nested_concat(first, values[1], padding_index=-100)  # type: ignore[no-untyped-call]


@final
@dataclass(frozen=True, eq=False)
class EvaluationPlan:
    """The batches of a rank, for a ``DataLoader``; in every step all ranks have equally many examples, to be gathered.

    Attributes:
        steps: one array per step, shape ``(ranks, examples)``.
        is_own: shape ``(steps, ranks)``, False for a rank without an example of its own, which repeats another one.
        rank: of this process.
    """

    steps: list[IntArray]
    is_own: npt.NDArray[np.bool_]
    rank: int

    @property
    def num_rows(self) -> int:
        """Return how many rows are gathered, including repeated ones."""
        return sum(step.size for step in self.steps)

    @property
    def num_examples(self) -> int:
        """Return how many examples are evaluated."""
        return len(self.places)

    @cached_property
    def places(self) -> IntArray:
        """Return the place of each example among the gathered rows."""
        gathered = np.concatenate([step.reshape(-1) for step in self.steps])
        return np.unique(gathered, return_index=True)[1]

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[list[int]]:
        return (step[self.rank].tolist() for step in self.steps)


def plan_evaluation(
    lengths: npt.ArrayLike, budget: Budget, *, rank: int = 0, world_size: int = 1, pad_multiple_of: int = 1
) -> EvaluationPlan:
    """Plan an evaluation: examples of similar lengths share a step, and every rank has equally many of them.

    Args:
        lengths: of the examples.
        budget: what a batch of one rank may cost; an example over the budget runs alone.
        rank: of this process.
        world_size: number of ranks.
        pad_multiple_of: of the collator.

    >>> from batchwright import MaxTokens
    >>> plan = plan_evaluation([5, 1, 4, 2, 3], MaxTokens(5), world_size=2)
    >>> [step.tolist() for step in plan.steps], plan.is_own.tolist()
    ([[[0], [2]], [[4], [3]], [[1], [1]]], [[True, True], [True, True], [True, False]])
    """

    def cost(num_items: IntArray, padded: IntArray) -> npt.NDArray[Any]:
        return budget.fraction(-(-num_items // world_size), padded)

    plan = plan_batches(
        lengths,
        budget if world_size == 1 else MaxCost(cost, 1.0),
        grouping=Sorted(),
        shuffle=False,
        size_multiple_of=world_size,
        pad_multiple_of=pad_multiple_of,
        oversize="alone",
    )
    steps, is_own = [], []
    for batch in plan:
        rows = np.array(batch)
        # What cannot be dealt evenly is a step of its own, in which some ranks repeat an example.
        even = len(rows) - len(rows) % world_size
        for part in (rows[:even], rows[even:]):
            if len(part):
                steps.append(np.resize(part, (max(1, len(part) // world_size), world_size)).T)
                is_own.append(np.arange(world_size) < len(part))
    return EvaluationPlan(steps, np.array(is_own), rank)


@final
class EvaluationRun:
    """One evaluation: sums its loss, and puts gathered results in the order of the data.

    Args:
        plan: what is evaluated.
    """

    def __init__(self, plan: EvaluationPlan) -> None:
        self._plan = plan
        self._num_done = 0
        self._sums: Tensor | None = None

    def add(self, loss: Tensor, weight: Tensor) -> None:
        """Add the mean loss of a batch with its weight, the labels or examples it is a mean over."""
        is_own = bool(self._plan.is_own[self._num_done, self._plan.rank])
        self._num_done += 1
        wide = torch.float32 if loss.device.type == "mps" else torch.float64
        count = weight.to(loss.device, wide) * is_own
        # Without labels the mean is NaN.
        part = torch.stack([torch.where(count > 0, loss.detach().to(wide) * count, 0), count])
        self._sums = part if self._sums is None else self._sums + part

    def finish(self, output: Any, prefix: str, add_up: Callable[[Tensor], Tensor]) -> Any:
        """Return the output of the trainer's loop in the order of the data, with the exact mean loss.

        Args:
            output: an ``EvalLoopOutput``.
            prefix: of the names of metrics.
            add_up: sums a tensor over all ranks.
        """
        if self._sums is not None:
            loss, weight = add_up(self._sums).tolist()
            output.metrics[f"{prefix}_loss"] = loss / max(weight, 1.0)
        return output._replace(predictions=self.in_order(output.predictions), label_ids=self.in_order(output.label_ids))

    def in_order(self, values: Any) -> Any:
        """Return gathered rows in the order of the data; arrays, or nested tuples, lists and mappings of them."""
        if values is None:
            return None
        if isinstance(values, Mapping):
            return {name: self.in_order(value) for name, value in values.items()}
        if isinstance(values, tuple | list):
            return tuple(self.in_order(value) for value in values)
        if len(values) != self._plan.num_rows:
            raise ArgumentError(
                f"an output of the model has {len(values)} rows for {self._plan.num_rows} examples, so its order "
                "cannot be restored; leave it out with ignore_keys, or pass eval_budget=None"
            )
        return values[self._plan.places]

    def metrics_in_order(self, metrics: Callable[[Any], Any] | None) -> Callable[[Any], Any] | None:
        """Return a ``compute_metrics`` that receives its predictions in the order of the data."""
        return None if metrics is None else lambda prediction: metrics(self._prediction_in_order(prediction))

    def _prediction_in_order(self, prediction: Any) -> Any:
        losses = prediction.losses
        if losses is not None:
            # The loss of an example is the loss of its batch. The trainer repeats each, step by step and rank by rank,
            # equally often; here it is repeated once per example.
            sizes = [len(rows) for step in self._plan.steps for rows in step]
            losses = np.repeat(np.reshape(losses, (len(sizes), -1))[:, 0], sizes)
        return type(prediction)(
            predictions=self.in_order(prediction.predictions),
            label_ids=self.in_order(prediction.label_ids),
            inputs=self.in_order(prediction.inputs),
            losses=self.in_order(losses),
        )
