"""Two steppers from the same start, one eager and one graphed: whatever happens to one happens to the other."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from batchwright.step import Stepper
from batchwright.testing import EagerGraphs

from . import models
from .tape import TapeGraphs

# "again": the captured function runs again. "tape": recorded kernels run again, without Python. "cuda": CUDA graphs.
BACKENDS = ("again", "tape", pytest.param("cuda", marks=pytest.mark.needs_cuda))
# Those that run no Python at a replay: what they get right, the first gets right too.
BLIND = BACKENDS[1:]
SAME = 1e-6


# Fused updates can be captured on every backend.
def sgd(parameters, **options):
    return torch.optim.SGD(parameters, **{"lr": 0.1, "momentum": 0.9, "fused": True, **options})


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, **{"lr": 0.02, "weight_decay": 0.1, "fused": True, **options})


@dataclass
class Side:
    """One of two runs."""

    model: Any
    optimizer: Any
    stepper: Any
    start: list
    report: Any = None

    @property
    def values(self):
        return [value.detach() for value in self.model.state_dict().values()]

    @property
    def gradients(self):
        return [None if one.grad is None else one.grad.detach().clone() for one in self.model.parameters()]


class Twins:
    """An eager stepper and a graphed one.

    Args:
        backend: one of ``BACKENDS``.
        model: is copied for each side.
        loss_fn: of both.
        shapes: the catalogue.
        make_optimizer: makes the optimizer of a side from its parameters.
        options: of both steppers; what they must not share is made by a function, which receives the side's model.
    """

    def __init__(self, backend, model, loss_fn, shapes, *, make_optimizer=sgd, dtype=torch.float32, **options):
        self.device = torch.device("cuda", 0) if backend == "cuda" else torch.device("cpu")
        self.dtype = dtype
        self.backend = {"again": EagerGraphs, "tape": TapeGraphs, "cuda": bool}[backend]()
        graphs = True if backend == "cuda" else self.backend
        model = model.to(self.device, dtype)
        self.eager = self._side(model, make_optimizer, loss_fn, options)
        self.graphed = self._side(model, make_optimizer, loss_fn, options, graphs=graphs, shapes=shapes)
        self.sides = (self.eager, self.graphed)

    @classmethod
    def of(cls, backend, architecture, **options):
        """Return twins of an architecture by its name, with its loss and its shapes."""
        one = models.BY_NAME[architecture]
        loss_fn = models.wide(one.loss_fn) if options.get("dtype") is torch.float64 else one.loss_fn
        return cls(backend, one.make(), loss_fn, options.pop("shapes", one.shapes), **options)

    def _side(self, model, make_optimizer, loss_fn, options, **graphs):
        model = copy.deepcopy(model)
        own = {name: value(model) if getattr(value, "is_own", False) else value for name, value in options.items()}
        optimizer = make_optimizer(list(model.parameters()))
        start = [parameter.detach().clone() for parameter in model.parameters()]
        return Side(model, optimizer, Stepper(model, optimizer, loss_fn, **own, **graphs), start)

    def each(self, function):
        """Do something to both sides; returns what came back from each."""
        return [function(side) for side in self.sides]

    def here(self, batch):
        return models.to(batch, self.device, self.dtype)

    def step(self, batch, *, eager_batch=None):
        """Run one update on both sides, and return the report of the graphed one."""
        batches = (self.here(batch if eager_batch is None else eager_batch), self.here(batch))
        for side, one in zip(self.sides, batches, strict=True):
            side.report = side.stepper.step(one)
        return self.graphed.report

    def gather(self, *batches, eager_batches=None):
        """Run batches on both sides up to the gradient of the update, and return how far these differ.

        Both sides begin with the same bits, so whatever differs comes from this gradient.
        """
        with torch.no_grad():
            for mine, other in zip(self.graphed.values, self.eager.values, strict=True):
                mine.copy_(other)
        for side, given in zip(self.sides, (eager_batches or batches, batches), strict=True):
            for batch in given:
                side.stepper.accumulate(self.here(batch))
            side.stepper.reduce()
        return distance(self.graphed.gradients, self.eager.gradients)

    def update(self):
        for side in self.sides:
            side.report = side.stepper.update()
        return self.graphed.report

    def check(self, tolerance=SAME):
        """Compare parameters, buffers and reports; make sure that training has moved the model far enough to tell."""
        assert distance(self.graphed.values, self.eager.values) <= tolerance
        moved = distance(list(self.eager.model.parameters()), self.eager.start)
        assert moved > 100 * tolerance
        eager, graphed = self.eager.report, self.graphed.report
        assert graphed.loss == pytest.approx(eager.loss, rel=10 * tolerance)
        assert graphed.weight == pytest.approx(eager.weight)
        assert graphed.lr == pytest.approx(eager.lr)
        assert (graphed.grad_norm is None) is (eager.grad_norm is None)
        assert (graphed.grad_norm or 0) == pytest.approx(eager.grad_norm or 0, rel=10 * tolerance)
        assert (graphed.batch_size, graphed.num_micro_batches) == (eager.batch_size, eager.num_micro_batches)
        assert not eager.graphed
        assert all(parameter.grad is None for parameter in self.eager.model.parameters())

    def replays(self, batch, num=2):
        """Run updates on a batch until both are sure to replay what they can; return whether the last one did."""
        for _ in range(num):
            self.step(batch)
        return self.graphed.report.graphed


def own(make):
    """Mark an option that each side makes for itself."""
    make.is_own = True
    return make


def distance(found, expected):
    """Return the largest relative difference of any tensor.

    A tensor whose values should be 0, such as the gradient of the bias of keys, is measured against a thousandth of
    all of them.
    """
    assert [one is None for one in found] == [one is None for one in expected]
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(found, expected, strict=True) if b is not None]
    everything = torch.stack([b.norm() for _, b in pairs]).norm()
    least = 1e-3 * float(everything)
    return max(float((a - b).norm()) / max(float(b.norm()), least, 1e-30) for a, b in pairs)
