"""The options of a plan, checked once and comparable across runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, final, get_args

from .._checks import as_flag, as_whole, check_choice, check_same, read_whole, shared_options
from ..errors import ArgumentError, StateMismatchError
from ._cost import Cost, name_of, with_values
from ._groups import AtomicGroups, as_groups
from .grouping.base import Grouping, SizeLadder, SizeRounding, check_grouping
from .grouping.sorting import WindowSort

Oversize = Literal["error", "alone", "drop", "truncate"]
Remainder = Literal["spread", "drop"]

_LEAST = {"seed": 0, "size_multiple_of": 1, "pad_multiple_of": 1, "keep_first": 0}


@final
@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """Everything that shapes a plan besides the lengths, the budget, the epoch and the ranks."""

    grouping: Grouping = field(default_factory=WindowSort)
    shuffle: bool = True
    seed: int = 0
    size_multiple_of: int = 1
    size_ladder: SizeLadder | None = None
    pad_multiple_of: int = 1
    keep_first: int = 0
    oversize: Oversize = "error"
    drop_last: bool = False
    remainder: Remainder = "spread"
    balance_over: int | None = None
    cost: Cost | None = None
    groups: AtomicGroups | None = None
    # 1: long runs are shortened where an epoch has few batches, a run of one is drawn from batches sorted by cost, and
    # few rows are packed in one window. 3: Buckets counts shapes in all. 0 stands for the newest of the grouping.
    rules: int = 0

    def __post_init__(self) -> None:
        check_grouping(self.grouping)
        SizeRounding(self.size_multiple_of, self.size_ladder)
        for name, least in _LEAST.items():
            object.__setattr__(self, name, as_whole(name, getattr(self, name), least=least))
        object.__setattr__(self, "rules", as_whole("rules", self.rules, least=0) or self._known_rules[-1])
        if self.balance_over is not None:
            object.__setattr__(self, "balance_over", as_whole("balance_over", self.balance_over, least=1))
        if self.cost is not None and not callable(self.cost):
            raise ArgumentError(f"cost must be None or a function of (num_items, padded_lengths), got {self.cost!r}")
        object.__setattr__(self, "groups", as_groups(self.groups))
        check_choice("oversize", self.oversize, get_args(Oversize))
        check_choice("remainder", self.remainder, get_args(Remainder))
        for name in ("shuffle", "drop_last"):
            object.__setattr__(self, name, as_flag(name, getattr(self, name)))
        capacity = self.grouping.row_capacity
        if capacity is not None and capacity % self.pad_multiple_of:
            raise ArgumentError(
                f"Packed(capacity={capacity}) is not a multiple of pad_multiple_of={self.pad_multiple_of}; "
                "rows are as long as the capacity, so choose a capacity that is"
            )

    @classmethod
    def of(cls, arguments: Mapping[str, Any], **fixed: Any) -> PlanSettings:
        """Return the settings among a function's arguments: ``PlanSettings.of(locals())`` as its first statement."""
        return cls(**shared_options(cls, arguments), **fixed)

    def resolved(self, world_size: int) -> PlanSettings:
        """Return the settings with ``balance_over`` as a number: the world size where it is None."""
        return self if self.balance_over is not None else replace(self, balance_over=world_size)

    def read_rules(self, state: Mapping[str, Any]) -> int:
        """Return the rules that the epoch of a saved state follows, or refuse those that this grouping no longer has.

        Raises:
            StateMismatchError: the state is of an earlier or a later version of the grouping.
        """
        version, known = read_whole(state, "version"), self._known_rules
        saved = state.get("settings")
        if version in known or not isinstance(saved, Mapping) or saved.get("grouping") != repr(self.grouping):
            return version  # other settings are refused as such
        name = type(self.grouping).__name__
        if 1 <= version < known[0]:
            raise StateMismatchError(
                f"the state is of an earlier {name}, which made other batches (version {version}, now {known[-1]}); "
                "finish that epoch with the earlier version of batchwright, or start the next one without the state"
            )
        check_same("version", version, known[-1])
        return version

    @property
    def _known_rules(self) -> range:
        return self.grouping._rules

    @property
    def rounding(self) -> SizeRounding:
        """Return the rounding of batch sizes."""
        return SizeRounding(self.size_multiple_of, self.size_ladder)

    def to_state(self) -> dict[str, Any]:
        """Return the settings as JSON values, for comparing a saved state with this run."""
        return dict(self._state)

    @cached_property
    def _state(self) -> dict[str, Any]:
        state = {item.name: _plain(getattr(self, item.name)) for item in fields(self) if item.name not in _NOT_IN_STATE}
        # Left out where there are none, so that states without groups stay those of earlier versions.
        return state if self.groups is None else {**state, "groups": self.groups.key}


# The seed stands beside the settings in a state, and the rules are its version.
_NOT_IN_STATE = ("seed", "rules", "groups")


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    return with_values(name_of(value), value) if callable(value) else repr(value)
