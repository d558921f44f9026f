"""One run: a model trained by a strategy on a fixed number of examples, and everything worth keeping of it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from .._optional import require

require("torch", extra="lab")

# After the check, so that its message is read.
import torch  # noqa: E402

from .._checks import as_whole  # noqa: E402
from .._machine import one_thread  # noqa: E402
from ..errors import ArgumentError  # noqa: E402
from ._loop import Loop  # noqa: E402
from ._records import Dataset  # noqa: E402
from ._run_difficulty import difficulty_of  # noqa: E402
from ._run_record import Record, make_record, metric_name, properties_of  # noqa: E402
from ._run_settings import Conditions, RunSettings  # noqa: E402
from .models import count_parameters, evaluate  # noqa: E402
from .strategies import Strategy, get, schedule_of  # noqa: E402


def run_one(
    dataset: Dataset,
    model_name: str,
    strategy: Strategy | str,
    seed: int,
    settings: RunSettings,
    *,
    replay_of: Mapping[str, Any] | None = None,
    notes: Mapping[str, Any] | None = None,
) -> Record:
    """Train one model and return the record of the run, a JSON object.

    Every strategy sees the same number of examples. The seed fixes the weights at the start and the order of examples;
    the same arguments give the same record but for its seconds. Validation falls on the first update at or after
    points that are the same for all strategies, on whole epochs where there are enough; ``train_loss`` on the curve is
    the mean over the updates since the point before, and in ``final`` that of the last model on all training
    examples. Seconds are those of the processor, validation left out. A loss that is no number ends the run: its final
    figures are then None.

    Args:
        dataset: from ``datasets.load``.
        model_name: one of ``models_for(dataset)``.
        strategy: a strategy or its name.
        seed: of the weights and the order.
        settings: the same for all strategies that are to be compared.
        replay_of: for a replay, the record of the run whose batch sizes are played again.
        notes: further settings to keep in the record, as JSON values; they belong to the id.

    >>> from batchwright.lab.datasets import load
    >>> wine = load("wine")
    >>> record = run_one(wine, "logistic", "linear", 0, RunSettings.fit(len(wine.train), num_epochs=2))
    >>> record["status"], record["final"]["examples"], [change["new"] for change in record["decisions"]]
    ('ok', 284, [32])
    """
    strategy = get(strategy) if isinstance(strategy, str) else strategy
    seed = as_whole("seed", seed, least=0)
    settings.check_size_of(len(dataset.train))
    setup = strategy.make(_conditions(dataset, strategy, settings, replay_of))
    with one_thread(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        loop = Loop(dataset, model_name, setup, seed, settings)
        loop.run()
        final = loop.final() | {"train_loss": _train_loss(loop, dataset)}
    return make_record(
        dataset=dataset.name,
        model=model_name,
        strategy=strategy.name,
        group=strategy.group,
        seed=seed,
        settings={**settings.to_dict(), **(notes or {})},
        properties=properties_of(dataset),
        num_parameters=count_parameters(loop.model),
        metric_name=metric_name(dataset),
        curve=loop.curve,
        decisions=loop.decisions(),
        final=final,
    )


def _conditions(
    dataset: Dataset, strategy: Strategy, settings: RunSettings, replay_of: Mapping[str, Any] | None
) -> Conditions:
    if replay_of is not None and strategy.replays != replay_of["strategy"]:
        raise ArgumentError(f"{strategy.name} replays {strategy.replays}, got a record of {replay_of['strategy']}")
    return Conditions(
        settings=settings,
        num_train=len(dataset.train),
        num_classes=dataset.num_classes,
        difficulty=partial(difficulty_of, dataset),
        schedule=None if replay_of is None else schedule_of(replay_of),
    )


def _train_loss(loop: Loop, dataset: Dataset) -> float | None:
    return None if loop.has_diverged else evaluate(loop.model, dataset, part="train")["loss"]
