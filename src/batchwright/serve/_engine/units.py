"""Units: batches of offline work, read ahead, run in parts and handed out in order."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, final

from ...errors import ArgumentError, Closed, TooLarge
from ..latency import LatencyModel
from ..settings import Settings
from .calls import Outcome
from .waiters import tell


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Items of one batch that run together."""

    unit: Unit
    start: int
    stop: int

    @property
    def items(self) -> list[Any]:
        """Return the list that the function is called with."""
        return self.unit.items[self.start : self.stop]

    @property
    def length(self) -> int:
        """Return the length that the items are padded to."""
        return max(self.unit.lengths[self.start : self.stop])


@final
@dataclasses.dataclass(eq=False)
class Unit:
    """A batch on its way: which of its items have yet to run, and the results so far."""

    index: int
    items: list[Any]
    lengths: list[int]
    error: BaseException | None = None
    is_estimate: bool = False
    results: list[Any] = dataclasses.field(default_factory=list)
    waiting: deque[tuple[int, int]] = dataclasses.field(default_factory=deque)
    num_running: int = 0
    is_counted: bool = False

    def __post_init__(self) -> None:
        self.results = [None] * len(self.items)
        if self.items and self.error is None:
            self.waiting.append((0, len(self.items)))

    @property
    def has_part(self) -> bool:
        return bool(self.waiting)

    @property
    def is_done(self) -> bool:
        return not self.waiting and not self.num_running

    def take(self, seconds: float, model: LatencyModel, settings: Settings, *, most_seconds: float) -> Part | None:
        start, stop = self.waiting.popleft()
        count = _how_many(self.lengths[start:stop], seconds, model, settings, is_estimate=self.is_estimate)
        if count == 0:
            alone = self.lengths[start : start + 1]
            if _how_many(alone, most_seconds, model, settings, is_estimate=self.is_estimate):
                self.waiting.appendleft((start, stop))
            else:
                self._fail(_too_long(alone[0], most_seconds, model, None if self.is_estimate else settings.max_tokens))
            return None
        if start + count < stop:
            self.waiting.appendleft((start + count, stop))
        self.num_running += 1
        return Part(self, start, start + count)

    def finish(self, part: Part, outcome: Outcome, settings: Settings, *, is_crowded: bool) -> None:
        self.num_running -= 1
        size = part.stop - part.start
        if outcome.error is None:
            self.results[part.start : part.stop] = outcome.values
            # By the type: the results are the user's, and may say anything when they are asked for their class.
            errors = (value for value in outcome.values if issubclass(type(value), BaseException))
            if (error := next(errors, None)) is not None:
                self._fail(error)
        elif outcome.is_lost and settings.on_error == "bisect" and self.error is None:
            self.waiting.appendleft((part.start, part.stop))  # a caller's event loop has ended; the next is another
        elif outcome.is_oom and settings.on_oom == "split" and (size > 1 or is_crowded) and self.error is None:
            middle = part.start + size // 2
            self.waiting.extendleft([(middle, part.stop), (part.start, middle)][: 2 if size > 1 else 1])
        else:
            self._fail(outcome.error)

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self.waiting.clear()


def _read_unit(index: int, batch: Any, length_of: Callable[[Any], int], *, is_estimate: bool) -> Unit:
    """Measure a batch; what is wrong with it is its own error."""
    items: list[Any] = []
    try:
        if isinstance(batch, str | bytes | dict) or not (hasattr(batch, "__iter__") or hasattr(batch, "__getitem__")):
            raise ArgumentError(f"a background batch must be a list of items, got {type(batch).__name__}")
        items = list(batch)
        return Unit(index, items, [length_of(item) for item in items], is_estimate=is_estimate)
    except BaseException as error:  # SystemExit too: it would end the reading of all other batches
        return Unit(index, items, [], error)


def _how_many(lengths: list[int], seconds: float, model: LatencyModel, settings: Settings, *, is_estimate: bool) -> int:
    """Return how many items from the front may run together; 0 if the first alone is over a limit that is certain."""
    tokens, longest, count = settings.max_tokens, 0, 0
    # Before it is ready the model knows no seconds. Sizes that differ teach it what an item costs.
    most = settings.max_items if model.is_ready else min(settings.max_items, 2 ** (model.num_observed // 2))
    for length in lengths[:most]:
        longest = max(longest, length)
        if tokens is not None and (count + 1) * longest > tokens and (count or not is_estimate):
            break
        if model.is_ready and model.predict(count + 1, longest) > seconds:
            break
        count += 1
    return count


def _too_long(length: int, seconds: float, model: LatencyModel, max_tokens: int | None) -> TooLarge:
    if max_tokens is not None and length > max_tokens:
        return TooLarge(f"an item of length {length} alone is over max_tokens={max_tokens}; shorten it")
    return TooLarge(
        f"an item of length {length} alone takes about {model.predict(1, length) * 1e3:.1f} ms, and background work "
        f"must take less than {seconds * 1e3:.1f} ms so that requests are in time; raise deadline_ms or max_wait_ms or "
        "shorten it"
    )


@final
class Units:
    """Batches of offline work on their way: read ahead in a thread of their own, run in parts, handed out in order.

    Args:
        batches: lists of items.
        max_ahead: how many batches are read before they are handed out.
    """

    def __init__(self, batches: Iterable[Any], *, max_ahead: int) -> None:
        self._batches = batches
        self._max_ahead = max_ahead
        self._changed = threading.Condition()
        self._units: deque[Unit] = deque()
        self._readers: list[concurrent.futures.Future[None]] = []
        self._reader: threading.Thread | None = None
        self._is_taken = self._is_estimate = False
        self._has_all = False
        self._is_stopped = False
        self._problem: BaseException | None = None
        self.num_batches = self.num_failed = self.num_items = 0

    def attach(self, length_of: Callable[[Any], int], wake: Callable[[], None], *, is_estimate: bool = False) -> None:
        """Belong to a batcher from now on; ``wake`` tells it that there is something to run."""
        self._is_estimate = is_estimate
        with self._changed:
            if self._is_taken:
                raise ArgumentError("this background work belongs to another batcher; make one Background per batcher")
            self._is_taken = True
            # A daemon: batches that never come must not keep the interpreter from ending.
            arguments = (length_of, wake)
            self._reader = threading.Thread(
                target=self.read, args=arguments, name="batchwright-background", daemon=True
            )

    def begin(self) -> None:
        """Begin to read batches; only the first time."""
        with self._changed:
            reader, self._reader = self._reader, None
            if reader is not None and not self._is_stopped:
                reader.start()

    def stop(self) -> None:
        """Run no more; what has ended can still be read."""
        with self._changed:
            self._is_stopped = True
            self._tell()

    def forget(self) -> None:
        """End in the child of a fork: what would run it, and maybe held the lock, is not there."""
        self._changed = threading.Condition()
        self._readers.clear()
        self._is_stopped = True

    def has_part(self) -> bool:
        """Say whether there is something to run."""
        with self._changed:
            return not self._is_stopped and any(unit.has_part for unit in self._units)

    def take(self, seconds: float, model: LatencyModel, settings: Settings, *, most_seconds: float) -> Part | None:
        """Return a part that is predicted to run within a time; None if there is none.

        Args:
            seconds: what a part may take.
            model: how long parts take.
            settings: the limits of a batch.
            most_seconds: an item that takes longer than this ends its batch with an error; others wait.
        """
        with self._changed:
            if self._is_stopped:
                return None
            for unit in self._units:
                while unit.has_part:
                    part = unit.take(seconds, model, settings, most_seconds=most_seconds)
                    if part is not None:
                        return part
                    if unit.has_part:  # its next item takes longer; maybe those of a later batch do not
                        break
                    self._end_unit(unit)
        return None

    def next_length(self) -> int | None:
        """Return the length of the item that is next by order; None if there is none."""
        with self._changed:
            waiting = (unit for unit in self._units if unit.has_part)
            unit = None if self._is_stopped else next(waiting, None)
            return None if unit is None else unit.lengths[unit.waiting[0][0]]

    def finish(self, part: Part, outcome: Outcome, settings: Settings, *, is_crowded: bool = False) -> None:
        """Take in what a part gave; after an error the settings may allow another call of it."""
        with self._changed:
            part.unit.finish(part, outcome, settings, is_crowded=is_crowded)
            self._end_unit(part.unit)

    def next_ended(self) -> Unit | concurrent.futures.Future[None] | None:
        """Return the next batch once it has ended, a future to wait for until then, or None after the last."""
        self.begin()
        with self._changed:
            if self._units and self._units[0].is_done:
                unit = self._units.popleft()
                self._tell()
                return unit
            if not self._units and self._has_all:
                if self._problem is not None:
                    raise self._problem
                return None
            if self._is_stopped:
                raise Closed(
                    "the batcher was closed, or its last reference dropped, before all background batches had run; "
                    "keep it until the loop has ended"
                )
            reader: concurrent.futures.Future[None] = concurrent.futures.Future()
            self._readers.append(reader)
            return reader

    def _end_unit(self, unit: Unit) -> None:
        if unit.is_done and not unit.is_counted:
            unit.is_counted = True
            self.num_batches += 1
            self.num_failed += unit.error is not None
            self.num_items += 0 if unit.error is not None else len(unit.items)
            self._tell()

    def read(self, length_of: Callable[[Any], int], wake: Callable[[], None]) -> None:
        """Read batches until there are no more; ``start`` does this in a thread."""
        problem: BaseException | None = None
        try:
            for index, batch in enumerate(self._batches):
                unit = _read_unit(index, batch, length_of, is_estimate=self._is_estimate)
                with self._changed:
                    while len(self._units) >= self._max_ahead and not self._is_stopped:
                        self._changed.wait()
                    if self._is_stopped:
                        return
                    self._units.append(unit)
                    self._end_unit(unit)
                wake()
        except BaseException as error:  # whoever loops must hear of it
            problem = error
        with self._changed:
            self._has_all, self._problem = True, problem
            self._tell()

    def _tell(self) -> None:
        self._changed.notify_all()
        tell(self._readers)
