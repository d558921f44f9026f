"""Logical batches of every form: each example of a micro-batch brings what belongs to it, or the batch is refused.

The relative errors of the gradient in comments are those of the time when nested lists were handed on whole.
"""

from collections import namedtuple
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

from batchwright.errors import ArgumentError
from batchwright.step import Stepper
from batchwright.step._settings import wrap_batch
from batchwright.step.splitting import CustomBatch, ExampleBatch, TensorBatch, WholeBatch

torch.set_num_threads(1)
NUM = 8
TARGETS = [float(place**2) for place in range(NUM)]
Named = namedtuple("Named", ["x", "targets"])


@dataclass
class Batch:
    x: Any
    targets: Any


def wrapped(batch, **options):
    return wrap_batch(batch, **{"collate": None, "lengths": None, "trim": None, "split": None, **options})


def rows(num=NUM):
    return torch.randn(num, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def gradient_of_one_by_one(model, loss_fn, examples):
    """Return the gradient of the mean loss, from plain autograd on one example at a time."""
    model = deepcopy(model)
    sums = [loss_fn(model, example) for example in examples]
    (sum(loss for loss, _ in sums) / sum(weight for _, weight in sums)).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def gradient_of_stepper(model, loss_fn, batch, **options):
    model = deepcopy(model)
    before = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    report = Stepper(model, torch.optim.SGD(model.parameters(), lr=1.0), loss_fn, **options).step(batch)
    return before - nn.utils.parameters_to_vector(model.parameters()).detach(), report


def make_model():
    torch.manual_seed(0)
    return nn.Linear(3, 1, dtype=torch.float64)


def assert_exact(loss_fn, batch, examples, *, micro_batch=2, **options):
    expected = gradient_of_one_by_one(make_model(), loss_fn, examples)
    found, report = gradient_of_stepper(make_model(), loss_fn, batch, micro_batch=micro_batch, **options)
    assert float((found - expected).norm() / expected.norm()) < 1e-12
    assert report.batch_size == len(examples)
    return report


def square_loss(outputs, targets):
    """Sum the squares; zip is not strict, as a loss that pairs its inputs so is how a wrong cut stays unseen."""
    targets = torch.tensor([float(np.sum(target)) for target, _ in zip(targets, outputs)], dtype=torch.float64)  # noqa: B905
    return (outputs[:, 0] - targets).square().sum(), len(outputs)


NAMES = {f"name {place}": target for place, target in enumerate(TARGETS)}
STRUCTURES = {
    # 69 %
    "names in an inner dict": (
        lambda pick: {"x": rows()[pick], "meta": {"names": [list(NAMES)[place] for place in pick]}},
        lambda model, batch: square_loss(model(batch["x"]), [NAMES[name] for name in batch["meta"]["names"]]),
    ),
    # 96 %
    "a list of arrays in a tuple": (
        lambda pick: (rows()[pick], [np.full(place, float(place)) for place in pick]),
        lambda model, batch: square_loss(model(batch[0]), batch[1]),
    ),
    # 96 %
    "a tuple of arrays in a tuple": (
        lambda pick: (rows()[pick], tuple(np.full(place, float(place)) for place in pick)),
        lambda model, batch: square_loss(model(batch[0]), batch[1]),
    ),
    # 87 %
    "an array in a dict": (
        lambda pick: {"x": rows()[pick], "targets": np.array(TARGETS)[pick]},
        lambda model, batch: square_loss(model(batch["x"]), batch["targets"]),
    ),
    # 96 %
    "a list in a dataclass": (
        lambda pick: Batch(rows()[pick], [TARGETS[place] for place in pick]),
        lambda model, batch: square_loss(model(batch.x), batch.targets),
    ),
    "a list in a named tuple": (
        lambda pick: Named(rows()[pick], [TARGETS[place] for place in pick]),
        lambda model, batch: square_loss(model(batch.x), batch.targets),
    ),
}


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("micro_batch", [1, 3, "auto"])
def test_what_belongs_to_an_example_goes_with_it(name, micro_batch):
    make, loss_fn = STRUCTURES[name]
    assert_exact(loss_fn, make(list(range(NUM))), [make([place]) for place in range(NUM)], micro_batch=micro_batch)


def detection_loss(model, batch):
    loss, num = torch.zeros((), dtype=torch.float64), 0
    for image, target in zip(*batch, strict=True):
        channels = image.mean(dim=(1, 2))
        channels = torch.cat([channels, channels.new_zeros(3 - len(channels))])  # a cut along channels stays unseen
        loss = loss + (model(channels) - target["boxes"].sum()).square().sum()
        num += 1
    return loss, num


@pytest.mark.parametrize("num", [2, 3, 8])
@pytest.mark.parametrize("num_boxes", [lambda place: 3, lambda place: place + 1])
@pytest.mark.parametrize("kind", [list, tuple])
def test_images_of_different_sizes_and_their_boxes_are_cut_by_image(num, num_boxes, kind):
    """Lists of images were cut along their channels if every image had three boxes: 17, 81 and 101 %."""
    images = [torch.randn(3, 4 + place, 5, dtype=torch.float64) for place in range(num)]
    targets = [{"boxes": torch.rand(num_boxes(place), 4, dtype=torch.float64)} for place in range(num)]
    if kind is tuple and num_boxes(0) == num_boxes(1):  # 3 channels and 3 boxes each: the tuples may hold fields
        with pytest.raises(ArgumentError, match=r"may hold|may be one entry per example or 3 fields of 3 rows"):
            gradient_of_stepper(make_model(), detection_loss, (kind(images), kind(targets)), micro_batch=1)
        return
    examples = [([image], [target]) for image, target in zip(images, targets, strict=True)]
    assert_exact(detection_loss, (kind(images), kind(targets)), examples, micro_batch=1)


def series_loss(model, batch):
    return sum(model(series.mean(dim=0)).square().sum() for series in batch), len(batch)


def test_a_list_of_series_of_one_length_is_not_cut_in_time():
    """Six steps of eight series were taken for six examples: 36 %."""
    series = [torch.randn(6, 3, dtype=torch.float64) for _ in range(NUM)]
    with pytest.raises(ArgumentError, match=r"8 entries that may be fields or examples.*needs collate="):
        gradient_of_stepper(make_model(), series_loss, series, micro_batch=2)
    assert_exact(series_loss, series, [[one] for one in series], collate=list)


@pytest.mark.parametrize("width", [None, 1, 2])
def test_a_batch_of_the_default_collator_is_cut(width):
    model = nn.Linear(3, width or 1, dtype=torch.float64)
    targets = torch.randn(NUM, dtype=torch.float64) if width is None else torch.randn(NUM, width, dtype=torch.float64)

    def loss_fn(model, batch):
        x, y = batch
        return (model(x).reshape(y.shape) - y).square().sum(), len(x)

    (batch,) = DataLoader(TensorDataset(rows(), targets), batch_size=NUM)
    assert type(batch) is list
    found, report = gradient_of_stepper(model, loss_fn, batch, micro_batch=3)
    expected = gradient_of_one_by_one(model, loss_fn, [(rows()[[i]], targets[[i]]) for i in range(NUM)])
    assert float((found - expected).norm() / expected.norm()) < 1e-12
    assert report.num_micro_batches == 3


# Batches that are not made of rows


def packed_loss(model, batch):
    padded, lengths = pad_packed_sequence(batch, batch_first=True)
    return model(padded.sum(dim=1) / lengths[:, None]).square().sum(), len(lengths)


SEQUENCES = [torch.randn(length, 3, dtype=torch.float64) for length in (5, 2, 4, 1)]


def packed():
    return pack_sequence(SEQUENCES, enforce_sorted=False)


def split_packed(batch, indices):
    padded, lengths = pad_packed_sequence(batch, batch_first=True)
    if indices is None:
        return len(lengths)
    return pack_sequence([padded[i, : lengths[i]] for i in indices], enforce_sorted=False)


def test_a_packed_sequence_runs_whole_where_it_fits():
    report = assert_exact(packed_loss, packed(), [pack_sequence([one]) for one in SEQUENCES], micro_batch="auto")
    assert report.num_micro_batches == 1


def test_a_packed_sequence_is_refused_when_memory_runs_out():
    def loss_fn(model, batch):
        raise torch.OutOfMemoryError

    with pytest.raises(ArgumentError, match=r"has to be cut .*but batch is a PackedSequence.*give split="):
        gradient_of_stepper(make_model(), loss_fn, packed())


@pytest.mark.parametrize("options", [{"micro_batch": 2}, {"measure_noise": True}])
def test_a_packed_sequence_is_refused_when_a_cut_is_asked_for(options):
    with pytest.raises(ArgumentError, match="has to be cut into micro-batches, but batch is a PackedSequence"):
        gradient_of_stepper(make_model(), packed_loss, packed(), **options)


def test_a_packed_sequence_is_cut_by_a_split_of_its_own():
    batch = wrapped(packed(), split=split_packed)
    assert isinstance(batch, CustomBatch)
    assert batch.num_examples == 4
    parts = list(batch.take_all([[3, 0], [1, 2]]))
    assert all(isinstance(part, PackedSequence) for part in parts)
    losses = [packed_loss(make_model(), part) for part in parts]
    whole = packed_loss(make_model(), packed())
    assert sum(weight for _, weight in losses) == whole[1] == 4
    torch.testing.assert_close(sum(loss for loss, _ in losses), whole[0], rtol=1e-12, atol=0)


def split_patches(batch, indices):
    """Cut a batch whose images have different numbers of patches, as those of vision-language models have."""
    if indices is None:
        return len(batch["input_ids"])
    patches = batch["pixel_values"].split(batch["num_patches"].tolist())
    rest = {name: batch[name][indices] for name in ("input_ids", "num_patches")}
    return {"pixel_values": torch.cat([patches[i] for i in indices]), **rest}


def patches():
    input_ids = torch.arange(6).reshape(3, 2)
    return {"pixel_values": torch.arange(7), "input_ids": input_ids, "num_patches": torch.tensor([1, 4, 2])}


def test_patches_go_with_their_image_under_a_split_of_its_own():
    first, second = wrapped(patches(), split=split_patches).take_all([[2, 0], [1]])
    assert first["pixel_values"].tolist() == [5, 6, 0]
    assert first["input_ids"].tolist() == [[4, 5], [0, 1]]
    assert second["pixel_values"].tolist() == [1, 2, 3, 4]


def test_patches_without_a_split_run_whole():
    batch = wrapped(patches())
    assert isinstance(batch, WholeBatch)
    assert (batch.num_examples, batch.gains_from_sorting, batch.lengths) == (3, False, None)
    assert batch.take(range(3)) is batch.take([2, 0, 1])
    with pytest.raises(ArgumentError, match=r"batch\['pixel_values'\] has 7, batch\['input_ids'\] has 3.*give split="):
        batch.take([0])


def test_lengths_say_how_many_examples_a_whole_batch_has():
    graphs = {"nodes": torch.zeros(9, 2), "edges": torch.zeros(2, 14)}
    with pytest.raises(ArgumentError, match=r"got \[2, 9\].* If that is how the batch is meant, give split="):
        wrapped(graphs)
    batch = wrapped(graphs, lengths=lambda batch: [4, 3, 2], trim=lambda batch: batch["nodes"])
    assert (batch.num_examples, batch.lengths.tolist()) == (3, [[4], [3], [2]])
    assert batch.take(range(3)) is graphs["nodes"]


def test_lengths_of_another_number_of_examples_are_refused():
    for options in ({}, {"split": split_patches}):
        with pytest.raises(ArgumentError, match="lengths must have one row per example, 3, got 2"):
            wrapped(patches(), lengths=lambda batch: [1, 2], **options)


def test_all_examples_in_order_are_the_fields_of_the_batch_itself():
    batch = patches()
    taken = wrapped(batch, split=split_patches).take(range(3))
    assert all(taken[name] is field for name, field in batch.items())


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (lambda batch, indices: batch["input_ids"][indices], r"split\(batch, None\).* must be a whole number"),
        (lambda batch, indices: 0, r"split\(batch, None\), the number of examples, must be a whole number of 1"),
        (lambda batch, indices: 3 if indices is None else batch, "returned the whole batch for 1 of 3 examples"),
        (lambda batch, indices: 3 if indices is None else None, "returned None for 1 of 3 examples"),
    ],
)  # fmt: skip
def test_a_split_that_returns_no_part_is_refused(split, message):
    with pytest.raises(ArgumentError, match=message):
        wrapped(patches(), split=split).take([1])


# Which batch is which


@pytest.mark.parametrize("batch", [
    {"x": torch.arange(12).reshape(6, 2), "y": torch.arange(6)},
    (torch.arange(6), torch.arange(6) * 2),
    [torch.arange(6)],
    {"x": torch.arange(6), "texts": list("abcdef")},
    {"x": {"inner": torch.arange(6)}},
    torch.arange(6),
])  # fmt: skip
@pytest.mark.parametrize("parts", [[range(4), range(4, 6)], [range(6)], [[5, 0, 2], [1, 3, 4]]])
def test_micro_batches_are_the_same_taken_at_once_or_one_by_one(batch, parts):
    whole = wrapped(batch)
    assert isinstance(whole, TensorBatch)
    assert repr(list(whole.take_all(parts))) == repr([whole.take(part) for part in parts])


def test_with_collate_a_list_holds_examples_and_a_container_is_a_collated_batch():
    assert isinstance(wrapped([torch.zeros(2)], collate=list), ExampleBatch)
    assert isinstance(wrapped({"x": torch.zeros(2)}, collate=list), TensorBatch)
    assert isinstance(wrapped(torch.zeros(2), collate=list), TensorBatch)


@pytest.mark.parametrize("batch", [(torch.zeros(2), torch.zeros(2)), iter([torch.zeros(2)]), range(2)])
def test_with_collate_examples_come_in_a_list(batch):
    with pytest.raises(ArgumentError, match=r"with collate= a batch is a list of examples, got .*; use list\(batch\)"):
        wrapped(batch, collate=list)


def test_collate_and_split_are_two_ways_to_do_the_same():
    with pytest.raises(ArgumentError, match="collate= for lists of examples or split= for other batches, not both"):
        wrapped([1, 2], collate=list, split=split_patches)
