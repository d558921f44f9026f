"""Pieces of a batch, whatever else lies in it, and their results put together."""

import pytest
import torch

from batchwright.errors import ArgumentError
from batchwright.integrations.dynabatch import merge_outputs, split_batch, split_inputs_dict


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
    with pytest.raises(ArgumentError, match=r"'pixel_values' of shape \(7, 4\)"):
        split_inputs_dict({"input_ids": torch.zeros(3, 2), "pixel_values": torch.zeros(7, 4)}, 2)


def test_another_key_may_say_how_many_examples_there_are():
    pieces = split_inputs_dict({"pixel_values": torch.zeros(3, 2)}, 1, batch_size_key="pixel_values")
    assert len(pieces) == 3
    with pytest.raises(KeyError, match="Batch size key `input_ids` not found"):
        split_inputs_dict({"pixel_values": torch.zeros(3, 2)}, 1)


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
