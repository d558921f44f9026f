"""Gradient noise, measured from the gradient norms of micro-batches and reported per update."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

from ..._ranks import Ranks
from ...size.noise import NoiseAverage, estimate_noise
from ._norms import GradientNorms, Norms

# Unread samples are small tensors on the device; beyond this many they are read, even if nobody has asked for them.
_MAX_UNREAD = 256


@final
@dataclass(frozen=True)
class NoiseReport:
    """Gradient noise of an update, in examples.

    Attributes:
        s: trace of the covariance of the per-example gradient, unbiased.
        g2: squared norm of the true gradient, unbiased; may be below 0.
        num_parts: how many gradients it was estimated from.
        reliable: whether the average over recent updates is large against its own error.
        groups: ``(s, g2)`` of each group of parameters, if ``noise_groups`` was given; they add up to the whole.
        source: ``"all"``: from the whole gradient of micro-batches. ``"vectors"``: from single examples in a few
            vectors, taken to have the scale of the whole. ``"vectors, scaled"``: the same, times how the two scales
            differed where both were measured.
    """

    s: float
    g2: float
    num_parts: int
    reliable: bool
    unit: str = "examples"
    groups: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    source: str = "all"

    @property
    def scale(self) -> float | None:
        """Return the simple noise scale ``s / g2`` of this one update, None if ``g2`` is not above 0."""
        return self.s / self.g2 if self.g2 > 0 else None


class Meter(ABC):
    """Measures the noise of updates, keeps the average over them, and reads the device late.

    Attributes:
        norms: measures micro-batches.
    """

    norms: Norms

    def __init__(self) -> None:
        self._unread: list[Any] = []

    @abstractmethod
    def begin(self, index: int) -> bool:
        """Begin a measured update, the first of which has index 0; return whether it must run in random parts."""

    @abstractmethod
    def finish(self) -> None:
        """Leave no trace of an update that is done or abandoned."""

    @abstractmethod
    def watch(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Measure these parameters from now on; the average over updates stays."""

    @abstractmethod
    def settle(self, ranks: Ranks, device: torch.device) -> None:
        """Agree with the other ranks about what was found in this update, after its last micro-batch."""

    @abstractmethod
    def add(
        self, q: Tensor, *, q_factor: float, gb_factor: float, num_examples: int, num_parts: int
    ) -> Callable[[], NoiseReport] | None:
        """Take the sums of one update, while ``.grad`` holds its gradient; return a function that reads its report.

        Args:
            q: what ``norms`` added up, over all ranks.
            q_factor: turns it into sums over mean gradients.
            gb_factor: turns squared norms of ``.grad`` into those of the update.
            num_examples: of the update.
            num_parts: micro-batches of the update; too few for an estimate return None.
        """

    @property
    @abstractmethod
    def average(self) -> NoiseAverage:
        """Return the average over all updates so far."""

    @average.setter
    @abstractmethod
    def average(self, value: NoiseAverage) -> None: ...

    @abstractmethod
    def _evaluate(self, sample: Any) -> NoiseReport:
        """Read the measurements of an update, and take them into the average."""

    def _keep(self, sample: Any) -> Callable[[], NoiseReport]:
        self._unread.append(sample)
        if len(self._unread) > _MAX_UNREAD:
            self._read()
        return lambda: self._report(sample)

    def _report(self, sample: Any) -> NoiseReport:
        if sample.report is None:
            self._read()
        report: NoiseReport = sample.report
        return report

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        for sample in unread:
            sample.report = self._evaluate(sample)

    def to_state(self) -> dict[str, Any]:
        """Return what else is to be saved, as JSON values."""
        return {}

    def read_state(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check a saved state and return a function that takes it over."""
        average = NoiseAverage.from_state(state["noise"])

        def take() -> None:
            self.average = average

        return take


@final
class NoiseMeter(Meter):
    """Measures micro-batches by hooks, keeps the average over updates, and reads the device late.

    Args:
        named_parameters: the trainable parameters with their names.
        group_of: returns the group of a parameter's name; None keeps no groups.
    """

    def __init__(
        self, named_parameters: Sequence[tuple[str, nn.Parameter]], group_of: Callable[[str], str] | None = None
    ) -> None:
        super().__init__()
        self._group_of = group_of
        self._names: list[str] = []
        self.norms: GradientNorms = self._watch(named_parameters)
        self._average = NoiseAverage()

    def _watch(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> GradientNorms:
        names = ["" if self._group_of is None else self._group_of(name) for name, _ in named_parameters]
        self._names = list(dict.fromkeys(names))
        norms = GradientNorms(
            [parameter for _, parameter in named_parameters], [self._names.index(name) for name in names]
        )
        weakref.finalize(self, norms.close)  # hooks would stay on the parameters after the meter is gone
        return norms

    def watch(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Measure these parameters from now on; the average over updates stays."""
        self._read()
        self.norms.close()
        self.norms = self._watch(named_parameters)

    def begin(self, index: int) -> bool:
        """Begin a measured update, which always runs in random parts."""
        self.norms.reset()
        return True

    def finish(self) -> None:
        """Leave no trace of an update that is done or abandoned."""
        self.norms.reset()

    def settle(self, ranks: Ranks, device: torch.device) -> None:
        """Do nothing: there is nothing to agree about."""

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
    ) -> Callable[[], NoiseReport] | None:
        """Take the sums of one update, while ``.grad`` holds its gradient; return a function that reads its report."""
        if num_parts < 2:
            return None
        sample = _Sample(q, self.norms.of_gradients(), q_factor, gb_factor, num_examples, num_parts)
        return self._keep(sample)

    def _evaluate(self, sample: _Sample) -> NoiseReport:
        counts: dict[str, Any] = {"num_examples": sample.num_examples, "num_parts": sample.num_parts}
        pairs = zip(sample.q.tolist(), sample.gb.tolist(), strict=True)
        noises = [estimate_noise(q * sample.q_factor, gb * sample.gb_factor, **counts) for q, gb in pairs]
        # Squared norms add up over groups, so these sums are those of the whole gradient; ratios would not add up.
        s, g2 = sum(noise[0] for noise in noises), sum(noise[1] for noise in noises)
        self._average = self._average.update(s, g2, num_examples=sample.num_examples)
        groups = dict(zip(self._names, noises, strict=True)) if len(self._names) > 1 else {}
        return NoiseReport(s, g2, sample.num_parts, self._average.is_reliable, groups=groups)


@final
class GradientNoise:
    """Measures the gradient noise of updates whose micro-batches are random parts.

    Args:
        parameters: that are trained.

    Attributes:
        meter: holds the average over all updates so far.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._parameters = list(map(id, parameters))
        self.meter = NoiseMeter([("", parameter) for parameter in parameters])
        self._num_parts = 0
        self._kept: tuple[Tensor | None, int] = (None, 0)
        self._read: Callable[[], NoiseReport] | None = None

    @property
    def report(self) -> NoiseReport | None:
        """Return the noise of the newest update, None if it had fewer than two parts."""
        return None if self._read is None else self._read()

    def begin(self, parameters: list[nn.Parameter]) -> None:
        """Begin an update of some parameters; others may have been unfrozen since the last one."""
        if list(map(id, parameters)) != self._parameters:
            self._parameters = list(map(id, parameters))
            self.meter.watch([("", parameter) for parameter in parameters])
        self.meter.norms.reset()
        self._num_parts, self._read = 0, None
        self.keep()

    def keep(self) -> None:
        """Remember what was measured, in case the next micro-batch has to be run again."""
        self._kept = (self.meter.norms.total, self._num_parts)

    def undo(self) -> None:
        """Forget what was measured since ``keep``."""
        self.meter.norms.total, self._num_parts = self._kept

    @contextmanager
    def part(self, num_examples: int) -> Iterator[None]:
        """Measure the backward pass of a part inside the context."""
        self.meter.norms.begin(num_examples)
        yield
        self.meter.norms.end(num_examples)
        self._num_parts += 1

    def end(self, add_up: Callable[[Tensor], Tensor], *, num_examples: int, num_replicas: int, scale: float) -> None:
        """Take the sums of the update after its last backward pass, before gradients are unscaled and clipped.

        Args:
            add_up: sums a tensor over all ranks.
            num_examples: of the update, over all ranks.
            num_replicas: the factor that losses were multiplied by, because gradients are averaged over ranks.
            scale: of the ``GradScaler``, 1 without one.
        """
        total = self.meter.norms.total
        mine = torch.zeros(1, dtype=torch.float64) if total is None else total
        squares, num = add_up(torch.cat([mine, torch.tensor([self._num_parts], device=mine.device, dtype=mine.dtype)]))
        if num >= 2:
            # Gradients carry the factor num_replicas * scale / num_examples, and the sums are quadratic in them.
            self._read = self.meter.add(
                squares.reshape(1),
                q_factor=(num_examples / num_replicas / scale) ** 2,
                gb_factor=scale**-2,
                num_examples=num_examples,
                num_parts=round(float(num)),
            )


@final
@dataclass
class _Sample:
    """The measurements of one update, and its report after they were read."""

    q: Tensor  # sum of |h_i|² / b_i, one per group
    gb: Tensor  # squared norm of the summed gradient, one per group
    q_factor: float
    gb_factor: float
    num_examples: int
    num_parts: int
    report: NoiseReport | None = None
