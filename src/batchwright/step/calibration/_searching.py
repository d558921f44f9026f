"""Which batches to measure for a budget, and the budget that follows from them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np
import numpy.typing as npt

from ..._types import MAX_INT32, IntArray
from ...errors import DoesNotFitError
from ...plan import MaxBytes, MaxTokens, MemoryModel, TimeModel
from ...plan.models.memory import margin_with_floor, peak_of, with_floor
from ._bounds import between, bounds_from, dominates, most_ran
from .found import TOLERANCE, FoundBudget
from .result import Measurement, Shape
from .running import USABLE

# With the first look at small batches.
_MOST_PROBES = 8
_MOST_PROBES_PER_AXIS = 2  # more for every further axis, which has terms of its own
_LEAST_ROWS = 3
# An example that is as long as this share of a row stands for one that fills it.
_FILLED = 0.9
# Batches that may run out of memory on the way.
_MOST_FAILURES = 5
# A model fitted to small batches says little about far larger ones: a batch costs at most this many times the last.
_GROWTH = 8
# Throughput gains no more if a smaller batch has this share of it; until then batches grow by this factor.
_FLAT, _STEP = 0.9, 4
# A batch that is not this much larger than a measured one shows nothing new.
_WORTHWHILE = 1.25
# Where larger batches could not be measured, batches stay within this many times the largest that was.
_REACH = 2
# Probes stop when they have taken so long.
_MOST_SECONDS = 15.0
# What the fit of a few probes may be wrong by.
_LEAST_MARGIN, _MOST_MARGIN = 0.02, 0.1
# A fit that is below what ran by more than this has not the terms that memory has.
_DOUBTFUL = 0.02


@final
@dataclass(frozen=True)
class Row:
    """Examples that are padded to the same lengths.

    Attributes:
        lengths: padded, by axis.
        pillars: the examples that have these lengths; a batch holds all of them.
    """

    lengths: tuple[int, ...]
    pillars: tuple[int, ...]

    def examples(self, num_items: int, lengths: IntArray) -> list[int]:
        """Return as many examples: the pillars, then the longest others; few examples come several times.

        On one axis only those count that fill the row: a collator that does not pad runs short ones in less time and
        memory than the row is thought to take.
        """
        is_inside = (lengths <= np.array(self.lengths)).all(axis=1)
        if len(self.lengths) == 1:
            is_inside &= lengths[:, 0] >= _FILLED * self.lengths[0]
        inside = np.flatnonzero(is_inside)
        order = inside[np.argsort(-lengths[inside].sum(axis=1, dtype=np.int64), kind="stable")]
        others = order[~np.isin(order, self.pillars)]
        found: list[int] = np.resize(np.concatenate([self.pillars, others]).astype(np.int64), num_items).tolist()
        return found


def probe_rows(lengths: IntArray) -> list[Row]:
    """Return the rows to measure, the one of the longest example last.

    Of one axis these are a short, a middle and the longest example. Of several, a short one, each axis at its longest
    together, examples that are long on one axis only, and the one that is longest in sum.

    >>> [row.lengths for row in probe_rows(np.array([[8], [16], [16], [64]]))]
    [(8,), (16,), (64,)]
    >>> [row.lengths for row in probe_rows(np.array([[8, 9], [64, 9], [9, 64], [60, 60]]))]
    [(8, 9), (64, 64), (64, 9), (9, 64), (60, 60)]
    """
    totals = lengths.sum(axis=1, dtype=np.int64)
    order = np.argsort(totals, kind="stable")
    chosen: list[tuple[int, ...]] = [
        (int(order[int(share * (len(order) - 1))]),) for share in (0.1, 0.5)[: 3 - lengths.shape[1]]
    ]
    if lengths.shape[1] > 1:
        chosen.append(tuple(dict.fromkeys(int(place) for place in lengths.argmax(axis=0))))
        for column in lengths.T.astype(np.float64):
            chosen.append((int(np.where(2 * column >= column.max(), column / totals, 0.0).argmax()),))
    chosen.append((int(order[-1]),))
    rows: dict[tuple[int, ...], Row] = {}
    for pillars in reversed(chosen):  # of equal rows, one that a single example makes
        found = tuple(int(length) for length in lengths[list(pillars)].max(axis=0))
        if found not in rows or len(pillars) < len(rows[found].pillars):
            rows[found] = Row(found, pillars)
    return list(reversed(rows.values()))


@final
class Search:
    """Decides which batches to run, and what they say.

    Args:
        rows: what batches are made of.
        limit: the most bytes, None if memory is not measured.
        wants_knee: stop where throughput does.
        most_items: that a batch of training could have.

    Attributes:
        found: what ran.
        failed: what ran out of memory.
        num_surprises: how many batches ran out of memory, or took more than was planned for.
        is_checked: the most demanding batches that would be planned have run.
    """

    def __init__(self, rows: list[Row], limit: int | None, *, wants_knee: bool, most_items: int) -> None:
        self._rows, self.limit = rows, limit
        self._wants_knee = wants_knee or limit is None
        self._most_items = most_items
        self._longest = rows[-1]
        self.found: list[Measurement] = []
        self.num_surprises, self.is_checked = 0, False
        self.failed: list[Shape] = []
        self._num_tried = {row.lengths: 0 for row in rows}  # after the first look
        self._seconds = 0.0

    def shapes(self) -> Iterator[tuple[Row, int]]:
        """Yield rows and numbers of items; ``note`` gets what each took before the next is asked for."""
        for row, num in self._first_look():
            if not self._has_failed((num, *row.lengths)):
                yield row, num
        for row, num in self._second_look():
            if len(self.found) < _LEAST_ROWS and not self._has_failed((num, *row.lengths)):
                yield row, num
        if self._ran(self._longest) == 0:
            raise DoesNotFitError(
                f"budget='auto' ran out of memory on one example of length {self._longest.lengths}; shorten it, train "
                "with gradient_checkpointing=True, or give a budget and on_oom='skip'"
            )
        if not self.is_fitted:
            return
        self._num_tried = dict.fromkeys(self._num_tried, 0)
        most = _MOST_PROBES + _MOST_PROBES_PER_AXIS * (len(self._longest.lengths) - 1)
        for _ in range(most - len(self.found) + _MOST_FAILURES):
            if len(self.found) >= most or len(self.failed) > _MOST_FAILURES:
                return
            wanted = self._next()
            if wanted is None:
                return
            yield wanted

    def note(self, shape: Shape, found: Measurement | None) -> None:
        """Take what a batch took, None if memory ran out."""
        self._num_tried[shape[1:]] = self._num_tried.get(shape[1:], 0) + 1
        self.num_surprises += found is None or (self.limit is not None and (found.peak_bytes or 0) > self.limit)
        if found is not None:
            self.found.append(found)
            self._seconds += found.first_visit_seconds + found.seconds
            return
        self.failed.append(shape)

    def budget(self) -> FoundBudget:
        """Return what was found."""
        if not self.is_fitted:  # too few to fit anything to: batches no larger than these
            return FoundBudget(None, None, MaxTokens(max(row.shape[0] * sum(row.shape[1:]) for row in self.found)))
        found = self.fitted()
        if found.memory is not None and not self.is_checked and self.is_doubtful:
            # Not all that is planned was looked at, and what was looked at shows that the fit may be wrong there.
            model = found.memory.model
            found = replace(found, memory=replace(model, margin=2 * model.margin).budget(found.memory.max_bytes))
        if not self.is_checked and self._open_rows(found):
            # Not all was measured: there was no time, or memory ran out.
            largest = max(row.shape[0] * sum(row.shape[1:]) for row in self.found)
            found = replace(found, tokens=MaxTokens(largest * (1 if self.failed else _REACH)))
        return found

    def _first_look(self) -> list[tuple[Row, int]]:
        """Return small batches, those of few tokens first; of one length only, more numbers of items."""
        rows = self._rows
        if len(rows) == 1:
            wanted = [(rows[0], num) for num in (1, 2, 4, 8)]
        elif len(self._longest.lengths) == 1:
            wanted = [(row, num) for row in (rows[0], rows[-1]) for num in (1, 4)]
            wanted += [(row, 4) for row in rows[1:-1]]
        else:  # each once, with numbers that tell the terms apart
            wanted = [(row, 2 + 2 * (place % 2 == 0)) for place, row in enumerate(rows[:-1])]
            wanted += [(self._longest, 1), (self._longest, 3)]
        return sorted(wanted, key=lambda item: (item[1] * sum(item[0].lengths), item[0].lengths))

    def _second_look(self) -> list[tuple[Row, int]]:
        """Return the smallest batches of every row, for where hardly anything fits."""
        ran = {probe.shape for probe in self.found}
        wanted = [(row, num) for num in (1, 2) for row in self._rows if num >= len(row.pillars)]
        return [(row, num) for row, num in wanted if (num, *row.lengths) not in ran]

    def _has_failed(self, shape: Shape) -> bool:
        return any(dominates(shape, other) for other in self.failed)

    def _next(self) -> tuple[Row, int] | None:
        """Return the next batch, None if nothing larger would be planned."""
        found = self.fitted(explores=True)
        # The ends first: what lies between follows from them.
        ends = (self._longest, self._rows[0])
        for row in sorted(self._open_rows(found), key=lambda row: (self._num_tried[row.lengths], row not in ends)):
            num = self.instead((self._within_reach(row, self._wanted(row, found), found), *row.lengths))
            is_larger = num > _WORTHWHILE * self._ran(row) and num >= len(row.pillars)
            if is_larger and not self.takes_too_long((num, *row.lengths)):
                return row, num
        return None

    def instead(self, shape: Shape) -> int:
        """Return how many items to try of a batch: fewer where as many, or hardly more, ran out of memory before."""
        num, *sides = shape
        failed = min((other[0] for other in self.failed if dominates(tuple(sides), other[1:])), default=MAX_INT32)
        if num * _WORTHWHILE < failed:
            return num
        return between(most_ran(sides, self.ran), failed, self.failed)

    @property
    def is_fitted(self) -> bool:
        """Return whether enough batches ran for a fit."""
        return len(self.found) >= _LEAST_ROWS

    @property
    def is_doubtful(self) -> bool:
        """Return whether the fit misses what ran, so that it may miss what did not by more."""
        shapes, peaks = self._arrays()
        return float(_misses(with_floor(shapes, peaks), shapes, peaks).max()) > _DOUBTFUL

    @property
    def ran(self) -> list[Shape]:
        """Return the batches that ran."""
        return [probe.shape for probe in self.found]

    def _open_rows(self, budget: FoundBudget) -> list[Row]:
        """Return the rows of which larger batches would be planned than were measured."""
        rows = [row for row in self._rows if self._wanted(row, budget) > _WORTHWHILE * self._ran(row)]
        if len(rows) == 1 and len(self._longest.lengths) == 1 and rows[0] not in (self._longest, self._rows[0]):
            return []  # it lies between two that are known
        return rows

    def _wanted(self, row: Row, budget: FoundBudget) -> int:
        """Return how many items would be planned; more of the longest row, until throughput is seen to gain no more."""
        lengths = np.array([row.lengths])
        num = int(budget.max_items(lengths)[0])
        if self._wants_knee and row is self._longest and not self._is_flat():
            most = MAX_INT32 if budget.memory is None else int(budget.memory.max_items(lengths)[0])
            num = max(num, min(_STEP * self._ran(row), most))
        return min(num, max(self._most_items, len(row.pillars)))

    def _is_flat(self) -> bool:
        """Say whether a clearly smaller batch of the longest row was about as fast per item as the largest."""
        rates = self._rates()
        largest = max(rates)
        return any(num * _WORTHWHILE <= largest and rate >= _FLAT * rates[largest] for num, rate in rates.items())

    def _rates(self) -> dict[int, float]:
        """Return the items per second of the longest row, by the number of items."""
        rows = [(row.shape, seconds) for row, seconds in zip(self.found, self._steady(), strict=True)]
        return {shape[0]: shape[0] / seconds for shape, seconds in rows if shape[1:] == self._longest.lengths}

    def _least_tokens(self) -> int:
        """Return the tokens of the largest batch that was measured to be slower per item than a larger one."""
        rates = self._rates()
        slower = [num for num, rate in rates.items()
                  if any(other > num and rate < (1 - TOLERANCE) * more for other, more in rates.items())]  # fmt: skip
        return max(slower, default=0) * sum(self._longest.lengths)

    def _ran(self, row: Row) -> int:
        return max((probe.shape[0] for probe in self.found if probe.shape[1:] == row.lengths), default=0)

    def _within_reach(self, row: Row, num: int, budget: FoundBudget) -> int:
        """Return as many items as cost at most some times what the largest batch took; by memory if it is measured."""
        tokens = max(probe.shape[0] * sum(probe.shape[1:]) for probe in self.found)
        reach = _GROWTH * tokens // sum(row.lengths)
        if budget.memory is not None:
            terms = budget.memory.model.terms
            largest = max(probe.shape[0] * _per_item(terms, probe.shape[1:]) for probe in self.found)
            reach = min(
                reach, int(_GROWTH * largest / max(_per_item(terms, row.lengths), _GROWTH * largest / MAX_INT32))
            )
        return max(1, len(row.pillars), min(num, reach))

    def takes_too_long(self, shape: Shape, *, more: float = 0.0) -> bool:
        """Say whether a batch would take longer than what is left of the time, with some seconds more."""
        model = self._time()
        seconds = float(model.predict([[shape[0], sum(shape[1:])]])[0]) * 2 + model.first_visit_seconds
        return self._seconds + seconds > _MOST_SECONDS + more

    def fitted(self, *, explores: bool = False) -> FoundBudget:
        """Return what follows from all that ran, however far that is from what would be planned.

        Args:
            explores: a batch that failed lowers only what is tried of its own row or longer ones: others may still run,
                and show that it was not memory.
        """
        memory = self._memory(explores=explores)
        bounds = bounds_from(self.failed, self.ran)
        if not self._wants_knee:
            return FoundBudget(memory, None, bounds=bounds)
        return FoundBudget(memory, self._time(), least_tokens=self._least_tokens(), bounds=bounds)

    def _arrays(self) -> tuple[IntArray, npt.NDArray[np.float64]]:
        return np.array(self.ran), np.array([float(row.peak_bytes or 0) for row in self.found])

    def _memory(self, *, explores: bool) -> MaxBytes | None:
        """Return the budget of the fit to what ran, below what did not run."""
        if self.limit is None:
            return None
        shapes, peaks = self._arrays()
        phases = with_floor(shapes, peaks)
        errors = _misses(phases, shapes, peaks)
        # The margin for shapes never seen is very wide with so few, but the largest batches were measured.
        margin = max(_LEAST_MARGIN, float(errors.max()), min(margin_with_floor(shapes, peaks), _MOST_MARGIN))
        model = MemoryModel(phases[0], margin, phases[1] if len(phases) > 1 else None)
        failed = [] if explores else self.failed
        return model.budget(max(1.0, _limit_below(failed, model, self.limit, float(peaks.max()))))

    def _time(self) -> TimeModel:
        # By the sum of the lengths: so few probes cannot tell what each axis takes, and the knee is flat.
        shapes = [(row.shape[0], sum(row.shape[1:])) for row in self.found]
        first = [row.first_visit_seconds for row in self.found]
        return TimeModel.fit(shapes, self._steady(), first_visit_seconds=first)

    def _steady(self) -> list[float]:
        """Return the seconds of what ran; on a CPU, at most those of a batch that holds as much or more.

        There a small batch that took longer than a larger one was interrupted. Taken as it is, it hides what every step
        costs, and batches of one example would seem to be as fast per example as any.
        """
        if self.limit is not None:
            return [row.seconds for row in self.found]
        return [min(two.seconds for two in self.found if dominates(two.shape, one.shape)) for one in self.found]


def _misses(phases: Any, shapes: IntArray, peaks: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return by how much each batch took more than the fit says, as a share of that."""
    return peaks / peak_of(phases, shapes) - 1


def _limit_below(failed: list[Shape], model: MemoryModel, limit: float, most_ran: float) -> float:
    """Return the most bytes to plan for: a share of those at which memory ran out, if that was before the limit.

    A batch that failed, though one ran that took more than is predicted for it, failed by something else, such as the
    number of its items. It says nothing about batches of other shapes; the bounds know about it.
    """
    at = [predicted for predicted in model.predict(failed).tolist() if predicted > most_ran] if failed else []
    return min([limit, *(max(most_ran, USABLE * predicted) for predicted in at)])


def _per_item(terms: Any, lengths: tuple[int, ...]) -> float:
    return float(terms.per_item(np.array([lengths]))[0])
