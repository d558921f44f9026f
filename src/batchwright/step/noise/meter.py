"""Gradient noise, measured from the gradient norms of micro-batches and reported per update."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch._utils import _flatten_dense_tensors
from torch.utils.hooks import RemovableHandle

from ..._ranks import Ranks, is_sharded
from ...errors import ArgumentError
from ...size.noise import NoiseAverage, estimate_noise
from .._copies import Copied, copied_row
from .report import NoiseReport

# Unread samples are small tensors on the device; beyond this many they are read, even if nobody has asked for them.
_MAX_UNREAD = 256
# Gradients up to this size wait, so that one call takes the norms of many. Larger ones would hold too much memory.
SMALL_ON_CPU = 1 << 14
_SMALL = 1 << 18
_MAX_WAITING = 128


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

    def hold(self) -> Callable[[], None]:
        """Return a function that puts back what was learned so far."""
        return partial(setattr, self, "average", self.average)

    def to_state(self) -> dict[str, Any]:
        """Return what else is to be saved, as JSON values."""
        return {}

    def read_state(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check a saved state and return a function that takes it over."""
        return partial(setattr, self, "average", NoiseAverage.from_state(state["noise"]))


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
        check_whole(named_parameters)
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
        self._read()  # for reports that nobody has looked at yet
        self._average = value

    def add(
        self, q: Tensor, *, q_factor: float, gb_factor: float, num_examples: int, num_parts: int
    ) -> Callable[[], NoiseReport] | None:
        """Take the sums of one update, while ``.grad`` holds its gradient; return a function that reads its report."""
        if num_parts < 2:
            return None
        both = copied_row(torch.stack([q, self.norms.of_gradients().to(q)]))
        return self._keep(_Sample(both, q_factor, gb_factor, num_examples, num_parts))

    def _evaluate(self, sample: _Sample) -> NoiseReport:
        counts: dict[str, Any] = {"num_examples": sample.num_examples, "num_parts": sample.num_parts}
        pairs = zip(*sample.both.tolist(), strict=True)
        noises = [estimate_noise(q * sample.q_factor, gb * sample.gb_factor, **counts) for q, gb in pairs]
        # Squared norms add up over groups, so these sums are those of the whole gradient; ratios would not add up.
        s, g2 = sum(noise[0] for noise in noises), sum(noise[1] for noise in noises)
        self._average = self._average.update(s, g2, num_examples=sample.num_examples)
        groups = dict(zip(self._names, noises, strict=True)) if len(self._names) > 1 else {}
        return NoiseReport(s, g2, sample.num_parts, self._average.is_reliable, groups=groups)


@final
@dataclass
class _Sample:
    """The measurements of one update, and its report after they were read."""

    both: Tensor | Copied  # sums of |h_i|² / b_i, one per group; below them the squared norms of the summed gradient
    q_factor: float
    gb_factor: float
    num_examples: int
    num_parts: int
    report: NoiseReport | None = None


class Norms(ABC):
    """Adds up squared norms over the micro-batches of an update.

    Attributes:
        total: the sums so far, ``num_groups`` of them; None before the first micro-batch.
    """

    total: Tensor | None

    @property
    @abstractmethod
    def num_groups(self) -> int:
        """Return how many sums there are."""

    def arrange(self, parts: Sequence[Sequence[int]], fits: Callable[[Sequence[int]], bool]) -> Sequence[Sequence[int]]:
        """Return the micro-batches that run in place of equally random ones; ``fits`` says what is small enough."""
        return parts

    @abstractmethod
    def begin(self, num_rows: int) -> None:
        """Start a micro-batch of some rows, before its forward pass."""

    @abstractmethod
    def end(self, num_examples: int) -> None:
        """Close a micro-batch of some examples and add its share; one without examples adds nothing."""

    @abstractmethod
    def reset(self, total: Tensor | None = None) -> None:
        """Forget the micro-batches so far, or go back to an earlier total."""


@final
class GradientNorms(Norms):
    """Sums ``|h_i|² / b_i`` over micro-batches, where backward adds the gradient ``h_i`` for micro-batch ``i``.

    A hook of a parameter fires once per backward, with the gradient of that backward before it is added to ``.grad``,
    so no copy of the gradient is needed. Everything stays on the device.

    Args:
        parameters: the parameters to watch.
        groups: the group of each parameter, 0, 1, …, with a sum each; None is one group for all.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], groups: Sequence[int] | None = None) -> None:
        self.groups = [0] * len(parameters) if groups is None else list(groups)
        self._num_groups = max(self.groups, default=0) + 1  # a trainer's optimizer may add the first ones later
        self._parameters = list(parameters)
        self._handles: list[RemovableHandle] = [
            parameter.register_hook(marked(partial(self._add, place))) for place, parameter in enumerate(parameters)
        ]
        self._open: Squares | None = None
        self._seen: set[int] = set()  # places of gradients that came in this micro-batch
        self._parted: int | None = None  # the place of one that came in parts
        self.total: Tensor | None = None  # one sum per group

    @property
    def num_groups(self) -> int:
        """Return how many sums there are."""
        return self._num_groups

    def _add(self, place: int, gradient: Tensor) -> None:
        if self._open is not None:
            if place in self._seen:  # squares of parts do not add up to that of their sum
                self._parted = place
            self._seen.add(place)
            self._open.add(gradient, self.groups[place])

    def begin(self, num_rows: int) -> None:
        """Start a micro-batch."""
        self._open, self._seen, self._parted = Squares(), set(), None

    def end(self, num_examples: int) -> None:
        """Close a micro-batch of some examples and add its share; one without examples adds nothing."""
        squares, self._open = self._open, None
        if squares is None or num_examples == 0:
            return
        if self._parted is not None:
            raise ArgumentError(
                "noise needs the gradient of a micro-batch in one piece, but that of a parameter of shape "
                f"{tuple(self._parameters[self._parted].shape)} came in several; call torch.utils.checkpoint with "
                "use_reentrant=False, run one backward pass per micro-batch, or leave measure_noise out"
            )
        found = squares.sums(self.num_groups)
        if found is not None:
            share = found / num_examples
            self.total = share if self.total is None else self.total + share

    def of_gradients(self) -> Tensor:
        """Return the squared norm of the gradients that are there now, one per group."""
        squares = Squares()
        for parameter, group in zip(self._parameters, self.groups, strict=True):
            if parameter.grad is not None:
                squares.add(parameter.grad, group)
        found = squares.sums(self.num_groups)
        return torch.zeros(self.num_groups, dtype=torch.float64) if found is None else found

    def reset(self, total: Tensor | None = None) -> None:
        """Forget the micro-batches so far, or go back to an earlier total."""
        self._open, self.total = None, total

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


@final
class Squares:
    """Collects the squared norms of gradients as they come, each with its group."""

    def __init__(self) -> None:
        self._squares: list[Tensor] = []
        self._groups: list[int] = []
        self._waiting: dict[tuple[int, torch.device, torch.dtype], list[Tensor]] = {}
        self._num_waiting = 0

    def add(self, gradient: Tensor, group: int) -> None:
        """Take the norm of a gradient, now or later together with others."""
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient)
        if gradient.numel() > (SMALL_ON_CPU if gradient.is_cpu else _SMALL) or gradient.is_sparse:
            self._squares.append(square_of(gradient))
            self._groups.append(group)
            return
        self._waiting.setdefault((group, gradient.device, gradient.dtype), []).append(gradient.detach())
        self._num_waiting += 1
        if self._num_waiting >= _MAX_WAITING:  # over all groups: there may be as many groups as parameters
            self._flush()

    def sums(self, num_groups: int) -> Tensor | None:
        """Return the sum of each group, None if there was no gradient."""
        self._flush()
        squares = self._squares
        if not squares:
            return None
        device = squares[0].device
        wide = torch.float32 if device.type == "mps" else torch.float64
        if any(square.device != device or square.dtype != squares[0].dtype for square in squares):
            squares = [square.to(device=device, dtype=wide) for square in squares]
        stacked = torch.stack(squares)
        if num_groups == 1:
            return stacked.sum(0, keepdim=True, dtype=wide)
        groups = torch.tensor(self._groups, device=device)
        return stacked.new_zeros(num_groups, dtype=wide).index_add(0, groups, stacked.to(wide))

    def _flush(self) -> None:
        for (group, device, dtype), alike in self._waiting.items():
            if device.type == "cpu":  # there a call costs more than a copy into one row
                self._squares.append(square_of(_flatten_dense_tensors(alike)))
            else:
                norms = torch.stack(torch._foreach_norm(alike, dtype=_wide(dtype)))
                self._squares.append(torch.dot(norms, norms))
            self._groups.append(group)
        self._waiting, self._num_waiting = {}, 0


def check_whole(named_parameters: Sequence[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters of which every rank holds a part: nobody has the norm of a whole gradient."""
    for name, parameter in named_parameters:
        if is_sharded(parameter):
            raise ArgumentError(
                f"measure_noise needs whole gradients, but every rank holds a part of {name or 'a parameter'}, a "
                "DTensor; use DDP, or leave measure_noise out"
            )


def marked(hook: Any) -> Any:
    """Return a hook with the mark of those that only look at a gradient."""
    hook.is_batchwright = True  # those of users, which may change a gradient, lack it
    return hook


def square_of(gradient: Tensor) -> Tensor:
    """Return the squared norm of a gradient, in float32 or wider."""
    if gradient.is_cpu and gradient.dtype is torch.float32 and gradient.is_contiguous():
        flat = gradient.detach().view(-1)
        return torch.dot(flat, flat)  # twice as fast as a norm on a CPU
    dense = (gradient.coalesce().values() if gradient.is_sparse else gradient).detach()
    return torch.linalg.vector_norm(dense, dtype=_wide(dense.dtype)).square()


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type to square in: squares of half-precision gradients overflow."""
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32
