"""Graphs under a framework: which catalogue they have, and why there are none."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import numpy as np

from ..errors import ArgumentError
from ..plan.collating import PadTo
from ..step.collators import PadCollator
from ..step.graphs.backend import GraphBackend

Choice: TypeAlias = "bool | Literal['auto'] | GraphBackend"

# A graph of each shape is captured; more shapes than this hardly come again.
MOST_SHAPES = 64


def check_graphs(choice: Any) -> Choice:
    """Return the option ``graphs`` of an adapter, or refuse what it cannot be.

    >>> check_graphs("auto")
    'auto'
    """
    is_backend = isinstance(choice, GraphBackend) and not isinstance(choice, type)
    if isinstance(choice, bool | np.bool_):
        return bool(choice)
    if is_backend or (isinstance(choice, str) and choice == "auto"):
        return choice  # type: ignore[no-any-return]
    raise ArgumentError(f"graphs must be False, 'auto' or True, got {choice!r}")


def refuse_graphs(choice: Choice, reason: str) -> None:
    """Refuse ``graphs=True``; with ``"auto"`` steps run eagerly, and a warning says why."""
    if not isinstance(choice, str):
        raise ArgumentError(f"graphs=True cannot be, as {reason}; leave graphs out, or pass graphs='auto'")
    warnings.warn(f"steps run eagerly, without graphs: {reason}", stacklevel=5)


def why_no_catalogue(sampler: Any) -> str | None:
    """Return why the batches of a sampler have no catalogue of few shapes, None if they have one."""
    shapes = getattr(getattr(sampler, "plan", sampler), "shapes", None)
    if shapes is None:
        return f"the shapes of this {type(sampler).__name__} are not planned; give it grouping=Buckets(32)"
    num = len(np.unique(shapes, axis=0))
    if num > MOST_SHAPES:
        return (
            f"the plan has {num:,} shapes, and each would be a graph; group by Buckets(32), which makes at most 32 "
            f"({MOST_SHAPES} are allowed)"
        )
    return None


def why_not_padded(collate: Any, sampler: Any) -> str | None:
    """Return why a collator does not give batches their planned shapes, as far as can be seen."""
    if not isinstance(collate, PadCollator) or not isinstance(collate.pad_to, PadTo):
        return None
    if sampler.pad_to.shapes and not collate.pad_to.shapes:
        return "the PadCollator pads to the longest example of a batch; give it pad_to=sampler.pad_to"
    return None


def graph_options(options: Mapping[str, Any], sampler: Any, collate: Any) -> dict[str, Any]:
    """Return the options of a ``Stepper`` whose graphs take their shapes from a sampler, if none were given.

    Args:
        options: the options given to the adapter.
        sampler: of the training data, None if it has none of ours.
        collate: of its loader, or of the stepper.
    """
    found = dict(options)
    choice = check_graphs(found.get("graphs", False))
    if choice is False or found.get("shapes") is not None:
        return found
    reason = None if sampler is None else why_no_catalogue(sampler) or why_not_padded(collate, sampler)
    if sampler is not None and reason is None:
        return {**found, "shapes": sampler}
    if reason is not None:
        refuse_graphs(choice, reason)
        found["graphs"] = False
    return found
