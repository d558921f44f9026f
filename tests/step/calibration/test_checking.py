"""A budget counts only after the most demanding batches that it plans have run."""

import numpy as np
import pytest
import torch

import batchwright as bw
from batchwright.testing import FakeMemory

from ...thorough import crossed
from .test_finding import Machine

CAP = 32 * 2**30
VOCABULARY = 256_206


def translation_bytes(num, source, target):
    """Return the peak of a translation model with a large vocabulary: at the loss, or with all gradients."""
    activations = num * (source * 1_086_259 + target * 1_597_440)
    logits = num * target * VOCABULARY * 10
    return max(7.6e9 + activations + logits, 10.26e9 + 0.1 * activations)


def pairs(seed=0, num=2000):
    rng = np.random.default_rng(seed)
    source = np.clip(rng.lognormal(3.2, 0.8, num), 3, 256)
    target = np.clip(source * rng.lognormal(0.1, 0.35, num), 3, 256)
    return np.stack([source, target], axis=1).astype(int)


class Translation(Machine):
    """The memory of a translation model; more than ``most_items`` examples fail at any length."""

    def __init__(self, lengths, *, bytes_of=translation_bytes, most_items=10**9):
        super().__init__(lengths, constant=0.087, per_token=3.4e-6)
        self.memory = FakeMemory(CAP, bytes_of=bytes_of)
        self.bytes_of, self.most_items = bytes_of, most_items

    def run(self, batch):
        if batch[0] > self.most_items:
            raise torch.OutOfMemoryError("too many items")
        super().run(batch)

    def planned(self, **options):
        """Return the planned shapes, and the peak of each as a share of the memory."""
        shapes = bw.plan_batches(self.lengths, self.find(**options)).shapes
        return shapes, np.array([self.bytes_of(*shape) for shape in shapes.tolist()]) / CAP


@pytest.mark.parametrize(("seed", "wants_knee"), crossed([0, 1], [True, False]))
def test_a_peak_that_small_batches_have_elsewhere_is_told_apart(seed, wants_knee):
    """Small batches peak with all gradients: one line through both kinds would be too flat, and plan too much."""
    machine = Translation(pairs(seed))
    _, peaks = machine.planned(wants_knee=wants_knee)
    assert 0.8 < peaks.max() <= 0.9
    assert machine.memory.peak_bytes <= CAP


@pytest.mark.parametrize(("most_items", "wants_knee"), crossed([100, 300], [True, False]))
def test_examples_that_fail_by_their_number_are_bounded_and_others_are_not(most_items, wants_knee):
    free, _ = Translation(pairs()).planned(wants_knee=wants_knee)
    shapes, peaks = Translation(pairs(), most_items=most_items).planned(wants_knee=wants_knee)
    assert shapes[:, 0].max() <= most_items
    assert shapes[:, 0].max() >= 0.7 * min(most_items, free[:, 0].max())
    assert 0.75 < peaks.max() <= 0.9


def test_more_items_than_ever_ran_are_run_before_they_count():
    """321 examples of a middle length were planned, far below the limit of memory, after at most 265 had run."""
    lengths = np.random.default_rng(0).integers(5, 300, (1000, 1))
    machine = Translation(lengths, bytes_of=lambda num, side: num * (100 * side + 2 * side**2), most_items=300)
    machine.memory = FakeMemory(20_000_000, used_bytes=1000, bytes_of=machine.bytes_of)
    shapes, _ = machine.planned(wants_knee=False)
    assert 200 < shapes[:, 0].max() <= 300


@pytest.mark.parametrize(("power", "factor"), [(3, 150.0), (4, 1.0)])
@pytest.mark.parametrize("seed", [2, 5])
def test_what_the_fit_has_no_term_for_is_seen_before_it_counts(seed, power, factor):
    """Memory that grows with the cube of a side: the terms of the fit have squares at most.

    Without full batches of all lengths, 1.06 and 1.3 of the memory would be planned for the cube.
    """

    def steep(num, source, target):
        return 4e9 + num * (source * 1e6 + target * 2e6 + factor * float(source) ** power)

    machine = Translation(pairs(seed), bytes_of=steep)
    shapes, peaks = machine.planned(wants_knee=False)
    assert peaks.max() <= 0.9 * 1.01
    assert machine.lengths.shape[0] > 5 * len(shapes)  # and batches are no single examples
    assert peaks.max() > 0.75


def test_nothing_is_checked_where_memory_is_not_measured():
    machine = Machine(pairs())
    machine.find(monitored=False)
    assert len(machine.shapes) <= 10
