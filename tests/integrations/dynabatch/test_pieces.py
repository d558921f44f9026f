"""Pieces of a batch, whatever else it holds, their joined results, and sizes that are rounded."""

import importlib

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

from batchwright.errors import ArgumentError
from batchwright.integrations.dynabatch import merge_outputs, split_batch, split_inputs_dict

from .packages import PACKAGES


def test_tensors_and_lists_of_examples_are_cut_and_the_rest_is_copied():
    batch = {
        "input_ids": torch.arange(10).reshape(5, 2),
        "names": list("abcde"),
        "sizes": (1, 2, 3, 4, 5),
        "two": [1, 2],
        "scale": 0.5,
        "nested": {"mask": torch.ones(5, 3)},
    }
    pieces = split_inputs_dict(batch, 2)
    assert [len(piece["input_ids"]) for piece in pieces] == [2, 2, 1]
    assert [piece["names"] for piece in pieces] == [["a", "b"], ["c", "d"], ["e"]]
    assert pieces[2]["sizes"] == (5,)
    assert (pieces[0]["two"], pieces[0]["scale"]) == ([1, 2], 0.5)
    assert pieces[1]["nested"]["mask"].shape == (2, 3)


@pytest.mark.parametrize("split", [split_batch, split_inputs_dict])
def test_arrays_are_cut_as_tensors_are(split):
    ids = np.arange(10).reshape(5, 2)
    batch = {"input_ids": ids, "weights": np.arange(5.0), "names": np.array(list("abcde"), dtype=object)}
    pieces = split({**batch, "scale": np.array(2.0)}, 2)
    for name, array in batch.items():
        assert all(isinstance(piece[name], np.ndarray) for piece in pieces)
        assert [len(piece[name]) for piece in pieces] == [2, 2, 1]
        assert np.array_equal(np.concatenate([piece[name] for piece in pieces]), array)
    assert [float(piece["scale"]) for piece in pieces] == [2.0, 2.0, 2.0]
    with pytest.raises(ArgumentError, match=r"\['spare'\] of shape \(3,\) cannot be cut into pieces of 5 examples"):
        split({"input_ids": ids, "spare": np.arange(3)}, 2)


@pytest.mark.parametrize("split", [split_batch, split_inputs_dict])
def test_columns_of_pandas_are_cut_by_their_rows_whatever_their_index(split):
    pandas = pytest.importorskip("pandas")
    column = pandas.Series(list("abc"), index=[2, 1, 0])
    frame = pandas.DataFrame({"left": [1, 2, 3], "right": [4, 5, 6]}, index=[2, 1, 0])
    pieces = split({"input_ids": torch.zeros(3, 2), "names": column, "boxes": frame}, 2)
    assert [piece["names"].tolist() for piece in pieces] == [["a", "b"], ["c"]]
    assert [piece["boxes"].to_numpy().tolist() for piece in pieces] == [[[1, 4], [2, 5]], [[3, 6]]]
    assert [len(piece["input_ids"]) for piece in split({"input_ids": column}, 2)] == [2, 1]
    with pytest.raises(ArgumentError, match=r"\['names'\] is a Series"):
        split({"input_ids": torch.zeros(4, 2), "names": column}, 2)


@pytest.mark.parametrize("split", [split_batch, split_inputs_dict])
def test_columns_of_data_sets_encodings_and_lists_of_tensors_are_cut(split):
    datasets = pytest.importorskip("datasets")
    boxes = [torch.ones(number, 4) for number in (1, 4, 2)]
    column = datasets.Dataset.from_dict({"text": ["a", "b", "c"]})["text"]
    batch = BatchEncoding({"input_ids": torch.zeros(3, 2), "boxes": boxes, "texts": column, "numbers": range(3)})
    first, last = split(batch, 2)
    assert [tuple(box.shape) for box in first["boxes"]] == [(1, 4), (4, 4)]
    assert (first["texts"], last["texts"]) == (["a", "b"], ["c"])
    assert (first["numbers"], last["numbers"]) == ([0, 1], [2])
    assert type(first) is dict


def test_a_set_has_no_rows_and_is_refused():
    with pytest.raises(ArgumentError, match=r"\['tags'\] is a set, and it is not known what a row of it is"):
        split_batch({"input_ids": torch.zeros(3, 2), "tags": {"a"}}, 2)


def test_a_tensor_without_an_axis_goes_into_every_piece():
    pieces = split_inputs_dict({"input_ids": torch.zeros(3, 2), "weight": torch.tensor(7.0)}, 2)
    assert [float(piece["weight"]) for piece in pieces] == [7.0, 7.0]


@pytest.mark.parametrize("num", [2, 3, 4])
def test_positions_with_the_examples_on_the_second_axis_are_cut_there(num):
    # Three kinds of position, and in one of the cases as many examples.
    positions = torch.arange(3 * num * 5).reshape(3, num, 5)
    pieces = split_inputs_dict({"input_ids": torch.zeros(num, 5), "position_ids": positions}, 2)
    assert torch.equal(torch.cat([piece["position_ids"] for piece in pieces], dim=1), positions)
    assert [piece["position_ids"].shape[1] for piece in pieces] == [len(piece["input_ids"]) for piece in pieces]


def test_a_tensor_that_belongs_to_no_examples_is_refused():
    with pytest.raises(ArgumentError, match=r"\['pixel_values'\] of shape \(7, 4\)"):
        split_inputs_dict({"input_ids": torch.zeros(3, 2), "pixel_values": torch.zeros(7, 4)}, 2)


def test_another_key_may_say_how_many_examples_there_are():
    pieces = split_inputs_dict({"pixel_values": torch.zeros(3, 2)}, 1, batch_size_key="pixel_values")
    assert len(pieces) == 3
    with pytest.raises(KeyError, match="Batch size key `input_ids` not found"):
        split_inputs_dict({"pixel_values": torch.zeros(3, 2)}, 1)


@pytest.mark.parametrize(
    ("batch", "reason"),
    [
        ({"input_ids": torch.tensor(1)}, "'input_ids' must have one row per example, got Tensor without any axis"),
        ({"input_ids": 3}, "'input_ids' must have one row per example, got int without any axis"),
        ([torch.ones(3, 2)], "must be a dict of inputs by name, got list"),
    ],
    ids=["no axis", "number", "list"],
)
def test_a_batch_without_rows_is_refused_in_a_sentence(batch, reason):
    with pytest.raises(ArgumentError, match=reason):
        split_batch(batch, 2)


@pytest.mark.parametrize("size", [0, -1, 1.5])
def test_a_piece_has_at_least_one_example(size):
    with pytest.raises(ArgumentError, match="chunk_size"):
        split_batch({"input_ids": torch.zeros(3, 2)}, size)


def test_split_and_merge_give_the_whole_again():
    ids = torch.arange(14).reshape(7, 2)
    pieces = [piece["input_ids"] for piece in split_batch({"input_ids": ids}, 3)]
    assert torch.equal(merge_outputs(pieces, pad_token_id=0), ids)


def test_results_of_unequal_width_are_padded_on_the_right():
    merged = merge_outputs([torch.tensor([[1]]), torch.tensor([[2, 3, 4], [5, 6, 7]])], pad_token_id=9)
    assert merged.tolist() == [[1, 9, 9], [2, 3, 4], [5, 6, 7]]
    assert merge_outputs([], pad_token_id=0) is None


# Numbers of examples


FRIENDLY = sorted({2**n for n in range(10)} | {3 * 2**n for n in range(9)})


@pytest.mark.parametrize("package", PACKAGES)
def test_sizes_are_rounded_down_to_even_and_to_friendly_ones(package):
    utils = importlib.import_module(f"{package}.utils")
    for size in range(1, 513):
        assert utils.get_hardware_friendly_batch_size(size) == max(good for good in FRIENDLY if good <= size)
        assert utils.get_even_batch_size(size) == max(size // 2 * 2, 1)
    for function in (utils.get_hardware_friendly_batch_size, utils.get_even_batch_size):
        for size in (0, -1):
            with pytest.raises(ValueError, match=r"at least 1|of 1 or more"):
                function(size)
