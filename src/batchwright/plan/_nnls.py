"""Non-negative least squares for small dense problems: a dozen columns, a few hundred rows."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .._types import FloatArray


def nnls(matrix: FloatArray, target: FloatArray, *, limits: npt.NDArray[np.bool_] | None = None) -> FloatArray:
    """Return the ``x >= 0`` that makes ``|matrix @ x - target|²`` least.

    Args:
        matrix: finite numbers of shape ``(rows, columns)``, of any scale and any rank.
        target: finite numbers of shape ``(rows,)``.
        limits: the rows, ``(rows,)``, where the target is only a limit, above 0: staying below it is not an error.

    Returns:
        One coefficient per column, exactly 0 for the columns that are left out. Where several ``x`` are equally
        good, it is one that needs few columns.

    >>> nnls(np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]), np.array([5.0, 7.0, 9.0])).round(9).tolist()
    [3.0, 2.0]
    >>> nnls(np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]]), np.array([-1.0, 1.0, 3.0])).round(9).tolist()
    [0.0, 0.714285714]
    >>> limits = np.array([False, True, True])  # 2 is wanted, 9 is far, 1 is passed
    >>> nnls(np.ones((3, 1)), np.array([2.0, 9.0, 1.0]), limits=limits).round(9).tolist()
    [1.5]
    """
    # The active set method of Lawson and Hanson, "Solving Least Squares Problems", 1974, chapter 23.
    # Columns and target are brought to length 1, so that one tolerance serves coefficients of any size.
    columns, column_sizes = _to_unit_length(np.asarray(matrix, dtype=np.float64))
    goal, goal_size = _to_unit_length(np.asarray(target, dtype=np.float64)[:, None])
    # A limit has a variable of its own that fills up what is left below it.
    rooms = np.eye(len(goal))[:, np.zeros(len(goal), dtype=bool) if limits is None else limits]
    found = _solve(np.hstack([columns, rooms]), goal[:, 0], columns.shape[1])
    return found[: columns.shape[1]] * goal_size / column_sizes


def _solve(columns: FloatArray, goal: FloatArray, num_terms: int) -> FloatArray:
    """Return the best ``x``; the columns of the limits, each of which fills only its own row, start in use."""
    x: FloatArray = columns.T @ goal
    passive = np.arange(len(x)) >= num_terms  # the columns in use
    x[~passive] = 0.0
    blocked = np.zeros(len(x), dtype=bool)  # their gradient is a rounding error: they enter and fall out at once
    seen = {passive.tobytes()}  # no set of columns is taken twice, so the search ends whatever the rounding does
    noise = 10 * max(columns.shape) * np.finfo(np.float64).eps
    while True:
        gradient = columns.T @ (goal - columns @ x)
        enters = ~passive & ~blocked & (gradient > noise * (1 + np.abs(x).sum()))
        if not enters.any():
            return x
        column = int(np.argmax(np.where(enters, gradient, -np.inf)))
        next_x, next_passive = _exchange(columns, goal, x, passive, column)
        if next_passive.tobytes() in seen:
            blocked[column] = True
            continue
        seen.add(next_passive.tobytes())
        x, passive = next_x, next_passive
        blocked[:] = False


def _exchange(
    columns: FloatArray, goal: FloatArray, x: FloatArray, passive: npt.NDArray[np.bool_], entering: int
) -> tuple[FloatArray, npt.NDArray[np.bool_]]:
    """Take one column in; let out those whose coefficient would turn negative."""
    x, passive = x.copy(), passive.copy()
    passive[entering] = True
    while passive.any():
        best = np.zeros_like(x)
        best[passive] = np.linalg.lstsq(columns[:, passive], goal, rcond=None)[0]
        falls = passive & (best <= 0)
        if not falls.any():
            return best, passive
        # Walk towards the unconstrained best until the first coefficient reaches 0, and let that column go.
        steps = np.full_like(x, np.inf)
        steps[falls] = x[falls] / np.maximum(x[falls] - best[falls], np.finfo(np.float64).tiny)
        first = int(np.argmin(steps))
        x += min(float(steps[first]), 1.0) * (best - x)
        passive[first] = False
        passive &= x > 0
        x[~passive] = 0.0
    return x, passive


def _to_unit_length(columns: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return the columns divided by their length, and the lengths; a column of zeros stays as it is."""
    largest = np.abs(columns).max(axis=0, initial=0.0)
    largest[largest == 0] = 1.0
    scaled = columns / largest  # first by the largest number, so that no square overflows
    lengths = np.sqrt((scaled * scaled).sum(axis=0))
    lengths[lengths == 0] = 1.0
    return scaled / lengths, largest * lengths
