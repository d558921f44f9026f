"""What doctor states when its rounds disagree on the largest batch, and whether its examples run."""

import doctest
from dataclasses import replace

from batchwright.cli.doctor import examine
from batchwright.cli.doctor.advice import advise
from batchwright.cli.doctor.records import Findings, Launch, LaunchRow

from .made import LAPTOP, ON_H200


def test_more_tokens_are_not_useless_if_a_round_still_grew_at_the_largest():
    # Expected: nothing that a round contradicts: in the second round throughput still grew at 512, the largest tried.
    # Found: "90 % of the best throughput is reached at 256 to 512 tokens; more tokens only take memory", where the next
    # run may say "Throughput still grew at 512 tokens".
    tokens = (64, 128, 256, 512)
    even, growing = (0.010, 0.016, 0.024, 0.0435), (0.010, 0.016, 0.024, 0.042)
    rows = tuple(map(LaunchRow, tokens, even))
    launch = Launch(model="any", rows=rows, kernel_seconds=1e-5, rounds=(even, growing, even), in_processor_time=True)
    assert launch.knee_range == (256, 512)
    findings = Findings(machine=LAPTOP, attention=ON_H200.attention, launch=replace(launch))
    sizes = next(advice for advice in advise(findings) if advice.topic == "sizes")
    assert "more tokens only take memory" not in sizes.text


def test_the_examples_in_the_docstrings_of_examine_run():
    # Expected: the examples run. Found: ValueError, the docstring of `sizes` has two stray import lines in it.
    assert doctest.testmod(examine).failed == 0
