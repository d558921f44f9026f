"""Damaged states of policies: what ``update`` cannot have returned is refused on load, and named."""

import copy
import json

import pytest

from batchwright import size
from batchwright.errors import StateMismatchError
from batchwright.size import BatchSizeController

from .makers import figures

POLICIES = {
    "constant": size.constant(8),
    "from_lr": size.from_lr(lambda index: 0.9**index),
    "cyclic": size.cyclic(size.loss_driven("ema"), 3, per="step"),
    "difference": size.loss_driven(),
    "variance": size.loss_driven("variance", window=3, per="step"),
    "loss_below": size.loss_below(1.0),
    "loss_settled": size.loss_settled(tolerance=0.001),
    "entropy": size.entropy_driven(10, smallest=8, largest=64),
    "noise": size.noise_driven(),
    "noise per epoch": size.noise_driven(per="epoch"),
    "noise ratio": size.noise_driven(estimator="ratio"),
    "memory": size.memory_driven(),
    "memory per epoch": size.memory_driven(per="epoch"),
    "speed": size.speed_driven(per="step", every=2),
    "step time": size.step_time(50, every=2),
    "track": size.track(lambda o: o.noise_s / o.noise_g2),
    "track raw": size.track(lambda o: o.noise_s / o.noise_g2, horizon=None),
    "switch": size.switch({0: size.constant(8), 2: size.memory_driven()}),
    "maximum": size.maximum(size.constant(8), size.loss_driven()),
    "minimum": size.minimum(size.memory_driven(), size.speed_driven()),
    "smooth": size.chain(size.track(lambda o: 40 / o.loss), size.smooth(0.5), size.multiple_of(8)),
    "cooldown": size.chain(size.track(lambda o: 40 / o.loss), size.cooldown(steps=2), size.monotone()),
    "curriculum": size.Curriculum(range(10), start_fraction=0.5, full_at=3).policy(8),
}


def control(name):
    return BatchSizeController(POLICIES[name], min_size=1, max_size=4096, initial=64, max_history=5)


def after(name, num=14):
    controller = control(name)
    for step in range(num):
        controller.observe(**{**figures(step), "batch_size": controller.size})
    return json.loads(json.dumps(controller.state_dict(), allow_nan=False))


def leaves(value, way=()):
    """Yield the ways to everything inside a state, the state itself too."""
    yield way
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield from leaves(item, (*way, key))


def changed(state, way, value):
    state = copy.deepcopy(state)
    place = state
    for key in ("policy_state", *way)[:-1]:
        place = place[key]
    place[("policy_state", *way)[-1]] = value
    return state


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("num", [0, 1, 14, 15])
def test_a_state_that_a_run_left_is_loaded(name, num):
    state = after(name, num)
    controller = control(name)
    controller.load_state_dict(state)
    assert controller.state_dict() == state


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("damage", ["x", True, float("nan"), float("inf"), -1e9, {"a": 1}, [None]], ids=repr)
def test_damage_anywhere_is_refused_by_name_and_changes_nothing(name, damage):
    state = after(name)
    controller = control(name)
    kept = controller.state_dict()
    for way in leaves(state["policy_state"]):
        if damage == -1e9 and is_signed(way):
            continue
        with pytest.raises(StateMismatchError, match=r"policy_state.* must be .*; load an undamaged state, or start"):
            controller.load_state_dict(changed(state, way, damage))
        assert controller.state_dict() == kept


def is_signed(way):
    """Return whether a number may be below 0: a loss, a mean, an estimate of noise, a wish."""
    return bool(way) and (way[-1] in ("mean", "s", "g2", "from", "to") or "past" in way)


@pytest.mark.parametrize("name", POLICIES)
def test_a_state_that_lacks_a_part_is_refused(name):
    state = after(name)
    for way in leaves(state["policy_state"]):
        if not way or not isinstance(way[-1], str) or way[-1] in ("rounded", "num_parts", "followed", "ran"):
            continue
        damaged = copy.deepcopy(state)
        place = damaged["policy_state"]
        for key in way[:-1]:
            place = place[key]
        del place[way[-1]]
        with pytest.raises(StateMismatchError, match=f"must be a dict with .*{way[-1]}"):
            control(name).load_state_dict(damaged)


@pytest.mark.parametrize(
    ("name", "way", "damage", "words"),
    [
        ("difference", ("past",), [1.0, 2.0], r"policy_state\['past'\] must be a list of at most 1 numbers"),
        ("variance", ("past", 1), "x", r"policy_state\['past'\]\[1\] must be a number, got 'x'"),
        ("noise", ("horizon",), 7.0, r"policy_state\['horizon'\] must be a number of 100000 or more"),
        ("noise", ("weight",), 2.0, r"policy_state\['weight'\] must be a number .*at most 1"),
        ("constant", (), 3, "policy_state must be None, got 3"),
        ("maximum", (), [None], "policy_state must be a list of 2"),
        ("memory", ("too_large",), 0, r"policy_state\['too_large'\] must be a number of 1 or more, got 0"),
        ("memory", ("other",), 0, "policy_state must be a dict with 'too_large', 'num_fitting'"),
        ("speed", ("before",), {"size": 8}, r"policy_state\['before'\] must be a dict with 'size', 'speed', 'error'"),
        ("smooth", ("transforms", 0), -1.0, r"policy_state\['transforms'\]\[0\] must be a number of 0 or more"),
    ],
)  # fmt: skip
def test_the_damaged_part_is_named(name, way, damage, words):
    with pytest.raises(StateMismatchError, match=words):
        control(name).load_state_dict(changed(after(name), way, damage))


def test_a_policy_of_ones_own_may_check_its_state():
    class Own(size.Policy):
        def init(self):
            return 0

        def update(self, state, observation):
            return 8.0, state + 1

        def check_state(self, state, name="policy_state"):
            if state > 10:
                raise TypeError("too many")

    controller = BatchSizeController(Own(), min_size=1, max_size=64)
    with pytest.raises(StateMismatchError, match="too many"):
        controller.load_state_dict({**controller.state_dict(), "policy_state": 11})


@pytest.mark.parametrize("name", ["noise", "noise per epoch"])
@pytest.mark.parametrize("figure", ["s", "g2"])
def test_a_noise_whose_square_overflows_is_refused(name, figure):
    state = after(name)
    state["policy_state"].get("average", state["policy_state"])[figure] = 1e200
    with pytest.raises(StateMismatchError, match=rf"\['{figure}'\] must be a number"):
        control(name).load_state_dict(state)


def test_a_size_beyond_every_float_is_refused():
    state = control("constant").state_dict() | {"size": 10**400}
    with pytest.raises(StateMismatchError, match="the state is not one that state_dict"):
        control("constant").load_state_dict(state)


@pytest.mark.parametrize(("whole", "exact"), [(9, 8.5), (8, 7.4), (8, 8.6)])
def test_an_unrounded_size_that_rounds_to_another_size_is_refused(whole, exact):
    state = control("constant").state_dict() | {"size": whole, "exact_size": exact}
    with pytest.raises(
        StateMismatchError, match=f"exact_size must be a number that rounds to size {whole}, got {exact}"
    ):
        control("constant").load_state_dict(state)


@pytest.mark.parametrize("before", [0.0, -16.0])
def test_a_size_of_nothing_before_a_rounding_is_survived(before):
    policy = size.chain(
        size.switch({0: size.exponential(12, 1.5), 1: size.step_time(1000, every=2)}), size.multiple_of(8)
    )
    first, again = (BatchSizeController(policy, min_size=1, max_size=512, initial=16) for _ in range(2))
    first.observe(epoch=0, batch_size=16, seconds=0.1)
    state = first.state_dict()
    assert state["policy_state"]["rounded"] == {"from": 12.0, "to": 16.0}
    state["policy_state"]["rounded"]["from"] = before  # earlier versions left such states
    again.load_state_dict(state)
    for _ in range(6):
        again.observe(epoch=1, batch_size=again.size, seconds=0.1)
    assert 1 <= again.size <= 512
