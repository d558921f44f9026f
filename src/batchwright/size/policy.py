"""Policy and Transform, the two roles of this package, and what the policies of the library share.

The library's own policies and transforms are frozen dataclasses (``Named``) that are written as the call that makes
them. A policy that decides by itself returns an ``Answer``: the size, the next state and the reason, made in one place.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields, is_dataclass
from numbers import Integral
from typing import Any, ClassVar, NamedTuple, TypeAlias

from .._checks import is_number
from ..errors import ArgumentError
from ._states import Check, check_form, check_none
from .observation import Observation

State: TypeAlias = Any  # a plain JSON value: None, a number, a list or a dict of them

# The most a policy asks for. Above every batch size, and far enough below infinity to be multiplied and kept in JSON.
LARGEST = 1e300
TIMES = "\N{MULTIPLICATION SIGN}"


class Policy(ABC):
    """Decides how many examples the next update uses.

    Settings are frozen; the state is a JSON value that goes in and comes out. The answer is a real number: the
    controller rounds it once and keeps it between its bounds.

    >>> class Doubling(Policy):
    ...     def init(self):
    ...         return None
    ...
    ...     def update(self, state, observation):
    ...         return 2.0 * observation.current, state
    >>> Doubling().update(None, Observation(batch_size=8))
    (16.0, None)
    """

    @abstractmethod
    def init(self) -> State:
        """Return the state before training."""

    @abstractmethod
    def update(self, state: State, observation: Observation) -> tuple[float, State]:
        """Return the wanted size and the next state."""

    def start(self) -> float | None:
        """Return the size before anything is observed, None if the policy has no opinion."""
        return None

    def explain(self, state: State, observation: Observation) -> str:
        """Say in words why ``update`` gives its answer, from the same arguments."""
        size, _ = self.update(state, observation)
        return f"{type(self).__name__} asks for {size:g}"

    def check_state(self, state: State, name: str = "policy_state") -> None:
        """Refuse a state that ``update`` cannot have returned; here, one that has not the form of the first state.

        Args:
            state: a saved state.
            name: where it stands, for the error.
        """
        check_form(name, state, self.init())


class Transform(ABC):
    """Changes the size that a policy asks for; ``chain`` puts it after one.

    >>> class AtLeastTwo(Transform):
    ...     def init(self):
    ...         return None
    ...
    ...     def update(self, state, observation, size):
    ...         return max(2.0, size), state
    >>> AtLeastTwo().update(None, Observation(), 1.0)
    (2.0, None)
    """

    @abstractmethod
    def init(self) -> State:
        """Return the state before training."""

    @abstractmethod
    def update(self, state: State, observation: Observation, size: float) -> tuple[float, State]:
        """Return the changed size and the next state."""

    def explain(self, state: State, observation: Observation, size: float) -> str:
        """Say in words why ``update`` changes the size; empty if it does not."""
        changed, _ = self.update(state, observation, size)
        return "" if changed == size else f"{type(self).__name__} makes it {changed:g}"

    def check_state(self, state: State, name: str = "transform_state") -> None:
        """Refuse a state that ``update`` cannot have returned; here, one that has not the form of the first state."""
        check_form(name, state, self.init())


def check_policies(name: str, policies: tuple[Any, ...]) -> None:
    """Refuse anything that is not a policy."""
    for policy in policies:
        if not isinstance(policy, Policy):
            is_transform = isinstance(policy, Transform)
            advice = f"it goes after one: chain(policy, {policy!r})" if is_transform else "a fixed size is constant(64)"
            raise ArgumentError(f"{name} needs policies, got {policy!r}; {advice}")


def checker_of(part: Policy | Transform) -> Check:
    """Return the check of a part's saved state, the name first as ``check_parts`` gives it."""
    return lambda at, saved: part.check_state(saved, at)


def unit_of(name: str, policies: Iterable[Policy]) -> str | None:
    """Return what the sizes of policies count, None if none of them says so; refuse different ones.

    Args:
        name: of what is made of the policies, for the message.
        policies: one that says what it counts has a ``unit``, as ``goodput`` has.
    """
    units = sorted({unit for policy in policies if (unit := getattr(policy, "unit", None)) is not None})
    if len(units) > 1:
        raise ArgumentError(f"{name} got policies that count {' and '.join(units)}; let all of them count the same")
    return units[0] if units else None


class Part:
    """A frozen dataclass that is written as some of the arguments of a call; abstract.

    Attributes:
        fixed: arguments that every object of the class stands for.
    """

    fixed: ClassVar[tuple[str, ...]] = ()

    def settings(self) -> list[Field[Any]]:
        """Return the fields in the order of saved states: those of the class itself, then inherited ones."""
        inherited = {item.name for base in type(self).__bases__ if is_dataclass(base) for item in fields(base)}
        return sorted(fields(self), key=lambda item: item.name in inherited)  # type: ignore[arg-type]

    def arguments(self) -> list[str]:
        """Return the arguments of the call, without options at their usual value.

        A field with a default is an option, and the default is its usual value.
        """
        written = list(self.fixed)
        for item in self.settings():
            value, name = getattr(self, item.name), item.metadata.get("argument", item.name)
            if isinstance(value, Part) and not isinstance(value, Named):
                written += value.arguments()
            elif item.default is not MISSING:
                written += options(**{name: (value, item.default)})
            else:
                written.append(f"{name}={word(value)}" if item.kw_only else word(value))
        return written


class Named(Part):
    """A frozen dataclass that is written as the call that makes it; abstract.

    Attributes:
        name: of the function that users call; ``WarmUp`` is made by ``warm_up``, unless a class says otherwise.
    """

    name: ClassVar[str]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in cls.__dict__:
            cls.name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", cls.__name__).lower()

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(self.arguments())})"


def options(**settings: tuple[Any, Any]) -> list[str]:
    """Return options as they are written in a call; each is given with its usual value, at which it is left out.

    >>> options(high=(0.9, 0.8), low=(0.48, 0.48))
    ['high=0.9']
    """
    return [f"{name}={word(value)}" for name, (value, usual) in settings.items() if value != usual]


def word(value: Any) -> str:
    """Return a setting as it is typed; functions and objects without a text of their own appear by name.

    >>> word(64.0), word(0.5), word("epoch"), word(((0, 64.0), (10, 256.0))), word(len)
    ('64', '0.5', "'epoch'", '{0: 64, 10: 256}', 'len')
    """
    if is_number(value):
        is_short = isinstance(value, Integral) or (abs(value) < 1e15 and value == int(value))
        return str(int(value)) if is_short else repr(float(value))
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):  # a mapping, frozen as pairs
        return "{" + ", ".join(f"{key}: {word(item)}" for key, item in value) + "}"
    if callable(value):
        return getattr(value, "__name__", type(value).__name__)
    if isinstance(value, str):
        return repr(str(value))  # NumPy's strings show their type
    return repr(value) if has_text(value) else type(value).__name__


def has_text(value: object) -> bool:
    """Return whether an object has a text of its own; any other shows its address, which changes with every run."""
    return type(value).__repr__ is not object.__repr__


class Answer(NamedTuple):
    """What a policy answers, and why."""

    size: float
    state: State
    reason: str


class ReasoningPolicy(Named, Policy):
    """A policy that makes its reason along with its answer; abstract."""

    @abstractmethod
    def decide(self, state: State, observation: Observation) -> Answer:
        """Return the wanted size, the next state and the reason."""

    def init(self) -> State:
        """Return None: many policies have nothing to remember."""
        return None

    def check_state(self, state: State, name: str = "policy_state") -> None:
        """Refuse a state where there is nothing to remember; policies that remember something check more."""
        if self.init() is None:
            check_none(name, state)
        else:
            check_form(name, state, self.init())

    def update(self, state: State, observation: Observation) -> tuple[float, State]:
        """Return the wanted size and the next state."""
        size, state, _ = self.decide(state, observation)
        return size, state

    def explain(self, state: State, observation: Observation) -> str:
        """Say in words why ``update`` gives its answer."""
        return self.decide(state, observation).reason


def hold(observation: Observation, state: State, reason: str) -> Answer:
    """Return the answer that keeps the size in force."""
    return Answer(observation.exact, state, f"{reason}: holds {observation.current}")


def ask(observation: Observation, state: State, size: float, reason: str) -> Answer:
    """Return the answer for a size; hold if it is not a finite number above 0."""
    if not (math.isfinite(size) and size > 0):
        return hold(observation, state, f"{reason} = {size}")
    return Answer(as_size(size), state, f"{reason}: {show(size)}")


def as_size(value: Any) -> float:
    """Return a policy's answer within ±``LARGEST``, and NaN for anything that is not a number.

    >>> as_size(64), as_size(float("inf")), as_size(None)
    (64.0, 1e+300, nan)
    """
    try:
        number = math.nan if isinstance(value, (bool, str, bytes)) else float(value)
    except OverflowError:  # an int beyond every float
        number = math.inf if value > 0 else -math.inf
    except (TypeError, ValueError):
        number = math.nan
    return number if math.isnan(number) else min(max(number, -LARGEST), LARGEST)


def grow(base: float, factor: float, exponent: float) -> float:
    """Return ``base × factor^exponent`` for positive numbers, at most ``LARGEST``.

    >>> grow(32, 2.0, 3), grow(1, 10.0, 10**6), grow(1, 0.5, 10**6)
    (256.0, 1e+300, 0.0)
    """
    # The exponent is kept where the power stays between e^-700 and e^700, just inside the range of floats.
    slope = abs(math.log(factor))
    most = 700.0 / slope if slope else 1.0
    exponent = max(-most, min(exponent, most))
    value = min(base * factor**exponent, LARGEST)
    return value if value > 1e-300 else 0.0


def show(value: float) -> str:
    """Return a number in few digits, for reading.

    >>> show(64.0), show(2.5), show(1234.5678), show(1e300)
    ('64', '2.5', '1234.6', '1e+300')
    """
    if math.isfinite(value) and value == int(value) and abs(value) < 1e15:
        return str(int(value))
    return f"{value:.1f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}"
