"""The arms, by name: which examples share an update, and what runs it.

fixed-16                   16 texts, shuffled
grouped-128                128 texts of about the same length: windows of 50 batches, sorted and cut
group_by_length-32         the order of transformers' sampler of that name
batch_rebalance-64-4       of transformers too: 64 texts an update, in 4 parts of about the same cost
dynabatch-16               dynabatch's own batches, its first one of 16 texts, range 5
max_tokens-8192            MaxTokens(8192), WindowSort, through Stepper
buckets-16-8192            Buckets(16) of MaxTokens(8192): 16 static shapes, through Stepper
graphs-16-8192             the same plan, Stepper(graphs=True)
compile-16-8192            the same plan, torch.compile for each static shape, compilation inside the clock
compile_apart-16-8192      the same, compiled before the clock starts
compile_dynamic-16-8192    the same plan, torch.compile once for all shapes, and compile_dynamic_apart
goodput-16-4096            graphs-16-4096 at first; size.goodput decides the tokens per update, half to 8 times as many
measured-16-4096           the same by size.measured, which reads experiments of step.measure_size
smith-16-4096              the same by a schedule: the batch grows where the rate would fall
seesaw-16-4096             the batch grows, and the rate falls by the root
auto-32                    32 texts of like length at first, run eagerly; size.goodput decides how many
auto_betas-32              the same, with the betas as they are
trials-32                  the same; size.measured decides, by experiments of step.measure_size, 5 % of the time at most
trials_early-32            the same, where experiments may take half of the time
warmup-16-4096             the batch doubles after an eighth, a quarter and half of the time
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice, takewhile
from typing import Any, final

import numpy as np

import batchwright as bw

from .corpus import Corpus, Part, Update

_NUMBERS = {
    "fixed": 1, "grouped": 1, "group_by_length": 1, "batch_rebalance": 2, "dynabatch": 1, "max_tokens": 1,
    "auto": 1, "auto_betas": 1, "trials": 1, "trials_early": 1,
    "goodput": 2, "measured": 2, "smith": 2, "seesaw": 2, "warmup": 2,
    "buckets": 2, "graphs": 2, "compile": 2, "compile_apart": 2, "compile_dynamic": 2, "compile_dynamic_apart": 2,
}  # fmt: skip
_OF_OTHERS = ("group_by_length", "batch_rebalance", "dynabatch")
_LEVELLED = ("goodput", "measured", "smith", "seesaw", "warmup")
WINDOW = 50  # batches, as transformers' sampler has


@final
@dataclass(frozen=True)
class Arm:
    """One way to train: a kind and its numbers."""

    kind: str
    numbers: tuple[int, ...]

    @classmethod
    def parse(cls, name: str) -> Arm:
        """Read a name such as ``graphs-16-8192``."""
        kind, *numbers = name.split("-")
        if kind not in _NUMBERS or len(numbers) != _NUMBERS[kind] or not all(map(str.isdigit, numbers)):
            known = ", ".join("-".join([kind, *"N" * num]) for kind, num in _NUMBERS.items())
            raise SystemExit(f"{name!r} is no arm; arms are {known}")
        return cls(kind, tuple(map(int, numbers)))

    @property
    def name(self) -> str:
        """Return what ``parse`` reads."""
        return "-".join([self.kind, *map(str, self.numbers)])

    @property
    def is_ours(self) -> bool:
        """Return whether batchwright plans it; all others are peers."""
        return self.kind not in ("fixed", "grouped", *_OF_OTHERS)

    @property
    def is_of_others(self) -> bool:
        """Return whether another package has planned it beforehand."""
        return self.kind in _OF_OTHERS

    @property
    def is_graphed(self) -> bool:
        """Return whether steps are captured and replayed."""
        return self.kind == "graphs" or self.is_levelled

    @property
    def is_levelled(self) -> bool:
        """Return whether the tokens of an update change on the way."""
        return self.kind in _LEVELLED

    @property
    def is_sized(self) -> bool:
        """Return whether a policy decides the texts of an update that runs eagerly."""
        return self.kind in ("auto", "auto_betas", "trials", "trials_early")

    @property
    def is_compiled(self) -> bool:
        """Return whether the model goes through torch.compile."""
        return self.kind.startswith("compile")

    @property
    def is_planned_eager(self) -> bool:
        """Return whether it is a plan of ours that runs eagerly."""
        return self.kind in ("max_tokens", "buckets")


def make_sampler(arm: Arm, corpus: Corpus, *, seed: int) -> bw.BatchSampler | None:
    """Return the sampler of an arm that batchwright plans."""
    if not arm.is_ours:
        return None
    grouping: Any = bw.WindowSort() if arm.kind == "max_tokens" else bw.Buckets(arm.numbers[0])
    return bw.BatchSampler(corpus.lengths, bw.MaxTokens(arm.numbers[-1]), grouping=grouping, seed=seed)


def updates_of(arm: Arm, corpus: Corpus, *, seed: int, limit: int) -> list[Update]:
    """Return the first ``limit`` updates of a run, epoch after epoch."""
    sampler = make_sampler(arm, corpus, seed=seed)
    if sampler is not None:
        found = _planned(sampler, is_static=arm.kind != "max_tokens")
    elif arm.is_of_others:
        found = _of_others(arm, corpus, seed)
    else:
        found = _of_fixed_size(arm, corpus, seed)
    return list(islice(found, limit))


def _planned(sampler: bw.BatchSampler, *, is_static: bool) -> Iterator[Update]:
    for epoch in count():
        sampler.set_epoch(epoch)
        plan = sampler.plan
        cuts = np.split(plan.indices.astype(np.int64), plan.offsets[1:-1])
        for indices, shape in zip(cuts, plan.shapes.tolist(), strict=True):
            yield (Part(indices, tuple(shape) if is_static else None),)


def _of_others(arm: Arm, corpus: Corpus, seed: int) -> Iterator[Update]:
    """Yield the epochs in the file; after them the same batches in another order."""
    names = takewhile(corpus.orders.__contains__, (f"{arm.name}/{seed}/{epoch}" for epoch in count()))
    epochs = [corpus.orders[name] for name in names]
    if not epochs:
        raise LookupError(f"the data hold no order of {arm.name} for seed {seed}")
    yield from (update for epoch in epochs for update in epoch)
    rng = np.random.default_rng(seed)
    while True:
        yield from (epochs[-1][place] for place in rng.permutation(len(epochs[-1])))


def _of_fixed_size(arm: Arm, corpus: Corpus, seed: int) -> Iterator[Update]:
    rng = np.random.default_rng(seed)
    lengths, (size,) = corpus.lengths, arm.numbers
    while True:
        order = rng.permutation(len(lengths))
        if arm.kind == "grouped":
            keys = (*lengths[order].T[::-1], np.arange(len(order)) // (WINDOW * size))
            order = order[np.lexsort(keys)]
        batches = np.split(order, range(size, len(order), size))
        if arm.kind == "grouped":
            batches = [batches[place] for place in rng.permutation(len(batches))]
        yield from ((Part(batch),) for batch in batches)
