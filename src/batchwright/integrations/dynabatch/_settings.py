"""The settings of a ``DynaBatchSampler``, checked, and how an attribute of the sampler stands for one of them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar, final, get_args

import numpy as np

from ..._checks import as_flag, as_number, as_whole, check_choice
from ..._types import MAX_INT32
from ...errors import ArgumentError
from ...plan.grouping.base import SizeRounding
from ...plan.models.prior import Task
from ._longest_first import LongestFirst, SizeRule

Value = TypeVar("Value")


@final
@dataclass(frozen=True)
class Settings:
    """What the batches of given lengths follow from; the arguments of ``DynaBatchSampler`` without its data."""

    min_batch_size: int
    shuffle: bool
    threshold: float
    max_batch_range: float
    shuffle_seed: int
    shuffle_keep_first_n: int
    keep_batch_size_even: bool
    friendly_batch_size: bool
    dynamic_batch_mode: bool
    smooth_batches: bool
    smooth_batches_max_diff: float
    debug: bool
    save_input_features: bool
    task: Task | None
    max_new_tokens: int | None
    drop_last: bool

    def __post_init__(self) -> None:
        for item in fields(self):
            # Annotations are texts here: one check for all of a type.
            if item.type == "bool":
                self._keep(item.name, as_flag(item.name, getattr(self, item.name)))
        # More examples cannot be planned at once, so larger sizes are all alike.
        self._keep("min_batch_size", min(as_whole("min_batch_size", self.min_batch_size, least=1), MAX_INT32))
        for name in ("shuffle_seed", "shuffle_keep_first_n"):
            self._keep(name, as_whole(name, getattr(self, name), least=0))
        for name in ("threshold", "max_batch_range", "smooth_batches_max_diff"):
            self._keep(name, as_number(name, getattr(self, name), least=0))
        self._keep("max_batch_range", max(self.max_batch_range, 1.0))
        check_choice("task", self.task, (None, *get_args(Task)))
        if self.max_new_tokens is not None:
            self._keep("max_new_tokens", as_whole("max_new_tokens", self.max_new_tokens, least=1))

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def batch_start_range(self) -> float:
        """Return the smallest size of a batch that is not the last, relative to the first."""
        return 1.0

    @property
    def max_batch_size(self) -> int:
        """Return the largest size of a batch, rounded to even at a half as dynabatch rounds its candidates."""
        return int(min(np.round(self.max_batch_range * self.min_batch_size), MAX_INT32))

    @property
    def rule(self) -> SizeRule:
        """Return the rule by which batches grow."""
        max_diff = self.smooth_batches_max_diff if self.smooth_batches else None
        sizes = (self.min_batch_size, self.max_batch_size)
        return SizeRule(*sizes, self.threshold, max_diff, self.task or "generate", self.max_new_tokens)

    @property
    def rounding(self) -> SizeRounding:
        """Return how sizes are rounded."""
        return SizeRounding(2 if self.keep_batch_size_even else 1, "pow2x3" if self.friendly_batch_size else None)

    def grouping(self, balance_over: int) -> LongestFirst:
        """Return the grouping of these settings."""
        return LongestFirst(
            rule=self.rule if self.dynamic_batch_mode else None,
            batch_size=self.min_batch_size,
            keep_first=self.shuffle_keep_first_n,
            drop_last=self.drop_last,
            balance_over=balance_over,
        )


@final
class Setting(Generic[Value]):
    """An attribute of a sampler that stands for a setting: setting it plans again.

    Args:
        name: what the setting is called, if not as the attribute.
        advice: what to do instead, if the attribute follows from others and cannot be set.
    """

    def __init__(self, name: str = "", *, advice: str = "") -> None:
        self._name, self._advice = name, advice

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = self._name or name

    def __get__(self, sampler: Any, owner: type | None = None) -> Value:
        if sampler is None:
            return self  # type: ignore[return-value]  # on the class, as properties do
        value: Value = getattr(sampler._settings, self._name)
        return value

    def __set__(self, sampler: Any, value: Value) -> None:
        if self._advice:
            raise ArgumentError(f"{self._name} cannot be set; {self._advice}")
        sampler._change(**{self._name: value})
