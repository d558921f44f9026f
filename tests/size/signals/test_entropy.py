"""entropy_driven: the map and the limits by hand, and the share kept from 0 to 1."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import ArgumentError, MissingSignalError
from batchwright.size.observation import Observation
from batchwright.size.policy import TIMES
from batchwright.size.signals import entropy_driven


def answer(policy, entropy, size=64):
    return policy.update(policy.init(), Observation(epoch=1, entropy=entropy, size=size))[0]


@pytest.mark.parametrize(("share", "size"), [(0.0, 512), (0.25, 256), (0.5, 128), (1.0, 32)])
def test_every_entropy_has_its_size(share, size):
    # 32 · 16^(1 − h)
    assert answer(entropy_driven(10, smallest=32, largest=512), share * math.log(10)) == pytest.approx(size)


def test_the_entropy_of_a_distribution_is_measured_against_the_number_of_classes():
    # p = (1/2, 1/2, 0, 0): H = log 2, half of log 4.
    entropy = -sum(p * math.log(p) for p in (0.5, 0.5))
    assert answer(entropy_driven(4, smallest=1, largest=100), entropy) == pytest.approx(10)


def test_a_reference_replaces_the_largest_entropy():
    policy = entropy_driven(50_000, smallest=32, largest=512, reference=3.0)
    assert answer(policy, 3.0) == 32
    assert answer(policy, 1.5) == pytest.approx(128)


@pytest.mark.parametrize(("share", "size"), [(0.1, 128), (0.5, 64), (0.9, 32)])
def test_limits_grow_when_certain_and_shrink_when_not(share, size):
    assert answer(entropy_driven(10, mode="threshold"), share * math.log(10)) == size


def test_limits_and_factors_can_be_given():
    policy = entropy_driven(2, mode="threshold", low=0.1, high=0.2, up=3, down=0.25)
    assert [answer(policy, share * math.log(2)) for share in (0.05, 0.15, 0.25)] == [192, 64, 16]


@given(
    st.floats(allow_nan=True, allow_infinity=True),
    st.integers(2, 10**6),
    st.floats(1, 1e6),
    st.floats(1.001, 1e6),
)
def test_the_size_stays_within_its_range_whatever_the_entropy(entropy, num_classes, smallest, ratio):
    largest = smallest * ratio
    size = answer(entropy_driven(num_classes, smallest=smallest, largest=largest), entropy)
    assert smallest <= size <= largest if math.isfinite(entropy) else size == 64


@given(st.floats(0, 5), st.floats(0, 5))
def test_a_more_certain_model_never_gets_a_smaller_batch(one, other):
    policy = entropy_driven(100, smallest=8, largest=4096)
    low, high = sorted([one, other])
    assert answer(policy, low) >= answer(policy, high)


def test_the_mean_over_the_epoch_is_weighted_by_batch_size():
    policy = entropy_driven(10, smallest=32, largest=512)
    # (3 · 0 + 1 · log 10) / 4 is h = 0.25.
    _, state = policy.update(policy.init(), Observation(epoch=0, entropy=0.0, batch_size=3))
    size, state = policy.update(json.loads(json.dumps(state)), Observation(epoch=1, entropy=math.log(10), batch_size=1))
    assert size == pytest.approx(256)
    assert state["weight"] == 0


def test_the_map_begins_with_an_uncertain_model():
    assert entropy_driven(10, smallest=32, largest=512).start() == 32
    assert entropy_driven(10, mode="threshold").start() is None


def test_it_explains_itself():
    policy = entropy_driven(10, smallest=32, largest=512)
    words = policy.explain(policy.init(), Observation(epoch=1, entropy=math.log(10) / 2, size=64))
    assert words == f"entropy 1.151 of at most 2.303, h = 0.5; 32 {TIMES} 16^0.5 = 128"
    limits = entropy_driven(10, mode="threshold")
    words = limits.explain(limits.init(), Observation(epoch=1, entropy=0.0, size=64))
    assert words == f"entropy 0 of at most 2.303, h = 0; low 0.3, high 0.7: 64 {TIMES} 2 = 128"


def test_what_is_missing_is_named():
    policy = entropy_driven(10, mode="threshold")
    with pytest.raises(MissingSignalError, match=r"entropy_driven needs entropy.*entropy_sum"):
        policy.update(policy.init(), Observation(epoch=1, size=8))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_classes": 1}, "num_classes must be a whole number of 2 or more, got 1"),
        ({"num_classes": 10}, "needs smallest and largest.*mode='threshold'"),
        ({"num_classes": 10, "smallest": 64, "largest": 64}, "smallest must be below largest"),
        ({"num_classes": 10, "smallest": 0, "largest": 64}, "smallest must be a number of 1 or more, got 0"),
        ({"num_classes": 10, "smallest": 1, "largest": 2, "low": 0.2}, "low=0.2 belongs to mode='threshold'"),
        ({"num_classes": 10, "mode": "threshold", "smallest": 1}, "smallest=1 belongs to mode='track'"),
        ({"num_classes": 10, "mode": "map"}, "mode must be one of 'track', 'threshold', got 'map'"),
        ({"num_classes": 10, "mode": "threshold", "low": 0.8}, "low must be below high, got low=0.8, high=0.7"),
        ({"num_classes": 10, "mode": "threshold", "high": 1.5}, "above 0 and below 1"),
        ({"num_classes": 10, "mode": "threshold", "up": 0.9}, "got up=0.9"),
        ({"num_classes": 10, "mode": "threshold", "reference": 0}, "reference must be a number above 0, got 0"),
    ],
)
def test_nonsense_is_refused_when_the_policy_is_made(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        entropy_driven(**arguments)
