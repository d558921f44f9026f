"""Cutting a batch: what belongs to an example goes with it."""

import torch

from batchwright.step._tree import take


def test_a_list_of_one_value_an_example_is_cut_with_the_tensors():
    batch = {"x": torch.arange(4), "texts": ["a", "b", "c", "d"], "names": ("p", "q")}
    assert take(batch, [1, 3])["texts"] == ["b", "d"]
    assert take(batch, [1, 2])["texts"] == ["b", "c"]
    assert take(batch, [1, 2])["names"] == ("p", "q")


def test_a_list_of_tensors_is_cut_tensor_by_tensor():
    batch = {"layers": [torch.arange(3), torch.arange(3) + 10, torch.arange(3) + 20]}
    assert [part.tolist() for part in take(batch, [0, 2])["layers"]] == [[0, 2], [10, 12], [20, 22]]


def test_a_list_of_another_length_is_handed_through():
    assert take({"x": torch.arange(4), "note": ["all"]}, [0, 1])["note"] == ["all"]
