from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchwright.plan.models._terms import nnls


@st.composite
def problems(draw):
    """Small problems of any rank: random columns, their copies and sums, all of very different size."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows, columns = draw(st.integers(1, 20)), draw(st.integers(1, 6))
    matrix = rng.integers(-5, 6, (rows, columns)).astype(float)
    if draw(st.booleans()):  # non-negative, as the terms of a memory model are
        matrix = np.abs(matrix)
    mixed = matrix @ rng.integers(-1, 2, (columns, draw(st.integers(0, 4))))
    matrix = np.hstack([matrix, mixed, matrix[:, : draw(st.integers(0, 2))]])
    matrix = matrix[:, rng.permutation(matrix.shape[1])]
    if draw(st.booleans()):  # copies that differ in the last digits
        matrix = matrix + 1e-14 * rng.standard_normal(matrix.shape)
    scale = draw(st.sampled_from([0, 3, 9]))
    matrix = matrix * 10.0 ** rng.integers(-scale, scale + 1, matrix.shape[1])
    return matrix, rng.normal(size=rows) * 10.0**scale


def unit_columns(matrix):
    norms = np.linalg.norm(matrix, axis=0)
    return matrix / np.where(norms > 0, norms, 1), norms


def least_residual(matrix, target):
    """The least residual over all sets of columns whose own best fit has no negative coefficient."""
    best = np.linalg.norm(target)
    for count in range(1, matrix.shape[1] + 1):
        for chosen in combinations(range(matrix.shape[1]), count):
            part = matrix[:, list(chosen)]
            # The cut keeps the difference of two equal columns, a rounding error, from being a direction.
            x = np.linalg.lstsq(part, target, rcond=1e-10)[0]
            if (x >= 0).all():
                best = min(best, np.linalg.norm(part @ x - target))
    return best


@settings(deadline=None, max_examples=300)
@given(problems())
def test_the_optimality_conditions_hold(problem):
    matrix, target = problem
    x = nnls(matrix, target)
    columns, norms = unit_columns(matrix)
    gradient = columns.T @ (columns @ (x * norms) - target)  # of half the squared residual, in unit columns
    tolerance = 1e-11 * (np.linalg.norm(target) + np.abs(x * norms).sum())
    assert (x >= 0).all()
    assert (gradient >= -tolerance).all()
    assert (np.abs(gradient[x > 0]) <= tolerance).all()


@settings(deadline=None, max_examples=60)
@given(problems())
def test_no_set_of_columns_fits_better(problem):
    matrix, target = problem
    matrix = unit_columns(matrix[:, :6])[0]
    residual = np.linalg.norm(matrix @ nnls(matrix, target) - target)
    assert residual <= least_residual(matrix, target) + 1e-9 * np.linalg.norm(target)


def test_a_fit_without_negative_parts_is_plain_least_squares():
    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 4.0]])
    # 2 + 3 t at t = 1, 2, 4
    np.testing.assert_allclose(nnls(matrix, np.array([5.0, 8.0, 14.0])), [2, 3], rtol=1e-12)


def test_a_negative_coefficient_is_held_at_zero():
    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    # Least squares alone gives -3 + 2 t. Without the constant: (1·-1 + 2·1 + 3·3) / (1 + 4 + 9) = 10 / 14.
    x = nnls(matrix, np.array([-1.0, 1.0, 3.0]))
    assert x[0] == 0
    assert x[1] == pytest.approx(10 / 14)


def test_nothing_is_used_when_every_column_points_away():
    assert nnls(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([-1.0, -1.0])).tolist() == [0, 0]


def test_a_column_that_entered_can_leave_again():
    # The first column is nearest to the target and enters first; the other two together hit it exactly.
    matrix = np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.2, 0.0, 0.0]])
    np.testing.assert_allclose(nnls(matrix, np.array([1.0, 1.0, 0.0])), [0, 1, 1], atol=1e-12)


def test_columns_sixty_orders_of_magnitude_apart_are_both_found():
    matrix = np.array([[1e-30, 1e30], [1e-30, 2e30], [1e-30, 4e30]])
    # 2e30·1e-30 + 3e-30·1e30 t
    np.testing.assert_allclose(nnls(matrix, np.array([5.0, 8.0, 14.0])), [2e30, 3e-30], rtol=1e-12)


def test_numbers_whose_squares_overflow_are_fitted():
    matrix = np.array([[1e200, 0.0], [0.0, 1e180]])
    np.testing.assert_allclose(nnls(matrix, np.array([2e200, 3e200])), [2, 3e20], rtol=1e-12)


def test_a_column_of_zeros_and_a_target_of_zeros_get_zero():
    matrix = np.array([[0.0, 1.0], [0.0, 1.0]])
    assert nnls(matrix, np.array([2.0, 2.0]))[0] == 0
    assert nnls(matrix, np.zeros(2)).tolist() == [0, 0]


def test_more_columns_than_rows_fit_exactly_with_few_of_them():
    matrix = np.array([[1.0, 2.0, 3.0, 5.0], [1.0, 4.0, 9.0, 1.0]])
    target = np.array([7.0, 9.0])
    x = nnls(matrix, target)
    np.testing.assert_allclose(matrix @ x, target, rtol=1e-12)
    assert np.count_nonzero(x) <= 2


def test_a_nearly_singular_matrix_ends():
    # The Hilbert matrix of order 12 has a condition number of about 1e16: rounding decides most signs.
    index = np.arange(12)
    matrix = 1.0 / (index[:, None] + index + 1)
    x = nnls(matrix, matrix @ np.ones(12))
    assert (x >= 0).all()
    np.testing.assert_allclose(matrix @ x, matrix.sum(axis=1), rtol=1e-7)


@settings(deadline=None, max_examples=200)
@given(problems(), st.integers(0, 2**32 - 1))
def test_a_limit_is_a_row_that_may_be_missed_from_below(problem, seed):
    matrix, target = problem
    target = np.abs(target)
    limits = np.random.default_rng(seed).random(len(target)) < 0.5
    x = nnls(matrix, target, limits=limits)
    rooms = np.eye(len(target))[:, limits] * max(1.0, float(target.max()))
    expected = nnls(np.hstack([matrix, rooms]), target)[: matrix.shape[1]]

    def error(found):
        missed = matrix @ found - target
        return np.linalg.norm(np.where(limits, np.maximum(missed, 0), missed))

    assert error(x) == pytest.approx(error(expected), rel=1e-6, abs=1e-9 * (1 + np.linalg.norm(target)))


def test_a_limit_that_is_passed_counts_and_one_that_is_kept_does_not():
    # 2 wanted and at most 1: the best is between them. At most 9 says nothing.
    column, limits = np.ones((3, 1)), np.array([False, True, True])
    assert nnls(column, np.array([2.0, 9.0, 1.0]), limits=limits) == pytest.approx([1.5])
    assert nnls(column, np.array([2.0, 9.0, 3.0]), limits=limits) == pytest.approx([2.0])
