"""The guide and the example run as they stand."""

import importlib.util
import re
from pathlib import Path

import pytest

keras = pytest.importorskip("keras", reason="needs Keras; make test-keras runs this")

from . import models  # noqa: E402

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.skipif(not models.CAN_CUT, reason=models.NEEDS_CUTTING)


def test_the_blocks_of_the_guide_run():
    text = (ROOT / "docs" / "keras.md").read_text(encoding="utf-8")
    names = {"__name__": "document"}
    for block in re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        exec(compile(block, "keras.md", "exec"), names)


def test_pieces_follow_memory_and_the_update_stays(capsys):
    spec = importlib.util.spec_from_file_location("keras_memory", ROOT / "examples" / "keras_memory.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    sizes, apart = example.main()
    assert sizes == [8, 16, 32, 64, 64, 64, 64, 32, 16, 16, 16, 16]
    assert apart < 1e-5
    assert "weights differ" in capsys.readouterr().out


@pytest.mark.skipif(models.BACKEND != "tensorflow", reason=models.NEEDS_TENSORFLOW)
def test_the_benchmark_of_padding_runs(tmp_path, monkeypatch, capsys):
    import json
    import sys

    spec = importlib.util.spec_from_file_location("keras_padding", ROOT / "benchmarks" / "keras_padding.py")
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    monkeypatch.setattr(sys, "argv", ["keras_padding.py", "--smoke", "--output", str(tmp_path / "out.json")])
    benchmark.main()
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert all(row["largest"] <= 1 for row in rows.values())
    assert rows["PlannedDataset, Buckets, adaptive"]["traces"] <= rows["PlannedDataset, Buckets, adaptive"]["shapes"]
    assert "s/epoch" in capsys.readouterr().out
