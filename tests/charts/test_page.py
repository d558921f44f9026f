import html.parser
import json
import re

import pytest

from batchwright._charts.page import POLICY, Markup, embed, read_asset, render_page, render_table


def test_a_page_asks_for_nothing_from_elsewhere():
    page = render_page("a < b", "<p>text</p>", scripts=["const mine = svg;\n"])
    assert "<title>a &lt; b</title>" in page
    assert "<p>text</p>" in page
    assert f'content="{POLICY}"' in page
    assert set(re.findall(r"https?://[^\s\"']+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|url\((?!#)|<img|<(script|link)[^>]+(src|href)=\"(?!data:)", page)
    # A browser would ask the server for an icon that it does not have.
    assert '<link rel="icon" href="data:,">' in page


def test_scripts_follow_the_shared_one_inside_one_function():
    page = render_page("t", "", scripts=["const first = svg;\n", "const second = 1;\n"], attributes={"data-x": '"<'})
    assert page.index("const NS =") < page.index("const first") < page.index("const second")
    assert page.count("<script") == 1
    assert '<body data-x="&quot;&lt;">' in page


def test_data_stands_before_the_scripts_and_cannot_end_its_element():
    page = render_page("t", "", scripts=[""], data={"name": "</script>"})
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page)
    assert json.loads(found[1]) == {"name": "</script>"}
    assert found.end() < page.index("const NS =")
    with pytest.raises(ValueError, match="Out of range"):
        embed({"loss": float("nan")})


def test_a_script_cannot_end_early():
    assert "</script" not in read_asset("batchwright._charts", "svg.js")


def test_the_style_sheet_is_for_phones_the_dark_and_paper():
    style = read_asset("batchwright._charts", "style.css")
    assert style.count("{") == style.count("}")
    for query in ("prefers-color-scheme: dark", "@media print", "max-width: 44rem"):
        assert query in style


def test_every_colour_of_a_series_is_there_in_light_dark_and_print():
    style = read_asset("batchwright._charts", "style.css")
    for place in range(6):
        assert len(re.findall(rf"--s{place}: #", style)) == 3
        assert f".s{place} {{ --c: var(--s{place})" in style


def cells(markup):
    class Parser(html.parser.HTMLParser):
        def __init__(self):
            super().__init__()
            self.found = []

        def handle_starttag(self, tag, attrs):
            if tag in ("td", "th"):
                self.found.append((tag, dict(attrs), ""))

        def handle_data(self, data):
            self.found[-1] = (*self.found[-1][:2], data)

    parser = Parser()
    parser.feed(markup)
    return parser.found


def test_cells_are_escaped_unless_they_are_markup():
    table = render_table(["a", "b"], [["1 < 2", Markup("<b>3</b>")]])
    assert "<td>1 &lt; 2</td><td><b>3</b></td>" in table


def test_numbers_are_marked_from_their_column_on():
    found = cells(render_table(["name", "n"], [["a", "1"]], numbers_from=1))
    assert [attributes.get("class") for _, attributes, _ in found] == [None, "number", None, "number"]


def test_cards_name_their_cells_for_phones():
    found = cells(render_table(["", "loss"], [["a", "1"]], cards=True))
    assert [attributes.get("data-name") for tag, attributes, _ in found if tag == "td"] == [None, "loss"]


@pytest.mark.parametrize(("caption", "head"), [("", ()), ("what it shows", ("a", "b"))])
def test_caption_and_head_may_be_left_out(caption, head):
    table = render_table(head, [("x", "y")], caption=caption)
    assert ("<caption>" in table) == bool(caption)
    assert ("<thead>" in table) == bool(head)
