"""NoiseMeter: gradient noise of updates, copied from the device only when someone reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from ..size.noise import NoiseAverage, estimate_noise
from .gradients import GradientNorms
from .report import NoiseReport

# Unread samples are small tensors on the device; so many are copied at once even if nobody reads them.
_MAX_UNREAD = 256


@final
@dataclass
class _Sample:
    """What an update measured, and its report once it was read."""

    q: Tensor  # sum of |h_i|² / b_i, one a group
    gb: Tensor  # squared norm of the summed gradient, one a group
    q_factor: float
    gb_factor: float
    num_examples: int
    num_parts: int
    report: NoiseReport | None = None


@final
class NoiseMeter:
    """Measures micro-batches by hooks, keeps the average over updates, and reads late.

    Args:
        named_parameters: trainable parameters and their names.
        group_of: the group of a parameter's name; None keeps no groups.
    """

    def __init__(
        self, named_parameters: Sequence[tuple[str, nn.Parameter]], group_of: Callable[[str], str] | None = None
    ) -> None:
        names = ["" if group_of is None else group_of(name) for name, _ in named_parameters]
        self._names = list(dict.fromkeys(names))
        self.norms = GradientNorms(
            [parameter for _, parameter in named_parameters], [self._names.index(name) for name in names]
        )
        self._average = NoiseAverage()
        self._unread: list[_Sample] = []

    @property
    def average(self) -> NoiseAverage:
        """Return the average over all updates so far."""
        self._read()
        return self._average

    @average.setter
    def average(self, value: NoiseAverage) -> None:
        self._unread, self._average = [], value

    def add(
        self, q: Tensor, *, q_factor: float, gb_factor: float, num_examples: int, num_parts: int
    ) -> Callable[[], NoiseReport]:
        """Take the sums of one update, with its gradient in ``.grad``, and return what reads its report."""
        sample = _Sample(q, self.norms.of_gradients(), q_factor, gb_factor, num_examples, num_parts)
        self._unread.append(sample)
        if len(self._unread) > _MAX_UNREAD:
            self._read()
        return lambda: self._report(sample)

    def _report(self, sample: _Sample) -> NoiseReport:
        if sample.report is None:
            self._read()
        assert sample.report is not None
        return sample.report

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        for sample in unread:
            self._evaluate(sample)

    def _evaluate(self, sample: _Sample) -> None:
        counts: dict[str, Any] = {"num_examples": sample.num_examples, "num_parts": sample.num_parts}
        pairs = zip(sample.q.tolist(), sample.gb.tolist(), strict=True)
        noises = [estimate_noise(q * sample.q_factor, gb * sample.gb_factor, **counts) for q, gb in pairs]
        # Sums over groups are those of the whole gradient, since squared norms add up; ratios do not.
        s, g2 = sum(noise[0] for noise in noises), sum(noise[1] for noise in noises)
        self._average = self._average.update(s, g2, num_examples=sample.num_examples)
        groups = dict(zip(self._names, noises, strict=True)) if len(self._names) > 1 else {}
        sample.report = NoiseReport(s, g2, sample.num_parts, self._average.is_reliable, groups=groups)
