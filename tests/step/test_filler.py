"""Filler rows are taken out of a batch."""

import pytest
import torch

from batchwright.errors import ArgumentError
from batchwright.step import without_filler


def test_rows_that_are_no_filler_are_found_wherever_they_stand():
    batch = {"x": torch.tensor([1, 2, 3, 4]), "row_weight": torch.tensor([0.0, 1.0, 0.0, 1.0])}
    assert without_filler(batch)["x"].tolist() == [2, 4]
    full = {"x": torch.tensor([1]), "row_weight": torch.tensor([1.0])}
    assert without_filler(full) is full
    plain = {"x": torch.tensor([1])}
    assert without_filler(plain) is plain


def test_a_piece_that_is_all_filler_is_refused():
    # A filled batch that is cut into pieces may leave one of filler alone.
    with pytest.raises(
        ArgumentError, match=r"all 3 rows of the batch are filler, .*; leave it out, or take the filler"
    ):
        without_filler({"x": torch.arange(3), "row_weight": torch.zeros(3)})


@pytest.mark.parametrize(
    ("weights", "found"), [([1.0, 0.0], "list"), (1.0, "float"), (torch.ones(2, 1), "2 axes")], ids=str
)
def test_weights_that_are_no_tensor_of_rows_are_refused(weights, found):
    words = rf"batch\['row_weight'\] must be a tensor with one weight per row, got {found}"
    with pytest.raises(ArgumentError, match=words):
        without_filler({"x": torch.arange(2), "row_weight": weights})
