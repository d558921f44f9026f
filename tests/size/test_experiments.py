"""When an experiment may be made: within a share of the time, as learned from the experiments before."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchwright.errors import ArgumentError, BatchwrightError, StateMismatchError
from batchwright.size import ExperimentBudget


def trained(budget, num, seconds=1.0):
    for _ in range(num):
        budget = budget.after_update(seconds)
    return budget


def test_nothing_is_allowed_before_the_first_update():
    assert not ExperimentBudget(0.99).allows(1)
    assert ExperimentBudget().share == 0


def test_the_first_experiment_waits_until_twice_its_updates_are_within_the_share():
    # 10 batches at two factors are 20 updates, 40 s: a quarter of 120 + 40.
    budget = ExperimentBudget(0.25)
    assert budget.expected_seconds(10, (1, 2)) == 0
    assert not trained(budget, 119).allows(10, (1, 2))
    assert trained(budget, 120).allows(10, (1, 2))


def test_the_next_one_is_expected_to_take_as_long_as_the_newest():
    budget = trained(ExperimentBudget(0.25), 120)
    budget = budget.after_experiment(30.0, num_batches=10, factors=(1, 2), has_grown=True)
    assert budget.overrun == 1.5
    assert budget.expected_seconds(10, (1, 2)) == pytest.approx(30.0)
    assert budget.expected_seconds(20, (1, 2)) == pytest.approx(60.0)
    assert budget.share == pytest.approx(30 / 150)
    # 60 s in all are a quarter of 180 + 60.
    assert not trained(budget, 59).allows(10, (1, 2))
    assert trained(budget, 60).allows(10, (1, 2))


def test_one_that_held_the_size_halves_the_share_and_one_that_grew_gives_it_back():
    budget = trained(ExperimentBudget(0.5), 100)
    held = budget.after_experiment(20.0, num_batches=10, factors=(1,), has_grown=False)
    # 40 s in all are a quarter of 120 + 40.
    assert not trained(held, 19).allows(10, (1,))
    assert trained(held, 20).allows(10, (1,))
    assert trained(held, 20).after_experiment(20.0, num_batches=10, factors=(1,), has_grown=True).num_held == 0


def test_a_planned_run_has_its_first_experiment_once_training_took_as_long():
    # 20 updates at twice their time are 40 s, a twentieth of 800 s; without a plan 760 s would have to pass.
    budget = ExperimentBudget(planned_seconds=800)
    assert not trained(budget, 39).allows(10, (1, 2))
    assert trained(budget, 40).allows(10, (1, 2))
    assert not trained(ExperimentBudget(planned_seconds=799), 400).allows(10, (1, 2))


def test_the_share_of_a_planned_run_is_spent_once_and_a_run_that_goes_on_has_its_share_of_all():
    budget = trained(ExperimentBudget(planned_seconds=800), 40)
    budget = budget.after_experiment(40.0, num_batches=10, factors=(1, 2), has_grown=True)
    # 80 s in all are a twentieth of 1,600: of 1,520 s of training with them.
    assert not trained(budget, 1479).allows(10, (1, 2))
    assert trained(budget, 1480).allows(10, (1, 2))


def test_a_machine_that_slept_has_not_trained_meanwhile():
    budget = trained(ExperimentBudget(), 20).after_update(30_000.0)
    assert budget.trained_seconds == 20 + 16
    assert budget.update_seconds == pytest.approx(1 + 15 / 16)
    # Updates that stay a thousand times as long are followed within some dozens.
    assert trained(budget, 100, seconds=1000.0).update_seconds == pytest.approx(1000.0, rel=0.01)


def test_updates_that_became_slower_make_experiments_longer():
    budget = trained(trained(ExperimentBudget(), 100), 100, seconds=4.0)
    assert budget.update_seconds == pytest.approx(4.0, rel=0.01)


@given(st.lists(st.tuples(st.floats(0.01, 10), st.floats(0.2, 1.0), st.booleans()), min_size=1, max_size=60))
def test_the_share_is_kept_whatever_comes_if_no_experiment_takes_longer_than_expected(run):
    budget = ExperimentBudget(0.1)
    for seconds, part, has_grown in run:
        budget = trained(budget, 50, seconds)
        if budget.allows(4):
            took = part * budget.expected_seconds(4)
            budget = budget.after_experiment(took, num_batches=4, has_grown=has_grown)
        assert budget.share <= 0.1 + 1e-9


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_duration_of_an_update_counts_as_none(seconds):
    assert trained(ExperimentBudget(), 3).after_update(seconds) == trained(ExperimentBudget(), 3)


def test_a_saved_budget_goes_on():
    budget = trained(ExperimentBudget(0.2), 7).after_experiment(3.0, num_batches=2, has_grown=False)
    assert ExperimentBudget.from_state(json.loads(json.dumps(budget.to_state()))) == budget
    assert "planned_seconds" not in budget.to_state()  # as states of earlier versions
    with pytest.raises(BatchwrightError, match="trained_seconds"):
        ExperimentBudget.from_state({"max_share": 0.2})


def test_a_saved_plan_goes_on():
    budget = trained(ExperimentBudget(planned_seconds=800), 7)
    assert ExperimentBudget.from_state(json.loads(json.dumps(budget.to_state()))) == budget


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_held", 1.5), ("num_held", -1), ("max_share", 0), ("max_share", 1.0), ("planned_seconds", 0)],
)
def test_a_damaged_budget_is_refused(name, value):
    state = {**trained(ExperimentBudget(planned_seconds=800), 7).to_state(), name: value}
    with pytest.raises(StateMismatchError, match=name):
        ExperimentBudget.from_state(state)


def test_any_number_of_experiments_that_held_the_size_can_be_asked_about():
    assert not trained(ExperimentBudget(num_held=10**6), 100).allows(1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ExperimentBudget(0), "max_share"),
        (lambda: ExperimentBudget(1), "max_share"),
        (lambda: ExperimentBudget(0.1, trained_seconds=-1), "trained_seconds"),
        (lambda: ExperimentBudget(planned_seconds=0), "planned_seconds"),
        (lambda: ExperimentBudget().allows(0), "num_batches"),
        (lambda: ExperimentBudget().allows(4, ()), "factors must not be empty"),
        (lambda: ExperimentBudget().after_experiment(0, num_batches=4, has_grown=True), "seconds"),
    ],
)
def test_what_cannot_be_is_refused(call, words):
    with pytest.raises(ArgumentError, match=words):
        call()
