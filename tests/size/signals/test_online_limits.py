"""goodput at its limits: a base that cannot run, a clock that is off, rare tokens, a batch of one example."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from batchwright import TimeModel, size
from batchwright.errors import ArgumentError, BatchwrightError, StateMismatchError
from batchwright.size.signals._timings import Timing, add_reading, check_timings, timed
from batchwright.step import Stepper, supervised_loss

from ...thorough import num_cases
from ..makers import Seconds


def train(
    policy: size.Policy,
    *,
    num_updates: int,
    seconds: Callable[[int], float] = lambda batch: max(0.05, 0.02 + 0.001 * batch),
    ran: Callable[[int], int] = lambda wanted: wanted,
    scale: float = 400.0,
    bounds: tuple[int, int] = (16, 4096),
    initial: int | None = None,
    **figures: Any,
) -> size.BatchSizeController:
    controller = size.BatchSizeController(policy, min_size=bounds[0], max_size=bounds[1], initial=initial)
    for _ in range(num_updates):
        batch = ran(controller.size)
        noise = {"noise_s": 2 * scale, "noise_g2": 2.0}
        controller.observe(batch_size=batch, seconds=seconds(batch), **noise, **figures)
    return controller


@pytest.mark.parametrize("clock", [0.003, 0.01, 0.03])
def test_a_nearly_flat_time_is_followed_to_the_end_whatever_the_clock_is_off_by(clock: float) -> None:
    def progress(batch: int) -> float:
        return batch / (0.01 + 1e-6 * batch) / (5000 + batch)

    lost = []
    for seed in range(10):
        chance = random.Random(seed)
        found = train(
            size.goodput(),
            num_updates=500,
            seconds=lambda batch, chance=chance: (0.01 + 1e-6 * batch) * math.exp(chance.gauss(0, clock)),
            scale=5000.0,
            bounds=(16, 1024),
        )
        lost.append(progress(1024) / progress(found.size))
    assert max(lost) < 1.3


@pytest.mark.parametrize(
    ("policy", "initial"),
    [
        (size.chain(size.goodput(), size.multiple_of(64)), 16),
        (size.chain(size.goodput(), size.multiple_of(16)), 20),
        (size.chain(size.goodput(), size.clamp(32, 512)), 16),
        (size.goodput(smallest=100), 64),
        (size.goodput(largest=32), 64),
    ],
    ids=repr,
)
def test_a_base_that_cannot_run_does_not_stop_the_search_for_ever(policy: size.Policy, initial: int) -> None:
    controller = train(policy, num_updates=1000, initial=initial)
    assert "timing" not in controller.explain()


def test_batches_that_always_fill_three_quarters_of_the_size_are_timed_too() -> None:
    controller = size.BatchSizeController(size.goodput(unit="tokens"), min_size=1024, max_size=10**6)
    for _ in range(600):
        num = controller.size // 400
        noise = {"noise_s": 800.0, "noise_g2": 2.0}
        controller.observe(batch_size=num, batch_tokens=400 * num, seconds=0.05 + 0.001 * num, **noise)
    assert controller.size > 1024, controller.explain()


def test_bounds_that_leave_one_size_do_not_let_it_swing_for_ever() -> None:
    controller = train(size.goodput(), num_updates=1500, bounds=(16, 18))
    assert controller.num_changes <= 4


@pytest.mark.parametrize("every", [1, 8])
def test_a_first_batch_of_one_example_grows_as_it_has_no_noise(every: int) -> None:
    torch.manual_seed(0)
    inputs, targets = torch.randn(4096, 8), torch.randint(0, 3, (4096,))
    model = nn.Linear(8, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = supervised_loss(nn.CrossEntropyLoss(reduction="sum"))
    stepper = Stepper(model, optimizer, loss, measure_noise=every if every > 1 else True)
    controller = size.BatchSizeController(size.goodput(), min_size=1, max_size=2)
    for step in range(150):
        start = 2 * step
        batch = (inputs[start : start + controller.size], targets[start : start + controller.size])
        controller.observe(**{**stepper.step(batch).observation(), "seconds": 0.01})
    assert controller.size == 2, controller.explain()


@pytest.mark.parametrize("tokens", [{"tokens": 500}, {"batch_tokens": 0}], ids=["a count that stays", "none at all"])
def test_tokens_that_never_tell_a_length_are_refused_in_words(tokens: dict[str, int]) -> None:
    with pytest.raises(BatchwrightError, match="tokens"):
        train(size.goodput(Seconds()), num_updates=60, **tokens)


def test_a_time_model_of_two_axes_without_a_length_is_refused_when_the_policy_is_made() -> None:
    shapes = [[1, 64, 64], [8, 64, 32], [16, 64, 32], [4, 256, 8], [2, 512, 128]]
    model = TimeModel.fit(shapes, [0.1, 0.2, 0.3, 0.2, 0.3])
    with pytest.raises(ArgumentError, match="length"):
        size.goodput(model)


def test_a_largest_below_the_base_is_allowed_as_the_smallest_is_an_eighth_of_it() -> None:
    assert size.goodput(base_size=64, largest=32).start() is not None


def test_no_size_above_largest_is_asked_for() -> None:
    controller = train(size.goodput(largest=4), num_updates=20, initial=64, bounds=(1, 4096))
    assert all(decision.wanted <= 4 for decision in controller.history), controller.history


def test_a_saved_state_that_explored_nothing_but_says_it_did_is_refused() -> None:
    controller = train(size.goodput(), num_updates=40)
    state = json.loads(json.dumps(controller.state_dict()))
    state["policy_state"]["timings"] = []
    fresh = size.BatchSizeController(size.goodput(), min_size=16, max_size=4096)
    with pytest.raises(StateMismatchError):
        fresh.load_state_dict(state)


def test_a_saved_base_beyond_every_batch_is_refused() -> None:
    state = copy.deepcopy(train(size.goodput(), num_updates=40).state_dict())
    state["policy_state"]["base"] = 1e300
    fresh = size.BatchSizeController(size.goodput(), min_size=16, max_size=4096)
    with pytest.raises(StateMismatchError):
        fresh.load_state_dict(state)


def test_a_state_from_before_the_newest_noise_was_kept_goes_on() -> None:
    state = copy.deepcopy(train(size.goodput(), num_updates=40).state_dict())
    for name in ("recent", "moves", "grace"):
        del state["policy_state"][name]
    controller = size.BatchSizeController(size.goodput(), min_size=16, max_size=4096)
    controller.load_state_dict(state)
    controller.observe(batch_size=controller.size, seconds=0.1, noise_s=800.0, noise_g2=2.0)
    assert controller.state_dict()["policy_state"]["recent"] == [[800.0, 2.0]]


def test_sizes_of_all_kinds_never_push_out_the_last_two_that_were_timed() -> None:
    timings: list[Timing] = []
    for amount in [100] * 6 + [200] * 6 + [round(300 * 1.5**power) for power in range(20)]:
        timings = add_reading(timings, amount, 0.01)
    assert [timing["work"] for timing in timed(timings)] == [100, 200]
    assert len(timings) == 12


@pytest.mark.parametrize("unit", [2.0**-17, 2.0**20], ids=["microseconds", "hours"])
def test_the_unit_of_the_clock_changes_no_size(unit: float) -> None:
    def sizes(factor: float) -> list[int]:
        found = train(size.goodput(), num_updates=300, seconds=lambda batch: factor * (0.02 + 0.001 * batch))
        return [decision.new for decision in found.history]

    assert sizes(unit) == sizes(1.0) != []


def test_a_clock_that_jumps_by_hundreds_of_digits_leaves_readings_that_can_be_loaded() -> None:
    timings: list[Timing] = []
    for seconds in [1e-11] * 16 + [1e11] * 16 + [1e300, 1e-300, 5e-324] + [1e-11] * 16:
        timings = add_reading(timings, 200, seconds)
        timings = add_reading(timings, 100, seconds)
    assert all(1e-12 <= value <= 1e12 for timing in timings for value in timing["seconds"])
    check_timings("timings", timings)


@pytest.mark.parametrize(("s", "g2"), [(1e149, 2.0), (1e-149, 1e149)])
def test_a_noise_scale_beyond_every_batch_is_one_that_a_state_can_hold(s: float, g2: float) -> None:
    controller = size.BatchSizeController(size.goodput(), min_size=16, max_size=64)
    for _ in range(60):
        batch = controller.size
        controller.observe(batch_size=batch, seconds=0.02 + 0.001 * batch, noise_s=s, noise_g2=g2)
    state = json.loads(json.dumps(controller.state_dict(), allow_nan=False))
    again = size.BatchSizeController(size.goodput(), min_size=16, max_size=64)
    again.load_state_dict(state)
    assert again.size == (64 if s > g2 else 16)


@pytest.mark.parametrize("figures", [{"batch_tokens": 2**60}, {"batch_size": 10**30}], ids=repr)
def test_counts_beyond_every_batch_leave_a_state_that_can_be_loaded(figures: dict[str, int]) -> None:
    controller = size.BatchSizeController(size.goodput(), min_size=16, max_size=64)
    for _ in range(30):
        controller.observe(
            **{"batch_size": controller.size, "seconds": 0.1, "noise_s": 9.0, "noise_g2": 1.0, **figures}
        )
    again = size.BatchSizeController(size.goodput(), min_size=16, max_size=64)
    again.load_state_dict(json.loads(json.dumps(controller.state_dict())))
    assert again.size == controller.size


_WILD: dict[str, list[float]] = {
    "seconds": [1e-6, 1e4, 1e-300, 1e300, 5e-324, 0.0, -1.0, math.nan, math.inf, 1e16],
    "noise_s": [-5.0, math.nan, math.inf, -math.inf, 0.0, 1e149, -1e149, 5e-324, 1e308],
    "noise_g2": [-5.0, math.nan, math.inf, -math.inf, 0.0, 1e149, -1e149, 5e-324, 1e75],
}


@pytest.mark.parametrize("seed", range(num_cases(8, thorough=200)))
def test_whatever_an_update_tells_the_run_goes_on_and_can_be_resumed(seed: int) -> None:
    chance = random.Random(seed)
    low, high = chance.choice([(1, 4096), (16, 16), (2, 10**6), (1, 2**60), (100, 101)])
    tokens = chance.choice([None, 1, 300])

    def control() -> size.BatchSizeController:
        return size.BatchSizeController(size.goodput(), min_size=low, max_size=high)

    controller = control()
    for step in range(150):
        batch = controller.size if chance.random() < 0.9 else chance.choice([1, controller.size // 2 or 1])
        figures: dict[str, Any] = {"seconds": 0.05 + 0.001 * batch, "noise_s": 800.0, "noise_g2": 2.0}
        for name, wild in _WILD.items():
            if chance.random() < 0.1:
                figures[name] = chance.choice(wild)
        if tokens is not None:
            figures["batch_tokens"] = chance.choice([batch * tokens, batch * tokens, batch, 0])
        assert low <= controller.observe(batch_size=batch, **figures) <= high
        if step % 10 == 0:
            state = json.loads(json.dumps(controller.state_dict(), allow_nan=False))
            controller = control()
            controller.load_state_dict(state)
