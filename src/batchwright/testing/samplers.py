"""The contract of a batch sampler, checked on several numbers of ranks."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from .._checks import as_whole
from .._lengths import as_lengths
from ..plan import Budget

MakeSampler = Callable[..., Any]
Batches = list[list[Any]]  # a batch is a list of indices, or of rows of them


def check_batch_sampler(
    make_sampler: MakeSampler,
    *,
    num_examples: int,
    lengths: npt.ArrayLike | None = None,
    budget: Budget | None = None,
    world_sizes: Sequence[int] = (1, 2, 3, 8),
) -> None:
    """Check that a batch sampler keeps its contract, or raise an AssertionError that names the broken rule.

    The rules:

    - every index comes once per epoch, and no batch exceeds the budget;
    - the order depends only on the seed and the epoch, not on what was iterated before;
    - a loop that is left early starts its epoch again, and two iterators do not disturb each other;
    - every rank takes the same number of steps, and ``len()`` is exact;
    - a state saved at the start, in the middle or at the end survives JSON and resumes there, also on another
      number of ranks;
    - a sampler can be pickled.

    Args:
        make_sampler: called as ``make_sampler(rank=…, world_size=…)``; each call returns a fresh sampler over the same
            data with the same seed.
        num_examples: the indices are ``range(num_examples)``.
        lengths: the length of each example; needed with ``budget``.
        budget: the budget that every batch must keep, padded as ``sampler.pad_to`` says, or to the longest example.
        world_sizes: the numbers of ranks to try.

    >>> import batchwright as bw
    >>> make = lambda rank, world_size: bw.BatchSampler([3, 1, 2], bw.MaxTokens(4), rank=rank, world_size=world_size)
    >>> check_batch_sampler(make, num_examples=3, lengths=[3, 1, 2], budget=bw.MaxTokens(4))
    """
    num_examples = as_whole("num_examples", num_examples, least=1)
    world_sizes = [as_whole("world_sizes", world_size, least=1) for world_size in world_sizes]
    for world_size in world_sizes:
        ranks = _run_ranks(make_sampler, world_size)
        _check_equal_steps(ranks, world_size)
        _check_every_index_once(ranks, num_examples, world_size)
        if budget is not None and lengths is not None:
            _check_budget(make_sampler(rank=0, world_size=world_size), ranks, as_lengths(lengths), budget)
    _check_order_is_fixed(make_sampler)
    _check_order_does_not_depend_on_iteration(make_sampler)
    _check_two_iterators(make_sampler)
    _check_pickles(make_sampler)
    _check_resume(make_sampler)
    for old, new in zip(world_sizes, [*world_sizes[1:], world_sizes[0]], strict=True):
        _check_elastic_resume(make_sampler, num_examples, old, new)


def _flat(batch: Iterable[Any]) -> list[int]:
    """Return the examples of a batch, which may hold packed rows."""
    return list(chain.from_iterable(item if isinstance(item, list) else [item] for item in batch))


def _epoch(sampler: Any, num: int | None = None) -> Batches:
    return [_flat(batch) for batch in islice(sampler, num)]


def _run_ranks(make_sampler: MakeSampler, world_size: int) -> list[Batches]:
    samplers = [make_sampler(rank=rank, world_size=world_size) for rank in range(world_size)]
    announced = [len(sampler) for sampler in samplers]
    ranks = [list(sampler) for sampler in samplers]
    for rank, (batches, length) in enumerate(zip(ranks, announced, strict=True)):
        assert len(batches) == length, (
            f"len() is exact: rank {rank} of {world_size} announced {length} batches and gave {len(batches)}"
        )
    return ranks


def _check_equal_steps(ranks: list[Batches], world_size: int) -> None:
    steps = [len(batches) for batches in ranks]
    assert len(set(steps)) == 1, f"every rank takes the same number of steps: got {steps} on {world_size} ranks"
    assert all(batch for batches in ranks for batch in batches), "no batch is empty"


def _check_every_index_once(ranks: list[Batches], num_examples: int, world_size: int) -> None:
    given = [index for batches in ranks for batch in batches for index in _flat(batch)]
    strange = [index for index in given if not 0 <= index < num_examples]
    assert not strange, f"indices are from 0 to {num_examples - 1}: got {strange[:5]}"
    counts = np.bincount(np.array(given, dtype=np.int64), minlength=num_examples)
    lost = np.flatnonzero(counts == 0).tolist()
    assert not lost, f"every index appears once per epoch: {len(lost)} lost on {world_size} ranks, e.g. {lost[:5]}"
    num_repeated = len(given) - num_examples
    twice = np.flatnonzero(counts > 1).tolist()
    assert num_repeated < world_size, (
        f"every index appears once per epoch: {twice[:5]} repeated on {world_size} ranks, "
        f"{num_repeated} times in all; fewer than {world_size} are allowed, to fill the last step"
    )


def _check_budget(sampler: Any, ranks: list[Batches], lengths: npt.NDArray[np.int32], budget: Budget) -> None:
    pad_to = getattr(sampler, "pad_to", None)
    for batch in chain.from_iterable(ranks):
        # An item is an example, or a packed row as long as its examples together.
        items = np.array([lengths[item].sum(axis=0) if isinstance(item, list) else lengths[item] for item in batch])
        padded = np.asarray(pad_to(items)) if pad_to is not None else items.max(axis=0)
        share = float(budget.fraction(np.array([len(batch)]), padded[None])[0])
        assert share <= 1 + 1e-9, (
            f"the budget is kept: {len(batch)} items padded to {padded.tolist()} use {share:.3f} of {budget}"
        )


def _check_order_is_fixed(make_sampler: MakeSampler) -> None:
    first = _epoch(make_sampler(rank=0, world_size=1))
    second = _epoch(make_sampler(rank=0, world_size=1))
    assert first == second, "the same seed and epoch give the same order: two fresh samplers differ"


def _check_order_does_not_depend_on_iteration(make_sampler: MakeSampler) -> None:
    walked, jumped, left, again = (make_sampler(rank=0, world_size=1) for _ in range(4))
    first = _epoch(walked)
    jumped.set_epoch(1)
    following = _epoch(walked)
    assert following == _epoch(jumped), (
        "the order depends on the epoch, not on how often the sampler was iterated: "
        "exhausting epoch 0 and set_epoch(1) differ"
    )
    _epoch(left, 1)
    assert first == _epoch(left), (
        "only a finished epoch leads to the next: a loop that is left early starts its epoch again"
    )
    _epoch(again, 1)
    again.set_epoch(1)
    assert following == _epoch(again), "an iterator left in the middle does not change the order of other epochs"


def _check_two_iterators(make_sampler: MakeSampler) -> None:
    expected = _epoch(make_sampler(rank=0, world_size=1))
    sampler = make_sampler(rank=0, world_size=1)
    first, second = iter(sampler), iter(sampler)
    pairs = [(_flat(a), _flat(b)) for a, b in zip(first, second, strict=False)]
    assert [a for a, _ in pairs] == expected, "two iterators at once do not disturb each other: the first changed"
    assert [b for _, b in pairs] == expected, "two iterators at once do not disturb each other: the second changed"


def _check_pickles(make_sampler: MakeSampler) -> None:
    sampler = make_sampler(rank=0, world_size=1)
    try:
        copy = pickle.loads(pickle.dumps(sampler))
    except Exception as error:
        raise AssertionError(f"a sampler can be pickled, because workers need a copy: {error}") from error
    assert _epoch(copy) == _epoch(sampler), "a pickled sampler gives the same batches, because workers need a copy"


def _check_resume(make_sampler: MakeSampler) -> None:
    full = _epoch(make_sampler(rank=0, world_size=1))
    for num in sorted({0, len(full) // 2, len(full)}):
        state = _state_after(make_sampler(rank=0, world_size=1), num)
        resumed = make_sampler(rank=0, world_size=1)
        resumed.load_state_dict(state)
        announced, rest = len(resumed), _epoch(resumed)
        assert rest == full[num:], (
            f"resuming after {num} of {len(full)} batches continues there: got {len(rest)} more batches, "
            f"the first is {rest[:1]}, expected {full[num : num + 1]}"
        )
        assert announced == len(rest), (
            f"len() is exact: after resuming it announced {announced} batches and gave {len(rest)}"
        )


def _state_after(sampler: Any, num: int) -> Any:
    iterator = iter(sampler)  # held: a generator that is dropped runs its finally clause
    list(islice(iterator, num))
    state = sampler.state_dict()
    try:
        survived = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise AssertionError(f"the state survives JSON: {error} in {state}") from error
    assert survived == state, f"the state survives JSON: {state} became {survived}"
    return survived


def _check_elastic_resume(make_sampler: MakeSampler, num_examples: int, old: int, new: int) -> None:
    samplers = [make_sampler(rank=rank, world_size=old) for rank in range(old)]
    steps = len(samplers[0]) // 2
    before = [_epoch(sampler, steps) for sampler in samplers]
    state = _state_after(make_sampler(rank=0, world_size=old), steps)
    after = []
    for rank in range(new):
        sampler = make_sampler(rank=rank, world_size=new)
        sampler.load_state_dict(state)
        after.append(_epoch(sampler))
    seen = {index for batches in before + after for batch in batches for index in batch}
    num_given = sum(len(batch) for batches in before + after for batch in batches)
    lost = sorted(set(range(num_examples)) - seen)
    assert not lost, f"resuming on {new} ranks after {old} loses nothing: {len(lost)} lost, e.g. {lost[:5]}"
    assert num_given - num_examples < new, (
        f"resuming on {new} ranks after {old} repeats nothing: {num_given - num_examples} examples repeated"
    )
