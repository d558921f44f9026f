"""Compare batch-size strategies at equal examples: accuracy, loss, updates, paired over seeds.

    python benchmarks/policies.py [--quick] [--seeds 5] [--workers 2] [--folder FOLDER]

Every arm of a task trains on the same number of examples, from the same weights and in the same order for the same
seed, at one learning rate: the best of a grid for the constant small batch, on seeds that are not reported. Differences
are paired by seed, with 95 % t intervals; p-values are corrected by Holm over the arms, by task and figure. A replay
arm plays the sizes that the adaptive arm chose with another seed: what is left between the two is what adapting did.

Prints Markdown and writes the figures with versions and hardware as JSON. With --folder runs are kept there, and a run
that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchwright._machine import num_cores
from batchwright.errors import ArgumentError
from batchwright.lab._records import hardware, versions
from batchwright.lab.datasets import load
from batchwright.lab.runner import Cell, Lab, LabPlan
from batchwright.lab.statistics import equivalence, holm, paired_difference

_RESULT = Path(__file__).parent / "results" / "policies.json"
_REPLAYED = ("loss_difference_exponential", "noise")
_SIGNALS = (
    *("loss_difference_exponential", "loss_ema_exponential", "loss_variance_exponential"),
    *("entropy", "noise", "noise_ratio"),
)
_ANNEALING = ("lr_decay", "batch_ramp", "hybrid")
_SGD_ARMS = (
    *("constant", "constant_large", "constant_large_scaled", *_ANNEALING, *_SIGNALS),
    *(f"replay_{name}" for name in _REPLAYED),
)
_ADAM_ARMS = (*_SGD_ARMS[:6], "seesaw", *_SGD_ARMS[6:])
# A difference of accuracy that nobody would care about.
_MARGIN = 0.01
_FIGURES = ("metric", "validation_loss", "train_loss")
Record = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """A cell and its arms."""

    title: str
    cell: Cell
    arms: tuple[str, ...]


def _tasks(quick: bool) -> Iterator[Task]:
    if quick:
        cell = Cell(dataset="digits", model="mlp", num_epochs=4, data={"limit": 600}, options={"num_evaluations": 4})
        arms = ("constant", "constant_large", *_ANNEALING, "seesaw", "entropy", "noise", "replay_entropy")
        yield Task("digits, MLP, SGD", cell, arms)
        return
    digits = {"dataset": "digits", "model": "mlp", "num_epochs": 12}
    yield Task("digits, MLP, SGD", Cell(**digits), _SGD_ARMS)
    yield Task(
        "digits, MLP, Adam",
        Cell(**digits, optimizer="adam"),
        ("constant", "constant_large", "constant_large_scaled", *_ANNEALING, "seesaw"),
    )
    yield from _fashion()
    yield from _characters()
    noisy = Cell(dataset="diabetes", model="linear", num_epochs=40, optimizer="adam")
    annealing = ("constant", "constant_large", *_ANNEALING, "seesaw")
    yield Task("diabetes (what is left is noise), linear model, Adam", noisy, annealing)


def _fashion() -> Iterator[Task]:
    """Two tasks: all arms on a short run, and annealing on one three times as long."""
    fashion: dict[str, Any] = {"dataset": "fashion_mnist", "model": "cnn", "data": {"limit": 2000}}
    try:
        load("fashion_mnist", limit=2000)
    except ArgumentError as error:
        print(f"Fashion-MNIST is left out: {error}\n", flush=True)
        return
    title = "Fashion-MNIST (1,600 images), CNN with GroupNorm, SGD"
    yield Task(title, Cell(**fashion, num_epochs=8), _SGD_ARMS)
    yield Task(
        f"{title}, three times as long", Cell(**fashion, num_epochs=24), ("constant", "constant_large", *_ANNEALING)
    )


def _characters() -> Iterator[Task]:
    """Two tasks: all arms, and annealing from a quarter of the size."""
    chars: dict[str, Any] = {"dataset": "python_chars", "model": "char_lm", "optimizer": "adam", "data": {"limit": 600}}
    title = "Python source, character LM, Adam"
    yield Task(title, Cell(**chars, num_epochs=8), _ADAM_ARMS)
    small = Cell(**chars, num_epochs=8, options={"base_size": 2})
    yield Task(f"{title}, from a batch of 2", small, ("constant", "constant_large", *_ANNEALING, "seesaw"))


def main() -> None:
    options = _options()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as spare:
        folder = Path(options.folder or spare)
        tasks = [_run(task, folder / str(place), options) for place, task in enumerate(_tasks(options.quick))]
    result = {
        "seconds": time.perf_counter() - start,
        "processor_seconds": sum(row["seconds"] * options.seeds for task in tasks for row in task["arms"]),
        "num_workers": options.workers,
        "seeds": list(range(options.seeds)),
        "versions": versions(),
        "hardware": hardware(),
        "tasks": tasks,
    }
    print(f"{result['seconds']:.0f} s on {options.workers} workers")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=1) + "\n")


def _run(task: Task, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run all arms of a task, print its table and claims, and return its figures."""
    plan = LabPlan(
        name="policies",
        cells=(task.cell,),
        strategies=task.arms,
        seeds=tuple(range(options.seeds)),
        tuning_seeds=(1000,) if options.quick else (1000, 1001),
    )
    records = Lab(folder).run(plan, num_workers=options.workers)
    tuning = json.loads((folder / "lab.json").read_text())["tuning"][0]
    arms = {name: [record for record in records if record["strategy"] == name] for name in task.arms}
    rows, claims = _rows(arms), _claims(arms)
    settings = records[0]["settings"]
    print(_table(task, settings, rows), *(f"- {claim['text']}" for claim in claims), "", sep="\n", flush=True)
    shown = {"title": task.title, "settings": settings, "tuning": tuning, "metric": records[0]["metric_name"]}
    return {**shown, "arms": rows, "claims": claims}


def _rows(arms: dict[str, list[Record]]) -> list[Row]:
    rows = [_row(name, runs, arms["constant"]) for name, runs in arms.items()]
    for key in _FIGURES:
        tested = [row[key] for row in rows if row[key]["p_value"] is not None and row["arm"] != "constant"]
        for figure, corrected in zip(tested, holm([figure["p_value"] for figure in tested]), strict=True):
            figure["p_holm"] = corrected
    return rows


def _row(name: str, runs: list[Record], baseline: list[Record]) -> Row:
    return {
        "arm": name,
        "num_diverged": sum(_value(run, "metric") is None for run in runs),
        **{key: {"mean": _mean(runs, key), **_compare(runs, baseline, key), "p_holm": None} for key in _FIGURES},
        "updates": _mean(runs, "updates"),
        "updates_saved": 1 - (_mean(runs, "updates") or 0) / (_mean(baseline, "updates") or 1),
        "seconds": _mean(runs, "seconds"),
    }


def _compare(runs: list[Record], others: list[Record], key: str) -> dict[str, Any]:
    """Return the mean difference of a final figure over seeds, its interval and its tests."""
    values, base = _pairs(runs, others, key)
    if not values:
        return dict.fromkeys(("difference", "low", "high", "p_value", "equivalence_p"))
    steps = _resolution(runs[0], key)
    found = paired_difference(values, base, resolution=steps)
    return {
        "difference": found.mean,
        "low": found.low,
        "high": found.high,
        "p_value": found.p_value,
        "equivalence_p": equivalence(values, base, margin=_MARGIN, resolution=steps) if key == "metric" else None,
    }


def _resolution(run: Record, key: str) -> float:
    """Return the steps in which a figure comes: an accuracy counts validation examples."""
    is_accuracy = key == "metric" and run["metric_name"] == "accuracy"
    return 1 / run["properties"]["num_validation"] if is_accuracy else 0.0


def _claims(arms: dict[str, list[Record]]) -> list[dict[str, Any]]:
    """Compare pairs of arms that theory or the adaptive arms speak about."""
    wanted = [
        ("batch_ramp", "lr_decay", "metric", "a ramp of the batch in place of a decay of the rate (Smith)"),
        ("batch_ramp", "lr_decay", "validation_loss", "the same, by validation loss"),
        ("batch_ramp", "lr_decay", "train_loss", "the same, by train loss"),
        ("hybrid", "lr_decay", "metric", "half of each"),
        ("seesaw", "lr_decay", "validation_loss", "Seesaw, by validation loss"),
        ("seesaw", "lr_decay", "train_loss", "Seesaw, by train loss"),
        ("constant_large", "constant", "metric", "a large batch from the start"),
        ("constant_large_scaled", "constant", "metric", "a large batch from the start, rate scaled"),
        *(
            (name, f"replay_{name}", "validation_loss", "adapting, against a replay of the same growth")
            for name in _REPLAYED
        ),
    ]
    return [
        _claim(arms[one], arms[other], *names)
        for one, other, *names in ((one, other, one, other, *rest) for one, other, *rest in wanted)
        if one in arms and other in arms
    ]


def _claim(runs: list[Record], others: list[Record], one: str, other: str, key: str, words: str) -> dict[str, Any]:
    found = _compare(runs, others, key)
    claim = {"one": one, "other": other, "figure": key, "about": words, **found}
    if found["difference"] is None:
        return {**claim, "text": f"{words}: no pair of seeds came to its end"}
    saved = 1 - (_mean(runs, "updates") or 0) / (_mean(others, "updates") or 1)
    text = f"{words}: {key} of {one} minus {other} = {_difference(found)}, {saved:.1%} fewer updates"
    if found["equivalence_p"] is not None:
        text += f"; that they differ by {_MARGIN} or more is tested at p = {found['equivalence_p']:.2g}"
    return {**claim, "updates_saved": saved, "text": text}


def _difference(found: dict[str, Any]) -> str:
    interval = "" if found["low"] is None else f" ({found['low']:+.2g} to {found['high']:+.2g})"
    return f"{found['difference']:+.2g}{interval}"


def _pairs(runs: list[Record], others: list[Record], key: str) -> tuple[list[float], list[float]]:
    """Return the final figures of the seeds that both arms brought to an end."""
    pairs = [(_value(run, key), _value(other, key)) for run, other in zip(runs, others, strict=True)]
    known = [(one, other) for one, other in pairs if one is not None and other is not None]
    return [one for one, _ in known], [other for _, other in known]


def _value(run: Record, key: str) -> float | None:
    return None if run["final"] is None else run["final"][key]


def _mean(runs: list[Record], key: str) -> float | None:
    known = [value for value in (_value(run, key) for run in runs) if value is not None]
    return statistics.fmean(known) if known else None


def _table(task: Task, settings: dict[str, Any], rows: list[Row]) -> str:
    sizes = f"batch {settings['base_size']} to {settings['max_size']}"
    lines = [
        f"### {task.title}: {settings['num_examples']:,} examples, {sizes}, lr {settings['lr']:g}",
        "",
        "| arm | metric | to constant (95 %) | p | validation loss | to constant (95 %) | p "
        "| train loss | updates | saved | CPU s |",
        "| --- |" + " ---: |" * 10,
    ]
    return "\n".join([*lines, *(f"| {' | '.join(_cells(row))} |" for row in rows), ""])


def _cells(row: Row) -> list[str]:
    diverged = f", {row['num_diverged']} diverged" if row["num_diverged"] else ""
    figures = [cell for key in ("metric", "validation_loss") for cell in _figure_cells(row, key)]
    return [
        row["arm"] + diverged,
        *figures,
        _text(row["train_loss"]["mean"], ".4g"),
        _text(row["updates"], ",.0f"),
        _text(row["updates_saved"], ".0%"),
        _text(row["seconds"], ".1f"),
    ]


def _figure_cells(row: Row, key: str) -> list[str]:
    figure = row[key]
    mean = _text(figure["mean"], ".4f")
    if row["arm"] == "constant" or figure["difference"] is None:
        return [mean, "", ""]
    return [mean, _difference(figure), _text(figure["p_holm"], ".2g")]


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke test: one small task, two seeds")
    parser.add_argument("--seeds", type=int, help="seeds of each arm (5; quick: 2)")
    parser.add_argument("--workers", type=int, default=num_cores())
    parser.add_argument("--folder", help="keep the runs here, and go on with those that are there")
    parser.add_argument("--output", type=Path, default=_RESULT)
    options = parser.parse_args()
    options.seeds = options.seeds or (2 if options.quick else 5)
    return options


if __name__ == "__main__":
    main()
