"""What ``budget="auto"`` needs besides the search: a cache on disk, ranks that agree, a line that tells the result."""

from __future__ import annotations

import copy
import json
import logging
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, final

import numpy as np
import torch
import torch.distributed as dist

from .._files import make_folder, write_atomic
from .._types import MAX_INT32, IntArray
from ..errors import ArgumentError, BatchwrightError
from ..plan.budget import Budget, MaxTokens
from ..step.calibration.finding import ALONE, Agreement, limit_bytes
from ..step.calibration.found import FoundBudget
from ..step.memory.monitor import MemoryMonitor
from ._contents import digest
from ._describing import describe_device
from ._failures import raise_together

logger = logging.getLogger(__name__)

AUTO = "auto"
BudgetChoice: TypeAlias = "Budget | Literal['auto']"

_KIND, _VERSION = "batchwright.budget", 4
# With this much more memory than there was, larger batches have to be measured.
_MORE_MEMORY = 1.1
# What files of any content, folders of any kind and users without a home can raise.
_UNREADABLE = (
    *(OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, BatchwrightError),
)


def is_auto_budget(budget: Any) -> bool:
    """Say whether a budget is to be found; refuse any other text."""
    if isinstance(budget, str) and budget != AUTO:
        raise ArgumentError(f"budget must be a budget such as MaxTokens(8192), or 'auto', got {budget!r}")
    return isinstance(budget, str)


def cache_folder() -> Path:
    """Return where budgets are kept: ``$XDG_CACHE_HOME/batchwright``, or ``~/.cache/batchwright``."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # A relative path is to be ignored, says the specification.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "batchwright"


def agreement_of(device: torch.device, world_size: int) -> Agreement:
    """Return how the ranks of the default process group agree."""
    if world_size == 1:
        return ALONE

    def largest(values: list[float]) -> list[float]:
        wide = torch.float32 if device.type == "mps" else torch.float64
        packed = torch.tensor(values, dtype=wide, device=device)
        dist.all_reduce(packed, op=dist.ReduceOp.MAX)
        return packed.tolist()

    return Agreement(largest, lambda error: raise_together(error, device, world_size=world_size))


def monitor_of(device: torch.device, given: MemoryMonitor | None) -> MemoryMonitor | None:
    """Return what reads memory; on a CPU nothing does unless it is given, as running out there ends the process."""
    return given if given is not None or device.type == "cpu" else MemoryMonitor(device)


def with_whole_groups(budget: FoundBudget, lengths: IntArray, groups: Any) -> FoundBudget:
    """Return a budget that holds the largest group as far as memory allows: throughput parts no group.

    Args:
        budget: what was found on examples.
        lengths: of the examples, as padded.
        groups: of the settings of a plan; None if examples stand for themselves.
    """
    if groups is None:
        return budget
    groups.check(len(lengths))
    largest = groups.longest(lengths).sum(axis=1, dtype=np.int64) * groups.sizes
    tokens, most = min(int(largest.max(initial=0)), MAX_INT32), budget.tokens
    if most is not None and budget.memory is None and not budget.bounds:  # nothing has run out of memory
        most = MaxTokens(max(int(most.limit), tokens))
    return replace(budget, least_tokens=max(budget.least_tokens, tokens), tokens=most)


def own_collator(collate: Any) -> Any:
    """Return a collator whose random numbers and counts do not move on; the collator itself if it cannot be copied."""
    try:
        return copy.deepcopy(collate)
    except Exception:  # each type has its own way to refuse
        return collate


# The cache


def read_cached(key: Mapping[str, Any], limit: int | None, longest: IntArray) -> FoundBudget | None:
    """Return the budget that was found under a key, None if there is none that can be used.

    Args:
        key: as JSON values.
        limit: the memory there is now; with much more than there was, the budget is found again.
        longest: padded lengths, ``(1, axes)``, which the budget must be able to tell the items of.
    """
    try:
        entry = json.loads(_path_of(key).read_text(encoding="utf-8"))
        if (entry["kind"], entry["version"], entry["key"]) != (_KIND, _VERSION, _plain(key)):
            return None
        before = entry["limit_bytes"]
        if entry["digest"] != _digest_of(before, entry["budget"]):
            logger.info("No budget was read from the cache: %s was changed after it was written", _path_of(key))
            return None
        if (before is None) != (limit is None) or (limit is not None and limit > _MORE_MEMORY * before):
            return None
        found = FoundBudget.from_json(json.dumps(entry["budget"])).within(limit)
        found.max_items(longest)  # numbers that nothing can be planned with are as good as none
        return found
    except FileNotFoundError:
        return None
    except _UNREADABLE as error:
        logger.info("No budget was read from the cache: %s", error)
        return None


def write_cached(key: Mapping[str, Any], limit: int | None, budget: FoundBudget) -> None:
    """Keep a budget under a key; a cache that cannot be written is no error."""
    content = json.loads(budget.to_json())
    entry = {"kind": _KIND, "version": _VERSION, "key": key, "limit_bytes": limit, "budget": content}
    try:
        make_folder(_path_of(key).parent)
        text = json.dumps({**entry, "digest": _digest_of(limit, content)}, indent=1)
        write_atomic(_path_of(key), text)
    except _UNREADABLE as error:
        logger.info("The budget is not kept: %s", error)


def _path_of(key: Mapping[str, Any]) -> Path:
    return cache_folder() / "budgets" / f"{digest(json.dumps(_plain(key), sort_keys=True))}.json"


def _digest_of(limit: Any, budget: Any) -> str:
    """Return what tells a changed file: numbers of a damaged one may be such that batches can be planned with them."""
    return digest(json.dumps([limit, budget], sort_keys=True))


def _plain(key: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps(key, sort_keys=True))


@final
class BudgetFinder:
    """Finds budgets: from this process, from the disk, or by a search; all ranks get the same one.

    Attributes:
        checkpoint: the folder that a training resumes from, None if it begins.
        evaluation: budgets without a backward pass.
    """

    def __init__(self) -> None:
        self.checkpoint: str | None = None
        self.evaluation: dict[Any, Budget] = {}  # by the longest lengths, and what is returned
        self._known: dict[str, FoundBudget] = {}

    def find(
        self,
        describe: Callable[[], Mapping[str, Any]],
        search: Callable[[], FoundBudget],
        *,
        device: torch.device,
        monitor: MemoryMonitor | None,
        lengths: IntArray,
        reserved_bytes: int,
        agreement: Agreement,
        world_size: int,
    ) -> tuple[FoundBudget, bool]:
        """Return a budget, and whether it was known. A collective.

        Args:
            describe: returns what the budget depends on, as JSON values, besides the devices. If it cannot, on any
                rank, the budget is neither read nor kept, as it may be that of another job.
            search: measures batches; a collective.
            device: of this rank.
            monitor: of its memory.
            lengths: of the examples, as padded.
            reserved_bytes: what training needs besides batches.
            agreement: of the ranks.
            world_size: number of ranks.
        """
        keys = _gather(_key_of(describe, device), world_size)
        if None in keys:
            return search(), False
        whole = {"world_size": world_size, "ranks": keys if any(one != keys[0] for one in keys) else keys[:1]}
        limit = limit_bytes(monitor, reserved_bytes, agreement)
        name = json.dumps([_plain(whole), limit])
        text = None
        if dist_rank(world_size) == 0:
            known = self._known[name] if name in self._known else read_cached(whole, limit, lengths.max(axis=0)[None])
            text = None if known is None else known.to_json()
        (text,) = _broadcast([text], world_size)
        is_known = text is not None
        found = search() if text is None else FoundBudget.from_json(text)
        self._known[name] = found
        if not is_known and dist_rank(world_size) == 0:
            write_cached(whole, limit, found)
        return found, is_known


def _key_of(describe: Callable[[], Mapping[str, Any]], device: torch.device) -> dict[str, Any] | None:
    """Return what a budget depends on, None if something in it does not show what it is."""
    try:
        return {**_plain(describe()), "device": describe_device(device)}
    except Exception as error:  # what is looked into is the user's, and raises what it likes
        logger.info("The budget is measured again at every start, as its key cannot be made: %s", error)
        return None


def dist_rank(world_size: int) -> int:
    """Return the rank of this process."""
    return 0 if world_size == 1 else dist.get_rank()


def _gather(value: Any, world_size: int) -> list[Any]:
    found = [value] * world_size
    if world_size > 1:
        dist.all_gather_object(found, value)
    return found


def _broadcast(values: list[Any], world_size: int) -> list[Any]:
    if world_size > 1:
        dist.broadcast_object_list(values, src=0)
    return values


# What is told


def tell(budget: FoundBudget, lengths: IntArray, *, how: str, is_shown: bool) -> None:
    """Log the budget in one line: how many examples of the median and the longest length, and what limits them."""
    order = np.argsort(lengths.sum(axis=1, dtype=np.int64), kind="stable")
    rows = lengths[order[[len(order) // 2, -1]]]
    shares = {row: _share_of(budget, row, len(lengths)) for row in dict.fromkeys(map(tuple, rows.tolist()))}
    reasons = list(dict.fromkeys(why for _, why in shares.values()))
    nums = [f"{num} examples of {' + '.join(map(str, row))} tokens" for row, (num, _) in shares.items()]
    line = f"budget='auto' ({how}): a batch is at most {' or '.join(nums)}, limited by {' and '.join(reasons)}"
    logger.info(line)
    if is_shown and sys.stderr is not None:
        print(line, file=sys.stderr)


def _share_of(budget: FoundBudget, row: tuple[int, ...], num_examples: int) -> tuple[int, str]:
    """Return how many examples of some lengths a batch may have, and why no more."""
    lengths = np.array([row])
    num = int(budget.max_items(lengths)[0])
    if num >= num_examples:
        return num_examples, "the data"
    if budget.memory is not None and num >= int(budget.memory.max_items(lengths)[0]):
        return num, f"memory ({budget.memory.max_bytes / 2**30:.1f} GiB)"
    if budget.tokens is not None and num >= int(budget.tokens.max_items(lengths)[0]):
        return num, "what could be measured"
    return num, "throughput (more gain less than 5 %)"
