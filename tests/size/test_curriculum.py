"""Curriculum: which examples are in play, and a batch that grows with them."""

import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import ArgumentError, MissingSignalError
from batchwright.size.controller import BatchSizeController
from batchwright.size.curriculum import Curriculum
from batchwright.size.observation import Observation
from batchwright.size.policy import TIMES


def test_the_easiest_examples_come_first():
    curriculum = Curriculum([5.0, 1.0, 3.0, 2.0, 4.0], start_fraction=0.4, full_at=3)
    # 0.4, 0.6, 0.8 and all of five examples.
    assert [curriculum.prefix(epoch).tolist() for epoch in range(4)] == [
        [1, 3],
        [1, 3, 2],
        [1, 3, 2, 4],
        [1, 3, 2, 4, 0],
    ]
    assert curriculum.prefix(100).tolist() == [1, 3, 2, 4, 0]
    assert curriculum.num_examples == 5


@pytest.mark.parametrize(
    ("shape", "halfway"),
    [("linear", 0.58), ("geometric", 0.4), ("sqrt", math.sqrt((0.0256 + 1) / 2))],  # of 0.16 and 1
)
def test_the_share_grows_in_three_shapes(shape, halfway):
    curriculum = Curriculum(range(10), start_fraction=0.16, full_at=8, shape=shape)
    assert curriculum.fraction(0) == 0.16
    assert curriculum.fraction(4) == pytest.approx(halfway)
    assert curriculum.fraction(8) == curriculum.fraction(9) == 1.0


def test_equal_scores_keep_the_order_of_the_data():
    curriculum = Curriculum([1, 0, 1, 0, 1, 0] * 20, start_fraction=0.5, full_at=1)
    assert curriculum.prefix(0).tolist() == list(range(1, 120, 2))


def test_a_share_that_is_a_whole_number_of_examples_takes_no_more():
    # 0.55 × 100 is 55.00000000000001 in floating point.
    assert len(Curriculum(range(100), start_fraction=0.55, full_at=1).prefix(0)) == 55


def test_at_least_one_example_is_in_play():
    assert Curriculum([3, 2], start_fraction=1e-9, full_at=10).prefix(0).tolist() == [1]


@given(
    st.lists(st.floats(allow_nan=False), min_size=1, max_size=30),
    st.floats(0.001, 1),
    st.floats(0.1, 50),
    st.sampled_from(["linear", "geometric", "sqrt"]),
)
def test_prefixes_grow_and_end_with_every_example(scores, start_fraction, full_at, shape):
    curriculum = Curriculum(scores, start_fraction=start_fraction, full_at=full_at, shape=shape)
    before = curriculum.prefix(0)
    for epoch in np.linspace(0, full_at, 7):
        here = curriculum.prefix(epoch)
        assert here[: len(before)].tolist() == before.tolist()
        outside = set(range(len(scores))) - set(here.tolist())
        assert all(scores[index] >= max(scores[i] for i in here) for index in outside)
        before = here
    assert sorted(curriculum.prefix(full_at).tolist()) == list(range(len(scores)))


def test_the_batch_grows_with_the_examples_in_play():
    curriculum = Curriculum(range(1000), start_fraction=0.1, full_at=9)
    controller = BatchSizeController(curriculum.policy(16), min_size=1, max_size=1024)
    assert controller.size == 16
    sizes = [controller.observe(epoch=epoch) for epoch in range(12)]
    assert sizes == [16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 160, 160]
    # So every epoch has as many updates: 100 / 16, 200 / 32, …
    updates = [len(curriculum.prefix(epoch)) / size for epoch, size in enumerate(sizes)]
    assert updates == pytest.approx([6.25] * 12)


def test_the_policy_explains_itself():
    policy = Curriculum(range(10), start_fraction=0.2, full_at=4).policy(32)
    words = f"the easiest 60 % of examples in epoch 2: 32 {TIMES} 0.6 / 0.2 = 96"
    assert policy.explain(None, Observation(epoch=2)) == words
    with pytest.raises(MissingSignalError, match=r"curriculum\.policy needs epoch"):
        policy.update(None, Observation(loss=1.0))


def test_what_it_was_given_stays_as_it_was():
    scores = np.array([2.0, 1.0])
    curriculum = Curriculum(scores, start_fraction=0.5, full_at=1)
    scores[:] = [0.0, 9.0]
    assert curriculum.prefix(0).tolist() == [1]
    with pytest.raises(ValueError, match="read-only"):
        curriculum.prefix(1)[0] = 0
    assert pickle.loads(pickle.dumps(curriculum)).prefix(1).tolist() == [1, 0]


def test_infinite_scores_are_the_hardest():
    assert Curriculum([math.inf, 1.0, -math.inf], start_fraction=1, full_at=1).prefix(0).tolist() == [2, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"difficulty": []}, r"one score per example, shape \(N,\), got \(0,\)"),
        ({"difficulty": [[1, 2]]}, r"got \(1, 2\)"),
        ({"difficulty": [1.0, math.nan]}, "difficulty is NaN at example 1"),
        ({"difficulty": ["easy", "hard"]}, "difficulty must be numbers"),
        ({"difficulty": [1, 10**400]}, "difficulty must be numbers"),
        ({"start_fraction": 0}, "start_fraction must be a number above 0 and at most 1, got 0"),
        ({"start_fraction": 1.1}, "start_fraction must be a number above 0 and at most 1, got 1.1"),
        ({"full_at": 0}, "full_at must be a number above 0, got 0"),
        ({"full_at": math.inf}, "full_at must be a number above 0, got inf"),
        ({"shape": "cubic"}, "shape must be one of 'linear', 'geometric', 'sqrt', got 'cubic'"),
    ],
)
def test_nonsense_is_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        Curriculum(**{"difficulty": [1, 2], "start_fraction": 0.5, "full_at": 2, **arguments})


def test_a_first_size_below_one_is_refused():
    with pytest.raises(ArgumentError, match="start must be a number of 1 or more, got 0"):
        Curriculum([1, 2], start_fraction=0.5, full_at=2).policy(0)
