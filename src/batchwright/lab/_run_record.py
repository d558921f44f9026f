"""The record of a run: one JSON object, the same whether it ended well or not."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeAlias

from .._version import __version__
from ._records import Dataset

Record: TypeAlias = dict[str, Any]

VERSION = 1
_METRICS = {"classification": "accuracy", "regression": "r2", "language": "loss"}
_KINDS = {"table": "tabular", "images": "image", "text": "text"}


def run_id(dataset: str, model: str, strategy: str, seed: int, settings: Mapping[str, Any]) -> str:
    """Return a name for a run that is the same whenever everything that decides it is the same.

    >>> run_id("wine", "mlp", "linear", 0, {"lr": 0.1}) == run_id("wine", "mlp", "linear", 0, {"lr": 0.2})
    False
    """
    content = json.dumps([VERSION, dataset, model, strategy, seed, dict(settings)], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=10).hexdigest()


def make_record(
    *, dataset: str, model: str, strategy: str, group: str, seed: int, settings: Mapping[str, Any], **found: Any
) -> Record:
    """Return a record; what was not found is empty, and numbers that are not finite are None.

    Args:
        dataset: the name of the data set.
        model: the name of the model.
        strategy: the name of the strategy.
        group: its group.
        seed: of the run.
        settings: as JSON values.
        **found: further fields of the record.
    """
    record = {
        "version": VERSION,
        "id": run_id(dataset, model, strategy, seed, settings),
        "dataset": dataset,
        "model": model,
        "strategy": strategy,
        "group": group,
        "seed": seed,
        "status": "ok",
        "error": None,
        "settings": dict(settings),
        "properties": {},
        "num_parameters": None,
        "metric_name": None,
        "curve": [],
        "decisions": [],
        "final": None,
        **found,
        "versions": versions(),
        "hardware": hardware(),
    }
    return dict(finite(record))


@lru_cache(maxsize=8)
def properties_of(dataset: Dataset) -> dict[str, Any]:
    """Return the properties of a data set, with its kind: tabular, image, text or language; computed once."""
    kind = "language" if dataset.task == "language" else _KINDS[dataset.kind]
    return {**dataset.properties(), "kind": kind}


def metric_name(dataset: Dataset) -> str:
    """Return what the metric of a data set is; that of language is the loss, counted downwards."""
    return _METRICS[dataset.task]


def metric_of(dataset: Dataset, figures: Mapping[str, float]) -> float:
    """Return the metric out of what ``evaluate`` returned; higher is better."""
    return -figures["loss"] if dataset.task == "language" else figures[_METRICS[dataset.task]]


def finite(value: Any) -> Any:
    """Return JSON values with None for every number that JSON cannot hold.

    >>> finite({"loss": float("nan"), "sizes": (1, 2.5)})
    {'loss': None, 'sizes': [1, 2.5]}
    """
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Return the versions that a run depended on."""
    installed = {name: metadata.version(name) for name in ("torch", "numpy")}
    return {"batchwright": __version__, "python": platform.python_version(), **installed}


@lru_cache(maxsize=1)
def hardware() -> dict[str, Any]:
    """Return the machine of a run."""
    return {"machine": platform.machine(), "num_cpus": num_cpus(), "processor": _processor()}


def num_cpus() -> int:
    """Return how many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
