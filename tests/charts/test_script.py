"""The shared script: its scales and paths, run by Node where it is installed."""

import json
import shutil
import subprocess

import numpy as np
import pytest

from batchwright._charts.page import read_asset

SCRIPT = read_asset("batchwright._charts", "svg.js")
needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")


def evaluate(expression):
    """Return what the script makes of an expression."""
    code = f'"use strict";\n{SCRIPT}\nconsole.log(JSON.stringify({expression}));'
    return json.loads(subprocess.run(["node", "-e", code], capture_output=True, text=True, check=True).stdout)


@needs_node
def test_a_scale_maps_its_ends_to_its_ends():
    assert evaluate("[0, 5, 10].map(makeScale(0, 10, 100, 200))") == [100, 150, 200]
    assert evaluate("[1, 10, 100].map(makeScale(1, 100, 0, 200, 'log'))") == [0, 100, 200]
    assert evaluate("[2, 4, 6].map(makeScale(2, 6, 100, 20))") == [100, 60, 20]
    # Equal ends get a range around them.
    assert evaluate("makeScale(4, 4, 0, 10)(4)") == 5


@needs_node
@pytest.mark.parametrize(
    ("scale", "count", "ticks"),
    [
        ("makeScale(0, 23, 0, 1)", 5, [0, 5, 10, 15, 20]),
        ("makeScale(3.31, 4.52, 0, 1)", 5, [3.5, 4, 4.5]),
        ("makeScale(0, 1234, 0, 1)", 5, [0, 500, 1000]),
        ("makeScale(3, 60, 0, 1, 'log')", 5, [3, 5, 10, 20, 30, 50]),
        ("makeScale(8, 512, 0, 1, 'size')", 4, [8, 32, 128, 512]),
    ],
)
def test_ticks_are_round(scale, count, ticks):
    assert evaluate(f"{scale}.ticks({count})") == ticks


@needs_node
def test_ticks_lie_inside_the_scale_and_are_few():
    rng = np.random.default_rng(0)
    lows = rng.uniform(-1e6, 1e6, 500)
    scales = np.stack([lows, lows + 10 ** rng.uniform(-3, 6, 500)], axis=1).tolist()
    found = evaluate(f"{json.dumps(scales)}.map(([low, high]) => makeScale(low, high, 0, 1).ticks(5))")
    for (low, high), ticks in zip(scales, found, strict=True):
        edge = 1e-6 * (high - low)
        assert len(ticks) <= 7
        assert all(low - edge <= tick <= high + edge for tick in ticks)


@needs_node
def test_each_series_has_a_shape_of_its_own():
    corners = evaluate("CORNERS")
    assert corners[0] == []
    assert list(map(len, corners)) == [0, 4, 3, 4, 3, 3]
    assert len({str(corner) for corner in corners}) == 6  # as many as there are colours


@needs_node
def test_a_line_has_a_gap_where_a_value_is_missing():
    points = "[{x: 0, y: 1}, {x: 1, y: 2}, {x: 2, y: null}, {x: 3, y: 4}]"
    assert evaluate(f"pathOf({points}, (x) => x, (y) => y)") == "M0.0 1.0L1.0 2.0M3.0 4.0"
    assert evaluate("stepsOf([{x: 0, y: 1}, {x: 2, y: 3}], (x) => x, (y) => y)") == "M0.0 1.0H2.0V3.0"


@needs_node
def test_numbers_keep_the_digits_that_a_reader_can_use():
    assert evaluate("[1234.5, 250.7, 3, 0.012345, null].map(show)") == ["1,235", "251", "3", "0.0123", "none"]
    assert evaluate("[999, 1500, 2000000].map(showTick)") == ["999", "1.5k", "2,000k"]


@needs_node
def test_labels_that_would_touch_are_moved_apart():
    assert evaluate("spread([10, 12, 50], 10, 0, 100)") == [10, 20, 50]
    assert evaluate("spread([95, 99], 10, 0, 100)") == [90, 100]
