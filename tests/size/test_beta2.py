"""The rule for Adam's second beta: what half of the average stands for, in examples, does not depend on the size."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import ArgumentError
from batchwright.size.learning_rate import get_beta2_rule, half_life


def test_twice_the_batch_squares_beta2_and_half_of_it_takes_the_root():
    assert half_life(128, 64, 0.99) == 0.99 * 0.99
    assert half_life(32, 64, 0.81) == pytest.approx(0.9)
    assert half_life(64, 64, 0.999) == 0.999


def test_marek_s_example_at_one_sequence_per_update():
    # 0.95 at 512 sequences per update is 0.9999 at one: 0.95 ** (1 / 512).
    assert half_life(1, 512, 0.95) == pytest.approx(0.9999, abs=1e-6)


@given(st.integers(1, 4096), st.integers(1, 4096), st.floats(0.5, 0.9999))
def test_half_of_the_average_is_forgotten_after_the_same_examples_at_every_size(size, base, beta2):
    after = half_life(size, base, beta2)
    if beta2 ** (size / base) > 0.95:
        examples = [base * math.log(2) / -math.log(beta2), size * math.log(2) / -math.log(after)]
        assert examples[1] == pytest.approx(examples[0], rel=1e-6)
    assert 0 <= after < 1


@pytest.mark.parametrize(("size", "beta2", "after"), [(640, 0.98, 0.95), (128, 0.9, 0.9), (16, 0.9, 0.9**0.25)])
def test_the_average_never_becomes_shorter_than_is_good_for_training(size, beta2, after):
    assert half_life(size, 64, beta2) == pytest.approx(after)


def test_two_small_averages_forget_as_one_large_one():
    # Two updates of 64 examples multiply what was there by as much as one of 128.
    assert half_life(64, 64, 0.98) ** 2 == pytest.approx(half_life(128, 64, 0.98), rel=1e-12)


def test_numbers_of_numpy_count_and_a_plain_number_comes_back():
    answer = half_life(np.int64(128), np.int32(64), np.float64(0.99))
    assert type(answer) is float
    assert answer == pytest.approx(0.9801)


def test_a_rule_is_found_by_name_and_a_function_or_none_stays():
    assert get_beta2_rule("half_life") is half_life
    assert get_beta2_rule(None) is None
    own = lambda size, base, beta2: beta2  # noqa: E731
    assert get_beta2_rule(own) is own


@pytest.mark.parametrize("rule", ["sqrt", 0.99, True])
def test_an_unknown_rule_is_refused_with_the_known_ones(rule):
    with pytest.raises(ArgumentError, match="beta2_rule must be 'half_life', a function of"):
        get_beta2_rule(rule)
