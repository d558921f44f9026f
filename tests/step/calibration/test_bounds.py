"""Bounds of what ran out of memory: dominance by hand, and as a rule for any shapes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from batchwright.plan import MaxTokens
from batchwright.step import FoundBudget
from batchwright.step.calibration._bounds import between, bounded_items, bounds_from, dominates, most_ran, smallest

SHAPES = st.lists(st.tuples(st.integers(1, 50), st.integers(1, 8), st.integers(1, 8)), max_size=6)
ROWS = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 8)), min_size=1, max_size=6)


def test_rows_that_are_shorter_on_any_axis_are_not_bounded():
    rows = np.array([[9, 8], [10, 8], [9, 7], [8, 64], [64, 64]])
    free = 2**31 - 1
    assert bounded_items(rows, [(301, 9, 8)]).tolist() == [300, 300, free, free, 300]


def test_the_least_of_several_bounds_counts():
    assert bounded_items(np.array([[4], [8], [16]]), [(100, 4), (20, 16)]).tolist() == [99, 99, 19]


def test_one_item_more_than_ran_is_the_bound_if_that_is_close_to_what_failed():
    assert bounds_from([(356, 5)], [(4, 5), (290, 5)]) == ((291, 5),)
    assert bounds_from([(356, 5)], [(4, 5), (200, 5)]) == ((356, 5),)
    # A longer row with more items shows that as many shorter ones fit.
    assert bounds_from([(356, 5)], [(290, 5), (340, 6)]) == ((341, 5),)
    # A shorter row shows nothing.
    assert bounds_from([(356, 5)], [(340, 4)]) == ((356, 5),)


def test_the_next_try_lies_between_what_ran_and_what_failed():
    assert between(0, 9) == 1
    assert between(10, 1000) == 100
    assert between(95, 2281, [(107, 64)]) == 118


@given(ROWS, SHAPES)
def test_no_batch_that_dominates_a_bound_is_allowed_and_every_other_one_is(rows, bounds):
    most = bounded_items(np.array(rows), bounds)
    for row, num in zip(rows, most.tolist(), strict=True):
        assert not any(dominates((num, *row), bound) for bound in bounds)
        assert num == 2**31 - 1 or any(dominates((num + 1, *row), bound) for bound in bounds)


@given(ROWS, SHAPES)
def test_the_smallest_bounds_say_as_much_as_all(rows, bounds):
    assert bounded_items(np.array(rows), bounds).tolist() == bounded_items(np.array(rows), smallest(bounds)).tolist()


@given(SHAPES, SHAPES)
def test_bounds_never_forbid_what_ran_nor_allow_what_failed(failed, ran):
    ran = [shape for shape in ran if not any(dominates(shape, other) for other in failed)]
    bounds = bounds_from(failed, ran)
    assert not any(dominates(shape, bound) for shape in ran for bound in bounds)
    assert all(any(dominates(shape, bound) for bound in bounds) for shape in failed)


@given(st.integers(1, 10_000), st.integers(2, 10_000))
def test_what_is_tried_is_more_than_ran_and_less_than_failed(num_ran, more):
    assert num_ran < between(num_ran, num_ran + more) < num_ran + more


@given(ROWS, SHAPES)
def test_a_budget_with_bounds_plans_no_batch_that_dominates_one_but_single_examples(rows, bounds):
    budget = FoundBudget(None, None, MaxTokens(500), bounds=tuple(bounds))
    found = budget.max_items(np.array(rows))
    for row, num in zip(rows, found.tolist(), strict=True):
        assert num == 1 or not any(dominates((num, *row), bound) for bound in bounds)
    assert FoundBudget.from_json(budget.to_json()) == budget


def test_the_most_that_ran_is_that_of_rows_at_least_as_long():
    assert most_ran((8, 8), [(9, 8, 7), (4, 8, 8), (5, 9, 9)]) == 5
    assert most_ran((80, 8), [(9, 8, 7)]) == 0
