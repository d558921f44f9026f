"""goodput where the base cannot run, the clock is a little noisy, tokens are rare, or a batch is one example."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from batchwright import TimeModel, size
from batchwright.errors import ArgumentError, BatchwrightError, StateMismatchError
from batchwright.step import Stepper, supervised_loss


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
    # Expected: 10 ms + 1 µs per example, noise scale 5000: 1024 makes 12 times the progress of 64, and "a curve that is
    # flat so far is followed step by step" (docs/sizing.md; worst of 24 simulated runs there: 1.11).
    # Found: with clocks off by 0.3 to 3 % half of the runs hold at 64 to 222 for ever, 4 to 12 times too slow: a
    # largest reading that is a hair above the others is fitted as max(launch, per_unit × work) with its corner there,
    # so that twice the size "takes twice as long" and is never tried.
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
    # Expected: the sizes that do run are timed, and the size follows the progress per second.
    # Found: "timing 16, 0 of 5 updates" after 1000 updates of another size: readings are counted at the base, which
    # multiple_of, clamp, smallest or largest never let run, and the first target is always open.
    controller = train(policy, num_updates=1000, initial=initial)
    assert "timing" not in controller.explain()


def test_batches_that_always_fill_three_quarters_of_the_size_are_timed_too() -> None:
    # Expected: 800 tokens ran where 1024 are allowed (examples of 400): it is timed as what it is and followed.
    # Found: "timing 1024, 0 of 5 updates" for ever, since 800 is not within a factor 1.2 of 1024.
    controller = size.BatchSizeController(size.goodput(unit="tokens"), min_size=1024, max_size=10**6)
    for _ in range(600):
        num = controller.size // 400
        noise = {"noise_s": 800.0, "noise_g2": 2.0}
        controller.observe(batch_size=num, batch_tokens=400 * num, seconds=0.05 + 0.001 * num, **noise)
    assert controller.size > 1024, controller.explain()


def test_bounds_that_leave_one_size_do_not_let_it_swing_for_ever() -> None:
    # Expected: 16 to 18 hold one size; on constant figures the size comes to rest.
    # Found: 16 -> 18 -> 16 every 100 updates for ever.
    controller = train(size.goodput(), num_updates=1500, bounds=(16, 18))
    assert controller.num_changes <= 4


@pytest.mark.parametrize("every", [1, 8])
def test_a_first_batch_of_one_example_grows_as_it_has_no_noise(every: int) -> None:
    # Expected: as noise_driven does, goodput leaves a size at which no noise can ever be measured.
    # Found: measure_noise=True: "noise scale not reliable after 0 updates: holds 1" for ever (back to the base, 1).
    # measure_noise=8: MissingSignalError "build the Stepper with measure_noise=True" although noise is measured.
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


class _Seconds:
    def predict(self, shapes: Any) -> Any:
        return 0.1 + 0.001 * np.asarray(shapes)[:, 0]


@pytest.mark.parametrize("tokens", [{"tokens": 500}, {"batch_tokens": 0}], ids=["a count that stays", "none at all"])
def test_tokens_that_never_tell_a_length_are_refused_in_words(tokens: dict[str, int]) -> None:
    # Expected: a time model without length needs the tokens of updates; a MissingSignalError says so.
    # Found: TypeError: type NoneType doesn't define __round__ method, in the middle of training.
    with pytest.raises(BatchwrightError, match="tokens"):
        train(size.goodput(_Seconds()), num_updates=60, **tokens)


def test_a_time_model_of_two_axes_without_a_length_is_refused_when_the_policy_is_made() -> None:
    # Expected: observed tokens are one number, so two lengths must be given; said at once ("a model that cannot predict
    # these fails now, not in training", throughput.py). Found: an error after 16 updates that names no argument.
    shapes = [[1, 64, 64], [8, 64, 32], [16, 64, 32], [4, 256, 8], [2, 512, 128]]
    model = TimeModel.fit(shapes, [0.1, 0.2, 0.3, 0.2, 0.3])
    with pytest.raises(ArgumentError, match="length"):
        size.goodput(model)


def test_a_largest_below_the_base_is_allowed_as_the_smallest_is_an_eighth_of_it() -> None:
    # Expected: docstring: smallest None is an eighth of the base without a time model, so 8 to 32 is a range.
    # Found: ArgumentError "smallest must be below largest, got smallest=64, largest=32": smallest was never given.
    assert size.goodput(base_size=64, largest=32).start() is not None


def test_no_size_above_largest_is_asked_for() -> None:
    # Expected: largest=4 is the largest size to consider. Found: 8, an eighth of the base 64, is asked for.
    controller = train(size.goodput(largest=4), num_updates=20, initial=64, bounds=(1, 4096))
    assert all(decision.wanted <= 4 for decision in controller.history), controller.history


def test_a_saved_state_that_explored_nothing_but_says_it_did_is_refused() -> None:
    # Expected: StateMismatchError at load ("what a policy would trip over is refused when it is loaded").
    # Found: loaded; then "a fit needs two different amounts of work, got [118.0]; time more" from observe.
    controller = train(size.goodput(), num_updates=40)
    state = json.loads(json.dumps(controller.state_dict()))
    state["policy_state"]["timings"] = []
    fresh = size.BatchSizeController(size.goodput(), min_size=16, max_size=4096)
    with pytest.raises(StateMismatchError):
        fresh.load_state_dict(state)


def test_a_saved_base_beyond_every_batch_is_refused() -> None:
    # Expected: StateMismatchError at load. Found: TypeError of a NumPy ufunc ("no callable log10 method") in observe.
    state = copy.deepcopy(train(size.goodput(), num_updates=40).state_dict())
    state["policy_state"]["base"] = 1e300
    fresh = size.BatchSizeController(size.goodput(), min_size=16, max_size=4096)
    with pytest.raises(StateMismatchError):
        fresh.load_state_dict(state)
