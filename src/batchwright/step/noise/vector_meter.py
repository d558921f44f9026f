"""Gradient noise nearly free: per example, in the vectors of norm layers, compared now and then with the whole."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn

from ..._checks import as_state
from ..._ranks import Ranks
from ...errors import ArgumentError, StateMismatchError
from ...size.noise import NoiseAverage, NoiseRatio, estimate_noise
from .._copies import copied_row
from ._taps import INSTEAD, Vector, VectorNorms, is_off
from ._vectors import find_taps
from .meter import GradientNorms, Meter, check_whole
from .report import NoiseReport

# Every so many measured updates the whole gradient is measured too, and in these at first. Each makes about twice the
# calls of another update: where every fourth update is measured, the first 64 have one. More of them early would not
# make the noise scale better: the ratio of two scales takes some sixty measured updates to stand out of its error.
_WHOLE_EVERY, _WHOLE_AT_FIRST = 64, (1, 32)
# More norm layers cost more and say little more.
_MAX_MODULES = 8
_MAX_REASONS = 3


def refuses_vectors(error: Exception) -> bool:
    """Return whether an error says, on this rank or another, that vectors cannot be measured."""
    return isinstance(error, ArgumentError) and INSTEAD in str(error)


@final
class VectorMeter(Meter):
    """Measures vectors in every measured update, and the whole gradient in the 1st, the 32nd and every 64th.

    Until the vectors were checked in micro-batches of two sizes, every measured update measures the whole gradient too.

    Args:
        model: whose norm layers are measured, or biases where it has none.
        named_parameters: the trainable parameters with their names.
    """

    def __init__(self, model: nn.Module, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        super().__init__()
        self._model = model
        self._average, self._ratio = NoiseAverage(), NoiseRatio()
        self._before = NoiseAverage()  # of the whole gradient, before there were vectors
        self._chosen: list[int] | None = None  # places of vectors that were right, None before that is known
        self._names: list[str] | None = None  # of the vectors that the averages belong to
        self._must_check = False  # because examples did not add up in the newest update that was read
        self._undo_check: Callable[[], None] | None = None  # forgets what an update has found that was not settled
        self.norms: VectorNorms = VectorNorms(model)
        weakref.finalize(self, self.norms.close)
        self._find(named_parameters)

    def _find(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        check_whole(named_parameters)
        self._parameters = [parameter for _, parameter in named_parameters]
        names = {id(parameter): name for name, parameter in named_parameters}
        taps = find_taps(self._model, self._parameters)
        if not taps:
            raise ArgumentError(
                "noise_from='vectors' needs trained weights or biases of LayerNorm, RMSNorm or GroupNorm, or biases of "
                f"Linear or convolutions, and the model has none; {INSTEAD}"
            )
        found = {id(tap.vector): tap.vector for tap in taps if tap.vector is not None}
        self._chosen = None
        self.norms.measure(taps, [Vector(names[key], one) for key, one in found.items()])

    def watch(self, named_parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Measure these parameters from now on; they are checked again."""
        self._read()
        self._find(named_parameters)

    def begin(self, index: int) -> bool:
        """Begin a measured update; return whether the whole gradient is measured too, in random parts."""
        self.finish()
        self.norms.check_model()
        num = index + 1
        is_due = num % _WHOLE_EVERY == 0 or num in _WHOLE_AT_FIRST
        is_whole = is_due or self._chosen is None or self._must_check
        if is_whole:
            self._undo_check = self.norms.hold()
            self.norms.whole = GradientNorms(self._parameters)
            self.norms.leave_compiled_out()
        return is_whole

    def finish(self) -> None:
        """Leave no hook of an update that is done or abandoned, and go on with the vectors that were right."""
        self.norms.close()
        if self._undo_check is not None:  # a batch that was refused says nothing about the next one
            self._undo_check()
            self._undo_check = None
        vectors = self.norms.vectors
        if self._chosen is not None and len(self._chosen) < len(vectors):
            chosen = [vectors[place] for place in self._chosen]
            known = {id(one.parameter) for one in chosen}
            self.norms.measure([tap.of(known) for tap in self.norms.taps], chosen)
            self._chosen = list(range(len(chosen)))

    def settle(self, ranks: Ranks, device: torch.device) -> None:
        """Choose the vectors that are right on all ranks, in an update that has checked them."""
        if self.norms.whole is None:
            return
        vectors = self.norms.vectors
        marks = [float(one.is_good) for one in vectors] + [float(one.reason is not None) for one in vectors]
        summed = marks if ranks.world_size == 1 else ranks.sum(marks, device)
        good, bad = summed[: len(vectors)], summed[len(vectors) :]
        if all(bad):
            raise ArgumentError(f"noise_from='vectors' cannot be measured in this model: {self._reasons()}; {INSTEAD}")
        self._undo_check, self._must_check = None, False
        right = [place for place in range(len(vectors)) if good[place] and not bad[place]]
        if not right:
            return  # batches were too small to see it
        self._chosen = right if self._chosen is not None else self.norms.spread(right, _MAX_MODULES)
        names = [vectors[place].name for place in self._chosen]
        if self._names is not None and names != self._names:
            self._before = self.average
            self._average, self._ratio = NoiseAverage(), NoiseRatio()
        self._names = names

    def _reasons(self) -> str:
        texts = [f"{one.name}: {one.reason}" for one in self.norms.vectors if one.reason is not None]
        return "; ".join(texts[:_MAX_REASONS]) if texts else "vectors were refused on another rank"

    def add(
        self, q: Tensor, *, q_factor: float, gb_factor: float, num_examples: int, num_parts: int
    ) -> Callable[[], NoiseReport] | None:
        """Take the sums of one update, while ``.grad`` holds its gradient; return a function that reads its report."""
        is_whole = self.norms.whole is not None and num_parts >= 2
        if num_examples < 2 or (self._chosen is None and not is_whole):
            return None
        num = num_parts if is_whole else 0
        if self.norms.whole is not None:
            places = None if self._chosen is None else [1 + place for place in self._chosen]
            sample = _Sample(q, self.norms.of_gradients(), q_factor, gb_factor, num_examples, num, places)
            return self._keep(sample)
        # The gradient of the only micro-batch is that of the update, and its norms were taken.
        gb = None if num_parts == 1 else self.norms.of_gradients()
        sample = _Sample(q, gb, q_factor, gb_factor, num_examples, num, tolerances=list(self.norms.tolerances))
        if q.is_cpu and sample.is_off:
            self._must_check = True
            raise ArgumentError(self._off())
        return self._keep(sample)

    def _off(self) -> str:
        names = ", ".join(self._names or ())
        return (
            f"the gradients of examples in {names} added up to those of the vectors before, but no longer do: a vector "
            f"is used outside of its module now; {INSTEAD}"
        )

    def _report(self, sample: _Sample) -> NoiseReport:
        report = super()._report(sample)
        if sample.is_off:
            raise ArgumentError(self._off())
        return report

    def _evaluate(self, sample: _Sample) -> NoiseReport:
        whole, vectors = sample.whole(), sample.vectors()
        num = sample.num_examples
        if sample.is_off:  # the next update leaves out what is wrong, or refuses
            self._must_check = True
            return NoiseReport(math.nan, math.nan, num, reliable=False, source="vectors")
        if vectors is None:
            assert whole is not None
            self._before = self._before.update(*whole, num_examples=num)
            return NoiseReport(*whole, sample.num_parts, self._before.is_reliable)
        if whole is not None:
            self._ratio = self._ratio.update(whole, vectors)
        self._average = self._average.update(*vectors, num_examples=num)
        factors = self._ratio.factors
        source = "vectors, scaled" if self._ratio.trust >= 0.5 else "vectors"
        s, g2 = vectors[0] * factors[0], vectors[1] * factors[1]
        return NoiseReport(s, g2, num, self._average.is_reliable, source=source)

    @property
    def average(self) -> NoiseAverage:
        """Return the average over all updates so far, of the whole gradient."""
        self._read()
        if not self._average.weight:
            return self._before
        s, g2 = self._ratio.factors
        average = self._average
        return replace(average, s=average.s * s, g2=average.g2 * g2, g2_square=average.g2_square * g2**2)

    @average.setter
    def average(self, value: NoiseAverage) -> None:
        self._read()  # for reports that nobody has looked at yet
        self._before = value
        self._average, self._ratio, self._names = NoiseAverage(), NoiseRatio(), None

    def hold(self) -> Callable[[], None]:
        """Return a function that puts back the averages of now, and what is known now about the vectors."""
        self._read()
        put_norms_back, state = self.norms.hold(), self.read_state(self.to_state())
        chosen, parameters, must_check = self._chosen, self._parameters, self._must_check

        def put_back() -> None:
            self._undo_check = None
            self.norms.close()
            put_norms_back()
            state()
            self._chosen, self._parameters, self._must_check = chosen, parameters, must_check

        return put_back

    def to_state(self) -> dict[str, Any]:
        """Return the averages of the vectors, as JSON values."""
        self._read()
        return {
            "vectors": {
                "names": self._names,
                "average": self._average.to_state(),
                "ratio": self._ratio.to_state(),
                "before": self._before.to_state(),
            }
        }

    def read_state(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check a saved state and return a function that takes it over; one of whole gradients is taken as a start."""
        if state.get("vectors") is None:
            return super().read_state(state)
        saved = as_state(state["vectors"], of="noise_from='vectors'", needs=("names", "average", "ratio", "before"))
        before, average = NoiseAverage.from_state(saved["before"]), NoiseAverage.from_state(saved["average"])
        ratio, names = NoiseRatio.from_state(saved["ratio"]), saved["names"]
        if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
            raise StateMismatchError(f"the state needs the names of vectors as a list of words or None, got {names!r}")

        def take() -> None:
            self.average = before
            self._average, self._ratio, self._names = average, ratio, names

        return take


@final
@dataclass
class _Sample:
    """The measurements of one update, and its report after they were read."""

    q: Tensor  # three sums of each vector; or of the whole gradient, then of each vector
    gb: Tensor | None  # the squared norm of the summed gradient: of all vectors; or as in q. None: see q
    q_factor: float
    gb_factor: float
    num_examples: int
    num_parts: int  # of the whole gradient, 0 if it was not measured
    places: list[int] | None = None  # of the vectors that count, where the whole gradient was measured
    tolerances: list[float] | None = None  # of the vectors, where they alone were measured
    report: NoiseReport | None = None

    def __post_init__(self) -> None:
        self._both = copied_row(self.q if self.gb is None else torch.cat([self.q, self.gb.to(self.q)]))

    @cached_property
    def _values(self) -> tuple[list[float], list[float]]:
        """Return what was measured, in one copy from the device."""
        values = self._both.tolist()
        return values[: len(self.q)], values[len(self.q) :]

    @cached_property
    def is_off(self) -> bool:
        """Return whether examples did not add up, where vectors alone were measured."""
        if self.tolerances is None:
            return False
        q, num = self._values[0], len(self.tolerances)
        return any(map(is_off, q[:num], q[num : 2 * num], q[2 * num :], self.tolerances))

    def whole(self) -> tuple[float, float] | None:
        """Return ``s`` and ``g2`` of the whole gradient, from micro-batches."""
        q, gb = self._values
        return self._estimate(q[0], gb[0], self.num_parts) if self.num_parts else None

    def vectors(self) -> tuple[float, float] | None:
        """Return ``s`` and ``g2`` of the vectors, from single examples."""
        q, gb = self._values
        if self.tolerances is not None:
            num = len(self.tolerances)
            # Sums over micro-batches carry q_factor, which has the square of the number of examples too much.
            own = sum(q[2 * num :]) * self.q_factor / self.num_examples**2 / self.gb_factor
            return self._estimate(sum(q[:num]), own if self.gb is None else gb[0], self.num_examples)
        if self.places is None:
            return None
        sums = [sum(values[place] for place in self.places) for values in (q, gb)]
        return self._estimate(sums[0], sums[1], self.num_examples)

    def _estimate(self, q: float, gb: float, num_parts: int) -> tuple[float, float]:
        return estimate_noise(
            q * self.q_factor, gb * self.gb_factor, num_examples=self.num_examples, num_parts=num_parts
        )
