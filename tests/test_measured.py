"""What ``tools/measured.py`` writes from result files: nothing is stale, and what a file lacks is named."""

import doctest
import importlib.util
import json
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOL = ROOT / "tools" / "measured.py"


def load_tool():
    spec = importlib.util.spec_from_file_location("measured", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


measured = load_tool()
reading = sys.modules["_measured.reading"]


@pytest.fixture(scope="module")
def rendered():
    return measured.render()


@pytest.fixture
def results(tmp_path, monkeypatch):
    """Result files that a test may change."""
    for path in reading.RESULTS.glob("*.json"):
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.setattr(reading, "RESULTS", tmp_path)
    reading.read.cache_clear()
    yield tmp_path
    reading.read.cache_clear()


def change(path, edit):
    values = json.loads(path.read_text())
    edit(values)
    path.unlink()
    path.write_text(json.dumps(values))


def test_no_number_is_stale(rendered):
    assert measured.stale(rendered) == [], "run python tools/measured.py"


def test_a_changed_result_makes_the_page_stale(results, monkeypatch):
    def edit(values):
        values["summary"][0]["p50_ms"] = 1.25

    change(results / "serving.json", edit)
    assert "1.2, " in measured.serving.render()
    table = measured.serving.render().split("\n\n")[2]
    assert table.startswith("| p50")
    assert table not in (ROOT / measured.PAGE).read_text()


def test_a_missing_file_a_missing_row_and_a_missing_key_are_named(results):
    (results / "serving_traces.json").unlink()
    with pytest.raises(reading.StaleResult, match=r"serving_traces\.json is not in benchmarks/results"):
        measured.serving.render()
    change(results / "gpu_training_drawn.json", lambda values: values.update(rows=[]))
    with pytest.raises(reading.StaleResult, match=r"gpu_training_drawn\.json, rows: no entry has arm='calibrated"):
        measured.training.render()
    reading.read.cache_clear()
    change(results / "keras_padding.json", lambda values: values["rows"]["tf.data, quantiles"].pop("padding"))
    with pytest.raises(
        reading.StaleResult, match=r"keras_padding\.json, rows, tf\.data, quantiles: no 'padding' among"
    ):
        measured.sizes.render()


def test_the_command_says_what_is_missing_and_writes_nothing(results, capsys):
    (results / "serving_stress.json").unlink()
    before = (ROOT / measured.PAGE).read_bytes()
    assert measured.main([]) == 2
    assert "serving_stress.json" in capsys.readouterr().err
    assert (ROOT / measured.PAGE).read_bytes() == before


def test_every_section_names_a_command_and_its_raw_results(rendered):
    for section in rendered[measured.PAGE].split("\n## ")[1:]:
        assert re.search(r"`(python benchmarks/\w+\.py|make bench)", section), section.splitlines()[0]
        links = re.findall(r"\]\(\.\./(benchmarks/results/[\w.]+)\)", section)
        assert links
        assert all((ROOT / link).exists() for link in links)
    for script in set(re.findall(r"python (benchmarks/\w+\.py)", rendered[measured.PAGE])):
        assert (ROOT / script).exists()


def test_the_picture_is_one_that_needs_nothing_from_elsewhere(rendered):
    picture = ET.fromstring(rendered[measured.PICTURE])
    names = "".join(element.text or "" for element in picture.iter("{http://www.w3.org/2000/svg}text"))
    assert all(line.name in names for line in measured.picture.LINES)
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import", rendered[measured.PICTURE])


@pytest.mark.parametrize("name", ["_measured.reading", "_measured.tables", "measured"])
def test_the_examples_of_the_tool_run(name):
    module = measured if name == "measured" else sys.modules[name]
    failed, tried = doctest.testmod(module)
    assert tried
    assert not failed
