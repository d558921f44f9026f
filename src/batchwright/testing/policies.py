"""The contract of a batch-size policy, checked on a series of observations."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from itertools import pairwise
from typing import Any, final

from ..size.controller import BatchSizeController
from ..size.observation import FILLED_IN, Observation
from ..size.policy import Policy, State

Figures = dict[str, Any]
Control = Callable[[], BatchSizeController]

_NUM_RESUMES = 64  # a long run is resumed at about this many places, not after every update
_NUM_STEADY = 400


def check_policy(
    policy: Policy,
    *,
    observations: Iterable[Observation | Mapping[str, Any]] | None = None,
    min_size: int = 1,
    max_size: int = 4096,
) -> None:
    """Check that a policy keeps its contract, or raise an AssertionError that names the broken rule.

    The rules:

    - answers are numbers, and sizes stay within the bounds of the controller;
    - the state survives JSON, is never changed in place, and resuming from it at any point gives the same sizes;
    - the same observations give the same answers, and the policy itself never changes;
    - ``explain`` returns words;
    - the size settles while every observed figure stays the same.

    The policy is copied; your object is never run. Check a transform as the end of a chain:
    ``check_policy(chain(constant(64), transform))``.

    Args:
        policy: the policy.
        observations: the arguments of successive calls of ``controller.observe``; None takes a made-up run that has
            every figure and one loss that is NaN.
        min_size: the smallest size of the controller.
        max_size: the largest size of the controller.

    >>> from batchwright.size import linear
    >>> check_policy(linear(32, 8))
    """
    assert isinstance(policy, Policy), f"a policy is a size.Policy: got {policy!r}"
    course = _made_up_run() if observations is None else [_figures(observation) for observation in observations]
    assert course, "there is at least one observation: got none"
    _check_start(_copy(policy))

    def control(*, watched: bool = False) -> BatchSizeController:
        mine = _copy(policy)
        return BatchSizeController(_Watched(mine) if watched else mine, min_size=min_size, max_size=max_size)

    sizes, _ = _walk(control(watched=True), course)
    again, states = _walk(control(), course)
    assert again == sizes, f"the same observations give the same sizes: got {sizes} and {again}"
    assert states == _walk(control(), course)[1], "the same observations give the same state: two runs differ"
    _check_resume(control, course, sizes, states)
    _check_settles(control(), course)


def _made_up_run() -> list[Figures]:
    """Return five epochs of eight updates, with every figure that can be observed."""
    return [_made_up(step) for step in range(40)]


def _made_up(step: int) -> Figures:
    wave = math.sin(1.7 * step)
    return {
        "epoch": (step + 1) // 8,
        "step": step + 1,
        "examples": 64 * (step + 1),
        "tokens": 1280 * (step + 1),
        "batch_size": 40 if step % 8 == 7 else 64,  # the last of an epoch is short
        "loss": math.nan if step == 20 else 2 * 0.95**step + 0.1 * wave,
        "lr": 0.1 * 0.98**step,
        "entropy": 1.5 * 0.97**step + 0.05 * (1 + wave),
        "noise_s": 100 + 10 * wave,
        "noise_g2": 0.5 + 0.6 * wave,  # sometimes below 0, like any unbiased estimate
        "noise_reliable": step >= 10,
        "noise_parts": 4,
        "seconds": 0.1 + 0.01 * wave,
        "memory_fraction": 0.6 + 0.35 * wave,
    }


def _figures(observation: Observation | Mapping[str, Any]) -> Figures:
    given = asdict(observation) if isinstance(observation, Observation) else dict(observation)
    return {name: value for name, value in given.items() if name not in FILLED_IN}


def _copy(policy: Policy) -> Policy:
    try:
        return copy.deepcopy(policy)
    except Exception as error:
        raise AssertionError(f"a policy can be copied, because its settings are plain values: {error}") from error


def _settings(value: Any, inside: tuple[int, ...] = ()) -> Any:
    """Return the settings inside an object as plain values that can be compared."""
    if isinstance(value, (bool, int, float, str, type(None))) or callable(value) or id(value) in inside:
        return value
    inside = (*inside, id(value))
    if isinstance(value, Mapping):
        return {key: _settings(item, inside) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_settings(item, inside) for item in value]
    if hasattr(value, "__dict__"):
        return {name: _settings(item, inside) for name, item in vars(value).items()}
    return repr(value)


@final
class _Watched(Policy):
    """A policy whose every answer is checked."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    def init(self) -> State:
        return _check_json(self.policy.init())

    def start(self) -> float | None:
        return self.policy.start()

    def update(self, state: State, observation: Observation) -> tuple[float, State]:
        kept, settings = copy.deepcopy(state), _settings(self.policy)
        size, after = self._answer(state, observation)
        mine = _settings(self.policy)
        assert mine == settings, f"a policy never changes, only its state does: {settings} became {mine}"
        assert state == kept, f"update does not change the state it is given: {kept} became {state}"
        words = self.policy.explain(state, observation)
        assert isinstance(words, str), f"explain returns words: got {words!r}"
        assert state == kept, f"explain does not change the state it is given: {kept} became {state}"
        again, _ = self._answer(state, observation)
        assert repr(size) == repr(again), f"the same arguments give the same answer: got {size!r} and {again!r}"
        return size, _check_json(after)

    def _answer(self, state: State, observation: Observation) -> tuple[float, State]:
        answer = self.policy.update(state, observation)
        is_pair = isinstance(answer, tuple) and len(answer) == 2
        assert is_pair, f"update returns a pair of the size and the next state: got {answer!r}"
        _check_number("update", answer[0])
        return answer


def _check_number(name: str, size: Any) -> None:
    is_number = not isinstance(size, bool) and hasattr(size, "__float__")
    assert is_number, f"{name} answers with a number, or NaN to keep the size: got {size!r}"


def _check_json(state: State) -> State:
    try:
        survived = json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"the state survives JSON: {error} in {state!r}") from error
    assert survived == state, f"the state survives JSON: {state!r} became {survived!r}"
    return state


def _check_start(policy: Policy) -> None:
    start = policy.start()
    if start is not None:
        _check_number("start", start)


def _walk(controller: BatchSizeController, course: list[Figures]) -> tuple[list[int], dict[int, str]]:
    """Return the size after every observation, and the state before some of them as JSON."""
    sizes, states, stride = [], {}, max(1, len(course) // _NUM_RESUMES)
    for num, figures in enumerate(course):
        if num % stride == 0:
            states[num] = json.dumps(controller.state_dict())
        sizes.append(controller.observe(**figures))
    low, high = controller.min_size, controller.max_size
    outside = [size for size in sizes if not low <= size <= high]
    assert not outside, f"the size stays within {low} to {high}: got {outside[:5]}"
    return sizes, states


def _check_resume(control: Control, course: list[Figures], sizes: list[int], states: dict[int, str]) -> None:
    for num, state in states.items():
        controller = control()
        controller.load_state_dict(json.loads(state))
        rest = [controller.observe(**figures) for figures in course[num:]]
        assert rest == sizes[num:], (
            f"resuming after {num} of {len(course)} observations gives the same sizes: got {rest}, not {sizes[num:]}"
        )


def _check_settles(controller: BatchSizeController, course: list[Figures]) -> None:
    """Repeat the last observation: the size may rise or fall for long, but not both in turn."""
    _walk(controller, course)
    counts = {name: count for name, count in controller.state_dict()["counts"].items() if count is not None}
    steady, sizes = {**course[-1], **counts}, []
    for _ in range(_NUM_STEADY):
        sizes.append(controller.observe(**{**steady, "batch_size": controller.size} if "step" in counts else steady))
    late = sizes[_NUM_STEADY // 2 :]
    changes = {(new > old) - (new < old) for old, new in pairwise(late)}
    assert not {1, -1} <= changes, f"the size settles while every figure stays the same: the last ones are {late[-4:]}"
