"""Least squares with coefficients of zero or more, for three terms, from sums alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]

# Every choice of terms that may be above zero; the others are exactly zero.
_CHOICES = np.array([[1, 1, 0], [1, 0, 0], [0, 1, 0], [1, 1, 1], [1, 0, 1], [0, 1, 1], [0, 0, 1]], dtype=np.float64)
_IDENTITY = np.eye(3)
# The third term must remove this share of the error before it is believed.
_WORTH_A_TERM = 0.1
_RIDGE = 1e-9


def fit_non_negative(gram: Doubles, moment: Doubles, total: float) -> Doubles:
    """Return ``t >= 0`` of least ``total - 2·t·moment + t·gram·t``, the third term only where it helps.

    All choices of terms are solved at once; the best whose coefficients are none below zero wins. With three terms
    that is exact, and it needs no iteration.

    Args:
        gram: sum of ``x·xᵀ`` over observations, shape ``(3, 3)``.
        moment: sum of ``x·y``, shape ``(3,)``.
        total: sum of ``y²``.

    >>> rows = np.array([[1.0, 2, 4], [1, 5, 25], [1, 9, 81]])
    >>> seconds = 3 + 2 * rows[:, 1]
    >>> fit_non_negative(rows.T @ rows, rows.T @ seconds, float(seconds @ seconds)).round(4).tolist()
    [3.0, 2.0, 0.0]
    """
    scale = np.sqrt(np.diag(gram))
    unit = gram / np.outer(scale, scale)
    aim = moment / scale
    masks = _CHOICES[:, :, None] * _CHOICES[:, None, :]
    systems = unit * masks + _IDENTITY * (1 - masks) + _IDENTITY * _RIDGE
    answers = np.linalg.solve(systems, (aim * _CHOICES)[:, :, None])[:, :, 0]
    errors = total - 2 * answers @ aim + np.einsum("ki,ij,kj->k", answers, unit, answers)
    errors = np.maximum(errors, 0.0) + total * 1e-12
    errors[_CHOICES[:, 2] > 0] /= 1 - _WORTH_A_TERM
    errors[(answers < 0).any(axis=1)] = np.inf
    return np.asarray(answers[int(np.argmin(errors))] / scale)
