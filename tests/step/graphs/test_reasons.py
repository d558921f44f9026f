"""Reasons: what ran eagerly is counted, and said once where nothing is replayed."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn

from batchwright.step import Stepper

from .plain import batch_of, squares
from .tape import TapeGraphs
from .twins import sgd

torch.set_num_threads(1)


def test_graphed_is_not_true_of_an_eager_update_after_a_batch_that_failed():
    class Bad(Exception):
        pass

    def loss_fn(model, batch):
        if len(batch["x"]) == 3:
            raise Bad
        return squares(model, batch)

    model = nn.Linear(6, 3)
    stepper = Stepper(model, sgd(model.parameters()), loss_fn, graphs=TapeGraphs(), shapes=[(4, 6)] * 4, micro_batch=4)
    for seed in range(4):
        report = stepper.step(batch_of(seed=seed))
    assert report.graphed
    stepper.accumulate(batch_of(2))  # runs eagerly: not planned
    with pytest.raises(Bad):
        stepper.accumulate(batch_of(7))  # 4 rows are replayed, then 3 fail
    assert not stepper.update().graphed


def test_the_hit_rate_counts_updates_that_measure_noise():
    model = nn.Linear(6, 3)
    stepper = Stepper(
        model, sgd(model.parameters()), squares, graphs=TapeGraphs(), shapes=[(4, 6)] * 4, measure_noise=2
    )
    reports = [stepper.step(batch_of(seed=seed)) for seed in range(12)]
    num = sum(report.num_micro_batches for report in reports)
    summary = stepper.graph_summary()
    assert summary.num_replayed + summary.num_eager == num


def test_shapes_of_the_summary_add_up_to_the_replays():
    model = nn.Linear(6, 3)

    def loss_fn(model, batch):
        return squares(model, {"x": batch["x"].float(), "y": batch["y"]})

    stepper = Stepper(model, sgd(model.parameters()), loss_fn, graphs=TapeGraphs(), shapes=[(4, 6)] * 4)
    for seed in range(5):
        stepper.step(batch_of(seed=seed))
    for seed in range(5):
        batch = batch_of(seed=seed)
        stepper.step({"x": batch["x"].double(), "y": batch["y"]})
    summary = stepper.graph_summary()
    assert sum(summary.shapes.values()) == summary.num_replayed


def test_a_batch_with_names_of_its_examples_is_graphed_or_a_warning_says_why():
    model = nn.Linear(6, 3)
    stepper = Stepper(model, sgd(model.parameters()), squares, graphs=TapeGraphs(), shapes=[(4, 6)] * 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(24):
            report = stepper.step({**batch_of(seed=seed), "names": [f"{seed}-{row}" for row in range(4)]})
    assert not report.graphed
    (warning,) = caught
    assert "single values, such as a list of names, that differ from batch to batch" in str(warning.message)


def test_shapes_that_were_not_planned_are_warned_of_once():
    model = nn.Linear(6, 3)
    stepper = Stepper(model, sgd(model.parameters()), squares, graphs=TapeGraphs(), shapes=[(5, 6)] * 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(40):
            stepper.step(batch_of(seed=seed))
    assert [str(one.message) for one in caught] == [
        "16 micro-batches ran eagerly, as none had a planned shape: the last has tensors of 4x6 4x3, and shapes= "
        "begins with 5x6 (rows, then padded lengths)"
    ]
    assert stepper.graph_summary().reasons["a shape was not planned"] == 39


def test_one_batch_of_a_planned_shape_is_enough_for_no_warning():
    model = nn.Linear(6, 3)
    stepper = Stepper(model, sgd(model.parameters()), squares, graphs=TapeGraphs(), shapes=[(5, 6)] * 4)
    for seed in range(40):
        stepper.step(batch_of(5 if seed == 9 else 4, seed=seed))
    assert stepper.graph_summary().reasons["a shape was not planned"] == 38


def test_batches_with_arrays_are_warned_of_once():
    model = nn.Linear(6, 3)
    stepper = Stepper(model, sgd(model.parameters()), squares, graphs=TapeGraphs(), shapes=[(4, 6)] * 4)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for seed in range(40):
            stepper.step({**batch_of(seed=seed), "places": np.arange(4)})
    assert [str(one.message) for one in caught] == [
        "16 micro-batches ran eagerly: a batch holds more than tensors and single values"
    ]


def test_graphs_of_one_size_have_labels_of_their_own():
    model = nn.Linear(6, 3)
    stepper = Stepper(model, sgd(model.parameters()), two_ways, graphs=TapeGraphs(), shapes=[(4, 6)] * 4)
    for seed in range(12):
        stepper.step({**batch_of(seed=seed), "way": seed % 2})
    summary = stepper.graph_summary()
    assert list(summary.shapes) == ["4x6 4x3 (float32 float32)", "4x6 4x3 (float32 float32) #2"]
    assert sum(summary.shapes.values()) == summary.num_replayed


def two_ways(model, batch):
    loss, weight = squares(model, batch)
    return loss * (1 + batch["way"]), weight
