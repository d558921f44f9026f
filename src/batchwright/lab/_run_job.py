"""A job in its process: load the data, train, and turn whatever goes wrong into a record."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ..errors import ArgumentError
from ._matrix import Job
from ._records import Dataset
from ._run_record import Record, make_record
from ._train import run_one
from .datasets import load
from .strategies import get


def execute(job: Job, source: Record | None) -> Record:
    """Make a run and return its record; an exception becomes a record with status ``failed``.

    Args:
        job: the run.
        source: for a replay, the record of the run it replays.
    """
    try:
        if source is not None and source["status"] != "ok":
            raise ArgumentError(f"the run of {source['strategy']} with seed {source['seed']}, which it replays, failed")
        dataset = load_data(job.dataset, job.data)
        return run_one(dataset, job.model, job.strategy, job.seed, job.settings, replay_of=source, notes=job.notes)
    except Exception as error:
        return failed(job, f"{type(error).__name__}: {error}", trace=traceback.format_exc())


def failed(job: Job, error: str, *, trace: str | None = None) -> Record:
    """Return the record of a run that did not come to its end."""
    return make_record(
        dataset=job.dataset,
        model=job.model,
        strategy=job.strategy,
        group=get(job.strategy).group,
        seed=job.seed,
        settings=job.all_settings,
        status="failed",
        error=error,
        traceback=trace,
    )


def load_data(name: str, options: Mapping[str, Any]) -> Dataset:
    """Load a data set once a process."""
    return _load(name, json.dumps(dict(options), sort_keys=True))


@lru_cache(maxsize=8)
def _load(name: str, options: str) -> Dataset:
    return load(name, **json.loads(options))
