"""Cutting a batch: what belongs to an example goes with it."""

import pytest
import torch

from batchwright._tree import split, take
from batchwright.plan import MaxItems, MaxTokens
from batchwright.step.splitting import TensorBatch, split_by_budget


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
    whole = TensorBatch(batch, lengths=None, trim=None)
    assert repr(list(whole.take_all(parts))) == repr([take(batch, part) for part in parts])


def test_what_is_cut_at_once_takes_no_memory_of_its_own():
    x = torch.arange(6)
    first, second = split((x,), [4, 2])
    assert first[0].untyped_storage().data_ptr() == second[0].untyped_storage().data_ptr() == x.data_ptr()


def test_what_is_more_than_a_row_of_tensors_is_not_cut_at_once():
    assert split({"x": torch.arange(3), "name": "a"}, [2, 1]) is None
    assert split(torch.arange(3), [2, 1]) is None


@pytest.mark.parametrize("num", range(1, 12))
@pytest.mark.parametrize("least_parts", [1, 2, 3, 5])
def test_there_are_as_many_micro_batches_as_asked_for(num, least_parts):
    parts = split_by_budget([4] * num, MaxItems(100), least_parts=least_parts)
    assert len(parts) >= min(least_parts, num)
    assert sorted(index for part in parts for index in part) == list(range(num))


def test_micro_batches_keep_the_budget_but_for_an_example_that_is_over_it_alone():
    lengths = [3, 50, 7, 12, 1, 9]
    parts = split_by_budget(lengths, MaxTokens(24))
    assert parts == [[1], [3, 5], [2, 0, 4]]  # 50, 2 × 12, 3 × 7
    assert split_by_budget(lengths, MaxTokens(24), order=range(6)) == [[0], [1], [2, 3], [4, 5]]
