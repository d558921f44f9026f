"""Capturing: from the largest shape down, what is refused and put back."""

import pytest
import torch
from torch import nn

from batchwright.step import Stepper
from batchwright.step.graphs._capturing import text_of
from batchwright.step.graphs._micro import NotGraphableError
from batchwright.testing import EagerGraphs

from . import models
from .tape import TapeGraphs
from .twins import SAME, Twins, distance, sgd

torch.set_num_threads(1)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NotGraphableError("it draws"), "it draws"),
        (KeyError("labels"), "a capture failed with KeyError: 'labels'"),
        (ValueError("first\nsecond"), "a capture failed with ValueError: first"),
        (ValueError(), "a capture failed with ValueError: "),
        (
            RuntimeError("operation not permitted when stream is capturing"),
            "the step waits for the device, by .item(), a shape that depends on values or the like "
            "(RuntimeError: operation not permitted when stream is capturing)",
        ),
    ],
)
def test_the_reason_of_a_failed_capture_is_one_line(error, text):
    assert text_of(error) == text


# The catalogue


class Grows(nn.Module):
    """Has a table that grows with the longest input so far, as rotary embeddings do."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 3)
        self.table, self.num_grown = torch.ones(1), 0

    def forward(self, x):
        if x.shape[1] > len(self.table):
            self.table = torch.arange(1.0, x.shape[1] + 1)
            self.num_grown += 1
        return self.layer((x * self.table[: x.shape[1]]).mean(dim=1, keepdim=True))


def run(model, shapes, planned, backend, loss_fn=models.table_loss):
    stepper = Stepper(model, sgd(model.parameters()), loss_fn, graphs=backend, shapes=planned)
    return [stepper.step(models.tables(shape, seed=seed)) for seed, shape in enumerate(shapes)], stepper


@pytest.mark.parametrize("backend", [TapeGraphs, EagerGraphs])
def test_a_table_that_grows_with_the_shape_has_grown_before_the_captures(backend):
    model = models.seeded(Grows)
    planned = [(4, 6), (4, 9), (4, 12)]
    reports, stepper = run(model, [(4, 6), (4, 9), *planned * 3], planned, backend())
    assert all(report.graphed for report in reports[-3:])
    assert stepper.graph_summary().reasons == {}
    assert len(model.table) == 12


def test_a_rehearsal_of_a_shape_that_memory_has_no_room_for_leaves_no_trace():
    model = models.seeded(Grows)
    _, stepper = run(model, [(4, 6), (4, 9), (4, 6)], [(4, 6), (4, 9), (4, 12)], EagerGraphs(max_captures=0))
    assert stepper.graph_summary().num_captures == 0
    assert (len(model.table), model.num_grown) == (9, 2)


def test_memory_that_runs_out_after_some_captures_keeps_what_they_read():
    """The large graph reads the table of the rehearsal, which must stay although the small one found no room."""
    model = models.seeded(Grows)
    planned = [(4, 6), (4, 12)]
    twins = Twins("again", model, models.table_loss, planned)
    backend = EagerGraphs(max_captures=2)
    graphed = twins.graphed
    graphed.stepper = Stepper(graphed.model, graphed.optimizer, models.table_loss, graphs=backend, shapes=planned)
    for seed in range(9):
        twins.step(models.tables(planned[seed % 2], seed=seed))
    assert distance(twins.graphed.values, twins.eager.values) <= SAME
    summary = graphed.stepper.graph_summary()
    assert list(summary.shapes) == ["4x12 4"]
    assert len(graphed.model.table) == 12
    assert summary.reasons["a shape did not fit into memory beside the others"] == 1


@pytest.mark.parametrize("backend", [TapeGraphs, EagerGraphs])
def test_a_planned_shape_that_the_loss_refuses_costs_no_other_its_graph(backend):
    """It is made up of the rows of another batch, and may never come."""

    def loss_fn(model, batch):
        if len(batch["x"]) == 5:
            raise ValueError("no batch has five rows")
        return models.table_loss(model, batch)

    for planned in ([(4, 6), (5, 6), (7, 6)], [(4, 6), (5, 6)]):
        sizes = [planned[0], planned[-1] if planned[-1] != (5, 6) else planned[0]]
        reports, stepper = run(models.make_mlp(), sizes * 4, planned, backend(), loss_fn)
        assert reports[-1].graphed
        assert reports[-2].graphed
        assert stepper.graph_summary().reasons == {}


def test_the_gradients_of_an_update_that_goes_on_survive_a_capture():
    """A new shape may come in the middle of an update; captures and rehearsals run on the same parameters."""
    twins = Twins("tape", models.make_mlp(), models.table_loss, [(4, 6), (8, 6)])
    for number in range(4):
        for side in twins.sides:
            for rows in (4, 8, 4) if number < 2 else (8, 4, 8):
                side.stepper.accumulate(models.tables((rows, 6), seed=10 * number + rows))
        twins.each(lambda side: side.stepper.reduce())
        assert distance(twins.graphed.gradients, twins.eager.gradients) <= 1e-5
        twins.each(lambda side: side.stepper.update())
    assert distance(twins.graphed.values, twins.eager.values) <= SAME
