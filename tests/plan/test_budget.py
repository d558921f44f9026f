"""Budgets: the arithmetic by hand, the bisection against brute force, and costs that are refused."""

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import batchwright as bw
from batchwright.errors import ArgumentError, BudgetError

LARGEST_SIZE = 2**31 - 1


def shapes(num_items, *lengths):
    return np.array(num_items), np.array(lengths).T


def squares(num_items, padded):
    return num_items * padded[:, 0] ** 2


def test_max_items_counts_items_whatever_their_length():
    budget = bw.MaxItems(8)
    assert budget.fraction(*shapes([2, 8, 10], [5, 500, 1])).tolist() == [0.25, 1.0, 1.25]
    assert budget.max_items(np.array([[5], [500]])).tolist() == [8, 8]


def test_max_tokens_counts_padded_tokens_over_all_axes():
    budget = bw.MaxTokens(100)
    # 4 × (10 + 15) = 100 is just full; 7 × (10 + 5) = 105 is over.
    assert budget.fraction(*shapes([4, 7], [10, 10], [15, 5])).tolist() == [1.0, 1.05]
    # 100 // 25 = 4, 100 // 15 = 6, and one example of 101 does not fit.
    assert budget.max_items(np.array([[10, 15], [10, 5], [100, 1]])).tolist() == [4, 6, 0]


def test_max_cost_follows_the_function():
    budget = bw.MaxCost(squares, 100)
    assert budget.fraction(*shapes([1, 4, 2], [5, 5, 10])).tolist() == [0.25, 1.0, 2.0]
    assert budget.max_items(np.array([[5], [7], [11]])).tolist() == [4, 2, 0]


def test_and_takes_the_tighter_budget_at_every_shape():
    both = bw.MaxTokens(100) & bw.MaxItems(8)
    assert both.max_items(np.array([[5], [25]])).tolist() == [8, 4]
    # 8 items of 5 tokens: 0.4 of the tokens, all of the items.
    assert both.fraction(*shapes([8], [5])).tolist() == [1.0]


def test_and_is_the_same_in_any_grouping():
    a, b, c = bw.MaxTokens(100), bw.MaxItems(8), bw.MaxCost(squares, 400)
    assert (a & b) & c == a & (b & c)
    assert repr(a & b & c) == "MaxTokens(100) & MaxItems(8) & MaxCost(squares, 400)"


def test_and_with_a_number_is_a_type_error():
    with pytest.raises(TypeError, match="MaxItems"):
        bw.MaxItems(8) & 5


class Callable:
    def __call__(self, num_items, padded):
        return num_items


@pytest.mark.parametrize("cost", [Callable(), partial(squares), squares, Callable().__call__])
def test_the_repr_of_a_cost_is_the_same_in_every_run(cost):
    # A saved state compares it, so the address of an object must not be in it.
    assert "0x" not in repr(bw.MaxCost(cost, 5))


def test_numbers_of_numpy_are_numbers():
    assert repr(bw.MaxItems(np.int64(8)) & bw.MaxTokens(np.uint64(100))) == "MaxItems(8) & MaxTokens(100)"
    sizes = bw.MaxTokens(np.uint64(100)).max_items(np.array([[30]]))
    assert sizes.tolist() == [3]
    assert sizes.dtype == np.int64


def test_a_limit_beyond_64_bits_means_no_limit():
    lengths = np.array([[1], [1000]])
    assert bw.MaxItems(10**30).max_items(lengths).tolist() == [LARGEST_SIZE] * 2
    # (2**63 - 1) // 1000 is above the largest size too.
    assert bw.MaxTokens(10**30).max_items(lengths).tolist() == [LARGEST_SIZE] * 2
    assert bw.MaxTokens(10**30).fraction(np.array([1]), lengths[:1])[0] < 1e-20


def test_a_cost_that_never_reaches_the_limit_allows_the_largest_size():
    assert bw.MaxCost(lambda n, lengths: np.ones(len(n)), 1).max_items(np.array([[3]])).tolist() == [LARGEST_SIZE]


@settings(max_examples=150)
@given(
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=6),
    per_item=st.floats(0.5, 20),
    per_token=st.floats(0, 3),
    power=st.sampled_from([1, 1.5, 2]),
    step=st.integers(1, 9),
    limit=st.floats(0.1, 1000),
)
def test_bisection_finds_what_brute_force_finds(lengths, per_item, per_token, power, step, limit):
    def cost(num_items, padded):  # in stairs of `step` items, as a kernel with tiles would have it
        tiles = -(-num_items // step)
        return tiles * (per_item + per_token * padded[:, 0].astype(float) ** power)

    column = np.array(lengths)[:, None]
    candidates = np.arange(1, 9 * 2001)  # at least 0.5 a tile, so at most 2,000 tiles of 9 items
    costs = [cost(candidates, np.full((len(candidates), 1), length)) for length in lengths]
    expected = [int((one <= limit).sum()) for one in costs]
    assert bw.MaxCost(cost, limit).max_items(column).tolist() == expected


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(1, 500)), min_size=1, max_size=5), st.integers(1, 9000))
def test_one_item_more_than_fits_is_over(lengths, limit):
    padded = np.array(lengths)
    for budget in (bw.MaxTokens(limit), bw.MaxItems(limit), bw.MaxCost(squares, limit)):
        sizes = budget.max_items(padded)
        assert (budget.fraction(sizes[sizes > 0], padded[sizes > 0]) <= 1).all()
        assert (budget.fraction(sizes + 1, padded) > 1).all()


def test_squares_of_32_bit_lengths_do_not_overflow():
    # 60,000² = 3.6e9 is above 2**31; wrapped around it would be negative and fit anything.
    lengths = np.array([[60_000]], dtype=np.int32)
    budget = bw.MaxCost(squares, 3.6e9)
    assert budget.fraction(np.array([2], dtype=np.int32), lengths).tolist() == [2.0]
    plan = bw.plan_batches(np.full(4, 60_000, dtype=np.int32), budget, grouping=bw.InOrder())
    assert list(plan) == [[0], [1], [2], [3]]
    assert plan.report().largest == 1.0


def test_a_cost_may_be_infinite_for_what_does_not_fit():
    budget = bw.MaxCost(lambda n, lengths: np.where(n * lengths[:, 0] > 20, np.inf, 1.0), 5)
    assert budget.max_items(np.array([[4], [20], [21]])).tolist() == [5, 1, 0]


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        (lambda n, lengths: lengths[:, 0] / n, r"1 for 1 items of length \[1, 2\], 0.5 with one item more"),
        (lambda n, lengths: n / lengths[:, 1], r"0.5 for 1 items of length \[1, 2\], 0.333333 with one more on axis 1"),
        (lambda n, lengths: n * np.nan, r"NaN for 1 items of length \[1, 2\]"),
        (lambda n, lengths: 1.0, r"one number per shape, \(1,\), got \(\)"),
        (lambda n, lengths: n[:, None] * lengths, r"one number per shape, \(1,\), got \(1, 2\)"),
    ],
)
def test_a_cost_that_breaks_the_contract_is_refused(cost, message):
    with pytest.raises(BudgetError, match=message):
        bw.MaxCost(cost, 10).max_items(np.array([[1, 2]]))


def test_a_cost_that_writes_to_its_arguments_plans_as_one_that_does_not():
    def in_place(num_items, padded):
        padded += 2  # the marks that a tokenizer adds
        num_items *= padded[:, 0]
        return num_items

    lengths = [3, 5, 9, 20, 7] * 20
    plain, writing = (
        bw.plan_batches(lengths, bw.MaxCost(cost, 60)) for cost in (lambda n, padded: n * (padded[:, 0] + 2), in_place)
    )
    assert list(writing) == list(plain)
    assert max(num_items * (padded + 2) for num_items, padded in writing.shapes) <= 60


def test_a_rounding_error_is_not_a_falling_cost():
    # 0.1 + 0.2 style noise: the same cost a billionth lower with one item more.
    noisy = bw.MaxCost(lambda n, lengths: 1e6 - 1e-6 * (n % 2), 2e6)
    assert noisy.max_items(np.array([[3]])).tolist() == [LARGEST_SIZE]


def test_a_cost_must_be_a_function():
    with pytest.raises(ArgumentError, match="function of"):
        bw.MaxCost(7, 5)


@pytest.mark.parametrize(
    "combine",
    [
        lambda: bw.MaxItems(3) and bw.MaxTokens(5),
        lambda: bw.MaxItems(3) or bw.MaxTokens(5),
        lambda: not bw.MaxItems(3),
        lambda: bool(bw.MaxItems(3) & bw.MaxTokens(5)),
        lambda: bw.MaxCost(squares, 9) and bw.MaxTokens(5),
    ],
    ids=["and", "or", "not", "bool", "cost"],
)
def test_words_that_would_drop_a_budget_are_refused(combine):
    with pytest.raises(ArgumentError, match="a budget is neither true nor false: combine budgets with &"):
        combine()
