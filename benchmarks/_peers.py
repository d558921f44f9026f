"""Planners of other projects, called through their own public names, each imported in its own process."""

from __future__ import annotations

import importlib.util
import random
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, final

import numpy as np
from _arm import PLAN_SEED, Planner
from _metrics import WORLD_SIZE, Batches, IntArray


@final
class HuggingFaceLengthGrouped(Planner):
    """``LengthGroupedSampler`` of transformers. It has no budget, so its size is the safe one."""

    def __init__(self, lengths: IntArray, budget: int) -> None:
        super().__init__(lengths, budget)
        import torch
        from transformers.trainer_pt_utils import LengthGroupedSampler

        self._generator = torch.Generator
        self._sampler = LengthGroupedSampler
        self._list = lengths.tolist()

    def plan(self, epoch: int) -> list[int]:
        generator = self._generator().manual_seed(PLAN_SEED + epoch)
        return list(self._sampler(self.safe_size, lengths=self._list, generator=generator))

    def batches(self, plan: list[int]) -> Batches:
        return Batches.of_size(plan, self.safe_size)


@final
class SpeechBrainBuckets(Planner):
    """``DynamicBatchSampler`` of SpeechBrain with 60 buckets at its own boundaries."""

    def __init__(self, lengths: IntArray, budget: int) -> None:
        super().__init__(lengths, budget)
        if importlib.util.find_spec("torchaudio") is None:
            # SpeechBrain imports torchaudio at the top; its sampler reads no audio, an empty module will do.
            sys.modules["torchaudio"] = ModuleType("torchaudio")
            sys.modules["torchaudio"].__spec__ = ModuleSpec("torchaudio", None)
        from speechbrain.dataio.sampler import DynamicBatchSampler

        self._sampler = DynamicBatchSampler
        self._list = lengths.tolist()

    def plan(self, epoch: int) -> list[list[int]]:
        sampler = self._sampler(
            range(len(self._list)), self.budget, 60, lengths_list=self._list, seed=PLAN_SEED, epoch=epoch
        )
        return list(sampler)

    def batches(self, plan: list[list[int]]) -> Batches:
        return Batches.from_lists(plan)


@final
class LhotseBuckets(Planner):
    """``DynamicBucketingSampler`` of Lhotse: 30 buckets, a buffer of 20,000, 8 ranks that share a bucket."""

    def __init__(self, lengths: IntArray, budget: int) -> None:
        super().__init__(lengths, budget)
        from lhotse import MonoCut
        from lhotse.dataset import DynamicBucketingSampler

        class Recorder(DynamicBucketingSampler):  # type: ignore[misc]
            """Keeps the batches of all ranks; the sampler forms them all and hands out one."""

            def _next_batch(self) -> Any:
                batch = super()._next_batch()
                self.formed.append([int(cut.id) for cut in batch])
                return batch

        self._sampler = Recorder
        self._cuts = [
            MonoCut(str(index), start=0, duration=float(length), channel=0)
            for index, length in enumerate(lengths.tolist())
        ]

    def plan(self, epoch: int) -> list[list[int]]:
        # It shuffles inside its buffer only, so a user shuffles the cuts as well.
        order = np.random.default_rng([PLAN_SEED, epoch]).permutation(len(self._cuts))
        sampler = self._sampler(
            [self._cuts[index] for index in order.tolist()],
            max_duration=float(self.budget),
            num_buckets=30,
            buffer_size=20_000,
            shuffle=True,
            world_size=WORLD_SIZE,
            rank=0,
            seed=PLAN_SEED,
        )
        sampler.formed = []
        sampler.set_epoch(epoch)
        for _ in sampler:
            pass
        return list(sampler.formed)

    def batches(self, plan: list[list[int]]) -> Batches:
        return Batches.from_lists(plan)


@final
class Dynabatch(Planner):
    """``dynabatch_sampler`` from known lengths, first batch of the safe size, other options as they come.

    It also asks for word and character lengths; they are made of the token length: 3 words and 16 characters
    for 4 tokens.
    """

    def __init__(self, lengths: IntArray, budget: int) -> None:
        super().__init__(lengths, budget)
        from dynabatch import dynabatch_sampler

        self._sampler = dynabatch_sampler
        self._texts = [""] * len(lengths)
        self._tokens = lengths.tolist()
        self._words = np.maximum(lengths * 3 // 4, 1).tolist()
        self._characters = (lengths * 4).tolist()

    def plan(self, epoch: int) -> Any:
        return self._sampler(
            self._texts,
            None,
            self.safe_size,
            shuffle=True,
            shuffle_seed=PLAN_SEED + epoch,
            token_lengths=self._tokens,
            word_lengths=self._words,
            char_lengths=self._characters,
        )

    def batches(self, plan: Any) -> Batches:
        return Batches.from_lists(list(plan))

    def next_epoch(self, first: Any, replanned: Any) -> Batches:
        return self.batches(first)  # every pass over the sampler shuffles the batches it was built with


@final
class TrlPacking(Planner):
    """``pack_dataset`` of TRL with best-fit decreasing; every token holds the number of its example.

    Args:
        lengths: one length an example.
        budget: the capacity of a row.
        rows_per_call: how many examples are packed at once; None for all. The default of TRL is 1,000.
    """

    def __init__(self, lengths: IntArray, budget: int, *, rows_per_call: int | None) -> None:
        super().__init__(lengths, budget)
        import pyarrow as pa
        from datasets import Dataset
        from trl import pack_dataset

        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        tokens = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        self._dataset = Dataset(pa.table({"input_ids": pa.ListArray.from_arrays(offsets, tokens)}))
        self._pack = pack_dataset
        self._options = {
            "batch_size": rows_per_call or len(lengths),
            "keep_in_memory": True,
            "load_from_cache_file": False,
        }

    def plan(self, epoch: int) -> Any:
        return self._pack(self._dataset, self.budget, strategy="bfd", map_kwargs=self._options)

    def batches(self, plan: Any) -> Batches:
        packed = plan.data.table.combine_chunks()
        rows = [row.values.to_numpy()[: row.offsets[-1].as_py()] for row in packed.column("input_ids").chunks]
        return _split_rows(np.concatenate(rows), packed, self.budget)

    def next_epoch(self, first: Any, replanned: Any) -> Batches:
        return self.batches(first)  # rows are packed once, before training


def _split_rows(tokens: IntArray, packed: Any, capacity: int) -> Batches:
    """Read the example numbers back from packed rows, in the random order a Trainer would visit them."""
    lengths = packed.column("seq_lengths").to_pylist()
    starts = np.cumsum([0] + [length for row in lengths for length in row])[:-1]
    examples = iter(tokens[starts].tolist())
    rows = [[next(examples) for _ in row] for row in lengths]
    random.Random(PLAN_SEED).shuffle(rows)
    return Batches.from_lists(rows, capacity=capacity)
