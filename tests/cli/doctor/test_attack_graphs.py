"""What doctor says about graphs where the largest steps could not be captured."""

from dataclasses import replace

from batchwright.cli.doctor.advice import advise

from .made import GRAPHED_H200, GRAPHS


def test_a_size_that_could_not_be_captured_was_tried():
    # Expected: no word of "and more" where the next size could not be captured. Found: "Graphs pay up to about 8,192
    # tokens a step and more, the most that was tried", though 16,384 were tried and ran out of memory.
    paying = tuple(row for row in GRAPHS.rows if row.gain >= 1.1)
    problem = f"a step of {2 * paying[-1].tokens:,} tokens could not be captured: out of memory"
    graphs = replace(GRAPHS, rows=paying, rounds=(), problem=problem)
    text = next(advice.text for advice in advise(replace(GRAPHED_H200, graphs=graphs)) if advice.topic == "graphs")
    assert "and more, the most that was tried" not in text
