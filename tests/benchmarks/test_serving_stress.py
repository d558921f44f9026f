"""Everything that goes wrong at once, for some seconds; benchmarks/serving_stress.py does it for minutes."""

import asyncio

import pytest

from batchwright.serve import DeadlineExceeded, WorkerDied


@pytest.fixture
def ask(script):
    def make(kind, *, service="thread", manner="wait"):
        return script("_serving_callers").Ask((7, kind, 1), service, manner, 0.0)

    return make


@pytest.fixture
def tally(script):
    return script("_serving_callers").Tally()


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_nothing_is_lost_wrong_or_given_twice_and_no_good_request_fails_by_a_mate(script, monkeypatch):
    stress = script("serving_stress")
    monkeypatch.setattr(
        script("_serving_callers"), "RARE", (("coroutine", "hang", 10**6), ("process", "kill -9", 10**6))
    )
    monkeypatch.setattr(stress, "STANDSTILL_SECONDS", 30.0)
    row = stress.stress(3000, run_timeout_ms=2000)  # a busy machine alone must not end a call
    assert stress.problems(row | {"out_of_memory": {"median_share": 1.0}}) == []
    assert row["num_requests"] == sum(row["ends"].values()) == 3000
    assert row["num_forks"] >= 1
    assert row["ends"]["good: answered"] > 2000
    assert row["ends"]["kill -9: own error"] == row["ends"]["hang: own error"] == 1
    assert row["services"]["thread"]["num_ooms"] > 0


def test_a_mix_holds_every_kind_of_item(script):
    callers, poison = script("_serving_callers"), script("_serving_poison")
    asks = callers.make_asks(20_000)
    assert {ask.item[1] for ask in asks} == {"good", *poison.ERRORS}
    assert {ask.service for ask in asks} == set(callers.SERVICES)
    assert {ask.manner for ask in asks} == set(callers.MANNERS)
    assert [ask.item[0] for ask in asks] == list(range(20_000))


@pytest.mark.parametrize(
    ("kind", "result", "error", "how"),
    [
        ("good", "right", None, "answered"),
        ("good", 1, None, "wrong"),
        ("good", None, ValueError(8), "failed by a mate"),
        ("good", None, WorkerDied("gone"), "failed by a mate"),
        ("good", None, DeadlineExceeded("late"), "failed by a mate"),  # it had no deadline
        ("ValueError", None, ValueError(7), "own error"),
        ("ValueError", None, ValueError(8), "wrong"),  # that of another item
        ("ValueError", "right", None, "wrong"),
        ("SystemExit", None, SystemExit(7), "wrong"),
    ],
)
def test_an_end_is_judged_by_what_belongs_to_the_item(script, ask, tally, kind, result, error, how):
    tally.note(ask(kind), script("_serving_poison").answer(7) if result == "right" else result, error)
    assert tally.ends == {(kind, how): 1}
    assert len(tally.faults) == (how in ("wrong", "failed by a mate"))


def test_only_those_who_gave_up_may_be_without_an_answer(ask, tally):
    tally.note(ask("good", manner="cancel"), None, asyncio.CancelledError())
    tally.note(ask("good", manner="deadline"), None, DeadlineExceeded("late"))
    tally.note(ask("good", service="killed"), None, WorkerDied("gone"))
    assert tally.ends == {("good", "given up"): 1, ("good", "late"): 1, ("good", "killed"): 1}
    tally.note(ask("good", manner="wait"), None, asyncio.CancelledError())
    assert tally.ends["good", "failed by a mate"] == 1


def test_a_problem_is_named(script):
    none = dict.fromkeys(("num_lost", "num_wrong", "num_duplicated", "num_good_failed_by_a_mate"), 0)
    row = none | {"num_forks_wrong": 0, "num_killed_from_outside": 2, "num_kills": 1, "num_wrong": 3}
    row |= {"works_at_the_end": {"thread": True, "process": False}, "out_of_memory": {"median_share": 0.79}}
    assert script("serving_stress").problems(row) == [
        "num_wrong is 3",
        "the process service no longer works",
        "more requests were killed than processes",
        "out of memory once per second leaves 0.79 of the throughput",
    ]


def test_items_out_of_memory_are_compared_in_turns(script):
    row = script("serving_stress").compare_throughput(1, 1)
    assert len(row["per_second_with"]) == len(row["per_second_without"]) == 1
    assert min(*row["per_second_with"], *row["per_second_without"]) > 0
