"""Filler rows whose labels are of other types than usual."""

import numpy as np
import pytest
import torch

from batchwright.errors import ArgumentError
from batchwright.plan import PadTo
from batchwright.step import PadCollator, without_filler

CATALOGUE = PadTo(((4,),), (3,))


def collate(example, **options):
    return PadCollator(pad_to=CATALOGUE, fill_rows=True, **options)([{"input_ids": [1, 2], **example}])


def test_a_small_unsigned_label_is_ignored_in_filler():
    # "a whole number is -100 or its value in pad_values". Expected: a value that is no class, or a refusal.
    # Found: np.uint8(3), the usual kind of image labels, stays 3 in filler, so a loss counts it.
    try:
        batch = collate({"label": np.uint8(3)})
    except ArgumentError:
        return
    assert (batch["label"][1:].long() != 3).all()


def test_an_unsigned_label_has_the_padding_that_was_asked_for_in_filler():
    # Expected: 255, 255. Found: 3, 3.
    assert collate({"label": np.uint8(3)}, pad_values={"label": 255})["label"].tolist() == [3, 255, 255]


def test_a_padding_that_a_label_cannot_hold_is_refused_with_a_sentence():
    # Expected: ArgumentError. Found: RuntimeError of torch, "value cannot be converted to type int8_t without overflow".
    with pytest.raises(ArgumentError):
        collate({"label": np.int8(3)}, pad_values={"label": 200})


@pytest.mark.parametrize("labels", [np.array([3, 4], dtype=np.uint8), np.array([True, False])])
def test_labels_whose_type_has_no_ignored_value_are_not_padded_with_a_class(labels):
    # "by default -100 for labels". Expected: -100 in a wider type, or a refusal.
    # Found: 156 (-100 modulo 256) for uint8, True for bool: padding and filler become labels that count.
    try:
        batch = collate({"labels": labels})
    except ArgumentError:
        return
    assert (batch["labels"][:, 2:].long() == -100).all()


@pytest.mark.parametrize("name", ["shift_labels", "label"])
def test_label_sequences_are_ignored_in_filler(name):
    # "In filler, the label fields are ignored". Expected: -100. Found: 0, which is a class.
    batch = collate({name: [3, 4]})
    assert (batch[name][1:] == -100).all()


def test_label_fields_of_none_are_refused_when_the_collator_is_made():
    # Expected: ArgumentError that says to give (). Found: TypeError in the first short batch.
    with pytest.raises(ArgumentError):
        collate({"label": 3}, label_fields=None)


def test_a_piece_that_is_all_filler_has_no_rows():
    # A filled batch that is cut into pieces may leave one of filler alone.
    # Expected: no rows, or an ArgumentError. Found: IndexError: list index out of range.
    batch = {"x": torch.arange(3), "row_weight": torch.zeros(3)}
    try:
        assert len(without_filler(batch)["x"]) == 0
    except ArgumentError:
        pass
