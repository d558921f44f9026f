"""Stand-ins for tests: memory of any size, and a clock that moves only when it is told to."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, final

from .._checks import as_number, as_plain, as_whole
from ..errors import ArgumentError


@final
class FakeMemory:
    """Memory that a test controls: its size, how much is in use, and how much a batch takes.

    It can be the ``source`` of a ``MemoryMonitor``. Nothing is allocated.

    Args:
        total_bytes: the size of the memory.
        used_bytes: what is in use at the start; set ``memory.used_bytes`` to change it.
        bytes_of: ``bytes_of(*shape)`` is what a batch takes while it runs; None: one byte per element of the shape.

    >>> memory = FakeMemory(1000, used_bytes=100, bytes_of=lambda num_items, length: 2 * num_items * length)
    >>> memory.run_batch(4, 50)
    >>> memory.used_bytes, memory.peak_bytes
    (100, 500)
    >>> memory.run_batch(10, 50)
    Traceback (most recent call last):
        ...
    MemoryError: a batch of shape (10, 50) takes 1000 bytes; 900 of 1000 are free
    """

    def __init__(self, total_bytes: int, *, used_bytes: int = 0, bytes_of: Callable[..., float] | None = None) -> None:
        self.total_bytes = as_whole("total_bytes", total_bytes, least=1)
        self._bytes_of = _num_elements if bytes_of is None else bytes_of
        self._peak_bytes = 0
        self.used_bytes = used_bytes

    @property
    def used_bytes(self) -> int:
        """Return how much is in use now."""
        return self._used_bytes

    @used_bytes.setter
    def used_bytes(self, value: int) -> None:
        used_bytes = as_whole("used_bytes", value, least=0)
        if used_bytes > self.total_bytes:
            raise ArgumentError(f"used_bytes must be at most total_bytes, {self.total_bytes}, got {used_bytes}")
        self._used_bytes = used_bytes
        self._peak_bytes = max(self._peak_bytes, used_bytes)

    @property
    def peak_bytes(self) -> int:
        """Return the most that was in use since ``reset_peak``."""
        return self._peak_bytes

    def reset_peak(self) -> None:
        """Forget the peak: it becomes what is in use now."""
        self._peak_bytes = self._used_bytes

    def run_batch(self, *shape: int) -> None:
        """Take the memory of a batch and give it back, or raise ``MemoryError`` where it is not free."""
        plain = tuple(as_plain("a number in the shape", number, least=0) for number in shape)
        needed = round(as_number("the result of bytes_of", self._bytes_of(*plain), least=0))
        free = self.total_bytes - self._used_bytes
        if needed > free:
            self._peak_bytes = self.total_bytes  # a device is full when it runs out
            raise MemoryError(f"a batch of shape {plain} takes {needed} bytes; {free} of {self.total_bytes} are free")
        self._peak_bytes = max(self._peak_bytes, self._used_bytes + needed)


@final
class FakeClock:
    """A clock that moves only when it is told to; call it for the time in seconds.

    >>> clock = FakeClock()
    >>> clock.advance(1.5)
    >>> clock()
    1.5
    """

    def __init__(self, now_seconds: float = 0.0) -> None:
        self._now_seconds = as_number("now_seconds", now_seconds)

    def __call__(self) -> float:
        """Return the time in seconds."""
        return self._now_seconds

    def advance(self, seconds: float) -> None:
        """Let time pass; it never goes back."""
        self._now_seconds += as_number("seconds", seconds, least=0)


def _num_elements(*shape: float) -> float:
    return math.prod(shape)


@final
class EagerGraphs:
    """A stand-in for CUDA graphs on any device: a replay runs the captured function again.

    Everything around a capture is the real thing: static inputs, gradients, sums, the update, refusals. Give it to
    ``Stepper(graphs=EagerGraphs(), shapes=…)``.

    Args:
        max_captures: captures beyond this number run out of memory; None allows any number.
        bytes_per_capture: what ``pool_bytes`` counts for each, and what a rehearsal is said to take.
        used_bytes: what is in use besides.
        total_bytes: of the device; where an eager step does not fit beside the captures, none runs. None is no limit.
        clock: tells the time; None takes the host's.

    Attributes:
        num_captured: captures so far.
        num_replayed: replays so far.
        num_released: how often all captures were dropped.
    """

    def __init__(
        self,
        *,
        max_captures: int | None = None,
        bytes_per_capture: int = 0,
        used_bytes: int = 0,
        total_bytes: int | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self._max_captures = None if max_captures is None else as_whole("max_captures", max_captures, least=0)
        self._bytes_per_capture = as_whole("bytes_per_capture", bytes_per_capture, least=0)
        self._used_bytes = as_whole("used_bytes", used_bytes, least=0)
        self._total_bytes = None if total_bytes is None else as_whole("total_bytes", total_bytes, least=0)
        self._clock = time.perf_counter if clock is None else clock
        self._num_held = 0
        self.num_captured = self.num_replayed = self.num_released = 0

    def prepare(self) -> None:
        """Do nothing: there is no pool."""

    def capture(self, function: Callable[[], None], *, writes: Sequence[Any] = ()) -> Callable[[], None]:
        """Run the function once, put back what it wrote, and return what runs it again."""
        if self._max_captures is not None and self._num_held >= self._max_captures:
            raise MemoryError(f"a stand-in of {self._max_captures} captures is full")
        before = [tensor.detach().clone() for tensor in writes]
        try:
            function()
        finally:
            for tensor, value in zip(writes, before, strict=True):
                tensor.data.copy_(value)
        self._num_held += 1
        self.num_captured += 1

        def replay() -> None:
            self.num_replayed += 1
            function()

        return replay

    def can_capture_update(self, group: dict[str, Any]) -> bool:
        """Return whether the step takes its rate from a tensor on the CPU too."""
        return bool(group.get("fused") or group.get("capturable"))

    def pool_bytes(self) -> int:
        """Return the bytes of the captures that are held."""
        return self._num_held * self._bytes_per_capture

    def used_bytes(self) -> int:
        """Return what is in use besides the captures."""
        return self._used_bytes

    def free_bytes(self) -> int | None:
        """Return what is left of ``total_bytes``."""
        return None if self._total_bytes is None else self._total_bytes - self._used_bytes - self.pool_bytes()

    def measure(self, function: Callable[[], None]) -> int:
        """Run a function, and return what a capture counts."""
        function()
        return self._bytes_per_capture

    @property
    def lost_peak_bytes(self) -> int:
        """Return 0: no peak is measured."""
        return 0

    def release(self) -> None:
        """Forget the captures."""
        self._num_held = 0
        self.num_released += 1

    def seconds(self) -> float:
        """Return the time."""
        return self._clock()
