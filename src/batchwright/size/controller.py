"""BatchSizeController: asks a policy, rounds once, keeps the bounds, and remembers what it decided and why."""

from __future__ import annotations

import copy
import math
import re
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from typing import Any, SupportsIndex, final, get_args

import numpy as np

from .._checks import as_number, as_state, as_whole, check_same, is_same
from ..errors import ArgumentError, StateMismatchError
from .observation import COUNTS, Counts, Observation, Unit, count_on, read_fields, tokens_of_update
from .policy import Part, Policy, State, Transform, as_size, has_text

STATE_VERSION = 2
# Changes that are kept unless the user says otherwise: about 250 kB of JSON.
_MAX_HISTORY = 1000


@final
@dataclass(frozen=True, kw_only=True)
class Decision:
    """A change of the batch size.

    Attributes:
        epoch: epochs completed, None if they were not observed.
        step: updates completed, None if they were not observed.
        examples: examples seen, None if they were not observed.
        tokens: tokens seen, None if they were not observed.
        old: the size before.
        new: the size after.
        wanted: the size that the policy asked for, before rounding and bounds.
        reason: why, in words.
    """

    epoch: int | None
    step: int | None
    examples: int | None
    old: int
    new: int
    wanted: float
    reason: str
    tokens: int | None = None

    def __str__(self) -> str:
        counts = [(unit, getattr(self, unit)) for unit in get_args(Unit)]
        place = ", ".join(f"{unit} {count}" for unit, count in counts if count is not None)
        return f"{place + ': ' if place else ''}{self.old} -> {self.new} ({self.reason})"


@final
class BatchSizeController:
    """The batch size of a training run: the size that a policy asks for, as a whole number between two bounds.

    ``size = min(max(round(wanted), min_size), max_size)``. A policy that answers NaN, or something that is not a
    number, holds the size. The size before rounding is kept too (``Observation.exact``), so that many small steps add
    up. On several ranks, give every controller the same figures, as ``StepReport`` does; then all
    of them agree.

    Args:
        policy: asks for a size.
        min_size: the smallest size, 1 or more.
        max_size: the largest size.
        initial: the size before anything is observed; None takes the policy's start, or ``min_size`` if it has none.
        max_history: the newest changes that ``history`` and saved states hold, 0 for none; None keeps all of them.

    >>> from .schedules import linear
    >>> controller = BatchSizeController(linear(32, 8), min_size=16, max_size=64)
    >>> controller.size, controller.observe(epoch=3), controller.observe(epoch=9)
    (32, 56, 64)
    >>> print(controller.history[-1])
    epoch 9: 56 -> 64 (linear: 32 + 8 × 9 = 104 at epoch 9; held at max_size 64)
    """

    def __init__(
        self,
        policy: Policy,
        *,
        min_size: SupportsIndex,
        max_size: SupportsIndex,
        initial: SupportsIndex | None = None,
        max_history: SupportsIndex | None = _MAX_HISTORY,
    ) -> None:
        if not isinstance(policy, Policy):
            raise ArgumentError(f"policy must be a size.Policy, got {policy!r}; {_advice(policy)}")
        self.policy = policy
        self.min_size = as_whole("min_size", min_size, least=1)
        self.max_size = as_whole("max_size", max_size, least=1)
        if self.min_size > self.max_size:
            raise ArgumentError(f"min_size must be at most max_size, got {self.min_size} and {self.max_size}")
        self.max_history = None if max_history is None else as_whole("max_history", max_history, least=0)
        if self.max_history is not None and self.max_history > sys.maxsize:
            raise ArgumentError(f"max_history must be at most {sys.maxsize}, got {max_history!r}; None keeps all")
        self._exact = self._begin(initial)
        self._state: State = policy.init()
        self._counts: Counts = dict.fromkeys(COUNTS)
        self._history: deque[Decision] = deque(maxlen=self.max_history)
        self._num_changes = 0
        self._last: tuple[State, Observation, Any] | None = None

    @property
    def size(self) -> int:
        """Return the size of the next batch."""
        return self._whole(self._exact)

    @property
    def history(self) -> tuple[Decision, ...]:
        """Return the changes so far, the newest ``max_history`` of them."""
        return tuple(self._history)

    @property
    def num_changes(self) -> int:
        """Return how often the size has changed, also where ``history`` no longer says so."""
        return self._num_changes

    def observe(self, **figures: Any) -> int:
        """Take in what training did and return the size of the next batch.

        If ``batch_size`` is given, updates and examples are counted from it, unless they are given too, and tokens from
        ``batch_tokens``. A count stays until the next one comes.

        Args:
            **figures: any fields of ``Observation`` except ``size``; None counts as not given.
        """
        observed = read_fields(figures)
        counts = count_on(self._counts, observed)
        ends_epoch = list(observed) == ["epoch"] and self._counts["step"] is not None
        begins_tokens = self._counts["tokens"] is None and counts["tokens"] is not None
        filled_in = {"size": self.size, "exact_size": self._exact, "ends_epoch": ends_epoch}
        tokens = {"begins_tokens": begins_tokens, "batch_tokens": tokens_of_update(self._counts, counts, observed)}
        observation = Observation(**{**observed, **counts, **filled_in, **tokens})
        answer, after = self.policy.update(self._state, observation)
        last = (self._state, observation, answer)
        exact = self._fit(as_size(answer), self._exact)
        # Nothing is kept before the policy has answered and explained: an error leaves the controller as it was.
        if self._whole(exact) != self.size:
            self._history.append(self._decide(self._whole(exact), *last))
            self._num_changes += 1
        self._exact, self._counts, self._state, self._last = exact, counts, after, last
        return self.size

    def explain(self) -> str:
        """Say in words why the last observation changed the size or kept it."""
        if self._last is None:
            return f"nothing was observed since the controller was made or loaded; the size is {self.size}"
        return self._reason(*self._last)

    def state_dict(self) -> dict[str, Any]:
        """Return the size, whole and unrounded, the policy's state, the counts and the history, as JSON values."""
        return {
            "version": STATE_VERSION,
            "policy": describe(self.policy),
            "size": self.size,
            "exact_size": self._exact,
            "policy_state": copy.deepcopy(self._state),
            "counts": dict(self._counts),
            "num_changes": self._num_changes,
            "history": [_write_decision(decision) for decision in self._history],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state.

        The bounds may have changed, as long as the saved size is between them. A state of version 1 has no unrounded
        size: the run goes on from the whole one.

        Raises:
            StateMismatchError: the state is from another version or policy, its size is outside the bounds, or a part
                is missing or damaged; the controller stays as it was.
        """
        state = as_state(state, of="BatchSizeController")
        if not is_same(state.get("version"), 1):
            check_same("version", state.get("version"), STATE_VERSION)
        saved, mine = state.get("policy"), describe(self.policy)
        if not is_same(_with_plain_numbers(saved), _with_plain_numbers(mine)):
            check_same("policy", saved, mine)
        try:
            size, counts = as_whole("size", state["size"], least=1), _read_counts(state["counts"])
            exact = _read_exact(state, size)
            history = [_read_decision(decision) for decision in state["history"]]
            policy_state = copy.deepcopy(state["policy_state"])
            num_changes = _read_num_changes(state, len(history))
            self.policy.check_state(policy_state)
        except (LookupError, TypeError, AttributeError, OverflowError, ArgumentError) as error:
            said = str(error) if isinstance(error, ArgumentError) else repr(error)
            raise StateMismatchError(
                f"the state is not one that state_dict() returned: {said}; load an undamaged state, or start without it"
            ) from error
        if not self.min_size <= size <= self.max_size:
            raise StateMismatchError(
                f"the saved size {size} is outside {self.min_size} to {self.max_size}; "
                "widen min_size and max_size, or start without the state"
            )
        self._exact, self._counts = self._fit(exact, exact), counts
        self._state, self._num_changes = policy_state, num_changes
        self._history = deque(history, maxlen=self.max_history)
        self._last = None

    def _begin(self, initial: SupportsIndex | None) -> float:
        """Return the first size, unrounded."""
        if initial is None:
            start = self.policy.start()
            return self._fit(math.nan if start is None else as_size(start), float(self.min_size))
        first = as_whole("initial", initial, least=1)
        if not self.min_size <= first <= self.max_size:
            raise ArgumentError(
                f"initial must be from min_size {self.min_size} to max_size {self.max_size}, got {first}"
            )
        return float(first)

    def _fit(self, wanted: float, exact: float) -> float:
        """Return the wanted size within the bounds, ``exact`` if it is NaN."""
        return exact if math.isnan(wanted) else float(min(max(wanted, self.min_size), self.max_size))

    def _whole(self, exact: float) -> int:
        # Bounded again: a bound of more digits than a float has is not met exactly by one.
        return min(max(round(exact), self.min_size), self.max_size)

    def _decide(self, size: int, state: State, observation: Observation, answer: Any) -> Decision:
        """Return the record of a change."""
        counts = {unit: getattr(observation, unit) for unit in get_args(Unit)}
        reason = self._reason(state, observation, answer)
        return Decision(**counts, old=self.size, new=size, wanted=as_size(answer), reason=reason)

    def _reason(self, state: State, observation: Observation, answer: Any) -> str:
        """Return the policy's words, and the bound that held its answer."""
        wanted = as_size(answer)
        if math.isnan(wanted):
            return f"the policy answered {answer!r}, which is not a size; it stays at {observation.size}"
        reason = self.policy.explain(state, observation)
        if round(wanted) > self.max_size:
            return f"{reason}; held at max_size {self.max_size}"
        return f"{reason}; held at min_size {self.min_size}" if round(wanted) < self.min_size else reason

    def __repr__(self) -> str:
        bounds = f"min_size={self.min_size}, max_size={self.max_size}"
        return f"BatchSizeController({self.policy!r}, {bounds}, size={self.size})"


def describe(settings: Any) -> str:
    """Return settings as text that is the same in every run: a saved state is loaded only into the same settings.

    Functions are left out, as their addresses change. So are fields that do not take part in comparisons.

    >>> from .schedules import from_lr
    >>> describe(from_lr(lambda i: 0.5**i, start=32))
    "FromLr(start_size=32.0, power=1.0, per='epoch', every=1, after=0, max_factor=None)"
    """
    if is_dataclass(settings) and not isinstance(settings, type):
        items = settings.settings() if isinstance(settings, Part) else fields(settings)
        parts = [(item.name, getattr(settings, item.name)) for item in items if item.compare]
        usual = {item.name: item.default for item in items if item.metadata.get("is_later")}
        # Left out at its usual value, a setting that was added later leaves the text of earlier states as it was.
        parts = [(name, value) for name, value in parts if name not in usual or value != usual[name]]
        inside = ", ".join(f"{name}={describe(value)}" for name, value in parts if not callable(value))
        return f"{type(settings).__name__}({inside})"
    if isinstance(settings, Mapping):
        return "{" + ", ".join(f"{describe(key)}: {describe(value)}" for key, value in settings.items()) + "}"
    if isinstance(settings, (list, tuple)):
        return "(" + ", ".join(describe(value) for value in settings if not callable(value)) + ")"
    if isinstance(settings, np.generic):
        settings = settings.item()
    return repr(settings) if has_text(settings) else type(settings).__name__


def _with_plain_numbers(text: Any) -> Any:
    """Return the text of settings with numbers in one form: states of earlier versions say ``2`` or NumPy's names.

    >>> _with_plain_numbers("NoiseScale(target=np.float64(2.0), horizon=1e+16, gain=1.05)")
    'NoiseScale(target=2, horizon=10000000000000000, gain=1.05)'
    """
    if not isinstance(text, str):
        return text
    kinds = r"np\.float16|np\.float32|np\.float64|np\.longdouble|np\.u?int\d+|array"
    text = re.sub(rf"\b({kinds})\('?(-?{_NUMBER})'?\)", _numpy_number, text)
    text = re.sub(rf"(?<![\w.]){_NUMBER}(?![\w.])", _whole_number, text)
    return re.sub(r"(?<![\w.])-0(?![\w.])", "0", text)


_NUMBER = r"\d+(?:\.\d+)?(?:e[+-]?\d+)?"


def _numpy_number(match: re.Match[str]) -> str:
    kind, digits = match.groups()
    is_float = kind.startswith(("np.float", "np.long"))
    return repr(float(getattr(np, kind.removeprefix("np."))(digits))) if is_float else digits


def _advice(policy: Any) -> str:
    """Say what to write instead: the call of a policy whose name or function came, else a fixed size."""
    if isinstance(policy, Transform):
        return f"it goes after one: size.chain(size.goodput(), {policy!r})"
    name = policy if isinstance(policy, str) else getattr(policy, "__name__", "")
    known = callable(getattr(sys.modules[__package__], name, None)) and name.islower()
    return f"write size.{name}(…)" if known else "a fixed size is size.constant(64)"


def _whole_number(match: re.Match[str]) -> str:
    # A text of digits only stays as it is: a large whole number must not be rounded.
    return match[0] if match[0].isdigit() or not float(match[0]).is_integer() else str(int(float(match[0])))


def _write_decision(decision: Decision) -> dict[str, Any]:
    # Tokens came later: a run that does not count them leaves the states that it always left.
    return {name: value for name, value in asdict(decision).items() if name != "tokens" or value is not None}


def _read_decision(values: Mapping[str, Any]) -> Decision:
    decision = Decision(**values)
    for unit in get_args(Unit):
        if getattr(decision, unit) is not None:
            as_whole(unit, getattr(decision, unit), least=0)
    as_whole("old", decision.old, least=1)
    as_whole("new", decision.new, least=1)
    as_number("wanted", decision.wanted)
    if not isinstance(decision.reason, str):
        raise ArgumentError(f"reason must be a text, got {decision.reason!r}")
    return decision


def _read_exact(state: Mapping[str, Any], size: int) -> float:
    if state["version"] == 1:
        return float(size)
    exact = as_number("exact_size", state["exact_size"])
    # A size of more digits than a float has is not met exactly by one.
    if round(exact) != size and not (size > 2**53 and math.isclose(exact, size, rel_tol=1e-15)):
        raise ArgumentError(f"exact_size must be a number that rounds to size {size}, got {exact!r}")
    return exact


def _read_num_changes(state: Mapping[str, Any], num_kept: int) -> int:
    return num_kept if state["version"] == 1 else as_whole("num_changes", state["num_changes"], least=num_kept)


def _read_counts(counts: Mapping[str, Any]) -> Counts:
    return {name: None if counts[name] is None else as_whole(name, counts[name], least=0) for name in COUNTS}
