"""The controller: bounds, rounding, counting, history in words, and state."""

import json
import math
from dataclasses import dataclass, field

import numpy as np
import pytest

from batchwright.errors import ArgumentError, MissingSignalError, StateMismatchError
from batchwright.size.combine import chain, clamp, rate_limit, smooth
from batchwright.size.controller import BatchSizeController, Decision
from batchwright.size.observation import Observation
from batchwright.size.policy import Policy
from batchwright.size.schedules import constant, exponential, from_lr, linear


class Echo(Policy):
    """Returns the observation itself, for tests to look at, and asks for ``answer``."""

    def __init__(self, answer=math.nan):
        self.answer = answer
        self.seen = []

    def init(self):
        return None

    def update(self, state, observation):
        self.seen.append(observation)
        return self.answer, state


def control(policy, *, min_size=1, max_size=4096, initial=None):
    return BatchSizeController(policy, min_size=min_size, max_size=max_size, initial=initial)


def test_the_first_size_is_given_or_the_policy_says_it_or_it_is_the_least():
    assert control(constant(64), initial=8).size == 8
    assert control(constant(64)).size == 64
    assert control(Echo(), min_size=16).size == 16


def test_the_start_of_a_policy_is_kept_within_the_bounds():
    assert control(constant(64), max_size=40).size == 40
    assert control(constant(64), min_size=100).size == 100


def test_observe_returns_the_size_and_keeps_it():
    controller = control(exponential(32, 2), max_size=100)
    assert controller.observe(epoch=1) == 64
    assert controller.size == 64
    assert controller.observe(epoch=2) == 100
    assert controller.observe(epoch=0) == 32


@pytest.mark.parametrize(
    ("answer", "size"),
    [
        (8.5, 8),  # half to even
        (9.5, 10),
        (-3, 4),
        (math.inf, 64),
        (-math.inf, 4),
        (math.nan, 16),
        (None, 16),
        ("32", 16),
        (True, 16),
        (1j, 16),
        (np.float32(20), 20),
        (np.int64(20), 20),
    ],
)
def test_any_answer_becomes_a_size_within_the_bounds(answer, size):
    controller = control(Echo(answer), min_size=4, max_size=64, initial=16)
    assert controller.observe() == size
    assert type(controller.size) is int


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"min_size": 0}, "min_size must be a whole number of 1 or more, got 0"),
        ({"min_size": 8.0}, "min_size must be a whole number of 1 or more, got 8.0"),
        ({"max_size": True}, "max_size must be a whole number of 1 or more, got True"),
        ({"min_size": 65, "max_size": 64}, "min_size must be at most max_size, got 65 and 64"),
        ({"initial": 5000}, "initial must be from min_size 1 to max_size 4096, got 5000"),
        ({"initial": 4, "min_size": 8}, "initial must be from min_size 8"),
        ({"initial": 8.0}, "initial must be a whole number"),
        ({"initial": True}, "initial must be a whole number"),
    ],
)
def test_nonsense_is_refused_when_the_controller_is_made(options, words):
    with pytest.raises(ArgumentError) as error:
        control(constant(64), **options)
    assert words in str(error.value)


@pytest.mark.parametrize("policy", [64, "gooodput", "momentum"])
def test_what_is_no_policy_is_refused(policy):
    with pytest.raises(ArgumentError, match=r"must be a size.Policy.*size.constant\(64\)"):
        control(policy)


@pytest.mark.parametrize(("policy", "call"), [(linear, "size.linear"), ("goodput", "size.goodput")])
def test_a_policy_that_is_only_named_is_refused_with_its_call(policy, call):
    with pytest.raises(ArgumentError, match=rf"must be a size.Policy, got .*; write {call}\(…\)$"):
        control(policy)


def test_an_unknown_figure_is_refused_with_the_known_ones():
    with pytest.raises(ArgumentError, match=r"observe knows epoch, step, .*experiment; got los, size"):
        control(constant(64)).observe(los=0.5, size=3, loss=0.5)


@pytest.mark.parametrize(
    ("figures", "words"),
    [
        ({"epoch": 1.5}, "epoch must be a whole number of 0 or more, got 1.5"),
        ({"step": -1}, "step must be a whole number of 0 or more, got -1"),
        ({"batch_size": 0}, "batch_size must be a whole number of 1 or more, got 0"),
        ({"examples": True}, "examples must be a whole number of 0 or more, got True"),
        ({"loss": "0.5"}, "loss must be a number, got '0.5'"),
        ({"lr": [0.1]}, "lr must be a number, got [0.1]"),
    ],
)
def test_a_figure_of_the_wrong_kind_is_refused(figures, words):
    with pytest.raises(ArgumentError) as error:
        control(constant(64)).observe(**figures)
    assert words in str(error.value)


def test_figures_become_plain_numbers():
    torch = pytest.importorskip("torch")
    echo = Echo()
    control(echo).observe(loss=torch.tensor(0.5), lr=np.float64(0.25), epoch=np.int64(3), noise_reliable=np.True_)
    assert echo.seen == [Observation(loss=0.5, lr=0.25, epoch=3, noise_reliable=True, size=1, exact_size=1.0)]
    assert [type(value) for value in (echo.seen[0].loss, echo.seen[0].epoch)] == [float, int]


def test_the_policy_sees_the_size_in_force():
    echo = Echo(32)
    controller = control(echo, initial=8)
    controller.observe(batch_size=5)
    controller.observe(batch_size=5)
    assert [echo.seen[0].size, echo.seen[-1].size] == [8, 32]
    assert echo.seen[0].current == 8  # not the 5 of a short last batch


def test_updates_and_examples_are_counted_from_the_batch_size():
    echo = Echo()
    controller = control(echo)
    for size in (10, 10, 5):
        controller.observe(batch_size=size)
    assert [(seen.step, seen.examples) for seen in echo.seen] == [(1, 10), (2, 20), (3, 25)]


def test_counts_that_are_given_win_and_counting_goes_on_from_them():
    echo = Echo()
    controller = control(echo)
    controller.observe(batch_size=10, step=100, examples=5000, tokens=7, epoch=2)
    controller.observe(batch_size=10)
    controller.observe(loss=1.0)
    counts = [(seen.epoch, seen.step, seen.examples, seen.tokens) for seen in echo.seen]
    assert counts == [(2, 100, 5000, 7), (2, 101, 5010, 7), (2, 101, 5010, 7)]


def test_what_was_never_counted_is_missing_and_not_zero():
    controller = control(linear(32, 8, per="step"))
    with pytest.raises(MissingSignalError, match="linear needs step"):
        controller.observe(epoch=3)
    with pytest.raises(MissingSignalError, match="linear needs epoch"):
        control(linear(32, 8)).observe(batch_size=8, epoch=None)


def test_an_error_leaves_the_controller_as_it_was():
    controller = control(linear(32, 8))
    before = controller.state_dict()
    with pytest.raises(MissingSignalError):
        controller.observe(batch_size=8)
    assert controller.state_dict() == before


def test_history_records_changes_and_nothing_else():
    controller = control(linear(32, 8), max_size=50)
    for epoch in (1, 1, 2, 3, 4):
        controller.observe(epoch=epoch, batch_size=10)
    assert controller.history == (
        Decision(
            epoch=1,
            step=1,
            examples=10,
            old=32,
            new=40,
            wanted=40.0,
            reason="linear: 32 + 8 × 1 = 40 at epoch 1",  # noqa: RUF001
        ),
        Decision(
            epoch=2,
            step=3,
            examples=30,
            old=40,
            new=48,
            wanted=48.0,
            reason="linear: 32 + 8 × 2 = 48 at epoch 2",  # noqa: RUF001
        ),
        Decision(
            epoch=3,
            step=4,
            examples=40,
            old=48,
            new=50,
            wanted=56.0,
            reason="linear: 32 + 8 × 3 = 56 at epoch 3; held at max_size 50",  # noqa: RUF001
        ),
    )


def test_a_decision_reads_as_one_line():
    controller = control(constant(64), initial=8)
    controller.observe(step=3, batch_size=2)
    assert str(controller.history[0]) == "step 3, examples 2: 8 -> 64 (constant: 64)"
    fresh = control(constant(64), initial=8)
    fresh.observe()
    assert str(fresh.history[0]) == "8 -> 64 (constant: 64)"


def test_the_floor_is_named_too():
    controller = control(linear(32, -20), min_size=8)
    controller.observe(epoch=5)
    assert controller.history[0].reason == "linear: 32 + -20 × 5 = -68 at epoch 5; held at min_size 8"  # noqa: RUF001


def test_a_size_just_at_a_bound_is_not_held_there():
    controller = control(linear(32, 8), max_size=40)
    controller.observe(epoch=1)
    assert "held" not in controller.explain()


def test_infinity_is_recorded_as_a_number_that_json_can_hold():
    controller = control(Echo(math.inf))
    controller.observe()
    assert json.loads(json.dumps(controller.state_dict(), allow_nan=False))["history"][0]["wanted"] == 1e300


def test_explain_says_why_the_size_stays():
    controller = control(Echo(math.nan), initial=64)
    assert controller.explain() == "nothing was observed since the controller was made or loaded; the size is 64"
    controller.observe()
    assert controller.explain() == "the policy answered nan, which is not a size; it stays at 64"
    assert controller.history == ()


def test_a_policy_of_ones_own_is_explained_by_its_name():
    controller = control(Echo(12.5))
    controller.observe()
    assert controller.history[0].reason == "Echo asks for 12.5"


def course():
    return [{"epoch": step // 3, "batch_size": 10 + step, "loss": 1 / (step + 1)} for step in range(12)]


def make_rich():
    return control(chain(exponential(10, 2), smooth(0.7), rate_limit(1.5)), max_size=500)


@pytest.mark.parametrize("num", range(12))
def test_a_resumed_controller_goes_on_as_if_never_stopped(num):
    whole, first, second = make_rich(), make_rich(), make_rich()
    sizes = [whole.observe(**figures) for figures in course()]
    before = [first.observe(**figures) for figures in course()[:num]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    after = [second.observe(**figures) for figures in course()[num:]]
    assert before + after == sizes
    assert second.history == whole.history
    assert second.state_dict() == whole.state_dict()


def test_a_saved_state_is_apart_from_the_controller():
    controller = make_rich()
    controller.observe(**course()[0])
    state = controller.state_dict()
    kept = json.dumps(state)
    controller.load_state_dict(state)
    for figures in course():
        controller.observe(**figures)
    assert json.dumps(state) == kept


class Gathers(Policy):
    """Changes its state in place, which it should not."""

    def init(self):
        return []

    def update(self, state, observation):
        state.append(observation.loss)
        return 8.0, state


def test_a_policy_that_changes_its_state_in_place_does_not_reach_into_a_saved_one():
    controller = control(Gathers())
    saved = controller.state_dict()
    controller.observe(loss=1.0)
    assert saved["policy_state"] == []
    controller.load_state_dict(saved)
    controller.observe(loss=2.0)
    assert saved["policy_state"] == []


def test_a_loaded_controller_does_not_explain_what_came_before():
    controller = control(constant(64), initial=8)
    state = controller.state_dict()
    controller.observe(step=1)
    controller.load_state_dict(state)
    assert controller.explain().startswith("nothing was observed")


def test_the_state_of_another_policy_is_refused_with_both_named():
    controller = control(linear(32, 8))
    with pytest.raises(StateMismatchError) as error:
        controller.load_state_dict(control(exponential(32, 2)).state_dict())
    assert "Exponential(start_size=32.0, factor=2.0" in str(error.value)
    assert "Linear(start_size=32.0, slope=8.0" in str(error.value)


def test_other_settings_of_the_same_policy_are_refused():
    with pytest.raises(StateMismatchError, match=r"slope=8\.0.*slope=9\.0"):
        control(linear(32, 9)).load_state_dict(control(linear(32, 8)).state_dict())


def test_functions_in_settings_do_not_keep_a_state_from_its_policy():
    state = control(from_lr(lambda i: 0.5**i, start=8)).state_dict()
    control(from_lr(lambda i: 0.5**i, start=8)).load_state_dict(state)
    assert "0x" not in state["policy"]


@dataclass(frozen=True)
class Table(Policy):
    """A policy with settings of all kinds."""

    sizes: dict = field(default_factory=lambda: {"a": [1, 2], "b": (constant(8), print)})
    thing: object = field(default_factory=object)

    def init(self):
        return None

    def update(self, state, observation):
        return 8.0, state


def test_a_fingerprint_is_the_same_in_every_run():
    assert (
        control(Table()).state_dict()["policy"] == "Table(sizes={'a': (1, 2), 'b': (Constant(size=8.0))}, thing=object)"
    )
    assert control(Echo()).state_dict()["policy"] == "Echo"


def test_a_saved_size_outside_the_bounds_is_refused():
    state = control(constant(64)).state_dict()
    small = control(constant(64), max_size=32)
    with pytest.raises(StateMismatchError, match="the saved size 64 is outside 1 to 32"):
        small.load_state_dict(state)
    assert small.size == 32


def test_bounds_may_change_around_the_saved_size():
    state = control(constant(64)).state_dict()
    wider = control(constant(64), min_size=50, max_size=100, initial=80)
    wider.load_state_dict(state)
    assert wider.size == 64


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("version", 3),
        ("exact_size", None),
        ("exact_size", math.nan),
        ("exact_size", 64.6),
        ("num_changes", 0),
        ("num_changes", None),
        ("size", "64"),
        ("size", True),
        ("size", 0),
        ("counts", None),
        ("counts", {"epoch": 1}),
        ("counts", {"epoch": -1, "step": None, "examples": None, "tokens": None}),
        ("history", [{"old": 1}]),
        ("history", None),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(key, value):
    controller = control(constant(64), initial=8)
    controller.observe(step=1)
    kept = controller.state_dict()
    with pytest.raises(StateMismatchError):
        controller.load_state_dict({**kept, key: value})
    assert controller.state_dict() == kept


@pytest.mark.parametrize(
    "key", ["version", "policy", "size", "exact_size", "policy_state", "counts", "num_changes", "history"]
)
def test_a_state_that_lacks_a_part_is_refused(key):
    controller = control(constant(64))
    state = controller.state_dict()
    del state[key]
    with pytest.raises(StateMismatchError):
        controller.load_state_dict(state)


def test_a_controller_shows_its_policy_bounds_and_size():
    text = repr(control(linear(32, 8)))
    assert text == "BatchSizeController(linear(32, 8), min_size=1, max_size=4096, size=32)"


def test_a_transform_in_place_of_a_policy_is_told_where_it_goes():
    with pytest.raises(ArgumentError, match=r"it goes after one: size\.chain\(size\.goodput\(\), clamp\(8, 16\)\)"):
        BatchSizeController(clamp(8, 16), min_size=1, max_size=32)


def test_a_figure_that_no_observation_has_is_refused_with_those_it_may_have():
    class Accurate(Policy):
        def init(self):
            return None

        def update(self, state, observation):
            return 16 if observation.need("accuracy") > 0.5 else 8, state

    controller = BatchSizeController(Accurate(), min_size=8, max_size=16)
    with pytest.raises(ArgumentError, match="an observation has no 'accuracy'; it may hold epoch, step, examples"):
        controller.observe(epoch=1)
