"""Batches that dynabatch itself plans, kept in a file: planning needs no GPU, and a GPU machine needs no dynabatch.

The corpora are lengths without text, so its word and character counts are set to 3/4 word a token and 5 characters a
word.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from _pairs import IntArray, digest


def write_peer_plan(path: Path, lengths: IntArray, **options: Any) -> None:
    """Plan with dynabatch on lengths ``(N,)`` and keep the batches.

    Args:
        path: the file.
        lengths: of the texts it is given; of pairs the source, as its README does.
        options: of ``dynabatch_sampler``, with ``batch_size``.
    """
    from dynabatch import dynabatch_sampler

    words = np.maximum(1, lengths * 3 // 4)
    sampler = dynabatch_sampler(
        texts=[""] * len(lengths), tokenizer=None, num_workers=1, token_lengths=lengths.tolist(),
        word_lengths=words.tolist(), char_lengths=(5 * words).tolist(), **options,
    )  # fmt: skip
    batches = [[int(index) for index in batch] for batch in sampler.batches]
    path.write_text(json.dumps({"options": options, "lengths": digest(lengths), "batches": batches}) + "\n")


def read_peer_plan(path: Path, lengths: IntArray) -> list[IntArray] | None:
    """Return the batches planned for exactly these lengths, None where the file has none."""
    plan = json.loads(path.read_text()) if path.exists() else {}
    if plan.get("lengths") != digest(lengths):
        print(f"no batches of dynabatch for these lengths in {path.name}: write them with --write-peer-plan")
        return None
    return [np.array(batch) for batch in plan["batches"]]
