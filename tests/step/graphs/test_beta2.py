"""Captured updates hold beta2 as a number: each beta2 of a rule has an update of its own, or runs eagerly."""

from unittest import mock

import pytest
import torch

from batchwright.step.graphs import _update

from . import models
from .twins import BACKENDS, SAME, Twins, adamw, distance

torch.set_num_threads(1)
SIZES = (4, 8)
NOTE = "a beta2 of beta2_rule is captured when it comes again, and of many only the first"


def twins_of(backend="tape", sizes=SIZES, **options):
    options = {"beta2_rule": "half_life", "base_size": 4, **options}
    make = lambda parameters: adamw(parameters, betas=(0.9, 0.999))  # noqa: E731
    shapes = [(size, 6) for size in sizes]
    return Twins.of(backend, "mlp", shapes=shapes, make_optimizer=make, **options)


def replays(twins, sizes):
    """Run updates of these sizes; return for each whether its update was replayed."""
    found = []
    for seed, size in enumerate(sizes):
        before = twins.graphed.stepper.graph_summary().num_updates_replayed
        twins.step(models.tables((size, 6), seed=seed))
        found.append(twins.graphed.stepper.graph_summary().num_updates_replayed - before)
        assert twins.eager.report.beta2 == twins.graphed.report.beta2 == pytest.approx(0.999 ** (size / 4))
        assert distance(twins.graphed.values, twins.eager.values) <= SAME
    return found


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_replayed_update_has_the_beta2_of_its_batch_size(backend):
    twins = twins_of(backend)
    found = replays(twins, [4, 4, 4, 4, 8, 8, 8, 8, 4, 8, 4])
    # A beta2 that comes for the first time runs eagerly; the next time it is captured, and replayed at once.
    assert found[-5:] == [1, 1, 1, 1, 1]
    assert sum(found) < len(found)
    for side in twins.sides:
        assert side.optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_with_a_scaler_too():
    scaler = lambda model: torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=3)  # noqa: E731
    scaler.is_own = True
    twins = twins_of("again", scaler=scaler, weight_of=lambda batch: len(batch["x"]))
    assert sum(replays(twins, [4, 4, 4, 8, 8, 8, 4, 8])) > 0


class Line(torch.nn.Module):
    """Its loss has the same gradient at every point: Adam moves each weight by the rate, whatever beta2 is."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(6))
        # A buffer: a tensor made of a list inside forward would be copied from the host, which no capture allows.
        self.register_buffer("slopes", torch.tensor([3.0, -0.5, 0.01, -2.0, 1.0, 7.0]))

    def forward(self, x):
        return (self.weight * self.slopes).sum() + 0.0 * x.sum(1)


def line_loss(model, batch):
    weight = batch["row_weight"].to(torch.float32)
    return (model(batch["x"]) * weight).sum(), weight.sum()


def line_twins(backend, **options):
    make = lambda parameters: adamw(parameters, lr=0.25, betas=(0.9, 0.99), eps=1e-12, weight_decay=0.0)  # noqa: E731
    options = {"beta2_rule": "half_life", "base_size": 4, **options}
    return Twins(backend, Line(), line_loss, [(size, 6) for size in SIZES], make_optimizer=make, **options)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_replayed_update_after_a_change_corrects_the_averages_of_the_beta2_before(backend):
    twins = line_twins(backend)
    signs = torch.tensor([1.0, -1, 1, -1, 1, 1], device=twins.device)
    for done, size in enumerate([4, 4, 4, 8, 8, 4, 8, 4, 4, 8], 1):
        twins.step(models.tables((size, 6), seed=done))
        for side in twins.sides:
            torch.testing.assert_close(side.model.weight.detach(), -0.25 * done * signs, rtol=1e-5, atol=0)
    assert twins.graphed.stepper.graph_summary().num_updates_replayed >= 5


def test_a_beta2_that_comes_once_is_not_captured():
    twins = twins_of(sizes=(4, 8, 12))
    found = replays(twins, [4, 4, 4, 4, 8, 4, 12, 4])
    assert found[3:] == [1, 0, 1, 0, 1]
    assert NOTE in twins.graphed.stepper.graph_summary().reasons


def test_beyond_the_most_captures_new_ones_run_eagerly_and_old_ones_are_replayed():
    with mock.patch.object(_update, "_MOST_BETA2S", 1):
        twins = twins_of(sizes=(4, 8, 12))
        found = replays(twins, [4, 4, 4, 4, 8, 8, 8, 12, 12, 12, 4, 8])
    assert found[4:] == [0, 1, 1, 0, 0, 0, 1, 1]
    assert NOTE in twins.graphed.stepper.graph_summary().reasons


def test_the_update_used_longest_ago_makes_room_and_is_captured_again():
    with mock.patch.object(_update, "_MOST_HELD", 2):
        twins = twins_of(sizes=(4, 8, 12))
        found = replays(twins, [4, 4, 4, 8, 8, 12, 12, 8, 4, 4])
    assert found[3:] == [0, 1, 0, 1, 1, 0, 1]


def test_without_a_rule_nothing_waits():
    twins = twins_of(beta2_rule=None, base_size=None)
    for seed, size in enumerate([4, 4, 4, 8, 8]):
        twins.step(models.tables((size, 6), seed=seed))
    assert twins.graphed.report.beta2 is None
    assert NOTE not in twins.graphed.stepper.graph_summary().reasons
