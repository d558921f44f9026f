"""Ranks of tests: each is a process of its own, and none of them outlives its test."""

import os
import time
from pathlib import Path

import pytest

from . import processes

pytest.importorskip("torch")
RANKS = "tests.process_ranks"


@pytest.fixture(autouse=True, scope="module")
def own_nurseries():
    """Leave the nurseries of other tests alone, and start none that imports much."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(processes.Nursery, "everyone", {})
        patched.setitem(processes.FRAMEWORKS, RANKS, ("torch",))
        yield
        for nursery in list(processes.Nursery.everyone.values()):
            nursery.close()


def run(*arguments, world_size=2, **options):
    outputs = processes.run_ranks(RANKS, world_size, *arguments, **options)
    return [output.splitlines()[1:] for output in outputs]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_outputs_come_in_the_order_of_ranks(world_size):
    outputs = processes.run_ranks(RANKS, world_size, "nothing", Path("a"))
    assert outputs == [f"rank {rank} of {world_size}: nothing a\n" for rank in range(world_size)]


def test_a_rank_has_nothing_of_the_ranks_before_it():
    before = run("describe")
    assert run("change") == [[], []]
    assert run("describe") == before


def test_a_rank_is_as_in_an_interpreter_of_its_own():
    assert run("describe") == run("describe", fresh=True)


def test_a_rank_has_the_environment_of_its_test(monkeypatch):
    for value in ("one", "other"):
        monkeypatch.setenv("CHANGING", value)
        assert run("environment", "CHANGING") == [[value], [value]]


@pytest.mark.skipif("PYTHONHASHSEED" in os.environ, reason="hashes of texts are the same everywhere")
def test_ranks_hash_texts_as_differently_as_interpreters_do():
    first, second = (output[0].split()[0] for output in run("randomness"))
    assert first != second


def test_ranks_draw_different_numbers_where_nothing_is_seeded():
    drawn = [output[0].split()[1:] for _ in range(2) for output in run("randomness")]
    assert len({number for numbers in drawn for number in numbers}) == 2 * 2 * 3


def test_warnings_are_errors_where_they_are_asked_to_be():
    assert "as asked" in run("warn")[0][0]
    with pytest.raises(AssertionError, match="UserWarning: as asked"):
        run("warn", python=("-W", "error"))
    assert "as asked" in run("warn")[0][0]


def test_other_options_of_the_interpreter_are_its_own():
    assert run("optimized", python=("-O",)) == [["False"], ["False"]]
    assert run("optimized") == [["True"], ["True"]]


@pytest.mark.parametrize("options", [{}, {"fresh": True}])
@pytest.mark.parametrize(("action", "said"), [("raise", "exit codes .0, 1.(.|\n)*ValueError: as asked"), ("die", "-9")])
def test_a_rank_that_fails_fails_the_test_with_what_it_said(action, said, options):
    with pytest.raises(AssertionError, match=said) as caught:
        run(action, **options)
    assert "rank 0 of 2" in str(caught.value)
    assert run("nothing") == [[], []]


@pytest.mark.parametrize("options", [{}, {"fresh": True}])
def test_a_rank_that_waits_for_ever_is_stopped(options, monkeypatch, tmp_path):
    with monkeypatch.context() as patched:
        patched.setattr(processes, "LIMIT_SECONDS", 5)
        with pytest.raises(AssertionError, match=r"exit codes .*-9(.|\n)*rank 1 of 2: hang"):
            run("hang", tmp_path / "pid", **options)
    assert has_ended(int((tmp_path / "pid").read_text()))
    assert run("nothing") == [[], []]


def test_ranks_end_with_the_test_that_was_stopped(monkeypatch, tmp_path):
    def stopped(nursery):
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.01)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(processes.Nursery, "answer", stopped)
        with pytest.raises(KeyboardInterrupt):
            run("hang", tmp_path / "pid")
    assert has_ended(int((tmp_path / "pid").read_text()))
    assert run("nothing") == [[], []]


def has_ended(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False
