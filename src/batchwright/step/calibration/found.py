"""FoundBudget: the budget that ``budget="auto"`` finds, from what a few batches took in memory and time."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from ..._checks import as_whole
from ..._lengths import as_shapes
from ..._types import MAX_INT32, FloatArray, IntArray
from ...errors import ArgumentError
from ...plan import Budget, MaxBytes, MaxTokens, MemoryModel, TimeModel
from ._bounds import bounded_items, smallest
from .result import Shape

JSON_VERSION = 1
# Bounds are written as this version, so that a batchwright that knows none refuses them.
_BOUNDS_VERSION = 2
_KIND = "batchwright.FoundBudget"
_MOST_TOKENS = 2**31 - 1  # lengths are int32
# The share of the best throughput that a smaller batch may give up.
TOLERANCE = 0.05


@final
@dataclass(frozen=True, repr=False)
class FoundBudget(Budget):
    """As many items as fit in memory, but no more than throughput gains from: the smaller of the two.

    ``n = min(memory, max(time.knee, least_tokens / tokens of an item), bounds)``, and at least 1: an example that runs
    by itself is a batch.

    Args:
        memory: what a batch may take, None if memory was not measured.
        time: what a batch takes, by the sum of its padded lengths; None if throughput does not matter, as for
            micro-batches.
        tokens: the most padded tokens, where larger batches could not be measured.
        least_tokens: a batch of this many padded tokens was measured to be slower than a larger one.
        bounds: batches ``(num_items, padded length per axis)`` that ran out of memory. None is planned that has as many
            items and is as long on every axis; about others they say nothing.

    >>> shapes = [[1, 64], [8, 64], [8, 128], [4, 256], [2, 512]]
    >>> time = TimeModel.fit(shapes, [0.08 + 1e-5 * num * length for num, length in shapes])
    >>> budget = FoundBudget(None, time)
    >>> budget.max_items(np.array([[32], [300]])).tolist()
    [4751, 507]
    >>> FoundBudget.from_json(budget.to_json()) == budget
    True
    """

    memory: MaxBytes | None
    time: TimeModel | None
    tokens: MaxTokens | None = None
    least_tokens: int = 0
    bounds: tuple[Shape, ...] = ()

    def __post_init__(self) -> None:
        if self.memory is None and self.time is None and self.tokens is None:
            raise ArgumentError("FoundBudget needs a budget of memory, a model of time, or the most tokens")
        object.__setattr__(
            self, "least_tokens", as_whole("least_tokens", self.least_tokens, least=0, most=_MOST_TOKENS)
        )
        object.__setattr__(self, "bounds", smallest(map(tuple, as_shapes(self.bounds).tolist())) if self.bounds else ())

    def fraction(self, num_items: IntArray, lengths: IntArray) -> FloatArray:
        """Return ``num_items / max_items``."""
        return np.asarray(num_items) / self.max_items(lengths).astype(np.float64)

    def max_items(self, lengths: IntArray) -> IntArray:
        """Return the smallest number of items within 5 % of the best throughput that memory allows, at least 1."""
        lengths = np.asarray(lengths)
        most = np.full(len(lengths), MAX_INT32, dtype=np.int64)
        if self.memory is not None:
            most = np.minimum(most, self.memory.max_items(lengths))
        most = np.minimum(most, bounded_items(lengths, self.bounds))
        if self.time is not None:
            best = None if self.memory is None and not self.bounds else np.maximum(most, 1)
            totals = lengths.sum(axis=1, dtype=np.int64).astype(np.int32)
            knee = self.time.knee(totals, max_items=best, tolerance=TOLERANCE)
            most = np.minimum(most, np.maximum(knee, self.least_tokens // totals))
        if self.tokens is not None:
            most = np.minimum(most, self.tokens.max_items(lengths))
        return np.maximum(most, 1)

    def within(self, max_bytes: float | None) -> FoundBudget:
        """Return the budget with at most this much memory; None leaves it as it is."""
        if self.memory is None or max_bytes is None or max_bytes >= self.memory.max_bytes:
            return self
        return replace(self, memory=self.memory.model.budget(max_bytes))

    def to_json(self) -> str:
        """Return the budget as JSON; ``from_json`` gives an equal one."""
        memory = None
        if self.memory is not None:
            memory = {"model": json.loads(self.memory.model.to_json()), "max_bytes": float(self.memory.max_bytes)}
        time = None if self.time is None else json.loads(self.time.to_json())
        limits: dict[str, Any] = {
            "tokens": None if self.tokens is None else self.tokens.limit,
            "least_tokens": self.least_tokens,
        }
        version = {"version": JSON_VERSION}
        if self.bounds:
            version, limits = {"version": _BOUNDS_VERSION}, limits | {"bounds": self.bounds}
        return json.dumps({"kind": _KIND, **version, "memory": memory, "time": time, **limits})

    @classmethod
    def from_json(cls, text: str) -> FoundBudget:
        """Read a budget that ``to_json`` wrote."""
        state = _read(text)
        memory, time, tokens = state["memory"], state["time"], state["tokens"]
        found = None
        if memory is not None:
            if not isinstance(memory, dict) or not {"model", "max_bytes"} <= memory.keys():
                raise ArgumentError("the memory of a FoundBudget needs a model and max_bytes; find the budget again")
            found = MemoryModel.from_json(json.dumps(memory["model"])).budget(memory["max_bytes"])
        return cls(
            found,
            None if time is None else TimeModel.from_json(json.dumps(time)),
            None if tokens is None else MaxTokens(tokens),
            state["least_tokens"],
            tuple(state["bounds"]) if state["version"] == _BOUNDS_VERSION else (),
        )

    def __repr__(self) -> str:
        parts = {"memory": self.memory, "time": self.time, "tokens": self.tokens}
        shown = [f"{name}={part!r}" for name, part in parts.items() if part is not None]
        bounds = [f"bounds={self.bounds!r}"] if self.bounds else []
        return f"FoundBudget({', '.join([*shown, f'least_tokens={self.least_tokens}', *bounds])})"


def _read(text: str) -> dict[str, Any]:
    try:
        state = json.loads(text)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"this is not the JSON of a FoundBudget: {error}") from error
    found = (state.get("kind"), state.get("version")) if isinstance(state, dict) else (state, None)
    needed = {"memory", "time", "tokens", "least_tokens"} | ({"bounds"} if found[1] == _BOUNDS_VERSION else set())
    is_known = found in ((_KIND, JSON_VERSION), (_KIND, _BOUNDS_VERSION))
    if not is_known or not needed <= state.keys():
        raise ArgumentError(
            f"expected the JSON of a {_KIND} of version {JSON_VERSION} or {_BOUNDS_VERSION}, got {str(found)[:80]}; "
            "find the budget again"
        )
    return state
