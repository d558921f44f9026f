"""How the noise of the whole gradient compares with that of a few vectors, from updates that measured both."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, final

from ..._checks import as_state, read_number
from ...size.noise import TOO_LARGE

# Over how many updates the comparison forgets: it drifts slowly, as training goes on.
_HORIZON = 16.0
# How far the logarithm of the true ratio is from 0 before anything was measured; it was 0.1 to 0.5 in our runs.
_PRIOR = 0.5
_MIN_UPDATES = 3.0


@final
@dataclass(frozen=True)
class NoiseRatio:
    """Moving averages over updates that measured both; a value that is replaced and never changed.

    ``s`` of the whole is ``factors[0]`` times that of the vectors, and ``g2`` is ``factors[1]`` times that of theirs.
    The first is known well from one update. The second is a ratio of small differences, so its scale counts only as far
    as its own error allows: the logarithm of ``(s / g2 of the whole) / (s / g2 of the vectors)`` is multiplied by
    ``trust = p² / (p² + e²)``, with ``e`` its standard error and ``p = 0.5``.

    >>> ratio = NoiseRatio()
    >>> for _ in range(20):
    ...     ratio = ratio.update((40.0, 2.0), (10.0, 1.0))
    >>> ratio.factors, ratio.trust
    ((4.0, 2.0), 1.0)
    """

    s: float = 0.0
    g2: float = 0.0
    s_vectors: float = 0.0
    g2_vectors: float = 0.0
    g2_square: float = 0.0
    g2_product: float = 0.0
    g2_vectors_square: float = 0.0
    weight: float = 0.0
    weight_square: float = 0.0

    def update(self, whole: tuple[float, float], vectors: tuple[float, float]) -> NoiseRatio:
        """Return the averages with ``(s, g2)`` of one more update; values that are not finite are left out."""
        (s, g2), (s_vectors, g2_vectors) = whole, vectors
        if not all(abs(value) < TOO_LARGE for value in (*whole, *vectors)):
            return self
        keep, new = math.exp(-1 / _HORIZON), -math.expm1(-1 / _HORIZON)
        weight = keep * self.weight + new
        share = new / weight
        values = {
            "s": s, "g2": g2, "s_vectors": s_vectors, "g2_vectors": g2_vectors, "g2_square": g2 * g2,
            "g2_product": g2 * g2_vectors, "g2_vectors_square": g2_vectors * g2_vectors,
        }  # fmt: skip
        averages = {name: getattr(self, name) + share * (value - getattr(self, name)) for name, value in values.items()}
        return replace(self, **averages, weight=weight, weight_square=keep**2 * self.weight_square + new**2)

    @property
    def trust(self) -> float:
        """Return how far the measured ratio of scales counts, from 0 to 1."""
        num = self.weight**2 / self.weight_square if self.weight_square else 0.0
        if num < _MIN_UPDATES or not min(self.g2, self.g2_vectors, self.s, self.s_vectors) > 0:
            return 0.0
        ratio = self.g2 / self.g2_vectors
        # The two are measured on the same batches, so what both share drops out of their ratio.
        square = self.g2_square - 2 * ratio * self.g2_product + ratio**2 * self.g2_vectors_square
        error = math.sqrt(max(0.0, square) / (num - 1)) / self.g2
        return _PRIOR**2 / (_PRIOR**2 + error**2)

    @property
    def factors(self) -> tuple[float, float]:
        """Return what ``s`` and ``g2`` of the vectors are multiplied by."""
        if not (self.s > 0 and self.s_vectors > 0):
            return 1.0, 1.0
        s, trust = self.s / self.s_vectors, self.trust
        scale = 1.0 if trust == 0 else (s * self.g2_vectors / self.g2) ** trust
        return s, s / scale

    def to_state(self) -> dict[str, Any]:
        """Return the averages as JSON values."""
        return asdict(self)

    @staticmethod
    def from_state(state: Mapping[str, Any]) -> NoiseRatio:
        """Return the averages of a saved state."""
        names = [item.name for item in fields(NoiseRatio)]
        state = as_state(state, of="NoiseRatio", needs=names)
        return NoiseRatio(**{name: read_number(state, name) for name in names})
