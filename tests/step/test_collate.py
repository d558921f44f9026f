"""PadCollator: tensors as wide as the plan counted on."""

import pickle
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import batchwright as bw
from batchwright.errors import ArgumentError, LengthsError
from batchwright.step import PadCollator

PAIRS = np.random.default_rng(0).integers(1, 40, size=(90, 2))


def text(length, start=1):
    return list(range(start, start + int(length)))


def test_tokens_are_padded_on_the_right_with_a_mask_of_the_real_ones():
    batch = PadCollator(pad_to=bw.PadTo(multiple_of=4))([{"input_ids": [5, 6, 7]}, {"input_ids": [8]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7, 0], [8, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 0], [1, 0, 0, 0]]
    assert batch["input_ids"].dtype == batch["attention_mask"].dtype == torch.int64


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_tensors_of_a_loader_have_the_shapes_of_the_plan(num_workers):
    data = [{"input_ids": text(length)} for length in PAIRS[:, 0]]
    # No batch is short of examples: at 90 examples of one bucket, 9 batches of 10 are full.
    sampler = bw.BatchSampler(PAIRS[:, 0], bw.MaxItems(10), grouping=bw.Buckets(1))
    collate = PadCollator(pad_to=sampler.pad_to)
    shapes = sampler.plan.shapes.tolist()
    loader = DataLoader(data, batch_sampler=sampler, collate_fn=collate, num_workers=num_workers)
    assert [list(batch["input_ids"].shape) for batch in loader] == shapes
    assert len(set(map(tuple, shapes))) == 1


def test_two_axes_are_padded_separately_within_the_budget():
    data = [{"input_ids": text(source), "labels": text(target)} for source, target in PAIRS]
    sampler = bw.BatchSampler(PAIRS, bw.MaxTokens(400), grouping=bw.Buckets(3))
    collate = PadCollator(pad_to=sampler.pad_to, axis_fields=("input_ids", "labels"))
    for indices in sampler.plan:
        batch = collate([data[index] for index in indices])
        widths = sampler.pad_to(PAIRS[indices])
        assert (batch["input_ids"].shape[1], batch["labels"].shape[1]) == widths
        assert len(indices) * sum(widths) <= 400
        assert ((batch["labels"] != -100).sum(dim=1).numpy() == PAIRS[indices, 1]).all()
        assert (batch["attention_mask"].sum(dim=1).numpy() == PAIRS[indices, 0]).all()


def test_labels_are_padded_with_minus_100_whatever_other_fields_are_padded_with():
    examples = [{"input_ids": [5, 6], "labels": [1, 2]}, {"input_ids": [7], "labels": [3]}]
    batch = PadCollator(pad_values={"input_ids": 9})(examples)
    assert batch["input_ids"].tolist() == [[5, 6], [7, 9]]
    assert batch["labels"].tolist() == [[1, 2], [3, -100]]
    assert PadCollator(pad_values={"labels": 0})(examples)["labels"].tolist() == [[1, 2], [3, 0]]


def test_a_mask_of_the_examples_is_kept_and_none_can_be_asked_for():
    examples = [{"input_ids": [5, 6], "attention_mask": [0, 1]}, {"input_ids": [7], "attention_mask": [1]}]
    assert PadCollator()(examples)["attention_mask"].tolist() == [[0, 1], [1, 0]]
    assert set(PadCollator(mask_field=None)([{"input_ids": [5]}])) == {"input_ids"}
    assert set(PadCollator(mask_field="mask")([{"input_ids": [5]}])) == {"input_ids", "mask"}


def test_numbers_are_stacked():
    batch = PadCollator()([{"input_ids": [5], "label": 1, "weight": 0.5}, {"input_ids": [7], "label": 0, "weight": 1}])
    assert batch["label"].tolist() == [1, 0]
    assert batch["weight"].tolist() == [0.5, 1.0]


def test_further_fields_follow_the_axis_that_is_named():
    examples = [{"source": [1], "target": [1, 2, 3, 4, 5], "weights": [0.5, 1.0]}]
    collate = PadCollator(axis_fields=("source", "target"), same_axis={"weights": 1}, pad_to=bw.PadTo(multiple_of=4))
    batch = collate(examples)
    assert (batch["source"].shape, batch["target"].shape) == ((1, 4), (1, 8))
    assert batch["weights"].tolist() == [[0.5, 1.0, 0, 0, 0, 0, 0, 0]]


def test_features_with_more_dimensions_are_padded_along_the_first():
    examples = [{"frames": torch.ones(3, 2)}, {"frames": torch.ones(1, 2)}]
    batch = PadCollator(axis_fields=("frames",))(examples)
    assert batch["frames"].shape == (2, 3, 2)
    assert batch["frames"][1].tolist() == [[1, 1], [0, 0], [0, 0]]


def test_whole_numbers_in_one_example_do_not_cut_the_fractions_of_another():
    batch = PadCollator()([{"input_ids": [5, 6], "score": [1, 2]}, {"input_ids": [5, 6], "score": [0.5, 1.5]}])
    assert batch["score"].tolist() == [[1, 2], [0.5, 1.5]]


def test_an_empty_field_does_not_turn_whole_numbers_into_fractions():
    batch = PadCollator()([{"input_ids": [5, 6], "spans": []}, {"input_ids": [5, 6], "spans": [1]}])
    assert batch["spans"].tolist() == [[0, 0], [1, 0]]
    assert batch["spans"].dtype == torch.int64


def test_arrays_that_cannot_be_written_to_are_taken_without_a_warning():
    tokens = np.arange(1, 4)
    tokens.setflags(write=False)  # as memory-mapped files are
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert PadCollator()([{"input_ids": tokens}])["input_ids"].tolist() == [[1, 2, 3]]


def test_the_collator_pickles_small():
    sampler = bw.BatchSampler(np.resize(PAIRS, (20_000, 2)), bw.MaxTokens(400), grouping=bw.Buckets(4))
    collate = PadCollator(pad_to=sampler.pad_to, axis_fields=("input_ids", "labels"))
    text = pickle.dumps(collate)
    assert len(text) < 2_000
    assert pickle.loads(text) == collate


TOKENS = {"input_ids": [5, 6]}


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([], "at least one example"),
        ([(5, 6)], "examples must be mappings of fields, got tuple"),
        ([{"tokens": [5]}], r"have the fields \['tokens'\], not \['input_ids'\]; pass axis_fields"),
        ([TOKENS, {**TOKENS, "labels": [1]}], r"example 0 has \['input_ids'\] and example 1 has \['input_ids', 'lab"),
        ([{**TOKENS, "labels": [1]}, TOKENS], "examples of a batch need the same fields"),
        ([{**TOKENS, "labels": [1, 2, 3]}], r"'labels' has 3 tokens but is padded to 2; .* same_axis={'labels': …}"),
        ([{**TOKENS, "text": "ab"}], "field 'text' cannot become a tensor: .*; leave it out"),
        ([{**TOKENS, "labels": None}], "field 'labels' cannot become a tensor"),
        ([{"input_ids": []}], "lengths must be 1 or more"),
    ],
)
def test_examples_that_do_not_fit_are_refused(examples, message):
    with pytest.raises(ArgumentError, match=message):
        PadCollator()(examples)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"axis_fields": "input_ids"}, r"write \('input_ids',\)"),
        ({"same_axis": {"labels": 1}}, "puts 'labels' on axis 1, there are 1 from 0"),
        ({"same_axis": {"labels": -1}}, "puts 'labels' on axis -1"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        PadCollator(**options)


def test_one_axis_for_a_plan_with_two_is_refused():
    sampler = bw.BatchSampler(PAIRS, bw.MaxTokens(400), grouping=bw.Buckets(3))
    with pytest.raises(LengthsError, match="the plan has 2 axes of length, got 1"):
        PadCollator(pad_to=sampler.pad_to)([TOKENS])
