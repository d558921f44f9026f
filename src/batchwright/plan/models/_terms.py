"""What the memory and the time of a batch are made of: terms in its shape, fitted to a few measured ones."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from ..._checks import as_number, as_whole
from ..._lengths import as_shapes
from ..._types import FloatArray, IntArray
from ...errors import ArgumentError

Doubles: TypeAlias = npt.NDArray[np.float64]
Predict: TypeAlias = Callable[[IntArray, Doubles, IntArray], Doubles]

MIN_ROWS = 3
# Leaving out one shape at a time costs a fit each; beyond this many shapes several leave together.
MAX_FOLDS = 64
JSON_VERSION = 1
_ROUNDING = 1e-9  # of a share of the cost


@final
@dataclass(frozen=True)
class Terms:
    """A cost that grows with the number of items ``b`` and the padded lengths ``L0, L1, …``.

    ``c + b × (d + sum of e_i·L_i + sum of f_i·L_i² + sum over i < j of g_ij·L_i·L_j)``, none of them below 0.

    Args:
        num_axes: how many padded lengths a shape has.
        values: the coefficients, in the order of ``term_names(num_axes)``.

    >>> Terms(1, (100.0, 0.0, 3.0, 0.0)).predict([[2, 10]]).tolist()
    [160.0]
    """

    num_axes: int
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        num_axes = as_whole("num_axes", self.num_axes, least=1)
        values = tuple(as_number("each of the coefficients", value, least=0) for value in self.values)
        num_terms = len(term_names(num_axes))
        if len(values) != num_terms:
            raise ArgumentError(f"{num_axes} axes need {num_terms} coefficients, got {len(values)}")
        if not any(values):
            raise ArgumentError(f"one of the coefficients must be above 0, got {values}")
        object.__setattr__(self, "num_axes", num_axes)
        object.__setattr__(self, "values", values)

    @property
    def constant(self) -> float:
        """The part that is there whatever the batch."""
        return self.values[0]

    def per_item(self, lengths: IntArray) -> Doubles:
        """Return what one more item costs at each row of padded lengths ``(M, axes)``."""
        sides = np.asarray(lengths, dtype=np.float64).T
        cost = np.zeros(len(lengths))
        # One term after the other, not a matrix product: so a row gives the same bits in every call, and
        # rounding keeps the order, so that a longer batch never costs less.
        for value, axes in zip(self.values[1:], _products(self.num_axes), strict=True):
            if value:
                cost += value * _product(sides, axes)
        return cost

    def predict(self, shapes: npt.ArrayLike) -> Doubles:
        """Return the cost of each shape ``(M, 1 + axes)``."""
        checked = as_shapes(shapes, num_axes=self.num_axes)
        return self.constant + checked[:, 0] * self.per_item(checked[:, 1:])

    def named(self) -> dict[str, float]:
        """Return the coefficients by name: ``1``, ``b``, ``b*L0``, ``b*L0^2``, ``b*L0*L1``."""
        return dict(zip(term_names(self.num_axes), self.values, strict=True))

    def __repr__(self) -> str:
        # What is 0 is left out; the rest is written with the digits that give the same float back.
        found = ", ".join(f"{name}: {value!r}" for name, value in self.named().items() if value)
        return f"{found}, num_axes={self.num_axes}"


class FittedTerms:
    """A model made of terms: its axes and its coefficients by name."""

    terms: Terms

    @property
    def num_axes(self) -> int:
        """Return how many padded lengths a shape has."""
        return self.terms.num_axes

    @property
    def coefficients(self) -> dict[str, float]:
        """Return the cost by term: ``1``, ``b`` (items), ``b*L0``, ``b*L0^2``, ``b*L0*L1`` and so on."""
        return self.terms.named()


def term_names(num_axes: int) -> tuple[str, ...]:
    """Return the names of the terms, the constant first.

    >>> term_names(2)
    ('1', 'b', 'b*L0', 'b*L1', 'b*L0^2', 'b*L1^2', 'b*L0*L1')
    """
    return ("1", *(_name(axes) for axes in _products(num_axes)))


def fit_terms(
    shapes: IntArray, values: Doubles, *, limits: npt.NDArray[np.bool_] | None = None, limits_tell: bool = True
) -> Terms:
    """Fit the terms to measured values, least in the squared relative error ``(cost / value - 1)²``.

    Terms that the shapes cannot tell apart (``b``, ``b*L0`` and ``b*L0^2`` where there is one length) share
    equally what was found for them. At other lengths that is never below giving all to ``b*L0``, since
    ``(1 + r + r²) / 3 >= r``.

    Args:
        shapes: checked shapes ``(M, 1 + axes)``.
        values: what was measured for each, ``(M,)``, above 0.
        limits: which of them are only limits, ``(M,)``: a cost below such a value is not an error.
        limits_tell: whether terms that differ only at limits are told apart.
    """
    columns = _columns(shapes) / values[:, None]
    telling = np.ones(len(values), dtype=bool) if limits is None or limits_tell else ~limits
    # Each column in units of its own size, so that those which differ only by a factor become equal.
    units = np.sqrt((columns[telling] ** 2).sum(axis=0))
    columns /= units
    group = np.array([_first_equal(columns[telling], index) for index in range(columns.shape[1])])
    heads = sorted(set(group.tolist()))
    # Where they are equal, the mean of some columns is any of them; it differs at limits that do not tell.
    means = [columns[:, group == head].mean(axis=1) for head in heads]
    merged = columns[:, heads] if telling.all() else np.stack(means, axis=1)
    found = dict(zip(heads, nnls(merged, np.ones(len(values)), limits=limits), strict=True))
    shares = np.array([found[head] / np.count_nonzero(group == head) for head in group.tolist()])
    if limits is not None and not shares.any():  # the limits are so low that nothing is left beside them
        return fit_terms(shapes[~limits], values[~limits])
    return Terms(shapes.shape[1] - 1, tuple((shares / units).tolist()))


def num_told_apart(terms: Terms, shapes: IntArray) -> int:
    """Return how many numbers the terms have for these shapes: those above rounding that can be told apart.

    >>> num_told_apart(Terms(1, (5.0, 1.0, 1.0, 1e-18)), np.array([[1, 64], [2, 64], [4, 64]]))
    2
    """
    if not len(shapes):
        return 0
    parts = _columns(shapes) * terms.values / terms.predict(shapes)[:, None]
    return int(np.linalg.matrix_rank(parts[:, parts.max(axis=0) > _ROUNDING], tol=_ROUNDING))


def _columns(shapes: IntArray) -> Doubles:
    """Return what 1 in each coefficient adds to each shape, ``(M, terms)``."""
    num_items, sides = shapes[:, 0].astype(np.float64), shapes[:, 1:].astype(np.float64).T
    products = (num_items * _product(sides, axes) for axes in _products(len(sides)))
    return np.stack([np.ones(len(shapes)), *products], axis=1)


def seen_margin(predicted: Doubles, values: Doubles, level: float) -> float:
    """Return the least margin with ``value <= predicted × (1 + margin)`` for the share ``level`` of the values."""
    ratio = np.quantile(values / predicted, level, method="higher")
    return float(ratio) * (1 + 1e-12) - 1  # a little more, or rounding undoes it


def unseen_errors(predict: Predict, shapes: IntArray, values: Doubles) -> Doubles:
    """Return the relative error of each distinct shape, predicted from the others.

    Args:
        predict: ``predict(shapes, values, others)`` fits to shapes and returns what it makes of others.
        shapes: checked shapes ``(M, 1 + axes)``.
        values: what was measured for each.
    """
    distinct, which = np.unique(shapes, axis=0, return_inverse=True)
    which = which.reshape(-1)
    errors = np.empty(len(values))
    for fold in range(min(len(distinct), MAX_FOLDS)):
        out = which % MAX_FOLDS == fold  # repeats of a shape leave together: they would give its answer away
        errors[out] = np.abs(values[out] / predict(shapes[~out], values[~out], shapes[out]) - 1)
    worst = np.zeros(len(distinct))
    np.maximum.at(worst, which, errors)
    return worst


def unseen_margin(errors: Doubles, level: float) -> float:
    """Return the margin for a shape not measured, from the errors of shapes that were left out.

    The rank ``ceil(level × (n + 1))`` is that of conformal prediction: one more error of the same kind is at
    most the error of that rank with probability ``level`` or more.
    """
    rank = math.ceil(level * (len(errors) + 1))
    return float(np.sort(errors)[min(rank, len(errors)) - 1]) * max(1.0, rank / len(errors))


def _first_equal(columns: Doubles, index: int) -> int:
    distances = np.abs(columns[:, : index + 1] - columns[:, [index]]).max(axis=0)
    return int(np.argmax(distances <= 1e-12))


def _products(num_axes: int) -> list[tuple[int, ...]]:
    """Return the axes whose lengths are multiplied in each term per item."""
    axes = range(num_axes)
    return [(), *((axis,) for axis in axes), *((axis, axis) for axis in axes), *combinations(axes, 2)]


def _product(sides: Doubles, axes: tuple[int, ...]) -> Doubles:
    result = np.ones(sides.shape[1])
    for axis in axes:
        result *= sides[axis]
    return result


def _name(axes: tuple[int, ...]) -> str:
    if len(axes) == 2 and axes[0] == axes[1]:
        return f"b*L{axes[0]}^2"
    return "*".join(["b", *(f"L{axis}" for axis in axes)])


def as_probes(shapes: npt.ArrayLike, values: npt.ArrayLike, *, name: str) -> tuple[IntArray, Doubles]:
    """Check what a model is fitted from: shapes, and one value above 0 for each."""
    checked, measured = as_shapes(shapes), as_positive(values, name=name)
    if measured.shape != (len(checked),):
        raise ArgumentError(f"{name} must hold one number per shape, {(len(checked),)}, got {measured.shape}")
    if len(checked) < MIN_ROWS:
        raise ArgumentError(f"a fit needs at least {MIN_ROWS} measured shapes, got {len(checked)}")
    if (checked == checked[0]).all():
        raise ArgumentError(f"all shapes are {checked[0].tolist()}; measure several sizes and lengths")
    return checked, measured


def as_positive(values: npt.ArrayLike, *, name: str) -> Doubles:
    """Return numbers as ``float64``, or say which is not finite and above 0."""
    try:
        given = np.asarray(values)
        array = given.astype(np.float64)
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"{name} must be numbers: {error}") from error
    if given.dtype.kind in "bSU":  # NumPy would read "3" as 3 and True as 1
        raise ArgumentError(f"{name} must be numbers, got {values!r}")
    wrong = ~(np.isfinite(array) & (array > 0))
    if wrong.any():
        first = int(np.argmax(wrong))
        raise ArgumentError(f"{name} must be finite and above 0, got {array.flat[first]} at {first}")
    return array


def dump_terms(kind: str, terms: Terms, *, version: int = JSON_VERSION, **extra: Any) -> str:
    """Write terms and further values as JSON; every float comes back the same."""
    head = {"kind": f"batchwright.{kind}", "version": version, "num_axes": terms.num_axes}
    return json.dumps({**head, "coefficients": terms.named(), **extra})


def read_state(kind: str, text: str, *, versions: tuple[int, ...] = (JSON_VERSION,)) -> dict[str, Any]:
    """Read JSON of one of the versions that ``dump_terms`` wrote, or say what it is instead."""
    try:
        state = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(f"this is not the JSON of a {kind}: {error}") from error
    found = state.get("kind") if isinstance(state, dict) else state
    if found != f"batchwright.{kind}":
        raise ArgumentError(f"expected the JSON of a batchwright.{kind}, got {str(found)[:80]!r}")
    version = state.get("version")
    if type(version) is not int or version not in versions:
        known = " or ".join(map(str, versions))
        raise ArgumentError(f"this {kind} is of version {version!r}, not {known}; fit it again")
    return dict(state)


def read_terms(kind: str, state: dict[str, Any], key: str) -> Terms:
    """Return the terms under a key of a state."""
    num_axes, coefficients = state.get("num_axes"), state.get(key)
    if type(num_axes) is not int or not 1 <= num_axes <= 100:
        raise ArgumentError(f"the JSON of a {kind} needs num_axes, 1 to 100, got {num_axes!r}")
    names = term_names(num_axes)
    if not isinstance(coefficients, dict) or set(coefficients) != set(names):
        raise ArgumentError(f"the JSON of a {kind} needs {key} {names}, got {coefficients!r}")
    return Terms(num_axes, tuple(read_number(kind, coefficients, name) for name in names))


def read_number(kind: str, state: dict[str, Any], name: str) -> float:
    """Return a number of 0 or more under a name of a state."""
    value = state.get(name)
    if isinstance(value, int | float) and type(value) is not bool and 0 <= value <= sys.float_info.max:
        return float(value)
    raise ArgumentError(f"the JSON of a {kind} needs {name}, a number of 0 or more, got {value!r}")


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
