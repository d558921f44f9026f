"""Pairs of measured batches as a sampler meets them: first the longest examples, later more of shorter ones."""

from __future__ import annotations

import csv
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np

RAW = Path(__file__).parent / "raw.csv"
COLUMNS = ("num_items", "length", "output_length", "bytes")


class Pairs(NamedTuple):
    """References and batches, rows of (num_items, length, output_length, bytes); the family of each pair."""

    reference: np.ndarray
    batch: np.ndarray
    family: np.ndarray

    @property
    def ratio(self) -> np.ndarray:
        """Return the true memory of the batch relative to the reference."""
        return self.batch[:, 3] / self.reference[:, 3]

    def of(self, families: np.ndarray) -> Pairs:
        """Return the pairs at which a mask is true."""
        return Pairs(self.reference[families], self.batch[families], self.family[families])


def load_pairs(task: str, path: Path = RAW, *, same_output: bool = True) -> Pairs:
    """Return all pairs of batches measured in one setting (family, attention, type).

    Args:
        task: ``"train"`` or ``"generate"``.
        path: the measured rows.
        same_output: only pairs that generate equally many tokens.
    """
    groups = defaultdict(list)
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["task"] == task:
                key = (row["family"], row["attention"], row["dtype"])
                groups[key].append([float(row[name]) for name in COLUMNS])
    references, batches, families = [], [], []
    for (family, *_), rows in groups.items():
        table = np.array(rows)
        first, second = (index.ravel() for index in np.indices((len(table), len(table))))
        a, b = table[first], table[second]
        keep = (first != second) & (a[:, 1] >= b[:, 1]) & (b[:, 0] >= a[:, 0])
        if task == "generate" and same_output:
            keep &= a[:, 2] == b[:, 2]  # one max_new_tokens for the whole data set
        references.append(a[keep])
        batches.append(b[keep])
        families += [family] * int(keep.sum())
    return Pairs(np.concatenate(references), np.concatenate(batches), np.array(families))
