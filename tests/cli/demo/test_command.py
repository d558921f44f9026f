import contextlib
import html
import io
import json
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

from batchwright.cli import main
from batchwright.cli.demo.records import MINUTES


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Run the quick demo once; return its folder, with what it printed on stdout beside its files."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["demo", "--quick", "--output", str(folder)]) == 0
    (folder / "printed.txt").write_text(out.getvalue(), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def printed(demo):
    return (demo / "printed.txt").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(demo):
    """Return the page as text."""
    return (demo / "index.html").read_text(encoding="utf-8")


def test_the_page_draws_what_was_trained(demo, browser):
    page = browser.open((demo / "index.html").as_uri())
    titles = page.value("[...document.querySelectorAll('svg title')].map((it) => it.textContent)")
    assert any(re.match(r"fixed \d+, shuffled: loss \d\.\d{3} after", title) for title in titles)
    assert any(re.match(r"planned, full budget: \d+ of \d+ = [\d,]+ padded tokens", title) for title in titles)
    assert page.problems() == []


def test_the_table_agrees_with_the_figures(demo, page):
    arms = json.loads((demo / "results.json").read_text())["arms"]
    assert len(arms) == 5
    for arm in arms:
        assert f">{arm['loss']:.3f}</td>" in page
        assert f">{arm['num_steps']:,}</td>" in page
        assert sum(items for items, _ in arm["shapes"]) == 96


def test_planned_batches_pad_less_and_update_less_often(demo):
    shuffled, _, full, small, _ = json.loads((demo / "results.json").read_text())["arms"]
    assert full["padding"] < shuffled["padding"] / 2
    assert small["padding"] < shuffled["padding"] / 2
    assert full["num_steps"] < shuffled["num_steps"]
    assert shuffled["num_tokens"] == full["num_tokens"] == small["num_tokens"]


def test_the_size_that_nobody_chose_is_explained(demo, page):
    found = json.loads((demo / "results.json").read_text())["arms"][-1]
    assert found["name"] == "size found on the way"
    assert found["num_steps"] == found["num_updates"] <= len(found["shapes"])
    assert found["reasons"]
    for reason in found["reasons"]:
        assert html.escape(reason) in page
    assert "A size that nobody chose" in page


def test_no_batch_of_any_arm_exceeds_the_budget(demo):
    found = json.loads((demo / "results.json").read_text())
    shapes = [shape for arm in found["arms"] for shape in arm["shapes"]]
    assert max(items * length for items, length in shapes) <= found["settings"]["max_tokens"]


def test_the_end_says_how_to_ask_about_data_of_ones_own(printed, page):
    assert printed.rstrip().endswith("Your own data: batchwright advise FILE")
    assert "<code>batchwright advise FILE</code>" in page


def test_a_file_in_place_of_the_folder_is_refused(tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    assert main(["demo", "--quick", "--output", str(tmp_path / "taken")]) == 2
    assert "cannot make the folder" in capsys.readouterr().err


def test_the_verdict_is_printed_before_the_tables(printed):
    places = [
        printed.index(words)
        for words in ("Against shuffled", "The same examples", "The same seconds", "On a GPU (stored")
    ]
    assert places == sorted(places)
    assert f"at most {MINUTES} minutes" in printed


def test_equal_seconds_are_about_equal_and_begin_anew(demo):
    found = json.loads((demo / "results.json").read_text())
    shuffled, grouped, _, small, _ = found["arms"]
    for arm, epoch in zip(found["arms_for_equal_seconds"], (grouped, small), strict=True):
        assert arm["name"] == epoch["name"]
        expected = min(8, shuffled["seconds"] / epoch["seconds"]) * epoch["num_steps"]
        assert arm["num_steps"] == max(1, round(expected))
        assert arm["num_tokens"] >= arm["num_steps"]
    assert len(found["verdict"]) == 4


def test_one_number_of_minutes_is_said_everywhere():
    root = Path(__file__).parents[3]
    for name in ("README.md", "Makefile", "docs/getting_started.md"):
        text = (root / name).read_text(encoding="utf-8")
        said = re.findall(r"(?:(?:batchwright|make) demo|demo:)[^`]*?\((\d+) minutes?", text)
        said += re.findall(r"`make demo` in a clone.*?\((\d+) minutes", text, flags=re.DOTALL)
        assert set(said) == {str(MINUTES)}, name


def test_the_environment_of_the_demo_is_a_small_one():
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert re.search(r'^demo = \["batchwright\[torch\]"\]$', project, flags=re.MULTILINE)
