"""The arms of ``gpu_trainer.py``: each is one way to call transformers' Trainer.

fixed-10                  the plain Trainer, 10 examples at once, shuffled
group_by_length-10        the same with ``train_sampling_strategy="group_by_length"``
batch_rebalance-10-4      ``"batch_rebalance"``: updates of 40 examples in 4 parts of like cost
dynabatch-10              dynabatch's trainer on the batches that its sampler planned, first batch 10, range 5
max_tokens-8192           ``adaptive(Trainer)(budget=MaxTokens(8192))``
calibrated-90             a memory budget of 90 % of the cap, calibrated by hand before training
auto                      ``adaptive(Trainer)(budget="auto")``
auto_graphs-32            the same with ``grouping=Buckets(32)`` and ``graphs="auto"``
graphs-12-4096            ``budget=MaxTokens(4096)`` with ``grouping=Buckets(12)`` and ``graphs=True``
auto_sqrt-10              ``budget="auto"`` with ``lr_rule="sqrt", base_size=10``: the rate is meant for 10 examples
auto_controller-10        ``budget="auto"`` with ``controller="auto"``, from 10 examples an update
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from itertools import count, takewhile
from types import ModuleType
from typing import Any, NamedTuple, final

import numpy as np
import torch
from _gpu import Device, Row
from _quality.corpus import Corpus, IntArray, Update
from torch.utils.data import DataLoader, Dataset
from transformers import Trainer, trainer_pt_utils

import batchwright as bw
from batchwright.integrations.huggingface import adaptive
from batchwright.step import PadCollator, calibrate_huggingface
from batchwright.testing import EagerGraphs

# How many numbers a name has.
KINDS = {
    "fixed": 1, "group_by_length": 1, "batch_rebalance": 2, "dynabatch": 1, "max_tokens": 1, "calibrated": 1,
    "graphs": 2, "auto": 0, "auto_graphs": 1, "auto_sqrt": 1, "auto_controller": 1,
}  # fmt: skip
PEER = "dynabatch"
# What dynabatch imports at its top and only its planner uses; the batches were planned elsewhere.
_ONLY_FOR_PLANNING = ("xgboost", "pandas", "datasets")


class Name(NamedTuple):
    """An arm: its kind and its numbers."""

    kind: str
    numbers: tuple[int, ...]

    @classmethod
    def parse(cls, name: str) -> Name:
        """Read a name such as ``dynabatch-10``."""
        kind, *numbers = name.split("-")
        if kind not in KINDS or len(numbers) != KINDS[kind] or not all(map(str.isdigit, numbers)):
            known = ", ".join("-".join([kind, *"N" * num]) for kind, num in KINDS.items())
            raise SystemExit(f"{name!r} is no arm; arms are {known}")
        return cls(kind, tuple(map(int, numbers)))


def finds(name: str) -> bool:
    """Say whether an arm measures batches before it trains."""
    return name.startswith(("auto", "calibrated"))


@final
class Examples(Dataset[dict[str, Any]]):
    """The pairs that are trained on, as a user's data set holds them."""

    def __init__(self, corpus: Corpus) -> None:
        self._source, self._target = corpus.columns
        self._num = len(corpus.lengths)

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, index: int) -> dict[str, Any]:
        columns = {"input_ids": self._source, "labels": self._target}
        return {
            name: texts.ids[texts.offsets[index] : texts.offsets[index + 1]].astype(np.int64)
            for name, texts in columns.items()
        }


def make_collator(pad_id: int) -> PadCollator:
    """Return the collator that every arm has."""
    return PadCollator(axis_fields=("input_ids", "labels"), pad_values={"input_ids": pad_id})


@final
class StoredBatches:
    """Batches that another package planned, epoch after epoch; after the stored epochs the last one reshuffled.

    Args:
        corpus: holds the orders.
        name: of the arm that the orders belong to.
        min_batch_size: what dynabatch's trainer asks of its sampler.
    """

    def __init__(self, corpus: Corpus, name: str, min_batch_size: int) -> None:
        found = takewhile(corpus.orders.__contains__, (f"{name}/0/{epoch}" for epoch in count()))
        self._epochs = [corpus.orders[key] for key in found]
        if not self._epochs:
            raise LookupError(f"the data hold no batches of {name}; --prepare where that package is installed")
        self._rng, self._next, self.min_batch_size = np.random.default_rng(0), 0, min_batch_size

    def __len__(self) -> int:
        return sum(map(len, self._epochs[0]))

    def __iter__(self) -> Iterator[list[int]]:
        epoch, self._next = self._next, self._next + 1
        updates: list[Update] = self._epochs[min(epoch, len(self._epochs) - 1)]
        if epoch >= len(self._epochs):
            updates = [updates[place] for place in self._rng.permutation(len(updates))]
        yield from (part.indices.tolist() for update in updates for part in update)


@final
class StoredTrainer(Trainer):
    """The plain Trainer on stored batches."""

    def __init__(self, *args: Any, batches: StoredBatches, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._batches = batches

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return a loader of the stored batches."""
        return DataLoader(
            self.train_dataset, batch_sampler=self._batches, collate_fn=self.data_collator,
            num_workers=self.args.dataloader_num_workers, pin_memory=self.args.dataloader_pin_memory,
        )  # type: ignore[arg-type]  # fmt: skip


@final
@dataclass(frozen=True)
class Setup:
    """What an arm adds to the Trainer that every arm has.

    Args:
        make: the trainer class.
        arguments: of the trainer.
        training: of the ``TrainingArguments``.
        notes: what the row says about it.
    """

    make: Callable[..., Any]
    arguments: Row = field(default_factory=dict)
    training: Row = field(default_factory=dict)
    notes: Row = field(default_factory=dict)


def set_up(name: str, corpus: Corpus, model: Any, device: Device) -> Setup:
    """Return how an arm is run; what has to be measured by hand before training is measured here."""
    kind, numbers = Name.parse(name)
    if kind == "fixed":
        return Setup(Trainer, training={"per_device_train_batch_size": numbers[0]})
    if kind == "group_by_length":
        return Setup(
            Trainer, training={"per_device_train_batch_size": numbers[0], "train_sampling_strategy": "group_by_length"}
        )
    if kind == "batch_rebalance":
        return _rebalanced(name, corpus, *numbers)
    if kind == "dynabatch":
        return _of_dynabatch(name, corpus, *numbers)
    return Setup(adaptive(Trainer), **_ours(kind, numbers, corpus.lengths, model, device))


def _ours(kind: str, numbers: tuple[int, ...], lengths: IntArray, model: Any, device: Device) -> Row:
    if kind == "max_tokens":
        return {"arguments": {"budget": bw.MaxTokens(numbers[0])}}
    if kind == "graphs":
        graphs: Any = EagerGraphs() if device.is_cpu else True
        return {"arguments": {"budget": bw.MaxTokens(numbers[1]), "grouping": bw.Buckets(numbers[0]), "graphs": graphs}}
    if kind == "calibrated":
        share = numbers[0] / 100
        budget, seconds = calibrated(model, lengths, device, share * device.cap_bytes)
        return {"arguments": {"budget": budget}, "notes": {"calibration_seconds": seconds, "planned_share": share}}
    notes = {"planned_share": None if device.is_cpu else 0.9}
    if kind == "auto_controller":  # which begins with the size that the trainer's own arguments say
        first = {"per_device_train_batch_size": numbers[0]}
        return {"arguments": {"budget": "auto", "controller": "auto"}, "training": first, "notes": notes}
    further: dict[str, Row] = {
        "auto": {},
        "auto_graphs": {"grouping": bw.Buckets(numbers[0]), "graphs": "auto"} if numbers else {},
        "auto_sqrt": {"lr_rule": "sqrt", "base_size": numbers[0]} if numbers else {},
    }
    return {"arguments": {"budget": "auto", **further[kind]}, "notes": notes}


def calibrated(model: Any, lengths: IntArray, device: Device, max_bytes: float) -> tuple[bw.Budget, float]:
    """Return the budget of ``max_bytes`` and the seconds that measuring took; without a GPU a number of tokens."""
    if device.is_cpu:
        return bw.MaxTokens(512), 0.0
    start = time.perf_counter()
    found = calibrate_huggingface(
        model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True), lengths=lengths,
        autocast=torch.bfloat16, max_bytes=max_bytes, accumulate=False, monitor=device.monitor, progress=False,
    )  # fmt: skip
    assert found.memory is not None
    device.free()
    return found.memory.budget(max_bytes), time.perf_counter() - start


def _rebalanced(name: str, corpus: Corpus, size: int, parts: int) -> Setup:
    """Return the strategy of transformers, or its stored batches where this release has none."""
    training = {"per_device_train_batch_size": size, "gradient_accumulation_steps": parts}
    if hasattr(trainer_pt_utils, "BatchRebalanceSampler"):
        return Setup(Trainer, training={**training, "train_sampling_strategy": "batch_rebalance"})
    return Setup(
        StoredTrainer,
        {"batches": StoredBatches(corpus, name, size)},
        training,
        {"ran": "the plain Trainer on stored batches, as this transformers has no batch_rebalance"},
    )


def _of_dynabatch(name: str, corpus: Corpus, size: int) -> Setup:
    batches = StoredBatches(corpus, name, size)
    training = {"per_device_train_batch_size": size}
    trainer = load_dynabatch_trainer()
    if trainer is not None:
        options = {"dynabatch_sampler": batches, "oom_fallback": "split_retry"}
        ran = f"dynabatch {trainer.version}: its own trainer on batches that its own sampler planned"
        return Setup(trainer.make(Trainer), options, training, {"ran": ran})
    return Setup(
        StoredTrainer,
        {"batches": batches},
        training,
        {"ran": "the plain Trainer on batches that dynabatch's sampler planned, as the package is not installed"},
    )


@final
class _Empty(ModuleType):
    """A module in which every name is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class PeerTrainer(NamedTuple):
    """The factory of dynabatch's trainers, and its version."""

    make: Callable[[type], type]
    version: str


def load_dynabatch_trainer() -> PeerTrainer | None:
    """Return dynabatch's own ``make_dynabatch_trainer``, or None where the package is not there.

    Its planner needs packages that a GPU machine may lack. Empty modules stand for them while it is imported; nothing
    of them is called, because the batches are stored.
    """
    missing = [name for name in _ONLY_FOR_PLANNING if importlib.util.find_spec(name) is None]
    for name in missing:
        sys.modules[name] = _Empty(name)
    try:
        package = importlib.import_module("dynabatch")
    except ModuleNotFoundError:
        return None
    finally:
        for name in missing:
            del sys.modules[name]
    return PeerTrainer(package.make_dynabatch_trainer, package.__version__)
