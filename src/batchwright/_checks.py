"""The checks that arguments and saved states pass: one version of each, for every room.

A check either returns the value as a plain Python value or raises an error that says what came and what is allowed.
NumPy's numbers count as numbers everywhere; what is kept is the plain number, so that it can be saved as JSON.
"""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Protocol, final

import numpy as np

from .errors import ArgumentError, StateMismatchError


def is_number(value: object) -> bool:
    """Say whether a value is a real number of Python or NumPy; True, False and spans of time are not.

    >>> is_number(3), is_number(np.float32(0.5)), is_number(True), is_number("3"), is_number(None)
    (True, True, False, False, False)
    """
    return isinstance(value, Real) and not isinstance(value, bool | np.timedelta64)


def is_whole(value: object) -> bool:
    """Say whether a value is a whole number of Python or NumPy by its type; 3.0 is not.

    >>> is_whole(3), is_whole(np.uint8(3)), is_whole(3.0), is_whole(True)
    (True, True, False, False)
    """
    return is_number(value) and isinstance(value, Integral)


def float_of(number: Any) -> float:
    """Return a number as a ``float``: infinity if it is beyond every float.

    >>> float_of(3), float_of(-(10**400))
    (3.0, -inf)
    """
    try:
        return float(number)
    except OverflowError:
        return math.inf if number > 0 else -math.inf


def as_whole(name: str, value: Any, *, least: int, most: int | None = None) -> int:
    """Return a whole number from ``least`` to ``most`` as a plain ``int``; NumPy's integers count.

    >>> as_whole("seed", np.int64(3), least=0)
    3
    >>> as_whole("seed", True, least=0)
    Traceback (most recent call last):
        ...
    batchwright.errors.ArgumentError: seed must be a whole number of 0 or more, got True
    """
    whole = _whole(value)
    if whole is None or whole < least:
        raise ArgumentError(f"{name} must be a whole number of {least} or more, got {value!r}")
    if most is not None and whole > most:  # not written out: it may have thousands of digits
        raise ArgumentError(f"{name} must be at most {most}, got a whole number of {whole.bit_length()} bits")
    return whole


def as_number(
    name: str,
    value: Any,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
    infinite: bool = False,
) -> float:
    """Return a finite number as a plain ``float``, if ``least <= number <= most`` and ``above < number < below``.

    Args:
        name: what the number is called, for the error.
        value: a number of Python or NumPy.
        least: the smallest allowed.
        above: a bound that the number must exceed.
        most: the largest allowed.
        below: a bound that the number must stay under.
        infinite: whether infinity is allowed too, where the bounds let it.

    >>> as_number("slope", np.float64(8))
    8.0
    >>> as_number("alpha", 1.5, above=0, below=1)
    Traceback (most recent call last):
        ...
    batchwright.errors.ArgumentError: alpha must be a number above 0 and below 1, got 1.5
    """
    number = float_of(value) if is_number(value) else math.nan
    is_allowed = math.isfinite(number) or (infinite and not math.isnan(number))
    # Only bounds that were given are compared: infinity is not below an infinity that stands for "no bound".
    exceeds = above == -math.inf or number > above
    if is_allowed and least <= number <= most and exceeds and (below == math.inf or number < below):
        return number + 0.0  # -0.0 becomes 0.0: equal settings have one text
    raise ArgumentError(f"{name} must be a number{_bounds(least, above, most, below)}, got {value!r}")


def as_plain(name: str, value: Any, **bounds: Any) -> float:
    """Return a number as ``as_number`` does, but a whole number as an ``int``: its text and its JSON stay the same.

    >>> as_plain("lr", np.float32(0.5), above=0), as_plain("lr", np.int64(1), above=0)
    (0.5, 1)
    """
    number = as_number(name, value, **bounds)
    return int(value) if is_whole(value) else number


def as_flag(name: str, value: object) -> bool:
    """Return True or False, or refuse anything else; NumPy's booleans count.

    >>> as_flag("shuffle", np.True_)
    True
    >>> as_flag("shuffle", 1)
    Traceback (most recent call last):
        ...
    batchwright.errors.ArgumentError: shuffle must be True or False, got 1
    """
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise ArgumentError(f"{name} must be True or False, got {value!r}")


def as_interval(name: str, value: Any) -> int:
    """Return every how many updates something is done: 1 for True, 0 for False, which is never.

    >>> as_interval("measure_noise", True), as_interval("measure_noise", False), as_interval("measure_noise", 8)
    (1, 0, 8)
    """
    if isinstance(value, bool | np.bool_):
        return int(value)
    return as_whole(f"{name}, if not True or False,", value, least=0)


def check_choice(name: str, value: object, allowed: Sequence[str | None]) -> None:
    """Refuse a value that is not one of the allowed words.

    >>> check_choice("remainder", "keep", ("spread", "drop"))
    Traceback (most recent call last):
        ...
    batchwright.errors.ArgumentError: remainder must be one of 'spread', 'drop', got 'keep'
    """
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in allowed):
        raise ArgumentError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_order(low_name: str, low: float, high_name: str, high: float) -> None:
    """Refuse two limits that leave no room between them."""
    if not low < high:
        raise ArgumentError(f"{low_name} must be below {high_name}, got {low_name}={low!r}, {high_name}={high!r}")


def shared_options(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function takes too: ``shared_options(function, locals())`` as the first statement.

    >>> shared_options(sorted, {"reverse": True, "texts": ["b", "a"]})
    {'reverse': True}
    """
    names = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in names}


def as_world_size(value: Any) -> int:
    """Return a number of ranks as a plain number; more than any cluster has would only fill the memory.

    >>> as_world_size(np.int64(8))
    8
    """
    world_size = as_whole("world_size", value, least=1)
    if world_size > _MOST_RANKS:
        raise ArgumentError(f"world_size must be at most {_MOST_RANKS:,} ranks, got {world_size}")
    return world_size


_MOST_RANKS = 1 << 20


def check_ranks(rank: Any, world_size: Any) -> tuple[int, int]:
    """Return the rank and the number of ranks as plain numbers, or refuse a rank outside the world.

    >>> check_ranks(np.int64(1), 2)
    (1, 2)
    """
    world_size = as_world_size(world_size)
    rank = as_whole("rank", rank, least=0)
    if rank >= world_size:
        raise ArgumentError(f"rank must be below world_size, got rank {rank} of {world_size}; ranks count from 0")
    return rank, world_size


class HasSize(Protocol):
    """Anything that knows how many examples the next update uses, over all ranks."""

    @property
    def size(self) -> int:
        """Return the number of examples."""


@final
@dataclass(frozen=True)
class FixedSize:
    """A size that never changes: what a plain number means where a controller may stand."""

    size: int


def has_size(value: object) -> bool:
    """Say whether a value is a controller, that is, has a ``.size``; arrays have one too, of another meaning.

    >>> has_size(FixedSize(3)), has_size(np.int64(3)), has_size(np.arange(3)), has_size(3)
    (True, False, False, False)
    """
    is_array = hasattr(value, "__array__") and hasattr(value, "shape")
    return hasattr(value, "size") and not is_array


def as_sized(name: str, value: Any) -> HasSize:
    """Return a controller; a whole number becomes a size that never changes.

    >>> as_sized("controller", np.int64(3))
    FixedSize(size=3)
    >>> as_sized("controller", "64")
    Traceback (most recent call last):
        ...
    batchwright.errors.ArgumentError: controller must be a whole number of 1 or more, or have one as .size as a \
BatchSizeController has, got '64'
    """
    if has_size(value):
        read_size(value, name)
        return value
    whole = _whole(value)
    if whole is None or whole < 1:
        is_policy = hasattr(value, "init") and hasattr(value, "update")
        advice = f"; write BatchSizeController({value!r}, min_size=…, max_size=…)" if is_policy else ""
        raise ArgumentError(
            f"{name} must be a whole number of 1 or more, or have one as .size as a BatchSizeController has, "
            f"got {value!r}{advice}"
        )
    return FixedSize(whole)


def read_size(controller: HasSize, name: str = "controller") -> int:
    """Return the size that a controller wants now, as a plain ``int`` of 1 or more."""
    return as_whole(f"{name}.size", controller.size, least=1)


def peek_size(controller: Any) -> Any:
    """Return the size that a controller wants now, for showing it: a log around the controller does not count it."""
    return getattr(controller, "controller", controller).size


def is_same(saved: Any, mine: Any) -> bool:
    """Say whether a saved value equals ours; an array, which no state holds, equals nothing.

    >>> is_same(1, 1), is_same(np.array([1, 1]), 1)
    (True, False)
    """
    same = saved == mine
    return bool(same) if isinstance(same, bool | np.bool_) else False


def check_same(name: str, saved: Any, mine: Any) -> None:
    """Refuse a saved value that differs from ours, naming both; mappings are compared key by key.

    >>> check_same("seed", 1, 2)
    Traceback (most recent call last):
        ...
    batchwright.errors.StateMismatchError: the state was saved with seed = 1, here it is 2; use the same data and \
settings, or start without the state
    """
    if isinstance(mine, dict) and isinstance(saved, Mapping):
        for key in sorted(mine.keys() | saved.keys(), key=str):
            check_same(str(key), saved.get(key), mine.get(key))
    elif not is_same(saved, mine):
        raise StateMismatchError(
            f"the state was saved with {name} = {saved!r}, here it is {mine!r}; "
            "use the same data and settings, or start without the state"
        )


def as_state(state: Any, *, of: str, needs: Sequence[str] = ()) -> Mapping[str, Any]:
    """Return a saved state, or refuse what ``state_dict()`` cannot have returned.

    Args:
        state: what came.
        of: the class whose state it should be, for the error.
        needs: keys that every such state has.

    >>> as_state({"epoch": 3}, of="BatchSampler", needs=["epoch"])
    {'epoch': 3}
    >>> as_state(None, of="BatchSampler")
    Traceback (most recent call last):
        ...
    batchwright.errors.StateMismatchError: load_state_dict of BatchSampler needs the dict that its state_dict() \
returned, got None; to start from the beginning, do not call it
    """
    if not isinstance(state, Mapping):
        came = "None" if state is None else f"{type(state).__name__} {_short(state)}"
        raise StateMismatchError(
            f"load_state_dict of {of} needs the dict that its state_dict() returned, got {came}; "
            "to start from the beginning, do not call it"
        )
    missing = [name for name in needs if name not in state]
    if missing:
        raise StateMismatchError(
            f"the state lacks {', '.join(map(repr, missing))}, which every state of {of} has; "
            "load what its state_dict() returned"
        )
    return state


def load_parts(parts: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Load the state of every part, or of none: after a refusal all parts are as they were.

    Args:
        parts: have ``state_dict`` and ``load_state_dict``.
        states: by the names of the parts.
    """
    loaded: list[tuple[Any, Any]] = []
    try:
        for name, part in parts.items():
            before = part.state_dict()
            part.load_state_dict(states[name])
            loaded.append((part, before))
    except Exception:
        for part, before in reversed(loaded):
            part.load_state_dict(before)
        raise


def read_number(state: Mapping[str, Any], name: str, **bounds: Any) -> float:
    """Return a finite number from a saved state as ``as_plain`` does, or refuse the state.

    >>> read_number({"ratio": 1.5}, "ratio", above=0)
    1.5
    """
    try:
        return as_plain(name, state.get(name), **bounds)
    except ArgumentError as error:
        raise StateMismatchError(f"the state is not one that state_dict() returned: {error}") from None


def read_whole(state: Mapping[str, Any], name: str) -> int:
    """Return a whole number of 0 or more from a saved state as a plain ``int``, or refuse the state.

    >>> read_whole({"epoch": 3}, "epoch")
    3
    """
    value = state.get(name)
    whole = _whole(value)
    if whole is None or not 0 <= whole < 2**63:  # larger ones fit no array
        raise StateMismatchError(f"the state needs {name} as a whole number of 0 or more, got {_short(value)}")
    return whole


def _short(value: object) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else f"{text[:60]}…"


def _whole(value: Any) -> int | None:
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _bounds(least: float, above: float, most: float, below: float) -> str:
    words = [
        f"of {least:g} or more" if least > -math.inf else "",
        f"above {above:g}" if above > -math.inf else "",
        f"at most {most:g}" if most < math.inf else "",
        f"below {below:g}" if below < math.inf else "",
    ]
    said = " and ".join(word for word in words if word)
    link = " of " if said.startswith("at most") else " "
    return link + said if said else ""
