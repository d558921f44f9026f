import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.cli.doctor.records import GraphRow, Graphs, Launch, LaunchRow, Visits

from .made import GRAPHED_H200, LAUNCH, ON_H200


def launch(*seconds):
    rows = tuple(LaunchRow(2**power, value) for power, value in enumerate(seconds))
    return Launch(model="any", rows=rows, kernel_seconds=1e-6)


def test_a_first_visit_that_is_faster_costs_nothing_more():
    assert Visits(0.5, 0.1).extra_seconds == pytest.approx(0.4)
    assert Visits(0.1, 0.5).extra_seconds == 0


def test_the_floor_is_flat_up_to_a_quarter_more():
    # 1.24 is within a quarter of 1.0, 1.26 is not; what comes after does not count.
    assert launch(1.0, 1.24, 1.26, 1.0).flat_tokens == 2
    assert launch(1.0, 1.24, 1.25, 2.0).flat_tokens == 4


def test_the_knee_is_the_first_at_nine_tenths_of_the_best():
    # Tokens per second: 1, 2/1.1 = 1.82, 4/2 = 2, 8/4 = 2. Nine tenths of 2 are 1.8.
    assert launch(1.0, 1.1, 2.0, 4.0).knee_tokens == 2


@given(st.lists(st.floats(1e-3, 10), min_size=1, max_size=8))
def test_flat_and_knee_are_sizes_that_were_tried(seconds):
    found = launch(*sorted(seconds))
    tried = {row.tokens for row in found.rows}
    assert {found.flat_tokens, found.knee_tokens} <= tried
    assert found.floor_seconds == min(seconds)


def test_the_range_holds_what_every_round_says():
    # Alone, the rounds reach the throughput at 1, 2 and 2 tokens; together at 2.
    found = replace(launch(1.0, 1.1, 2.2), rounds=((1.0, 2.0, 4.0), (1.0, 1.1, 2.2), (1.0, 1.1, 2.2)))
    assert found.knee_range == (1, 2)
    assert found.spread == pytest.approx(0.9 / 1.1)


def test_rounds_more_than_a_doubling_apart_contradict_each_other():
    found = replace(launch(1.0, 1.0, 1.0), rounds=((1.0, 2.0, 4.0), (1.0, 1.0, 1.0)))
    assert found.knee_range is None
    assert found.flat_range is None


def test_findings_are_plain_json():
    figures = json.loads(json.dumps(ON_H200.to_dict()))
    assert figures["machine"]["name"] == "NVIDIA H200"
    assert figures["attention"][0]["visits"] == {"first_seconds": 0.51, "later_seconds": 0.085}
    assert figures["launch"]["rows"][0] == {"tokens": 1024, "seconds": 0.085}
    assert figures["launch"]["flat_tokens"] == LAUNCH.flat_tokens == 8192


def graphs(*gains, rounds=()):
    rows = tuple(GraphRow(2**power, gain, 1.0) for power, gain in enumerate(gains))
    return Graphs(rows=rows, rounds=rounds)


def test_graphs_pay_up_to_the_first_size_that_gains_less_than_a_tenth():
    assert graphs(3.0, 1.1, 1.09, 2.0).paying_tokens == 2
    assert graphs(1.0, 2.0).paying_tokens == 0
    assert Graphs().paying_tokens == 0


def test_rounds_that_disagree_whether_graphs_pay_at_all_contradict_each_other():
    assert graphs(1.2, 1.0, rounds=((1.2, 1.0), (1.0, 1.0))).paying_range is None
    assert graphs(1.0, 1.0, rounds=((1.0, 1.0),)).paying_range == (0, 0)
    assert graphs(1.2, 1.0, rounds=((1.2, 1.2),)).paying_range == (1, 2)


def test_the_figures_of_graphs_are_plain_json():
    figures = json.loads(json.dumps(GRAPHED_H200.to_dict()))["graphs"]
    assert figures["rows"][1] == {
        "tokens": 4096,
        "eager_seconds": 0.042,
        "replay_seconds": 0.012,
        "gain": 0.042 / 0.012,
    }
    assert (figures["paying_tokens"], figures["paying_range"], figures["problem"]) == (16384, [16384, 16384], "")
    assert json.loads(json.dumps(ON_H200.to_dict()))["graphs"]["rows"] == []
