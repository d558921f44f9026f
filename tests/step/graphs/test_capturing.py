"""Capturing: from the largest shape down, what is refused and put back."""

import copy
import functools
import math

import pytest
import torch
from torch import nn

from batchwright.step import Stepper
from batchwright.step.graphs._capturing import text_of
from batchwright.step.graphs._micro import NotGraphableError
from batchwright.testing import EagerGraphs

from . import models
from .plain import batch_of, squares
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


@functools.lru_cache
def slopes(width):
    return torch.linspace(1.0, 2.0, width)[:, None]


class Sloped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 3)

    def forward(self, x):
        return (self.layer(x[..., None]) * slopes(x.shape[1])).mean(1)


def test_a_table_kept_by_lru_cache_is_not_filled_by_a_capture():
    slopes.cache_clear()
    model = Sloped()
    graphed, eager = copy.deepcopy(model), copy.deepcopy(model)
    shapes = [(4, 7), (4, 6), (4, 5)] * 2
    graphs = TapeGraphs()
    graphs.spoiled = math.nan
    one = Stepper(graphed, sgd(graphed.parameters()), squares, graphs=graphs, shapes=shapes)
    two = Stepper(eager, sgd(eager.parameters()), squares)
    batches = [batch_of(4, 6, 0), batch_of(4, 7, 1), batch_of(4, 6, 2), batch_of(3, 5, 3), batch_of(4, 5, 4)]
    for batch in batches:
        one.step(batch)
    slopes.cache_clear()
    for batch in batches:
        two.step(batch)
    assert distance(list(graphed.parameters()), list(eager.parameters())) < 1e-6


class KeepsMasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 3)
        self.masks = {}

    def forward(self, x):
        width = x.shape[1]
        if width not in self.masks:
            self.masks[width] = torch.linspace(1.0, 2.0, width)
        return self.layer((x * self.masks[width]).mean(1, keepdim=True))


def test_a_table_with_an_entry_per_length_costs_no_graph():
    model = KeepsMasks()
    stepper = Stepper(model, sgd(model.parameters()), squares, graphs=TapeGraphs(), shapes=[(4, 5), (4, 6), (4, 7)] * 2)
    for seed in range(24):
        report = stepper.step(batch_of(4, 5 + seed % 3, seed))
    assert report.graphed


def test_recurrent_layers_under_ddp_run_eagerly_with_the_reason(tmp_path):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.head = nn.LSTM(1, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x):
            return self.head(self.layer(x[..., None])[0][:, -1])

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = Recurrent()
        ddp = nn.parallel.DistributedDataParallel(model)
        stepper = Stepper(ddp, sgd(model.parameters()), squares, graphs=TapeGraphs(), shapes=[(4, 6)] * 4)
        with pytest.warns(UserWarning, match="the forward pass changes layer._flat_weight"):
            reports = [stepper.step(batch_of(seed=seed)) for seed in range(6)]
        assert not any(report.graphed for report in reports)
    finally:
        torch.distributed.destroy_process_group()
