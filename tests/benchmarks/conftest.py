"""Scripts of benchmarks/, which is a folder of scripts and no package."""

import importlib
import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch):
    """A function that imports a file of benchmarks/."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


@pytest.fixture
def smoke_test(script, monkeypatch, tmp_path, capsys):
    """A function that runs a script with --smoke and returns what it wrote as JSON."""

    def run(name, *options):
        monkeypatch.setattr(sys, "argv", [name, "--smoke", "--output", str(tmp_path / "out.json"), *options])
        script(name).main()
        return json.loads((tmp_path / "out.json").read_text())

    return run
