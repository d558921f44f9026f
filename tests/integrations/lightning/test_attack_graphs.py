"""Graphs under a Lightning Trainer: what a loss writes to the Trainer, and what the guide promises."""

import lightning.pytorch as pl
import numpy as np
import pytest

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.testing import EagerGraphs

from ...step.graphs.tape import TapeGraphs
from .test_graphs import Words, fit


class Telling(Words):
    def loss_sums(self, batch):
        loss, weight = super().loss_sums(batch)
        self.trainer.newest = loss.detach()
        return loss, weight


class Reading(pl.Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.seen.append(float(getattr(trainer, "newest", float("nan"))))


@pytest.mark.filterwarnings("ignore:forward and backward are replayed")
def test_what_a_loss_writes_to_the_trainer_is_not_lost_in_silence():
    # Expected: refused as logging and reading are, or there. Found: the stand-in for the Trainer takes the attribute
    # and is thrown away, in eager steps too: the callback never sees a value, and nothing is said.
    eager, graphed = Reading(), Reading()
    fit(Telling(), eager)
    try:
        fit(Telling(), graphed, graphs=TapeGraphs())
    except ArgumentError:
        return
    assert graphed.seen == pytest.approx(eager.seen, rel=1e-4)


def test_auto_on_a_cpu_warns_once():
    # Expected: docs/trainers.md: '"auto" runs eagerly and warns once: everywhere: a model that is not on a CUDA
    # device'. Found: no warning (the Trainer of transformers does warn).
    with pytest.warns(UserWarning, match="CUDA"):
        fit(graphs="auto")


@pytest.mark.filterwarnings("ignore:forward and backward are replayed")
def test_more_than_64_shapes_are_refused_where_shapes_are_given():
    # Expected: docs/trainers.md: "more than 64 are refused", "everywhere". Found: with shapes= nothing is counted.
    lengths = np.random.default_rng(0).integers(2, 200, size=400)
    many = bw.BatchSampler(lengths, bw.MaxTokens(300))
    assert len(np.unique(many.plan.shapes, axis=0)) > 64
    with pytest.raises(ArgumentError, match="shapes"):
        fit(graphs=EagerGraphs(), shapes=many)
