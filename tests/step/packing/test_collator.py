"""PackCollator: packed rows in which each example gives what it gives alone, and padded batches without padding."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.step import PackCollator, PadCollator
from batchwright.step.packing.collator import flattened


def make_model(name, attention="sdpa"):
    torch.manual_seed(0)
    if name == "llama":
        config = LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            attn_implementation=attention,
        )
        return LlamaForCausalLM(config).double().eval()
    config = GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2,
        attn_implementation=attention,
    )  # fmt: skip
    return GPT2LMHeadModel(config).double().eval()


def make_examples(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [{"input_ids": torch.randint(3, 50, (length,), generator=generator).tolist()} for length in lengths]


def alone(model, example):
    """Return the logits of an example in a batch of its own."""
    return model(input_ids=torch.tensor([example["input_ids"]])).logits[0]


LAYOUTS = [
    ("positions", "sdpa", torch.bool),
    ("positions", "eager", torch.bool),
    ("block", "sdpa", torch.bool),
    ("block", "eager", torch.float64),
]


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize(("layout", "attention", "mask_dtype"), LAYOUTS)
def test_every_example_of_a_row_gives_the_logits_it_gives_alone(name, layout, attention, mask_dtype):
    model = make_model(name, attention)
    examples = make_examples([5, 3, 7, 2])
    batch = PackCollator(layout=layout, width=12, mask_dtype=mask_dtype)([examples[:2], examples[2:]])
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    found = [logits[0, :5], logits[0, 5:8], logits[1, :7], logits[1, 7:9]]
    # Llama's eager attention takes its softmax in float32, whose sums depend on the width and the processor.
    tolerance = 1e-6 if (name, attention) == ("llama", "eager") else 1e-9
    for example, part in zip(examples, found, strict=True):
        torch.testing.assert_close(part, alone(model, example), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.no_grad()
def test_the_loss_is_that_of_the_examples_one_by_one(name):
    model = make_model(name)
    examples = make_examples([5, 3, 7])
    batch = PackCollator()([examples[:2], examples[2:]])
    # A causal model predicts n - 1 tokens of an example of n: 4 + 2 + 6 of 12.
    total = sum(
        float(model(input_ids=ids, labels=ids).loss) * (ids.shape[1] - 1)
        for ids in (torch.tensor([example["input_ids"]]) for example in examples)
    )
    assert float(model(**batch).loss) == pytest.approx(total / 12, rel=1e-6)  # the loss is float32


def test_a_change_in_one_example_leaves_its_neighbours_alone():
    model = make_model("llama")
    examples = make_examples([6, 4])
    changed = [{"input_ids": [9] * 6}, examples[1]]
    before, after = (model(**PackCollator()([row])).logits[0, 6:] for row in (examples, changed))
    torch.testing.assert_close(before, after, rtol=0, atol=0)


def test_the_flat_layout_holds_every_token_once_and_the_borders():
    batch = PackCollator(layout="flat")([make_examples([5, 3]), make_examples([2], seed=1)])
    assert batch["input_ids"].shape == (1, 10)
    assert batch["cu_seq_lens_q"].tolist() == [0, 5, 8, 10]
    assert (batch["max_length_q"], batch["max_length_k"]) == (5, 5)
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 1]]


def test_labels_given_by_the_user_are_kept_but_for_the_first_of_each_example():
    row = [{"input_ids": [5, 6, 7], "labels": [-100, -100, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}]
    assert PackCollator()([row])["labels"].tolist() == [[-100, -100, 7, -100, 9]]
    assert row[1]["labels"] == [8, 9]


def test_a_planned_epoch_packs_every_token_once():
    examples = make_examples([3, 9, 4, 8, 2, 5, 7, 1])
    lengths = [len(example["input_ids"]) for example in examples]
    sampler = bw.BatchSampler(lengths, bw.MaxItems(2), grouping=bw.Packed(12))
    loader = torch.utils.data.DataLoader(
        bw.Rows(examples), batch_sampler=sampler, collate_fn=PackCollator(width=12, pad_id=0)
    )
    batches = list(loader)
    assert sum(int((batch["input_ids"] != 0).sum()) for batch in batches) == sum(lengths)
    assert {batch["input_ids"].shape[1] for batch in batches} == {12}


@pytest.mark.parametrize("rows", [[[]], [["text"]], [{"input_ids": [1]}], []])
def test_rows_that_are_none_are_refused(rows):
    with pytest.raises(ArgumentError, match="row"):
        PackCollator()(rows)


def test_a_row_longer_than_the_width_is_refused():
    with pytest.raises(ArgumentError, match="a row has 8 tokens and the width is 7; plan with Packed"):
        PackCollator(width=7)([make_examples([5, 3])])


def test_labels_of_another_length_are_refused():
    with pytest.raises(ArgumentError, match="labels must be as long as input_ids, 2, got 3"):
        PackCollator()([[{"input_ids": [1, 2], "labels": [1, 2, 3]}]])


def test_an_unknown_layout_is_refused():
    with pytest.raises(ArgumentError, match="layout must be one of"):
        PackCollator(layout="dense")


# Encoders and further fields


def test_all_labels_of_an_encoder_count():
    row = [{"input_ids": [5, 6], "labels": [1, -100]}, {"input_ids": [7], "labels": [2]}]
    for layout in ("flat", "block"):
        assert PackCollator(layout=layout, causal=False)([row])["labels"].tolist() == [[1, -100, 2]]


def test_the_block_mask_of_an_encoder_lets_tokens_see_later_ones_of_their_example():
    row = [{"input_ids": [5, 6], "labels": [1, 2]}, {"input_ids": [7], "labels": [2]}]
    mask = PackCollator(layout="block", causal=False)([row])["attention_mask"]
    assert mask[0, 0].tolist() == [[True, True, False], [True, True, False], [False, False, True]]


def test_numbers_per_token_are_packed_too():
    row = [{"input_ids": [5, 6], "token_type_ids": [0, 1]}, {"input_ids": [7], "token_type_ids": [1]}]
    assert PackCollator(layout="flat")([row])["token_type_ids"].tolist() == [[0, 1, 1]]
    assert PackCollator(width=4)([row])["token_type_ids"].tolist() == [[0, 1, 1, 0]]
    marked = [{"input_ids": [5, 6], "kinds": [3, 4]}]
    assert PackCollator(token_fields=("kinds",))([marked])["kinds"].tolist() == [[3, 4]]
    assert "kinds" not in PackCollator()([marked])


def test_the_lengths_of_a_flat_batch_are_those_of_its_examples():
    batch = PackCollator(layout="flat")([make_examples([5, 3]), make_examples([2])])
    assert PackCollator.lengths(batch) == [5, 3, 2]
    with pytest.raises(ArgumentError, match=r"takes batches of PackCollator\(layout='flat'\)"):
        PackCollator.lengths(PackCollator()([make_examples([5])]))


@pytest.mark.parametrize(
    ("options", "row", "message"),
    [
        ({"layout": "flat", "causal": False}, [{"input_ids": [5]}], "with causal=False examples need labels"),
        ({}, [{"input_ids": [5, 6], "labels": 1}], r"labels must be as long as input_ids, 2, got shape \(\)"),
        ({}, [{"input_ids": [5, 0], "attention_mask": [1, 0]}], "an example has padding, zeros in its attention_mask"),
        ({}, [{"input_ids": [5], "token_type_ids": [1, 1]}], "token_type_ids must be as long as input_ids, 1, got 2"),
        ({}, [{"input_ids": [5], "token_type_ids": [1]}, {"input_ids": [5]}], "but one has no 'token_type_ids'"),
    ],
)
def test_examples_that_cannot_be_packed_are_refused(options, row, message):
    with pytest.raises(ArgumentError, match=message):
        PackCollator(**options)([row])


def test_positions_are_for_decoders_only():
    with pytest.raises(ArgumentError, match="encoders do not look for borders in position_ids; use 'flat' with"):
        PackCollator(causal=False)
    with pytest.raises(ArgumentError, match="token_fields must be a tuple, got 'kinds'"):
        PackCollator(token_fields="kinds")


# Padded batches without their padding


@pytest.mark.parametrize("causal", [True, False])
def test_a_padded_batch_without_its_padding_is_the_flat_batch_of_its_examples(causal):
    examples = [{**example, "labels": example["input_ids"]} for example in make_examples([5, 1, 7, 3])]
    expected = PackCollator(layout="flat", causal=causal)([examples])
    found = flattened(PadCollator()(examples), causal=causal)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value


def test_padding_on_the_left_is_left_out_too():
    batch = {"input_ids": torch.tensor([[0, 5], [6, 7]]), "attention_mask": torch.tensor([[0, 1], [1, 1]])}
    found = flattened({**batch, "labels": torch.tensor([[-100, -100], [6, 7]])}, causal=True)
    assert found["input_ids"].tolist() == [[5, 6, 7]]
    assert found["labels"].tolist() == [[-100, -100, 7]]
    assert found["position_ids"].tolist() == [[0, 0, 1]]


IDS = torch.tensor([[0, 5], [6, 7]])
MASK = torch.tensor([[0, 1], [1, 1]])


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"inputs": IDS}, "no input_ids with a row per example"),
        (
            {"input_ids": IDS, "attention_mask": torch.ones(2, 1, 2, 2)},
            "does not say which tokens of each row are",
        ),
        ({"input_ids": IDS, "attention_mask": torch.zeros_like(IDS)}, "does not say which tokens of each row are"),
        ({"input_ids": IDS, "labels": torch.tensor([1, 2])}, r"labels of shape \(2,\), not a value per token"),
        ({"input_ids": IDS, "position_ids": IDS}, "position_ids that do not begin at 0"),
        # A padded model would predict token 5 from the padding before it.
        ({"input_ids": IDS, "attention_mask": MASK, "labels": IDS}, "at the first token after padding on the left"),
        (
            {"input_ids": IDS, "attention_mask": torch.tensor([[1, 0], [1, 1]]), "labels": IDS},
            "labels count at padding",
        ),
    ],
    ids=["no ids", "block mask", "empty rows", "classes", "positions", "left", "labels of padding"],
)
def test_batches_that_would_lose_something_are_not_flattened(batch, message):
    with pytest.raises(ArgumentError, match=message):
        flattened(batch, causal=True)
