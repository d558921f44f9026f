"""Where ``regroup`` reads its examples: a loader, in an order that belongs to the epoch and can be begun again."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar, final

import numpy as np

from ..._checks import check_same
from ...errors import ArgumentError, StateMismatchError
from .planned import BatchSampler
from .resizable import ResizableBatchSampler

Example = TypeVar("Example")
# States of version 1 are of plans with runs of 64 batches.
_EARLIER_RUNS = 64


@final
class Source(Generic[Example]):
    """The examples of a loader, chunk by chunk, in an order that belongs to the epoch.

    Samplers with ``set_epoch`` are told the epoch. Where the sampler draws from a generator, the state of the
    generator before the first chunk is kept, and the epoch begins from it again.
    """

    def __init__(self, loader: Iterable[Sequence[Example]], *, rank: int, world_size: int) -> None:
        if not isinstance(loader, Iterable):
            raise ArgumentError(f"loader must be iterable, got {type(loader).__name__}")
        if getattr(getattr(loader, "collate_fn", None), "__name__", "") == "default_collate":
            raise ArgumentError("the loader must yield lists of examples, it has the default collate; collate_fn=list")
        self._loader = loader
        self._batch_sampler: Any = getattr(loader, "batch_sampler", None)
        self._sampler: Any = getattr(self._batch_sampler, "sampler", None)
        self._draws: tuple[int, str] | None = None  # an epoch, and the generator before its first chunk
        self._order: tuple[int, Mapping[str, Any]] | None = None  # an epoch, and the start of it in our sampler
        _check_ranks(self._batch_sampler, self._sampler, rank, world_size)

    def __repr__(self) -> str:
        return type(self._loader).__name__

    def open(self, epoch: int, num_consumed: int) -> Iterator[Sequence[Example]]:
        """Begin an epoch after the first ``num_consumed`` of its examples."""
        for part in (self._loader, self._batch_sampler, self._sampler, getattr(self._loader, "dataset", None)):
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)  # type: ignore[union-attr]
        self._draw_again(epoch)
        skip = seek(self._batch_sampler, epoch, self.order_at(epoch), num_consumed)
        for chunk in self._loader:
            if not isinstance(chunk, list | tuple):
                raise ArgumentError(
                    f"the loader must yield lists of examples, got {type(chunk).__name__}; pass collate_fn=list"
                )
            yield chunk[skip:]
            skip = max(0, skip - len(chunk))
        if skip:
            raise StateMismatchError(
                f"the loader ended {skip} examples before the place of the state, {num_consumed} examples; "
                "give the same data"
            )

    def check_repeatable(self) -> None:
        """Refuse a loader that cannot give the order of an epoch again, where that can be seen."""
        if not getattr(self._loader, "in_order", True):
            raise ArgumentError(
                "the loader has in_order=False, so its order cannot be repeated; leave it at True to resume"
            )
        if hasattr(self._sampler, "generator") and self._sampler.generator is None:
            raise ArgumentError(
                f"the order of a {type(self._sampler).__name__} without a generator cannot be repeated; pass "
                "generator=torch.Generator() with a seed, or a sampler with set_epoch, to resume"
            )

    def generator_at(self, epoch: int) -> str | None:
        """Return the state of the sampler's generator before the first chunk of an epoch, None without one."""
        generator = getattr(self._sampler, "generator", None)
        if generator is None:
            return None
        if self._draws is not None and self._draws[0] == epoch:
            return self._draws[1]
        return base64.b64encode(bytes(generator.get_state().tolist())).decode()

    def set_generator(self, epoch: int, state: str | None) -> None:
        """Let an epoch begin from a saved state of the sampler's generator."""
        has_generator = getattr(self._sampler, "generator", None) is not None
        if has_generator != (state is not None) or not isinstance(state, str | None):
            raise StateMismatchError(
                f"the state was saved {'with' if isinstance(state, str) else 'without'} a generator of the sampler, "
                f"here there is {'one' if has_generator else 'no generator'}; use the same loader"
            )
        if state is not None:
            self._check_generator(state)
        self._draws = None if state is None else (epoch, state)

    def order_at(self, epoch: int) -> dict[str, Any] | None:
        """Return the state of a ``BatchSampler`` at the start of an epoch, None for any other sampler."""
        if not isinstance(self._batch_sampler, BatchSampler):
            return None
        if self._order is not None and self._order[0] == epoch:
            return dict(self._order[1])
        return self._batch_sampler.start_of(epoch)

    def earlier_order(self, epoch: int) -> dict[str, Any] | None:
        """Return the same under the rules of the first version."""
        order = self.order_at(epoch)
        if order is None:
            return None
        runs = self._batch_sampler.settings.balance_over or _EARLIER_RUNS
        return {**order, "version": 1, "settings": {**order["settings"], "balance_over": runs}}

    def check_order(self, epoch: int, order: Any) -> None:
        """Refuse the order of another sampler, or of another epoch."""
        is_planned = isinstance(self._batch_sampler, BatchSampler)
        if is_planned != isinstance(order, Mapping):
            raise StateMismatchError(
                f"the state was saved {'without' if is_planned else 'with'} a BatchSampler in the loader, "
                f"here there is {'one' if is_planned else 'none'}; use the same loader"
            )
        if is_planned:
            check_same("epoch", self._batch_sampler.read_state(order)[0], epoch)

    def set_order(self, epoch: int, order: Mapping[str, Any] | None) -> None:
        """Let an epoch have a saved order."""
        self._order = None if order is None else (epoch, order)

    def _check_generator(self, state: str) -> None:
        """Refuse a state that the generator would not take when the epoch begins; the generator stays as it is."""
        generator = self._sampler.generator
        before = generator.get_state()
        try:
            generator.set_state(before.new_tensor(list(base64.b64decode(state, validate=True))))
        except (RuntimeError, TypeError, ValueError) as error:
            raise StateMismatchError(f"the state holds no valid generator of the sampler: {error}") from error
        finally:
            generator.set_state(before)

    def _draw_again(self, epoch: int) -> None:
        state = self.generator_at(epoch)
        if state is None:
            return
        if self._draws is not None and self._draws[0] == epoch:
            generator = self._sampler.generator
            generator.set_state(generator.get_state().new_tensor(list(base64.b64decode(state))))
        self._draws = (epoch, state)


def seek(batch_sampler: Any, epoch: int, order: Mapping[str, Any] | None, num_examples: int) -> int:
    """Move one of our samplers to the last batch that begins at or before this many examples.

    Args:
        batch_sampler: that of a loader.
        epoch: the epoch to begin.
        order: the state of a ``BatchSampler`` at the start of the epoch; None for others.
        num_examples: how many were consumed.

    Returns:
        How many examples are still to be skipped; all of them where the sampler is not ours.
    """
    if not _is_ours(batch_sampler):
        return num_examples
    batch_sampler.set_epoch(epoch)
    state = order or {**batch_sampler.state_dict(), "position": 0}
    batch_sampler.load_state_dict(state)
    start = _last_start(batch_sampler, num_examples)
    batch_sampler.load_state_dict({**state, "position": start})
    return num_examples - start


def _is_ours(batch_sampler: Any) -> bool:
    return isinstance(batch_sampler, BatchSampler | ResizableBatchSampler)


def _last_start(batch_sampler: BatchSampler | ResizableBatchSampler, num_examples: int) -> int:
    if isinstance(batch_sampler, ResizableBatchSampler):
        return num_examples  # a batch may begin anywhere
    plan = batch_sampler.plan
    if plan.row_offsets is not None:  # the loader hands out rows, the plan counts the examples inside
        return 0
    return int(plan.offsets[np.searchsorted(plan.offsets, num_examples, side="right") - 1])


def _check_ranks(batch_sampler: Any, sampler: Any, rank: int, world_size: int) -> None:
    if _is_ours(batch_sampler) and max(world_size, batch_sampler.world_size) > 1:
        raise ArgumentError(
            f"regroup over ranks needs the same number of examples on every rank, which {type(batch_sampler).__name__} "
            "does not promise; use DataLoader(sampler=DistributedSampler(dataset), batch_size=32, collate_fn=list)"
        )
    for part in (batch_sampler, sampler):
        told = (rank, world_size)
        found = (getattr(part, "rank", rank), getattr(part, "num_replicas", world_size))
        if found != told:
            raise ArgumentError(
                f"the loader is sampled for rank {found[0]} of {found[1]}, regroup was told {told[0]} of {told[1]}; "
                "pass the same rank and world_size"
            )
