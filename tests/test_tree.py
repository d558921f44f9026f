"""Nested batches: walk through them, count and take their examples."""

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from transformers import BatchEncoding

from batchwright._tree import leaves, map_leaves, num_examples, split, take, take_rows
from batchwright.errors import ArgumentError

Pair = namedtuple("Pair", ["source", "target"])


@dataclass(frozen=True)
class Inputs:
    tokens: torch.Tensor
    name: str = "a"


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
        {"outer": {"inner": [torch.arange(3)]}, "number": 2},
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


def test_a_list_of_one_value_per_example_is_cut_with_the_tensors():
    batch = {"x": torch.arange(4), "texts": ["a", "b", "c", "d"], "note": ["all"], "names": ("p", "q", "r", "s")}
    for rows in ([1, 3], [1, 2]):
        taken = take(batch, rows)
        assert taken["texts"] == [batch["texts"][row] for row in rows]
        assert (taken["note"], taken["names"]) == (["all"], ("p", "q", "r", "s"))


def test_a_list_of_tensors_is_cut_tensor_by_tensor_or_indexed_by_example():
    batch = {"layers": [torch.arange(3), torch.arange(3) + 10, torch.arange(3) + 20]}
    assert [part.tolist() for part in take(batch, [0, 2])["layers"]] == [[0, 2], [10, 12], [20, 22]]
    assert [part.tolist() for part in take_rows(batch, [0, 2], 3)["layers"]] == [[0, 1, 2], [20, 21, 22]]


@pytest.mark.parametrize("rows", [range(1, 3), [1, 2]])
def test_neighbours_are_not_copied(rows):
    x = torch.arange(4)
    assert take({"x": x}, rows)["x"].data_ptr() == x[1:].data_ptr()
    assert take_rows({"x": x}, rows, 4)["x"].data_ptr() == x[1:].data_ptr()
    first, second = split((x,), [1, 3])
    assert first[0].untyped_storage().data_ptr() == second[0].untyped_storage().data_ptr() == x.data_ptr()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": torch.tensor(3)}, "no dimension to split on"),
        ({"x": "text"}, "holds no tensor"),
        ({"x": torch.zeros(2), "y": torch.zeros(3)}, r"got \[2, 3\]"),
        ({"x": torch.zeros(0, 2)}, "is empty"),
    ],
)
def test_a_batch_without_a_number_of_examples_is_refused(batch, message):
    with pytest.raises(ArgumentError, match=message):
        num_examples(batch)


def test_only_plain_rows_of_tensors_are_split_in_one_go():
    assert [part["x"].tolist() for part in split({"x": torch.arange(3)}, [2, 1])] == [[0, 1], [2]]
    assert split({"x": torch.arange(3), "name": "a"}, [2, 1]) is None
    assert split(torch.arange(3), [2, 1]) is None
    assert split(BatchEncoding({"x": torch.arange(3)}), [2, 1]) is None


def test_rows_are_taken_in_any_order():
    batch = {"x": torch.arange(4), "name": ("a", "b", "c", "d"), "other": [1, 2], "scale": torch.tensor(2.0)}
    taken = take_rows(batch, [3, 0], 4)
    assert taken["x"].tolist() == [3, 0]
    assert (taken["name"], taken["other"], float(taken["scale"])) == (("d", "a"), [1, 2], 2.0)


def test_the_axis_of_the_examples_is_found_per_tensor():
    batch = {
        "input_ids": torch.arange(6).reshape(3, 2),
        "states": {"hidden": torch.arange(6).reshape(2, 3)},
        "position_ids": torch.arange(18).reshape(3, 3, 2),  # as many kinds as examples: the name decides
        "image": torch.arange(18).reshape(3, 3, 2),
    }
    taken = take_rows(BatchEncoding(batch), [2, 0], 3)
    assert taken["input_ids"].tolist() == [[4, 5], [0, 1]]
    assert taken["states"]["hidden"].tolist() == [[2, 0], [5, 3]]
    assert torch.equal(taken["position_ids"], batch["position_ids"][:, [2, 0]])
    assert torch.equal(taken["image"], batch["image"][[2, 0]])
    assert type(taken) is dict


def test_a_tensor_without_an_axis_for_the_examples_is_named():
    with pytest.raises(ArgumentError, match=r"'states.hidden' of shape \(2, 5\) cannot be cut into pieces of 3"):
        take_rows({"states": {"hidden": torch.zeros(2, 5)}}, [0], 3)
