"""Which strategies change the batch size, told by what their runs did."""

from __future__ import annotations

from collections.abc import Iterable

from ._report_records import BASELINE, Record

# The sizes of another run, played again: a control, to tell reacting to training from growing.
REPLAY = "replay"


def groups_of(records: Iterable[Record]) -> dict[str, str]:
    """Return the group of each strategy, ``"other"`` where its runs name none.

    >>> groups_of([{"strategy": "linear", "group": "linear"}, {"strategy": "mine"}])
    {'linear': 'linear', 'mine': 'other'}
    """
    return {record["strategy"]: record.get("group") or "other" for record in records}


def fixed_of(records: Iterable[Record]) -> frozenset[str]:
    """Return the strategies that kept one batch size in every run that recorded its sizes.

    >>> curve = [{"batch_size": 16}, {"batch_size": 16}]
    >>> grown = [{"batch_size": 16}, {"batch_size": 32}]
    >>> sorted(fixed_of([{"strategy": "constant", "curve": curve}, {"strategy": "linear", "curve": grown}]))
    ['constant']
    """
    sizes: dict[str, bool] = {BASELINE: True}
    for record in records:
        seen = {point.get("batch_size") for point in record.get("curve") or ()} - {None}
        if seen:
            keeps = len(seen) == 1 and not record.get("decisions")
            sizes[record["strategy"]] = sizes.get(record["strategy"], True) and keeps
    return frozenset(name for name, keeps in sizes.items() if keeps)


def adaptive_of(records: Iterable[Record]) -> frozenset[str]:
    """Return the strategies that change the batch size and are no control."""
    runs = list(records)
    return frozenset(name for name, group in groups_of(runs).items() if group != REPLAY) - fixed_of(runs)


def fixed_clause(strategy: str, fixed: frozenset[str]) -> str:
    """Return the sentence that a gain of a fixed batch size is no gain from adapting it; empty for the others."""
    if strategy not in fixed:
        return ""
    return f" The batch size of {strategy} never changes: that is no gain from adapting it."
