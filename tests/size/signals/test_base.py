"""Periods: epochs that end with an observation of their own, epochs without figures, and policies that take over."""

import math

import pytest

from batchwright.size import (
    BatchSizeController,
    Observation,
    constant,
    entropy_driven,
    loss_below,
    loss_driven,
    loss_settled,
    memory_driven,
    noise_driven,
    speed_driven,
    step_time,
    switch,
)

FIGURES = {
    **{"loss": 1.0, "entropy": 0.5, "seconds": 0.1, "memory_fraction": 0.6},
    **{"noise_s": 8.0, "noise_g2": 0.5, "noise_parts": 4},
}
POLICIES = {
    "loss_driven": loss_driven(),
    "loss_below": loss_below(2.0),
    "loss_settled": loss_settled(),
    "entropy_driven": entropy_driven(10, smallest=8, largest=64),
    "memory_driven": memory_driven(per="epoch"),
    "speed_driven": speed_driven(),
    "step_time": step_time(100, per="epoch"),
    "noise_driven": noise_driven(per="epoch"),
    "noise ratio": noise_driven(estimator="ratio"),
}


def control(policy):
    return BatchSizeController(policy, min_size=1, max_size=512, initial=16)


@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_takes_over_with_the_end_of_an_epoch_holds_the_size(name):
    controller = control(switch({0: constant(16), 2: POLICIES[name]}))
    for epoch in range(2):
        for _ in range(3):
            controller.observe(epoch=epoch, batch_size=controller.size, **FIGURES)
        controller.observe(epoch=epoch + 1)
    assert controller.size == 16
    assert controller.explain().endswith("holds 16")


@pytest.mark.parametrize("name", ["loss_driven", "loss_below", "loss_settled", "entropy_driven"])
def test_an_epoch_of_nothing_but_nan_holds_the_size(name):
    controller = control(POLICIES[name])
    for _ in range(3):
        controller.observe(epoch=0, batch_size=16, loss=math.nan, entropy=math.nan)
    assert controller.observe(epoch=1) == 16
    assert "since the last period: holds 16" in controller.explain()


@pytest.mark.parametrize("name", POLICIES)
def test_an_epoch_may_be_ended_twice(name):
    controller = control(POLICIES[name])
    controller.observe(epoch=0, batch_size=16, **FIGURES)
    before = controller.observe(epoch=1, batch_size=16, **FIGURES)
    assert controller.observe(epoch=1) == before


def test_a_policy_that_takes_over_gathers_a_whole_epoch_before_it_decides():
    controller = control(switch({0: constant(16), 2: loss_below(1.5)}))
    for epoch in range(3):
        for loss in (1.0, 9.0, 9.0):  # far above 1.5 in the mean, with and without the first one
            controller.observe(epoch=epoch, batch_size=controller.size, loss=loss)
    controller.observe(epoch=3)
    assert controller.size == 16
    assert controller.explain() == "switch: the policy from 2 on; loss 9 over the epoch, not below 1.5: holds 16"


def test_the_loss_with_which_a_policy_takes_over_belongs_to_the_epoch_before():
    controller = control(switch({0: constant(16), 2: loss_below(1.5)}))
    losses = {1: 1.0, 2: 1.0, 3: 1.0, 4: 9.0, 5: 1.0}  # one observation per epoch
    assert [controller.observe(epoch=epoch, loss=loss) for epoch, loss in losses.items()] == [16, 16, 32, 32, 64]


def test_a_policy_that_is_in_charge_from_the_beginning_decides_with_the_first_epoch():
    policy = switch({0: loss_below(1.5), 5: constant(16)})
    assert policy.update(policy.init(), Observation(epoch=1, loss=1.0, size=16))[0] == 32


def test_a_policy_that_follows_updates_and_takes_over_decides_at_once():
    controller = control(switch({0: constant(16), 2: loss_below(1.5, per="step")}))
    assert controller.observe(epoch=2, batch_size=16, loss=1.0) == 32


def test_a_policy_that_takes_over_within_epoch_0_gathers_the_rest_of_it():
    controller = control(switch({0: constant(16), 3: loss_below(1.5)}, per="step"))
    for loss in (9.0, 9.0, 1.0, 1.0):
        controller.observe(epoch=0, batch_size=16, loss=loss)
    assert controller.observe(epoch=1) == 32
