"""The summary of graphs: figures, their share, and a table."""

import json

import pytest

from batchwright.step.graphs import GraphSummary

SUMMARY = GraphSummary(
    shapes={"4x6": 7, "8x6": 2},
    num_replayed=9,
    num_eager=3,
    num_updates_replayed=5,
    num_captures=3,
    pool_bytes=3 * 2**20,
    capture_seconds=1.25,
    saved_seconds=10.5,
    reasons={"a shape was not planned": 2},
)


def test_the_hit_rate_is_the_share_of_replays():
    assert SUMMARY.hit_rate == 0.75
    assert GraphSummary().hit_rate == 0


def test_the_table_has_a_line_per_figure_and_reason():
    assert str(SUMMARY).splitlines() == [
        "captured shapes                 2",
        "micro-batches replayed / eager  9 / 3 (75.0%)",
        "updates replayed                5",
        "pool                            3 MiB",
        "capture                         1.25 s in 3 captures",
        "saved                           10.50 s",
        "eager, 2 times                  a shape was not planned",
    ]


def test_figures_are_plain_values():
    found = json.loads(json.dumps(SUMMARY.to_dict()))
    assert found["hit_rate"] == 0.75
    assert found["shapes"] == {"4x6": 7, "8x6": 2}
    assert found["reasons"] == {"a shape was not planned": 2}


def test_a_summary_cannot_be_changed():
    with pytest.raises(AttributeError):
        SUMMARY.num_eager = 4
