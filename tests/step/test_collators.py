"""PadCollator: padded tensors as wide as the plan, and filler rows that count nowhere."""

import pickle
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import batchwright as bw
from batchwright.errors import ArgumentError, LengthsError
from batchwright.step import PadCollator
from batchwright.step.filler import ROW_WEIGHT, without_filler

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


def test_a_field_that_is_longer_than_its_axis_is_told_how_to_get_one():
    examples = [{"input_ids": [5], "labels": [1, 2], "marks": [1, 0, 1]}]
    with pytest.raises(ArgumentError, match=r"own, axis_fields=\('input_ids', 'labels'\)$"):
        PadCollator()(examples)
    with pytest.raises(ArgumentError, match=r"own, axis_fields=\(.*'marks'\), or put it on another one, same_axis="):
        PadCollator(axis_fields=("input_ids", "labels"))(examples)


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
        ([(5, 6)], r"mappings of fields, got tuple; give a list of rows such as \{'input_ids'"),
        ([{"tokens": [5]}], r"have the fields \['tokens'\], not \['input_ids'\]; turn texts into token ids first, or"),
        ([TOKENS, {**TOKENS, "labels": [1]}], r"example 0 has \['input_ids'\] and example 1 has \['input_ids', 'lab"),
        ([{**TOKENS, "labels": [1]}, TOKENS], "examples of a batch need the same fields"),
        ([{**TOKENS, "labels": [1, 2, 3]}], r"'labels' has 3 tokens but is padded to 2, .* axis_fields="),
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
        ({"label_fields": "labels"}, r"label_fields must be a tuple, got 'labels'; write \('labels',\)"),
        ({"fill_rows": 1}, "fill_rows must be True or False, got 1"),
        ({"same_axis": {"labels": 1}}, "puts 'labels' on axis 1, but the axes are 0 to 0"),
        ({"same_axis": {"labels": -1}}, "puts 'labels' on axis -1"),
    ],
)
def test_settings_that_cannot_work_are_refused(options, message):
    with pytest.raises(ArgumentError, match=message):
        PadCollator(**options)


@pytest.mark.parametrize("grouping", [bw.Buckets(3), bw.WindowSort()], ids=["static shapes", "any shapes"])
def test_one_axis_for_a_plan_with_two_is_refused(grouping):
    sampler = bw.BatchSampler(PAIRS, bw.MaxTokens(400), grouping=grouping)
    message = r"the plan has 2 lengths per example, but axis_fields names 1, .*axis_fields=\('input_ids', 'labels'\)"
    with pytest.raises(LengthsError, match=message):
        PadCollator(pad_to=sampler.pad_to)([TOKENS])


# Filler rows: 4 rows of 6 tokens, or 2 rows of 12.


CATALOGUE = bw.PadTo(shapes=((6,), (12,)), sizes=(4, 2))
FILLING = PadCollator(pad_to=CATALOGUE, fill_rows=True)


def test_a_short_batch_is_filled_up_with_copies_of_its_first_row_of_weight_0():
    batch = FILLING([{"input_ids": [5, 6]}, {"input_ids": [7]}, {"input_ids": [8]}])
    assert batch["input_ids"].tolist() == [[5, 6, 0, 0, 0, 0], [7, *[0] * 5], [8, *[0] * 5], [5, 6, 0, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0, 0, 0], [1, *[0] * 5], [1, *[0] * 5], [1, 1, 0, 0, 0, 0]]
    assert batch["row_weight"].tolist() == [1, 1, 1, 0]
    assert batch["row_weight"].dtype == torch.float32
    assert batch["input_ids"].dtype == torch.int64


def test_a_flag_of_numpy_asks_for_filler_too():
    collate = PadCollator(pad_to=CATALOGUE, fill_rows=np.True_)
    assert collate == FILLING
    assert collate.fill_rows is True


def test_a_full_batch_has_weights_too_and_no_filler():
    batch = FILLING([{"input_ids": text(8)}, {"input_ids": text(3)}])
    assert batch["input_ids"].shape == (2, 12)
    assert batch["row_weight"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "lengths", [[13], [3, 13], [3] * 5, [7] * 3], ids=["too long", "one too long", "too many", "too many of them long"]
)
def test_a_batch_that_no_static_shape_holds_gets_no_filler(lengths):
    batch = FILLING([{"input_ids": text(length)} for length in lengths])
    assert batch["input_ids"].shape == (len(lengths), max(lengths))
    assert batch["row_weight"].tolist() == [1] * len(lengths)


def test_without_fill_rows_a_batch_stays_as_it_is():
    batch = PadCollator(pad_to=CATALOGUE)([{"input_ids": [5, 6]}])
    assert batch["input_ids"].shape == (1, 6)
    assert ROW_WEIGHT not in batch


def test_labels_of_filler_are_ignored_and_regression_targets_stay_copies():
    example = {"input_ids": [5, 6], "labels": [1, 2], "label": 3, "score": 0.5, "kind": 4}
    batch = FILLING([example])
    assert batch["labels"].tolist() == [[1, 2, *[-100] * 4], *[[-100] * 6] * 3]
    assert batch["label"].tolist() == [3, -100, -100, -100]
    assert batch["score"].tolist() == [0.5] * 4
    assert batch["kind"].tolist() == [4] * 4
    assert FILLING([{"input_ids": [5], "labels": 0.25}])["labels"].tolist() == [0.25] * 4


def test_the_ignored_value_is_that_of_pad_values_and_the_label_fields_can_be_named():
    example = {"input_ids": [5, 6], "labels": [1, 2], "kind": 4, "target": [3, 3]}
    options = {"pad_values": {"labels": 0, "kind": -1}, "label_fields": ("labels", "kind", "target")}
    batch = PadCollator(pad_to=CATALOGUE, fill_rows=True, **options)([example])
    assert batch["labels"].tolist() == [[1, 2, 0, 0, 0, 0], *[[0] * 6] * 3]
    assert batch["kind"].tolist() == [4, -1, -1, -1]
    assert batch["target"].tolist() == [[3, 3, 0, 0, 0, 0], *[[-100] * 6] * 3]
    batch = PadCollator(pad_to=CATALOGUE, fill_rows=True, label_fields=())([example])
    assert batch["labels"].tolist() == [[1, 2, *[-100] * 4]] * 4


LABELS = [(np.uint8(7), torch.uint8), (np.uint16(7), torch.uint16), (np.bool_(True), torch.bool), (True, torch.bool)]


@pytest.mark.parametrize(("label", "dtype"), LABELS, ids=["uint8", "uint16", "NumPy's bool", "bool"])
def test_a_label_whose_type_has_no_ignored_value_becomes_a_wider_number_in_every_batch(label, dtype):
    short, full = (FILLING([{"input_ids": [5], "label": label}] * num)["label"] for num in (1, 4))
    assert short.tolist() == [int(label), -100, -100, -100]
    assert full.tolist() == [int(label)] * 4
    assert short.dtype == full.dtype == torch.int64
    plain = PadCollator(pad_to=CATALOGUE)([{"input_ids": [5], "label": label}])["label"]
    assert plain.dtype == dtype  # nothing is ignored


def test_a_small_label_keeps_its_type_where_that_has_the_padding():
    collate = PadCollator(pad_to=CATALOGUE, fill_rows=True, pad_values={"label": 255})
    batch = collate([{"input_ids": [5], "label": np.uint8(3)}])
    assert batch["label"].tolist() == [3, 255, 255, 255]
    assert batch["label"].dtype == torch.uint8
    assert FILLING([{"input_ids": [5], "label": np.int8(3)}])["label"].dtype == torch.int8


@pytest.mark.parametrize("fill_rows", [False, True])
@pytest.mark.parametrize("labels", [np.array([3, 4], dtype=np.uint8), np.array([True, False])], ids=["uint8", "bool"])
def test_labels_whose_type_has_no_ignored_value_are_not_padded_with_a_class(labels, fill_rows):
    batch = PadCollator(pad_to=CATALOGUE, fill_rows=fill_rows)([{"input_ids": [1, 2], "labels": labels}])
    assert batch["labels"][0].tolist() == [*labels.astype(int), *[-100] * 4]
    assert (batch["labels"][1:] == -100).all()
    assert len(batch["labels"]) == (4 if fill_rows else 1)


@pytest.mark.parametrize("name", ["shift_labels", "label"])
@pytest.mark.parametrize("dtype", [np.int64, np.uint8, np.float32])
def test_label_sequences_are_ignored_in_filler(name, dtype):
    batch = FILLING([{"input_ids": [1, 2], name: np.array([3, 4], dtype=dtype)}])
    assert batch[name].tolist() == [[3, 4, 0, 0, 0, 0], *[[-100] * 6] * 3]


@pytest.mark.parametrize(
    ("field", "value", "padding", "words"),
    [
        ("label", np.int8(3), 200, "torch.int8, which cannot hold its padding 200"),
        ("labels", np.array([1], dtype=np.uint8), -1, "torch.uint8, which cannot hold its padding -1"),
        ("kinds", np.array([True]), 2, "torch.bool, which cannot hold its padding 2"),
        ("kinds", [1], 0.5, "torch.int64, which cannot hold its padding 0.5"),
        ("kinds", np.array([1], dtype=np.float16), 1e6, "torch.float16, which cannot hold its padding 1000000.0"),
    ],
    ids=["int8", "uint8", "bool", "half", "float16"],
)
def test_a_padding_that_a_type_cannot_hold_is_refused(field, value, padding, words):
    collate = PadCollator(pad_to=CATALOGUE, fill_rows=True, pad_values={field: padding})
    with pytest.raises(ArgumentError, match=f"field '{field}' is of {words}; give another one in pad_values"):
        collate([{"input_ids": [1, 2], field: value}])


@pytest.mark.parametrize("padding", [float("-inf"), float("nan"), -1e4])
def test_a_float_is_padded_with_any_value_that_it_holds(padding):
    collate = PadCollator(pad_values={"scores": padding}, pad_to=CATALOGUE)
    scores = collate([{"input_ids": [1, 2], "scores": np.array([1], dtype=np.float16)}])["scores"]
    assert scores[0, 1:].tolist() == pytest.approx([padding] * 5, nan_ok=True)


@pytest.mark.parametrize("names", [None, 3, (3,)], ids=repr)
@pytest.mark.parametrize("option", ["label_fields", "axis_fields"])
def test_fields_that_are_no_names_are_refused_when_the_collator_is_made(option, names):
    with pytest.raises(
        ArgumentError, match=rf"{option} must be a tuple of names of fields, got .*; write \(\) for none"
    ):
        PadCollator(**{option: names})


def test_features_with_more_dimensions_are_filled_too():
    batch = PadCollator(pad_to=CATALOGUE, fill_rows=True, axis_fields=("frames",))([{"frames": torch.ones(3, 2)}])
    assert batch["frames"].shape == (4, 6, 2)
    assert (batch["frames"] == batch["frames"][0]).all()


def test_every_batch_of_a_plan_is_filled_up_to_a_full_size_and_its_real_rows_are_the_examples():
    data = [{"input_ids": text(source), "labels": text(target)} for source, target in PAIRS]
    num_filled = 0
    for num, grouping in [(90, bw.Buckets(3)), (89, bw.Buckets(3)), (61, bw.Buckets((2, 2))), (7, bw.Buckets(1))]:
        sampler = bw.BatchSampler(PAIRS[:num], bw.MaxTokens(400), grouping=grouping)
        catalogue = set(zip(sampler.pad_to.sizes, sampler.pad_to.shapes, strict=True))
        fields = {"pad_to": sampler.pad_to, "axis_fields": ("input_ids", "labels")}
        filling, plain = PadCollator(**fields, fill_rows=True), PadCollator(**fields)
        for indices in sampler.plan:
            batch, expected = (collate([data[index] for index in indices]) for collate in (filling, plain))
            assert (len(batch["labels"]), (batch["input_ids"].shape[1], batch["labels"].shape[1])) in catalogue
            assert batch["row_weight"].sum() == len(indices)
            assert (batch["labels"][len(indices) :] == -100).all()
            num_filled += len(batch["labels"]) > len(indices)
            real = without_filler(batch)
            assert real.pop("row_weight").tolist() == [1] * len(indices)
            assert real.keys() == expected.keys()
            assert all(torch.equal(real[name], column) for name, column in expected.items())
    assert num_filled > 0


def by_tens(lengths):
    return (10,)


@pytest.mark.parametrize("pad_to", [bw.PadTo(), bw.PadTo(multiple_of=8), by_tens], ids=["none", "rounded", "own"])
def test_filler_without_static_shapes_is_refused(pad_to):
    with pytest.raises(ArgumentError, match=r"fill_rows=True needs a pad_to with static shapes, .*Buckets\(count\)"):
        PadCollator(pad_to=pad_to, fill_rows=True)


def test_a_field_with_the_name_of_the_weights_is_refused_only_where_filler_is_asked_for():
    example = {"input_ids": [5], "row_weight": 0.5}
    with pytest.raises(ArgumentError, match="adds the field 'row_weight', which is there already; rename yours"):
        FILLING([example])
    with pytest.raises(ArgumentError, match="adds the field 'row_weight', which is there already"):
        PadCollator(pad_to=CATALOGUE, fill_rows=True, mask_field="row_weight")([{"input_ids": [5]}])
    assert PadCollator(pad_to=CATALOGUE)([example])["row_weight"].tolist() == [0.5]
