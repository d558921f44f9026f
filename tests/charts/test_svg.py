"""Charts in Python: escaping, scales, ticks and marks."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright._charts.svg import Scale, figure, hover, legend, marker, tag, text


def test_text_and_attributes_are_escaped():
    assert text("a < b", 0, 0) == '<text x="0" y="0">a &lt; b</text>'
    assert tag("rect", aria_label='"quoted"') == '<rect aria-label="&quot;quoted&quot;"/>'
    assert hover("x & y") == "<title>x &amp; y</title>"


def test_a_scale_maps_its_ends_to_its_ends():
    scale = Scale(low=2, high=6, start=100, stop=20)
    assert (scale(2), scale(4), scale(6)) == (100, 60, 20)


def test_a_log_scale_puts_equal_ratios_at_equal_distances():
    scale = Scale(low=1, high=64, start=0, stop=60, log=True)
    assert [round(scale(2**i), 6) for i in range(7)] == [0, 10, 20, 30, 40, 50, 60]


def test_ticks_are_round():
    assert Scale(low=3.31, high=4.52, start=0, stop=1).ticks() == [3.5, 4, 4.5]
    assert Scale(low=0, high=1234, start=0, stop=1).ticks() == [0, 500, 1000]
    assert Scale(low=0.8, high=130, start=0, stop=1, log=True).ticks() == [1, 2, 5, 10, 20, 50, 100]


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_lie_inside_the_scale_and_are_few(low, span):
    scale = Scale(low=low, high=low + span, start=0, stop=1)
    ticks = scale.ticks()
    assert len(ticks) <= 7
    assert all(low - 1e-6 * span <= tick <= low + span + 1e-6 * span + 1e-9 for tick in ticks)


def test_each_series_has_a_shape_of_its_own():
    shapes = [marker(kind, 0, 0) for kind in range(4)]
    assert len(set(shapes)) == 4
    assert shapes[0].startswith("<circle")


def test_a_figure_names_itself():
    assert figure("<g/>", width=10, height=5, title="Loss") == (
        '<svg viewBox="0 0 10 5" role="img" aria-label="Loss"><g/></svg>'
    )


def test_a_scale_is_monotone():
    scale = Scale(low=1, high=100, start=0, stop=1, log=True)
    assert scale(10) == pytest.approx(math.log(10) / math.log(100))


def test_a_legend_shows_the_mark_of_each_series_and_escapes_its_name():
    found = legend(["a", "<b>"])
    assert found.count("<li>") == 2
    assert "&lt;b&gt;" in found
    assert marker(1, 11, 7) in found
