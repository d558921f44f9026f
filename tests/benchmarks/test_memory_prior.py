"""The checks of the memory prior: pairs from rows, and the output that generation is assumed to have."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "memory_prior"
RESULTS = FOLDER.parent / "results"


@pytest.fixture
def script(monkeypatch):
    """A function that imports a file of the folder, which is no package."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def test_pairs_may_differ_in_their_output(script, tmp_path):
    path = tmp_path / "raw.csv"
    header = "family,task,attention,dtype,num_items,length,output_length,bytes"
    rows = ["t5,generate,eager,f,2,96,48,100", "t5,generate,eager,f,4,32,16,50", "t5,generate,eager,f,4,32,48,70"]
    path.write_text("\n".join([header, *rows]) + "\n")
    load = script("rows").load_pairs
    # A batch has more items and shorter inputs; two of equal shape are a pair both ways.
    assert load("generate", path).ratio.tolist() == [0.7]
    assert sorted(load("generate", path, same_output=False).ratio.tolist()) == [0.5, 0.7, 50 / 70, 1.4]


def test_batches_called_safe_are_counted(script):
    rows = script("rows")
    # 4 × 32 beside 4 × 512 is predicted far below 0.9, and 8 × 512 is twice the reference.
    reference = np.array([[4, 512, 16, 100.0]] * 3)
    batch = np.array([[4, 32, 16, 50.0], [4, 32, 16, 150.0], [8, 512, 16, 200.0]])
    found = script("evaluate_output").score(rows.Pairs(reference, batch, np.array(["t5"] * 3)), is_given=False)
    assert found == {"num_pairs": 3, "num_safe": 2, "unsafe_share": 0.5, "largest": 1.5, "found_share": 1.0}


def test_no_measured_batch_passes_the_reference_where_the_assumed_output_holds(script):
    evaluate = script("evaluate_output")
    results = evaluate.results()
    assert results == json.loads((RESULTS / "memory_prior_output.json").read_text())
    assert results["exactly as assumed"]["unsafe_share"] == results["at most as assumed"]["unsafe_share"] == 0
    assert results["fixed output"]["unsafe_share"] < 0.02
    assert results["fixed output, given"]["unsafe_share"] < 0.002
