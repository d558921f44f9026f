"""The page of a demo that nobody ran, in a real browser without a network."""

import html.parser
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from batchwright.cli.compare import Settings, compare
from batchwright.cli.demo import records
from batchwright.cli.demo.command import Run, render_page
from batchwright.cli.demo.records import QUICK, ArmResult, Check

LENGTHS = np.array([4, 8, 8, 16, 32, 64, 128, 256])
# Each arm takes the same 516 tokens; the shapes are (examples, padded length).
SHAPES = {
    "fixed 2, shuffled": ((2, 256), (2, 128), (2, 64), (2, 32)),
    "fixed 2, by length": ((2, 8), (2, 16), (2, 64), (2, 256)),
    "planned, full budget": ((7, 128), (1, 256)),
    "planned, small budget": ((4, 16), (2, 64), (1, 128), (1, 256)),
}
CHARTS = {
    "Histogram of lengths": "How long the functions are",
    "Padding by grouping": "Padding by grouping",
    "Loss by seconds": "Loss against time",
    "Loss by examples": "Loss against examples",
    "Tokens computed by each arm": "What was computed",
    "Shapes of the batches": "Shapes of the batches",
}


def make_run(names=tuple(SHAPES), num_checks=3):
    results = [
        ArmResult(
            name=name,
            what="what it does",
            rate=0.002,
            seconds=10.0 + place,
            num_tokens=516,
            checks=tuple(Check(num_examples=2 + 3 * i, seconds=2.0 + i, loss=9.0 / (i + 1)) for i in range(num_checks)),
            shapes=shapes,
        )
        for place, (name, shapes) in enumerate(zip(names, SHAPES.values(), strict=True))
    ]
    return Run(
        longer=[replace(results[place], seconds=10.5 + place) for place in (1, 3)],
        settings=replace(QUICK, max_tokens=1024),
        lengths=LENGTHS,
        comparison=compare(LENGTHS, Settings(max_tokens=1024, seed=0)),
        results=results,
        num_parameters=1_500_000,
        versions={"batchwright": "1.0"},
        seconds=12.0,
    )


@pytest.fixture(scope="module")
def source():
    return render_page(make_run())


@pytest.fixture
def page(browser, source, tmp_path):
    return open_page(browser, source, tmp_path)


def open_page(browser, source, folder, **view):
    path = folder / "index.html"
    path.write_text(source, encoding="utf-8")
    return browser.open(path.as_uri(), **view)


def texts(page, selector):
    return page.value(f"[...document.querySelectorAll({json.dumps(selector)})].map((it) => it.textContent)")


def chart(name, inside=""):
    return f'#charts svg[aria-label="{name}"] {inside}'


def test_each_chart_is_drawn_and_named(page):
    charts = "[...document.querySelectorAll('#charts figure')]"
    assert page.value(f"{charts}.map((it) => it.lastChild.getAttribute('aria-label'))") == list(CHARTS)
    assert texts(page, "#charts figcaption b") == list(CHARTS.values())
    assert page.value("[...document.querySelectorAll('#charts svg[aria-label]')].every((it) => it.role === 'img')")
    assert "budget of 1,024 padded tokens" in texts(page, "#charts figcaption")[1]
    assert not page.value("/NaN|Infinity|undefined/.test(document.getElementById('charts').innerHTML)")
    assert page.problems() == []


def test_marks_say_what_they_are_on_hover(page):
    assert texts(page, chart("Histogram of lengths", "title"))[0] == "4-5 tokens: 1 function"
    padding = texts(page, chart("Padding by grouping", "title"))
    assert any(re.fullmatch(r"Sorted\(\): \d+\.\d % padding in \d+ batches", title) for title in padding)
    # The first check lies above the frame and has no mark.
    assert texts(page, chart("Loss by seconds", "title"))[:2] == [
        "fixed 2, shuffled: loss 4.500 after 3 s",
        "fixed 2, shuffled: loss 3.000 after 4 s",
    ]
    assert "planned, small budget: loss 3.000 after 8 examples" in texts(page, chart("Loss by examples", "title"))
    assert texts(page, chart("Tokens computed by each arm", "title"))[:2] == [
        "fixed 2, shuffled: 516 real tokens",
        "fixed 2, shuffled: 444 tokens of padding",
    ]
    shapes = texts(page, chart("Shapes of the batches", "title"))
    assert shapes[0] == "1,024 padded tokens"
    assert "planned, full budget: 7 of 128 = 896 padded tokens" in shapes
    assert len(shapes) == 1 + sum(map(len, SHAPES.values()))


def test_bars_are_as_long_as_what_they_show(page):
    bars = chart("Tokens computed by each arm", "rect")
    widths = page.value(f"[...document.querySelectorAll({json.dumps(bars)})].map((it) => it.width.baseVal.value)")
    assert widths[1] / widths[0] == pytest.approx(444 / 516, rel=1e-3)
    assert widths[0] == widths[2] == widths[4]


def test_each_arm_has_its_mark_in_legends_and_table(page):
    names = list(SHAPES)
    assert texts(page, "#charts .legend li") == 3 * names
    marks = "it.querySelector('.mark').outerHTML"
    legend = page.value(f"[...document.querySelectorAll('.legend li')].slice(0, 4).map((it) => {marks})")
    table = page.value(f"[...document.querySelectorAll('.cards tbody tr')].map((it) => {marks})")
    assert legend == table
    assert len(set(legend)) == 4
    assert texts(page, ".cards td:first-child") == [f"{name}what it does" for name in names]


def test_a_single_check_is_enough_for_a_page(browser, tmp_path):
    page = open_page(browser, render_page(make_run(num_checks=1)), tmp_path)
    assert len(texts(page, chart("Loss by seconds", ".mark"))) == 4
    assert page.problems() == []


def test_names_stay_text(browser, tmp_path):
    names = ("</script><img src=x>", "b & c", "d", "e")
    page = open_page(browser, render_page(make_run(names)), tmp_path)
    assert texts(page, "#charts .legend li")[:4] == list(names)
    assert page.value("document.images.length") == 0


def test_on_a_phone_nothing_is_wider_than_the_screen(browser, source, tmp_path):
    page = open_page(browser, source, tmp_path, width=390, height=844, dark=True)
    assert page.value("document.documentElement.scrollWidth") == 390
    assert page.value("getComputedStyle(document.body).backgroundColor") == "rgb(21, 23, 26)"


def test_on_a_phone_what_is_read_once_is_folded(browser, source, tmp_path):
    shown = "[...document.querySelectorAll('.part > :not(summary)')].filter((it) => it.checkVisibility()).length"
    wide = open_page(browser, source, tmp_path)
    assert wide.value(shown) == 3  # two paragraphs and a table
    phone = open_page(browser, source, tmp_path, width=390, height=844)
    assert phone.value(shown) == 0
    phone.value("document.querySelector('.part summary').click()")
    assert phone.value(shown) == 2
    assert phone.problems() == []


def test_losses_stay_inside_of_their_frame(browser, tmp_path):
    run = make_run()
    first, second, last = run.results[0].checks
    wild = replace(run.results[0], checks=(first, replace(second, loss=1e6), last))
    page = open_page(browser, render_page(replace(run, results=[wild, *run.results[1:]])), tmp_path)
    for name in ("seconds", "examples"):
        box = f"document.querySelector('#clip-{name} rect').getBBox()"
        frame = page.value(f"(({{ x, y, width, height }}) => [x, y, width, height])({box})")
        assert frame == [46, 28, 402, 228]  # the frame of 460 by 300, and 2 on each side
        assert page.value(f"document.querySelectorAll('[clip-path=\"url(#clip-{name})\"] .line').length") == 4
    assert page.problems() == []


def test_the_page_is_well_formed_and_asks_for_nothing_from_elsewhere(source):
    opened = []

    class Parser(html.parser.HTMLParser):
        def handle_starttag(self, tag, attrs):
            assert not {name for name, _ in attrs} & {"src", "onclick"}
            assert tag == "link" or "href" not in dict(attrs)
            if tag not in ("meta", "link"):
                opened.append(tag)

        def handle_endtag(self, tag):
            assert opened.pop() == tag

    Parser().feed(source)
    assert opened == []
    assert not re.search(r"@import|url\((?!#)|<img|fetch\(", source)


def test_the_verdict_comes_before_everything_else(source):
    text = re.sub(r"<[^>]+>", "\n", source.partition("<body")[2])
    places = [text.index(words) for words in (
        "Against shuffled batches of the same memory", "At about equal updates", "At about equal seconds",
        "The same examples, each once", "The same seconds", "What a GPU gives", "How to read it",
    )]  # fmt: skip
    assert places == sorted(places)
    # 516 tokens in 10 s shuffled, in 13 s planned, in 11 s by length.
    assert "Against shuffled batches of the same memory: slower (0.77x)." in text
    assert "grouped by length: slower (0.85x)." in text
    assert "(14 s planned, 12 s by length, 10 s shuffled)" in text
    assert "So a fixed size grouped by length is the faster choice here." in text


@pytest.mark.parametrize(
    ("seconds", "conclusion"),
    [
        ((10.0, 3.0, 2.5), "So planning is the faster choice here."),  # shuffled, by length, planned
        (
            (10.0, 3.0, 3.1),
            "So what saves time here is that examples of similar length share a batch; on a CPU a plan adds no more. ",
        ),
        ((3.0, 3.0, 3.1), "So there is little to gain here."),
        ((10.0, 3.0, 4.0), "So a fixed size grouped by length is the faster choice here."),
    ],
)
def test_the_verdict_names_the_faster_choice_whichever_it_is(seconds, conclusion):
    arms = make_run().results
    shuffled, grouped, planned = (replace(arm, seconds=took) for arm, took in zip(arms[:3], seconds, strict=True))
    sentences = records.verdict([shuffled, grouped, arms[2], planned], [grouped, planned])
    assert conclusion in sentences[0]


def test_the_verdict_names_the_lowest_loss_first():
    def arm(loss):
        return replace(make_run().results[0], checks=(Check(num_examples=8, seconds=1.0, loss=loss),))

    shuffled, grouped, planned = arm(3.57), arm(3.42), arm(3.67)
    _, updates, seconds, _ = records.verdict([shuffled, grouped, planned, planned], [arm(3.03), arm(2.95)])
    assert updates.endswith("loss 3.42 by length, 3.57 shuffled, 3.67 planned.")
    assert seconds.endswith("loss 2.95 planned, 3.03 by length, 3.57 shuffled.")


def test_stored_results_of_a_gpu_are_marked_as_such(source):
    before, _, section = source.partition("<h2>What a GPU gives</h2>")
    stored = json.loads((Path(records.__file__).parent / "gpu.json").read_text(encoding="utf-8"))
    assert section.startswith("<p><strong>Stored results, not of this run:</strong> measured on one NVIDIA H200")
    for task in stored["tasks"]:
        assert task["title"] in section
        for row in task["rows"]:
            assert row["name"] in section
            assert f">{row['loss']:.2f}</td>" in section
            assert row["name"] not in before


def test_without_javascript_the_page_points_at_the_table(source):
    assert "<noscript><p>The charts need JavaScript; the table above has the figures of each arm.</p>" in source
    assert ">52<" in source  # real tokens per second of the first arm
    assert ">46.2 %<" in source  # 1 - 516 / 960
