"""Least squares with coefficients of zero or more, for four terms, from sums alone."""

from __future__ import annotations

from itertools import product

import numpy as np
import numpy.typing as npt

Doubles = npt.NDArray[np.float64]

# Every choice of terms that may be above zero; the others are exactly zero. Of equals the earlier wins.
_CHOICES = np.array([c for c in product((1.0, 0.0), repeat=4) if any(c)])
_CHOICES = _CHOICES[np.argsort(_CHOICES[:, 2:].sum(axis=1), kind="stable")]
_MASKS = _CHOICES[:, :, None] * _CHOICES[:, None, :]
_IDENTITY = np.eye(4)
# The third and the fourth term must each remove this share of the error before they are believed.
_WORTH_A_TERM = 0.1
_PENALTY = (1 - _WORTH_A_TERM) ** -_CHOICES[:, 2:].sum(axis=1)
_RIDGE = 1e-9


def fit_non_negative(gram: Doubles, moment: Doubles, total: float) -> Doubles:
    """Return ``t >= 0`` of least ``total - 2·t·moment + t·gram·t``, the third and fourth term only where they help.

    All choices of terms are solved at once; the best whose coefficients are none below zero wins. With four terms
    that is exact, and it needs no iteration.

    Args:
        gram: sum of ``x·xᵀ`` over observations, shape ``(4, 4)``.
        moment: sum of ``x·y``, shape ``(4,)``.
        total: sum of ``y²``.

    >>> rows = np.array([[1.0, 2, 4, 0], [1, 5, 25, 1], [1, 9, 81, 0], [1, 3, 9, 1]])
    >>> seconds = 3 + 2 * rows[:, 1]
    >>> fit_non_negative(rows.T @ rows, rows.T @ seconds, float(seconds @ seconds)).round(4).tolist()
    [3.0, 2.0, 0.0, 0.0]
    """
    scale = np.sqrt(np.diag(gram))
    scale[scale == 0] = 1.0  # a term that was never seen stays zero
    unit = gram / np.outer(scale, scale)
    aim = moment / scale
    systems = unit * _MASKS + _IDENTITY * (1 - _MASKS) + _IDENTITY * _RIDGE
    answers = np.linalg.solve(systems, (aim * _CHOICES)[:, :, None])[:, :, 0]
    errors = total - 2 * answers @ aim + np.einsum("ki,ij,kj->k", answers, unit, answers)
    errors = (np.maximum(errors, 0.0) + total * 1e-12) * _PENALTY
    errors[(answers < 0).any(axis=1)] = np.inf
    return np.asarray(answers[int(np.argmin(errors))] / scale)
