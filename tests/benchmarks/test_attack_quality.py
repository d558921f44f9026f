"""benchmarks/quality.py, attacked: figures of its tables are true."""

import importlib
from pathlib import Path

import torch

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


def test_the_mean_size_of_measured_is_none_below_the_smallest_that_ran(monkeypatch):
    # Expected: a mean of the sizes of updates, 16 or more where all are 16 or more.
    # Found: "mean size 0" or 2 in the table of --smoke: seconds of experiments divide, but have no size.
    torch.set_num_threads(1)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    training = importlib.import_module("_cpu_quality.training")
    unit = training.Unit(task="teacher", strategy="measured", seed=0, horizon=1.0, clock="graphs")
    row = training.run(unit, scale=0.02)
    assert row["mean_size"] >= 15.9, row
