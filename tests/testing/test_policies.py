"""check_policy: a good policy passes, and each broken rule is named."""

import math
import random
import threading
from dataclasses import dataclass

import numpy as np
import pytest

from batchwright.errors import MissingSignalError
from batchwright.size.combine import chain
from batchwright.size.controller import BatchSizeController
from batchwright.size.observation import Observation
from batchwright.size.policy import Policy, Transform
from batchwright.size.schedules import constant
from batchwright.testing import check_policy


class Good(Policy):
    """Doubles the size after every ten updates, and remembers how many there were."""

    def init(self):
        return {"num": 0}

    def update(self, state, observation):
        num = state["num"] + 1
        return observation.current * (2.0 if num % 10 == 0 else 1.0), {"num": num}


@dataclass
class Broken(Policy):
    """Keeps every rule that its subclasses do not break."""

    num: int = 0

    def init(self):
        return []

    def update(self, state, observation):
        return 64.0, state


class NoNumber(Broken):
    def update(self, state, observation):
        return None, state


class NoPair(Broken):
    def update(self, state, observation):
        return 64.0


class ArrayInState(Broken):
    def init(self):
        return np.zeros(2)


class TupleInState(Broken):
    def update(self, state, observation):
        return 64.0, (1, 2)


class NanInState(Broken):
    def update(self, state, observation):
        return 64.0, [observation.loss]


class InfinityInState(Broken):
    def update(self, state, observation):
        return 64.0, [math.inf]


class ChangesItsState(Broken):
    def update(self, state, observation):
        state.append(1)
        return 64.0, state


class ChangesItsStateInWords(Broken):
    def explain(self, state, observation):
        state.append(1)
        return "words"


class ChangesItself(Broken):
    def update(self, state, observation):
        self.num += 1
        return 64.0, state


class HidesItsMemory(Broken):
    """Remembers in its class, where neither a copy nor its settings show it; explain asks for the second answer."""

    memory: list = []  # noqa: RUF012

    def update(self, state, observation):
        self.memory.append(1)
        return 64.0 + len(self.memory), state


class Random(Broken):
    def update(self, state, observation):
        return random.uniform(1, 4096), state


class CountsRuns(Broken):
    """Answers the same throughout a run and differently in the next."""

    runs: list = []  # noqa: RUF012

    def init(self):
        self.runs.append(1)
        return []

    def update(self, state, observation):
        return 64.0 + len(self.runs), state


class RandomState(Broken):
    def update(self, state, observation):
        return 64.0, [random.random()]


class Forgetful(Broken):
    """Remembers in the type of its state, which JSON does not keep."""

    def update(self, state, observation):
        return 64.0 + (observation.step if isinstance(state, Marked) else 0), Marked(state)


class Marked(list):
    pass


class Speechless(Broken):
    def explain(self, state, observation):
        return 64


class NoStart(Broken):
    def start(self):
        return "64"


class Oscillating(Broken):
    def update(self, state, observation):
        return 32.0 if observation.current > 48 else 64.0, state


class Locked(Broken):
    def __init__(self):
        self.lock = threading.Lock()


def test_a_good_policy_passes():
    check_policy(Good())


def test_nan_is_a_way_to_hold():
    class Holds(Broken):
        def update(self, state, observation):
            return math.nan, state

    check_policy(Holds())


@pytest.mark.parametrize(
    ("policy", "rule"),
    [
        (NoNumber, "update answers with a number, or NaN to keep the size: got None"),
        (NoPair, "update returns a pair of the size and the next state: got 64.0"),
        (ArrayInState, "the state survives JSON"),
        (TupleInState, "the state survives JSON: (1, 2) became [1, 2]"),
        (NanInState, "the state survives JSON"),
        (InfinityInState, "the state survives JSON"),
        (ChangesItsState, "update does not change the state it is given: [] became [1]"),
        (ChangesItsStateInWords, "explain does not change the state it is given: [] became [1]"),
        (ChangesItself, "a policy never changes, only its state does: {'num': 0} became {'num': 1}"),
        (HidesItsMemory, "the same arguments give the same answer: got 65.0 and 67.0"),
        (Random, "the same arguments give the same answer"),
        (CountsRuns, "the same observations give the same sizes"),
        (RandomState, "the same observations give the same state"),
        (Forgetful, "resuming after 1 of 40 observations gives the same sizes"),
        (Speechless, "explain returns words: got 64"),
        (NoStart, "start answers with a number"),
        (Oscillating, "the size settles while every figure stays the same: the last ones are [64, 32, 64, 32]"),
        (Locked, "a policy can be copied"),
    ],
)
def test_a_broken_rule_is_named(policy, rule):
    HidesItsMemory.memory.clear()
    with pytest.raises(AssertionError) as error:
        check_policy(policy())
    assert rule in str(error.value)


def test_what_is_no_policy_is_named():
    with pytest.raises(AssertionError, match=r"a policy is a size.Policy: got 64"):
        check_policy(64)


def test_a_controller_that_lets_the_bounds_go_is_caught(monkeypatch):
    monkeypatch.setattr(BatchSizeController, "_fit", lambda self, wanted, exact: wanted)
    monkeypatch.setattr(BatchSizeController, "_whole", lambda self, exact: round(exact))
    with pytest.raises(AssertionError, match=r"the size stays within 1 to 32: got \[64"):
        check_policy(constant(64), max_size=32)


def test_the_policy_that_is_given_is_not_touched():
    policy = ChangesItself()
    with pytest.raises(AssertionError):
        check_policy(policy)
    assert policy.num == 0


class FallsBelowTen(Broken):
    """Is fine until the loss is below 10, then answers with no number."""

    def update(self, state, observation):
        return 64.0 if observation.need("loss") >= 10 else None, state


def test_observations_may_be_given_as_figures_or_as_observations():
    check_policy(FallsBelowTen(), observations=[{"loss": 11}, Observation(loss=12.0, size=3)])
    with pytest.raises(AssertionError, match="answers with a number"):
        check_policy(FallsBelowTen(), observations=[{"loss": 11.0}, {"loss": 9.0}])


def test_a_figure_that_the_given_observations_lack_is_reported_as_such():
    with pytest.raises(MissingSignalError, match="needs loss"):
        check_policy(FallsBelowTen(), observations=[{"epoch": 1}])


def test_no_observations_check_nothing_and_are_refused():
    with pytest.raises(AssertionError, match="at least one observation"):
        check_policy(Good(), observations=[])


def test_a_long_course_is_resumed_at_some_places():
    check_policy(Good(), observations=[{"batch_size": 8}] * 500)


def test_a_transform_is_checked_behind_a_policy():
    class Flips(Transform):
        def init(self):
            return 0

        def update(self, state, observation, size):
            return size * (1 + state), 1 - state

    with pytest.raises(AssertionError, match="the size settles"):
        check_policy(chain(constant(64), Flips()))


def test_a_policy_that_climbs_for_long_does_not_oscillate():
    class Climbs(Broken):
        def update(self, state, observation):
            return observation.current + 1.0, state

    check_policy(Climbs(), max_size=100_000)
