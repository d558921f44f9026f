"""Stepper(beta2_rule=…) with a constant gradient: Adam's bias correction is right whatever the sizes before were."""

import copy

import pytest
import torch
from torch import nn

from batchwright.step import Stepper, measure_size

torch.set_num_threads(1)


class Line(nn.Module):
    """A loss whose gradient is the same at every point: Adam moves each weight by the rate, whatever beta2 is."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))


SLOPES = torch.tensor([3.0, -0.5, 1e-2])
# Changes that come early, when the bias correction is far from 1, in both directions.
SIZES = (8, 64, 1, 16, 16, 128, 2, 8, 32, 1)


def line_loss(model, batch):
    return (model.weight * SLOPES).sum() * len(batch), len(batch)


def line_stepper(model, optimizer, **options):
    options = {"beta2_rule": "half_life", "base_size": 8, **options}
    return Stepper(model, optimizer, line_loss, **options)


def adam(parameters, **options):
    return torch.optim.Adam(parameters, **{"lr": 0.25, "betas": (0.9, 0.98), "eps": 1e-12, **options})


def check_moved(model, num_steps):
    torch.testing.assert_close(model.weight.detach(), -0.25 * num_steps * SLOPES.sign(), rtol=1e-5, atol=0)


def test_with_a_constant_gradient_every_step_is_the_rate_at_every_size():
    model = Line()
    stepper = line_stepper(model, adam(model.parameters()))
    for done, size in enumerate(SIZES, 1):
        stepper.step(torch.zeros(size))
        check_moved(model, done)


def test_a_checkpoint_of_the_optimizer_alone_goes_on_between_two_sizes():
    model = Line()
    optimizer = adam(model.parameters())
    stepper = line_stepper(model, optimizer)
    for size in SIZES[:6]:
        stepper.step(torch.zeros(size))
    resumed = Line()
    resumed.load_state_dict(model.state_dict())
    other = adam(resumed.parameters())
    stepper = line_stepper(resumed, other)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for size in SIZES[6:]:
        stepper.step(torch.zeros(size))
    check_moved(resumed, len(SIZES))


def test_a_run_that_goes_on_without_the_rule_has_the_correction_of_its_own_beta2():
    model = Line()
    optimizer = adam(model.parameters())
    line_stepper(model, optimizer).step(torch.zeros(128))
    plain = Stepper(model, optimizer, line_loss)
    for done in (2, 3):
        plain.step(torch.zeros(8))
        check_moved(model, done)


def test_an_update_that_was_abandoned_leaves_the_averages_of_the_one_before():
    model = Line()
    optimizer = adam(model.parameters())
    stepper = line_stepper(model, optimizer)
    stepper.step(torch.zeros(8))
    before = copy.deepcopy(optimizer.state_dict())
    stepper.accumulate(torch.zeros(64))
    stepper.abandon()
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
    stepper.step(torch.zeros(16))
    check_moved(model, 2)


@pytest.mark.parametrize("fails_at", ["before", "after"])
def test_a_step_that_fails_does_not_scale_the_averages_twice(fails_at):
    model = Line()
    optimizer = adam(model.parameters())
    stepper = line_stepper(model, optimizer)
    stepper.step(torch.zeros(8))

    def fail(*_):
        hook.remove()
        raise RuntimeError("CUDA out of memory")

    register = optimizer.register_step_pre_hook if fails_at == "before" else optimizer.register_step_post_hook
    hook = register(fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        stepper.step(torch.zeros(64))
    done = 1 + (fails_at == "after")
    check_moved(model, done)
    stepper.step(torch.zeros(64))
    check_moved(model, done + 1)


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_does_not_count(fused):
    model = Line()
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    slopes = SLOPES.clone()
    loss = lambda model, batch: ((model.weight * slopes).sum() * len(batch), len(batch))  # noqa: E731
    optimizer = adam(model.parameters(), fused=fused)
    stepper = Stepper(model, optimizer, loss, scaler=scaler, weight_of=len, beta2_rule="half_life", base_size=8)
    stepper.step(torch.zeros(8))
    slopes.fill_(float("inf"))
    stepper.step(torch.zeros(64))
    check_moved(model, 1)
    slopes.copy_(SLOPES)
    for done, size in enumerate((2, 64, 8), 2):
        stepper.step(torch.zeros(size))
        check_moved(model, done)


def test_an_experiment_puts_the_averages_and_their_beta2_back():
    model = Line()
    optimizer = adam(model.parameters())
    stepper = line_stepper(model, optimizer)
    for size in (64, 8):
        stepper.step(torch.zeros(size))
    before = copy.deepcopy(optimizer.state_dict())
    measure_size(stepper, [torch.zeros(8) for _ in range(4)], factors=(1, 2))
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)
    stepper.step(torch.zeros(32))
    check_moved(model, 3)


def test_an_optimizer_whose_correction_is_unknown_is_used_with_a_warning():
    class Own(torch.optim.Optimizer):
        def step(self, closure=None):
            pass

    model = Line()
    match = "does not know the bias correction of Own, if it has one: the steps after a change of the batch size may"
    with pytest.warns(UserWarning, match=match):
        line_stepper(model, Own(model.parameters(), {"lr": 0.25, "betas": (0.9, 0.98)})).step(torch.zeros(16))
