"""Fit the coefficients of `MemoryModel.pretrained` to the measured rows, and say how they do on families left out.

    python benchmarks/memory_prior/fit.py [--dynabatch predictions.json]

The loss is the pinball loss of log(true / predicted) at 0.8, so that under-prediction costs four times as much as
over-prediction. Every family is left out in turn and predicted from the others; the file that the package ships is
fitted to all. `evaluate_dynabatch.py` writes the predictions of dynabatch's regressor for the same pairs. The rows "up
to 5.3 x" are those with at most 5.3 times the items of the reference, where 95 % of its training data lie.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from rows import Pairs, load_pairs
from scipy.optimize import minimize

OUTPUT = Path(__file__).parents[2] / "src" / "batchwright" / "plan" / "models" / "memory_prior.json"
RESULT = Path(__file__).parents[1] / "results" / "memory_prior.json"
LEVEL = 0.8
# The largest share of a squared length that any family showed (T5, whose attention stores its scores).
LONGER_SQUARE = 0.002
NAMES = ("fixed", "per_item", "square")


def cost(coefficients: np.ndarray, rows: np.ndarray, task: str) -> np.ndarray:
    """Return the cost of rows in tokens."""
    fixed, per_item, square = coefficients
    output = rows[:, 2] if task == "generate" else 0.0
    return fixed + rows[:, 0] * (per_item + rows[:, 1] + output + square * rows[:, 1] ** 2)


def predict(coefficients: np.ndarray, pairs: Pairs, task: str) -> np.ndarray:
    """Return the predicted ratio of pairs."""
    return cost(coefficients, pairs.batch, task) / cost(coefficients, pairs.reference, task)


def fit(pairs: Pairs, task: str) -> np.ndarray:
    """Return the coefficients of least pinball loss, none below 0."""
    target = np.log(pairs.ratio)

    def loss(parameters: np.ndarray) -> float:
        error = target - np.log(predict(np.exp(parameters), pairs, task))
        return float(np.maximum(LEVEL * error, (LEVEL - 1) * error).mean())

    found = minimize(loss, np.log([10.0, 20.0, 1e-3]), method="Nelder-Mead", options={"maxiter": 4000, "fatol": 1e-10})
    coefficients = np.exp(found.x)
    return np.where(coefficients < [1e-2, 1e-2, 1e-6], 0.0, coefficients)


def score(true: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """Return R², the share of batches called safe (at most 0.9) that take more than the reference, and how many."""
    safe = predicted <= 0.9
    return {
        "num_pairs": len(true),
        "r2": 1 - float(((predicted - true) ** 2).sum() / ((true - true.mean()) ** 2).sum()),
        "num_safe": int(safe.sum()),
        "unsafe_share": float((true[safe] > 1).mean()) if safe.any() else 0.0,
        "found_share": float((safe & (true <= 0.9)).sum() / max(1, (true <= 0.9).sum())),
    }


def evaluate(pairs: Pairs, task: str) -> tuple[np.ndarray, dict[str, dict[str, float]]]:
    """Return predictions with each family left out, and the scores by family and over all."""
    predicted = np.empty(len(pairs.family))
    for family in np.unique(pairs.family):
        left_out = pairs.family == family
        predicted[left_out] = predict(fit(pairs.of(~left_out), task), pairs.of(left_out), task)
    by_family = {
        str(family): score(pairs.ratio[pairs.family == family], predicted[pairs.family == family])
        for family in np.unique(pairs.family)
    }
    return predicted, {**overall(pairs, predicted), **by_family}


def overall(pairs: Pairs, predicted: np.ndarray) -> dict[str, dict[str, float]]:
    """Return the scores over all pairs, and over those within the range of dynabatch's training data."""
    near = pairs.batch[:, 0] <= 5.3 * pairs.reference[:, 0]
    return {"all": score(pairs.ratio, predicted), "up to 5.3 x": score(pairs.ratio[near], predicted[near])}


def show(title: str, scores: dict[str, dict[str, float]]) -> None:
    print(f"\n{title:28} {'pairs':>6} {'R2':>7} {'called safe':>12} {'of them over':>13} {'safe ones found':>16}")
    for name, row in scores.items():
        print(
            f"  {name:26} {row['num_pairs']:6} {row['r2']:7.3f} {row['num_safe']:12} {row['unsafe_share']:13.2%} "
            f"{row['found_share']:16.1%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dynabatch", type=Path, help="predictions of dynabatch's regressor, by task")
    arguments = parser.parse_args()
    theirs = json.loads(arguments.dynabatch.read_text()) if arguments.dynabatch else {}
    coefficients, results = {}, {}
    for task in ("train", "generate"):
        pairs = load_pairs(task)
        _, scores = evaluate(pairs, task)
        results[task] = {"ours": scores}
        show(f"{task}: family left out", scores)
        if task in theirs:
            peer = np.array(theirs[task])
            results[task]["dynabatch"] = overall(pairs, peer)
            show(f"{task}: dynabatch's regressor", results[task]["dynabatch"])
        found = dict(zip(NAMES, fit(pairs, task).round(6).tolist(), strict=True))
        coefficients[task] = {**found, "longer_square": LONGER_SQUARE}
    note = "in tokens of input; written by benchmarks/memory_prior/fit.py"
    OUTPUT.write_text(json.dumps({"unit": note, "coefficients": coefficients}, indent=1) + "\n")
    RESULT.write_text(json.dumps(results, indent=1) + "\n")
    print("\n", coefficients)


if __name__ == "__main__":
    main()
