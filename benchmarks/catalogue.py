"""Padding of plans with at most K shapes in all, on pairs of texts and on one axis, and the time to plan them.

::

    python benchmarks/catalogue.py --data ../shared/data [--budgets 4096 8192] [--counts 8 16 24 32 64]

Texts become tokens of a byte-pair vocabulary of 8,000, learned from the file itself, and are cut at 255. Without the
files only the drawn lengths are planned.
"""

from __future__ import annotations

import argparse
import gzip
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import batchwright as bw

FILES = ("pythondocs-en-es.tsv.gz", "tatoeba-en-de.tsv.gz", "europarl10k-en-de.tsv.gz")
LONGEST = 255
Lengths = npt.NDArray[np.int64]


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="the folder of the pairs")
    parser.add_argument("--budgets", type=int, nargs="+", default=[4096, 8192], metavar="TOKENS")
    parser.add_argument("--counts", type=int, nargs="+", default=[8, 16, 24, 32, 64], metavar="SHAPES")
    parser.add_argument("--num-drawn", type=int, default=100_000, help="examples of the drawn lengths")
    options = parser.parse_args()
    print("| lengths | examples | budget | " + " | ".join(f"{count} shapes" for count in options.counts) + " |")
    print("|---|---|---|" + "---|" * len(options.counts))
    for name, lengths in corpora(options.data, options.num_drawn).items():
        for budget in options.budgets:
            cells = [cell(lengths, budget, count) for count in options.counts]
            print(f"| {name} | {len(lengths):,} | {budget:,} | " + " | ".join(cells) + " |", flush=True)


def cell(lengths: Lengths, max_tokens: int, count: int) -> str:
    """Return the padding of a plan, its shapes and the seconds that the fastest of three took."""
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        plan = bw.plan_batches(lengths, bw.MaxTokens(max_tokens), grouping=bw.Buckets(count))
        seconds.append(time.perf_counter() - start)
    report = plan.report()
    return f"{report.padding:.1%} ({report.num_shapes}, {min(seconds):.2f} s)"


def corpora(folder: Path | None, num_drawn: int) -> dict[str, Lengths]:
    """Return the pairs in a folder and drawn ones, and the first of the drawn axes alone."""
    drawn = draw_pairs(num_drawn)
    found = {} if folder is None else {name: count_tokens(folder / name) for name in FILES if (folder / name).exists()}
    return {**found, "drawn pairs": drawn, "drawn, one axis": drawn[:, 0]}


def draw_pairs(num: int) -> Lengths:
    """Return log-normal pairs whose two lengths follow each other.

    >>> draw_pairs(3).shape
    (3, 2)
    """
    random = np.random.default_rng(0)
    common = random.normal(3.4, 0.8, (num, 1))
    return np.clip(np.exp(common + random.normal(0, 0.2, (num, 2))), 1, LONGEST).astype(np.int64)


def count_tokens(path: Path) -> Lengths:
    """Return the tokens of both texts of every pair."""
    from tokenizers import ByteLevelBPETokenizer

    with gzip.open(path, "rt", encoding="utf-8", newline="\n") as file:
        pairs = [line.rstrip("\n").split("\t")[:2] for line in file]
    tokenizer: Any = ByteLevelBPETokenizer()
    texts = [text for pair in pairs[:20_000] for text in pair]
    tokenizer.train_from_iterator(texts, vocab_size=8_000, show_progress=False)
    columns = [[len(row.ids) for row in tokenizer.encode_batch(list(column))] for column in zip(*pairs, strict=True)]
    return np.clip(np.array(columns, dtype=np.int64).T, 1, LONGEST)


if __name__ == "__main__":
    main()
