"""The page in a real browser that has no network."""

import base64
import contextlib
import json
import threading

import pytest

from batchwright.lab.report import server, write_report
from batchwright.lab.report.server import make_server

from .fabricated import DATASETS, STRATEGIES, fabricate, fail, write_folder

RECORDS = fabricate(effects={"exponential": -0.2, "constant_large": 0.3}, models=("mlp", "logistic"), seeds=3)
NUM_CELLS = 6


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("lab"), [*RECORDS, fail(RECORDS[-1] | {"seed": 8})])
    return write_report(folder).html.as_uri()


@pytest.fixture
def page(browser, address):
    return browser.open(address)


def count(page, selector):
    return page.value(f"document.querySelectorAll({json.dumps(selector)}).length")


def visible(page, selector):
    found = f"[...document.querySelectorAll({json.dumps(selector)})]"
    return page.value(f"{found}.filter((it) => it.checkVisibility()).map((it) => it.textContent)")


def press(page, name, value):
    """Press a button of a switch, as a click does."""
    page.value(f"document.querySelector('input[data-state={name}][value={value}]').click()")


def test_every_chart_is_drawn_without_a_word_on_the_console_or_a_request(page, tmp_path):
    assert count(page, "#curves-grid svg") == count(page, "#pareto-grid svg") == NUM_CELLS
    # A line for each strategy in each chart, and its batch size underneath; a mark for each in the others.
    assert count(page, "#curves-grid path.line[data-strategy]") == NUM_CELLS * len(STRATEGIES)
    assert count(page, "#curves-grid path.line.size") == NUM_CELLS * len(STRATEGIES)
    assert count(page, "#pareto-grid [data-strategy]") == NUM_CELLS * len(STRATEGIES)
    assert not page.value(
        "[...document.querySelectorAll('path')].some((it) => /NaN|Infinity/.test(it.getAttribute('d')))"
    )
    assert page.problems() == []
    assert page.screenshot(tmp_path / "desktop.png").stat().st_size > 30_000


def test_a_page_that_asks_for_something_is_noticed(page):
    page.value("fetch('http://elsewhere.example/').catch(() => 0)")
    assert any("elsewhere" in str(problem) for problem in page.problems())


def test_filters_choose_data_set_model_and_group(page):
    page.choose("dataset", "wine")
    assert visible(page, "#curves-grid figcaption") == ["wine logistic", "wine mlp"]
    assert visible(page, "[data-measure=loss] thead th") == ["strategy", "winelogistic", "winemlp"]
    page.choose("model", "mlp")
    assert count(page, "#curves-grid svg") == count(page, "#pareto-grid svg") == 1
    page.choose("group", "loss")
    assert len(visible(page, "[data-measure=loss] tbody tr")) == 2
    # The two of the group and the baseline.
    assert count(page, "#curves-grid path.line[data-strategy]") == 3
    page.value("document.querySelector('#reset').click()")
    assert count(page, "#curves-grid svg") == NUM_CELLS
    assert page.problems() == []


def test_a_combination_without_runs_says_so(page):
    page.value("document.querySelector('[data-state=dataset]').add(new Option('none', 'none'))")
    page.choose("dataset", "none")
    assert "choose another" in visible(page, "#curves-grid p")[0]


def test_the_measure_changes_the_matrix(page):
    first = "Final validation loss against constant"
    assert visible(page, ".matrix caption")[0].startswith(first)
    page.choose("measure", "updates")
    (caption,) = visible(page, ".matrix caption")
    assert caption.startswith("Updates against constant")
    assert all("%" in text for text in visible(page, ".matrix tbody td"))


def test_pointing_at_a_curve_shows_its_values(page):
    page.choose("dataset", "wine")
    page.choose("model", "mlp")
    # The plane ends 190 of 1104 pixels before the right edge: the last point is near four fifths.
    page.move("#curves-grid svg", 0.825, 0.3)
    text = page.value("document.querySelector('#tip').textContent")
    runs = [run for run in RECORDS if (run["dataset"], run["model"], run["strategy"]) == ("wine", "mlp", "exponential")]
    mean = sum(run["final"]["validation_loss"] for run in runs) / len(runs)
    assert text.startswith("wine · mlp, 12,000 examples")
    assert f"exponential{float(f'{mean:.3g}'):g} · batch 512" in text
    assert page.value("document.querySelector('.guide').getAttribute('visibility')") == "visible"


def test_arrow_keys_walk_along_a_curve(page):
    page.choose("dataset", "wine")
    page.value(
        "(() => { const it = document.querySelector('#curves-grid svg'); it.focus();"
        "it.dispatchEvent(new KeyboardEvent('keydown', {key: 'ArrowLeft'})); })()"
    )
    # 13 points over 12,000 examples: the last but one.
    assert "11,000 examples" in page.value("document.querySelector('#tip').textContent")


def test_pointing_at_a_mark_shows_cost_and_quality(page):
    page.choose("dataset", "wine")
    page.choose("model", "mlp")
    page.move("#pareto-grid rect.base", 0.5, 0.5)
    text = page.value("document.querySelector('#tip').textContent")
    # 12,000 examples in batches of 32.
    assert text.startswith("constant, 3 seeds")
    assert "updates375" in text


def test_the_axis_changes_the_curves(page):
    path = "document.querySelector('#curves-grid path[data-strategy=exponential]').getAttribute('d')"
    before = page.value(path)
    press(page, "x", "updates")
    assert page.value(path) != before
    assert "updates" in visible(page, "#curves-grid text.name")
    page.choose("y", "metric")
    assert "accuracy" in visible(page, "#curves-grid text.name")


def test_curves_are_drawn_along_examples_updates_and_simulated_seconds(page):
    for axis, name in (("examples", "examples"), ("updates", "updates"), ("simulated", "simulated seconds")):
        press(page, "x", axis)
        assert name in visible(page, "#curves-grid text.name")
        assert count(page, "#curves-grid path.line[data-strategy]") == NUM_CELLS * len(STRATEGIES)
    assert "x=simulated" in page.value("location.hash")
    assert page.problems() == []


def test_the_switch_is_worked_with_the_keyboard(page):
    page.value("document.querySelector('input[data-state=x]:checked').focus()")
    for kind in ("rawKeyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key="ArrowRight", code="ArrowRight", windowsVirtualKeyCode=39)
    assert page.value("document.querySelector('input[data-state=x]:checked').value") == "updates"
    assert "updates" in visible(page, "#curves-grid text.name")
    assert page.value("document.activeElement.value") == "updates"


# Pairs of texts of a chart, or of boxes beside each other, that lie on top of each other by more than a pixel.
OVERLAPS = """(() => {
  const all = (kind, within = document) => [...within.querySelectorAll(kind)].filter((it) => it.checkVisibility());
  const shared = (a, b) => Math.min(
    Math.min(a.right, b.right) - Math.max(a.left, b.left), Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top));
  const groups = [
    ...all('figure svg').map((it) => all('text', it)),
    all('.controls > label, .switch label, #chips > *'),
    all('header > :not(.skip), nav, form, main > section, footer'),
  ];
  const found = [];
  for (const some of groups) some.forEach((one, place) => some.slice(place + 1).forEach((other) => {
    if (shared(one.getBoundingClientRect(), other.getBoundingClientRect()) > 1)
      found.push([one, other].map((it) => it.textContent.slice(0, 30)).join(' / '));
  }));
  return found;
})()"""


@pytest.mark.parametrize("width", [400, 1400])
def test_nothing_overlaps_and_nothing_is_wider_than_the_window(browser, address, width, tmp_path):
    page = browser.open(address, width=width)
    for axis in ("examples", "updates", "simulated", "seconds"):
        press(page, "x", axis)
        assert page.value(OVERLAPS) == []
        assert page.value("document.documentElement.scrollWidth") <= width
    page.screenshot(tmp_path / f"{width}.png", height=3000)


def test_an_overlap_is_noticed(page):
    page.value("document.querySelector('nav').style.marginTop = '-200px'")
    assert page.value(OVERLAPS) != []


def test_the_verdict_is_on_top_in_words_and_its_figures_are_folded_away(page):
    assert visible(page, ".lead") == [
        "After the same examples, better than a constant batch of 32: exponential, whose loss ended "
        "20\N{NO-BREAK SPACE}% lower. "
        "Worse: constant_large, whose loss ended 30\N{NO-BREAK SPACE}% higher."
    ]
    assert visible(page, ".answers dt") == ["What was compared", "How sure", "What it costs"]
    said = " ".join(visible(page, "header :is(.lead, .answers)"))
    assert "p <" not in said.replace("\N{NO-BREAK SPACE}", " ")
    assert visible(page, "header .verdict") == []
    page.value("document.querySelector('header summary').click()")
    first, *others = visible(page, "header .verdict")
    assert first.startswith("One strategy ended with a lower validation loss than a constant batch of 32")
    assert "at most half of the updates" in " ".join(others)
    assert "in the same simulated seconds" in " ".join(others)


def test_no_winner_is_said_to_be_none(browser, tmp_path):
    page = browser.open(write_report(write_folder(tmp_path, fabricate(seeds=3))).html.as_uri())
    assert visible(page, ".lead")[0].startswith("After the same examples, no strategy is shown to be better than a")
    assert "which could be chance" in visible(page, ".lead")[0]
    assert "would have been seen in four of five labs" in " ".join(visible(page, ".answers dd"))


# What is drawn of every line and band, and whether it lies inside the plot of its chart.
OUTSIDE = """(() => {
  const found = [];
  for (const drawing of document.querySelectorAll('#curves-grid svg[role=img], #pareto-grid svg[role=img]'))
    for (const mark of drawing.querySelectorAll('.line, .band, .mark, .whisker, .front')) {
      const clip = mark.closest('[clip-path]')?.getAttribute('clip-path').slice(5, -1);
      const frame = clip && drawing.querySelector(`#${clip} rect`).getBBox();
      const view = drawing.viewBox.baseVal;
      const [right, bottom] = frame ? [frame.x + frame.width, frame.y + frame.height] : [0, 0];
      const isOut = !frame || frame.x < 0 || frame.y < 0 || right > view.width || bottom > view.height;
      if (isOut) found.push(mark.outerHTML);
    }
  return found;
})()"""


def test_curves_that_run_away_stay_in_their_plot_and_leave_room_for_the_others(browser, tmp_path):
    records = fabricate(models=("mlp",), datasets={"wine": DATASETS["wine"]}, seeds=2)
    for run in records:
        if run["strategy"] == "cyclical":
            for point in run["curve"][6:8]:
                point |= {"validation_loss": 1e4, "metric": -9.0}
            run["final"] = run["final"] | {"metric": -9.0}
    page = browser.open(write_report(write_folder(tmp_path, records)).html.as_uri())
    for value in ("loss", "metric"):
        page.choose("y", value)
        assert page.value(OUTSIDE) == []
        assert "1 line leaves the plot" in visible(page, "#curves-grid text.end")
        # The curve of the baseline takes more than half of the plot: the outlier does not flatten it.
        height = page.value("document.querySelector('#curves-grid path.line.base').getBBox().height")
        assert height > 150
    assert "1 mark lies outside" in visible(page, "#pareto-grid text.end")
    assert page.problems() == []


def colours(page):
    """Return the colour of each strategy's line in the first chart."""
    lines = page.value(
        "[...document.querySelector('#curves-grid svg').querySelectorAll('path[data-strategy]')]"
        ".map((it) => [it.dataset.strategy, it.getAttribute('class').replace('line ', '')])"
    )
    return dict(lines)


def test_a_group_that_is_shown_alone_keeps_its_colours_and_has_no_grey_line(page):
    before = colours(page)
    assert before["loss_difference_exponential"] != "rest"
    assert before["loss_ema_linear"] == before["cyclical"] == "rest"
    page.choose("group", "loss")
    alone = colours(page)
    assert alone["loss_difference_exponential"] == before["loss_difference_exponential"]
    assert len(set(alone.values()) - {"rest"}) == len(alone) == 3
    page.choose("group", "")
    assert colours(page) == before


def test_a_name_that_gives_its_colour_back_leaves_the_others_theirs(page):
    before = colours(page)
    first = next(name for name, slot in before.items() if slot == "s0")
    page.value(f"[...document.querySelectorAll('#chips button')].find((it) => it.textContent === '{first}').click()")
    assert colours(page) == before | {first: "rest"}
    page.value("[...document.querySelectorAll('#chips button')].find((it) => it.textContent === 'cyclical').click()")
    assert colours(page) == before | {first: "rest", "cyclical": "s0"}


def test_a_name_colours_its_line(page):
    page.value(
        "[...document.querySelectorAll('#chips button')].find((it) => it.textContent === 'constant_large').click()"
    )
    classes = page.value(
        "document.querySelector('#curves-grid path[data-strategy=constant_large]').getAttribute('class')"
    )
    assert "rest" not in classes


def test_decisions_are_told_in_words(page):
    options = visible(page, "#run option") or page.value(
        "[...document.querySelectorAll('#run option')].map((it) => it.value)"
    )
    # Every run that ended, not the one that failed.
    assert len(options) == len(RECORDS)
    page.value(
        "(() => { const list = document.querySelector('#run'); list.value = 'wine · mlp · exponential · seed 1';"
        "list.dispatchEvent(new Event('change')); })()"
    )
    # 32 times 1.3 to the power of 1 to 10, then 512.
    assert "11 changes of the batch size, between 32 and 512." in visible(page, "#decisions p")
    assert any("32 → 42" in row and "loss fell" in row for row in visible(page, "#decisions tbody tr"))


def test_what_was_chosen_is_in_the_address(browser, address, page):
    page.choose("dataset", "digits")
    again = browser.open(page.value("location.href"))
    assert visible(again, "#curves-grid figcaption") == ["digits logistic", "digits mlp"]


def test_on_a_phone_nothing_is_wider_than_the_screen(browser, address, tmp_path):
    page = browser.open(address, width=390, height=844)
    assert page.value("document.documentElement.scrollWidth") == 390
    # Two charts, and a button for the others.
    assert count(page, "#curves-grid svg") == 2
    page.value("document.querySelector('#curves-grid .more').click()")
    assert count(page, "#curves-grid svg") == NUM_CELLS
    assert page.screenshot(tmp_path / "phone.png", height=2000).stat().st_size > 30_000
    assert page.problems() == []


def test_on_a_phone_long_parts_are_folded_until_one_is_wanted(browser, address):
    page = browser.open(address, width=390, height=844)
    assert visible(page, ".topic p") == visible(page, "#decisions-of p") == visible(page, "#about table") == []
    # Nine screens at most; unfolded, it is more than twice as long.
    length = "document.documentElement.scrollHeight / innerHeight"
    assert page.value(length) < 9
    page.value("document.querySelector('.topic button').click()")
    assert visible(page, ".topic p")[0].startswith("163 runs, of which 162 ended well")
    page.value("document.querySelector('nav a[href=\"#about\"]').click()")
    assert visible(page, "#about caption")
    page.value("document.querySelectorAll('.folded button[aria-expanded=false]').forEach((it) => it.click())")
    assert count(page, ".folded") == 0
    assert page.value(length) > 12
    assert page.problems() == []


def test_on_a_wide_screen_nothing_is_folded(page):
    assert count(page, ".folded") == 0
    assert len(visible(page, ".topic p")) > 10


def test_at_night_the_ground_is_dark(browser, address):
    ground = "getComputedStyle(document.body).backgroundColor"
    assert browser.open(address, dark=True).value(ground) == "rgb(21, 23, 26)"
    assert browser.open(address).value(ground) == "rgb(253, 253, 251)"


def test_it_prints(page):
    paper = base64.b64decode(page.call("Page.printToPDF", printBackground=True)["data"])
    assert paper.startswith(b"%PDF")
    assert len(paper) > 50_000


def test_hostile_names_stay_text(browser, tmp_path):
    name = "<img src=x onerror=document.title='caught'>"
    records = fabricate(strategies=("constant", name), datasets={name: DATASETS["wine"]}, seeds=2)
    page = browser.open(write_report(write_folder(tmp_path, records)).html.as_uri())
    assert count(page, "img") == 0
    assert page.value("document.title") != "caught"
    assert count(page, "#curves-grid svg") == 1


def test_one_run_alone_makes_a_page(browser, tmp_path):
    records = fabricate(strategies=("linear",), datasets={"wine": DATASETS["wine"]}, seeds=1)
    page = browser.open(write_report(write_folder(tmp_path, records)).html.as_uri())
    assert "Nothing can be concluded" in visible(page, ".lead")[0]
    assert count(page, "#curves-grid svg") == 1
    assert page.problems() == []


@pytest.mark.parametrize(
    "records",
    [
        [fail(run) | {"properties": {}, "metric_name": None, "final": None} for run in RECORDS[:6]],
        [run for run in RECORDS if run["strategy"] != "constant"],
        [{"id": "a", "dataset": "d", "model": "m", "strategy": "s", "seed": 0, "status": "ok"}],
    ],
    ids=["all failed", "no baseline", "next to nothing"],
)
def test_a_lab_with_little_to_show_still_makes_a_page(browser, tmp_path, records):
    page = browser.open(write_report(write_folder(tmp_path, records)).html.as_uri())
    assert "Nothing can be concluded" in visible(page, ".lead")[0]
    assert page.problems() == []


@contextlib.contextmanager
def serving(folder):
    with make_server(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def test_a_served_page_shows_how_far_the_lab_is(browser, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "SECONDS_BETWEEN_PAGES", 0.0)
    records = fabricate(strategies=("constant", "linear"), datasets={"wine": DATASETS["wine"]}, seeds=5)
    cells = [{"dataset": "wine", "num_epochs": 4}]
    plan = {"seeds": [*range(5)], "strategies": ["constant", "linear"], "cells": cells}
    (tmp_path / "lab.json").write_text(json.dumps({"plan": plan}))
    with serving(tmp_path) as address:
        page = browser.open(address, ready="document.querySelector('progress') !== null", hurried=True)
        assert visible(page, ".lead") == ["No run of this lab has ended yet: 0 of 10. This page reloads by itself."]
        assert page.value("getComputedStyle(document.body).maxWidth") != "none"  # it looks as the page that follows
        write_folder(tmp_path, records[:4])
        page.wait("document.querySelector('#live p')?.textContent.startsWith('4 of 10 runs so far; this page')")
        write_folder(tmp_path, records[:6])
        page.wait("document.querySelector('#live p').textContent.startsWith('6 of 10 runs so far, less than a minute')")
        assert page.value("(({ value, max }) => [value, max])(document.querySelector('#live progress'))") == [6, 10]
        write_folder(tmp_path, records)
        page.wait("document.querySelector('.figures b').textContent === '10'")
        page.wait("document.querySelector('#live').hidden")
        assert page.problems() == []


def test_a_served_page_follows_the_lab(browser, tmp_path, monkeypatch):
    monkeypatch.setattr(server, "SECONDS_BETWEEN_PAGES", 0.0)
    with serving(write_folder(tmp_path, RECORDS[:20])) as address:
        page = browser.open(address, hurried=True)
        assert visible(page, ".figures b")[0] == "20"
        write_folder(tmp_path, RECORDS[:30])
        page.wait("document.querySelector('.figures b').textContent === '30'")
    page.wait("document.querySelector('#live').textContent.startsWith('No longer served')")
