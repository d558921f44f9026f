"""Inference: run a function on a batch in pieces that fit, with results in input order."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..._containers import rebuilt
from ..._tree import CannotCutError, Rows, leaves
from ...errors import ArgumentError, DoesNotFitError
from ...plan import Budget
from ..graphs._comparing import NEAR_ROUGHLY
from ..graphs._functions import is_rough
from ..graphs._rotary import renew, rotary_of, sides_of
from ..memory.monitor import MemoryMonitor
from ..oom import Snapshot, free_memory, is_out_of_memory
from ._limits import Limit, Meter, first_limit
from ._sharing import are_near, by_number

# Of an example with padding and without: what rounding never reached, in single precision and of 32 layers in bfloat16.
_NEAR, _NEAR_HALF = 1e-4, 0.1
Piece: TypeAlias = Callable[[int, int], Any]  # the examples from one place up to another


def oom_safe(fn: Callable[[Any], Any], batch: Any, *, merge: Callable[[list[Any]], Any] | None = None) -> Any:
    """Run ``fn(batch)`` for inference; if memory runs out, run halves, and halves of halves.

    A batch that fits runs once, and its result is returned as it is. Pieces keep the order. The random state of a
    failed attempt is put back, so the result is the same as if the run had begun with the smaller pieces. Any other
    error is raised unchanged. ``fn`` runs under ``torch.inference_mode``; ``.clone()`` a result to train on it.

    Args:
        fn: takes a batch and returns one result per example: tensors, arrays, lists, or mappings, tuples and
            dataclasses of these.
        batch: a list of examples, or nested fields with one row per example. Give a collated batch that is a list as a
            tuple. A batch that is neither runs whole, and if it does not fit, the error says why it is not cut.
        merge: joins the results of pieces; None joins tensors along their first dimension and lists end to end. For
            token ids of unequal width use ``functools.partial(merge_padded, pad_value=0)``.

    Returns:
        The result of the whole batch.

    >>> def fn(x):
    ...     if len(x) > 2:
    ...         raise torch.OutOfMemoryError("CUDA out of memory.")
    ...     return {"double": 2 * x}
    >>> oom_safe(fn, torch.arange(5))
    {'double': tensor([0, 2, 4, 6, 8])}
    """
    num, piece, describe = _divisible(batch)
    pieces = run_in_pieces(fn, piece, num, describe=describe)
    if len(pieces.results) == 1:
        return pieces.results[0]
    with torch.inference_mode():
        return merge(pieces.results) if merge is not None else _merged(pieces.results, counts=pieces.counts)


@final
class _Writing:
    """Counts writes to the tensors of a batch: after one, a second attempt would read other values."""

    def __init__(self, batch: Any) -> None:
        self._tensors = [tensor for tensor in leaves(batch) if not tensor.is_inference()]
        self._before = self._versions()

    def _versions(self) -> list[int]:
        return [tensor._version for tensor in self._tensors]

    def check(self) -> None:
        """Refuse a second attempt after a write."""
        if self._versions() != self._before:
            raise ArgumentError(
                "fn wrote to tensors of its batch and then ran out of memory, so a second attempt would compute "
                "something else; have fn work on copies (x = x * 2, not x.mul_(2))"
            )


def merge_padded(results: list[Any], *, pad_value: float) -> Any:
    """Join the results of pieces as ``oom_safe`` does, and pad tensors of unequal width on the right.

    Args:
        results: those of the pieces, in order.
        pad_value: fills the second dimension up to the widest.

    Returns:
        The result of the whole batch.

    >>> merge_padded([torch.tensor([[1, 2, 3]]), torch.tensor([[4]])], pad_value=0).tolist()
    [[1, 2, 3], [4, 0, 0]]
    """
    return _merged(results, join=partial(_join_padded, pad_value=pad_value))


class Pieces(NamedTuple):
    """Results in order, how many examples fitted at once, and how many each result is of."""

    results: list[Any]
    size: int
    counts: list[int]


def run_in_pieces(
    fn: Callable[[Any], Any],
    piece: Piece,
    num: int,
    *,
    describe: Callable[[int], str],
    give_way: Callable[[], bool] = lambda: False,
) -> Pieces:
    """Run ``num`` examples at once, or in near-equal pieces of at most half of what ran out of memory last.

    Args:
        fn: takes a piece.
        piece: returns the examples from one place up to another.
        num: the number of examples.
        describe: names an example, for the error about one that does not fit on its own.
        give_way: gives memory back where some ran out, and says whether the same piece may fit now.
    """
    results: list[Any] = []
    counts: list[int] = []
    place, size = 0, num
    while place < num:
        stop = place + _near_equal(num - place, size)
        devices = _devices()
        snapshot, part = Snapshot(None, devices), piece(place, stop)
        writing = _Writing(part)
        failure = _attempt(fn, part, results)
        if failure is None:
            counts.append(stop - place)
            place = stop
            continue
        # Outside the except block: inside, the traceback still holds what the attempt had allocated.
        has_more = give_way()
        free_memory(devices)
        snapshot.restore()
        writing.check()
        if has_more:
            continue
        if stop - place == 1:
            raise DoesNotFitError(_complaint(describe(place), failure))
        size = -(-(stop - place) // 2)
    return Pieces(results, size, counts)


def run_growing(
    run: Callable[[list[int]], int],
    lengths: npt.NDArray[np.int32],
    places: npt.NDArray[np.int64],
    *,
    budget: Budget | None,
    memory: MemoryMonitor | None,
    device: torch.device,
) -> None:
    """Run examples, the longest first, in batches of a budget, or in such that grow as far as memory allows.

    Args:
        run: takes the places of a batch, and returns how many of its examples fitted at once.
        lengths: of all examples.
        places: of those to run.
        budget: what a batch may cost; None lets batches grow.
        memory: reads the peak of every batch that runs without a budget; None reads that of a CUDA device.
        device: of the model.
    """
    meter = Meter.of(budget, memory, device)
    limit: Limit = first_limit(budget, int(lengths[places].max()), device, meter)
    waiting = places
    while len(waiting):
        plan, done = limit.plan(lengths[waiting], 1), []
        for number in np.argsort(-plan.shapes[:, 1], kind="stable"):
            batch = waiting[plan[number]]
            meter.begin()
            num_fitting = run(batch.tolist())
            done.append(batch)
            before, limit = limit, limit.after(plan.shapes[number].tolist(), num_fitting, meter)
            if limit != before:
                break
        waiting = np.setdiff1d(waiting, np.concatenate(done))


def run_alike(
    run: Callable[[list[int]], int], lengths: npt.NDArray[np.int32], model: nn.Module, *, may_pad: bool, **options: Any
) -> None:
    """Run all examples as ``run_growing`` does, in batches of such that do not change each other's results.

    Args:
        run: as for ``run_growing``.
        lengths: of all examples.
        model: where long texts have other positions, they do not share a batch.
        may_pad: whether padding leaves results as they are; else batches are of one length.
        options: of ``run_growing``.
    """
    rotary, numbers = rotary_of(model.modules()), lengths[:, 0].tolist()
    for places in sides_of(rotary, numbers) if may_pad else by_number(numbers):
        renew(rotary)
        run_growing(run, lengths, np.array(places), **options)


def is_rounding(plain: Tensor, padded: Tensor, model: nn.Module) -> bool:
    """Say whether the results of an example alone and with padding differ by rounding only.

    Args:
        plain: of shape ``(1, width)``.
        padded: the same.
        model: in half precision rounding is coarser.
    """
    weights = list(model.parameters())
    is_half = any(value.dtype in (torch.float16, torch.bfloat16) for value in weights)
    near = _NEAR_HALF if is_half else NEAR_ROUGHLY if any(is_rough(value.device) for value in weights[:1]) else _NEAR
    return bool(are_near(padded, plain, near).all())


def _near_equal(num: int, size: int) -> int:
    return -(-num // -(-num // size))


def _attempt(fn: Callable[[Any], Any], part: Any, results: list[Any]) -> str | None:
    """Add the result of a piece, or return what the error says about memory."""
    try:
        with torch.inference_mode():
            results.append(fn(part))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return textwrap.shorten(str(error), width=160, placeholder=" …")
    return None


def _devices() -> list[torch.device]:
    """Return the devices whose random state and memory an attempt may have touched."""
    if torch.cuda.is_initialized():
        return [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
    return [torch.device("mps")] if torch.backends.mps.is_available() else []


def _divisible(batch: Any) -> tuple[int, Piece, Callable[[int], str]]:
    """Return the number of examples, what takes some, and what names one; a batch that cannot be cut counts as one."""
    if isinstance(batch, list | np.ndarray):
        if len(batch) == 0:
            raise ArgumentError("the batch is empty; give at least one example")
        return len(batch), lambda start, stop: batch[start:stop], lambda place: _described(place, batch[place])
    try:
        rows = Rows(batch)
    except CannotCutError as error:
        text = f"the batch, which cannot be cut because {error},"
        return 1, lambda start, stop: batch, lambda place: text
    describe = lambda place: _described(place, rows.take([place]))  # noqa: E731
    return rows.num, lambda start, stop: rows.take(range(start, stop)), describe


def _merged(
    results: list[Any], *, join: Callable[[list[Tensor]], Tensor] | None = None, counts: Sequence[int] | None = None
) -> Any:
    first = results[0]
    if any(type(result) is not type(first) for result in results):
        raise _unmergeable(f"results of types {sorted({type(result).__name__ for result in results})}")
    if counts is not None and isinstance(first, Tensor | np.ndarray | list):
        _check_counts(results, counts)
    if isinstance(first, Tensor):
        return (join or _join)(results)
    if isinstance(first, np.ndarray):
        return np.concatenate(results)
    if isinstance(first, list):
        return [item for result in results for item in result]
    merged = partial(_merged, join=join, counts=counts)
    if isinstance(first, Mapping):
        return rebuilt(first, _by_name([dict(result) for result in results], merged))
    if isinstance(first, tuple):
        values = [merged(list(column)) for column in _columns(results)]
        return type(first)(*values) if hasattr(first, "_fields") else tuple(values)
    if dataclasses.is_dataclass(first) and not isinstance(first, type):
        return dataclasses.replace(first, **_by_name([_fields(result) for result in results], merged))
    if first is None:
        return None
    raise _unmergeable(type(first).__name__)


def _check_counts(results: list[Any], counts: Sequence[int]) -> None:
    """Refuse results without a row per example, such as a mean of the batch, or of layers before examples."""
    lengths = [len(result) if not hasattr(result, "ndim") or result.ndim else 0 for result in results]
    if 0 in lengths:
        return  # single numbers, which are refused as such, and nothing at all
    shares = {length / count for length, count in zip(lengths, counts, strict=True)}
    if len(shares) > 1 or not shares.pop().is_integer():
        raise _unmergeable(f"results of {lengths} rows from pieces of {counts} examples")


def _by_name(results: list[dict[Any, Any]], merged: Callable[[list[Any]], Any]) -> dict[Any, Any]:
    if any(result.keys() != results[0].keys() for result in results):
        raise _unmergeable(f"mappings with the keys {[sorted(map(str, result)) for result in results]}")
    return {name: merged([result[name] for result in results]) for name in results[0]}


def _columns(results: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    if len({len(result) for result in results}) > 1:
        raise _unmergeable(f"tuples of {sorted({len(result) for result in results})} parts")
    return list(zip(*results, strict=True))


def _fields(result: Any) -> dict[str, Any]:
    return {item.name: getattr(result, item.name) for item in dataclasses.fields(result)}


def _join(tensors: Sequence[Tensor]) -> Tensor:
    shapes = {tensor.shape[1:] for tensor in tensors}
    if tensors[0].ndim == 0:
        raise _unmergeable("single numbers")
    if len(shapes) > 1:
        raise _unmergeable(f"tensors of shapes {[tuple(tensor.shape) for tensor in tensors]}")
    return torch.cat(list(tensors))


def _join_padded(tensors: Sequence[Tensor], *, pad_value: float) -> Tensor:
    if any(tensor.ndim < 2 for tensor in tensors):
        return _join(tensors)
    width = max(tensor.shape[1] for tensor in tensors)
    # F.pad counts dimensions from the last.
    before = [0, 0] * (tensors[0].ndim - 2)
    return _join([F.pad(tensor, [*before, 0, width - tensor.shape[1]], value=pad_value) for tensor in tensors])


def _unmergeable(what: str) -> ArgumentError:
    return ArgumentError(
        f"the results of pieces cannot be joined: {what}; return only what you need from fn, give "
        "merge=partial(merge_padded, pad_value=…) for unequal widths, or a merge= of your own"
    )


def _described(place: int, part: Any) -> str:
    tensors = list(leaves(part))
    if not tensors:
        return f"example {place} of the batch"
    shapes = [tuple(tensor.shape) for tensor in tensors]
    return f"example {place} of the batch with tensors {shapes}, {sum(tensor.nbytes for tensor in tensors):,} bytes,"


def _complaint(what: str, failure: str) -> str:
    free = ""
    for device in _devices():
        if device.type == "cuda":
            available, total = torch.cuda.mem_get_info(device)
            free += f"{available:,} of {total:,} bytes are free on {device}; "
    return f"{what} does not fit on its own; {free}{failure.rstrip('.')}. Shorten it, or use a smaller model"
