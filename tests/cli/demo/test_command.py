import html
import json
import re

import pytest

pytest.importorskip("torch")

from batchwright.cli import main


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """Run the quick demo once; return its folder, what it printed on stdout being checked by the exit code."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    assert main(["demo", "--quick", "--output", str(folder)]) == 0
    return folder


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


def test_a_file_in_place_of_the_folder_is_refused(tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    assert main(["demo", "--quick", "--output", str(tmp_path / "taken")]) == 2
    assert "cannot make the folder" in capsys.readouterr().err
