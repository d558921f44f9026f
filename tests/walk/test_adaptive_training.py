"""Policies drive a real training loop; a run that was killed goes on as if nothing had happened."""

import json
import signal
from itertools import pairwise

import pytest

from ..processes import run_alone
from .adaptive_run import NUM, POLICIES, Run

WAYS = ["sampler", "regroup"]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_epoch_covers_the_data_once_at_sizes_the_policy_asked_for(policy, way):
    run = Run(policy, way)
    sizes, epochs, wanted = [], [[]], run.controller.size
    for examples, size in run.epochs(4):
        # The batch has the size in force; the last of an epoch is what is left.
        left = NUM - len(epochs[-1])
        assert len(examples) == min(wanted, left)
        epochs[-1] += examples
        if len(epochs[-1]) == NUM:
            epochs.append([])
        wanted = size
        sizes.append(size)
    assert [sorted(epoch) for epoch in epochs[:4]] == [list(range(NUM))] * 4
    assert len(set(sizes)) > 1
    assert all(4 <= size <= 48 for size in sizes)


@pytest.mark.parametrize(("policy", "word"), [("entropy", "entropy"), ("loss", "loss"), ("noise", "noise scale")])
def test_the_history_explains_every_change_in_words(policy, word):
    run = Run(policy, "sampler")
    sizes = [run.controller.size, *(size for _, size in run.epochs(4))]
    changes = [(old, new) for old, new in pairwise(sizes) if old != new]
    assert [(decision.old, decision.new) for decision in run.controller.history] == changes
    assert changes
    assert all(word in decision.reason for decision in run.controller.history)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_resumed_in_the_middle_of_an_epoch_gives_the_same_sizes_and_batches(policy, way):
    whole = list(Run(policy, way).epochs(3))
    first = Run(policy, way)
    steps = first.epochs(3)
    before = [next(steps) for _ in range(7)]
    state = json.loads(json.dumps(first.state()))
    second = Run(policy, way)
    second.load(state)
    assert before + list(second.epochs(3)) == whole


@pytest.mark.parametrize("way", WAYS)
def test_a_process_killed_at_work_goes_on_where_it_was(tmp_path, way):
    given = ("tests.walk.adaptive_run", tmp_path, "loss", way, 2)
    code, output = run_alone(*given, 5)
    assert code == -signal.SIGKILL, output
    code, output = run_alone(*given)
    assert code == 0, output
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    expected = [[examples, size] for examples, size in Run("loss", way).epochs(2)]
    assert rows == expected
