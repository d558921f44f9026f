"""Check the output that the dynabatch drop-in assumes for generation, against the measured batches.

    python benchmarks/memory_prior/evaluate_output.py

Without ``max_new_tokens`` the drop-in assumes an output of half the longest input of each batch. A measured pair of a
reference and a batch of more and shorter inputs is called safe at 0.9 of the reference by that assumption. Of those
called safe, how many took more than the reference? Asked for pairs

- exactly as assumed: both outputs are half the input;
- at most as assumed: the output of the batch, relative to its input, is at most that of the reference;
- of one fixed output, whatever the input: there ``max_new_tokens`` should be given, and is in the last line.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from rows import Pairs, load_pairs

from batchwright.integrations.dynabatch._longest_first import relative_memory

RESULT = Path(__file__).parents[1] / "results" / "memory_prior_output.json"
THRESHOLD = 0.9


def main() -> None:
    found = results()
    RESULT.write_text(json.dumps(found, indent=1) + "\n")
    for name, row in found.items():
        print(f"{name:22} {row}")


def results() -> dict[str, dict[str, float]]:
    """Return the scores of each kind of pairs."""
    pairs = load_pairs("generate", same_output=False)
    share_a, share_b = (rows[:, 2] / rows[:, 1] for rows in (pairs.reference, pairs.batch))
    is_fixed = pairs.reference[:, 2] == pairs.batch[:, 2]
    kinds = {
        "exactly as assumed": (np.isclose(share_a, 0.5) & np.isclose(share_b, 0.5), False),
        "at most as assumed": (share_b <= share_a, False),
        "fixed output": (is_fixed, False),
        "fixed output, given": (is_fixed, True),
    }
    return {name: score(pairs.of(mask), is_given=is_given) for name, (mask, is_given) in kinds.items()}


def score(pairs: Pairs, *, is_given: bool) -> dict[str, float]:
    """Return how many pairs were called safe, the share of them that took more than the reference, and the most."""
    predicted = np.array([predict(a, b, is_given=is_given) for a, b in zip(pairs.reference, pairs.batch, strict=True)])
    safe, true = predicted <= THRESHOLD, pairs.ratio
    return {
        "num_pairs": len(true),
        "num_safe": int(safe.sum()),
        "unsafe_share": float((true[safe] > 1).mean()) if safe.any() else 0.0,
        "largest": float(true[safe].max()) if safe.any() else 0.0,
        "found_share": float((safe & (true <= THRESHOLD)).sum() / max(1, (true <= THRESHOLD).sum())),
    }


def predict(reference: np.ndarray, batch: np.ndarray, *, is_given: bool) -> float:
    """Return the predicted memory of a batch relative to its reference."""
    items, length = int(reference[0]), int(reference[1])
    new_tokens = int(batch[2]) if is_given else None
    return float(relative_memory(int(batch[0]), int(batch[1]), items, length, task="generate", new_tokens=new_tokens))


if __name__ == "__main__":
    main()
