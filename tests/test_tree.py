"""Nested batches: walk through them, count and take their examples, or say why that cannot be done."""

from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate
from transformers import BatchEncoding

from batchwright._tree import Rows, join, leaves, map_leaves, num_examples, take, take_rows
from batchwright.errors import ArgumentError

from .trees import Inputs, Pair, same


class Cache:
    """An object that nobody knows the rows of."""

    def __len__(self):
        return 3


class Frozen(OrderedDict):
    """A mapping that cannot be built from another."""

    def __init__(self):
        super().__init__()


@pytest.mark.parametrize(
    "batch",
    [
        torch.arange(3),
        {"x": torch.arange(3)},
        BatchEncoding({"x": torch.arange(3)}),
        [torch.arange(3)],
        (torch.arange(3),),
        Pair(torch.arange(3), torch.arange(3)),
        Inputs(torch.arange(3)),
        {"outer": {"inner": (torch.arange(3), torch.arange(3))}, "number": 2, 5: torch.arange(3)},
    ],
)
def test_a_batch_keeps_its_form_and_every_tensor_is_cut(batch):
    taken = take(batch, [2, 0])
    assert type(taken) is type(batch)
    assert [tensor.tolist() for tensor in leaves(taken)] == [[2, 0] for _ in leaves(batch)]
    assert num_examples(batch) == 3


def test_a_mapping_that_cannot_be_built_from_a_dict_becomes_one():
    batch = Frozen()
    batch["x"] = torch.arange(3)
    assert type(map_leaves(batch, torch.neg)) is dict


@pytest.mark.parametrize("rows", [range(1, 3), [1, 2]])
def test_neighbours_are_not_copied(rows):
    x, array = torch.arange(4), np.arange(4)
    assert take({"x": x}, rows)["x"].data_ptr() == x[1:].data_ptr()
    assert take({"x": x, "name": "a"}, rows)["x"].data_ptr() == x[1:].data_ptr()
    assert np.shares_memory(take({"x": array}, rows)["x"], array)
    assert take_rows({"x": x}, rows, 4)["x"].data_ptr() == x[1:].data_ptr()
    first, second = Rows((x,)).split([1, 3])
    assert first[0].untyped_storage().data_ptr() == second[0].untyped_storage().data_ptr() == x.data_ptr()


def test_only_plain_rows_of_tensors_are_split_in_one_go():
    assert [part["x"].tolist() for part in Rows({"x": torch.arange(3)}).split([2, 1])] == [[0, 1], [2]]
    assert Rows({"x": torch.arange(3), "name": "a"}).split([2, 1]) is None
    assert Rows(torch.arange(3)).split([2, 1]) is None
    assert Rows(BatchEncoding({"x": torch.arange(3)})).split([2, 1]) is None


# Lists and tuples: one entry per example, or fields


ARRAYS = [np.full(place + 1, place) for place in range(3)]
BOXES = [torch.full((place, 4), place) for place in (1, 3, 2)]
ENTRIES = [ARRAYS, tuple(ARRAYS), BOXES, tuple(BOXES), ["a", "b", "c"], [[1], [2, 3], []], [None, BOXES[2], None],
           [{"boxes": boxes, "id": 3} for boxes in BOXES], [object(), object(), object()]]  # fmt: skip


@pytest.mark.parametrize("entries", ENTRIES)
@pytest.mark.parametrize("indices", [range(1, 3), [2, 0]])
@pytest.mark.parametrize("wrap", [
    lambda x, entries: {"x": x, "entries": entries},
    lambda x, entries: {"x": x, "deep": {"entries": entries}},
    lambda x, entries: (x, entries),
    lambda x, entries: [x, entries],
    lambda x, entries: Pair(x, entries),
    lambda x, entries: Inputs(x, entries),
])  # fmt: skip
def test_a_list_of_one_entry_per_example_is_cut_wherever_it_stands(wrap, entries, indices):
    chosen = type(entries)(entries[index] for index in indices)
    batch = wrap(torch.arange(3), entries)
    assert same(take(batch, indices), wrap(torch.arange(3)[list(indices)], chosen))


@pytest.mark.parametrize("num", [2, 3, 4])
@pytest.mark.parametrize("num_boxes", [2, 3, 4])
def test_images_and_their_targets_are_cut_by_image_whatever_their_channels_and_boxes(num, num_boxes):
    """As many channels or boxes as images do not matter for lists in a tuple."""
    images = [torch.full((3, 4 + place, 5), place) for place in range(num)]
    targets = [{"boxes": torch.full((num_boxes, 4), place)} for place in range(num)]
    taken = take((images, targets), [num - 1])
    assert same(taken, ([images[-1]], [targets[-1]]))


@pytest.mark.parametrize("make", [lambda *columns: columns, lambda *columns: dict(zip("ab", columns, strict=True))])
def test_tuples_of_images_and_targets_are_read_alike(make):
    """Three images of three channels could be three fields, but their targets could not."""
    images = tuple(torch.full((3, 4 + place, 5), place) for place in range(3))
    targets = tuple({"boxes": boxes} for boxes in BOXES)
    assert same(take(make(images, targets), [2, 0]), make((images[2], images[0]), (targets[2], targets[0])))


def test_lists_of_texts_and_numbers_are_a_batch_without_a_tensor():
    batch = {"texts": ["a", "b", "c"], "labels": [0, 1, 0], "task": "c"}
    assert num_examples(batch) == 3
    assert take(batch, [2, 1]) == {"texts": ["c", "b"], "labels": [0, 1], "task": "c"}


def test_what_the_default_collator_makes_is_cut_field_by_field():
    examples = [(torch.full((2,), place), place, f"name {place}", (float(place), place)) for place in range(5)]
    taken = take(default_collate(examples), [4, 1])
    assert same(taken, default_collate([examples[4], examples[1]]))
    named = [{"x": torch.full((2,), row), "tags": ["a", f"b {row}"], "views": [row, -row]} for row in range(5)]
    assert same(take(default_collate(named), [4, 1]), default_collate([named[4], named[1]]))


@pytest.mark.parametrize("y", [torch.zeros(64), torch.zeros(64, 1), torch.zeros(64, 3), torch.zeros(64, 2).long()])
def test_a_list_of_tensors_of_different_kinds_or_widths_is_a_list_of_fields(y):
    """``default_collate`` makes a list of the fields ``(x, y)``."""
    taken = take([torch.zeros(64, 2), y], [5, 1, 2])
    assert type(taken) is list
    assert [len(part) for part in taken] == [3, 3]


def test_pairs_of_tokens_and_lengths_are_fields():
    source, target = (torch.arange(8).reshape(4, 2), torch.arange(4)), (torch.arange(12).reshape(4, 3), torch.arange(4))
    taken = take((source, target), [3])
    assert [part.tolist() for part in leaves(taken)] == [[[6, 7]], [3], [[9, 10, 11]], [3]]


def test_values_that_belong_to_no_example_stay_whole():
    setting = SimpleNamespace(temperature=0.5)
    batch = {"x": torch.arange(2), "flag": True, "none": None, "path": Path("/"), "size": torch.Size([7, 7]),
             "setting": setting, "dtype": torch.float16, "inner": {"scale": 2.0}, "empty": [], "fn": len}  # fmt: skip
    taken = take(batch, [1])
    assert taken.pop("x").tolist() == [1]
    assert taken == {name: value for name, value in batch.items() if name != "x"}


def test_arrays_are_cut_on_their_first_axis():
    objects = np.array([{"a": 1}, None, "text"], dtype=object)
    taken = take({"x": np.arange(6).reshape(3, 2), "objects": objects}, [2, 0])
    assert taken["x"].tolist() == [[4, 5], [0, 1]]
    assert taken["objects"].tolist() == ["text", {"a": 1}]


@pytest.mark.parametrize("indices", [range(1, 3), [2, 0]])
def test_rows_of_a_sparse_tensor_are_exact(indices):
    dense = torch.tensor([[0.0, 1, 0], [2, 0, 3], [0, 0, 0]])
    taken = take({"x": dense.to_sparse()}, indices)["x"]
    assert taken.is_sparse
    assert torch.equal(taken.to_dense(), dense[list(indices)])


# The inputs of a model


def test_rows_are_taken_in_any_order():
    batch = {"x": torch.arange(4), "name": ("a", "b", "c", "d"), "scale": torch.tensor(2.0), "array": np.arange(4)}
    taken = take_rows(batch, [3, 0], 4)
    assert taken["x"].tolist() == taken["array"].tolist() == [3, 0]
    assert (taken["name"], float(taken["scale"])) == (("d", "a"), 2.0)


def test_the_axis_of_the_examples_is_found_per_tensor():
    batch = {
        "input_ids": torch.arange(6).reshape(3, 2),
        "states": {"hidden": torch.arange(6).reshape(3, 2), "array": np.arange(6).reshape(3, 2)},
        "position_ids": torch.arange(18).reshape(3, 3, 2),  # as many kinds as examples: the name decides
        "image": torch.arange(18).reshape(3, 3, 2),
    }
    taken = take_rows(BatchEncoding(batch), [2, 0], 3)
    assert taken["input_ids"].tolist() == [[4, 5], [0, 1]]
    assert taken["states"]["hidden"].tolist() == taken["states"]["array"].tolist() == [[4, 5], [0, 1]]
    assert torch.equal(taken["position_ids"], batch["position_ids"][:, [2, 0]])
    assert torch.equal(taken["image"], batch["image"][[2, 0]])
    assert type(taken) is dict


def test_the_layers_of_a_cache_are_cut_layer_by_layer():
    layers = tuple((torch.arange(4) + 10 * layer, -torch.arange(4)) for layer in range(3))
    taken = take_rows({"past_key_values": layers}, [3, 1], 4)["past_key_values"]
    assert [[keys.tolist(), values.tolist()] for keys, values in taken] == [
        [[3, 1], [-3, -1]], [[13, 11], [-3, -1]], [[23, 21], [-3, -1]],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"states": {"hidden": torch.zeros(2, 5)}}, r"\['hidden'\] of shape \(2, 5\) cannot be cut into pieces of 3"),
        ({"pixel_values": torch.zeros(5, 3, 2)}, r"of shape \(5, 3, 2\) cannot be cut into pieces of 3"),
        ({"other": [[1], [2]]}, r"batch\['other'\] is a list of 2 entries in a batch of 3 examples"),
        ({"deep": {"other": (1, 2)}}, r"batch\['deep'\]\['other'\] is a tuple of 2 entries"),
        ({"layers": (torch.zeros(3, 2),) * 3}, r"batch\['layers'\] may be one entry per example or 3 fields"),
        ({"cache": Cache()}, r"batch\['cache'\] is a Cache, and it is not known what a row of it is"),
    ],
)  # fmt: skip
def test_an_input_whose_rows_are_not_known_is_named(inputs, message):
    with pytest.raises(ArgumentError, match=message):
        take_rows(inputs, [0], 3)


# Joining


@pytest.mark.parametrize(
    "batch",
    [
        torch.arange(6).reshape(6, 1),
        (torch.arange(6), np.arange(12).reshape(6, 2)),
        {"x": torch.arange(6), "names": list("abcdef"), "scale": 2.0, "none": None},
        Pair(torch.arange(6), torch.zeros(6, 2)),
        {"inner": {"x": torch.arange(6)}, "more": Inputs(torch.arange(6), torch.ones(6))},
    ],
    ids=["tensor", "tuple", "dict", "named tuple", "nested"],
)
def test_the_parts_of_a_batch_join_to_the_batch(batch):
    joined = join([take(batch, [0, 1]), take(batch, [2]), take(batch, [3, 4, 5])])
    assert type(joined) is type(batch)
    assert same(joined, batch)


def test_encodings_join_to_an_encoding():
    joined = join([BatchEncoding({"x": torch.arange(2)}), BatchEncoding({"x": torch.arange(1)})])
    assert type(joined) is BatchEncoding
    assert joined["x"].tolist() == [0, 1, 0]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int64)),
        ({"x": torch.zeros(2)}, {"y": torch.zeros(2)}),
        ({"x": torch.zeros(2), "scale": 1}, {"x": torch.zeros(2), "scale": 2}),
        ((torch.zeros(2), torch.zeros(2)), (torch.zeros(2),)),
        ({"x": torch.zeros(2), "boxes": [torch.zeros(1), torch.zeros(3)]},) * 2,
        (torch.zeros(2), np.zeros(2)),
    ],
    ids=["width", "type", "names", "single values", "fields", "lists of tensors", "kinds"],
)
def test_batches_that_nobody_can_join_give_none(first, second):
    assert join([first, second]) is None
