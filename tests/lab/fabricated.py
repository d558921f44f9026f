"""Records of runs that nobody ran, with an effect planted in them, or with none."""

import itertools
import json
import math
import zlib

import numpy as np

STRATEGIES = {
    "constant": "constant",
    "constant_large": "constant",
    "linear": "linear",
    "exponential": "exponential",
    "cyclical": "cyclical",
    "loss_difference_exponential": "loss",
    "loss_ema_linear": "loss",
    "entropy": "entropy",
    "noise_scale": "noise",
}
DATASETS = {
    "wine": {"kind": "tabular", "dimension": 13, "num_train": 142, "label_noise": 0.05},
    "digits": {"kind": "image", "dimension": 64, "num_train": 1438, "label_noise": 0.02},
    "python_functions": {"kind": "text", "dimension": 4096, "num_train": 1600, "label_noise": None},
}
NUM_POINTS = 13
GRID = (0.01, 0.03, 0.1, 0.3)
TIME_MODEL = {"fixed_ms": 2.0, "per_example_ms": 0.02, "about": "a made-up accelerator"}


def fabricate(
    *,
    effects=None,
    seeds=5,
    datasets=DATASETS,
    models=("mlp",),
    strategies=STRATEGIES,
    noise=0.01,
    num_examples=12_000,
    sizes=None,
    lab=0,
):
    """Return records: the final loss of a strategy is that of the baseline, times 1 + its effect, times some noise.

    An effect may be a number, or a function of the data set's name and properties. ``sizes`` gives strategies a batch
    size that never changes; another ``lab`` has other noise.
    """
    return [
        record(dataset, properties, model, strategy, seed, effects or {}, noise, num_examples, sizes or {}, lab)
        for dataset, properties in datasets.items()
        for model in models
        for strategy in strategies
        for seed in range(seeds)
    ]


def record(dataset, properties, model, strategy, seed, effects, noise, num_examples, sizes, lab):
    rng = np.random.default_rng(
        [*[lab] * (lab > 0), seed, *(zlib.crc32(name.encode()) for name in (dataset, model, strategy))]
    )
    effect = effects.get(strategy, 0.0)
    effect = effect(dataset, properties) if callable(effect) else effect
    loss = 0.3 * (1 + effect) * math.exp(noise * rng.standard_normal())
    curve = make_curve(loss, strategy, num_examples, sizes.get(strategy))
    final = {
        key: curve[-1][key] for key in ("train_loss", "validation_loss", "metric", "updates", "seconds", "examples")
    }
    return {
        "version": 1,
        "id": f"{dataset}-{model}-{strategy}-{seed}",
        "dataset": dataset,
        "model": model,
        "strategy": strategy,
        "group": STRATEGIES.get(strategy, "other"),
        "seed": seed,
        "status": "ok",
        "error": None,
        "settings": {"num_examples": num_examples, "optimizer": "sgd", "lr": 0.1, "min_size": 16, "max_size": 512},
        "properties": {"num_validation": 100, "num_classes": 10, "task": "classification", **properties},
        "num_parameters": 4810,
        "metric_name": "accuracy",
        "curve": curve,
        "decisions": make_decisions(curve),
        "final": final,
        "tuning": make_tuning(0.1),
        "time_model": TIME_MODEL,
        "versions": {"batchwright": "0.1", "torch": "2.13", "python": "3.11"},
        "hardware": {"machine": "x86_64", "num_cpus": 2, "processor": "a processor"},
    }


def make_tuning(chosen, grid=GRID):
    """Return how a rate was chosen from a grid; None if every rate of it failed."""
    losses = {str(rate): None if chosen is None else 0.3 + abs(math.log(rate / chosen)) for rate in grid}
    edge = chosen in (grid[0], grid[-1])
    return {"grid": [*grid], "losses": losses, "chosen": chosen, "is_at_edge": edge, "num_runs": 2 * len(grid)}


def older(record):
    """Return a record as it was before rates were tuned by strategy and seconds simulated."""
    curve = [{key: value for key, value in point.items() if key != "simulated_seconds"} for point in record["curve"]]
    kept = {key: value for key, value in record.items() if key not in ("tuning", "time_model")}
    return kept | {"curve": curve}


def make_curve(loss, strategy, num_examples, fixed_size=None):
    """Fall from 2.3 to ``loss``; the batch size follows the strategy's name, unless it is fixed."""
    points, updates, seconds = [], 0.0, 0.0
    for place in range(NUM_POINTS):
        share = place / (NUM_POINTS - 1)
        size = fixed_size or batch_size(strategy, place)
        if place:
            updates += num_examples / (NUM_POINTS - 1) / size
            seconds = 0.002 * updates + 0.00002 * share * num_examples
        value = loss + (2.3 - loss) * (math.exp(-5 * share) - math.exp(-5)) / (1 - math.exp(-5))
        points.append(
            {
                "examples": round(share * num_examples),
                "updates": round(updates),
                "seconds": round(1.5 * seconds, 4),
                "simulated_seconds": round(seconds, 4),
                "epoch": place,
                "train_loss": None if place == 0 else 0.9 * value,
                "validation_loss": value,
                "metric": 1 - value / 2.5,
                "batch_size": size,
                "lr": 0.1,
                "noise_scale": None,
            }
        )
    return points


def batch_size(strategy, place):
    if strategy == "constant":
        return 32
    if strategy == "constant_large":
        return 256
    if strategy == "cyclical":
        return 32 * 2 ** (place % 4)
    if strategy in ("linear", "loss_ema_linear"):
        return 32 + 16 * place
    return min(512, round(32 * 1.3**place))


def make_decisions(curve):
    return [
        {
            "examples": point["examples"],
            "step": point["updates"],
            "epoch": point["epoch"],
            "old": before["batch_size"],
            "new": point["batch_size"],
            "reason": f"loss fell {100 * (1 - point['validation_loss'] / before['validation_loss']):.1f} %",
        }
        for before, point in itertools.pairwise(curve)
        if before["batch_size"] != point["batch_size"]
    ]


def fail(record, error="DoesNotFitError: one example alone runs out of memory"):
    """Return the record of a run that broke off."""
    return record | {"status": "failed", "error": error, "curve": [], "decisions": [], "final": {}}


def write_folder(folder, records, *, plan=None):
    """Write a folder as a lab does."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "runs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records), encoding="utf-8")
    if plan is not None:
        (folder / "lab.json").write_text(json.dumps(plan), encoding="utf-8")
    return folder
