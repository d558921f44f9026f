"""LatencyModel: how long a batch of a given shape takes, learned while it serves."""

from __future__ import annotations

import json
import math
from collections import deque
from typing import Any, final

import numpy as np

from ..errors import ArgumentError, StateMismatchError
from ._fit import fit_non_negative

# Fewer observations than this decide nothing.
MIN_OBSERVATIONS = 8
# A call that took longer than so many times the prediction counts as one that took just that.
MAX_RATIO = 3.0
# Until then a call counts as much as this many padded tokens; only the ratio is used.
NOMINAL_TOKENS = 4096.0
# The first call of a shape may compile or tune; it is believed only if it was not this much slower.
FIRST_CALL_RATIO = 2.0
# So many slow first calls among the latest 32 calls are ignored, not more: the device is slower now, or its times vary.
MAX_SLOW = 4
NUM_LATEST = 32
# Once so much was seen the fit moves slowly, and is renewed with every eighth batch.
REFIT_ALWAYS_BELOW = 32
REFIT_EVERY = 8
NUM_RATIOS = 128
MAX_SHAPES = 65_536
_VERSION = 2


@final
class LatencyModel:
    """Seconds of a batch by its shape, learned online.

    ``seconds = a + b·n·L + c·n·L² + d·new`` for ``n`` items of padded length ``L``, no coefficient below zero, ``c``
    and ``d`` only where each removes a tenth of the error. ``new`` is 1 for the first call of a shape, where some
    kernels are chosen or compiled; a prediction has the share of new shapes among the latest 32 calls. Least squares of
    the relative error, an observation counting ``decay`` times less with each one after it, and as 3 times the
    prediction at most: a hiccup is no trend. The first call of a shape is ignored when nothing alike ran before, or
    when it took twice what was predicted and that is rare.

    Args:
        decay: the weight that an observation keeps with each one after it, above 0 and at most 1.

    >>> model = LatencyModel()
    >>> for _ in range(2):
    ...     for n, length in [(1, 16), (2, 64), (4, 128), (8, 32), (16, 256)]:
    ...         model.observe(n, length, 0.004 + 1e-5 * n * length)
    >>> round(model.predict(10, 100), 6), model.margin
    (0.014, 1.0)
    """

    def __init__(self, *, decay: float = 0.99) -> None:
        if not 0 < decay <= 1:
            raise ArgumentError(f"decay must be above 0 and at most 1, got {decay!r}")
        self._decay = decay
        self._learns = True
        self._gram = np.zeros((4, 4))
        self._moment = np.zeros(4)
        self._total = 0.0
        self._num_observed = 0
        self._coefficients = (NOMINAL_TOKENS, 1.0, 0.0, 0.0)
        self._ratios: deque[float] = deque(maxlen=NUM_RATIOS)
        self._shapes: set[tuple[int, int]] = set()
        self._sizes: set[tuple[int, int]] = set()
        self._ignored: deque[bool] = deque(maxlen=NUM_LATEST)
        self._new: deque[bool] = deque(maxlen=NUM_LATEST)

    @classmethod
    def fixed(cls, constant: float, per_token: float = 0.0, per_square: float = 0.0) -> LatencyModel:
        """Return a model of known coefficients that learns nothing.

        Args:
            constant: seconds of any call, ``a``.
            per_token: seconds of a padded token, ``b``.
            per_square: seconds of an item by the square of its padded length, ``c``.

        >>> LatencyModel.fixed(0.004, 1e-5).predict(10, 100)
        0.014
        """
        coefficients = (float(constant), float(per_token), float(per_square))
        if not all(0 <= value < math.inf for value in coefficients) or not any(coefficients):
            raise ArgumentError(f"coefficients must be 0 or more and not all 0, got {coefficients}")
        model = cls()
        model._coefficients, model._learns = (*coefficients, 0.0), False
        return model

    @property
    def is_ready(self) -> bool:
        """Say whether ``predict`` means seconds; before that only the ratio of its terms is of use."""
        return not self._learns or self._num_observed >= MIN_OBSERVATIONS

    @property
    def num_observed(self) -> int:
        """Return how many batches were learned from."""
        return self._num_observed

    @property
    def coefficients(self) -> dict[str, float]:
        """Return seconds by term: ``1``, ``n*L``, ``n*L^2``, ``new``."""
        return dict(zip(("1", "n*L", "n*L^2", "new"), self._coefficients, strict=True))

    @property
    def constant(self) -> float:
        """Return the seconds that any call takes, new shapes as often as of late."""
        new = self._coefficients[3]
        return self._coefficients[0] + (new * sum(self._new) / len(self._new) if new and self._new else 0.0)

    @property
    def margin(self) -> float:
        """Return the 95 % quantile of ``seconds / predicted`` over the last 128 batches, 1 or more."""
        if not self._ratios:
            return 1.0
        ordered = sorted(self._ratios)
        return max(1.0, ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))])

    def per_item(self, length: float) -> float:
        """Return the seconds of one item more at a padded length: ``b·L + c·L²``."""
        return length * (self._coefficients[1] + self._coefficients[2] * length)

    def predict(self, num_items: int, length: float) -> float:
        """Return the seconds expected for a batch."""
        return self.constant + num_items * self.per_item(length)

    def upper(self, num_items: int, length: float) -> float:
        """Return the seconds that 95 % of such batches stay below: ``predict × margin``."""
        return self.predict(num_items, length) * self.margin

    def observe(self, num_items: int, length: int, seconds: float) -> None:
        """Learn from a batch that ran.

        Args:
            num_items: how many items it had.
            length: what they were padded to.
            seconds: how long it took; what is not above 0 and finite is ignored.
        """
        if not self._learns or not 0 < seconds < math.inf:
            return
        is_new, is_ignored = self._visit(num_items, length, seconds)
        self._new.append(is_new)
        self._ignored.append(is_ignored and self.is_ready)
        if is_ignored:
            return
        # Errors count relative to what was predicted: relative to the seconds themselves, those that happen to be short
        # would weigh most, and a device whose times vary would be taken for a faster one.
        scale = self._expected(num_items, length, is_new) if self.is_ready else seconds
        ratio = seconds / scale
        if self.is_ready:
            self._ratios.append(ratio)
        ratio = min(ratio, MAX_RATIO)
        row = np.array([1.0, num_items * length, num_items * length * float(length), is_new]) / scale
        self._gram = self._gram * self._decay + np.outer(row, row)
        self._moment = self._moment * self._decay + row * ratio
        self._total = self._total * self._decay + ratio * ratio
        self._num_observed += 1
        if self._num_observed < REFIT_ALWAYS_BELOW or self._num_observed % REFIT_EVERY == 0:
            a, b, c, new = fit_non_negative(self._gram, self._moment, self._total).tolist()
            self._coefficients = (a, b, c, new)

    def _expected(self, num_items: int, length: int, is_new: bool) -> float:
        """Return the seconds of a shape that is known to be new, or not to be."""
        return self._coefficients[0] + num_items * self.per_item(length) + is_new * self._coefficients[3]

    def _visit(self, num_items: int, length: int, seconds: float) -> tuple[bool, bool]:
        """Remember the shape; say whether it is new, and whether this call is to be ignored as its first."""
        shape, size = (num_items, length), (num_items.bit_length(), length.bit_length())
        if shape in self._shapes:
            return False, False
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
        """Return what was learned as JSON; shapes are left out, since a new process compiles them again."""
        state = {
            "version": _VERSION,
            "decay": self._decay,
            "learns": self._learns,
            "coefficients": list(self._coefficients),
            "gram": self._gram.tolist(),
            "moment": self._moment.tolist(),
            "total": self._total,
            "num_observed": self._num_observed,
            "ratios": list(self._ratios),
            "new": list(self._new),
        }
        return json.dumps(state)

    @classmethod
    def from_json(cls, text: str) -> LatencyModel:
        """Read a model that ``to_json`` wrote.

        >>> LatencyModel.from_json(LatencyModel.fixed(0.004, 1e-5).to_json()).predict(10, 100)
        0.014
        """
        state: dict[str, Any] = json.loads(text)
        if state.get("version") != _VERSION:
            wanted = f"a LatencyModel of version {_VERSION}"
            raise StateMismatchError(f"expected {wanted}, got version {state.get('version')!r}; measure anew")
        model = cls(decay=state["decay"])
        model._learns = state["learns"]
        model._coefficients = tuple(state["coefficients"])
        model._gram, model._moment = np.array(state["gram"]), np.array(state["moment"])
        model._total, model._num_observed = state["total"], state["num_observed"]
        model._ratios.extend(state["ratios"])
        model._new.extend(state["new"])
        return model

    def __repr__(self) -> str:
        a, b, c, new = self._coefficients
        terms = f"{a:.3g} + {b:.3g}·n·L + {c:.3g}·n·L² + {new:.3g}·new"
        return f"LatencyModel({terms} s, {self._num_observed} batches)"
