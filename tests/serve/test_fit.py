"""Least squares without negative coefficients, from sums."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.serve._fit import fit_non_negative


def sums(rows, values):
    rows, values = np.array(rows, dtype=float), np.array(values, dtype=float)
    return rows.T @ rows, rows.T @ values, float(values @ values)


def test_a_coefficient_that_would_be_negative_is_zero():
    # 10 - x: the best constant and slope are 10 and -1; without a negative slope the mean is best, (9 + 8 + 6) / 3.
    fit = fit_non_negative(*sums([[1, 1, 1, 0], [1, 2, 4, 0], [1, 4, 16, 0]], [9, 8, 6]))
    assert fit.tolist() == pytest.approx([23 / 3, 0, 0, 0])


def test_a_term_that_holds_for_some_rows_alone_is_found():
    # 2 + x, and 5 more in the second and the fourth row.
    fit = fit_non_negative(*sums([[1, 1, 1, 0], [1, 2, 4, 1], [1, 4, 16, 0], [1, 3, 9, 1]], [3, 9, 6, 10]))
    assert fit.tolist() == pytest.approx([2, 1, 0, 5])


@given(st.lists(st.tuples(st.integers(1, 64), st.integers(1, 500)), min_size=3, max_size=20), st.integers(0, 2**31))
def test_no_other_answer_without_negatives_is_better(shapes, seed):
    rng = np.random.default_rng(seed)
    rows = np.array([[1.0, n * length, n * length * length, n % 2] for n, length in shapes])
    rows /= np.maximum(rows.max(axis=0), 1.0)
    values = rows @ rng.uniform(0, 1, 4) + 0.1 * rng.normal(size=len(rows))
    found = fit_non_negative(*sums(rows, values))
    assert (found >= 0).all()

    def error(answer):
        return float(((rows @ answer - values) ** 2).sum())

    # A tenth: so much the third and the fourth term must each remove before they are taken.
    for answer in np.abs(found + rng.normal(scale=0.1, size=(50, 4))):
        assert error(found) <= error(answer) / 0.9**2 + 1e-9
