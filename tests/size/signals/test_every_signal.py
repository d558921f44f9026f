"""What every signal-driven policy keeps: frozen settings, a state that survives JSON, reasons that match answers."""

import copy
import json
from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.size import signals
from batchwright.size.controller import BatchSizeController
from batchwright.size.curriculum import Curriculum
from batchwright.size.observation import FILLED_IN, Observation
from batchwright.size.policy import Policy
from batchwright.testing import check_policy

from ..makers import Seconds

POLICIES = {
    "difference": signals.loss_driven(),
    "ema": signals.loss_driven("ema", mode="linear", gain=50),
    "variance": signals.loss_driven("variance", window=3, per="step"),
    "detrended": signals.loss_driven("variance", window=3, detrend=True, per="examples", every=100),
    "variance with gain": signals.loss_driven("variance", window=3, gain=5, fluctuating=2, per="step"),
    "variance with gain, linear": signals.loss_driven("variance", window=3, gain=50, mode="linear", fluctuating=2),
    "loss below": signals.loss_below(1.0),
    "loss below per step": signals.loss_below(0.3, mode="linear", per="step"),
    "loss settled": signals.loss_settled(tolerance=0.5),
    "loss settled per step": signals.loss_settled(tolerance=0.5, window=2, relative=False, per="step"),
    "entropy per step": signals.entropy_driven(10, smallest=16, largest=512, per="step"),
    "noise per epoch": signals.noise_driven(per="epoch"),
    "noise ratio of four": signals.noise_driven(estimator="ratio", num_parts=4, per="step"),
    "memory per epoch": signals.memory_driven(per="epoch"),
    "memory per examples": signals.memory_driven(0.99, 0.98, per="examples", every=100),
    "speed": signals.speed_driven(),
    "speed per step": signals.speed_driven(per="step", every=3),
    "step time": signals.step_time(200, every=3),
    "step time per epoch": signals.step_time(40, per="epoch"),
    "entropy": signals.entropy_driven(10, smallest=16, largest=512),
    "entropy limits": signals.entropy_driven(10, mode="threshold", per="step", every=2),
    "noise": signals.noise_driven(num_examples=10_000),
    "noise ratio": signals.noise_driven(estimator="ratio"),
    "memory": signals.memory_driven(),
    "norm test": signals.track(lambda o: o.noise_s / o.noise_g2 / 0.5**2),
    "CABS": signals.track(lambda o: o.lr * o.noise_s / o.loss, needs=["lr", "loss"]),
    "goodput": signals.goodput(Seconds(), length=64, base_size=32),
    "curriculum": Curriculum(range(100), start_fraction=0.2, full_at=3).policy(16),
}
every_policy = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES.keys())


def course(seed, num=40):
    """Return observations of a run of epochs of eight updates."""
    rng = np.random.default_rng(seed)
    return [
        Observation(
            epoch=(step + 1) // 8,
            batch_size=int(rng.integers(2, 128)),
            size=64,
            loss=float(rng.exponential()),
            lr=0.1,
            entropy=float(rng.uniform(0, 2.5)),
            noise_s=float(rng.normal(90, 10)),
            noise_g2=float(rng.normal(0.5, 0.3)),
            noise_parts=4,
            seconds=float(rng.uniform(0.09, 0.11)),
            memory_fraction=float(rng.uniform(0, 1)),
        )
        for step in range(num)
    ]


@every_policy
def test_the_contract_of_policies_is_kept(policy):
    check_policy(policy)


@every_policy
@settings(max_examples=20)
@given(cut=st.integers(0, 40), seed=st.integers(0, 5))
def test_a_state_that_went_through_json_continues_the_same(policy, cut, seed):
    plain = saved = policy.init()
    for step, observation in enumerate(course(seed)):
        if step == cut:
            saved = json.loads(json.dumps(saved, allow_nan=False))
        size, plain = policy.update(plain, observation)
        again, saved = policy.update(saved, observation)
        assert again == size
    assert saved == plain


@every_policy
def test_updating_and_explaining_leave_the_state_that_came_in(policy):
    state = policy.init()
    for observation in course(0):
        before = copy.deepcopy(state)
        words = policy.explain(state, observation)
        size, after = policy.update(state, observation)
        assert state == before
        assert isinstance(size, float)
        # The reason ends with the size: "64 × 2 = 128", "holds 64".
        assert float(words.split()[-1]) == pytest.approx(size, rel=1e-3)
        state = after


@every_policy
def test_something_happens_in_a_course_of_training(policy):
    controller = BatchSizeController(policy, min_size=1, max_size=4096, initial=64)
    for observation in course(1, num=80):
        seen = {
            item.name: getattr(observation, item.name) for item in fields(observation) if item.name not in FILLED_IN
        }
        assert 1 <= controller.observe(**seen) <= 4096
    assert controller.history
    assert json.loads(json.dumps(controller.state_dict(), allow_nan=False)) == controller.state_dict()


@every_policy
def test_settings_are_frozen_and_can_be_compared(policy):
    assert isinstance(policy, Policy)
    with pytest.raises(FrozenInstanceError):
        setattr(policy, fields(policy)[0].name, None)
    assert policy == copy.copy(policy)


def test_what_is_exported_is_sorted_and_there():
    assert signals.__all__ == sorted(signals.__all__)
    assert all(callable(getattr(signals, name)) for name in signals.__all__)


@pytest.mark.parametrize(
    "text",
    [
        "loss_driven(per='examples', every=1)",
        "entropy_driven(10, smallest=16, largest=512, per='examples', every=1)",
        "noise_driven(estimator='ratio', per='examples', every=1)",
        "noise_driven(num_examples=10000000000000000)",
    ],
)
def test_a_policy_is_written_as_the_call_that_makes_it(text):
    assert repr(eval(f"signals.{text}")) == text
