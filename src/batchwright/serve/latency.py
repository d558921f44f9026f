"""LatencyModel: how long a batch of a given shape takes, learned while it serves."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Iterator
from itertools import product
from typing import Any, final

import numpy as np

from .._checks import as_number, as_whole, check_same, float_of, is_number
from .._types import FloatArray
from ..errors import ArgumentError

# Fewer observations than this decide nothing.
MIN_OBSERVATIONS = 8
# Until then a call is taken to cost as much as this many padded tokens; only the ratio is used.
NOMINAL_TOKENS = 4096.0
# A call that took longer than this many times the prediction counts as this many times the prediction.
MAX_RATIO = 3.0
# The first call of a shape may compile or tune; if it was this many times slower than predicted, it is ignored.
FIRST_CALL_RATIO = 2.0
# At most this many of the latest 32 calls are ignored: with more, the device is slower now, or its times vary.
MAX_SLOW = 4
NUM_LATEST = 32
# From this many observations on the fit moves slowly, and every eighth batch renews it.
REFIT_ALWAYS_BELOW = 32
REFIT_EVERY = 8
NUM_RATIOS = 128
MAX_SHAPES = 65_536
# If all but one of the latest 24 calls took more than 1.2 times the prediction, or all but one less than its inverse,
# the device has changed. Calls that take longer now and then, or every second one, do not look like that.
NUM_TO_NOTICE = 24
MAX_ODD = 1
CHANGE_RATIO = 1.2
# What was known before a change counts as much as this many calls afterwards.
WEIGHT_AFTER_CHANGE = 8.0
_VERSION = 2


@final
class LatencyModel:
    """Seconds of a batch by its shape, learned online.

    ``seconds = a + b·n·L + c·n·L² + d·new`` for ``n`` items of padded length ``L``. No coefficient is below zero;
    ``c`` and ``d`` are used only if each removes a tenth of the error. ``new`` is 1 for the first call of a shape, when
    some kernels are chosen or compiled; predictions use the share of new shapes among the latest 32 calls.

    The fit is least squares of the relative error. Each new observation multiplies the weight of the earlier ones by
    ``decay``. An observation counts as 3 times the prediction at most, so that a hiccup is not taken for a trend. The
    first call of a shape is ignored if nothing similar ran before, or if it took more than twice the prediction and
    that is rare. If 23 of the latest 24 calls were slower than 1.2 times the prediction, or faster than its inverse,
    the device has changed: all coefficients are multiplied by the median of real over predicted time, and what was
    learned before then counts little beside what follows.

    Args:
        decay: the share of its weight that an observation keeps with each later one, above 0 and at most 1.

    >>> model = LatencyModel()
    >>> for _ in range(2):
    ...     for n, length in [(1, 16), (2, 64), (4, 128), (8, 32), (16, 256)]:
    ...         model.observe(n, length, 0.004 + 1e-5 * n * length)
    >>> round(model.predict(10, 100), 6), model.margin
    (0.014, 1.0)
    """

    def __init__(self, *, decay: float = 0.99) -> None:
        self._decay = as_number("decay", decay, above=0, most=1)
        self._learns = True
        # Plain lists: every batch adds to them, and on so few numbers an array operation costs more than they do.
        self._gram = [[0.0] * 4 for _ in range(4)]
        self._moment = [0.0] * 4
        self._total = 0.0
        self._num_observed = 0
        self._coefficients = (NOMINAL_TOKENS, 1.0, 0.0, 0.0)
        self._constant = NOMINAL_TOKENS
        self._ratios: deque[float] = deque(maxlen=NUM_RATIOS)
        self._shapes: set[tuple[int, int]] = set()
        self._sizes: set[tuple[int, int]] = set()
        self._ignored: deque[bool] = deque(maxlen=NUM_LATEST)
        self._new: deque[bool] = deque(maxlen=NUM_LATEST)
        self._latest: deque[tuple[int, int, bool, float]] = deque(maxlen=NUM_TO_NOTICE)

    @classmethod
    def fixed(cls, constant: float, per_token: float = 0.0, per_square: float = 0.0) -> LatencyModel:
        """Return a model of known coefficients that learns nothing.

        Args:
            constant: ``a``, the seconds that any call takes.
            per_token: ``b``, the seconds per padded token.
            per_square: ``c``, the seconds per item and square of its padded length.

        >>> LatencyModel.fixed(0.004, 1e-5).predict(10, 100)
        0.014
        """
        a = as_number("constant", constant, least=0)
        b = as_number("per_token", per_token, least=0)
        c = as_number("per_square", per_square, least=0)
        if not (a or b or c):
            raise ArgumentError("a latency model must not predict 0 seconds; give at least one coefficient above 0")
        model = cls()
        model._coefficients, model._learns = (a, b, c, 0.0), False
        model._renew_constant()
        return model

    @property
    def is_ready(self) -> bool:
        """Say whether ``predict`` returns seconds; before that, only the ratio of its terms means something."""
        return not self._learns or self._num_observed >= MIN_OBSERVATIONS

    @property
    def num_observed(self) -> int:
        """Return how many batches the model has learned from."""
        return self._num_observed

    @property
    def coefficients(self) -> dict[str, float]:
        """Return the seconds per term: ``1``, ``n*L``, ``n*L^2``, ``new``."""
        return dict(zip(("1", "n*L", "n*L^2", "new"), self._coefficients, strict=True))

    @property
    def constant(self) -> float:
        """Return the seconds that any call takes, with new shapes as often as among the latest calls."""
        return self._constant

    @property
    def margin(self) -> float:
        """Return the 95 % quantile of ``seconds / predicted`` over the last 128 batches, 1 or more."""
        if not self._ratios:
            return 1.0
        ordered = sorted(self._ratios)
        return max(1.0, ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))])

    def per_item(self, length: float) -> float:
        """Return the seconds of one more item at a padded length: ``b·L + c·L²``."""
        if type(length) is not int:  # an engine asks for every request, and always with a plain number
            length = as_number("length", length, least=0)
        return length * (self._coefficients[1] + self._coefficients[2] * length)

    def predict(self, num_items: int, length: float) -> float:
        """Return the expected seconds of a batch."""
        if type(num_items) is not int:
            num_items = as_whole("num_items", num_items, least=0)
        return self.constant + num_items * self.per_item(length)

    def upper(self, num_items: int, length: float) -> float:
        """Return the seconds that 95 % of such batches stay below: ``predict × margin``."""
        return self.predict(num_items, length) * self.margin

    def observe(self, num_items: int, length: int, seconds: float) -> None:
        """Learn from a batch that ran.

        Args:
            num_items: how many items it had.
            length: the length that they were padded to.
            seconds: how long it took; only a finite time above 0 counts.
        """
        if not is_number(seconds):
            raise ArgumentError(f"seconds must be a number, got {seconds!r}")
        seconds = float_of(seconds)
        num_items, length = as_whole("num_items", num_items, least=1), as_whole("length", length, least=0)
        if not self._learns or not 0 < seconds < math.inf:
            return
        is_new, is_ignored = self._visit(num_items, length, seconds)
        self._new.append(is_new)
        self._ignored.append(is_ignored and self.is_ready)
        if self.is_ready:  # also what is ignored: without slow calls, a device whose times vary would look faster
            self._latest.append((num_items, length, is_new, seconds))
        if not is_ignored:
            self._learn(num_items, length, is_new, seconds)
        self._renew_constant()

    def _learn(self, num_items: int, length: int, is_new: bool, seconds: float) -> None:
        if self.is_ready:
            self._ratios.append(seconds / self._expected(num_items, length, is_new))
        self._add(num_items, length, is_new, seconds)
        self._num_observed += 1
        if self._has_changed():
            self._follow_change()
        elif self._num_observed < REFIT_ALWAYS_BELOW or self._num_observed % REFIT_EVERY == 0:
            self._refit()

    def _renew_constant(self) -> None:
        """Compute it once per batch: it is asked for with every request."""
        new = self._coefficients[3]
        share = new * sum(self._new) / len(self._new) if new and self._new else 0.0
        self._constant = self._coefficients[0] + share

    def _add(self, num_items: int, length: int, is_new: bool, seconds: float) -> None:
        """Add an observation to the sums."""
        # Errors count relative to the prediction. Relative to the seconds themselves, short times would weigh most, and
        # a device whose times vary would be taken for a faster one.
        scale = self._expected(num_items, length, is_new) if self.is_ready else seconds
        ratio = min(seconds / scale, MAX_RATIO)
        terms = (1.0, float(num_items * length), num_items * length * float(length), float(is_new))
        row, decay = [term / scale for term in terms], self._decay
        # Sums of least squares in which older calls fade: all that a refit needs, whatever the number of calls.
        for gram, x in zip(self._gram, row, strict=True):
            gram[:] = [old * decay + x * y for old, y in zip(gram, row, strict=True)]
        self._moment = [old * decay + x * ratio for old, x in zip(self._moment, row, strict=True)]
        self._total = self._total * decay + ratio * ratio

    def _refit(self) -> None:
        a, b, c, new = fit_non_negative(np.array(self._gram), np.array(self._moment), self._total).tolist()
        self._coefficients = (a, b, c, new)

    def _has_changed(self) -> bool:
        """Say whether the latest calls agree that the device is slower or faster than it was."""
        if len(self._latest) < NUM_TO_NOTICE:
            return False
        num_not_slower = num_not_faster = 0
        for ratio in self._latest_ratios():
            num_not_slower += not ratio > CHANGE_RATIO
            num_not_faster += not ratio < 1 / CHANGE_RATIO
            if num_not_slower > MAX_ODD and num_not_faster > MAX_ODD:
                return False  # most often two calls are enough to say so
        return True

    def _latest_ratios(self) -> Iterator[float]:
        return (seconds / self._expected(n, length, new) for n, length, new, seconds in self._latest)

    def _follow_change(self) -> None:
        """Scale the model to the latest calls, and learn from them anew.

        The earlier observations become ones that agree with the scaled coefficients, with little weight: they still say
        how the terms relate. The latest ones are in them with clipped ratios, which no longer count.
        """
        ratio = float(np.median(list(self._latest_ratios())))
        scaled, gram = np.array(self._coefficients) * ratio, np.array(self._gram)
        # Each observation adds about 1 to the sum of squared predictions, in units of the prediction at its time.
        weight = float(scaled @ gram @ scaled) / ratio**2
        gram *= min(1.0, WEIGHT_AFTER_CHANGE / weight) / ratio**2
        self._gram, self._moment = gram.tolist(), (gram @ scaled).tolist()
        self._total = float(scaled @ gram @ scaled)
        a, b, c, new = scaled.tolist()
        self._coefficients = (a, b, c, new)
        for observation in self._latest:
            self._add(*observation)
        self._ratios.clear()
        self._ratios.extend(self._latest_ratios())
        self._latest.clear()
        self._refit()

    def _expected(self, num_items: int, length: int, is_new: bool) -> float:
        """Return the expected seconds of a shape that is known to be new or not."""
        return self._coefficients[0] + num_items * self.per_item(length) + is_new * self._coefficients[3]

    def _visit(self, num_items: int, length: int, seconds: float) -> tuple[bool, bool]:
        """Remember the shape; say whether it is new, and whether this first call of it is ignored."""
        shape = (num_items, length)
        if shape in self._shapes:
            return False, False
        size = (num_items.bit_length(), length.bit_length())
        if len(self._shapes) >= MAX_SHAPES:
            self._shapes.clear()
        self._shapes.add(shape)
        is_new_size = size not in self._sizes
        self._sizes.add(size)
        if not self.is_ready:
            return True, is_new_size
        is_slow = seconds > FIRST_CALL_RATIO * self._expected(num_items, length, is_new=True)
        return True, is_slow and sum(self._ignored) < MAX_SLOW

    def to_json(self) -> str:
        """Return what was learned as JSON, without the shapes: a new process compiles them again."""
        state = {
            "version": _VERSION,
            "decay": self._decay,
            "learns": self._learns,
            "coefficients": list(self._coefficients),
            "gram": self._gram,
            "moment": self._moment,
            "total": self._total,
            "num_observed": self._num_observed,
            "ratios": list(self._ratios),
            "new": list(self._new),
            "latest": [list(observation) for observation in self._latest],
        }
        return json.dumps(state)

    @classmethod
    def from_json(cls, text: str) -> LatencyModel:
        """Read a model that ``to_json`` wrote.

        >>> LatencyModel.from_json(LatencyModel.fixed(0.004, 1e-5).to_json()).predict(10, 100)
        0.014
        """
        state: dict[str, Any] = json.loads(text)
        check_same("version", state.get("version"), _VERSION)
        model = cls(decay=state["decay"])
        model._learns = state["learns"]
        model._coefficients = tuple(state["coefficients"])
        model._gram, model._moment = state["gram"], state["moment"]
        model._total, model._num_observed = state["total"], state["num_observed"]
        model._ratios.extend(state["ratios"])
        model._new.extend(state["new"])
        model._latest.extend(tuple(observation) for observation in state.get("latest", []))
        model._renew_constant()
        return model

    def __repr__(self) -> str:
        a, b, c, new = self._coefficients
        terms = f"{a:.3g} + {b:.3g}·n·L + {c:.3g}·n·L² + {new:.3g}·new"
        return f"LatencyModel({terms} s, {self._num_observed} batches)"


# Every choice of terms that may be above zero, those with fewer of the third and fourth term first: the earlier wins
# among equals.
_CHOICES = np.array([c for c in product((1.0, 0.0), repeat=4) if any(c)])
_CHOICES = _CHOICES[np.argsort(_CHOICES[:, 2:].sum(axis=1), kind="stable")]
_MASKS = _CHOICES[:, :, None] * _CHOICES[:, None, :]
_IDENTITY = np.eye(4)
# The third and the fourth term must each remove this share of the error before they are used.
_WORTH_A_TERM = 0.1
_PENALTY = (1 - _WORTH_A_TERM) ** -_CHOICES[:, 2:].sum(axis=1)
_RIDGE = 1e-9


def fit_non_negative(gram: FloatArray, moment: FloatArray, total: float) -> FloatArray:
    """Return the ``t >= 0`` with the least ``total - 2·t·moment + t·gram·t``, third and fourth term only if they help.

    All choices of terms are solved at once, and the best one without a negative coefficient wins. With four terms that
    is exact and needs no iteration. It works on sums that decay, since the observations themselves are not kept.

    Args:
        gram: the sum of ``x·xᵀ`` over the observations, shape ``(4, 4)``.
        moment: the sum of ``x·y``, shape ``(4,)``.
        total: the sum of ``y²``.

    >>> rows = np.array([[1.0, 2, 4, 0], [1, 5, 25, 1], [1, 9, 81, 0], [1, 3, 9, 1]])
    >>> seconds = 3 + 2 * rows[:, 1]
    >>> fit_non_negative(rows.T @ rows, rows.T @ seconds, float(seconds @ seconds)).round(4).tolist()
    [3.0, 2.0, 0.0, 0.0]
    """
    scale = np.sqrt(np.diag(gram))
    scale[scale == 0] = 1.0  # the coefficient of a term that was never seen stays zero
    unit = gram / np.outer(scale, scale)
    aim = moment / scale
    # Rows and columns of the terms left out become those of the identity, so that their coefficients are exactly zero.
    systems = unit * _MASKS + _IDENTITY * (1 - _MASKS) + _IDENTITY * _RIDGE
    answers = np.linalg.solve(systems, (aim * _CHOICES)[:, :, None])[:, :, 0]
    errors = total - 2 * answers @ aim + np.einsum("ki,ij,kj->k", answers, unit, answers)
    errors = (np.maximum(errors, 0.0) + total * 1e-12) * _PENALTY
    errors[(answers < 0).any(axis=1)] = np.inf
    return np.asarray(answers[int(np.argmin(errors))] / scale)
