"""How far a lab has come: the runs it has of those that its plan asks for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ArgumentError
from ._observe_slices import properties_of
from ._report_records import Lab
from .strategies import get


def expected_runs(lab: Lab) -> int | None:
    """Return how many runs the plan has, None where the folder has no plan that can be read.

    A strategy that needs classes has no run on a regression; a data set without a run yet is taken to have classes.
    """
    plan = lab.plan.get("plan")
    if not isinstance(plan, Mapping):
        return None
    try:
        cells, names, num_seeds = plan["cells"], plan["strategies"], len(plan["seeds"])
        has_classes = {name: given.get("num_classes") is not None for name, given in properties_of(lab.records).items()}
        return sum(
            num_seeds * _num_of(cell, names, num_seeds, has_classes.get(cell["dataset"], True)) for cell in cells
        )
    except (ArgumentError, KeyError, TypeError):
        return None


def progress_text(lab: Lab) -> str:
    """Return a sentence for a lab that has runs to make, empty for one that is complete or has no plan."""
    expected = expected_runs(lab)
    if expected is None or len(lab.records) >= expected:
        return ""
    return f"{len(lab.records):,} of {expected:,} runs so far; this page follows the lab."


def _num_of(cell: Mapping[str, Any], names: Sequence[str], num_seeds: int, has_classes: bool) -> int:
    strategies = [get(name) for name in names]
    fitting = [one for one in strategies if has_classes or not one.needs_classes]
    # A replay plays another seed's sizes, so with one seed there is none.
    return sum(1 for one in fitting if one.replays is None or num_seeds > 1)
