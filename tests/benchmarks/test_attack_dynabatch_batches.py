"""The command that the script names must do what it says."""

import importlib
import sys
from pathlib import Path

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


# Expected: the peaks are in peaks.json, as the script's own usage and --help say. Found: --output is not read with
# --measure-memory; results/dynabatch_peaks.json is written, the option for it is --peaks.
def test_the_documented_command_writes_the_peaks_where_it_says(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    script = importlib.import_module("dynabatch_batches")
    (line,) = [line for line in script.__doc__.splitlines() if "--measure-memory --output" in line]
    monkeypatch.setattr(sys, "argv", line.partition("#")[0].split()[1:])
    assert script._options().peaks == Path("peaks.json")
