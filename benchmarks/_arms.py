"""Every arm of the benchmark, in the order of the table."""

from __future__ import annotations

from functools import partial

from _arm import Arm
from _baselines import FairseqRule, RandomFixedSize, SortGreedy
from _ours import Ours
from _peers import Dynabatch, HuggingFaceLengthGrouped, LhotseBuckets, SpeechBrainBuckets, TrlPacking

_SAFE = "size = budget // longest, the largest that can never exceed the budget"
_PACKED_ONCE = "packed once before training, so every pair meets again"
_FEWER_TOKENS = "fewer examples where its token column would not fit"

ARMS = {
    arm.name: arm
    for arm in (
        Arm("random", "random, fixed safe size (own code)", RandomFixedSize, note=_SAFE),
        Arm("numpy-sort", "numpy sort + greedy (own code)", SortGreedy),
        Arm(
            "fairseq-rule",
            "fairseq's rule, size multiple of 8 (own code)",
            FairseqRule,
            note="fairseq keeps its batches for all epochs; here they are planned anew, in its favour",
        ),
        Arm("hf", "transformers LengthGroupedSampler, fixed safe size", HuggingFaceLengthGrouped, note=_SAFE),
        Arm(
            "speechbrain",
            "SpeechBrain DynamicBatchSampler, 60 buckets",
            SpeechBrainBuckets,
            max_examples={"*": 100_000},
            note="an empty module stands in for torchaudio where that is absent; the sampler reads no audio",
        ),
        Arm(
            "lhotse",
            "Lhotse DynamicBucketingSampler, 30 buckets, buffer 20k, W=8",
            LhotseBuckets,
            max_examples={"*": 50_000, "constant": 10_000},
            note="cuts are built beforehand and shuffled each epoch; a last uneven step is counted before it is "
            "split over ranks; constant lengths fill one bucket, which it shuffles whole for every batch, hence "
            "fewer examples there",
        ),
        Arm(
            "dynabatch",
            "dynabatch_sampler, first batch of the safe size",
            Dynabatch,
            max_examples={"*": 3_000},
            note="fewer examples, as each batch asks its regressor; batches are built once for all epochs",
        ),
        Arm(
            "trl-bfd",
            "packing: TRL bfd, one call",
            partial(TrlPacking, rows_per_call=None),
            max_examples={"*": 50_000, "audio": 20_000},
            note=f"{_FEWER_TOKENS}; its time includes gathering that column; {_PACKED_ONCE}",
        ),
        Arm(
            "trl-bfd-map",
            "packing: TRL bfd, 1,000 rows a call (its default)",
            partial(TrlPacking, rows_per_call=1_000),
            max_examples={"*": 50_000, "audio": 20_000},
            note=f"{_FEWER_TOKENS}; its time includes gathering that column; {_PACKED_ONCE}",
        ),
        Arm(
            "window-sort",
            "batchwright WindowSort()",
            partial(Ours, grouping="WindowSort"),
            is_ours=True,
            note="as all rows of batchwright, planned for 8 ranks: balanced, and the steps of 8 in random order",
        ),
        Arm(
            "window-sort-1",
            "batchwright WindowSort(), one device",
            partial(Ours, grouping="WindowSort", balance_over=1),
            is_ours=True,
            note="all batches in random order, as one device would take them",
        ),
        Arm(
            "buckets-64",
            "batchwright Buckets(64)",
            partial(Ours, grouping="Buckets", count=64),
            is_ours=True,
            note="rows are padded to the bound of the bucket, and counted so",
        ),
        Arm(
            "buckets-16",
            "batchwright Buckets(16)",
            partial(Ours, grouping="Buckets", count=16),
            is_ours=True,
            note="rows are padded to the bound of the bucket, and counted so",
        ),
        Arm("sorted", "batchwright Sorted()", partial(Ours, grouping="Sorted"), is_ours=True),
        Arm(
            "in-order",
            "batchwright InOrder()",
            partial(Ours, grouping="InOrder"),
            is_ours=True,
            note="never shuffles, so every pair meets again",
        ),
        Arm(
            "packed",
            "packing: batchwright Packed(budget), numba",
            partial(Ours, grouping="Packed"),
            is_ours=True,
            warm_up_examples=100_000,
            note="numba is used from 100,000 examples on",
        ),
        Arm(
            "packed-plain",
            "packing: batchwright Packed(budget), without numba",
            partial(Ours, grouping="Packed", use_numba=False),
            is_ours=True,
        ),
    )
}

QUICK_ARMS = ("numpy-sort", "hf", *(name for name, arm in ARMS.items() if arm.is_ours))
LARGE_ARMS = ("numpy-sort", *(name for name, arm in ARMS.items() if arm.is_ours))
