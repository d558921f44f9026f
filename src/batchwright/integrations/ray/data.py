"""Ray Data in planned batches: a window of rows is planned, its batches are handed out, the next window is read."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from ..._checks import as_whole
from ..._lengths import as_lengths
from ...errors import ArgumentError, LengthsError
from ...plan import Budget, Grouping, WindowSort
from ...plan.budget import check_budget
from ...plan.plan import PlanSettings, fits, plan_epoch

Columns: TypeAlias = dict[str, npt.NDArray[Any]]
LengthOf: TypeAlias = str | tuple[str, ...] | list[str] | Callable[[dict[str, Any]], Any]


def plan_dataset(
    dataset: Any,
    budget: Budget,
    *,
    length_of: LengthOf,
    buffer_size: int = 20_000,
    grouping: Grouping = WindowSort(),  # noqa: B008 - frozen
    shuffle: bool = True,
    seed: int = 0,
    size_multiple_of: int = 1,
    size_ladder: Any = None,
    pad_multiple_of: int = 1,
    oversize: Any = "error",
) -> PlannedDataset:
    """Return the batches of a Ray Data dataset, each within the budget; every row is in one of them.

    Rows are read in windows of ``buffer_size``, and each window is planned as ``plan_batches`` plans an epoch. Only one
    window is held at a time, never the whole data set, while Ray fetches the next. Larger windows pad less; each ends
    with at most one batch that is not full (a few with a size ladder or buckets on two axes).

    ``map_batches`` runs a function on planned batches in Ray's workers, ``iter_batches`` brings them to this process.
    The order of the rows changes; keep a column that names them.

    Args:
        dataset: a ``ray.data.Dataset``; or, only for ``iter_batches``, a shard from ``ray.train.get_dataset_shard``.
            Shards may have unequal numbers of batches.
        budget: what a batch may cost.
        length_of: the name of a column that holds lengths (integers), or lists to be counted; several names for
            several axes; or a function from a row, a dict, to its length or lengths.
        buffer_size: how many rows are planned together.
        grouping: as for ``plan_batches``; ``Packed`` is refused, since rows of a column cannot be joined.
        shuffle: this and the other options are as for ``plan_batches``; ``oversize="truncate"`` is refused.

    Returns:
        The planned data set; nothing is read yet.

    Example::

        planned = plan_dataset(ray.data.read_parquet(path), bw.MaxTokens(16_384), length_of="input_ids")
        planned.map_batches(Embed, num_gpus=1, concurrency=2).write_parquet(out)
    """
    if not hasattr(dataset, "iter_batches"):
        raise ArgumentError(f"dataset must be a ray.data.Dataset or a shard of one, got {type(dataset).__name__}")
    settings = PlanSettings.of(locals(), balance_over=1)  # nothing is divided over ranks here
    if grouping.row_capacity is not None:
        raise ArgumentError(f"{grouping} joins rows, which columns cannot hold; use WindowSort or Buckets")
    if oversize == "truncate":
        raise ArgumentError('oversize="truncate" cannot cut rows; cut them before planning, or use "alone" or "drop"')
    if not callable(length_of) and not length_of:
        raise ArgumentError(f"length_of must be the name of a column, several names, or a function, got {length_of!r}")
    planner = WindowPlanner(length_of, check_budget(budget), settings)
    return PlannedDataset(dataset, as_whole("buffer_size", buffer_size, least=1), planner)


@final
@dataclass(frozen=True)
class PlannedDataset:
    """The batches of a Ray Data dataset, each within a budget; ``plan_dataset`` makes it.

    A batch is a dict from the names of columns to NumPy arrays. A column of lists is an array of objects.
    """

    dataset: Any
    buffer_size: int
    planner: WindowPlanner

    def iter_batches(
        self, *, epoch: int = 0, collate_fn: Callable[[Columns], Any] | None = None, prefetch_batches: int = 1
    ) -> Iterator[Any]:
        """Return one pass over the batches, in this process.

        Args:
            epoch: the number of the pass; each shuffles differently.
            collate_fn: turns a batch into what the loop receives.
            prefetch_batches: how many windows Ray fetches ahead; with 0, only one is held.
        """
        planner = replace(self.planner, epoch=as_whole("epoch", epoch, least=0))
        windows = self.dataset.iter_batches(
            batch_size=self.buffer_size, batch_format="numpy", prefetch_batches=prefetch_batches
        )
        batches = (batch for window in windows for batch in planner(window))
        return batches if collate_fn is None else map(collate_fn, batches)

    def __iter__(self) -> Iterator[Columns]:
        return self.iter_batches()

    def map_batches(self, fn: Callable[..., Any], **options: Any) -> Any:
        """Run a function on every planned batch, in Ray's tasks or actors.

        A task receives a window and calls the function batch by batch.

        Args:
            fn: takes a batch and returns a batch, or yields several; or a class of such objects, made once per actor.
            options: options of ``Dataset.map_batches``: ``num_gpus``, ``concurrency``, ``fn_constructor_args``, …;
                ``batch_size`` and ``batch_format`` are decided here.

        Returns:
            The data set of the function's results.
        """
        decided = sorted(options.keys() & {"batch_size", "batch_format"})
        if decided:
            raise ArgumentError(f"{', '.join(decided)} cannot be given: the budget and buffer_size decide")
        if not hasattr(self.dataset, "map_batches"):
            raise ArgumentError(f"{type(self.dataset).__name__} cannot be mapped; use iter_batches")
        planned = _planned_class(fn, self.planner) if isinstance(fn, type) else _planned_function(fn, self.planner)
        return self.dataset.map_batches(planned, batch_size=self.buffer_size, batch_format="numpy", **options)


@final
@dataclass(frozen=True)
class WindowPlanner:
    """Cuts a window of rows into batches within a budget.

    The random stream follows from the seed, the epoch and the lengths in the window. So a window gives the same batches
    wherever it is planned, and needs no number.
    """

    length_of: LengthOf
    budget: Budget
    settings: PlanSettings
    epoch: int = 0

    def __call__(self, window: Columns) -> Iterator[Columns]:
        """Yield the batches of a window."""
        lengths = as_lengths(lengths_in(window, self.length_of))
        if self.settings.oversize == "drop" and not fits(lengths, self.budget, self.settings).any():
            return
        epoch = (self.epoch << 32) | zlib.crc32(lengths.tobytes())
        for batch in plan_epoch(lengths, self.budget, self.settings, epoch):
            yield {name: column[batch] for name, column in window.items()}


def lengths_in(window: Columns, length_of: LengthOf) -> Any:
    """Return the length of every row in a window.

    >>> window = {"num_tokens": np.array([3, 5]), "pixels": np.zeros((2, 7))}
    >>> lengths_in(window, "num_tokens").tolist()
    [3, 5]
    >>> lengths_in(window, ("num_tokens", "pixels")).tolist()
    [[3, 7], [5, 7]]
    >>> lengths_in(window, lambda row: int(row["num_tokens"]) + 1)
    [4, 6]
    """
    if isinstance(length_of, str):
        return _column_lengths(window, length_of)
    if not callable(length_of):
        return np.stack([_column_lengths(window, name) for name in length_of], axis=1)
    num_rows = len(next(iter(window.values())))
    return [length_of({name: column[index] for name, column in window.items()}) for index in range(num_rows)]


def _column_lengths(window: Columns, name: str) -> npt.NDArray[Any]:
    """Return the integers of a column, or the lengths of its lists."""
    if name not in window:
        raise LengthsError(f"there is no column {name!r}; the columns are {', '.join(window)}")
    column = window[name]
    if column.ndim == 1 and column.dtype.kind in "iu":
        return column
    if column.ndim == 1 and not all(isinstance(value, np.ndarray | list | tuple) for value in column):
        raise LengthsError(
            f"column {name!r} holds neither integers nor lists; pass a function, e.g. "
            f"length_of=lambda row: len(row[{name!r}])"
        )
    return np.array([len(value) for value in column])


def _planned_function(fn: Callable[[Columns], Any], planner: WindowPlanner) -> Callable[[Columns], Iterator[Any]]:
    if not callable(fn) or inspect.iscoroutinefunction(fn):
        raise ArgumentError(f"fn must be a plain function of a batch, or a class of such objects, got {fn!r}")

    def run(window: Columns, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for batch in planner(window):
            result = fn(batch, *args, **kwargs)
            if inspect.isgenerator(result):
                yield from result
            else:
                yield result

    run.__name__ = getattr(fn, "__name__", type(fn).__name__)  # what Ray shows for the stage
    return run


def _planned_class(kind: type, planner: WindowPlanner) -> type:
    def start(self: Any, *args: Any, **kwargs: Any) -> None:
        self.run = _planned_function(kind(*args, **kwargs), planner)

    def call(self: Any, window: Columns, *args: Any, **kwargs: Any) -> Iterator[Any]:
        yield from self.run(window, *args, **kwargs)

    return type(kind.__name__, (), {"__init__": start, "__call__": call})
