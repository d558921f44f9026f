"""Observations that only end an epoch, as the loop of docs/sizing.md makes them."""

import math

import pytest

from batchwright.size import (
    BatchSizeController,
    constant,
    entropy_driven,
    loss_below,
    loss_driven,
    loss_settled,
    memory_driven,
    minimum,
    speed_driven,
    step_time,
    switch,
)

FIGURES = {"loss": 1.0, "entropy": 0.5, "seconds": 0.1, "memory_fraction": 0.6}
POLICIES = {
    "loss_driven": loss_driven(),
    "loss_below": loss_below(2.0),
    "loss_settled": loss_settled(),
    "entropy_driven": entropy_driven(10, smallest=8, largest=64),
    "memory_driven": memory_driven(per="epoch"),
    "speed_driven": speed_driven(),
    "step_time": step_time(100, per="epoch"),
}


def control(policy):
    return BatchSizeController(policy, min_size=1, max_size=512, initial=16)


# Expected (docs/sizing.md, "An observation of epoch alone, after updates that were observed, only ends an epoch:
# policies that follow updates hold the size then"): training goes on. Found: MissingSignalError at the end of epoch 1,
# where the new policy is in charge and has seen nothing yet. The documented loop dies in the middle of a run.
@pytest.mark.parametrize("name", POLICIES)
def test_a_policy_that_takes_over_with_a_new_epoch_holds_the_size(name):
    controller = control(switch({0: constant(16), 2: POLICIES[name]}))
    for epoch in range(2):
        for _ in range(3):
            controller.observe(epoch=epoch, batch_size=controller.size, **FIGURES)
        controller.observe(epoch=epoch + 1)
    assert controller.size == 16


# Expected: losses that are NaN are left out, "a period that has only such values has no mean", and the size holds.
# Found: MissingSignalError "needs loss, which was not observed", as the loop ends the epoch.
@pytest.mark.parametrize("name", ["loss_driven", "loss_below", "loss_settled", "entropy_driven"])
def test_an_epoch_of_nothing_but_nan_holds_the_size(name):
    controller = control(POLICIES[name])
    for _ in range(3):
        controller.observe(epoch=0, batch_size=16, loss=math.nan, entropy=math.nan)
    assert controller.observe(epoch=1) == 16


# Expected: as above. Found: MissingSignalError, if the last update of the epoch already said that it is complete.
@pytest.mark.parametrize("name", POLICIES)
def test_an_epoch_may_be_ended_twice(name):
    controller = control(POLICIES[name])
    controller.observe(epoch=0, batch_size=16, **FIGURES)
    before = controller.observe(epoch=1, batch_size=16, **FIGURES)
    assert controller.observe(epoch=1) == before


# Expected (Period, loss_driven): means over an epoch, "decides when epoch has risen". Found: the policy that takes over
# in epoch 2 decides on the very first update that it sees, whose loss alone counts as the mean of an epoch (its count
# of epochs starts at 0, so epoch 2 looks like a rise). In adaptive(Trainer) that is the last update of epoch 1.
def test_a_policy_that_takes_over_gathers_a_whole_epoch_before_it_decides():
    controller = control(switch({0: constant(16), 2: loss_below(1.5)}))
    for epoch in range(3):
        for loss in (1.0, 9.0, 9.0):  # mean 6.3, far above 1.5
            controller.observe(epoch=epoch, batch_size=controller.size, loss=loss)
    controller.observe(epoch=3)
    assert controller.size == 16


# Expected (docstring of minimum: "minimum(memory_driven(), speed_driven()) grows the batch if memory is free and
# training no longer becomes faster"): it grows. Found: 16 for ever in the loop of docs/sizing.md; speed_driven decides
# in the observation that ends the epoch, in which memory_driven() holds. The example of the docstring needs
# memory_driven(per="epoch").
def test_the_rule_in_the_docstring_of_minimum_grows_the_batch():
    controller = control(minimum(memory_driven(), speed_driven()))
    for epoch in range(12):
        for _ in range(10):
            ran = controller.size
            controller.observe(epoch=epoch, batch_size=ran, seconds=0.1 + 0.001 * ran, memory_fraction=ran / 512)
        controller.observe(epoch=epoch + 1)
    assert controller.size > 16
