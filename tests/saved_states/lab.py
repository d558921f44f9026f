"""The folder of a small lab, what is said about it, and that running it again makes no new run."""

import csv
import io
import shutil
import tempfile
from pathlib import Path

from batchwright.lab import Cell, Lab, LabPlan, presets, strategies
from batchwright.lab.observations import observe
from batchwright.lab.report import read_lab, render_csv, render_markdown

from .cases import FolderCase, plain, without_words

# One rate is chosen from a grid, the other given; sizes are played again by the last strategy.
PLAN = LabPlan(
    name="tiny",
    cells=(
        Cell(dataset="wine", model="logistic", num_epochs=2, options={"num_evaluations": 2}),
        Cell(dataset="diabetes", model="linear", num_epochs=2, options={"num_evaluations": 2}, lr=0.01),
    ),
    strategies=("constant", "linear", "loss_difference_exponential", "replay_loss_difference_exponential"),
    seeds=(0, 1),
    tuning_seeds=(1000,),
    grids={"sgd": (0.01, 0.1), "adam": (0.01,)},
)
FIGURES = ("measure", "strategy", "num_pairs", "mean", "low", "high", "p_corrected", "num_tests", "correction")


def save(folder):
    Lab(folder).run(PLAN, num_workers=0, progress=False)


def go_on(folder):
    lab = read_lab(folder)
    with tempfile.TemporaryDirectory() as place:
        copied = Path(shutil.copytree(folder, Path(place) / "lab"))
        again = Lab(copied).run(PLAN, num_workers=0, progress=False)
        plan = Lab(copied).run(num_workers=0, progress=False) == again and Lab(copied).plan == PLAN
        names = ("runs.jsonl", "tuning.jsonl")
        untouched = [(copied / name).read_bytes() == (folder / name).read_bytes() for name in names]
    return {
        "ids": [record["id"] for record in again],
        "same plan": plan,
        "untouched": untouched,
        "observations": [_figures(found.to_dict()) for found in observe(lab.records)],
        "table": [
            line for line in render_markdown(lab).split("\n") if line.startswith(("| linear", "| loss", "| replay"))
        ],
        "csv": list(csv.reader(io.StringIO(render_csv(lab)))),
        "plan": lab.plan["plan"],
        "presets": {name: presets.get(name).to_dict() for name in presets.names()},
        "strategies": {name: strategies.get(name).group for name in strategies.names()},
    }


def _figures(observation):
    """Return an observation without its sentences."""
    evidence = [{name: part[name] for name in FIGURES if name in part} for part in observation["evidence"]]
    return {"topic": observation["topic"], "strategies": observation["strategies"], "evidence": evidence}


def state(folder):
    """Return the records, without what differs between machines."""
    return [_without_machine(record) for record in Lab(folder).records()]


def _without_machine(record):
    kept = {name: value for name, value in without_words(plain(record)).items() if name not in ("versions", "hardware")}
    for figures in (kept["final"], *kept["curve"]):
        figures.pop("seconds")
    return kept


CASES = [FolderCase("lab", save, go_on, state, tolerance=1e-5)]
