"""The rounds of decoding: which graph runs next, which rows go on, and when the host looks at the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..graphs.backend import GraphBackend, Replay
from ._slots import Slots

# Steps between two looks at which rows have ended.
_LOOK_EVERY = 4
# A capture takes about as long as so many replays.
_WORTH_STEPS = 8
# The next smaller number of rows, as a share; below the fewest a step takes as long as with one row.
_FEWER, _FEWEST_ROWS = 0.7, 8
# Widths of the cache that steps look at: powers of two, and halfway between them from here on.
_LEAST_WIDTH, _HALFWAY_FROM = 32, 256

Bools = npt.NDArray[np.bool_]
Counts = npt.NDArray[np.int64]


def fewer_rows(num: int) -> list[int]:
    """Return numbers of rows to run, from all of them down.

    >>> fewer_rows(40)
    [40, 24, 16, 8]
    """
    sizes = [num]
    while sizes[-1] > _FEWEST_ROWS:
        sizes.append(max(_FEWEST_ROWS, int(sizes[-1] * _FEWER) // 8 * 8))
    return sizes


def widths_up_to(most: int) -> list[int]:
    """Return widths of the cache to look at, the last of which is ``most``.

    >>> widths_up_to(400)
    [32, 64, 128, 256, 384, 400]
    """
    sizes, size = [], _LEAST_WIDTH
    while size < most:
        sizes.append(size)
        if size >= _HALFWAY_FROM and size * 3 // 2 < most:
            sizes.append(size * 3 // 2)
        size *= 2
    return [*sizes, most]


@final
class Rounds:
    """Graphs over slots, and the rounds of a batch.

    Args:
        slots: what is decoded.
        backend: what captures.

    Attributes:
        step_bytes: what one step took, None if that was not measured.
    """

    def __init__(self, slots: Slots, backend: GraphBackend) -> None:
        self.slots, self._backend = slots, backend
        self._graphs: dict[tuple[int, int], tuple[Replay, Tensor | None]] = {}
        self._rows = fewer_rows(slots.layout.num_rows)
        width = slots.layout.width
        self._widths = widths_up_to(width) if slots.attend is None else [width]  # ranges end where keys do
        self._looks = _Looks(slots.finished)
        self.step_bytes: int | None = None

    def forget(self) -> None:
        """Drop all graphs; what is decoded stays where it is."""
        self._graphs.clear()

    @property
    def has_graphs(self) -> bool:
        """Say whether anything was captured."""
        return bool(self._graphs)

    def run(
        self, limits: Counts, read: int, gather: Callable[[Slots], bool] | None = None, *, goes_on: bool = True
    ) -> None:
        """Decode until every row has ended.

        Args:
            limits: the most new tokens of each row; the first tokens are there.
            read: tokens in the cache.
            gather: is called after each of the first steps, until it returns False; rows stay in place meanwhile.
            goes_on: whether to go on after these.
        """
        rows = _Rows(limits)
        num_rows = next(size for size in reversed(self._rows) if size >= len(limits))
        is_watched = gather is not None
        self._looks.forget()
        while rows.num_alive(self._looks):
            place, left = read + rows.num_new - 1, rows.num_left
            if not is_watched:
                num_rows = self._fewer(rows, num_rows, place, left)
            width = self._width(num_rows, place, left)
            num_steps = min(1 if is_watched else _LOOK_EVERY, width - place, left)
            self._replay(num_rows, width, num_steps, is_cold=is_watched and rows.num_new == 1)
            rows.num_new += num_steps
            self._looks.send(has_ends=bool(self.slots.rules.ends))
            is_watched = is_watched and gather is not None and gather(self.slots)
            if not is_watched and not goes_on:
                return

    def _replay(self, num_rows: int, width: int, num_steps: int, *, is_cold: bool) -> None:
        if is_cold:  # what is made lazily exists after a first step, which looks as far as any will
            self.step_bytes = self._backend.measure(lambda: self.slots.step(num_rows, self.slots.layout.width))
            num_steps -= 1
        if num_steps:
            replay, self.slots.logits = self._graph(num_rows, width)
            for _ in range(num_steps):
                replay()

    def _graph(self, num_rows: int, width: int) -> tuple[Replay, Tensor | None]:
        found = self._graphs.get((num_rows, width))
        if found is None:
            replay = self._backend.capture(lambda: self.slots.step(num_rows, width), writes=self.slots.written)
            found = replay, self.slots.logits
            self._graphs[num_rows, width] = found
        return found

    def _width(self, num_rows: int, place: int, left: int) -> int:
        """Return how much of the cache the next steps look at."""
        sizes = [size for size in self._widths if size > place]
        for size in sizes:
            if (num_rows, size) in self._graphs or size - place >= min(left, _WORTH_STEPS):
                return size
        return sizes[-1]

    def _fewer(self, rows: _Rows, num_rows: int, place: int, left: int) -> int:
        """Let the rows that go on move together, if that pays."""
        sizes = [size for size in self._rows if rows.num_going_on <= size < num_rows]
        width = self._width(num_rows, place, left)
        # At most the share of the rows that go can be saved, and a capture has to be paid of it.
        worth = _WORTH_STEPS * num_rows
        sizes = [size for size in sizes if left * (num_rows - size) >= worth or (size, width) in self._graphs]
        if not sizes:
            return num_rows
        source, target = rows.close_up(sizes[-1])
        if source:
            self.slots.move(source, target, place)
        self._looks.forget()  # slots have other rows now
        return sizes[-1]


@final
class _Rows:
    """What the host knows of the slots: which rows go on, by their limits and by looks at the device."""

    def __init__(self, limits: Counts) -> None:
        self._limits = limits.copy()
        self._has_ended = np.zeros(len(limits), dtype=bool)
        self.num_new = 1

    @property
    def _goes_on(self) -> Bools:
        return ~self._has_ended & (self._limits > self.num_new)

    @property
    def num_going_on(self) -> int:
        """Return how many rows go on."""
        return int(self._goes_on.sum())

    @property
    def num_left(self) -> int:
        """Return how many steps the longest row may need."""
        return int(self._limits[self._goes_on].max()) - self.num_new

    def num_alive(self, looks: _Looks) -> int:
        """Take in what the last look has shown, and return how many rows go on."""
        seen = looks.read()
        if seen is not None:
            self._has_ended |= seen[: len(self._has_ended)]
        return self.num_going_on

    def close_up(self, num_rows: int) -> tuple[list[int], list[int]]:
        """Return which slots move where, so that the rows that go on lie in the first ``num_rows``."""
        going = np.flatnonzero(self._goes_on)
        source = going[going >= num_rows]
        free = np.setdiff1d(np.arange(num_rows), going)[: len(source)]
        for held in (self._limits, self._has_ended):
            held[free] = held[source]
        self._limits, self._has_ended = self._limits[:num_rows], self._has_ended[:num_rows]
        return source.tolist(), free.tolist()


@final
class _Looks:
    """Brings over which rows have ended, one look behind, so that the device never waits for the host."""

    def __init__(self, finished: Tensor) -> None:
        self._finished = finished
        self._is_cuda = finished.device.type == "cuda"
        self._waiting: list[tuple[Tensor, Any]] = []
        self._free: list[Tensor] = []

    def forget(self) -> None:
        """Drop looks that are on their way; what is copied to their memory later follows them on the stream."""
        self._free += [host for host, _ in self._waiting]
        self._waiting = []

    def send(self, *, has_ends: bool) -> None:
        """Ask for a look; rows without an end token end by their limits, which the host knows."""
        if not has_ends:
            return
        host = self._free.pop() if self._free else self._host()
        host.copy_(self._finished, non_blocking=True)
        event = torch.cuda.Event() if self._is_cuda else None
        if event is not None:
            event.record(torch.cuda.current_stream(self._finished.device))
        self._waiting.append((host, event))

    def _host(self) -> Tensor:
        return torch.empty_like(self._finished, device="cpu", pin_memory=self._is_cuda)

    def read(self) -> Bools | None:
        """Return the look before the last, None if there is none; with one look on its way the device has work."""
        if len(self._waiting) < 2:
            return None
        host, event = self._waiting.pop(0)
        if event is not None:
            event.synchronize()
        seen: Bools = host.numpy().copy()
        self._free.append(host)
        return seen
