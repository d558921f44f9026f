"""track: the batch is an expression of what was observed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeAlias, final

from ...errors import ArgumentError, BatchwrightError, MissingSignalError
from .._states import check_none
from ..noise import NoiseAverage
from ..observation import SOURCES, Observation
from ..policy import Answer, Policy, ReasoningPolicy, State, ask, hold
from .noise_scale import HORIZON, add_noise, as_horizon, check_average, need_two

Expression: TypeAlias = Callable[[Observation], float]

_FIELDS = tuple(item.name for item in fields(Observation))


@final
class _Reader:
    """An observation that notes which of its figures an expression reads."""

    def __init__(self, observation: Observation) -> None:
        self._observation = observation
        self.names: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        return getattr(self._observation, name)

    def need(self, name: str, *, by: str = "track") -> Any:
        """Note a figure, and return it or say that it is missing."""
        self.names.add(name)
        return self._observation.need(name, by=by)

    @property
    def missing(self) -> list[str]:
        """Return the figures that were read and are None."""
        return [name for name in _FIELDS if name in self.names and getattr(self._observation, name) is None]


@final
@dataclass(frozen=True, repr=False)
class Track(ReasoningPolicy):
    """Asks for the value of an expression."""

    expression: Expression
    needs: tuple[str, ...] = ()
    horizon: float | None = HORIZON

    def init(self) -> State:
        """Return empty averages, or None if nothing is averaged."""
        return None if self.horizon is None else NoiseAverage(self.horizon).to_state()

    def check_state(self, state: State, name: str = "policy_state") -> None:
        """Check the averages."""
        if self.horizon is None:
            check_none(name, state)
        else:
            check_average(name, state, horizon=self.horizon)

    def decide(self, state: State, observation: Observation) -> Answer:
        """Evaluate the expression on averaged noise; hold while it is not reliable."""
        try:
            return self._decide(state, observation)
        except MissingSignalError:
            if observation.ends_epoch:
                return hold(observation, state, "no update ran since the last observation")
            raise

    def _decide(self, state: State, observation: Observation) -> Answer:
        for name in self.needs:
            observation.need(name, by=self.name)
        observed, state = self._average(state, observation)
        reader = _Reader(observed)
        size = self._evaluate(reader)
        if size is None:
            return need_two(observation, state)
        if not _can_be_trusted(reader, state):
            return hold(observation, state, "the noise that the expression reads is not reliable")
        return ask(observation, state, size, getattr(self.expression, "__name__", "the expression"))

    def _average(self, state: State, observation: Observation) -> tuple[Observation, State]:
        if state is None:
            return observation, state
        if observation.noise_s is not None:
            state = add_noise(state, observation, by=self.name).to_state()
        average = NoiseAverage(**state)
        if average.weight == 0:
            return observation, state
        return replace(observation, noise_s=average.s, noise_g2=average.g2, noise_reliable=average.is_reliable), state

    def _evaluate(self, reader: _Reader) -> float | None:
        """Return the value, NaN if it cannot be computed, None if a single example has no noise."""
        try:
            value = self.expression(reader)  # type: ignore[arg-type]
        except ArithmeticError:
            return math.nan
        except TypeError as error:
            if "noise_s" in reader.missing and reader.batch_size == 1:
                return None
            if not reader.missing:
                raise
            raise _missing(reader) from error
        except ValueError as error:
            # The root of an estimate below 0 holds the size; a figure that is needed and missing is an error.
            if isinstance(error, BatchwrightError) or not {"noise_s", "noise_g2"} & reader.names:
                raise
            return math.nan
        return _as_number(value)


def _can_be_trusted(reader: _Reader, state: State) -> bool:
    average = None if state is None else NoiseAverage(**state)
    if average is None or average.weight == 0:
        return "noise_g2" not in reader.names or reader.noise_g2 is None or reader.noise_g2 > 0
    if "noise_g2" in reader.names:
        return average.is_reliable
    # S is known well after one update; only the quotient takes long.
    return "noise_s" not in reader.names or average.s > 0


def _missing(reader: _Reader) -> MissingSignalError:
    sources = "; ".join(f"{name}: {SOURCES[name]}" for name in reader.missing if name in SOURCES)
    return MissingSignalError(f"track reads {', '.join(reader.missing)}, not observed; {sources}")


def _as_number(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # an int beyond every float
        return math.inf
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"the expression of track must return a number of examples, got {value!r}") from error


def track(expression: Expression, *, needs: Sequence[str] = (), horizon: float | None = HORIZON) -> Policy:
    """Ask for the value of an expression: most published rules are one line.

    With ``S`` the trace of the gradient's covariance and ``G2`` the squared norm of the true gradient::

        track(lambda o: o.noise_s / o.noise_g2 / 0.5**2)            # norm test with eta = 0.5
        track(lambda o: delta * (1 + o.noise_s / o.noise_g2))       # DiveBatch
        track(lambda o: o.lr * o.noise_s / o.loss)                  # CABS

    The expression sees ``noise_s`` and ``noise_g2`` averaged over recent examples, as the values of a single update are
    too noisy to divide. If it reads ``noise_g2``, the size holds until that is two standard errors above 0. Other
    figures come from the last update; put ``smooth`` after the policy if they jump. A value that is not finite or not
    above 0, or a division by 0, holds the size.

    Args:
        expression: takes an observation, returns a number of examples.
        needs: names of figures that the expression cannot do without; they are checked before it is called.
        horizon: examples over which the averages forget; None shows the raw values of each update, and holds if
            ``noise_g2`` is not above 0.

    Returns:
        A policy that needs the figures that the expression reads, and names one that is missing.

    >>> policy = track(lambda o: 32 + 16 * o.epoch, needs=["epoch"])
    >>> policy.update(policy.init(), Observation(epoch=2, batch_size=32))[0]
    64.0
    """
    if not callable(expression):
        raise ArgumentError(f"track needs a function of an observation, got {expression!r}")
    names = (needs,) if isinstance(needs, str) else tuple(needs)
    unknown = [name for name in names if name not in SOURCES]
    if unknown:
        raise ArgumentError(f"needs must be names of figures, {', '.join(SOURCES)}, got {unknown[0]!r}")
    return Track(expression, names, None if horizon is None else as_horizon(horizon))
