"""Packed rows: each example gives what it gives alone."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import batchwright as bw
from batchwright.errors import ArgumentError
from batchwright.step.collators import PackCollator


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
    for example, part in zip(examples, found, strict=True):
        torch.testing.assert_close(part, alone(model, example), rtol=1e-9, atol=1e-9)


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
