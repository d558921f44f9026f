"""One run: a model trained by a strategy on a fixed number of examples, and the record of it, whatever happens."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Iterator, Mapping
from functools import lru_cache, partial
from typing import Any, final

import torch
from torch import nn
from torch.optim import Optimizer

from ..._checks import as_whole
from ..._machine import one_thread
from ...errors import ArgumentError, StateMismatchError
from ...plan import MaxTokens, ResizableBatchSampler
from ...size import BatchSizeController, constant
from ...size.noise import NoiseAverage
from ...step import FitToMemory, MemoryMonitor, Stepper, StepReport
from .._records import RunRecord, make_record
from ..datasets.dataset import Dataset, difficulty_of
from ..datasets.loading import load
from ..models.networks import count_parameters, make_model
from ..models.objective import METRICS, ActivationMemory, collate_for, evaluate, loss_fn_for, metric_of
from ..strategies.catalogue import get, schedule_of
from ..strategies.strategy import Conditions, RunSettings, Setup, Strategy
from ..update_time import EAGER, UpdateTime
from ._choice import Choice
from ._jobs import Job

_KINDS = {"table": "tabular", "images": "image", "text": "text"}
# Padded tokens per micro-batch of texts: short texts run together, and the update stays the same.
_MICRO_TOKENS = 4096


def execute(job: Job, source: RunRecord | None) -> RunRecord:
    """Make a run and return its record; an exception becomes a record with status ``failed``.

    Args:
        job: the run.
        source: for a replay, the record of the run that it repeats.
    """
    if job.choice is not None and job.choice.problem is not None:
        return failed(job, job.choice.problem)
    try:
        if source is not None and source["status"] != "ok":
            raise ArgumentError(f"it repeats the run of {source['strategy']} with seed {source['seed']}, which failed")
        dataset = load_data(job.cell.dataset, job.cell.data)
        if job.digest is not None and dataset.digest != job.digest:
            raise StateMismatchError(f"the data of {job.cell.dataset} changed while the lab ran")
        more: dict[str, Any] = {
            "replay_of": source,
            "notes": job.notes,
            "choice": job.choice,
            "update_time": job.update_time,
        }
        return run_one(dataset, job.cell.model, job.strategy, job.seed, job.settings, **more)
    except Exception as error:
        return failed(job, f"{type(error).__name__}: {error}", trace=traceback.format_exc())


def failed(job: Job, error: str, *, trace: str | None = None) -> RunRecord:
    """Return the record of a run that did not reach its end."""
    return make_record(
        dataset=job.cell.dataset,
        model=job.cell.model,
        strategy=job.strategy,
        group=get(job.strategy).group,
        seed=job.seed,
        settings=job.all_settings,
        status="failed",
        error=error,
        traceback=trace,
        tuning=None if job.choice is None else job.choice.to_dict(),
        time_model=job.update_time.to_dict(),
    )


def load_data(name: str, options: Mapping[str, Any]) -> Dataset:
    """Load a data set once per process."""
    return _load(name, json.dumps(dict(options), sort_keys=True))


@lru_cache(maxsize=8)
def _load(name: str, options: str) -> Dataset:
    return load(name, **json.loads(options))


def run_one(
    dataset: Dataset,
    model_name: str,
    strategy: Strategy | str,
    seed: int,
    settings: RunSettings,
    *,
    replay_of: Mapping[str, Any] | None = None,
    notes: Mapping[str, Any] | None = None,
    choice: Choice | None = None,
    update_time: UpdateTime = EAGER,
) -> dict[str, Any]:
    """Train one model and return the record of the run, a JSON object.

    Every strategy sees the same number of examples. The seed fixes the initial weights and the order of examples: the
    same arguments give the same record, except for its seconds. The model is validated at the first update at or after
    points that are the same for all strategies, at the end of epochs if there are enough of them. ``train_loss`` on the
    curve is the mean over the updates since the previous point, and in ``final`` the loss of the last model on all
    training examples. Seconds are processor time without validation; simulated seconds are those of ``update_time``. A
    loss that is not finite ends the run; its final figures are then None.

    Args:
        dataset: from ``datasets.load``.
        model_name: one of ``models_for(dataset)``.
        strategy: a strategy or its name.
        seed: the seed of the weights and the order.
        settings: the same for all strategies that you want to compare.
        replay_of: for a replay, the record of the run whose batch sizes it repeats.
        notes: further settings to keep in the record, as JSON values; they are part of its id.
        choice: how the learning rate was chosen, to keep in the record.
        update_time: what an update would take on a GPU.

    >>> from batchwright.lab.datasets import load
    >>> wine = load("wine")
    >>> record = run_one(wine, "logistic", "linear", 0, RunSettings.fit(len(wine.train), num_epochs=2))
    >>> record["status"], record["final"]["examples"], [change["new"] for change in record["decisions"]]
    ('ok', 284, [32])
    """
    strategy = get(strategy) if isinstance(strategy, str) else strategy
    seed = as_whole("seed", seed, least=0)
    settings.check_size_of(len(dataset.train))
    setup = strategy.make(_conditions(dataset, strategy, settings, replay_of, update_time))
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        loop = Loop(dataset, model_name, setup, seed, settings, update_time)
        loop.run()
        final = loop.final()
    return make_record(
        dataset=dataset.name,
        model=model_name,
        strategy=strategy.name,
        group=strategy.group,
        seed=seed,
        settings={**settings.to_dict(), **(notes or {})},
        properties=properties_of(dataset),
        num_parameters=count_parameters(loop.model),
        metric_name=METRICS[dataset.task],
        tuning=None if choice is None else choice.to_dict(),
        time_model=update_time.to_dict(),
        curve=loop.curve,
        decisions=loop.decisions(),
        final=final,
    )


def _conditions(
    dataset: Dataset,
    strategy: Strategy,
    settings: RunSettings,
    replay_of: Mapping[str, Any] | None,
    update_time: UpdateTime,
) -> Conditions:
    if replay_of is not None and strategy.replays != replay_of["strategy"]:
        raise ArgumentError(f"{strategy.name} repeats runs of {strategy.replays}, got one of {replay_of['strategy']}")
    return Conditions(
        settings=settings,
        num_train=len(dataset.train),
        num_classes=dataset.num_classes,
        difficulty=partial(difficulty_of, dataset),
        schedule=None if replay_of is None else schedule_of(replay_of),
        seconds=lambda num_examples: update_time.seconds(passes=1, examples=num_examples),
    )


@lru_cache(maxsize=8)
def properties_of(dataset: Dataset) -> dict[str, Any]:
    """Return the properties of a data set, with its kind (tabular, image, text or language); computed once."""
    kind = "language" if dataset.task == "language" else _KINDS[dataset.kind]
    return {**dataset.properties(), "kind": kind}


@final
class Loop:
    """Trains one model; see ``run_one``."""

    def __init__(
        self,
        dataset: Dataset,
        model_name: str,
        setup: Setup,
        seed: int,
        settings: RunSettings,
        update_time: UpdateTime = EAGER,
    ) -> None:
        self._dataset = dataset
        self._settings = settings
        self._setup = setup
        self.model = make_model(model_name, dataset, seed=seed)
        self._optimizer = _make_optimizer(self.model, settings)
        self._controller = _make_controller(setup, settings)
        num_train = len(dataset.train)
        self._sampler = ResizableBatchSampler(num_train, self._controller, curriculum=setup.curriculum, seed=seed)
        self._fit = (
            FitToMemory(settings.base_size, initial=max(1, settings.base_size // 4)) if setup.fit_micro_batch else None
        )
        self._stepper = self._make_stepper()
        self._points = evaluation_points(settings, num_train)
        self._noise = NoiseAverage(horizon=4.0 * num_train)
        self._seconds, self._since = 0.0, time.process_time()
        self._update_time = update_time
        self._examples = self._updates = self._passes = self._epoch = 0
        # Of the updates since the last validation, for their mean loss.
        self._loss_sum, self._num_since = 0.0, 0
        self.has_diverged = False
        self.curve: list[dict[str, Any]] = []

    def run(self) -> None:
        """Train until the examples are used up or the loss is not finite."""
        self._validate(self._settings.lr * self._lr_factor())
        for batch, ends_epoch in self._batches():
            report = self._step(batch)
            if not math.isfinite(report.loss):
                self.has_diverged = True
                return
            if self._updates == 1:
                # Rules that scale the rate with the batch apply during the update; only now is the rate known.
                self.curve[0]["lr"] = report.lr
            self._observe(report, ends_epoch)
            if self._examples >= self._points[0]:
                self._validate(report.lr)

    def final(self) -> dict[str, Any]:
        """Return where the run ended; the figures are None if it diverged."""
        seconds = self._read_clock()
        last = {} if self.has_diverged else self.curve[-1]
        return {
            "train_loss": None if self.has_diverged else evaluate(self.model, self._dataset, part="train")["loss"],
            "validation_loss": last.get("validation_loss"),
            "metric": last.get("metric"),
            "updates": self._updates,
            "seconds": seconds,
            "simulated_seconds": self._simulated_seconds(),
            "examples": self._examples,
        }

    def _read_clock(self) -> float:
        """Return the seconds of training: processor time, which other processes do not lengthen."""
        now = time.process_time()
        self._seconds += now - self._since
        self._since = now
        return self._seconds

    def _simulated_seconds(self) -> float:
        return self._update_time.seconds(passes=self._passes, examples=self._examples)

    def decisions(self) -> list[dict[str, Any]]:
        """Return every change of the batch size."""
        names = ("examples", "step", "epoch", "old", "new", "reason")
        return [{name: getattr(decision, name) for name in names} for decision in self._controller.history]

    def _batches(self) -> Iterator[tuple[list[int], bool]]:
        """Yield batches and whether each ends its epoch; the last one is cut to meet the number of examples exactly."""
        curriculum, num_examples = self._setup.curriculum, self._settings.num_examples
        while True:
            epoch = self._sampler.epoch
            left = len(self._dataset.train) if curriculum is None else len(curriculum.prefix(epoch))
            for batch in self._sampler:
                batch = batch[: num_examples - self._examples]
                left -= len(batch)
                yield batch, left == 0
                if self._examples >= num_examples:
                    return

    def _step(self, batch: list[int]) -> StepReport:
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.lr * self._lr_factor()
        report = self._stepper.step(batch)
        self._examples += len(batch)
        self._updates += 1
        # Texts are cut into micro-batches for this processor only; these strategies would cut on any device.
        is_cut = self._setup.noise_parts is not None or self._setup.room is not None
        self._passes += report.num_micro_batches if is_cut else 1
        return report

    def _observe(self, report: StepReport, ends_epoch: bool) -> None:
        self._epoch += ends_epoch
        self._loss_sum += report.loss * report.batch_size
        self._num_since += report.batch_size
        noise = report.noise
        if noise is not None:
            self._noise = self._noise.update(noise.s, noise.g2, num_examples=report.batch_size)
        counts = {"epoch": self._epoch, "step": self._updates, "examples": self._examples}
        self._controller.observe(**{**report.observation(), **counts})

    def _validate(self, lr: float | None) -> None:
        seconds = self._read_clock() if self._updates else 0.0
        figures = evaluate(self.model, self._dataset)
        self.curve.append(
            {
                "examples": self._examples,
                "updates": self._updates,
                "seconds": seconds,
                "simulated_seconds": self._simulated_seconds(),
                "epoch": self._epoch,
                "train_loss": self._loss_sum / self._num_since if self._num_since else None,
                "validation_loss": figures["loss"],
                "metric": metric_of(self._dataset, figures),
                "batch_size": self._controller.size,
                "lr": lr,
                "noise_scale": self._noise.scale if self._noise.is_reliable else None,
            }
        )
        self._loss_sum, self._num_since = 0.0, 0
        self._points = [point for point in self._points if point > self._examples] or [math.inf]
        self._since = time.process_time()  # validation does not count

    def _lr_factor(self) -> float:
        return 1.0 if self._setup.lr_factor is None else self._setup.lr_factor(self._examples)

    def _make_stepper(self) -> Stepper:
        loss_fn, options = loss_fn_for(self._dataset), dict(self._setup.stepper)
        lengths = self._dataset.lengths
        if self._setup.room is not None:
            source = ActivationMemory(self._setup.room)
            loss_fn = source.watch(loss_fn)
            options["memory"] = MemoryMonitor(source=source)
            options["micro_batch"] = "auto" if self._fit is None else self._fit
        elif self._setup.noise_parts is not None:
            options |= {"measure_noise": True, "noise_parts": self._setup.noise_parts}
        elif lengths is not None:
            options |= {"micro_batch": MaxTokens(_MICRO_TOKENS), "lengths": lengths.item}
        return Stepper(self.model, self._optimizer, loss_fn, collate=collate_for(self._dataset), **options)


def evaluation_points(settings: RunSettings, num_train: int) -> list[float]:
    """Return after how many examples to validate: at the end of epochs if there are enough of them.

    >>> settings = RunSettings.fit(100, num_epochs=6, num_evaluations=4)
    >>> evaluation_points(settings, 100), evaluation_points(settings, 300)
    ([200, 300, 400, 600], [150.0, 300.0, 450.0, 600])
    """
    count, total = settings.num_evaluations, settings.num_examples
    points: list[float] = [total * place / count for place in range(1, count)]
    if total // num_train >= count:
        # Batches of any size end with the epoch, so that all strategies are validated at the same places.
        points = [num_train * round(point / num_train) for point in points]
    return [*points, total]


def _make_controller(setup: Setup, settings: RunSettings) -> BatchSizeController:
    policy = constant(settings.base_size) if setup.policy is None else setup.policy
    initial = settings.base_size if policy.start() is None else None
    limits = settings.min_size, settings.max_size
    # The record holds every decision.
    return BatchSizeController(policy, min_size=limits[0], max_size=limits[1], initial=initial, max_history=None)


def _make_optimizer(model: nn.Module, settings: RunSettings) -> Optimizer:
    # Fused, since the steps of small models are mostly overhead.
    if settings.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), lr=settings.lr, fused=True)
    return torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum, fused=True)
