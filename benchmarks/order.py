"""How long ranks wait for each other and how alike consecutive steps are, by the number of ranks and ``balance_over``.

::

    python benchmarks/order.py            # prints the table, writes results/order.json (about a minute)

Every cell is the mean of three epochs. ``balance_over=None`` is the default; 64, one order for many numbers of ranks,
and 1, a completely random order, are the controls. The figures are those of ``plan.report()``, so they are the same on
every machine.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from _distributions import DISTRIBUTIONS

import batchwright as bw

RESULTS = Path(__file__).parent / "results" / "order.json"
NUM_EXAMPLES = {"short": 300_000, "chat": 60_000, "audio": 60_000}
WORLD_SIZES = (1, 3, 6, 8, 12, 24, 48, 64)
NUMBERS = (None, 64, 1)
NUM_EPOCHS = 3


def measure(name: str, world_size: int, balance_over: int | None) -> dict[str, float]:
    """Return the mean straggler waste and order correlation of some epochs."""
    kind = DISTRIBUTIONS[name]
    lengths, budget = kind.lengths(NUM_EXAMPLES[name]), bw.MaxTokens(kind.budget)
    reports = [
        bw.plan_batches(lengths, budget, world_size=world_size, balance_over=balance_over, epoch=epoch).report()
        for epoch in range(NUM_EPOCHS)
    ]
    return {
        "straggler_waste": float(np.mean([report.straggler_waste for report in reports])),
        "order_correlation": float(np.mean([report.order_correlation for report in reports])),
        "num_batches": reports[0].num_batches,
    }


def main() -> None:
    """Measure every cell, print the table and write it."""
    cells = {}
    for name in NUM_EXAMPLES:
        print(f"\n{name}: ranks waiting % (order correlation), balance_over = {', '.join(map(str, NUMBERS))}")
        for world_size in WORLD_SIZES:
            row = {str(number): measure(name, world_size, number) for number in NUMBERS}
            cells[f"{name}, {world_size} ranks"] = row
            texts = [f"{100 * c['straggler_waste']:6.2f} ({c['order_correlation']:+.2f})" for c in row.values()]
            print(f"{world_size:>3} ranks  " + "  ".join(texts))
    RESULTS.write_text(json.dumps({"batchwright": bw.__version__, "cells": cells}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
