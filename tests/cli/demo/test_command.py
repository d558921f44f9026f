import json
import re
from html.parser import HTMLParser

import pytest

pytest.importorskip("torch")

from batchwright.cli import main

VOID = {"meta", "br", "hr", "img", "input", "link"}


class Page(HTMLParser):
    """Checks that every element is closed and gathers attributes and titles of charts."""

    def __init__(self):
        super().__init__()
        self.open, self.attributes, self.charts = [], [], []

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        self.charts += [value for name, value in attrs if tag == "svg" and name == "aria-label"]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


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


def test_the_page_is_well_formed_and_holds_each_chart(page):
    parser = Page()
    parser.feed(page)
    assert parser.open == []
    assert parser.charts == [
        "Histogram of lengths",
        "Padding by grouping",
        "Loss by seconds",
        "Loss by examples",
        "Tokens computed by each arm",
        "Shapes of the batches",
    ]


def test_the_page_asks_for_nothing_from_elsewhere(page):
    assert not re.search(r"https?:|//|@import|url\((?!#)|<script|<link|<img", page)
    parser = Page()
    parser.feed(page)
    assert not {name for name, _ in parser.attributes} & {"src", "href", "onclick"}


def test_the_page_works_on_phones_in_the_dark_and_on_paper(page):
    assert 'name="viewport"' in page
    for query in ("prefers-color-scheme: dark", "@media print", "max-width: 44rem"):
        assert query in page


def test_marks_say_what_they_are_on_hover(page):
    assert re.search(r"<title>fixed \d+, shuffled: loss \d\.\d{3} after", page)
    assert re.search(r"<title>planned, full budget: \d+ of \d+ = [\d,]+ padded tokens", page)


def test_the_table_agrees_with_the_figures(demo, page):
    arms = json.loads((demo / "results.json").read_text())["arms"]
    assert len(arms) == 4
    for arm in arms:
        assert f">{arm['loss']:.3f}</td>" in page
        assert f">{arm['num_steps']:,}</td>" in page
        assert sum(items for items, _ in arm["shapes"]) == 96


def test_planned_batches_pad_less_and_update_less_often(demo):
    shuffled, _, full, small = json.loads((demo / "results.json").read_text())["arms"]
    assert full["padding"] < shuffled["padding"] / 2
    assert small["padding"] < shuffled["padding"] / 2
    assert full["num_steps"] < shuffled["num_steps"]
    assert shuffled["num_tokens"] == full["num_tokens"] == small["num_tokens"]


def test_no_batch_of_any_arm_exceeds_the_budget(demo):
    found = json.loads((demo / "results.json").read_text())
    shapes = [shape for arm in found["arms"] for shape in arm["shapes"]]
    assert max(items * length for items, length in shapes) <= found["settings"]["max_tokens"]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path, capsys):
    (tmp_path / "taken").write_text("")
    assert main(["demo", "--quick", "--output", str(tmp_path / "taken")]) == 2
    assert "cannot make the folder" in capsys.readouterr().err
